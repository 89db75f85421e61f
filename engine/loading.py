"""Choices made when an engine is loaded: device, dtype, chat template."""

import hashlib
import json
import math
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from engine.capabilities import Precision, explicit_precision, pick_precision
from engine.errors import UsageError
from engine.memory import read_size, total_memory
from engine.text.template import ChatTemplate
from engine.text.tokenizer import Tokenizer
from models.checkpoint import Checkpoint
from models.floats import has_products
from models.linear import FORMATS

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}
SAMPLED, PIECE = 16, 1 << 14  # places of a weights file that tell it from others, and bytes read at each


def check_arguments(
    folder: Any, threads: Any, kv_memory: Any, compile: Any, chat_template: Any, parallel: Any, draft: Any, reward: Any
) -> int | None:
    """Check those of `Engine.load` that nothing else does; returns kv_memory in bytes. Raises UsageError."""
    for name, value in {"folder": folder, "draft": draft, "reward": reward, "chat_template": chat_template}.items():
        if isinstance(value, str | Path) or (value is None and name != "folder"):
            continue
        if name != "reward" or not callable(value):
            kind = "a path or a function of (prompt, texts)" if name == "reward" else "a path"
            raise UsageError(f"{name}: expected {kind}, got {value!r}")
    if threads is not None and (type(threads) is not int or not 1 <= threads <= 4096):
        raise UsageError(f"threads: expected an integer from 1 to 4096, got {threads!r}")
    if compile not in ("on", "off"):
        raise UsageError(f"compile: expected on or off, got {compile!r}")
    check_parallel(parallel)
    if kv_memory is None or (type(kv_memory) is int and 0 < kv_memory < 1 << 63):
        return kv_memory
    with suppress(ValueError):
        if isinstance(kv_memory, str):
            return read_size(kv_memory)
    raise UsageError(f"kv_memory: expected bytes, or a size such as '512M' or '1.5G', got {kv_memory!r}")


def check_parallel(parallel: Any) -> None:
    """Refuse a number of searches that is none. Raises UsageError."""
    if type(parallel) is not int or parallel < 1:
        raise UsageError(f"parallel: expected an integer >= 1, got {parallel!r}")


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
    if not isinstance(name, str) or name not in FORMATS:
        raise UsageError(f"quant: expected {' or '.join(FORMATS)}, got {name!r}")
    if reason := FORMATS[name].why_not(device):
        halves = has_products(torch.bfloat16, device)
        remedy = "--dtype bfloat16 halves the weights" if halves else "--dtype float32 is the fastest here"
        raise UsageError(f"quant: {reason}", remedy=f"leave out --quant {name}; {remedy}")


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
