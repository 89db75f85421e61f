"""Model families: from a Hugging Face checkpoint folder to modules that evaluate token trees."""

# isort: off
import models.own  # noqa: F401  # before anything of `kernels` is run
import kernels  # noqa: F401  # sets a filter before torch is imported
import torch

# isort: on
from collections.abc import Callable

from models import gemma, gpt2, llama, opt, phi, phi3, qwen3
from models.checkpoint import Checkpoint
from models.decoder import Decoder
from models.errors import CheckpointError
from models.weights import Weights

_CLASSES: list[type[Decoder]] = [
    *(llama.Llama, gpt2.GPT2, opt.OPT, phi.Phi, phi3.Phi3, qwen3.Qwen3),
    *(gemma.Gemma, gemma.Gemma2, gemma.Gemma3),
]
FAMILIES = {name: family for family in _CLASSES for name in family.architectures}


def load_model(
    checkpoint: Checkpoint,
    dtype: torch.dtype,
    device: torch.device,
    quant: str = "none",
    reader: Callable[..., Weights] = Weights,
) -> Decoder:
    """Build the checkpoint's model; see `Weights` for the arguments, and `Sizes` for another reader.

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
    return family(checkpoint, dtype, device, quant, reader).eval()
