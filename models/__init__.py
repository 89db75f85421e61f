"""Model families: from a Hugging Face checkpoint folder to modules that evaluate token trees."""

import torch

import models.own  # noqa: F401  # isort: split
from models import gpt2, llama, opt, phi, phi3
from models.checkpoint import Checkpoint
from models.errors import CheckpointError

Model = llama.Llama | gpt2.GPT2 | opt.OPT | phi.Phi | phi3.Phi3
FAMILIES: dict[str, type[Model]] = {
    **dict.fromkeys(llama.ARCHITECTURES, llama.Llama),
    **dict.fromkeys(gpt2.ARCHITECTURES, gpt2.GPT2),
    **dict.fromkeys(opt.ARCHITECTURES, opt.OPT),
    **dict.fromkeys(phi.ARCHITECTURES, phi.Phi),
    **dict.fromkeys(phi3.ARCHITECTURES, phi3.Phi3),
}


def load_model(checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device, quant: str = "none") -> Model:
    """Build the checkpoint's model; see `Weights` for the arguments.

    Raises:
        CheckpointError: the architecture is not supported, or the folder does not hold what it needs.
    """
    family = FAMILIES.get(checkpoint.architecture)
    if family is None:
        raise CheckpointError(
            f"architecture {checkpoint.architecture!r} is not supported",
            where=str(checkpoint.folder / "config.json"),
            remedy=f"supported: {', '.join(sorted(FAMILIES))}",
        )
    return family(checkpoint, dtype, device, quant).eval()
