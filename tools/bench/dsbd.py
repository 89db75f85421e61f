"""DSBD, beam sampling and speculative sampling: log-likelihood against tokens per second; the overhead of DSBD."""

import argparse
import math
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from engine.errors import UsageError
from models.later import later
from tools.bench.figures import draw
from tools.bench.flags import add_numbers, add_run_flags
from tools.bench.measure import in_turn, progress, spread, standard_error
from tools.bench.report import RESULTS, finish, rows_table, stamp
from tools.random_checkpoint import make

with later():
    import torch
    from safetensors.torch import load_file, save_file

    from engine import Engine
    from engine.cache.pool import PagePool
    from engine.cache.tree import TokenTree
    from engine.contract import Evaluate, Search, SearchResult, Task
    from engine.step.packing import Chunk
    from kernels.rows.reference import peaks
    from models.checkpoint.headers import Checkpoint
    from models.config import ModelShape
    from search import DSBD, BeamSample, Speculative
    from tools.bench.searches import run_alone
    from tools.bench.texts import corpus, draw_prompts

LIMIT_MS = 0.5  # target of the search's own time per round
WIDTH, DRAFT_WIDTH = 768, 256  # of the simulated pair
COLORS = {
    "dsbd": "tab:blue",
    "n-grams": "tab:purple",
    "beam-sample": "tab:orange",
    "speculative": "tab:green",
    "one-path": "tab:red",
}

FRONT_LEGEND = """*logprob/token*: mean log-probability per token of the best output under the target, with its standard
error over prompts; every output has the same length (end-of-sequence is ignored). *tokens/s*: new tokens of the best
output over {clock}, prompt included, one request at a time. *tokens/pass*: tokens by which the beams grew per pass of
the target. *n-grams*: DSBD with drafts by n-grams. *front*: no other row of its kind is both better and faster.
*speedup at equal quality*: the fastest row of DSBD, or of n-grams, that is at least as good, over the row of beam
sampling."""
OVERHEAD_LEGEND = f"""Time inside the search per round (draft layers, verification, trees; median of runs, least to
most). The target is at most {LIMIT_MS} ms at W = 5, vocabulary 32000, with the warps of the paper (top-k 10 to 20,
top-p 0.8 to 0.9). Rows of log-probabilities and the largest of each 128 of them, which the models' log-softmax returns
as well, are prepared beforehand. Without any warp all 160,000 cells of a layer stay possible."""


def add_parser(commands: Any) -> None:
    parser = commands.add_parser("dsbd", help="DSBD against beam sampling", description=__doc__)
    parts = parser.add_subparsers(required=True, metavar="PART")

    front = parts.add_parser("front", help="log-likelihood against tokens per second on a pair of models")
    pair = front.add_argument_group("pair")
    pair.add_argument("--model", metavar="DIR", help="the target")
    pair.add_argument("--draft", metavar="DIR")
    pair.add_argument("--simulate", type=float, metavar="X", help="instead: a 134M random target that an 18M draft "
                      "agrees with, but for what context adds to its logits, of deviation X (try 0.8)")  # fmt: skip
    add_numbers(
        front,
        prompts=(24, "drawn from the target"),
        prompt_tokens=16,
        new_tokens=64,
        gamma=[3],
        draft_beams=[2, 3, 4, 5, 6],
        threshold=[0.7, 0.9],
        min_width=[1, 2, 3],
        beams=([1, 2, 3, 4], "of beam sampling"),
        corpus_tokens=(0, "also draft by n-grams, counted in this many tokens that the target draws; 0: no n-grams"),
        temperature=1.0,
        top_k=20,
        top_p=0.9,
    )
    front.add_argument("--drafts", nargs="+", help="ways of drawing (the default)")
    front.add_argument("--figure", nargs="?", const="", metavar="FILE", help="an SVG (docs/results/dsbd-NAME.svg)")
    add_run_flags(front, "dsbd", "auto", run_front)

    overhead = parts.add_parser("overhead", help="milliseconds of search per round, without a model")
    add_numbers(
        overhead, beams=(5, "drafts per layer, and the fixed width"), gamma=3, vocab=32000, new_tokens=64, runs=9
    )
    add_run_flags(overhead, "dsbd", None, run_overhead)


# --- quality against speed ---


def run_front(args: argparse.Namespace, argv: Sequence[str]) -> dict[str, Any]:
    """Measure and report."""
    made = stamp(argv)
    with pair(args) as (engine, name, label, sizes), tempfile.TemporaryDirectory(prefix="bench-") as folder:
        store = corpus(engine, args.corpus_tokens, Path(folder) / "store") if args.corpus_tokens else None
        prompts = draw_prompts(engine, args.prompts, args.prompt_tokens, 0)
        rows = measure(engine, searches(args, store), prompts, args.new_tokens)
    ratios = speedups(rows)
    body = front_report(args, label, sizes, rows, ratios)
    result = {"model": label, "rows": rows, "speedups": ratios}
    if args.figure is not None:
        path = Path(args.figure) if args.figure else RESULTS / f"dsbd-{name}.svg"
        draw(path, (7, 4.5), lambda figure: paint(figure, rows, label))
        body += f"\n\n![log-likelihood against tokens per second]({path.name})"
    finish(f"dsbd-{name}", made, body, result, args.save)
    return result


def front_report(
    args: argparse.Namespace,
    label: str,
    sizes: Sequence[int],
    rows: Sequence[dict[str, Any]],
    ratios: Sequence[dict[str, Any]],
    clock: str = "wall time",
) -> str:
    """Report the setting, all rows, and the speeds at equal quality; `clock` says what times of `measure` are."""
    rows = [row | {"star": "*" if row["front"] else ""} for row in rows]
    return "\n\n".join([
        f"{label} ({sizes[0] / 1e6:.1f}M and {sizes[1] / 1e6:.1f}M parameters); {args.prompts} prompts of "
        f"{args.prompt_tokens} tokens, {args.new_tokens} new tokens; temperature {args.temperature:g}, "
        f"top-k {args.top_k}, top-p {args.top_p:g}.",
        rows_table(rows, {
            "search": "{label}", "logprob/token": "{quality:.4f}", "s.e.": "{error:.4f}", "tokens/s": "{speed:.1f}",
            "tokens/pass": "{tokens_per_pass:.2f}", "draft s": "{draft_seconds:.1f}",
            "target s": "{target_seconds:.1f}", "front": "{star}"}),
        rows_table(ratios, {
            "beam sampling": "{beams}", "logprob/token": "{quality:.4f}", "tokens/s": "{speed:.1f}",
            "DSBD at least as good": "{by}", "speedup at equal quality": "{text}"}),
        FRONT_LEGEND.format(clock=clock),
    ])  # fmt: skip


def searches(args: argparse.Namespace, store: Path | None = None) -> list[tuple[str, Search]]:
    """The searches to compare, with labels; a store adds those whose drafts are n-grams."""
    warp = {"temperature": args.temperature, "top_k": args.top_k, "top_p": args.top_p}
    kinds = args.drafts or [DSBD.drafts]
    found: list[tuple[str, Search]] = [(f"beam-sample W={n}", BeamSample(beams=n, **warp)) for n in args.beams]
    found += [(f"speculative gamma={n}", Speculative(gamma=n, **warp)) for n in args.gamma]
    for gamma, kind, n in ((g, k, n) for g in args.gamma for k in kinds for n in args.draft_beams):
        for t, least in ((t, w) for t in args.threshold for w in args.min_width if w <= n):
            label = f"dsbd W_S={n} t={t:g} W_min={least}"
            label += f" gamma={gamma}" if len(args.gamma) > 1 else ""
            label += f" {kind}" if len(kinds) > 1 else ""
            options = {"gamma": gamma, "threshold": t, "min_width": least, "drafts": kind}
            found.append((label, DSBD(draft_beams=n, **options, **warp)))
            if store is not None:
                label = label.replace("dsbd", "n-grams")
                found.append((label, DSBD(draft_beams=n, drafter="ngram", store=store, **options, **warp)))
    return found


def measure(
    engine: Engine,
    searches: Sequence[tuple[str, Search]],
    prompts: Sequence[list[int]],
    new_tokens: int,
    clock: Callable[[], float] = time.perf_counter,
) -> list[dict[str, Any]]:
    """All searches in turn on every prompt, timed by a clock; the seconds of draft and target are those of the wall."""
    for _, search in (searches[0], searches[-1]):
        engine.generate(prompts[:1], search, max_new_tokens=8, ignore_eos=True)  # warm up

    def run(search: Search, i: int) -> tuple[float, SearchResult]:
        began = clock()
        [result] = engine.generate([prompts[i]], replace(search, seed=i), max_new_tokens=new_tokens, ignore_eos=True)  # type: ignore[type-var]
        return clock() - began, result

    found = in_turn({label: partial(run, search) for label, search in searches}, len(prompts), what="prompt")
    rows = []
    for label, runs in found.items():
        qualities = [(r.outputs[0].logprob or 0.0) / len(r.outputs[0].token_ids) for _, r in runs]
        seconds, tokens = sum(s for s, _ in runs), sum(len(r.outputs[0].token_ids) for _, r in runs)
        passes = sum(r.stats["forward_passes"] for _, r in runs)
        rows.append({
            "label": label,
            "search": label.split()[0],
            "quality": statistics.mean(qualities),
            "error": standard_error(qualities),
            "speed": tokens / seconds,
            "seconds": seconds,
            "tokens_per_pass": tokens / passes,
            "draft_seconds": sum(r.stats.get("draft_seconds", 0.0) for _, r in runs),
            "target_seconds": sum(r.stats.get("target_seconds", s) for s, r in runs),
            "front": False,
        })  # fmt: skip
    for kind in COLORS:
        mark_front([row for row in rows if row["search"] == kind])
    return rows


def mark_front(rows: Sequence[dict[str, Any]]) -> None:
    """Mark the rows that no other row beats in both quality and speed."""
    for row in rows:
        beaten = any(
            o["quality"] >= row["quality"] and o["speed"] >= row["speed"] and o is not row
            and (o["quality"], o["speed"]) != (row["quality"], row["speed"])
            for o in rows
        )  # fmt: skip
        row["front"] = not beaten


def speedups(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Compare each row of beam sampling with the fastest row of DSBD, then of DSBD with n-grams, that is as good."""
    found = []
    for kind in ("dsbd", "n-grams"):
        mine = [row for row in rows if row["search"] == kind]
        for row in (row for row in rows if mine and row["search"] == "beam-sample"):
            good = [o for o in mine if o["quality"] >= row["quality"]]
            best = max(good, key=lambda o: o["speed"], default=None)
            ratio = best["speed"] / row["speed"] if best else None
            text, by = (f"{ratio:.2f}", best["label"]) if best and ratio else ("none", f"none of {kind}")
            beams = row["label"].split("=")[1]
            found.append({"beams": beams, "quality": row["quality"], "speed": row["speed"], "by": by, "ratio": ratio,
                          "kind": kind})  # fmt: skip
            found[-1]["text"] = text
    return found


def paint(figure: Any, rows: Sequence[dict[str, Any]], label: str) -> None:
    """The figure: points, and the fronts as lines."""
    axes = figure.subplots()
    for kind, color in COLORS.items():
        mine = [row for row in rows if row["search"] == kind]
        x, y = [row["speed"] for row in mine], [row["quality"] for row in mine]
        axes.scatter(x, y, s=18, color=color, alpha=0.5)
        front = sorted((row["speed"], row["quality"]) for row in mine if row["front"])
        if front:
            axes.plot([s for s, _ in front], [q for _, q in front], color=color, marker="o", label=kind)
    if not all(row["front"] for row in rows):
        axes.scatter([], [], s=18, color="grey", alpha=0.5, label="small: beaten by another setting of the search")
    axes.set(xlabel="tokens per second", ylabel="log-probability per token", title=label)
    axes.grid(alpha=0.3)
    figure.legend(loc="outside lower center", ncols=3, fontsize=8)


# --- pairs ---


@contextmanager
def pair(args: argparse.Namespace) -> Iterator[tuple[Engine, str, str, list[int]]]:
    """The engine with its draft, a short and a long name of the pair, and the parameters of both."""
    options = {"dtype": args.dtype, "threads": args.threads}
    if args.simulate is None:
        if args.model is None or args.draft is None:
            raise UsageError("which pair?", remedy="give --model DIR and --draft DIR, or --simulate 0.8")
        names = [Path(folder).resolve().name for folder in (args.model, args.draft)]
        sizes = [parameters(folder) for folder in (args.model, args.draft)]
        engine = Engine.load(args.model, draft=args.draft, **options)
        yield engine, "-".join(names), f"{names[0]}, drafts by {names[1]}", sizes
        return
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        progress("making the pair")
        target, draft = simulate(Path(folder), args.simulate)
        label = f"simulated pair, context logits of deviation {args.simulate:g}"
        yield Engine.load(target, draft=draft, **options), "simulated", label, [parameters(target), parameters(draft)]


def parameters(folder: str | Path) -> int:
    """Numbers in a checkpoint."""
    return sum(math.prod(tensor.shape) for tensor in Checkpoint.open(folder).tensors.values())


def simulate(folder: Path, deviation: float, *, layers: int = 12, vocab: int = 32000) -> tuple[Path, Path]:
    """A random target, and a draft that computes the part of its logits that depends on the last token alone.

    The first part of the target's residual stream is left as the embedding made it, and its layers write into the rest
    only: logits are those of a bi-gram model, of the usual deviation, plus what context adds, of the deviation given.
    The draft has the embedding's part and the head's columns for it, and layers that cost time but write nothing. Both
    do all the work of models of their shapes; only their agreement is made.
    """
    target, draft = folder / "target", folder / "draft"
    make(target, layers=layers, width=WIDTH, heads=12, vocab=vocab)
    make(draft, layers=2, width=DRAFT_WIDTH, mlp=DRAFT_WIDTH * 8 // 3, heads=4, vocab=vocab, seed=1)
    weights, small = (load_file(path / "model.safetensors") for path in (target, draft))
    weights["model.embed_tokens.weight"][:, DRAFT_WIDTH:] = 0
    for tensors, rows in ((weights, slice(0, DRAFT_WIDTH)), (small, slice(None))):
        for name, tensor in tensors.items():
            if "o_proj" in name or "down_proj" in name:
                tensor *= 0.02  # so that context hardly changes the scale of the final norm; the head makes up for it
                tensor[rows] = 0
            elif name == "model.norm.weight":
                tensor.fill_(1)
    small["model.embed_tokens.weight"] = weights["model.embed_tokens.weight"][:, :DRAFT_WIDTH].clone()
    save_file(weights, target / "model.safetensors")
    save_file(small, draft / "model.safetensors")
    text = torch.randint(3, vocab, (256,), generator=torch.Generator().manual_seed(0)).tolist()
    own_TE, all_TE = hidden(draft, text), hidden(target, text)
    head = weights["lm_head.weight"]
    last, context = head[:, :DRAFT_WIDTH], head[:, DRAFT_WIDTH:]
    last *= math.sqrt(2 * math.log(vocab)) / float((all_TE[:, :DRAFT_WIDTH] @ last.T).std())
    context *= deviation / float((all_TE[:, DRAFT_WIDTH:] @ context.T).std())
    scale = float(all_TE[:, :DRAFT_WIDTH].norm() / own_TE.norm())
    small["lm_head.weight"] = last * scale
    save_file(weights, target / "model.safetensors")
    save_file(small, draft / "model.safetensors")
    return target, draft


def hidden(folder: Path, ids: Sequence[int]) -> torch.Tensor:
    """The rows that go into a model's head."""
    engine = Engine.load(folder)
    tree = TokenTree(engine.pool, ids)
    try:
        with torch.inference_mode():
            return engine.runner.forward([Chunk(tree, len(ids), [], tree.allocate(len(ids), []))])[: len(ids)].clone()
    finally:
        tree.release()


# --- overhead ---


def run_overhead(args: argparse.Namespace, argv: Sequence[str]) -> dict[str, Any]:
    """Measure and report."""
    made = stamp(argv)
    if args.threads is not None:
        torch.set_num_threads(args.threads)
    warps: list[dict[str, Any]] = [{"top_k": 20}, {"top_k": 20, "top_p": 0.9}, {"top_p": 0.9}, {}]
    configs = [DSBD(draft_beams=args.beams, gamma=args.gamma, width=width, **warp)
               for warp in warps for width in (0, args.beams)]  # fmt: skip
    works = {config: partial(overhead, config, args.vocab, args.new_tokens) for config in configs}
    rows: list[dict[str, Any]] = []
    for config, runs in in_turn(works, args.runs, warm_up=True).items():
        warp = {name: x for name, x in (("top-k", config.top_k), ("top-p", config.top_p)) if x not in (0, 1)}
        rows.append({
            "warp": ", ".join(f"{name} {x:g}" for name, x in warp.items()) or "none",
            "width": config.width or "dynamic",
            "ms": spread([1000 * run["seconds"] / run["rounds"] for run in runs]),
            "steps_per_round": sum(run["steps"] for run in runs) / sum(run["rounds"] for run in runs),
        })  # fmt: skip
    body = "\n\n".join([
        f"W_S = {args.beams}, gamma = {args.gamma}, vocabulary {args.vocab}, {torch.get_num_threads()} threads.",
        rows_table(rows, {"warp": "{warp}", "width": "{width}", "ms per round": "{ms[median]:.2f}",
                          "least": "{ms[min]:.2f}", "most": "{ms[max]:.2f}",
                          "steps per round": "{steps_per_round:.2f}"}),
        OVERHEAD_LEGEND,
    ])  # fmt: skip
    result = {"rows": rows, "limit_ms": LIMIT_MS}
    finish("dsbd-overhead", made, body, result, args.save)
    return result


def overhead(config: DSBD, vocab: int, new_tokens: int, seed: int) -> dict[str, float]:
    """Seconds inside the search, rounds and steps of a run.

    Rows of log-probabilities and their peaks are ready made, the draft's are a blur of the target's.
    """
    random = torch.Generator().manual_seed(seed)
    logits_NV = torch.randn(64, vocab, generator=random) * 2
    logits_NV.scatter_add_(1, torch.randint(vocab, (64, 8), generator=random), torch.full((64, 8), 14.0))
    blurred_NV = logits_NV + 0.5 * torch.randn(64, vocab, generator=random)
    answers = {"target": torch.log_softmax(logits_NV, -1), "draft": torch.log_softmax(blurred_NV, -1)}
    known = {name: peaks(logp_NV) for name, logp_NV in answers.items()}
    trees, shape = {}, ModelShape(layers=1, kv_heads=1, head_dim=1, vocab_size=1, max_positions=None)

    def open_tree(name: str, prompt: Sequence[int]) -> TokenTree:
        trees[name] = TokenTree(PagePool(shape, 4096, 1), list(prompt))
        return trees[name]

    task = Task(open_tree("target", [1, 2, 3]), new_tokens, frozenset(), vocab, None, open_tree)

    def rows_of(request: Evaluate) -> tuple[torch.Tensor, torch.Tensor]:
        tree = request.tree
        name = "target" if tree is trees["target"] else "draft"
        which = [(tree.token(node) * 7 + tree.position(node)) % 64 for node in request.nodes]
        return answers[name][which], known[name][which]

    with torch.inference_mode():
        seconds, result = run_alone(replace(config, seed=seed), task, rows_of)
    return {"seconds": seconds} | {key: result.stats[key] for key in ("rounds", "steps")}
