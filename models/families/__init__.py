"""The families, one file each, and the registry of their architectures: from a checkpoint to the model of its
family."""

from collections.abc import Callable
from importlib import import_module
from pkgutil import iter_modules
from typing import Any

import torch

from models.checkpoint.headers import Checkpoint
from models.checkpoint.weights import Weights
from models.decoder import Decoder
from models.draft_heads import HEADS
from models.errors import CheckpointError, nearest

SUPPORTED = "docs/checkpoints.md lists all that are supported"


def _registry() -> dict[str, type[Decoder]]:
    """Return the class of each architecture: the modules of this package have the classes, which list their own."""
    found: dict[str, type[Decoder]] = {}
    for file in iter_modules(__path__):
        module = import_module(f"{__name__}.{file.name}")
        classes = (x for x in vars(module).values() if isinstance(x, type) and x.__module__ == module.__name__)
        families = [x for x in classes if issubclass(x, Decoder)]
        found |= {name: family for family in families for name in vars(family).get("architectures", ())}
    return found


FAMILIES = _registry()


def load_model(
    checkpoint: Checkpoint,
    dtype: torch.dtype,
    device: torch.device,
    quant: str = "none",
    reader: Callable[..., Weights] = Weights,
) -> Any:
    """Build the checkpoint's model, or its draft head (`models.draft_heads`).

    See `Weights` for the arguments, and `Sizes` for another reader.

    Raises:
        CheckpointError: the architecture is not supported, or the folder lacks something that it needs.
    """
    family, checkpoint = _family(checkpoint), viewed(checkpoint)
    with checkpoint.held_open():
        return family(checkpoint, dtype, device, quant, reader).eval()


def viewed(checkpoint: Checkpoint) -> Checkpoint:
    """Return the checkpoint as its family reads it (`Decoder.view`); see `load_model` for errors."""
    family = _family(checkpoint)
    return family.view(checkpoint) if issubclass(family, Decoder) else checkpoint


def _family(checkpoint: Checkpoint) -> type[Any]:
    name = checkpoint.architecture
    return HEADS.get(name) or family_of(name, str(checkpoint.folder / "config.json"))


def family_of(architecture: str, where: str) -> type[Decoder]:
    """Return the class of an architecture. Raises CheckpointError, which names the config `where`, if there is none."""
    if architecture not in FAMILIES:
        raise CheckpointError(
            f"architecture {architecture!r} is not supported",
            where=where,
            remedy=nearest(architecture, FAMILIES, SUPPORTED),
        )
    return FAMILIES[architecture]
