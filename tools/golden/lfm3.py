"""LFM3: short convolutions, attention with and without windows, gates of heads, norms of outputs."""

from typing import Any

from tools.golden.base import ABSENT, VOCAB, variants

ROPES = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
    "full_attention": {"rope_type": "proportional", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
}
CONFIG: dict[str, Any] = {
    "architectures": ["Lfm3ForCausalLM"], "model_type": "lfm3", "vocab_size": VOCAB, "hidden_size": 24,
    "intermediate_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
    "max_position_embeddings": 128, "norm_eps": 1e-5, "conv_L_cache": 7, "conv_bias": False, "sliding_window": 9,
    "tie_word_embeddings": True, "pad_token_id": None, "rope_parameters": ROPES, "use_sandwich_norm": True,
    "use_attention_gate": True, "attention_bias": False,
    "layer_types": ["conv", "full_attention", "sliding_attention"],
}  # fmt: skip
CHANGES: dict[str, dict[str, Any]] = {
    "plain": {},
    "bare": {"use_sandwich_norm": False, "use_attention_gate": False, "attention_bias": True, "conv_bias": True}
    | {"conv_L_cache": 2, "norm_eps": 0.03, "num_key_value_heads": 1, "tie_word_embeddings": False},
    "defaults": dict.fromkeys(("use_sandwich_norm", "use_attention_gate", "attention_bias", "conv_bias"), ABSENT)
    | dict.fromkeys(("rope_parameters", "norm_eps", "conv_L_cache", "sliding_window", "layer_types"), ABSENT)
    | {"tie_word_embeddings": ABSENT, "num_hidden_layers": 5},
}  # fmt: skip

VARIANTS = variants(CONFIG, CHANGES, {})
