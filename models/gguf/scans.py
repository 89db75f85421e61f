"""Granite 4, Nemotron-H, Falcon-H1, Mamba-2 in GGUF files: kinds of layers, shapes of vectors, matrices stored in two
halves."""

import math
import re
from dataclasses import replace
from typing import Any, TypeVar

import torch

from models.checkpoint.fields import Fields
from models.config import FULL, RECURRENT
from models.gguf.experts import SIGMOID, experts
from models.gguf.reader import FETCH_AGAIN, GGUF
from models.gguf.rotary import decimal
from models.gguf.sizes import attention, epsilon, gated, named

SCAN = re.compile(r".*\.(?:mamba|mixer)\.(.+)")  # matches the names of a scan's tensors
GATE, UP, DOWN = (f".shared_mlp.{part}_proj.weight" for part in ("gate", "up", "down"))  # names in files
Held = TypeVar("Held", bound=Any)  # `models.gguf.tensors.Stored`


def scans(file: GGUF, keys: Fields, width: int) -> dict[str, Any]:
    """Return the fields of layers with Mamba-2 scans or attention; layers without key heads are scans.

    Args:
        width: the model's width.
    """
    shared = keys.config["attention.head_count_kv"]
    inner = keys.int("ssm.inner_size")
    if inner % width:
        raise keys.error("ssm.inner_size", f"a multiple of embedding_length, {width}")
    return {
        "layer_types": [FULL if heads else RECURRENT for heads in shared],
        "attention_bias": any(name.endswith(".attn_q.bias") for name in file.tensors),
        "position_embedding_type": "rope" if keys.bool("rope.scaling.finetuned", default=True) else "nope",
        "mamba_expand": inner // width,
        **_sizes(file, keys),
    }


def _sizes(file: GGUF, keys: Fields) -> dict[str, Any]:
    """The fields of a scan that Granite 4 and Falcon-H1 share."""
    return {
        "mamba_n_heads": keys.int("ssm.time_step_rank", high=2**16),
        "mamba_n_groups": keys.int("ssm.group_count", high=2**16),
        "mamba_d_state": keys.int("ssm.state_size", high=2**16),
        "mamba_d_conv": keys.int("ssm.conv_kernel", high=64),
        "mamba_conv_bias": any(name.endswith(".ssm_conv1d.bias") for name in file.tensors),
        "mamba_proj_bias": any(name.endswith(".ssm_in.bias") for name in file.tensors),
    }


def falcon_h1(file: GGUF, keys: Fields) -> dict[str, Any]:
    """The configuration of a Falcon-H1, whose matrices in files are already multiplied by its factors."""
    config = gated(file, keys, rotated="all") | named("FalconH1ForCausalLM", "falcon_h1") | _sizes(file, keys)
    return config | {
        "mamba_d_ssm": keys.int("ssm.inner_size"),
        "attention_bias": any(name.endswith(".attn_q.bias") for name in file.tensors),
        "mlp_bias": any(name.endswith(".ffn_up.bias") for name in file.tensors),
        "projectors_bias": config["mamba_proj_bias"],
        "mamba_rms_norm": any(name.endswith(".ssm_norm.weight") for name in file.tensors),
        "mamba_norm_before_gate": False,
    }


def nemotron_h(file: GGUF, keys: Fields) -> dict[str, Any]:
    """Return the configuration of a Nemotron-H. Layers with key heads are attention, layers with a width are MLPs."""
    counts, layers = [], keys.int("block_count", high=2**14)
    for name in ("attention.head_count_kv", "feed_forward_length"):
        found = keys.config.get(name)
        if not isinstance(found, list) or len(found) != layers:
            raise keys.error(name, "a number for each layer")
        counts.append(found)
    shared, widths = counts
    plain = keys.changed({"attention.head_count_kv": [x for x in shared if x]})
    heads, size = _heads(keys)
    kinds = [FULL if x else "mlp" if width else RECURRENT for x, width in zip(shared, widths, strict=True)]
    mixed = _experts(file, keys) if keys.config.get("expert_count") else {}
    kinds = ["moe" if mixed and kind == "mlp" else kind for kind in kinds]
    config = attention(file, plain) | named("NemotronHForCausalLM", "nemotron_h") | {"layers_block_type": kinds}
    return (
        config
        | mixed
        | {
            "mlp_bias": any(name.endswith(".ffn_up.bias") for name in file.tensors),
            "layer_norm_epsilon": epsilon(keys, "attention.layer_norm_rms_epsilon"),
            "mamba_num_heads": heads,
            "mamba_head_dim": size,
            "ssm_state_size": keys.int("ssm.state_size", high=2**16),
        }
        | _plain_sizes(file, keys)
    )


def mamba2(file: GGUF, keys: Fields) -> dict[str, Any]:
    """Return the configuration of a Mamba-2."""
    width, (heads, size) = keys.int("embedding_length"), _heads(keys)
    return named("Mamba2ForCausalLM", "mamba2") | {
        "hidden_size": width,
        "num_hidden_layers": keys.int("block_count", high=2**14),
        "layer_norm_epsilon": epsilon(keys, "attention.layer_norm_rms_epsilon"),
        "expand": heads * size // width,
        "num_heads": heads,
        "head_dim": size,
        "state_size": keys.int("ssm.state_size", high=2**16),
        **_plain_sizes(file, keys),
    }


def _heads(keys: Fields) -> tuple[int, int]:
    """The number of heads of a scan, and the elements of a head."""
    inner, heads = keys.int("ssm.inner_size"), keys.int("ssm.time_step_rank", high=2**16)
    if inner % heads:
        raise keys.error("ssm.inner_size", f"a multiple of ssm.time_step_rank, {heads}")
    return heads, inner // heads


def _plain_sizes(file: GGUF, keys: Fields) -> dict[str, Any]:
    """The fields of a scan that Nemotron-H and Mamba-2 share."""
    return {
        "n_groups": keys.int("ssm.group_count", high=2**16),
        "conv_kernel": keys.int("ssm.conv_kernel", high=64),
        "use_conv_bias": any(name.endswith(".ssm_conv1d.bias") for name in file.tensors),
        "use_bias": any(name.endswith(".ssm_in.bias") for name in file.tensors),
    }


def _experts(file: GGUF, keys: Fields) -> dict[str, Any]:
    """Return the fields of a Nemotron-H's experts."""
    for key in ("moe_latent_size", "nextn_predict_layers"):
        if keys.int(key, 0, low=0):
            raise keys.error(key, "nothing: it is not supported")
    groups = keys.int("expert_group_count", 1, low=0) or 1
    found = experts(file, keys.changed({"expert_group_count": 1}), scores=SIGMOID, some=True)
    return {
        "n_routed_experts": found["num_experts"],
        "num_experts_per_tok": found["num_experts_per_tok"],
        "moe_intermediate_size": found["moe_intermediate_size"],
        "moe_shared_expert_intermediate_size": keys.int("expert_shared_feed_forward_length"),
        "norm_topk_prob": keys.bool("expert_weights_norm", default=True),
        "routed_scaling_factor": decimal(keys.float("expert_weights_scale", 1.0)) or 1.0,  # 0: none
        "n_group": groups,
        "topk_group": keys.int("expert_group_used_count", 1, low=0) or 1,
    }


def vector(name: str, stored: Held) -> Held:
    """Return a scan's tensor in the shape of checkpoints; files store columns, and a row for each group of a norm."""
    found = SCAN.fullmatch(name)
    part = "" if found is None else found[1]
    if part == "A_log":
        stored = replace(stored, dtype=torch.float64, negative_exp=True)
    return replace(stored, shape=(math.prod(stored.shape),)) if part in ("A_log", "D", "norm.weight") else stored


def joined(file: GGUF, tensors: dict[str, Held]) -> None:
    """Give the shared MLP the names of checkpoints, and join its first two matrices into one.

    Raises:
        CheckpointError: the two halves have different formats, or one is missing.
    """
    for name in [name for name in tensors if name.endswith((GATE, UP, DOWN))]:
        layer, part = name.removesuffix(".weight").rsplit(".", 1)
        if part == "down_proj":
            tensors[f"{layer}.output_linear.weight"] = tensors.pop(name)
            continue
        gate, up = (tensors.get(f"{layer}.{half}_proj.weight") for half in ("gate", "up"))
        if gate is None or up is None:
            raise file.error(f"{name}: there is no other half", FETCH_AGAIN)
        if part == "up_proj":
            continue
        if (gate.format, gate.shape[1:]) != (up.format, up.shape[1:]):
            what = f"{name} is {gate.format}, and the matrix beside it {up.format}"
            raise file.error(what, "Quantise both to one format: they are one matrix here.")
        shape = (gate.shape[0] + up.shape[0], *gate.shape[1:])
        tensors[f"{layer}.input_linear.weight"] = replace(gate, shape=shape, below=up)
    for name in [name for name in tensors if name.endswith((GATE, UP))]:
        del tensors[name]
