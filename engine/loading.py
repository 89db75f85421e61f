"""Choices made when an engine is loaded: device, dtype, chat template."""

from pathlib import Path

import torch

from engine.errors import UsageError
from engine.template import ChatTemplate
from engine.tokenizer import Tokenizer
from models.linear import can_pack

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}


def pick_device(name: str) -> torch.device:
    """The device of a name; "auto" is the GPU if there is one. Raises UsageError."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name not in ("cpu", "cuda"):
        raise UsageError(f"device: expected auto, cpu or cuda, got {name!r}")
    if name == "cuda" and not torch.cuda.is_available():
        raise UsageError("device: this machine has no CUDA GPU that torch can use", remedy="use --device cpu")
    return torch.device(name)


def pick_dtype(name: str, own: torch.dtype, device: torch.device) -> torch.dtype:
    """The dtype of a name, see `Engine.load`. Raises UsageError."""
    if name == "auto":
        if own == torch.float64 or (own == torch.float16 and device.type == "cpu" and not can_pack(own, device)):
            return torch.float32
        return own
    if name not in DTYPES:
        raise UsageError(f"dtype: expected one of auto, {', '.join(DTYPES)}, got {name!r}")
    return DTYPES[name]


def load_template(folder: str | Path, choice: str | Path | None, tokenizer: Tokenizer | None) -> ChatTemplate | None:
    """The chat template to use: a file, none, or the checkpoint's own."""
    if choice == "none" or tokenizer is None:
        return None
    return ChatTemplate.load(folder, tokenizer) if choice is None else ChatTemplate.from_file(choice, tokenizer)
