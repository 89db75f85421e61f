"""Speed of trie beam search against the machine's limits and targets; `peers` compares with other engines.

On a machine with a GPU use `gpu`. Every number of beams gets a process of its own, as in `peers`.
"""

import argparse
import statistics
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from models.later import later
from tools.bench import gpu, peers
from tools.bench.checkpoints import add_flags, checkpoint, is_gguf
from tools.bench.flags import add_numbers
from tools.bench.measure import cores, in_turn, progress, ratio
from tools.bench.report import add_save_flag, comparison, comparison_table, finish, rows_table, slug, stamp

with later():
    import torch

    from models.checkpoint.headers import Checkpoint
    from models.formats.int8 import Int8Linear
    from tools.bench import host, limits, peaks, variants

KINDS = ("float32", "bfloat16", "int8", "int4")
GGUF = "gguf"  # the kind of a GGUF file as it is; the others are made of its weights dequantised
DEPTHS = (100, 1000)
ROUNDS = 5  # of each comparison
AROUND = 32  # steps on either side of a depth
# Targets; those of steps per second with the rate of large products on the machine for which they were set.
STEPS = {"float32": (22.0, 150e9), "bfloat16": (30.0, 420e9)}
LONG, WIDE, DEEP, HOST, INT8, INT8_BYTES = 0.7, 2.0, 0.9, 0.5e-3, 1.25, 0.30

LEGEND = f"""*GB/s* is the bandwidth at which memory was read just before and after, the larger of both. *floor* is a
lower bound of the time of a step on this machine: the bytes of the weights and of the live keys and values at that
bandwidth, or the operations at the rate of the processor's instructions, whichever takes longer. *of floor* is floor /
measured. With int8 and int4 weights the rest is bfloat16. In the table below, ratios of prompts, beams and dtypes are
medians over {ROUNDS} interleaved rounds; the ratio of depths is a median over {ROUNDS} texts."""


Setting = tuple[str, int, int]  # dtype, beams, tokens of the prompt


def add_parser(commands: Any) -> None:
    parser = commands.add_parser("speed", help="compare beam search with the machine's limits", description=__doc__)
    add_flags(parser)
    add_numbers(
        parser,
        prompt_tokens=([512, 2048], "tokens of the prompts"),
        new_tokens=(64, "tokens to generate; end-of-sequence is ignored"),
        beams=([1, 4, 15], "numbers of beams"),
        runs=(3, "runs of each setting; the figures are medians"),
    )
    parser.add_argument("--dtypes", nargs="+", choices=KINDS, default=list(KINDS), metavar="NAME", help=" ".join(KINDS))
    parser.add_argument(
        "--depths", type=int, nargs=2, default=list(DEPTHS), help="new tokens at which steps are compared"
    )
    parser.add_argument("--threads", type=int, default=cores(), help="CPU threads (%(default)s)")
    add_save_flag(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace, argv: Sequence[str]) -> dict[str, Any]:
    """Measure and report."""
    if torch.cuda.is_available():
        parser = argparse.ArgumentParser()
        gpu.add_parser(parser.add_subparsers())
        words = ["gpu"] if args.save is None else ["gpu", "--save", str(args.save)]
        return gpu.run(parser.parse_args(words), words)
    made = stamp(argv)
    torch.set_num_threads(args.threads)
    kinds = [
        kind for kind in args.dtypes if kind not in limits.QUANTISED or not Int8Linear.why_not(torch.device("cpu"))
    ]
    for kind in set(args.dtypes) - set(kinds):
        progress(f"{kind}: {Int8Linear.why_not(torch.device('cpu'))}")
    large = {kind: limits.gemm_rate(kind) for kind in kinds}
    rates = peaks.product_rates(dict.fromkeys(["float32", *kinds]), args.threads)
    with checkpoint(args) as (model, name), tempfile.TemporaryDirectory(prefix="bench-") as scratch:
        folder = model
        if is_gguf(model):
            folder, kinds = variants.in_dtype(model, "float32", Path(scratch)), [*kinds, GGUF]
            rates[GGUF] = rates["float32"]
        bench = Bench(args, model, folder, scratch)
        rows = [bench.row(kind, beams, n) for n in args.prompt_tokens for kind in kinds for beams in args.beams]
        work = limits.Work.of(Checkpoint.open(folder))
        for row in rows:
            if "seconds" in row:
                add_floors(row, work, rates[row["dtype"]])
        rounds = bench.in_turn(kinds)
        depths = bench.depths(kinds[0])
        idle = host.step_seconds(max(args.beams), args.depths)
    compared = comparisons(rows, large, rounds, depths, idle, args)
    bandwidths = [row["bandwidth"] for row in rows]
    setting = (
        f"{name}; prompts of {bench.what}, {args.new_tokens} new tokens, {args.threads} threads, medians of "
        f"{args.runs} runs. Memory was read at {min(bandwidths) / 1e9:.1f} to {max(bandwidths) / 1e9:.1f} GB/s; the "
        f"processor's instructions reach {of_kinds(rates)}, our large products {of_kinds(large)}."
    )
    body = "\n\n".join([setting, result_table(rows), LEGEND, comparison_table(compared)])
    result = {
        "model": name, "threads": args.threads, "new_tokens": args.new_tokens, "rates": rates,
        "results": rows, "in_turn": {" ".join(map(str, key)): seconds for key, seconds in rounds.items()},
        "depths": depths, "host_seconds": idle, "verdicts": compared,
    }  # fmt: skip
    machine = made["machine"]
    of = [] if args.model is None and model is folder else [name]
    finish(
        slug("speed", *of, machine["cpu"], machine["vector"], f"{args.threads} threads"), made, body, result, args.save
    )
    return result


def of_kinds(rates: dict[str, float]) -> str:
    """The rate of each kind, in words."""
    return ", ".join(f"{rate / 1e9:.0f} GFLOP/s ({kind})" for kind, rate in rates.items())


class Bench:
    """One checkpoint, measured in processes of their own."""

    def __init__(self, args: argparse.Namespace, model: Path, folder: Path, scratch: str):
        self.args, self.model, self.folder, self.scratch = args, model, folder, scratch
        self.longest, self.what = peers.prompt_of(args, model, max(args.prompt_tokens))

    def prompt(self, tokens: int) -> list[int]:
        return self.longest[:tokens]

    def spec(self, kind: str, beams: int) -> dict[str, Any]:
        folder, more = (self.model, {"quant": "auto"}) if kind == GGUF else (self.folder, {})
        kind = "float32" if kind == GGUF else kind
        return peers.spec("coppice", folder, kind, beams, self.args.threads, self.scratch, **more)

    def row(self, kind: str, beams: int, tokens: int) -> dict[str, Any]:
        """Measure a setting like `peers`."""
        before = limits.read_bandwidth()
        measured = peers.measure(
            sys.executable, self.spec(kind, beams), self.prompt(tokens), self.args.new_tokens, self.args.runs
        )
        bandwidth = max(before, limits.read_bandwidth())
        row = {"peer": "coppice", "dtype": kind, "prompt": tokens, "beams": beams, "bandwidth": bandwidth, **measured}
        progress(f"{kind}, prompt {tokens}, beams {beams}: {peers.outcome(row)}")
        return row

    def in_turn(self, kinds: Sequence[str]) -> dict[Setting, list[float]]:
        """Seconds per step of each setting to compare, in interleaved rounds."""
        wide, narrow, prompts = max(self.args.beams), min(self.args.beams), self.args.prompt_tokens
        settings = {(kind, wide, prompts[0]) for kind in kinds} | {(kinds[0], narrow, prompts[0])}
        settings |= {(kind, wide, prompts[-1]) for kind in kinds if kind in STEPS}
        with ExitStack() as stack:
            workers = {}
            for kind, beams in sorted({(kind, beams) for kind, beams, _ in settings}):
                worker = stack.enter_context(peers.Worker(sys.executable, self.spec(kind, beams)))
                workers[kind, beams] = worker
                worker.answer()

            def step_seconds(setting: Setting, _: int) -> float:
                job = {"prompt": self.prompt(setting[2]), "new_tokens": self.args.new_tokens}
                return statistics.median(workers[setting[:2]].ask(job)["step_seconds"])

            return in_turn({setting: partial(step_seconds, setting) for setting in sorted(settings)}, ROUNDS,
                           warm_up=True)  # fmt: skip

    def depths(self, kind: str) -> dict[int, list[float]]:
        """Seconds per step of the widest search around each depth, of several texts."""
        with peers.Worker(sys.executable, self.spec(kind, max(self.args.beams))) as worker:
            worker.answer()
            job = {"prompt": self.prompt(self.args.prompt_tokens[0]), "new_tokens": max(self.args.depths) + AROUND}
            texts = [worker.ask(job)["step_seconds"] for _ in range(ROUNDS)]
        return {
            d: [statistics.median(steps[max(0, d - AROUND) : d + AROUND]) for steps in texts] for d in self.args.depths
        }


def add_floors(row: dict[str, Any], work: limits.Work, rate: float) -> None:
    """Add the floors of a step and of the whole run."""
    steps = row["steps"]
    context = row["prompt"] + steps // 2
    moved = row["weight_bytes"] + context * row["kv_bytes_per_token"]
    row["floor_step_seconds"] = work.step_seconds(row["beams"], context, moved, row["bandwidth"], rate)
    row["floor_seconds"] = work.prompt_seconds(row["prompt"], rate) + (steps - 1) * row["floor_step_seconds"]


def pick(rows: list[dict[str, Any]], kind: str, prompt: int, beams: int) -> dict[str, Any] | None:
    """The row of a setting, if it was measured."""
    wanted = {"dtype": kind, "prompt": prompt, "beams": beams}
    return next((row for row in rows if "seconds" in row and wanted.items() <= row.items()), None)


# --- targets ---


def comparisons(
    rows: list[dict[str, Any]], rates: dict[str, float], rounds: dict[Setting, list[float]],
    depths: dict[int, list[float]], idle: dict[int, float], args: argparse.Namespace,
) -> list[dict[str, Any]]:  # fmt: skip
    """Compare the figures with the targets of a CPU."""
    prompt, long, wide, narrow = args.prompt_tokens[0], args.prompt_tokens[-1], max(args.beams), min(args.beams)

    def figure(kind: str, *keys: str) -> Any:
        found: Any = pick(rows, kind, prompt, wide)
        for key in keys:
            found = found and found[key]
        return found

    def of_rounds(over: Setting, under: Setting) -> float | None:
        return ratio(rounds[over], rounds[under]) if {over, under} <= rounds.keys() else None

    found = []
    for kind, (steps, rate) in ((kind, wanted) for kind, wanted in STEPS.items() if kind in rates):
        name = f"decode, {kind}: steps/s ({steps:.0f} at {rate / 1e9:.0f} GFLOP/s)"
        found.append(comparison(name, figure(kind, "steps_per_second", "median"), steps * rates[kind] / rate))
        if long != prompt:
            found.append(comparison(f"decode, {kind}: prompt {long} / prompt {prompt}",
                                    of_rounds((kind, wide, prompt), (kind, wide, long)), LONG))  # fmt: skip
    small, large = figure("int8", "weight_bytes"), figure("float32", "weight_bytes")
    return [
        *found,
        comparison(f"step, float32: {wide} beams / {narrow}",
                   of_rounds(("float32", wide, prompt), ("float32", narrow, prompt)), WIDE, at_most=True),
        comparison(f"decode at depth {args.depths[1]} / {args.depths[0]}",
                   ratio(depths[args.depths[0]], depths[args.depths[1]]), DEEP),
        *(comparison(f"host, {wide} beams, depth {depth}", idle[depth], HOST, True, "ms") for depth in args.depths),
        comparison("decode: int8 / bfloat16", of_rounds(("bfloat16", wide, prompt), ("int8", wide, prompt)), INT8),
        comparison("weights: int8 / float32", small / large if small and large else None, INT8_BYTES, at_most=True),
    ]  # fmt: skip


# --- report ---


def result_table(rows: list[dict[str, Any]]) -> str:
    shown = []
    for row in rows:
        floor, speed = row.get("floor_step_seconds"), row.get("steps_per_second")
        total = f"{row['seconds']['median']:.2f}" if "seconds" in row else "none"
        shown.append(row | {"total": total, "share": floor * speed["median"] if floor and speed else None})
    text = rows_table(shown, {
        "dtype": "{dtype}", "prompt": "{prompt}", "beams": "{beams}", "total s": "{total}",
        "prefill s": "{prefill_seconds[median]:.2f}", "steps/s": "{steps_per_second[median]:.1f}",
        "GB/s": "{bandwidth:G.1f}", "floor ms": "{floor_step_seconds:ms.1f}", "of floor": "{share:.2f}",
        "weights MB": "{weight_bytes:MB}",
        "growth MB": "{growth_bytes[median]:MB}"})  # fmt: skip
    return "\n\n".join([text, *peers.why_none(rows)])
