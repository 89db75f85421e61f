"""Phi: shares of rotated dims, norms of queries and keys, groups of heads, ties, spellings, a scalar head."""

from typing import Any

from tools.golden.base import ABSENT, VOCAB, variants

CONFIG = {
    "architectures": ["PhiForCausalLM"], "model_type": "phi", "vocab_size": VOCAB, "hidden_size": 24,
    "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": None,
    "hidden_act": "gelu_new", "max_position_embeddings": 128, "layer_norm_eps": 1e-5, "tie_word_embeddings": False,
    "qk_layernorm": False, "resid_pdrop": 0.1, "embd_pdrop": 0.0, "attention_dropout": 0.0, "pad_token_id": None,
    "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0, "partial_rotary_factor": 0.5},
}  # fmt: skip
V4 = {"rope_parameters": ABSENT, "rope_theta": 5000.0, "rope_scaling": None, "torch_dtype": "bfloat16"}

CHANGES: dict[str, dict[str, Any]] = {
    "plain": {},
    "plain_v4": V4 | {"partial_rotary_factor": 0.5},
    "defaults": V4 | {"rope_theta": ABSENT} | dict.fromkeys(
        ("num_key_value_heads", "hidden_act", "layer_norm_eps", "tie_word_embeddings", "qk_layernorm"), ABSENT),
    "qk_layernorm": {"qk_layernorm": True},
    "gqa": V4 | {"num_attention_heads": 4, "num_key_value_heads": 2, "partial_rotary_factor": 1.0},
    "partial": {"hidden_size": 40, "rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.4}},
    "dynamic": V4 | {"rope_scaling": {"type": "dynamic", "factor": 4.0}, "max_position_embeddings": 32},
    "tied": {"tie_word_embeddings": True},
    "classifier": {"architectures": ["PhiForSequenceClassification"], "num_labels": 1, "qk_layernorm": True},
}  # fmt: skip

VARIANTS = variants(CONFIG, CHANGES, {name: {"grid": ()} for name in CHANGES}, ("dense.weight", "fc2.weight"))
