"""The cost of smaller weights: divergence from float32 weights, and how often the best token is the same."""

import argparse
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

from engine.demo import demo_folder, is_demo
from models.formats.linear import FORMATS
from tools.bench.cache import COLUMNS, divergence, load, log_probabilities, sampled
from tools.bench.flags import add_numbers, add_run_flags
from tools.bench.measure import progress, weight_bytes
from tools.bench.report import finish, rows_table, stamp

PLAIN: dict[str, Any] = {"STEPS": (8.0,), "SPANS": (15.0,)}  # candidates of models/formats/int4.py
LEGEND = """The texts are samples of the float32 model (temperature 1); every position is compared. *KL*: divergence
from the log-probabilities of float32 weights, in nats; *same best token*: both have the same most probable one.
*plain*: scales by the largest magnitude of a group (without zeros: an eighth of it) instead of the least squared error
of several candidates. *bytes*: of the linear layers, over those of float32; the head takes int8 beside int4."""


def add_parser(commands: Any) -> None:
    parser = commands.add_parser("quant", help="what int8 and int4 weights cost", description=__doc__)
    parser.add_argument("--model", nargs="+", metavar="DIR", default=[], help="checkpoint folders besides the demo")
    add_numbers(parser, texts=(16, "samples of each model"), new_tokens=(240, "of each"), seed=0)
    add_run_flags(parser, "benchmarks", None, run)


def run(args: argparse.Namespace, argv: Sequence[str]) -> dict[str, Any]:
    """Measure and report."""
    made, rows = stamp(argv), []
    for folder in (demo_folder(), *map(Path, args.model)):
        rows += measure(folder, "demo" if is_demo(folder) else folder.resolve().name, args)
    columns = {"model": "{model}", "weights": "{weights}", "bytes": "{bytes:.3f}"} | COLUMNS
    finish("quant", made, f"{rows_table(rows, columns)}\n\n{LEGEND}", result := {"results": rows}, args.save)
    return result


def measure(folder: Path, name: str, args: argparse.Namespace) -> list[dict[str, Any]]:
    """A row for each format of a model."""
    plain, texts, exact = sampled(folder, name, args)
    bytes_of_floats, rows = weight_bytes(plain.runner.model), []
    for quant in FORMATS:
        for rule in ("", "plain ") if quant.startswith("int4") else ("",):
            if quant == "none":
                continue
            with mock.patch.multiple("models.formats.int4", **PLAIN) if rule else nullcontext():
                engine = load(folder, args, quant=quant)
            rows.append({
                "model": name, "weights": rule + quant, "bytes": weight_bytes(engine.runner.model) / bytes_of_floats,
                **divergence(exact, log_probabilities(engine, texts)),
            })  # fmt: skip
            progress(f"{name}, {rule}{quant}: KL {rows[-1]['mean']:.2e}")
    return rows
