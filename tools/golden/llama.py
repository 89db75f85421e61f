"""Llama: heads and head sizes, biases, ties, files and spellings, every kind of RoPE."""

from functools import partial
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from tools import random_checkpoint
from tools.golden.base import ABSENT, Variant, edit, write_tensors

LIMIT = 32  # the original length of the scaled RoPE variants; prompts and answers cross it
SMALL = {"layers": 2, "width": 32, "mlp": 48, "heads": 4, "vocab": 104, "dtype": "bfloat16", "max_positions": 128}
ROPE = SMALL | {"width": 48, "mlp": 64, "heads": 3}  # head size 16: frequencies on both sides of LIMIT
LINEAR = {"factor": 4.0}
LLAMA3 = {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 0.5, "high_freq_factor": 4.0,
          "original_max_position_embeddings": LIMIT}  # fmt: skip
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": LIMIT}
YARN_EXACT = {"attention_factor": 1.3, "truncate": False, "beta_fast": 2.0, "beta_slow": 0.5}

MISTRAL = {"model_type": "mistral", "sliding_window": 16}
# variant -> (arguments of random_checkpoint.make, changes to config.json).
SHAPES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": (SMALL, {}),
    "gqa": (SMALL | {"kv_heads": 2, "config_style": "v4"}, {}),
    "mqa": (SMALL | {"kv_heads": 1}, {}),
    "head_dim": (SMALL | {"head_dim": 12, "kv_heads": 2}, {}),
    "attention_bias": (SMALL | {"attention_bias": True, "kv_heads": 2}, {}),
    "mlp_bias": (SMALL | {"mlp_bias": True, "config_style": "v4"}, {}),
    "both_biases": (SMALL | {"attention_bias": True, "mlp_bias": True}, {}),
    "tied": (SMALL | {"tied": True}, {}),
    "tied_head_stored": (SMALL | {"tied": True}, {}),
    "tie_flag_absent": (SMALL, {"tie_word_embeddings": ABSENT}),
    "defaults": (SMALL | {"config_style": "v4"}, dict.fromkeys(
        ("num_key_value_heads", "attention_bias", "mlp_bias", "tie_word_embeddings", "hidden_act"), ABSENT)
        | {"head_dim": None}),
    "rms_eps": (SMALL | {"rms_eps": 0.03}, {}),
    "sharded": (SMALL | {"shards": 3}, {}),
    "eos_list": (SMALL, {"eos_token_id": None}),
    "float16": (SMALL | {"dtype": "float16", "config_style": "v4"}, {}),
    "theta": (ROPE | {"rope_theta": 5e5}, {}),
    "theta_v4": (ROPE | {"rope_theta": 5e5, "config_style": "v4"}, {}),
    "linear": (ROPE | {"rope": {"rope_type": "linear", **LINEAR}}, {}),
    "linear_v4": (ROPE | {"rope": {"type": "linear", **LINEAR}, "config_style": "v4"}, {}),
    "dynamic": (ROPE | {"rope": {"rope_type": "dynamic", "factor": 4.0}, "max_positions": LIMIT}, {}),
    "llama3": (ROPE | {"rope": LLAMA3, "rope_theta": 5e5}, {}),
    "llama3_v4": (ROPE | {"rope": LLAMA3, "rope_theta": 5e5, "config_style": "v4"}, {}),
    "yarn": (ROPE | {"rope": YARN, "config_style": "v4"}, {}),
    "yarn_mscale": (ROPE | {"rope": YARN | {"mscale": 0.7, "mscale_all_dim": 2.0, "beta_fast": 1.5}}, {}),
    "yarn_factor": (ROPE | {"rope": YARN | YARN_EXACT}, {}),
    "classifier": (SMALL | {"kv_heads": 2}, {"architectures": ["LlamaForSequenceClassification"], "num_labels": 1}),
    "mistral": (SMALL | {"kv_heads": 2}, MISTRAL | {"architectures": ["MistralForCausalLM"]}),
    "mistral_classifier": (SMALL | {"kv_heads": 2}, MISTRAL | {
        "architectures": ["MistralForSequenceClassification"], "num_labels": 1}),
}  # fmt: skip


def write(name: str, folder: Path, seed: int) -> None:
    shape, changes = SHAPES[name]
    random_checkpoint.make(folder, **shape, seed=seed)
    edit(folder / "config.json", changes)
    if name == "tied_head_stored" or "classifier" in name:
        mapped = load_file(folder / "model.safetensors")
        stored = {name: tensor.clone() for name, tensor in mapped.items()}  # writing under a mapping is a bus error
        if "classifier" in name:
            stored["score.weight"] = stored.pop("lm_head.weight")[:1].clone()
        else:
            stored["lm_head.weight"] = stored["model.embed_tokens.weight"]
        write_tensors(folder / "model.safetensors", stored, shape["dtype"])


OTHERS: dict[str, dict[str, Any]] = {
    "plain": {"full": True},
    "gqa": {"full": True},
    "eos_list": {"own_eos": (0, 1, 2), "eos_files": ["generation_config.json"]},
    "defaults": {"own_eos": (1, 2), "eos_files": ["config.json"]},
}
VARIANTS = {name: Variant(partial(write, name), **OTHERS.get(name, {})) for name in SHAPES}
