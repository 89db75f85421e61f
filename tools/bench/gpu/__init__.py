"""Measure a GPU in stages: each kernel once, steps and their parts, kernels against limits, many searches, weights.

Models have the shapes of Llama-2-7B and Qwen3, with random weights made on the device. As soon as a stage is done it
prints its table, its targets and one JSON line; with --save it has a section of its own. A stage that fails, loses the
GPU or runs out of time says so, and the other stages still run. Without a GPU the command says so and does nothing.
"""

import argparse
import faulthandler
import math
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

from engine.app.cli import output_file
from kernels.same_bits import NAME as SAME_BITS
from models.later import later
from tools.bench.gpu.journal import Journal
from tools.bench.gpu.watching import PATIENCE, end_with_parent, ending_on_signals, leave, watch
from tools.bench.measure import progress
from tools.bench.report import add_save_flag, comparison_table, finish, rows_table, stamp

with later():
    import torch

    from engine.step.gpu import check_gpu
    from tools.bench.gpu.clocks import text_of, watching_clocks
    from tools.bench.gpu.setting import DeviceLost, Setting

EARLY = "COPPICE_PDL"  # see `kernels.gpu.options`
TOTAL = 500  # seconds after which no stage begins a case
GRACE = 30  # seconds that a case may take after that: all stages end within nine minutes


class Stage(NamedTuple):
    """A stage: a function in `module` that begins no case after `seconds`; `usual` ones run unless others are named."""

    module: str
    about: str
    seconds: float
    usual: bool = True


STAGES = {  # by default they run in this order
    "smoke": Stage("each_kernel", "each kernel once, compared with its definition", 60),
    "steps": Stage("whole_steps", "a step of one beam and of many: graph, host, passes launched ahead", 60),
    "weights": Stage("whole_steps", "steps on weights of 8 and 4 bits", 40),
    "searches": Stage("whole_steps", "many searches at once", 40),
    "transformers": Stage("whole_steps", "the beam search of transformers", 40),
    "catalogue": Stage("recommending", "thousands of beams for three tokens", 30),
    "widths": Stage("recommending", "requests per second by number of beams", 30),
    "attention": Stage("single_kernels", "tree attention, FlexAttention, SDPA", 50),
    "where": Stage("whole_steps", "time by kernel, and gaps between kernels", 20),
    "models": Stage("real_models", "models from files (--model), compared with the CPU", 40),
    "tune": Stage("single_kernels", "tree attention with programs of other shapes", 120, usual=False),
    "products": Stage("single_kernels", "matrix products in bfloat16, 8 and 4 bits", 25),
    "experts": Stage("single_kernels", "a layer of a mixture of experts", 15),
    "states": Stage("recurrent_layers", "a gated delta net and a selective scan", 10),
    "bits": Stage("whole_steps", "steps with COPPICE_SAME_BITS=on", 25),
    "wide": Stage("whole_steps", "hundreds of beams of a small model", 15),
    "compiled": Stage("whole_model", "all layers by torch.compile: minutes, fewer with --layers 8", 300, usual=False),
}


def add_parser(commands: Any) -> None:
    parser = commands.add_parser("gpu", help="compare kernels and steps with a GPU's limits", description=__doc__)
    names = [name for name, stage in STAGES.items() if stage.usual]
    text = "; ".join(f"{name}: {stage.about}" for name, stage in STAGES.items())
    parser.add_argument("--stages", nargs="+", choices=list(STAGES), default=names, metavar="NAME", help=text)
    parser.add_argument("--prefix", type=int, nargs="+", default=[4096, 8192], help="tokens of a trunk (%(default)s)")
    parser.add_argument(
        "--queries", type=int, nargs="+", default=[15, 64], help="queries of tree attention (%(default)s)"
    )
    parser.add_argument("--beams", type=int, default=15, help="beams of a search (%(default)s)")
    parser.add_argument("--searches", type=int, default=16, help="searches at once (%(default)s)")
    text = "prompt tokens of the stages with many searches or wide beams (%(default)s)"
    parser.add_argument("--prompt", type=int, default=512, help=text)
    parser.add_argument("--wide", type=int, default=512, help="beams of the stage wide (%(default)s)")
    text = "beams of the stage catalogue (%(default)s)"
    parser.add_argument("--catalogue-beams", type=int, default=5000, help=text)
    text = "checkpoint folders and GGUF files for the stage models"
    parser.add_argument("--model", nargs="+", default=[], metavar="FILE", help=text)
    parser.add_argument("--new-tokens", type=int, default=64, help="tokens that a search generates (%(default)s)")
    parser.add_argument("--runs", type=int, default=20, help="runs of each kernel, for medians (%(default)s)")
    parser.add_argument("--layers", type=int, help="layers of the Llama (32)")
    text = "settings of --compile in the stage steps (off)"
    parser.add_argument("--compile", nargs="+", default=["off"], choices=["off", "on"], help=text)
    text = "key/value heads in the stage attention (%(default)s)"
    parser.add_argument("--kv-heads", type=int, nargs="+", default=[32, 8], help=text)
    text = "seconds after which a stage begins no case (each stage has its own)"
    parser.add_argument("--seconds", type=float, metavar="S", help=text)
    text = f"seconds after which no stage begins a case ({TOTAL}; without end if --seconds is given)"
    parser.add_argument("--total", type=float, metavar="S", help=text)
    text = "a file with a line for each case; cases that it already has are not run again"
    parser.add_argument("--journal", type=output_file, metavar="FILE", help=text)
    parser.add_argument("--inside", type=float, help=argparse.SUPPRESS)  # of a process that `watch` started: its end
    add_save_flag(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace, argv: Sequence[str]) -> dict[str, Any]:
    """Measure and report, stage by stage; the stages run in a process of their own."""
    if not torch.cuda.is_available():
        print("no GPU here: nothing to measure")
        return {}
    if args.inside is not None:
        faulthandler.enable()
        end_with_parent()
        check_gpu()
        try:
            return measure_all(args, argv[: argv.index("--inside")], Journal(args.journal))
        except DeviceLost:
            leave()
    with tempfile.TemporaryDirectory(prefix="bench-") as scratch, ending_on_signals():
        journal = Journal(args.journal or Path(scratch) / "journal.jsonl")
        journal.agree(settings=settings(args))
        journal.run()
        began, usual = time.time(), math.inf if args.seconds is not None else TOTAL
        end = began + (usual if args.total is None else args.total)
        inside = ["--inside", str(end), "--journal", str(journal.path)]
        command = [sys.executable, "-m", "tools.bench", *argv, *inside]
        watch(command, journal, args.stages, end + GRACE, lambda name: patience(name, args))
        progress(f"{time.time() - began:.0f} s")
    return summed_up(args, journal)


def settings(args: argparse.Namespace) -> str:
    """The arguments that figures depend on; models have cases of their own."""
    free = ("stages", "seconds", "total", "save", "journal", "inside", "run", "verbose", "model")
    given = [f"{name} {value}" for name, value in sorted(vars(args).items()) if name not in free]
    return ", ".join([*given, *variables()])


def variables() -> list[str]:
    """The environment variables that are set and change kernels."""
    return [f"{name}={os.environ[name]}" for name in (EARLY, SAME_BITS) if os.environ.get(name)]


def patience(name: str, args: argparse.Namespace) -> float:
    """Seconds that a case of a stage may take."""
    stage = STAGES.get(name)
    return max(PATIENCE, args.seconds or 0, stage.seconds if stage else 0)


def summed_up(args: argparse.Namespace, journal: Journal) -> dict[str, Any]:
    """Print all targets, and the stages without figures."""
    results = {name: journal.stages[name] for name in args.stages if name in journal.stages}
    compared = [row for result in results.values() for row in result["targets"]]
    if compared:
        progress(f"\n{comparison_table(compared)}")
    if missing := [name for name in args.stages if name not in results or journal.left[name]]:
        progress(f"\nnot measured, or only in part: {', '.join(missing)}")
    return results


def measure_all(
    args: argparse.Namespace, argv: Sequence[str], journal: Journal, make: Callable[..., Setting] | None = None
) -> dict[str, Any]:
    """Run the stages that the journal lacks. Raises DeviceLost, UsageError."""
    setting = (make or Setting)(args, journal)
    journal.agree(device=torch.cuda.get_device_name())
    if args.inside is not None:
        setting.end = time.perf_counter() + args.inside - time.time()
    with setting.listening():
        for name in args.stages:
            if name in journal.stages:
                continue
            if time.perf_counter() > setting.end:  # many a stage makes a model before its first case
                setting.leave_out(name)
            else:
                measure(name, setting, args, argv)
    return {name: journal.stages[name] for name in args.stages}


def measure(name: str, setting: Setting, args: argparse.Namespace, argv: Sequence[str]) -> None:
    """Run one stage, print and save what it found. Raises DeviceLost."""
    progress(f"stage {name}")
    made, began = stamp(argv), time.perf_counter()
    setting.begin(name, STAGES[name].seconds if args.seconds is None else args.seconds)
    found: dict[str, Any] = {"rows": [], "targets": []}
    body = []
    try:
        with watching_clocks(setting.device) as clocks:
            result = getattr(import_module(f"{__name__}.{STAGES[name].module}"), name)(setting)
        found |= {"rows": result.rows, "targets": result.targets, "clocks": clocks, "variables": variables()}
        body = [result.heading, rows_table(result.rows, result.columns), result.legend] if result.rows else []
        body += [*variables(), text_of(clocks)]
    except Exception as error:
        traceback.print_exc()
        setting.note(name, error)
        setting.check_device()
    found |= {"notes": setting.notes, "seconds": time.perf_counter() - began}
    body += [f"- {note}" for note in setting.notes]
    body += [comparison_table(found["targets"])] if found["targets"] else []
    finish(f"gpu-{name}", made, "\n\n".join(body), found, args.save)
    setting.journal.close(found, setting.left)
