"""ADED against plain decoding: accept length, nodes and tokens per second of each drafter, and the break-even size.

The texts are greedy answers of a model that can write: of the model itself, or (`--recorded DIR`) of another, recited
by the one that is measured. A reciting model does all its work, but its answers along the text are replaced by the
text's, and its answers elsewhere by nothing in particular: drafters learn less from it than from a model that writes.
"""

import argparse
import math
import statistics
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from engine.demo import is_demo
from engine.drafts import Draft
from engine.errors import UsageError
from models.later import later
from tools.bench.checkpoints import add_flags, checkpoint
from tools.bench.flags import add_numbers, add_run_flags
from tools.bench.measure import in_turn, progress, random_tokens, ratio, spread, standard_error
from tools.bench.report import finish, rows_table, stamp
from tools.random_checkpoint import make

with later():
    from engine import Engine
    from engine.contract import Search
    from search import ADED, Greedy
    from search.aded.drafters import MCTS
    from search.aded.ngrams import open_store
    from tools.bench.searches import Recite, after_prompt
    from tools.bench.texts import corpus, draw_prompts

SLOWEST, SPEEDUP, HOST_MS = 0.95, 1.5, 0.5  # targets
HOST = ("draft_ms", "verify_ms")
COLUMNS = {
    "method": "{method}", "text": "{text}", "accept length": "{accept_length:.2f}", "nodes": "{nodes:.1f}",
    "draft ms": "{draft_ms:.2f}", "verify ms": "{verify_ms:.2f}", "tokens/s": "{tokens_per_second[median]:.1f}",
    "spread": "{tokens_per_second[min]:.0f}-{tokens_per_second[max]:.0f}", "x": "{ratio:.2f}", "same": "{same:yes}",
}  # fmt: skip
CLEARLY = 1.1  # x from which drafts pay
LEGEND = f"""*x*: tokens per second over autoregressive decoding's, in the same run; the targets are {SLOWEST} on noise
(a text of random tokens), and {SPEEDUP} on the model's own kind of text where passes take most of the time. *accept
length*: tokens per step. *nodes*: of drafts, evaluated per step. *draft ms*, *verify ms*: processor time of a step,
with the choice of tokens and the pruning that plain decoding does, too; the target is at most {HOST_MS} together for
backoff at 24 to 48 nodes. *spread*: tokens per second, least to most. *same*: whether the tokens equal the text's."""


@dataclass
class Chain:
    """The paper's baseline: no tree, only the likeliest successor of the likeliest successor."""

    matrix: MCTS
    curiosity: float = 1.0
    DEPTH = 4

    def learn(self, tokens: Sequence[int]) -> None:
        self.matrix.learn(tokens)

    def observe(self, nodes: Any, likely: Any) -> None:
        pass

    def distribution(self, ahead: Sequence[int] = ()) -> dict[int, float]:
        return self.matrix.distribution(ahead)

    def draft(self, nodes: int, depth: int) -> Draft:
        draft = Draft()
        while len(draft.tokens) < min(self.DEPTH, depth) and (known := self.distribution(draft.tokens)):
            draft.parents.append(len(draft.tokens) - 1)
            draft.tokens.append(next(iter(known)))
            draft.scores.append(0.5 ** len(draft.tokens))
        return draft


def add_parser(commands: Any) -> None:
    parser = commands.add_parser("aded", help="n-gram drafts against plain decoding", description=__doc__)
    add_flags(parser)
    parser.add_argument("--recorded", metavar="DIR", help="the checkpoint that writes the texts (the measured one)")
    parser.add_argument("--store", metavar="FILE", help="counted n-grams of its kind of text (from texts it draws)")
    text = "tokens it draws to count, if there is no --store (%(default)s)"
    parser.add_argument("--corpus-tokens", type=int, default=200_000, metavar="N", help=text)
    add_numbers(
        parser,
        prompts=(8, "drawn too, 16 tokens each"),
        new_tokens=(128, "of each answer"),
        iterations=([30, 75, 150, 300], "of mcts"),
        runs=(3, "of each method, for medians"),
    )
    text = "random Llamas of L layers and width W that recite the same texts, to find where drafts begin to pay"
    parser.add_argument("--sizes", nargs="*", default=[], metavar="LxW", help=text)
    text = "of each method on noise, as many runs as these take: a few per cent matter there (%(default)s)"
    parser.add_argument("--noise-seconds", type=float, default=30, metavar="S", help=text)
    add_run_flags(parser, "aded", "float32", run)


def run(args: argparse.Namespace, argv: Sequence[str]) -> dict[str, Any]:
    """Measure and report."""
    made = stamp(argv)
    with ExitStack() as stack:
        folder, name = stack.enter_context(checkpoint(args))
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-")))
        engine = Engine.load(folder, dtype=args.dtype, threads=args.threads)
        writer = Engine.load(args.recorded, dtype=args.dtype, threads=args.threads) if args.recorded else engine
        if args.recorded and writer.runner.vocab_size > engine.runner.vocab_size:
            raise UsageError("--recorded: its vocabulary is larger than that of the model that is to recite")
        prompts, texts = write(writer, args.prompts, args.new_tokens, args.seed)
        store = args.store or corpus(writer, args.corpus_tokens, scratch / "store")
        methods = list_methods(store, args.iterations)
        reciting = writer if args.recorded else None
        rows = [{"text": "own", **row} for row in compare(engine, methods, prompts, texts, reciting, args.runs)]
        noise = [random_tokens(engine.runner.vocab_size, len(text), args.seed + i) for i, text in enumerate(texts)]
        plain = [(n, s) for n, s in methods if n in ("autoregressive", "backoff, auto", "backoff, auto, no store")]
        tokens = sum(map(len, noise))
        runs = max(args.runs, math.ceil(args.noise_seconds * rows[0]["tokens_per_second"]["median"] / tokens))
        rows += [{"text": "noise", **row} for row in compare(engine, plain, prompts, noise, writer, runs)]
        sizes = by_size(args, plain[:2], prompts, texts, writer, scratch)
        entries = len(open_store(store))
    body = "\n\n".join([
        f"{name}, {args.dtype}, {engine.runner.device.type}; {len(prompts)} prompts of {len(prompts[0])} tokens, "
        f"{args.new_tokens} new tokens each, one at a time; texts by "
        f"{Path(args.recorded).resolve().name if args.recorded else 'the model itself'}; store of {entries:,} entries.",
        rows_table(rows, COLUMNS),
        *([rows_table(sizes, {"size": "{size}", "parameters": "{parameters:M.1f}M"} | COLUMNS), break_even(sizes)]
          if sizes else []),
        LEGEND,
    ])  # fmt: skip
    result = {"model": name, "results": rows, "sizes": sizes}
    short = "random" if args.model is None else "demo" if is_demo(args.model) else name
    finish(f"aded-{short}", made, body, result, args.save)
    return result


def by_size(
    args: argparse.Namespace,
    methods: Sequence[tuple[str, Search]],
    prompts: Sequence[Sequence[int]],
    texts: Sequence[Sequence[int]],
    writer: Engine,
    scratch: Path,
) -> list[dict[str, Any]]:
    """Compare methods on random Llamas of the sizes of --sizes that recite the texts."""
    rows = []
    for size in args.sizes:
        layers, width = map(int, size.split("x"))
        shape: dict[str, Any] = {"layers": layers, "width": width, "mlp": width * 8 // 3, "heads": max(1, width // 64)}
        facts = make(scratch / size, **shape, vocab=writer.runner.vocab_size, seed=args.seed)
        engine = Engine.load(scratch / size, dtype=args.dtype, threads=args.threads)
        for row in compare(engine, methods, prompts, texts, writer, args.runs):
            rows.append({"text": "own", "size": size, "parameters": facts["parameters"], **row})
    return rows


def break_even(sizes: Sequence[dict[str, Any]]) -> str:
    """A sentence with the smallest models for which drafts pay."""
    pays = sorted((row["parameters"], row["ratio"]) for row in sizes if row["method"] != "autoregressive")

    def least(wanted: float) -> str:
        big = next((f"{count / 1e6:.1f}M parameters on" for count, x in pays if x >= wanted), "none of these")
        return f"x of {wanted}: from {big}"

    return f"Recited by models of these sizes: {least(CLEARLY)}; {least(SPEEDUP)}."


def list_methods(store: str | Path, iterations: Sequence[int]) -> list[tuple[str, Search]]:
    """The methods to compare; autoregressive first."""
    counted = open_store(store)
    backoff = {f"backoff, {nodes}": ADED(store=store, nodes=nodes) for nodes in ("auto", 24, 48)}
    mcts = {f"mcts, {n} iterations": ADED(drafter="mcts", store=store, nodes=64, iterations=n) for n in iterations}
    return list({
        "autoregressive": Greedy(),
        "greedy chain": ADED(drafter=lambda: Chain(MCTS(counted)), nodes=Chain.DEPTH),
        **mcts,
        "mcts, not adapting": ADED(drafter="mcts", store=store, nodes=64, adapt=False),
        "mcts, no store": ADED(drafter="mcts", nodes=64),
        "mcts, auto": ADED(drafter="mcts", store=store),
        **backoff,
        "backoff, 24, not adapting": ADED(store=store, nodes=24, adapt=False),
        "backoff, 24, no store": ADED(nodes=24),
        "backoff, auto, no store": ADED(),
    }.items())  # fmt: skip


def write(writer: Engine, number: int, new_tokens: int, seed: int) -> tuple[list[list[int]], list[list[int]]]:
    """Draw prompts; returns them and the model's greedy answers."""
    progress("writing the texts")
    prompts = draw_prompts(writer, number, 16, seed + 1)
    answers = writer.generate(prompts, Greedy(), max_new_tokens=new_tokens, ignore_eos=True)
    return prompts, [answer.outputs[0].token_ids for answer in answers]


def compare(
    engine: Engine,
    methods: Sequence[tuple[str, Search]],
    prompts: Sequence[Sequence[int]],
    texts: Sequence[Sequence[int]],
    writer: Engine | None,
    runs: int,
    warm_up: bool = True,
) -> list[dict[str, Any]]:
    """All methods in turn, one prompt at a time; texts of a writer are recited."""
    tokens = sum(len(text) - 1 for text in texts)  # the first of each comes with the prompt

    def run(search: Search, _: int) -> dict[str, Any]:
        stats, same, used = [], True, 0.0
        for prompt, text in zip(prompts, texts, strict=True):
            asked = Recite(search, text, writer) if writer else search
            seconds, result = after_prompt(engine, prompt, asked, max_new_tokens=len(text), ignore_eos=True)
            used += seconds
            stats.append(result.stats)
            same &= result.outputs[0].token_ids == list(text)
        of_each = [s.get("steps", s["new_tokens"]) for s in stats]
        steps = sum(of_each)
        return {
            "same": same,
            "cpu_ms": used / tokens * 1e3,
            "speed": tokens / sum(s["decode_seconds"] for s in stats),
            "accept_length": sum(map(len, texts)) / steps,
            "accept_error": standard_error([len(text) / n for text, n in zip(texts, of_each, strict=True)]),
            "nodes": sum(s.get("draft_nodes", 0) for s in stats) / steps,
            **{key: statistics.fmean(s.get(key, 0.0) for s in stats) for key in HOST},
        }

    found = in_turn({name: partial(run, search) for name, search in methods}, runs, warm_up=warm_up, what="run")
    speeds = {name: [one["speed"] for one in results] for name, results in found.items()}
    base = methods[0][0]
    return [
        {
            "method": name,
            **{key: results[-1][key] for key in ("same", "accept_length", "accept_error", "nodes")},
            **{key: statistics.median(one[key] for one in results) if name != base else None for key in HOST},
            "cpu_ms": statistics.median(one["cpu_ms"] for one in results),
            "tokens_per_second": spread(speeds[name]),
            "ratio": ratio(speeds[name], speeds[base]),
        }
        for name, results in found.items()
    ]
