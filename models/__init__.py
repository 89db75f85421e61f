"""Model families: from a Hugging Face checkpoint folder to modules that evaluate token trees."""

import torch

from models.checkpoint import Checkpoint
from models.errors import CheckpointError
from models.llama import ARCHITECTURES, Llama

FAMILIES = {name: Llama for name in ARCHITECTURES}


def load_model(checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device) -> Llama:
    """Build the checkpoint's model. Raises CheckpointError if the architecture is not supported."""
    family = FAMILIES.get(checkpoint.architecture)
    if family is None:
        raise CheckpointError(
            f"architecture {checkpoint.architecture!r} is not supported",
            where=str(checkpoint.folder / "config.json"),
            remedy=f"supported: {', '.join(sorted(FAMILIES))}",
        )
    return family(checkpoint, dtype, device).eval()
