"""The cost of smaller weights: divergence from float32 weights, and how often the best token is the same."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from engine.demo import demo_folder, is_demo
from models.later import later
from tools.bench.cache import COLUMNS, divergence, each_logits, load, sampled
from tools.bench.checkpoints import MODELS_HELP, defaults, is_gguf
from tools.bench.flags import add_numbers, add_run_flags
from tools.bench.measure import progress, weight_bytes
from tools.bench.report import finish, rows_table, slug, stamp

with later():
    from models.formats.linear import FORMATS
    from tools.bench import variants
    from tools.bench.texts import plain

SHOWN = "int8", "int4", "int4-head"  # of real models
AS_STORED = {"gguf": {}, "gguf, int8 activations": {"activations": "int8"}}  # of a GGUF file
LEGEND = """Real models read chapters of Python's documentation, the demo reads its own samples (temperature 1); every
position is compared. *KL* is the divergence from the log-probabilities with float32 weights (of a GGUF file: its own,
dequantised), in nats; *same best token* is the share of positions where both have the same most probable token. *nats*
is the mean negative log-probability of a token of the text. The *gguf* rows run the file as it is, without and with
`--activations int8`; int8 and int4 are made from its dequantised weights. *bytes* is the size of the linear layers
relative to float32; with int4 weights the head is int8."""


def add_parser(commands: Any) -> None:
    parser = commands.add_parser("quant", help="what int8 and int4 weights cost", description=__doc__)
    parser.add_argument("--model", nargs="+", metavar="MODEL", default=[], help=MODELS_HELP)
    parser.add_argument("--only", action="store_true", help="leave the demo out")
    add_numbers(parser, texts=(16, "texts for each model"), new_tokens=(240, "tokens of each text"), seed=0)
    add_run_flags(parser, "benchmarks", None, run)


def run(args: argparse.Namespace, argv: Sequence[str]) -> dict[str, Any]:
    """Measure and report."""
    made, rows = stamp(argv), []
    with TemporaryDirectory(prefix="bench-") as scratch:
        for i, model in enumerate([demo_folder()][args.only :] + defaults(args.model)):
            (folder := Path(scratch, str(i))).mkdir()
            rows += measure(model, "demo" if is_demo(model) else model.resolve().name, args, folder)
    columns = {"model": "{model}", "weights": "{weights}", "bytes": "{bytes:.3f}", "nats": "{nats:.4f}"} | COLUMNS
    names = [path.name for path in defaults(args.model)] if args.only else []
    result = {"results": rows}
    finish(slug("quant", *names), made, f"{rows_table(rows, columns)}\n\n{LEGEND}", result, args.save)
    return result


def measure(model: Path, name: str, args: argparse.Namespace, scratch: Path) -> list[dict[str, Any]]:
    """A row for each format of a model, that of float32 weights first."""
    gguf = is_gguf(model)
    folder = variants.in_dtype(model, "float32", scratch) if gguf else model
    exact = load(folder, args)
    real = (plain(exact, args.new_tokens + 1, i) for i in range(args.texts))
    texts = sampled(exact, args) if is_demo(model) else [*real]
    progress(f"{name}: {sum(map(len, texts))} tokens")
    logits, bytes_of_floats = [*each_logits(exact, texts)], weight_bytes(exact.runner.model)
    shown = FORMATS if is_demo(model) else ["none", *(AS_STORED if gguf else ()), *SHOWN]
    rows = []
    for quant in shown:
        engine = load(model, args, **AS_STORED[quant]) if quant in AS_STORED else load(folder, args, quant=quant)
        rows.append({
            "model": name, "weights": quant, "bytes": weight_bytes(engine.runner.model) / bytes_of_floats,
            **divergence(logits, each_logits(engine, texts), texts),
        })  # fmt: skip
        progress(f"{name}, {quant}: KL {rows[-1]['mean']:.2e}")
    return rows
