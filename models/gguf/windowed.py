"""Architectures of GGUF files with windows in some layers, of 2026: Laguna, Mellum 2, Cohere 2 with experts, Muse
Glimmer. Configurations have Hugging Face's field names."""

import itertools
from typing import Any

from models.checkpoint.fields import Fields
from models.config import FULL, SLIDING
from models.gguf.delta_nets import without_draft_layers
from models.gguf.experts import SIGMOID, SOFTMAX, experts, mlp_kinds
from models.gguf.reader import FETCH_AGAIN, GGUF
from models.gguf.rotary import decimal, factors, rotary
from models.gguf.sizes import attention, epsilon, gated, named, windows

RMS, HEADS = "attention.layer_norm_rms_epsilon", "attention.head_count"


def laguna(file: GGUF, keys: Fields) -> dict[str, Any]:
    """Return the configuration; layers may differ in their number of heads."""
    layers, heads = keys.int("block_count", high=2**14), keys.config.get(HEADS)
    if not isinstance(heads, list):
        heads = [keys.int(HEADS, high=2**14)] * layers
    config = _kinds(file, keys.changed({HEADS: heads[0] if heads else 0}), first=True)
    mixed = experts(file, keys, scores=SIGMOID, some=True)
    if not keys.bool("expert_weights_norm", default=False):
        raise keys.error("expert_weights_norm", "true")
    sparse = mlp_kinds(mixed.pop("mlp_only_layers"), layers)
    shared = file.entry(f"blk.{sparse.index('sparse')}.ffn_down_shexp.weight").shape[-1]
    each = "per-head" if file.entry("blk.0.attn_gate.weight").shape[0] == heads[0] else "per-element"
    return config | mixed | named("LagunaForCausalLM", "laguna") | {
        "num_attention_heads_per_layer": heads,
        "gating": each,
        "mlp_layer_types": sparse,
        "shared_expert_intermediate_size": shared,
        "moe_routed_scaling_factor": decimal(keys.float("expert_weights_scale", 1.0)) or 1.0,  # 0: none
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
    }  # fmt: skip


def mellum(file: GGUF, keys: Fields) -> dict[str, Any]:
    """Return the configuration."""
    config, mixed = _kinds(file, keys), experts(file, keys)
    norm = {"norm_topk_prob": keys.bool("expert_weights_norm", default=True)}
    norm |= {"attention_bias": "blk.0.attn_q.bias" in file.tensors}
    sparse = {"mlp_layer_types": ["sparse"] * config["num_hidden_layers"]}
    return config | mixed | norm | sparse | named("MellumForCausalLM", "mellum")


def _kinds(file: GGUF, keys: Fields, first: bool = False) -> dict[str, Any]:
    """Return the fields of a decoder with a rotary table for each kind of layer; that of windows is not scaled.

    Args:
        first: see `windows`.
    """
    config: dict[str, Any] = {"partial_rotary_factor": 1.0} | gated(file, keys, rotated="some")
    theta, size = config.pop("rope_theta"), config["head_dim"]
    full = (config.pop("rope_scaling") or {"rope_type": "default"}) | {"rope_theta": theta}
    full["partial_rotary_factor"] = config.pop("partial_rotary_factor")
    local = {"rope_type": "default", "rope_theta": decimal(keys.float("rope.freq_base_swa", theta, low=1.0, high=1e15))}
    turned = keys.int("rope.dimension_count", size, high=size)
    local["partial_rotary_factor"] = keys.int("rope.dimension_count_swa", turned, high=size) / size
    kinds = windows(keys, keys.int("attention.sliding_window", 0, low=0, high=2**31), 4, first)
    return config | kinds | {"rope_parameters": {FULL: full, SLIDING: local}}


def cohere2moe(file: GGUF, keys: Fields) -> dict[str, Any]:
    """Return the configuration. Layers before those with experts are rotated, with or without a window."""
    keys = without_draft_layers(file, keys)
    config, rms = attention(file, keys), decimal(keys.float(RMS, 0.0, low=0.0, high=1.0))
    config |= {"rms_norm_eps": rms} if rms else {"layer_norm_eps": epsilon(keys, "attention.layer_norm_epsilon")}
    rope = rotary(file, keys, config["head_dim"], config["max_position_embeddings"], "all")
    config["rope_parameters"] = (rope["rope_scaling"] or {"rope_type": "default"}) | {"rope_theta": rope["rope_theta"]}
    scores, norm = keys.int("expert_gating_func", 0, low=0) or SIGMOID, keys.bool("expert_weights_norm", default=False)
    if scores not in (SOFTMAX, SIGMOID):
        raise keys.error("expert_gating_func", f"{SOFTMAX} or {SIGMOID}")
    mixed = experts(file, keys, scores=scores, some=True)
    if scores == SOFTMAX and not norm:  # the family's are those of the chosen experts alone
        raise keys.error("expert_weights_norm", "true, as weights are parts of a softmax")
    if keys.float("expert_weights_scale", 1.0) not in (0.0, 1.0):
        raise keys.error("expert_weights_scale", "1")
    widths = {"intermediate_size": mixed.pop("moe_intermediate_size")}
    widths["prefix_dense_intermediate_size"] = config.pop("intermediate_size")
    sparse = mlp_kinds(mixed.pop("mlp_only_layers"), config["num_hidden_layers"])
    return config | mixed | widths | named("Cohere2MoeForCausalLM", "cohere2_moe") | {
        "hidden_act": "silu",
        "mlp_layer_types": sparse,
        "expert_selection_fn": "sigmoid" if scores == SIGMOID else "softmax",
        "norm_topk_prob": norm,
        "num_shared_experts": keys.int("expert_shared_count", 0, low=0, high=2**8),
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
        "logit_scale": decimal(keys.float("logit_scale")),
        **windows(keys, keys.int("attention.sliding_window", high=2**31), 4, first=True),
    }  # fmt: skip


def muse_glimmer(file: GGUF, keys: Fields) -> dict[str, Any]:
    """Return the configuration. Files have the factor of scores as the weights of heads' norms, which models lack."""
    config = gated(file, keys, rotated="all") | windows(keys, keys.int("attention.sliding_window", high=2**31), 4)
    found: dict[str, set[float]] = {"q": set(), "k": set()}
    for i, kind in itertools.product(range(config["num_hidden_layers"]), found):
        name = f"blk.{i}.attn_{kind}_norm.weight"
        found[kind] |= {*factors(file, name, config["head_dim"])}
        del file.tensors[name]
    if len(found["q"]) > 1 or found["k"] != {1.0}:
        raise file.error("weights of heads' norms: expected one factor of all queries, and 1 of keys", FETCH_AGAIN)
    activation = {"hidden_activation": config.pop("hidden_act")}
    theta = config["rope_theta"] = decimal(keys.float("rope.freq_base_swa", config["rope_theta"], low=1.0, high=1e15))
    return config | activation | named("MuseGlimmerForCausalLM", "muse_glimmer_text") | {
        "qk_scale_factor": found["q"].pop(),
        "layer_rope_theta": [theta if kind == SLIDING else 0.0 for kind in config["layer_types"]],
        "output_multiplier": decimal(keys.float("logit_scale")),
        "final_logit_softcapping": decimal(keys.float("final_logit_softcapping")),
        "post_norm_eps": 1e-8,  # as in llama.cpp: the file does not say
    }  # fmt: skip
