"""The checkpoint to measure: a folder, or a temporary random one."""

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from engine.errors import UsageError
from tools.bench.measure import progress
from tools.random_checkpoint import make


def add_flags(parser: argparse.ArgumentParser) -> None:
    """--model or --random, and the shape of the latter."""
    group = parser.add_argument_group("checkpoint")
    which = group.add_mutually_exclusive_group()
    which.add_argument("--model", metavar="DIR", help="a checkpoint folder")
    add_random_flag(which, "a random Llama (the default)")
    add_shape_flags(group)
    group.add_argument("--seed", type=int, default=0, help="of random weights and random prompts (%(default)s)")


def add_random_flag(parser: argparse._ActionsContainer, what: str) -> None:
    """--random."""
    text = f"{what}, written to DIR and left there; without DIR to a temporary folder"
    parser.add_argument("--random", nargs="?", const="", metavar="DIR", help=text)


def add_shape_flags(group: argparse._ActionsContainer) -> None:
    """The shape of a random Llama."""
    group.add_argument("--layers", type=int, default=12, help="of the random Llama (%(default)s)")
    group.add_argument("--width", type=int, default=768, help="(%(default)s)")
    group.add_argument("--mlp", type=int, help="(8/3 of the width)")
    group.add_argument("--heads", type=int, help="(width / 64)")
    group.add_argument("--kv-heads", type=int, help="(heads)")
    group.add_argument("--vocab", type=int, default=32000, help="(%(default)s; all defaults: 134M parameters)")


@contextmanager
def checkpoint(args: argparse.Namespace) -> Iterator[tuple[Path, str]]:
    """The folder of the checkpoint, and its name for a report."""
    if args.model is not None:
        yield Path(args.model), Path(args.model).resolve().name
        return
    with TemporaryDirectory(prefix="bench-") as temporary:
        folder = Path(args.random or temporary)
        if args.random and folder.exists() and any(folder.iterdir()):
            raise UsageError(f"--random: {folder} is not empty", remedy="use the checkpoint in it with --model")
        progress("making a random checkpoint")
        try:
            made = make(
                folder,
                layers=args.layers,
                width=args.width,
                mlp=args.mlp or args.width * 8 // 3,
                heads=args.heads or max(1, args.width // 64),
                kv_heads=args.kv_heads,
                vocab=args.vocab,
                seed=args.seed,
            )
        except ValueError as error:
            raise UsageError(str(error)) from error
        shape = f"{args.layers} layers, width {args.width}, vocabulary {args.vocab}"
        yield folder, f"random Llama, {made['parameters'] / 1e6:.0f}M parameters ({shape})"
