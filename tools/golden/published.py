"""Families whose published checkpoints differ from what transformers would draw: MiniCPM, EXAONE 3, InternLM2, Ling 2,
MiMo, Sarvam, Lara Mini.

transformers reads EXAONE 3, Sarvam and Lara Mini as published. It has no class for the others, and computes them as a
model of another family with the same computation.
"""

import json
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from tools.golden.base import ABSENT, FEW, VOCAB, Variant, write_checkpoint, write_json, write_tensors
from tools.golden.random_tensors import draw_all

WIDTH, MLP, LAYERS, HEADS, GROUPS, SIZE = 32, 40, 2, 4, 2, 8
KINDS = {"q": HEADS, "k": GROUPS, "v": GROUPS}
LING = {"word_embeddings": "embed_tokens", r"\.attention\.dense": ".self_attn.o_proj",
        r"\.attention\.query_layernorm": ".self_attn.q_norm", r"\.attention\.key_layernorm": ".self_attn.k_norm",
        r"\.attention\.": ".self_attn.", r"gate\.expert_bias": "gate.e_score_correction_bias"}  # fmt: skip
Shape = tuple[int, ...]
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": WIDTH, "intermediate_size": MLP, "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS, "num_key_value_heads": GROUPS, "max_position_embeddings": 128, "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False, "pad_token_id": None,
}  # fmt: skip
DYNAMIC = {"type": "dynamic", "factor": 2.0}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 32}  # fmt: skip
YARN = {"type": "deepseek_yarn", "factor": 4.0, "original_max_position_embeddings": 32, "beta_fast": 32,
        "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0}  # fmt: skip
MLA = {"qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 10, "kv_lora_rank": 12}
DELTA = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 6, "linear_value_head_dim": 8}
LONG = {"rope_type": "longrope", "short_factor": [1.0, 1.1, 1.3, 1.5], "long_factor": [1.0, 1.6, 2.5, 4.0],
        "original_max_position_embeddings": 32}  # fmt: skip


@dataclass(frozen=True)
class Family:
    """A family as published, and as transformers knows it.

    Args:
        config: the published fields besides those in `SIZES`.
        shapes: the shapes of a layer's tensors, by their published names.
        outer: the published names of the embedding, the last norm and the head.
        known: the architecture and the `model_type` in transformers, if it has no class for the published ones; then
            also:
        renamed: published names -> those in transformers, as patterns, in this order.
        changed: makes the fields that transformers reads of the published ones.
        draft: a tensor of a draft head, which transformers does not get.
    """

    config: Mapping[str, Any]
    shapes: Callable[[Mapping[str, Any], int], dict[str, Shape]]
    outer: tuple[str, str, str]
    known: tuple[str, str] | None = None
    renamed: Mapping[str, str] = field(default_factory=dict)
    changed: Callable[[dict[str, Any]], dict[str, Any]] = dict
    draft: str = ""


def norms(*names: str, size: int = WIDTH) -> dict[str, Shape]:
    return {f"{name}.weight": (size,) for name in names}


def mlp(gate: str, up: str, down: str, *, width: int = MLP) -> dict[str, Shape]:
    return {f"{gate}.weight": (width, WIDTH), f"{up}.weight": (width, WIDTH), f"{down}.weight": (WIDTH, width)}


def llama(prefix: str, out: str, *rest: dict[str, Shape]) -> dict[str, Shape]:
    """The tensors of an attention with three matrices, and the others."""
    outs = {f"{prefix}{kind}_proj.weight": (heads * SIZE, WIDTH) for kind, heads in KINDS.items()}
    found = outs | {f"{out}.weight": (WIDTH, HEADS * SIZE)}
    return {name: shape for part in (found, *rest) for name, shape in part.items()}


def minicpm(config: Mapping[str, Any], layer: int) -> dict[str, Shape]:
    own = norms("input_layernorm", "post_attention_layernorm")
    return llama("self_attn.", "self_attn.o_proj", own, mlp("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"))


def mimo(config: Mapping[str, Any], layer: int) -> dict[str, Shape]:
    found = minicpm(config, layer)
    return found | {f"self_attn.{kind}_proj.bias": (heads * SIZE,) for kind, heads in KINDS.items()}


def exaone(config: Mapping[str, Any], layer: int) -> dict[str, Shape]:
    part = "attn.attention."
    return llama(part, f"{part}out_proj", norms("ln_1", "ln_2"), mlp("mlp.c_fc_0", "mlp.c_fc_1", "mlp.c_proj"))


def internlm(config: Mapping[str, Any], layer: int) -> dict[str, Shape]:
    found = {"attention.wqkv.weight": ((HEADS + 2 * GROUPS) * SIZE, WIDTH), "attention.wo.weight": (WIDTH, WIDTH)}
    found |= norms("attention_norm", "ffn_norm") | mlp(*(f"feed_forward.w{i}" for i in (1, 3, 2)))
    biased = [name for name in found if name.startswith("attention.") and config["bias"]]
    return found | {name.replace("weight", "bias"): found[name][:1] for name in biased}


def ling(config: Mapping[str, Any], layer: int) -> dict[str, Shape]:
    qkv, dense = "attention.query_key_value", "attention.dense"
    found: dict[str, Shape] = {f"{qkv}.weight": ((HEADS + 2 * GROUPS) * SIZE, WIDTH), f"{dense}.weight": (WIDTH, WIDTH)}
    found |= {f"{qkv}.bias": found[f"{qkv}.weight"][:1]} if config["use_qkv_bias"] else {}
    found |= norms("input_layernorm", "post_attention_layernorm")
    found |= norms("attention.query_layernorm", "attention.key_layernorm", size=SIZE) if config["use_qk_norm"] else {}
    if layer < config["first_k_dense_replace"]:
        return found | mlp("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
    found |= {"mlp.gate.weight": (8, WIDTH), "mlp.gate.expert_bias": (8,)}
    for name, width in ((f"experts.{i}", 12) for i in range(8)):
        found |= mlp(*(f"mlp.{name}.{part}_proj" for part in ("gate", "up", "down")), width=width)
    return found | mlp(*(f"mlp.shared_experts.{part}_proj" for part in ("gate", "up", "down")), width=12)


def latent(config: Mapping[str, Any], layer: int) -> dict[str, Shape]:
    plain, turned, value, rank = (config[name] for name in MLA)
    found: dict[str, Shape] = {
        "self_attn.q_proj.weight": (HEADS * (plain + turned), WIDTH), "self_attn.o_proj.weight": (WIDTH, HEADS * value),
        "self_attn.kv_a_proj_with_mqa.weight": (rank + turned, WIDTH), "self_attn.kv_a_layernorm.weight": (rank,),
        "self_attn.kv_b_proj.weight": (HEADS * (plain + value), rank),
    }  # fmt: skip
    rest = ling({**config, "use_qkv_bias": False, "use_qk_norm": False}, layer)
    bias = {"mlp.gate.e_score_correction_bias": rest.pop("mlp.gate.expert_bias")} if layer else {}
    return found | bias | {name: shape for name, shape in rest.items() if not name.startswith("attention.")}


def lara(config: Mapping[str, Any], layer: int) -> dict[str, Shape]:
    found = norms("input_layernorm", "post_attention_layernorm")
    if config["layer_types"][layer] == "linear_attention":
        keys, values, size, value_size = DELTA.values()
        wide, mixed, part = values * value_size, 2 * keys * size, "linear_attn."
        found |= {f"{part}in_proj.weight": (mixed + 2 * wide + 2 * values, WIDTH), f"{part}A_log": (values,),
                  f"{part}conv1d.weight": (mixed + wide, 1, 4), f"{part}dt_bias": (values,),
                  f"{part}out_proj.weight": (WIDTH, wide)}  # fmt: skip
        found |= norms(f"{part}out_norm", size=value_size)
    else:
        found |= llama("self_attn.", "self_attn.o_proj", norms("self_attn.q_norm", "self_attn.k_norm", size=SIZE))
    found |= {"mlp.gate.weight": (8, WIDTH), "mlp.experts.gate_up_proj": (8, 24, WIDTH),
              "mlp.experts.down_proj": (8, WIDTH, 12)}  # fmt: skip
    return found | mlp(*(f"mlp.shared_expert.{name}_proj" for name in ("gate", "up", "down")), width=20)


def as_granite(c: dict[str, Any]) -> dict[str, Any]:
    depth, base = c.get("scale_depth", 1.0), c.get("dim_model_base", 1)
    return c | {
        "embedding_multiplier": c.get("scale_emb", 1), "attention_multiplier": SIZE**-0.5,
        "residual_multiplier": 1.0 if depth is None else depth * LAYERS**-0.5,
        "logits_scaling": WIDTH / (base or WIDTH), "tie_word_embeddings": c.get("tie_word_embeddings", True),
    }  # fmt: skip


def with_biases(c: dict[str, Any]) -> dict[str, Any]:
    return c | {"attention_bias": c["bias"]}


def as_glm(c: dict[str, Any]) -> dict[str, Any]:
    part = c.get("partial_rotary_factor", c.get("rotary_dim", SIZE) / SIZE)
    return c | {
        "attention_bias": c["use_qkv_bias"], "n_routed_experts": 8, "n_shared_experts": 1, "norm_topk_prob": True,
        "head_dim": SIZE, "partial_rotary_factor": part,
    }  # fmt: skip


USUAL = "model.embed_tokens", "model.norm", "lm_head"
WORDS = "model.word_embeddings", "model.norm", "lm_head"
FAMILIES = {
    "minicpm": Family(
        {"architectures": ["MiniCPMForCausalLM"], "model_type": "minicpm", "scale_emb": 2.5, "scale_depth": 1.1,
         "dim_model_base": 24, "rope_theta": 10000.0},
        minicpm, USUAL, ("GraniteForCausalLM", "granite"), changed=as_granite),
    "mimo": Family(
        {"architectures": ["MiMoForCausalLM"], "model_type": "mimo", "num_nextn_predict_layers": 1, "head_dim": SIZE,
         "use_sliding_window": False, "sliding_window": 16, "max_window_layers": 1, "rope_theta": 640000.0},
        mimo, USUAL, ("Qwen2ForCausalLM", "qwen2"), draft="model.mtp_layers.0.input_proj.weight"),
    "exaone": Family(
        {"architectures": ["ExaoneForCausalLM"], "model_type": "exaone", "num_layers": LAYERS,
         "num_hidden_layers": ABSENT, "rms_norm_eps": ABSENT, "layer_norm_epsilon": 1e-2,
         "activation_function": "silu", "rope_theta": 5e5, "rope_scaling": LLAMA3},
        exaone, ("transformer.wte", "transformer.ln_f", "lm_head")),
    "internlm2": Family(
        {"architectures": ["InternLM2ForCausalLM"], "model_type": "internlm2", "bias": False, "rope_theta": 10000.0,
         "rope_scaling": None},
        internlm, ("model.tok_embeddings", "model.norm", "output"), ("LlamaForCausalLM", "llama"),
        {"tok_embeddings": "embed_tokens", r"^output": "lm_head", r"\.attention\.": ".self_attn.",
         r"\.wo\.": ".o_proj.", "attention_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm",
         r"feed_forward\.w1": "mlp.gate_proj", r"feed_forward\.w3": "mlp.up_proj",
         r"feed_forward\.w2": "mlp.down_proj"}, with_biases),
    "ling": Family(
        {"architectures": ["BailingMoeV2ForCausalLM"], "model_type": "bailing_moe", "num_hidden_layers": LAYERS,
         "head_dim": SIZE, "use_qkv_bias": False, "use_bias": False, "use_qk_norm": True, "partial_rotary_factor": 0.5,
         "num_experts": 8, "num_shared_experts": 1, "num_experts_per_tok": 3, "n_group": 4, "topk_group": 2,
         "moe_intermediate_size": 12, "first_k_dense_replace": 1, "routed_scaling_factor": 2.5, "rope_theta": 6e5,
         "norm_topk_prob": True, "score_function": "sigmoid", "moe_router_enable_expert_bias": True,
         "norm_head": False},
        ling, WORDS, ("Glm4MoeForCausalLM", "glm4_moe"), LING, as_glm),
    "sarvam": Family(
        {"architectures": ["SarvamMoEForCausalLM"], "model_type": "sarvam_moe", "head_dim": SIZE,
         "use_qkv_bias": False, "use_qk_norm": True, "num_experts": 8, "num_shared_experts": 1,
         "num_experts_per_tok": 3, "n_group": 1, "topk_group": 1, "moe_intermediate_size": 12,
         "first_k_dense_replace": 1, "routed_scaling_factor": 2.5, "rope_theta": 8e6, "norm_topk_prob": True},
        ling, WORDS),
    "sarvam_mla": Family(
        {"architectures": ["SarvamMLAForCausalLM"], "model_type": "sarvam_mla", **MLA, "head_dim": 16,
         "q_head_dim": 10, "num_key_value_heads": HEADS, "q_lora_rank": None, "num_experts": 8,
         "num_shared_experts": 1, "num_experts_per_tok": 3, "n_group": 1, "topk_group": 1,
         "moe_intermediate_size": 12, "first_k_dense_replace": 1, "routed_scaling_factor": 2.5, "rope_theta": 10000.0,
         "rope_scaling": YARN},
        latent, USUAL),
    "lara": Family(
        {"architectures": ["LaraMiniForCausalLM"], "model_type": "lara_mini", **DELTA, "head_dim": SIZE,
         "intermediate_size": ABSENT, "num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 12,
         "shared_expert_intermediate_size": 20, "sliding_window": 16, "linear_conv_kernel_dim": 4,
         "num_hidden_layers": 4, "rope_theta": 10000.0,
         "layer_types": ["linear_attention", "sliding_attention", "linear_attention", "full_attention"]},
        lara, USUAL),
}  # fmt: skip
CHANGES: dict[str, tuple[str, dict[str, Any]]] = {
    "minicpm": ("minicpm", {}),
    "minicpm_defaults": ("minicpm", dict.fromkeys(("scale_emb", "scale_depth", "rms_norm_eps", "rope_theta"), ABSENT)),
    "minicpm_long": ("minicpm", {"rope_scaling": LONG, "scale_depth": None, "dim_model_base": None}),
    "exaone": ("exaone", {}),
    "exaone_tied": ("exaone", {"tie_word_embeddings": True, "layer_norm_epsilon": ABSENT, "rope_scaling": None}),
    "internlm2": ("internlm2", {}),
    "internlm2_biases": ("internlm2", {"bias": True, "rope_scaling": DYNAMIC, "max_position_embeddings": 32}),
    "ling": ("ling", {}),
    "ling_biases": ("ling", {"use_qkv_bias": True, "use_qk_norm": False, "rotary_dim": 4,
                             "partial_rotary_factor": ABSENT}),
    "mimo": ("mimo", {}),
    "sarvam": ("sarvam", {}),
    "sarvam_biases": ("sarvam", {"use_qkv_bias": True, "use_qk_norm": False, "first_k_dense_replace": 0}),
    "sarvam_mla": ("sarvam_mla", {}),
    "lara": ("lara", {}),
    "lara_unnormed": ("lara", {"norm_topk_prob": False, "tie_word_embeddings": True, "sliding_window": 9}),
}  # fmt: skip


def fields_of(name: str) -> tuple[Family, dict[str, Any]]:
    family, changes = FAMILIES[CHANGES[name][0]], CHANGES[name][1]
    config = {**SIZES, **family.config, **changes}
    return family, {key: value for key, value in config.items() if value is not ABSENT}


def write(name: str, folder: Path, seed: int) -> None:
    family, config = fields_of(name)
    embedding, norm, head = family.outer
    shapes: dict[str, Shape] = {f"{embedding}.weight": (VOCAB, WIDTH), f"{norm}.weight": (WIDTH,)}
    layer = "transformer.h" if embedding.startswith("transformer") else "model.layers"
    for i in range(config.get("num_hidden_layers", LAYERS)):
        shapes |= {f"{layer}.{i}.{part}": shape for part, shape in family.shapes(config, i).items()}
    tied = config.get("tie_word_embeddings", True)
    shapes |= {} if tied else {f"{head}.weight": (VOCAB, WIDTH)}
    shapes |= {family.draft: (WIDTH, 2 * WIDTH)} if family.draft else {}
    last = f"{embedding if tied else head}.weight"
    outputs = ("o_proj.weight", "down_proj.weight", "wo.weight", "w2.weight", "c_proj.weight", "dense.weight")
    drawn = draw_all(shapes, seed, embeddings=[f"{embedding}.weight"], head=last, outputs=outputs)
    write_checkpoint(folder, config, drawn)


def apart(name: str, x: torch.Tensor) -> dict[str, torch.Tensor]:
    """The matrices of queries, keys and values in one; InternLM2 has them by key/value head."""
    if name.endswith(("wqkv.weight", "wqkv.bias")):
        grouped = x.view(GROUPS, HEADS // GROUPS + 2, SIZE, *x.shape[1:])
        parts = [part.flatten(0, 2) for part in grouped.split([HEADS // GROUPS, 1, 1], 1)]
    elif ".query_key_value." in name:
        parts = list(x.split([HEADS * SIZE, GROUPS * SIZE, GROUPS * SIZE]))
    else:
        return {name: x}
    fused = re.compile("wqkv|query_key_value")
    return {fused.sub(f"{kind}_proj", name): part.clone() for kind, part in zip(KINDS, parts, strict=True)}


def floats(name: str, folder: Path, into: Path) -> None:
    """Write the checkpoint as transformers knows it."""
    family, _ = fields_of(name)
    shutil.copytree(folder, into)
    stored = {}
    found = load_file(folder / "model.safetensors")
    found.pop(family.draft, None)
    for published, tensor in found.items():
        for own, x in apart(published, tensor).items():
            for pattern, known in family.renamed.items():
                own = re.sub(pattern, known, own)
            stored[own] = x.clone()
    write_tensors(into / "model.safetensors", stored, "float32")
    given = json.loads((folder / "config.json").read_text())
    assert family.known
    architecture, kind = family.known
    write_json(into / "config.json", family.changed(given) | {"architectures": [architecture], "model_type": kind})


CROSSING = {"logits": [(17, 4), (32, 4), (60, 8)], "prompts": (17, 29, 5)}
OTHERS: dict[str, dict[str, Any]] = dict.fromkeys(("internlm2_biases", "exaone"), CROSSING)
OTHERS["minicpm_long"] = CROSSING | {"prompts": (40, 50, 34)}  # transformers keeps the keys that it has turned
VARIANTS = {
    name: Variant(
        partial(write, name),
        floats=partial(floats, name) if FAMILIES[CHANGES[name][0]].known else None,
        **{"grid": () if name in FAMILIES else FEW, **OTHERS.get(name, {})},
    )
    for name in CHANGES
}
