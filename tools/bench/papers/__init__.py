"""The five papers' main comparisons: our figures beside theirs, with both settings and the differences.

Without names all of them are run, one after the other; one that fails does not lose the others' results. The models are
those given, or those that COPPICE_CHECKPOINTS holds (the coder for aded, the other for the rest), or the bundled demo.
`--save` writes docs/results/papers.md and its pictures.
"""

import argparse
import json
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

from engine.app.cli import add_load_flag
from engine.demo import is_demo, with_defaults
from engine.errors import CoppiceError, UsageError
from models.formats import FORMATS
from models.later import later
from tools.bench.checkpoints import MODEL_HELP, find, located
from tools.bench.figures import draw, need_figures
from tools.bench.measure import progress
from tools.bench.report import add_save_flag, slug, stamp, stamp_text, write_section

with later():
    from tools.bench.papers.common import Findings, Models

PAPERS = ("trie", "ults", "sbon", "aded", "dsbd")


def paper_name(text: str) -> str:
    """A paper's name, for argparse."""
    if text not in PAPERS:
        raise argparse.ArgumentTypeError(f"expected {', '.join(PAPERS)}, got {text!r}")
    return text


def add_parser(commands: Any) -> None:
    parser = commands.add_parser("papers", help="the papers' comparisons and ours", description=__doc__)
    parser.add_argument("papers", nargs="*", type=paper_name, metavar="PAPER", help=f"papers: {' '.join(PAPERS)} (all)")
    parser.add_argument("--model", metavar="MODEL", help=MODEL_HELP % "the bundled demo")
    text = "draft of dsbd: a model, or int8 or int4 for the target in that format (the demo's draft model, else int4)"
    parser.add_argument("--draft", metavar="MODEL", help=text)
    parser.add_argument("--reward", metavar="MODEL", help="reward model of sbon (functions that check the answers)")
    parser.add_argument("--own", action="store_true", help="dsbd: the target in the file's format, not in float32")
    parser.add_argument("--converted", type=Path, metavar="DIR", help="keep a GGUF file's dequantised weights here")
    parser.add_argument("--seed", type=int, default=0, help="seed of prompts and draws (%(default)s)")
    parser.add_argument("--quick", action="store_true", help="check that everything runs; the figures mean nothing")
    add_load_flag(parser, "dtype", default="float32")
    add_load_flag(parser, "threads")
    text = "Python interpreter that has transformers (this one)"
    parser.add_argument("--peer-python", default=sys.executable, metavar="PATH", help=text)
    add_save_flag(parser, "papers")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace, argv: Sequence[str]) -> dict[str, Any]:
    """Run, print and save the chosen papers one by one. Raises CoppiceError at the end if one failed."""
    if args.save is not None:
        need_figures()
    made, found, failed = stamp(argv), {}, []
    with tempfile.TemporaryDirectory(prefix="papers-") as scratch:
        for name in args.papers or PAPERS:
            began, paper = time.perf_counter(), import_module(f"{__name__}.{name}")
            models = opened(args, paper, Path(scratch, name))
            try:
                findings = compare(paper, models)
            except Exception as error:
                if args.verbose:
                    traceback.print_exc()
                failed.append(name)
                found[name] = {"failed": f"{type(error).__name__}: {error}"}
                progress(f"{name} failed: {error}")
                continue
            found[name] = findings.result
            progress(f"{name}: {time.perf_counter() - began:.0f} s")
            print(f"# {paper.TITLE}\n\n{findings.body}\n", flush=True)
            try:
                if args.save is not None:
                    save(args.save, paper, models, stamp_text(made), findings)
            except OSError as error:
                failed.append(name)
                progress(f"{name} could not be saved: {error}")
    print(json.dumps({"bench": "papers", **made, "papers": found}), flush=True)
    if failed:
        raise CoppiceError(f"failed: {', '.join(failed)}", remedy="-v shows where")
    return found


def opened(args: argparse.Namespace, paper: ModuleType, scratch: Path) -> Models:
    """The models of the command line for a paper."""
    scratch.mkdir()
    given = located(args.model) if args.model else find(paper.MODEL)
    target, draft, reward = with_defaults(given, args.draft or (given and "int4"), args.reward)
    kept = args.converted or scratch
    kept.mkdir(parents=True, exist_ok=True)
    settings = {"quick": args.quick, "scratch": scratch, "kept": kept, "dtype": args.dtype, "threads": args.threads,
                "seed": args.seed, "peer_python": args.peer_python, "own": args.own}  # fmt: skip
    demo, target = is_demo(target), Path(target)
    name = "the bundled demo" if demo else target.resolve().name + ", its own format" * args.own
    if args.own and draft not in FORMATS:
        raise UsageError("--own: the draft is no format of the target", remedy="give --draft int8 or int4")
    return Models(target, Path(draft) if draft else None, Path(reward) if reward else None, name, demo, **settings)


def compare(paper: ModuleType, models: Models) -> Findings:
    """A paper's comparison under the paper's setting."""
    findings = paper.run(models)
    setting = " ".join(paper.SETTING.split())
    return findings._replace(body=f"**The paper:** {setting}\n\n**Here:** {findings.body}")


def save(page: Path, paper: ModuleType, models: Models, stamped: str, findings: Findings) -> None:
    """Replace the paper's section of the page and its picture."""
    label = "" if models.demo else f"-{slug(models.name)}"
    section, title = f"papers-{paper.__name__.rpartition('.')[2]}{label}", paper.TITLE
    body = f"{stamped}\n\n{findings.body}"
    if findings.paint is not None and findings.size is not None:
        draw(page.with_name(f"{section}.svg"), findings.size, findings.paint)
        body += f"\n\n![{title}]({section}.svg)"
    write_section(page, section, body, f"{title}: {models.name}" if label else title)
