"""Choices made when an engine is loaded: device, dtype, chat template."""

import hashlib
import json
import math
from pathlib import Path

import torch

from engine.capabilities import Precision, explicit_precision, pick_precision
from engine.errors import UsageError
from engine.memory import total_memory
from engine.template import ChatTemplate
from engine.tokenizer import Tokenizer
from models.checkpoint import Checkpoint
from models.int8 import why_no_int8
from models.linear import has_products

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}
SAMPLED, PIECE = 16, 1 << 14  # places of a weights file that tell it from others, and bytes read at each


def pick_device(name: str) -> torch.device:
    """The device of a name; "auto" is the GPU if there is one. Raises UsageError."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name not in ("cpu", "cuda"):
        raise UsageError(f"device: expected auto, cpu or cuda, got {name!r}")
    if name == "cuda" and not torch.cuda.is_available():
        raise UsageError("device: this machine has no CUDA GPU that torch can use", remedy="use --device cpu")
    return torch.device(name)


def pick_dtype(name: str, checkpoint: Checkpoint, device: torch.device) -> Precision:
    """The dtype of a name, see `Engine.load`, and its reason. Raises UsageError."""
    if name == "auto":
        size = torch.float32.itemsize * sum(math.prod(tensor.shape) for tensor in checkpoint.tensors.values())
        return pick_precision(checkpoint.torch_dtype, device, size, total_memory())
    if not isinstance(name, str) or name not in DTYPES:
        raise UsageError(f"dtype: expected one of auto, {', '.join(DTYPES)}, got {name!r}")
    return explicit_precision(DTYPES[name], device)


def check_quant(name: str, device: torch.device) -> None:
    """Refuse a quantisation that is unknown, or that this machine cannot run. Raises UsageError."""
    if name not in ("none", "int8"):
        raise UsageError(f"quant: expected none or int8, got {name!r}")
    if name == "int8" and (reason := why_no_int8(device)):
        halves = has_products(torch.bfloat16, device)
        remedy = "--dtype bfloat16 halves the weights" if halves else "--dtype float32 is the fastest here"
        raise UsageError(f"quant: {reason}", remedy=f"leave out --quant int8; {remedy}")


def load_template(folder: str | Path, choice: str | Path | None, tokenizer: Tokenizer | None) -> ChatTemplate | None:
    """The chat template to use: a file, none, or the checkpoint's own."""
    if choice == "none" or tokenizer is None:
        return None
    return ChatTemplate.load(folder, tokenizer) if choice is None else ChatTemplate.from_file(choice, tokenizer)


def model_key(checkpoint: Checkpoint, dtype: torch.dtype, quant: str) -> str:
    """A name for a model as it is computed: the folder's, and a hash of configuration, dtype and samples of weights."""
    digest = hashlib.sha256(json.dumps([checkpoint.config, str(dtype), quant], sort_keys=True).encode())
    for path in sorted({info.file for info in checkpoint.tensors.values()}):
        size = path.stat().st_size
        digest.update(f"{path.name} {size}".encode())
        with path.open("rb") as file:
            for i in range(SAMPLED):
                file.seek(max(0, size - PIECE) * i // (SAMPLED - 1))
                digest.update(file.read(PIECE))
    return f"{checkpoint.folder.resolve().name}-{digest.hexdigest()[:16]}"
