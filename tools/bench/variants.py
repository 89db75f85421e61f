"""A checkpoint in other forms: as floats of a dtype, as a GGUF file for llama.cpp, and its first layers."""

import json
import math
import re
import struct
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from engine.errors import UsageError
from kernels.linear.blocks import BLOCKS
from models.checkpoint.headers import Checkpoint
from models.checkpoint.listing import WEIGHTS
from models.checkpoint.tensor_files import buffer_of, write_tensors
from models.gguf.tensors import Stored
from tools.convert import copy_others
from tools.gguf import write_files

GGUF_TYPES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16", "int8": "Q8_0", "int4": "Q4_0"}
ALIGNED = 32  # bytes, GGUF's default
NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


def in_dtype(model: Path, dtype: str, scratch: Path) -> Path:
    """A folder of the checkpoint with its weights as floats of `dtype`: its own if they are, otherwise one in
    `scratch`, made once. Blocks of a GGUF file become the floats that they stand for, rounded to `dtype`."""
    checkpoint, wanted = Checkpoint.open(model), getattr(torch, dtype)
    blocks = checkpoint.gguf is not None
    if checkpoint.torch_dtype == wanted and not blocks:
        return model
    made = scratch / f"checkpoint-{dtype}"
    if made.exists():
        return made
    made.mkdir()
    config = {k: v for k, v in checkpoint.config.items() if k != "torch_dtype"} | {"dtype": dtype}
    if blocks:
        write_files(checkpoint, config, made)
    else:
        copy_others(model, made)
        (made / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")

    def quantised(name: str) -> tuple[int, int] | None:
        """The shape of the matrix if it is stored in blocks."""
        info = checkpoint.tensors[name]
        return (info.rows, info.elements // info.rows) if isinstance(info, Stored) and info.format in BLOCKS else None

    def floats(name: str) -> Tensor:
        if shape := quantised(name):
            weight = checkpoint.grouped(name, name, shape, "Linear", biased=True)
            assert weight is not None
            return weight.floats().to(wanted)
        x = checkpoint.read([name])[name]
        return x.to(wanted) if x.is_floating_point() else x

    shapes = {}
    for name, info in checkpoint.tensors.items():
        shape = quantised(name)
        kept = wanted if shape or info.dtype.is_floating_point else info.dtype
        shapes[name] = torch.empty(shape or info.shape, dtype=kept, device="meta")
    with open(made / WEIGHTS, "wb") as file:
        write_tensors(file, shapes, {"format": "pt"}, floats)
    return made


def first_layers(folder: Path, count: int, scratch: Path) -> Path:
    """A folder with the first `count` layers of a checkpoint of floats, its final norm and its head, made once."""
    made = scratch / f"layers-{count}"
    if made.exists():
        return made
    made.mkdir()
    copy_others(folder, made)
    checkpoint = Checkpoint.open(folder)
    config: dict[str, Any] = {**checkpoint.config, "num_hidden_layers": count}
    if "layer_types" in config:
        config["layer_types"] = config["layer_types"][:count]
    (made / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
    layers = {name: re.search(r"layers\.(\d+)\.", name) for name in checkpoint.tensors}
    kept = [name for name, layer in layers.items() if layer is None or int(layer[1]) < count]
    with open(made / WEIGHTS, "wb") as file:
        write_tensors(file, checkpoint.read(kept), {"format": "pt"})
    return made


def gguf(folder: Path, kind: str, program: Path, scratch: Path) -> Path:
    """The checkpoint as a GGUF file with matrices of a kind, made by the llama-quantize that lies beside `program`.

    Raises UsageError for a checkpoint that is no plain Llama, or if llama-quantize fails.
    """
    plain, wanted = scratch / "F32.gguf", scratch / f"{GGUF_TYPES[kind]}.gguf"
    if not plain.exists():
        write_gguf(Checkpoint.open(folder), plain)
    if not wanted.exists():
        command = [program.with_name("llama-quantize"), plain, wanted, GGUF_TYPES[kind]]
        try:
            subprocess.run(command, check=True, capture_output=True, text=True)
        except OSError as error:
            raise UsageError(
                f"llama-quantize: {error.strerror}", remedy="build it beside llama-batched-bench"
            ) from error
        except subprocess.CalledProcessError as error:
            last = error.stderr.strip().splitlines()[-1:]
            raise UsageError(f"llama-quantize failed: {' '.join(last)}", where=wanted.name) from error
    return wanted


def write_gguf(checkpoint: Checkpoint, path: Path) -> None:
    """Write a Llama as a GGUF file (version 3) of float32 tensors without a vocabulary: for speed, not for text.

    The layout is that of ggml's docs/gguf.md. Raises UsageError for other families.
    """
    config = checkpoint.config
    biased = any(name.endswith(".bias") for name in checkpoint.tensors)
    if checkpoint.architecture != "LlamaForCausalLM" or biased:
        raise UsageError(f"llama.cpp: only a Llama without biases is converted, got {checkpoint.architecture}")
    heads, width = config["num_attention_heads"], config["hidden_size"]
    rope = config.get("rope_parameters") or config
    values = {
        "general.architecture": "llama",
        "llama.block_count": config["num_hidden_layers"],
        "llama.context_length": config["max_position_embeddings"],
        "llama.embedding_length": width,
        "llama.feed_forward_length": config["intermediate_size"],
        "llama.attention.head_count": heads,
        "llama.attention.head_count_kv": config.get("num_key_value_heads") or heads,
        "llama.attention.layer_norm_rms_epsilon": float(config["rms_norm_eps"]),
        "llama.rope.dimension_count": config.get("head_dim") or width // heads,
        "llama.rope.freq_base": float(rope.get("rope_theta", 10000.0)),
        "llama.vocab_size": config["vocab_size"],
        "tokenizer.ggml.model": "none",
    }
    shapes = {gguf_name(name): info.shape for name, info in checkpoint.tensors.items()}
    head = b"GGUF" + struct.pack("<IQQ", 3, len(shapes), len(values))
    head += b"".join(packed(key, value) for key, value in values.items())
    offset = 0
    for name, shape in shapes.items():
        head += text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *reversed(shape), 0, offset)  # 0: float32
        offset += padded(math.prod(shape) * 4)
    with open(path, "wb") as file:
        file.write(head.ljust(padded(len(head)), b"\0"))
        for tensor in gguf_tensors(checkpoint):
            file.write(buffer_of(tensor))
            file.write(bytes(padded(tensor.nbytes) - tensor.nbytes))


def gguf_name(name: str) -> str:
    """A tensor's name in GGUF."""
    if name.startswith("model.layers."):
        layer, _, rest = name.removeprefix("model.layers.").partition(".")
        return f"blk.{layer}.{NAMES[rest.removesuffix('.weight')]}.weight"
    ends = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    return f"{ends[name.removesuffix('.weight')]}.weight"


def gguf_tensors(checkpoint: Checkpoint) -> Iterator[Tensor]:
    """All tensors in float32, in the file's order. llama.cpp turns neighbouring pairs of a head, not its halves."""
    config = checkpoint.config
    for name, x in checkpoint.read(checkpoint.tensors).items():
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            heads = config["num_attention_heads"]
            if "k_proj" in name:
                heads = config.get("num_key_value_heads") or heads
            x = x.view(heads, 2, -1, x.shape[1]).transpose(1, 2).reshape(x.shape)
        yield x.float().contiguous()


def packed(key: str, value: Any) -> bytes:
    """A key and its value: types 4 (uint32), 6 (float32) and 8 (string)."""
    if isinstance(value, str):
        return text(key) + struct.pack("<I", 8) + text(value)
    return text(key) + (struct.pack("<If", 6, value) if isinstance(value, float) else struct.pack("<II", 4, value))


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


def padded(size: int) -> int:
    return -(-size // ALIGNED) * ALIGNED
