"""A GPU in stages: each kernel once, steps and where their time goes, kernels against limits, many searches, weights.

Shapes are those of Llama-2-7B and Qwen3-0.6B, weights random and made on the device. Each stage prints its table, what
was wanted and one JSON line as soon as it is done, and with --save has a section of its own; one that fails, or whose
time is over, says so and leaves the rest to the others. Without a GPU it says so and does nothing.
"""

import argparse
import time
import traceback
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any, NamedTuple

from models.later import later
from tools.bench.measure import progress
from tools.bench.report import add_save_flag, comparison_table, finish, rows_table, stamp

with later():
    import torch

    from tools.bench.gpu.setting import Setting

TOTAL = 500  # seconds after which no stage begins a case: all stages end within nine minutes


class Stage(NamedTuple):
    """A stage, a function of `module`, which begins no case after so many seconds; `usual` ones run unless others are
    named."""

    module: str
    about: str
    seconds: float
    usual: bool = True


STAGES = {  # the first answers first
    "smoke": Stage("each_kernel", "each kernel once, against its definition", 70),
    "steps": Stage("whole_steps", "a step of one beam and of many: graph, host, guesses", 75),
    "where": Stage("whole_steps", "kernels by time, gaps", 30),
    "attention": Stage("single_kernels", "tree attention, FlexAttention, SDPA", 60),
    "tune": Stage("single_kernels", "tree attention by its programs' shapes", 120, usual=False),
    "searches": Stage("whole_steps", "many searches at once", 55),
    "weights": Stage("whole_steps", "steps on weights of 8 and 4 bits", 50),
    "products": Stage("single_kernels", "matrices in bfloat16, 8 and 4 bits", 25),
    "experts": Stage("single_kernels", "a layer of a mixture of experts", 15),
    "states": Stage("recurrent_layers", "a gated delta net and a selective scan", 10),
    "bits": Stage("whole_steps", "steps with sums in one order, whatever rides along", 40),
    "compiled": Stage("whole_model", "all layers by torch.compile: minutes, fewer with --layers 8", 300, usual=False),
    "wide": Stage("whole_steps", "hundreds of beams of a small model", 30),
    "transformers": Stage("whole_steps", "its beam search", 40),
}


def add_parser(commands: Any) -> None:
    parser = commands.add_parser("gpu", help="kernels and steps against a GPU's limits", description=__doc__)
    names = [name for name, stage in STAGES.items() if stage.usual]
    text = "; ".join(f"{name}: {stage.about}" for name, stage in STAGES.items())
    parser.add_argument("--stages", nargs="+", choices=list(STAGES), default=names, metavar="NAME", help=text)
    parser.add_argument("--prefix", type=int, nargs="+", default=[4096, 8192], help="tokens of a trunk (%(default)s)")
    parser.add_argument("--queries", type=int, nargs="+", default=[15, 64], help="of tree attention (%(default)s)")
    parser.add_argument("--beams", type=int, default=15, help="(%(default)s)")
    parser.add_argument("--searches", type=int, default=16, help="at once (%(default)s)")
    parser.add_argument("--prompt", type=int, default=512, help="of many searches and of wide beams (%(default)s)")
    parser.add_argument("--wide", type=int, default=512, help="beams of the small model (%(default)s)")
    parser.add_argument("--new-tokens", type=int, default=64, help="(%(default)s)")
    parser.add_argument("--runs", type=int, default=20, help="of each kernel; the median counts (%(default)s)")
    parser.add_argument("--layers", type=int, help="of the Llama (32)")
    parser.add_argument("--compile", nargs="+", default=["off"], choices=["off", "on"], help="in the stage steps (off)")
    parser.add_argument("--kv-heads", type=int, nargs="+", default=[32, 8], help="in the stage attention (%(default)s)")
    text = f"after which a stage begins nothing (its own; {TOTAL} for all)"
    parser.add_argument("--seconds", type=float, metavar="S", help=text)
    add_save_flag(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace, argv: Sequence[str], make: Callable[..., Setting] | None = None) -> dict[str, Any]:
    """Measure and report, stage by stage."""
    if not torch.cuda.is_available():
        print("no GPU here: nothing to measure")
        return {}
    setting, results = (make or Setting)(args), {}
    if args.seconds is None:
        setting.end = time.perf_counter() + TOTAL
    with setting.listening():
        for name in args.stages:
            results[name] = measure(name, setting, args, argv)
    compared = [row for result in results.values() for row in result["targets"]]
    if compared:
        progress(f"\n{comparison_table(compared)}")
    return results


def measure(name: str, setting: Setting, args: argparse.Namespace, argv: Sequence[str]) -> dict[str, Any]:
    """Run one stage, print and save what it found."""
    progress(f"stage {name}")
    made, began = stamp(argv), time.perf_counter()
    setting.begin(STAGES[name].seconds if args.seconds is None else args.seconds)
    found: dict[str, Any] = {"rows": [], "targets": []}
    body = []
    try:
        result = getattr(import_module(f"{__name__}.{STAGES[name].module}"), name)(setting)
        found |= {"rows": result.rows, "targets": result.targets}
        body = [result.heading, rows_table(result.rows, result.columns), result.legend] if result.rows else []
    except Exception as error:  # of this stage alone, unless the GPU itself is lost
        traceback.print_exc()
        setting.note(name, error)
    found |= {"notes": setting.notes, "seconds": time.perf_counter() - began}
    body += [f"- {note}" for note in setting.notes]
    body += [comparison_table(found["targets"])] if found["targets"] else []
    finish(f"gpu-{name}", made, "\n\n".join(body), found, args.save)
    return found
