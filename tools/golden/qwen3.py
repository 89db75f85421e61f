"""Qwen3: norms of heads, groups of heads, biases, ties, spellings, windows in some layers, a scalar head."""

from typing import Any

from tools.golden.base import ABSENT, BORDER, VOCAB, variants

CONFIG = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": VOCAB, "hidden_size": 24,
    "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 8, "hidden_act": "silu", "max_position_embeddings": 128, "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False, "attention_bias": False, "attention_dropout": 0.0, "pad_token_id": None,
    "use_sliding_window": False, "sliding_window": None, "max_window_layers": 2,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}  # fmt: skip
V4 = {"rope_parameters": ABSENT, "rope_theta": 10000.0, "rope_scaling": None, "torch_dtype": "bfloat16"}
WINDOW = {"use_sliding_window": True, "sliding_window": 16}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "rope_theta": 10000.0}

CHANGES: dict[str, dict[str, Any]] = {
    "plain": {},
    "plain_v4": V4,
    "defaults": V4 | {"num_attention_heads": 2, "num_key_value_heads": None} | dict.fromkeys(
        ("rope_theta", "head_dim", "hidden_act", "rms_norm_eps", "tie_word_embeddings", "attention_bias",
         "use_sliding_window", "sliding_window", "max_window_layers"), ABSENT),
    "bias": {"attention_bias": True, "rms_norm_eps": 0.03},
    "tied": {"tie_word_embeddings": True},
    "yarn": {"rope_parameters": YARN},
    "windows": WINDOW | {"max_window_layers": 1},
    "layer_types": WINDOW | {"layer_types": ["sliding_attention", "full_attention"]},
    "classifier": {"architectures": ["Qwen3ForSequenceClassification"], "num_labels": 1},
}  # fmt: skip
OTHERS: dict[str, dict[str, Any]] = {"windows": BORDER, "layer_types": BORDER}

VARIANTS = variants(CONFIG, CHANGES, {name: {"grid": ()} | OTHERS.get(name, {}) for name in CHANGES})
