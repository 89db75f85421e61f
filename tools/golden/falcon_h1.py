"""Falcon-H1: factors, biases, groups, with and without a norm of scans. Bamba: orders of layers, biases."""

from typing import Any

from tools.golden.base import ABSENT, BLOCKS, VOCAB, variants

CONFIG: dict[str, Any] = {
    "architectures": ["FalconH1ForCausalLM"], "model_type": "falcon_h1", "vocab_size": VOCAB, "hidden_size": 24,
    "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 10,
    "hidden_act": "silu", "max_position_embeddings": 128, "rms_norm_eps": 1e-5, "tie_word_embeddings": False,
    "rope_theta": 1e11, "rope_scaling": None, "torch_dtype": "bfloat16", "attention_bias": False, "mlp_bias": False,
    "mamba_d_ssm": 40, "mamba_n_heads": 8, "mamba_d_head": 5, "mamba_n_groups": 2, "mamba_d_state": 9,
    "mamba_d_conv": 4, "mamba_expand": 2, "mamba_chunk_size": 16, "mamba_conv_bias": True, "mamba_proj_bias": False,
    "mamba_rms_norm": False, "mamba_norm_before_gate": False, "projectors_bias": False,
    "embedding_multiplier": 1.7, "lm_head_multiplier": 0.6, "key_multiplier": 0.7, "attention_in_multiplier": 1.2,
    "attention_out_multiplier": 0.9, "ssm_in_multiplier": 1.25, "ssm_out_multiplier": 0.8,
    "ssm_multipliers": [0.8, 1.3, 0.7, 1.1, 0.6], "mlp_multipliers": [0.9, 0.6], "pad_token_id": None,
}  # fmt: skip
ONES = dict.fromkeys((name for name in CONFIG if name.endswith(("_multiplier", "_multipliers"))), ABSENT)
BAMBA = ONES | {
    "architectures": ["BambaForCausalLM"], "model_type": "bamba", "num_hidden_layers": 3, "head_dim": ABSENT,
    "attn_layer_indices": [1], "hidden_size": 32, "mamba_d_ssm": ABSENT, "mamba_d_head": 8, "rope_theta": 1e4,
}  # fmt: skip
CHANGES: dict[str, dict[str, Any]] = {
    "plain": {},
    "norm": {"mamba_rms_norm": True, "rms_norm_eps": 0.03, "mamba_d_head": "auto",
             "mamba_n_groups": 4, "mamba_d_conv": 2, "mamba_conv_bias": False},
    "bias": {"attention_bias": True, "mlp_bias": True, "mamba_proj_bias": True, "projectors_bias": True,
             "mamba_n_groups": 1, "attention_in_multiplier": 1.0, "ssm_in_multiplier": 1.0, "mamba_d_ssm": None,
             "mamba_n_heads": 6, "mamba_d_head": 8, "mlp_multipliers": [1.0, 0.6], "tie_word_embeddings": True},
    "bamba": BAMBA,
    "bamba_bias": BAMBA | {"attention_bias": True, "mlp_bias": True, "mamba_proj_bias": True, "mamba_n_groups": 1,
                           "attn_layer_indices": [0, 2], "mamba_d_conv": 3, "mamba_d_head": "auto"},
}  # fmt: skip
VARIANTS = variants(CONFIG, CHANGES, dict.fromkeys(CHANGES, BLOCKS))
