"""Qwen2: biases of three matrices, groups of heads, sizes of heads, ties, spellings, windows in some layers."""

from typing import Any

from tools.golden.base import ABSENT, BORDER, VOCAB, variants

CONFIG = {
    "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "vocab_size": VOCAB, "hidden_size": 24,
    "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "hidden_act": "silu", "max_position_embeddings": 128, "rms_norm_eps": 1e-6, "tie_word_embeddings": False,
    "attention_dropout": 0.0, "pad_token_id": None, "use_sliding_window": False, "sliding_window": 16,
    "max_window_layers": 1, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
}  # fmt: skip
V4 = {"rope_parameters": ABSENT, "rope_theta": 1e6, "rope_scaling": None, "torch_dtype": "bfloat16"}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "rope_theta": 1e6}

CHANGES: dict[str, dict[str, Any]] = {
    "plain": {},
    "plain_v4": V4,
    "defaults": {"num_key_value_heads": None} | dict.fromkeys(
        ("rope_parameters", "hidden_act", "rms_norm_eps", "tie_word_embeddings", "use_sliding_window",
         "sliding_window", "max_window_layers"), ABSENT),
    "head_dim": {"head_dim": 10, "rms_norm_eps": 0.03},
    "tied": {"tie_word_embeddings": True},
    "yarn": {"rope_parameters": YARN},
    "windows": {"use_sliding_window": True},
    "layer_types": {"use_sliding_window": True, "layer_types": ["sliding_attention", "full_attention"]},
    "classifier": {"architectures": ["Qwen2ForSequenceClassification"], "num_labels": 1},
}  # fmt: skip
VARIANTS = variants(CONFIG, CHANGES, {"windows": BORDER, "layer_types": BORDER})
