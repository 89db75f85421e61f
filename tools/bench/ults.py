"""ULTS against beam search: on toy trees, on a model, and its own time. Figures need the extra `viz`."""

import argparse
import itertools
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from engine.demo import is_demo
from models.later import later
from tools.bench.checkpoints import add_flags, checkpoint
from tools.bench.curves import abscissa, grouped, ordinate, plot_curves, save_figure, share
from tools.bench.figures import need_figures
from tools.bench.flags import add_numbers, add_run_flags
from tools.bench.measure import in_turn, standard_error
from tools.bench.report import finish, rows_table, stamp
from tools.bench.ults_alone import run_overhead, run_toy

with later():
    from engine import Engine
    from engine.contract import Search, SearchResult
    from search import ULTS, Trie
    from search.ults.prior import Vectors
    from tools.bench.searches import Collect, after_prompt
    from tools.bench.texts import WithoutEos, draw_prompts

NODES_RATIO = 0.75  # target
WIDE_RATIO, OWN_SHARE = 0.7, 0.03  # of the time of wide beams; of a pass


def add_parser(commands: Any) -> None:
    parser = commands.add_parser("ults", help="ULTS against beam search", description=__doc__)
    parts = parser.add_subparsers(required=True, metavar="PART")

    toy = parts.add_parser("toy", help="the paper's toy problem")
    add_numbers(toy, trees=(200, "per alpha"))
    add_run_flags(toy, "ults", None, run_toy)

    overhead = parts.add_parser("overhead", help="milliseconds of search per evaluated node, without a model")
    add_numbers(overhead, k_max=20, depth=20, samples=1000, batches=[1, 8], vocab=32000, runs=(5, "medians count"))
    add_run_flags(overhead, "ults", None, run_overhead)

    model = parts.add_parser("model", help="log-likelihood against nodes and time on a checkpoint")
    add_flags(model)
    add_numbers(
        model,
        prompts=(20, "drawn from the model itself"),
        prompt_tokens=32,
        depths=([20, 40], "new tokens; end-of-sequence is excluded"),
        beams=[1, 2, 3, 4, 5, 7, 10, 15, 20],
        k_max=[2, 3, 4, 5, 10, 20],
        batches=[1, 8],
        children=20,
        epsilon=0.1,
    )
    model.add_argument("--select", nargs="+", default=["flat", "descendant"])
    model.add_argument("--prior", help="auto, dirichlet or a file (vectors of other prompts drawn from the model)")
    add_run_flags(model, "ults", "float32", run_model)

    wide = parts.add_parser("wide", help="the nodes and the time for the log-likelihood of wide beams")
    add_flags(wide)
    add_numbers(
        wide,
        prompts=(8, "drawn from the model itself"),
        prompt_tokens=32,
        depths=([20], "new tokens; end-of-sequence is a token like the others"),
        beams=[32, 64, 128],
        k_max=[80, 160],
        batches=[16, 64],
        children=20,
        samples=1000,
        epsilon=0.02,
    )
    wide.add_argument("--fit", nargs="+", default=["beta", "pools"], help="beta pools")
    add_run_flags(wide, "ults", "float32", run_wide)


# --- a model ---


def run_model(args: argparse.Namespace, argv: Sequence[str]) -> dict[str, Any]:
    """Mean log-likelihood, nodes, passes and seconds of both searches over the same prompts."""
    if args.save is not None:
        need_figures()
    made, rows = stamp(argv), []
    with checkpoint(args) as (folder, name), tempfile.TemporaryDirectory() as scratch:
        engine = Engine.load(folder, dtype=args.dtype, threads=args.threads)
        prompts = draw_prompts(engine, args.prompts, args.prompt_tokens, args.seed)
        for depth in args.depths:
            prior = args.prior or str(gather(engine, args.prompt_tokens, depth, args.seed + 1, Path(scratch)))
            searches: list[tuple[dict[str, Any], Search]] = [
                ({"search": "beam", "k": k}, WithoutEos(Trie(beams=k, length_penalty=0.0))) for k in args.beams
            ]
            for select, batch, k in itertools.product(args.select, args.batches, args.k_max):
                search = ULTS(
                    select=select, batch=batch, k_max=k, children=args.children, epsilon=args.epsilon, prior=prior,
                    fixed_length=True,
                )  # fmt: skip
                rows_of = {"search": f"{select}, batch {batch}", "select": select, "batch": batch, "k": k}
                searches.append((rows_of, search))
            rows += side_by_side(engine, prompts, searches, depth)
    beside_beams(rows)
    short = "demo" if is_demo(folder) else engine.name
    size = 14, 4 * len(args.depths)
    figure = save_figure(f"ults-{short}", size, lambda f: draw_model(f, rows, args.depths), args.save)
    body = model_report(short if is_demo(folder) else name, engine, rows, args) + f"\n\n{figure}"
    finish(f"ults-model-{short}", made, body, {"model": name, "results": rows}, args.save)
    return {"results": rows}


def beside_beams(rows: Sequence[dict[str, Any]]) -> None:
    """Add to every row its nodes, milliseconds and passes over those of beam search for the same log-likelihood."""
    for row in rows:
        beams = [r for r in rows if r["depth"] == row["depth"] and r["search"] == "beam"]
        k = abscissa([(r["k"], r["value"]) for r in beams], row["value"]) if row["search"] != "beam" else None
        for key in ("nodes", "ms", "cpu_ms", "passes"):
            row[f"{key}_of_beam"] = row[key] / ordinate([(r["k"], r[key]) for r in beams], k) if k else None
        saved = row["nodes"] / row["nodes_of_beam"] - row["nodes"] if row["nodes_of_beam"] else 0.0
        row["break_even"] = max(0.0, row["passes"] - row["depth"]) / saved if saved > 0 else None


def gather(
    engine: Engine,
    prompt_tokens: int,
    depth: int,
    seed: int,
    folder: Path,
    vectors: int = 1000,
    without: Callable[[Search], Search] | None = None,
    prompts: Sequence[list[int]] | None = None,
) -> Path:
    """Gather a prior of 1000 vectors, as in the paper, from other prompts; `without` wraps the search that does, by
    default so that no text ends."""
    found: list[Vectors] = []
    prompts = prompts or draw_prompts(engine, -(-vectors // depth), prompt_tokens, seed)
    for i, prompt in enumerate(prompts):
        engine.generate([prompt], (without or WithoutEos)(Collect(found, 1, i)), max_new_tokens=depth)
    path = folder / f"prior-{depth}.safetensors"
    Vectors.cat(found).save(path)
    return path


def side_by_side(
    engine: Engine,
    prompts: Sequence[list[int]],
    searches: Sequence[tuple[dict[str, Any], Search]],
    depth: int,
    **options: Any,
) -> list[dict[str, Any]]:
    """Run searches in turn on every prompt, with options of `Request`; returns their rows with their figures."""

    def run(search: Search, i: int, depth: int = depth) -> tuple[float, SearchResult]:
        return after_prompt(engine, prompts[i], search, max_new_tokens=depth, **options)

    for _, search in searches:
        run(search, 0, min(depth, 4))  # beliefs are fitted once a process
    works = {i: partial(run, search) for i, (_, search) in enumerate(searches)}
    found = in_turn(works, len(prompts), what=f"depth {depth}: prompt")
    return [
        {"depth": depth, **row, **figures_of([result for _, result in found[i]]),
         "cpu_ms": statistics.fmean(seconds for seconds, _ in found[i]) * 1e3}
        for i, (row, _) in enumerate(searches)
    ]  # fmt: skip


def figures_of(results: Sequence[SearchResult]) -> dict[str, float]:
    """Means over prompts; milliseconds from the first log-probabilities on, their median."""
    values = [r.outputs[0].score or 0.0 for r in results]
    return {
        "value": statistics.fmean(values),
        "nodes": statistics.fmean(r.stats["nodes_evaluated"] for r in results),
        "passes": statistics.fmean(r.stats["forward_passes"] for r in results),
        "ms": statistics.median(r.stats["decode_seconds"] for r in results) * 1e3,
        "value_error": standard_error(values),
    }


def model_report(name: str, engine: Engine, rows: list[dict[str, Any]], args: argparse.Namespace) -> str:
    parts = [
        f"{name}, {engine.runner.device.type}, {args.prompts} prompts of {args.prompt_tokens} tokens drawn from the "
        f"model, fixed length, epsilon {args.epsilon}, {args.children} children, prior: "
        f"{args.prior or 'softmax vectors of other such prompts'}. Means over prompts; ms from the first "
        "log-probabilities to the end, the median; *CPU ms*: of all threads, the mean. *of beam*: share of what beam "
        "search (interpolated between its points) needs for the same log-likelihood; - where it does not reach it, or "
        "even one beam exceeds it. "
        "*Break-even*: where a pass of n nodes costs 1 + a (n - 1) passes of one and the search itself nothing, the "
        "least a for which ULTS is faster; empty where it saves no nodes."
    ]
    for depth in args.depths:
        shown = [r for r in rows if r["depth"] == depth]
        parts += [f"Depth {depth}:", model_table(shown)]
        beams = sorted((r["k"], r["ms"]) for r in shown if r["search"] == "beam")
        (narrow, least), (wide, most) = beams[0], beams[-1]
        if narrow < wide:
            a = (most / least - 1) / (wide - narrow)
            parts.append(f"By beam search's own times at k {narrow} and {wide}, a is {a:.3f} here.")
        for (search,), group in grouped([r for r in shown if r["search"] != "beam"], "search"):
            nodes = [r["nodes_of_beam"] for r in group if r["nodes_of_beam"]]
            times = [r["ms_of_beam"] for r in group if r["ms_of_beam"]]
            if nodes:
                parts.append(f"{search}: on average {share(statistics.fmean(nodes))} of beam search's nodes and "
                             f"{share(statistics.fmean(times))} of its time, over {len(nodes)} of {len(group)} "
                             f"settings (target: {NODES_RATIO:.0%} of the nodes).")  # fmt: skip
    return "\n\n".join(parts)


def model_table(rows: Sequence[dict[str, Any]]) -> str:
    """The searches on a model, a row each."""
    shown = [r | {key: share(r[key]) for key in ("nodes_of_beam", "ms_of_beam", "cpu_ms_of_beam")} for r in rows]
    return rows_table(shown, {
        "search": "{search}", "k": "{k}", "log-likelihood": "{value:.3f}", "s.e.": "{value_error:.3f}",
        "nodes": "{nodes:.1f}", "nodes of beam": "{nodes_of_beam}", "passes": "{passes:.1f}", "ms": "{ms:.1f}",
        "ms of beam": "{ms_of_beam}", "CPU ms": "{cpu_ms:.0f}", "CPU of beam": "{cpu_ms_of_beam}",
        "break-even": "{break_even:.3f}"})  # fmt: skip


def draw_model(figure: Any, rows: list[dict[str, Any]], depths: Sequence[int]) -> None:
    keys = {"nodes": "nodes evaluated", "passes": "forward passes", "ms": "milliseconds"}
    axes = figure.subplots(len(depths), len(keys), squeeze=False)
    for row, depth in zip(axes, depths, strict=True):
        for axis, (key, label) in zip(row, keys.items(), strict=True):
            mine = [r for r in rows if r["depth"] == depth]
            plot_curves(axis, mine, key, label, f"{depth} tokens", log=True)
        row[0].set_ylabel("mean log-likelihood")
    axes[0][0].legend(fontsize=8)


# --- wide beams ---


class OwnTime:
    """Adds up the seconds of a search itself and those of whole steps; an observer of phases."""

    def __init__(self):
        self.search = self.step = 0.0
        self._began: list[tuple[str, float]] = []

    def begin(self, phase: str, batch: object) -> None:
        self._began.append((phase, time.perf_counter()))

    def end(self, phase: str) -> None:
        name, began = self._began.pop()
        if name in ("search", "step"):
            setattr(self, name, getattr(self, name) + time.perf_counter() - began)


def run_wide(args: argparse.Namespace, argv: Sequence[str]) -> dict[str, Any]:
    """Mean log-likelihood, nodes and seconds of wide beams and of ULTS, and its own time per round."""
    made, rows = stamp(argv), []
    with checkpoint(args) as (folder, name), tempfile.TemporaryDirectory() as scratch:
        engine = Engine.load(folder, dtype=args.dtype, threads=args.threads)
        prompts = draw_prompts(engine, args.prompts, args.prompt_tokens, args.seed)
        for depth in args.depths:
            seed, folder_of = args.seed + 1, Path(scratch)
            prior = str(gather(engine, args.prompt_tokens, depth, seed, folder_of, without=lambda search: search))
            searches: list[tuple[dict[str, Any], Search]] = [
                ({"search": "beam", "k": k}, Trie(beams=k, length_penalty=0.0)) for k in args.beams
            ]
            for fit, batch, k in itertools.product(args.fit, args.batches, args.k_max):
                search = ULTS(batch=batch, k_max=k, children=args.children, samples=args.samples,
                              epsilon=args.epsilon, fit=fit, prior=prior)  # fmt: skip
                searches.append(({"search": f"{fit}, batch {batch}", "batch": batch, "k": k}, search))
            rows += wide_rows(engine, prompts, searches, depth)
    short = "demo" if is_demo(folder) else engine.name
    body = wide_report(short if is_demo(folder) else name, engine, rows, args)
    finish(f"ults-wide-{short}", made, body, {"model": name, "results": rows}, args.save)
    return {"results": rows}


def wide_rows(
    engine: Engine, prompts: Sequence[list[int]], searches: Sequence[tuple[dict[str, Any], Search]], depth: int
) -> list[dict[str, Any]]:
    """Run searches in turn on every prompt; returns their rows with their figures, beside those of the beams."""

    def run(search: Search, i: int) -> tuple[SearchResult, OwnTime]:
        engine.observer = own = OwnTime()
        try:
            [result] = engine.generate([prompts[i]], search, max_new_tokens=depth, ignore_eos=True)
        finally:
            engine.observer = None
        return result, own

    for _, search in searches:
        run(search, 0)  # beliefs are fitted once a process
    found = in_turn({i: partial(run, s) for i, (_, s) in enumerate(searches)}, len(prompts), what="prompt")
    rows = []
    for i, (row, _) in enumerate(searches):
        figures = figures_of([result for result, _ in found[i]])
        own = sum(own.search for _, own in found[i])
        figures["own_ms"] = own / len(prompts) / figures["passes"] * 1e3
        figures["own_of_pass"] = own / sum(own.step - own.search for _, own in found[i])
        rows.append({"depth": depth, **row, **figures})
    beams = [row for row in rows if row["search"] == "beam"]
    for row in rows:
        if row["search"] != "beam":
            row["beside"] = [
                {"k": beam["k"], "nodes": row["nodes"] / beam["nodes"], "ms": row["ms"] / beam["ms"]}
                for beam in beams if row["value"] >= beam["value"]
            ]  # fmt: skip
    return rows


def wide_report(name: str, engine: Engine, rows: list[dict[str, Any]], args: argparse.Namespace) -> str:
    parts = [
        f"{name}, {engine.runner.device.type}, {args.prompts} prompts of {args.prompt_tokens} tokens drawn from the "
        f"model, end-of-sequence ignored, rule flat, epsilon {args.epsilon}, {args.children} children, {args.samples} "
        "samples, prior: softmax vectors of other such prompts. Means over prompts; ms from the first "
        "log-probabilities to the end, the median. *Own*: the search's time per pass, and its share of the rest of a "
        "step."
    ]
    for depth in args.depths:
        shown = [r for r in rows if r["depth"] == depth]
        parts += [f"Depth {depth}:", rows_table(shown, {
            "search": "{search}", "k": "{k}", "log-likelihood": "{value:.3f}", "s.e.": "{value_error:.3f}",
            "nodes": "{nodes:.1f}", "passes": "{passes:.1f}", "ms": "{ms:.1f}", "own ms": "{own_ms:.2f}",
            "own of pass": "{own_of_pass:.1%}"})]  # fmt: skip
        for beam in (r for r in shown if r["search"] == "beam"):
            reached = [(r, b) for r in shown for b in r.get("beside", []) if b["k"] == beam["k"]]
            parts.append(wide_text(beam["k"], reached))
    return "\n\n".join(parts)


def wide_text(k: int, reached: Sequence[tuple[dict[str, Any], dict[str, float]]]) -> str:
    """The settings that reach the log-likelihood of k beams with the fewest nodes, and in the least time."""
    if not reached:
        return f"{k} beams: no setting reaches their log-likelihood."
    row, least = min(reached, key=lambda pair: pair[1]["nodes"])
    fast, quick = min(reached, key=lambda pair: pair[1]["ms"])
    return (
        f"{k} beams: {row['search']}, k {row['k']} reaches their log-likelihood with {least['nodes']:.0%} of their "
        f"nodes; {fast['search']}, k {fast['k']} in {quick['ms']:.0%} of their time (target: {WIDE_RATIO:.0%}, with at "
        f"most {OWN_SHARE:.0%} of a pass for the search itself; here {fast['own_of_pass']:.1%})."
    )
