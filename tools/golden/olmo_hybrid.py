"""OLMo Hybrid: gated delta nets with strengths up to 1 or 2, norms of inputs in these layers and of outputs in
attention layers, with and without rotary embeddings."""

from typing import Any

from tools.golden.base import ABSENT, BLOCKS, VOCAB, variants

CONFIG: dict[str, Any] = {
    "architectures": ["OlmoHybridForCausalLM"], "model_type": "olmo_hybrid", "vocab_size": VOCAB, "hidden_size": 24,
    "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4,
    "hidden_act": "silu", "max_position_embeddings": 128, "rms_norm_eps": 1e-6, "tie_word_embeddings": False,
    "attention_bias": False, "pad_token_id": None, "rope_parameters": {"rope_type": "default", "rope_theta": None},
    "layer_types": ["linear_attention", "full_attention"], "linear_num_key_heads": 2, "linear_num_value_heads": 2,
    "linear_key_head_dim": 6, "linear_value_head_dim": 12, "linear_conv_kernel_dim": 4,
    "linear_allow_neg_eigval": True,
}  # fmt: skip
SIZES = [name for name in CONFIG if name.startswith("linear_")]
CHANGES: dict[str, dict[str, Any]] = {
    "plain": {},
    "rotated": {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}, "linear_allow_neg_eigval": False}
    | {"attention_bias": True, "num_key_value_heads": 2, "linear_num_value_heads": 4, "linear_conv_kernel_dim": 2}
    | {"rms_norm_eps": 0.03, "layer_types": ["full_attention", "linear_attention"]},
    "defaults": dict.fromkeys((*SIZES, "layer_types", "num_key_value_heads", "hidden_act", "attention_bias"), ABSENT)
    | {"rope_parameters": ABSENT, "tie_word_embeddings": True, "num_hidden_layers": 3},
}  # fmt: skip
VARIANTS = variants(CONFIG, CHANGES, dict.fromkeys(CHANGES, BLOCKS))
