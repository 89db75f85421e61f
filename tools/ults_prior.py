"""Gather a prior for ULTS: softmax vectors of a model along its own continuations of prompts.

Without a prior, the search gathers one itself, from the beginning of a text. Vectors from prompts like those of later
requests make a better prior: searches of the same depth find it where they would keep their own, other searches take it
by `--ults-prior FILE`.
"""

import argparse
import random
import sys
from collections.abc import Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path

from engine.app import cli
from engine.errors import CoppiceError, UsageError
from models.checkpoint.files import obstacle
from models.later import later

with later():
    import torch

    from engine.app import records
    from engine.engine import Engine, Request
    from engine.text.prompting import TemplateOptions
    from search import ULTS
    from search.ults.prior import Vectors, cache_file
    from tools.bench.searches import Collect


def main(argv: Sequence[str] | None = None) -> int:
    """The command line. Returns the exit code."""
    parser = cli.Parser("python -m tools.ults_prior", __doc__ or "")
    cli.add_load_flags(parser, "ults_prior")
    group = parser.add_argument_group("prior")
    group.add_argument("--input", required=True, metavar="FILE", help="JSON Lines with prompts, as engine.batch reads")
    group.add_argument("--output", metavar="FILE", help="safetensors to write (where searches of this depth look)")
    group.add_argument("--depth", type=int, default=20, metavar="N", help="tokens of a continuation (%(default)s)")
    children = "without --output: of those searches (the default of ULTS)"
    group.add_argument("--children", type=int, metavar="N", help=children)
    group.add_argument("--completions", type=int, default=1, metavar="N", help="per prompt (%(default)s)")
    group.add_argument("--vectors", type=int, default=1000, metavar="N", help="kept, drawn from all (%(default)s)")
    group.add_argument("--ignore-eos", action="store_true", help="for fixed-length search: no token ends a text")
    group.add_argument("--seed", type=int, default=0, metavar="N", help="(%(default)s)")
    cli.add_verbosity_flags(parser)
    args = parser.parse_args(argv)
    return cli.run(lambda: collect(args), args.verbose)


def collect(args: argparse.Namespace) -> int:
    """Gather vectors with progress on stderr, and write them."""
    args.children = ULTS.children if args.children is None else args.children
    for name, low in (("depth", 1), ("children", 1), ("completions", 1), ("vectors", 1), ("seed", 0)):
        if getattr(args, name) < low:
            raise UsageError(f"--{name}: expected an integer >= {low}, got {getattr(args, name)}")
    if args.output is not None:
        with suppress(OSError):
            Path(args.output).parent.mkdir(parents=True, exist_ok=True)
        if fault := obstacle(args.output):
            raise UsageError(f"--output: {fault[0]}", where=fault[1])
    engine = cli.load_engine(args)
    found: list[Vectors] = []
    records = list(requests(args, engine, found))
    if not records:
        raise UsageError(f"{args.input}: no prompts")
    with closing(engine.serve(records)) as outcomes:
        for done, (i, outcome) in enumerate(outcomes, 1):
            if isinstance(outcome, CoppiceError):
                raise UsageError(f"prompt {i}: {outcome}", where=args.input)
            tell(
                args,
                f"{done} of {len(records)} prompts, {sum(len(v.logp_RK) for v in found)} vectors",
                done == len(records),
            )
    vectors = Vectors.cat(found)
    drawn = random.Random(args.seed).sample(range(len(vectors.logp_RK)), min(args.vectors, len(vectors.logp_RK)))
    kept = torch.tensor(sorted(drawn))
    vectors = Vectors(vectors.logp_RK[kept], vectors.tokens_RK[kept])
    eos = frozenset() if args.ignore_eos else engine.eos_token_ids
    output = Path(args.output) if args.output else cache_file(engine.model_key, args.depth, args.children, eos)
    assert output is not None
    try:
        vectors.save(output)
    except OSError as error:
        raise UsageError(f"{output}: {error.strerror}") from None
    if not args.quiet:
        quartiles = torch.quantile(vectors.logp_RK[:, 0].exp(), torch.tensor([0.25, 0.5, 0.75])).tolist()
        shown = ", ".join(f"{q:.3f}" for q in quartiles)
        print(f"{output}: {len(kept)} vectors; quartiles of the largest probability {shown}", file=sys.stderr)
    return 0


def requests(args: argparse.Namespace, engine: Engine, found: list[Vectors]) -> Iterator[Request]:
    """The prompts of the input. Raises UsageError naming the line."""
    defaults = argparse.Namespace(search="greedy", max_new_tokens=args.depth, stop=[], ignore_eos=args.ignore_eos)
    try:
        lines = Path(args.input).read_bytes().splitlines()
    except OSError as error:
        raise UsageError(f"{args.input}: {error.strerror}") from None
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                request, _ = records.make_request(records.parse_record(line), engine, defaults, TemplateOptions())
            except UsageError as error:
                raise UsageError(f"line {number}: {error}", where=args.input) from None
            yield replace(
                request, search=Collect(found, args.completions, args.seed + number), max_new_tokens=args.depth
            )


def tell(args: argparse.Namespace, text: str, last: bool) -> None:
    """Progress: one line that is drawn over on a terminal, the last line elsewhere."""
    if not args.quiet and (sys.stderr.isatty() or last):
        print(f"\r{text}\x1b[K" if sys.stderr.isatty() else text, end="\n" if last else "", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(cli.ended(main))
