"""Jamba: scans by channels and attention in turns, with experts and without, biases, absent fields, a scalar head."""

from typing import Any

from tools.golden.base import ABSENT, BLOCKS, VOCAB, variants

CONFIG: dict[str, Any] = {
    "architectures": ["JambaForCausalLM"], "model_type": "jamba", "vocab_size": VOCAB, "hidden_size": 24,
    "intermediate_size": 40, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
    "hidden_act": "silu", "max_position_embeddings": 128, "rms_norm_eps": 1e-5, "tie_word_embeddings": False,
    "attn_layer_period": 3, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1,
    "num_experts": 1, "num_experts_per_tok": 1, "mamba_d_state": 16, "mamba_d_conv": 4, "mamba_expand": 2,
    "mamba_dt_rank": "auto", "mamba_conv_bias": True, "mamba_proj_bias": False, "use_mamba_kernels": False,
    "pad_token_id": None,
}  # fmt: skip
EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "intermediate_size": 20}
CHANGES: dict[str, dict[str, Any]] = {
    "plain": {},
    "experts": EXPERTS,
    "bias": {"mamba_proj_bias": True, "mamba_conv_bias": False, "mamba_d_conv": 3, "mamba_d_state": 7,
             "mamba_dt_rank": 5, "mamba_expand": 3, "rms_norm_eps": 0.03, "tie_word_embeddings": True,
             "num_key_value_heads": 4},
    "defaults": EXPERTS
    | dict.fromkeys(("attn_layer_period", "attn_layer_offset", "expert_layer_period", "mamba_dt_rank"), ABSENT)
    | {"num_hidden_layers": 5, "mamba_conv_bias": ABSENT, "num_experts": 1},
    "classifier": {"architectures": ["JambaForSequenceClassification"], "num_labels": 1},
}  # fmt: skip
VARIANTS = variants(CONFIG, CHANGES, {name: BLOCKS for name in ("plain", "experts", "bias")})
