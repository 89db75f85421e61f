"""Fields that the architectures of GGUF files share, with Hugging Face's field names."""

from typing import Any

from models.checkpoint.fields import Fields
from models.config import FULL, SLIDING
from models.gguf.reader import GGUF
from models.gguf.rotary import decimal, rotary


def named(architecture: str, model_type: str) -> dict[str, Any]:
    """Return the fields that name a model."""
    return {"architectures": [architecture], "model_type": model_type}


def attention(file: GGUF, keys: Fields) -> dict[str, Any]:
    """Return the sizes that architectures with rotary embeddings have in common."""
    width, heads = keys.int("embedding_length"), alike(keys, "attention.head_count")
    head_dim = keys.int("attention.key_length", width // heads, high=2**14)
    if keys.int("attention.value_length", head_dim) != head_dim:
        raise keys.error("attention.value_length", f"the attention.key_length, {head_dim}")
    return {
        "hidden_size": width,
        "intermediate_size": mlp_width(file, keys),
        "num_hidden_layers": keys.int("block_count", high=2**14),
        "num_attention_heads": heads,
        "num_key_value_heads": alike(keys, "attention.head_count_kv", heads),
        "head_dim": head_dim,
        "max_position_embeddings": keys.int("context_length", high=2**31),
    }


def mlp_width(file: GGUF, keys: Fields) -> int:
    """Return the width of the MLP of the first layer that has one; the width of experts, if all layers have experts."""
    layers = range(keys.int("block_count", high=2**14))
    names = [name for i in layers if (name := f"blk.{i}.ffn_up.weight") in file.tensors]
    if not names and "blk.0.ffn_down_exps.weight" in file.tensors:
        return file.entry("blk.0.ffn_down_exps.weight").shape[-1]
    return file.entry(names[0] if names else "blk.0.ffn_up.weight").shape[0]


def gated(file: GGUF, keys: Fields, rotated: str) -> dict[str, Any]:
    """Return the configuration of a decoder with RMSNorms and a gated MLP; `rotated`: see `rotary`."""
    config = attention(file, keys)
    rope = rotary(file, keys, config["head_dim"], config["max_position_embeddings"], rotated)
    return config | rope | {"hidden_act": "silu", "rms_norm_eps": epsilon(keys, "attention.layer_norm_rms_epsilon")}


def alike(keys: Fields, name: str, default: Any = None) -> int:
    """Read a number that a file may give for each layer. Raises CheckpointError if layers differ."""
    value = keys.config.get(name)
    if isinstance(value, list):
        if len({*value}) != 1:
            raise keys.error(name, "one number for all layers")
        keys = Fields({name: value[0]}, keys.file, keys.prefix)
    return keys.int(name, high=2**14) if default is None else keys.int(name, default, high=2**14)


def epsilon(keys: Fields, name: str) -> float:
    """Read the number that norms add to the mean of squares."""
    return decimal(keys.float(name, low=0.0, high=1.0))


def windows(keys: Fields, window: int, period: int, first: bool = False) -> dict[str, Any]:
    """Return the kinds of layers: `attention.sliding_window_pattern` is a period, or has a flag for each layer.

    Args:
        first: the first layer of a period has no window, else the last one.
    """
    name, layers = "attention.sliding_window_pattern", keys.int("block_count", high=2**14)
    slides = keys.config.get(name)
    if not isinstance(slides, list):
        every = keys.int(name, period, low=0)
        slides = [every == 0 or bool((i if first else i + 1) % every) for i in range(layers)]
    if len(slides) != layers or any(flag not in (0, 1) for flag in slides):  # llama.cpp saves numbers
        raise keys.error(name, f"a number, or {layers} flags")
    types = [SLIDING if flag and window else FULL for flag in slides]
    return {"layer_types": types, "sliding_window": window or None}
