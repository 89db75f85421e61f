"""Qwen3-Next and Qwen3.5 in GGUF files: the kinds of layers, draft layers at the end."""

from typing import Any

from models.checkpoint.fields import Fields
from models.config import FULL
from models.gguf.reader import GGUF


def without_draft_layers(file: GGUF, keys: Fields) -> Fields:
    """The keys of the layers that make text; the tensors of draft layers, which follow those, leave the file."""
    layers = keys.int("block_count", high=2**14) - keys.int("nextn_predict_layers", 0, low=0)
    for name in [*file.tensors]:
        begin, _, rest = name.partition(".")
        if begin == "blk" and (number := rest.partition(".")[0]).isdecimal() and int(number) >= layers:
            del file.tensors[name]
    return Fields({**keys.config, "block_count": layers}, keys.file, keys.prefix)


def delta_nets(file: GGUF, keys: Fields) -> dict[str, Any]:
    """The fields of attention with gates, and of layers with gated delta nets in its place."""
    layers, every = keys.int("block_count", high=2**14), keys.int("full_attention_interval", 4)
    flags = keys.config.get("attention.recurrent_layers")
    flags = [bool(i % every) for i in range(1, layers + 1)] if flags is None else flags
    if not isinstance(flags, list) or len(flags) < layers or any(type(flag) is not bool for flag in flags):
        raise keys.error("attention.recurrent_layers", f"{layers} flags")
    return {
        "layer_types": ["linear_attention" if flag else FULL for flag in flags[:layers]],
        "attention_bias": any(name.endswith(".attn_q.bias") for name in file.tensors),
    }
