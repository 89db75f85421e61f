"""Mamba, Falcon Mamba and Jamba in GGUF files."""

from dataclasses import replace
from typing import Any, TypeVar

import torch

from models.checkpoint.fields import Fields
from models.gguf.experts import experts
from models.gguf.reader import GGUF
from models.gguf.sizes import attention, epsilon, named

Held = TypeVar("Held", bound=Any)  # `models.gguf.tensors.Stored`


def mamba(file: GGUF, keys: Fields) -> dict[str, Any]:
    """Return the configuration of a Mamba, or of a Falcon Mamba, which norms the inputs of steps, B and C.

    Files lack the epsilon of these norms, which is 1e-6 in all models.
    """
    width = keys.int("embedding_length")
    norms = keys.bool("ssm.dt_b_c_rms", default=False)
    names = named("FalconMambaForCausalLM", "falcon_mamba") if norms else named("MambaForCausalLM", "mamba")
    return names | {
        "hidden_size": width,
        "num_hidden_layers": keys.int("block_count", high=2**14),
        "layer_norm_epsilon": epsilon(keys, "attention.layer_norm_rms_epsilon"),
        "expand": _expand(keys, width),
        "state_size": keys.int("ssm.state_size", high=2**16),
        "conv_kernel": keys.int("ssm.conv_kernel", high=64),
        "time_step_rank": keys.int("ssm.time_step_rank", high=2**16),
        "use_bias": _has(file, ".ssm_in.bias"),
        "use_conv_bias": _has(file, ".ssm_conv1d.bias"),
    }


def jamba(file: GGUF, keys: Fields) -> dict[str, Any]:
    """Return the configuration of a Jamba; layers without key heads are scans.

    Raises:
        CheckpointError: the layers of a kind are not one in each period.
    """
    name, layers = "attention.head_count_kv", keys.int("block_count", high=2**14)
    shared = keys.config.get(name)
    if not isinstance(shared, list) or len(shared) != layers or not any(shared):
        raise keys.error(name, "a number for each layer, not 0 in all")
    plain = keys.changed({name: [heads for heads in shared if heads]})
    config = attention(file, plain) | named("JambaForCausalLM", "jamba")
    config |= {"hidden_act": "silu", "rms_norm_eps": epsilon(keys, "attention.layer_norm_rms_epsilon")}
    mixed = [f"blk.{i}.ffn_gate_inp.weight" in file.tensors for i in range(layers)]
    if any(mixed):
        found = experts(file, keys, some=True)
        config |= {name: found[name] for name in ("num_experts", "num_experts_per_tok")}
        config["intermediate_size"] = found["moe_intermediate_size"]
    else:
        config["num_experts"] = 1
    return (
        config
        | _period(keys, "attn_layer", name, [bool(heads) for heads in shared])
        | (_period(keys, "expert_layer", "expert_count", mixed) if any(mixed) else {})
        | {
            "mamba_expand": _expand(keys, config["hidden_size"]),
            "mamba_d_state": keys.int("ssm.state_size", high=2**16),
            "mamba_d_conv": keys.int("ssm.conv_kernel", high=64),
            "mamba_dt_rank": keys.int("ssm.time_step_rank", high=2**16),
            "mamba_proj_bias": _has(file, ".ssm_in.bias"),
            "mamba_conv_bias": _has(file, ".ssm_conv1d.bias"),
        }
    )


def decays(name: str, stored: Held) -> Held:
    """Return a tensor of a scan by channels; files store A, checkpoints the logarithm of -A."""
    return replace(stored, dtype=torch.float64, negative_exp=True) if name.endswith(".A_log") else stored


def _has(file: GGUF, end: str) -> bool:
    return any(name.endswith(end) for name in file.tensors)


def _expand(keys: Fields, width: int) -> int:
    inner = keys.int("ssm.inner_size")
    if inner % width:
        raise keys.error("ssm.inner_size", f"a multiple of embedding_length, {width}")
    return inner // width


def _period(keys: Fields, field: str, key: str, flags: list[bool]) -> dict[str, int]:
    """Return the period and the offset of the layers with a flag."""
    offset, layers = flags.index(True), len(flags)
    period = next((i for i in range(offset + 1, layers) if flags[i]), layers + offset) - offset
    period = max(period, offset + 1)
    if flags != [i % period == offset for i in range(layers)]:
        raise keys.error(key, "such layers at equal distances")
    return {f"{field}_period": period, f"{field}_offset": offset}
