"""Compare the memory of processes with the total of `--plan`: each row is a process of its own."""

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from engine.demo import demo_folder, is_demo
from tools.bench.checkpoints import MODELS_HELP, defaults, is_gguf
from tools.bench.flags import add_numbers, add_run_flags
from tools.bench.measure import progress
from tools.bench.report import finish, rows_table, slug, stamp

LEGEND = """*plan* is the total that `--plan` predicts for this prompt, reply and search. *loaded* is the resident
memory after loading, *peak* its maximum over loading and the reply, in a process with the imports of `engine.chat`.
*peak / plan* should be within 8% of 1. MB are 2^20 bytes here, as in `--plan`."""

FORMATS = {  # arguments of `Engine.load`, by their names in the table
    "float32": {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16"},
    "int8": {"quant": "int8"},
    "int4": {"quant": "int4"},
    "gguf": {},
}
COLUMNS = {
    "model": "{model}", "weights": "{format}", "cache": "{cache}", "beams": "{beams}", "plan MB": "{plan:,.0f}",
    "loaded MB": "{loaded:,.0f}", "peak MB": "{peak:,.0f}", "peak / plan": "{ratio:.3f}", "load s": "{seconds:.1f}",
}  # fmt: skip
WORKER = """
import json, sys
folder, options, beams, prompt, new, threads, memory = json.loads(sys.argv[1])
from engine.load.startup import import_torch
import_torch()  # what a command line leaves out, this does too
import engine.app.chat
from engine import Engine
from engine import LoadOptions
from engine.load.budget import peak, plan, resident
from engine.load.sizes import Workload
from search import Trie
start = peak()
work = Workload(Trie(beams=beams), prompt, new)
planned = plan(LoadOptions(folder, **options), work)
budget = {"memory": memory, "workload": work} if memory else {"kv_memory": planned.cache(2 * max(work.slots))}
engine = Engine.load(folder, threads=threads, parallel=1, **options, **budget)
loaded, words = resident(), min(engine.shape.vocab_size, 1000) - 5
ids = [5 + i * 7 % words for i in range(prompt)]
engine.generate([ids], work.search, max_new_tokens=new, ignore_eos=True)
found = {"plan": max(start, planned.total(max(work.slots))), "loaded": loaded, "peak": peak()}
print(json.dumps({**found, "seconds": engine.load_seconds, "slots": engine.pool.pages}))
"""


def add_parser(commands: Any) -> None:
    parser = commands.add_parser("memory", help="compare resident memory with the total of --plan", description=__doc__)
    parser.add_argument("--model", nargs="+", metavar="MODEL", default=[], help=MODELS_HELP)
    parser.add_argument(
        "--beams", nargs="+", type=int, metavar="N", default=[1, 4, 15], help="numbers of beams (1 4 15)"
    )
    text = "formats of weights (all); a GGUF file has its own"
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=[*FORMATS], help=text)
    parser.add_argument(
        "--caches", nargs="+", choices=("auto", "int8"), default=["auto", "int8"], help="--kv-dtype (both)"
    )
    parser.add_argument("--memory", metavar="SIZE", help="load each model with this budget")
    parser.add_argument("--only", action="store_true", help="leave the demo out")
    add_numbers(parser, prompt=(300, "tokens of the prompt"), new_tokens=(24, "tokens of the reply"))
    add_run_flags(parser, "benchmarks", None, run)


def run(args: argparse.Namespace, argv: Sequence[str]) -> dict[str, Any]:
    """Measure and report."""
    made, rows = stamp(argv), [*measured(args)]
    names = [path.name for path in defaults(args.model)] if args.only else []
    result = {"results": rows}
    finish(slug("memory", *names), made, f"{rows_table(rows, COLUMNS)}\n\n{LEGEND}", result, args.save)
    return result


def measured(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """A row for each model, format, cache and number of beams; numbers in MB."""
    for folder in [demo_folder()][args.only :] + defaults(args.model):
        name = "demo" if is_demo(folder) else folder.resolve().name
        formats = ["gguf"] if is_gguf(folder) else [f for f in args.formats if f != "gguf"]
        for format, cache in ((f, c) for f in formats for c in args.caches):
            options = {**FORMATS[format], "kv_dtype": cache, "device": "cpu"}
            for beams in args.beams:
                given = str(folder), options, beams, args.prompt, args.new_tokens, args.threads, args.memory
                command = [sys.executable, "-c", WORKER, json.dumps(given)]
                done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
                found = json.loads(done.stdout)
                found |= {key: found[key] / 2**20 for key in ("plan", "loaded", "peak")}
                row = {"model": name, "format": format, "cache": cache, "beams": beams, **found}
                row["ratio"] = row["peak"] / row["plan"]
                progress(f"{name} {format} {cache} {beams}: {row['ratio']:.3f} of {row['plan']:.0f} MB")
                yield row
