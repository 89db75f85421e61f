"""The five papers' main comparisons: our figures beside theirs, with both settings and the differences.

Without names all of them are run, one after the other; one that fails does not lose the others' results. The models are
the bundled demo, unless others are given. `--save` writes docs/results/papers.md and its pictures.
"""

import argparse
import json
import re
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from engine.app.cli import add_load_flag
from engine.demo import is_demo, with_defaults
from engine.errors import CoppiceError, UsageError
from tools.bench.checkpoints import add_random_flag, add_shape_flags, checkpoint
from tools.bench.figures import draw, need_figures
from tools.bench.measure import progress
from tools.bench.papers import aded, dsbd, sbon, trie, ults
from tools.bench.papers.common import Findings, Models
from tools.bench.report import add_save_flag, stamp, stamp_text, write_section

PAPERS: dict[str, ModuleType] = {"trie": trie, "ults": ults, "sbon": sbon, "aded": aded, "dsbd": dsbd}


def paper_name(text: str) -> str:
    """A paper's name, for argparse."""
    if text not in PAPERS:
        raise argparse.ArgumentTypeError(f"expected {', '.join(PAPERS)}, got {text!r}")
    return text


def add_parser(commands: Any) -> None:
    parser = commands.add_parser("papers", help="the papers' comparisons and ours", description=__doc__)
    parser.add_argument("papers", nargs="*", type=paper_name, metavar="PAPER", help=f"{' '.join(PAPERS)} (all)")
    parser.add_argument("--model", metavar="DIR", help="(the bundled demo)")
    parser.add_argument("--draft", metavar="DIR", help="for dsbd (beside the demo: the demo's)")
    parser.add_argument("--reward", metavar="DIR", help="for sbon (beside the demo: the demo's)")
    random = parser.add_argument_group("random")
    add_random_flag(random, "instead: a random Llama")
    add_shape_flags(random)
    parser.add_argument("--seed", type=int, default=0, help="of prompts, draws and random weights (%(default)s)")
    parser.add_argument("--quick", action="store_true", help="see that everything runs; the figures mean nothing")
    add_load_flag(parser, "dtype", default="float32")
    add_load_flag(parser, "threads")
    parser.add_argument("--peer-python", default=sys.executable, metavar="PATH", help="interpreter with transformers")
    add_save_flag(parser, "papers")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace, argv: Sequence[str]) -> dict[str, Any]:
    """Run, print and save the chosen papers one by one. Raises CoppiceError at the end if one failed."""
    if args.save is not None:
        need_figures()
    made, found, failed = stamp(argv), {}, []
    with tempfile.TemporaryDirectory(prefix="papers-") as scratch, opened(args, Path(scratch)) as models:
        for name in args.papers or PAPERS:
            began = time.perf_counter()
            try:
                findings = compare(PAPERS[name], models)
            except Exception as error:
                if args.verbose:
                    traceback.print_exc()
                failed.append(name)
                found[name] = {"failed": f"{type(error).__name__}: {error}"}
                progress(f"{name} failed: {error}")
                continue
            found[name] = findings.result
            progress(f"{name}: {time.perf_counter() - began:.0f} s")
            print(f"# {PAPERS[name].TITLE}\n\n{findings.body}\n", flush=True)
            try:
                if args.save is not None:
                    save(args.save, name, models, stamp_text(made), findings)
            except OSError as error:
                failed.append(name)
                progress(f"{name} could not be saved: {error}")
    print(json.dumps({"bench": "papers", **made, "model": models.name, "papers": found}), flush=True)
    if failed:
        raise CoppiceError(f"failed: {', '.join(failed)}", remedy="-v shows where")
    return found


@contextmanager
def opened(args: argparse.Namespace, scratch: Path) -> Iterator[Models]:
    """The models of the command line; the demo by default."""
    settings = {"quick": args.quick, "scratch": scratch, "dtype": args.dtype, "threads": args.threads,
                "seed": args.seed, "peer_python": args.peer_python}  # fmt: skip
    if args.random is not None:
        if args.model is not None:
            raise UsageError("--random: there is a --model too")
        with checkpoint(args) as (folder, name):
            yield Models(folder, None, None, name, "random", **settings)
        return
    target, *beside = with_defaults(args.model, args.draft, args.reward)
    draft, reward = (None if folder is None else Path(folder) for folder in beside)
    demo, target = is_demo(target), Path(target)
    yield Models(target, draft, reward, "the bundled demo" if demo else target.resolve().name,
                 "demo" if demo else "given", **settings)  # fmt: skip


def compare(paper: ModuleType, models: Models) -> Findings:
    """A paper's comparison under the paper's setting; for a random model it may be a reason instead."""
    if models.kind == "random" and paper.RANDOM:
        why = " ".join(paper.RANDOM.split())
        return Findings(f"{models.name}: nothing to be shown. {why}", {"not_shown": why})
    findings = paper.run(models)
    setting = " ".join(paper.SETTING.split())
    return findings._replace(body=f"**The paper:** {setting}\n\n**Here:** {findings.body}")


def save(page: Path, name: str, models: Models, stamped: str, findings: Findings) -> None:
    """Replace the paper's section of the page and its picture."""
    label = "" if models.kind == "demo" else "-random" if models.kind == "random" else f"-{slug(models.name)}"
    section, title = f"papers-{name}{label}", PAPERS[name].TITLE
    body = f"{stamped}\n\n{findings.body}"
    if findings.paint is not None and findings.size is not None:
        draw(page.with_name(f"{section}.svg"), findings.size, findings.paint)
        body += f"\n\n![{title}]({section}.svg)"
    write_section(page, section, body, f"{title}: {models.name}" if label else title)


def slug(name: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
