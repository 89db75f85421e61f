"""Qwen3-Next and Qwen3.5 in GGUF files: the kinds of layers, the order of heads, draft layers at the end."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, TypeVar

import torch

from models.checkpoint.fields import Fields
from models.config import FULL
from models.gguf.reader import GGUF

DELTA_NET = ".linear_attn."  # marks the names of a delta net's tensors
Ordered = TypeVar("Ordered", bound=Any)  # `models.gguf.tensors.Stored`


def without_draft_layers(file: GGUF, keys: Fields) -> Fields:
    """Return the keys without draft layers, which come last, and remove their tensors from `file`."""
    layers = keys.int("block_count", high=2**14) - keys.int("nextn_predict_layers", 0, low=0)
    for name in [*file.tensors]:
        begin, _, rest = name.partition(".")
        if begin == "blk" and (number := rest.partition(".")[0]).isdecimal() and int(number) >= layers:
            del file.tensors[name]
    return keys.changed({"block_count": layers})


def delta_nets(file: GGUF, keys: Fields) -> dict[str, Any]:
    """Return the fields of gated attention, and of the layers with gated delta nets in its place."""
    layers, every = keys.int("block_count", high=2**14), keys.int("full_attention_interval", 4)
    flags = keys.config.get("attention.recurrent_layers")
    flags = [bool(i % every) for i in range(1, layers + 1)] if flags is None else flags
    if not isinstance(flags, list) or len(flags) < layers or any(type(flag) is not bool for flag in flags):
        raise keys.error("attention.recurrent_layers", f"{layers} flags")
    config: dict[str, Any] = {
        "layer_types": ["linear_attention" if flag else FULL for flag in flags[:layers]],
        "attention_bias": any(name.endswith(".attn_q.bias") for name in file.tensors),
    }
    if not any(flags[:layers]):
        return config
    heads, width = keys.int("ssm.time_step_rank", high=2**14), keys.int("ssm.inner_size", high=2**24)
    if width % heads:
        raise keys.error("ssm.inner_size", f"a multiple of ssm.time_step_rank, {heads}")
    return config | {
        "linear_num_value_heads": heads,
        "linear_value_head_dim": width // heads,
        "linear_num_key_heads": keys.int("ssm.group_count", high=2**14),
        "linear_key_head_dim": keys.int("ssm.state_size", high=2**14),
        "linear_conv_kernel_dim": keys.int("ssm.conv_kernel", high=64),
    }


def ordered(arch: str, config: Mapping[str, Any], name: str, stored: Ordered) -> Iterator[tuple[str, Ordered]]:
    """Yield a tensor of a gated delta net in the order of checkpoints.

    Files of Qwen3.5 store the first value head of every key head, then the second ones, and so on; checkpoints store
    the value heads of one key head side by side. Files of Qwen3-Next use the order of checkpoints, with one matrix that
    has strengths and decays key head by key head.
    """
    keys, values = (config.get(f"linear_num_{kind}_heads", 1) for kind in ("key", "value"))
    each, part = values // keys, name.rpartition(DELTA_NET)[2].removesuffix(".weight")
    if part == "A_log":
        stored = replace(stored, dtype=torch.float64, negative_exp=True)
    if part == "in_proj_ba" and stored.shape[0] == 2 * values:
        for half, first in (("b", 0), ("a", each)):
            pieces = tuple(range(2 * i * each + first, 2 * i * each + first + each) for i in range(keys))
            shape = values, *stored.shape[1:]
            yield name.replace("in_proj_ba", f"in_proj_{half}"), replace(stored, shape=shape, pieces=pieces)
        return
    before = 2 * keys * config.get("linear_key_head_dim", 1) if part in ("in_proj_qkv", "conv1d") else 0
    size = 1 if part in ("in_proj_a", "in_proj_b", "A_log", "dt_bias") else config.get("linear_value_head_dim", 1)
    if arch == "qwen3next" or part == "norm" or each == 1:
        yield name, stored
        return
    heads = [head * keys + key for key in range(keys) for head in range(each)]
    pieces = tuple(range(before + head * size, before + (head + 1) * size) for head in heads)
    if part == "out_proj":
        yield name, replace(stored, columns=pieces)
        return
    fits = stored.shape[0] == before + values * size  # a shape that differs from the model's is refused later
    yield name, replace(stored, pieces=(range(before), *pieces)) if fits else stored
