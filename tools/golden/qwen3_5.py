"""Qwen3.5: gates of queries, norms of 1 + weight, heads that are rotated in part, gated delta nets."""

from typing import Any

from tools.golden.base import ABSENT, BLOCKS, VOCAB, variants

ROPE = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25}
CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3_5ForCausalLM"], "model_type": "qwen3_5_text", "vocab_size": VOCAB, "hidden_size": 24,
    "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 16, "hidden_act": "silu", "max_position_embeddings": 128, "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False, "attention_bias": False, "pad_token_id": None, "rope_parameters": ROPE,
    "layer_types": ["full_attention"] * 2,
}  # fmt: skip
MROPE = {"mrope_section": [1, 1, 0], "mrope_interleaved": True}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
RECURRENT = {
    "linear_conv_kernel_dim": 4, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8,
    "linear_value_head_dim": 6,
}  # fmt: skip
DEFAULTS = ("rope_parameters", "hidden_act", "rms_norm_eps", "tie_word_embeddings", "attention_bias")

CHANGES: dict[str, dict[str, Any]] = {
    "plain": {"rope_parameters": ROPE | MROPE},
    "plain_v4": {"rope_parameters": ABSENT, "rope_theta": 10000.0, "partial_rotary_factor": 0.25},
    "bias": {"attention_bias": True, "rms_norm_eps": 0.03},
    "tied": {"tie_word_embeddings": True, "num_key_value_heads": 4},
    "defaults": dict.fromkeys(DEFAULTS, ABSENT),
    "wide": dict.fromkeys(("num_key_value_heads", "head_dim", "layer_types"), ABSENT)
    | {"num_hidden_layers": 1, "full_attention_interval": 1},
    "yarn": {"rope_parameters": ROPE | MROPE | YARN | {"partial_rotary_factor": 0.5}},
    "recurrent": RECURRENT | {"layer_types": ["linear_attention", "full_attention"]},
    "recurrent_interval": RECURRENT
    | {"layer_types": ABSENT, "full_attention_interval": 3, "num_hidden_layers": 4, "tie_word_embeddings": True},
    "recurrent_taps": RECURRENT | {"layer_types": ["full_attention", "linear_attention"], "linear_conv_kernel_dim": 2}
    | {"linear_num_key_heads": 4, "linear_value_head_dim": 12, "rms_norm_eps": 0.03},
    "classifier": {"architectures": ["Qwen3_5TextForSequenceClassification"], "num_labels": 1},
}  # fmt: skip

OTHERS: dict[str, dict[str, Any]] = dict.fromkeys(("recurrent", "recurrent_interval", "recurrent_taps"), BLOCKS)

VARIANTS = variants(CONFIG, CHANGES, OTHERS)
