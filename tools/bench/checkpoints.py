"""The checkpoint to measure: a real model, or a temporary random one.

`--model` takes what the engine takes: a folder, a GGUF file, a name on the hub. Without it a real model is looked for
in the folder that COPPICE_CHECKPOINTS names.
"""

import argparse
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from engine.errors import UsageError
from models.folders import gguf_file
from models.later import later
from tools.bench.measure import progress
from tools.random_checkpoint import make

with later():
    from engine.load.hub import local_path

VARIABLE = "COPPICE_CHECKPOINTS"
CHAT, CODE = "smollm2-135m-instruct", "qwen2.5-coder-0.5b"  # as names of folders or files begin
MODEL_HELP = f"a checkpoint folder, a GGUF file, or a name on the hub (a {CHAT}* that {VARIABLE} holds; else %s)"
MODELS_HELP = f"models to measure besides the demo: folders, GGUF files, names on the hub (those that {VARIABLE} holds)"


def find(name: str) -> Path | None:
    """The folder or GGUF file in COPPICE_CHECKPOINTS whose name begins with `name`, in any case; folders first."""
    held = os.environ.get(VARIABLE)
    paths = sorted(Path(held).iterdir(), key=lambda path: (path.is_file(), path.name)) if held else []
    return next((path for path in paths if path.name.lower().startswith(name)
                 and (path.suffix == ".gguf" or (path / "config.json").exists())), None)  # fmt: skip


def defaults(given: list[str]) -> list[Path]:
    """The models to measure besides the demo: the given ones, otherwise those in COPPICE_CHECKPOINTS."""
    return [*map(located, given)] if given else [path for name in (CHAT, CODE) if (path := find(name))]


def located(model: str) -> Path:
    """The path of a model, which is fetched if it is a name on the hub."""
    return Path(local_path(model))


def is_gguf(model: Path) -> bool:
    """Whether a model is a GGUF file, or a folder that holds one."""
    return gguf_file(model) is not None


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add --model, --random, and the flags for the shape of a random Llama."""
    group = parser.add_argument_group("checkpoint")
    which = group.add_mutually_exclusive_group()
    which.add_argument("--model", metavar="MODEL", help=MODEL_HELP % "a random Llama")
    add_random_flag(which, "a random Llama")
    add_shape_flags(group)
    group.add_argument("--seed", type=int, default=0, help="seed of random weights and random prompts (%(default)s)")


def add_random_flag(parser: argparse._ActionsContainer, what: str) -> None:
    """Add --random."""
    text = f"{what}, written to DIR and kept; without DIR to a temporary folder"
    parser.add_argument("--random", nargs="?", const="", metavar="DIR", help=text)


def add_shape_flags(group: argparse._ActionsContainer) -> None:
    """Add the flags for the shape of a random Llama."""
    group.add_argument("--layers", type=int, default=12, help="layers of the random Llama (%(default)s)")
    group.add_argument("--width", type=int, default=768, help="its width (%(default)s)")
    group.add_argument("--mlp", type=int, help="width of its MLPs (8/3 of the width)")
    group.add_argument("--heads", type=int, help="its query heads (width / 64)")
    group.add_argument("--kv-heads", type=int, help="its key/value heads (as many)")
    group.add_argument(
        "--vocab", type=int, default=32000, help="its vocabulary (%(default)s; the defaults make 134M parameters)"
    )


@contextmanager
def checkpoint(args: argparse.Namespace) -> Iterator[tuple[Path, str]]:
    """The path of the checkpoint, and its name for a report."""
    model = find(CHAT) if args.model is None and args.random is None else args.model and located(args.model)
    if model is not None:
        progress(f"measuring {model.name}")
        yield model, model.resolve().name
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
