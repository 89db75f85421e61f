"""Ling 3: gated delta nets with bounded decays per element of a key, latent attention with gates of heads, groups of
experts; decays without bounds, other orders of layers, absent fields."""

from typing import Any

from tools.golden.base import ABSENT, BLOCKS, VOCAB, variants

CONFIG: dict[str, Any] = {
    "architectures": ["BailingHybridForCausalLM"], "model_type": "bailing_hybrid", "vocab_size": VOCAB,
    "hidden_size": 24, "intermediate_size": 32, "moe_intermediate_size": 16, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 6, "max_position_embeddings": 128,
    "q_lora_rank": None, "kv_lora_rank": 16, "qk_nope_head_dim": 10, "qk_rope_head_dim": 8, "v_head_dim": 12,
    "rope_theta": 10000.0, "partial_rotary_factor": 0.5, "num_experts": 8, "num_experts_per_tok": 3,
    "num_shared_experts": 1, "n_group": 4, "topk_group": 2, "norm_topk_prob": True, "first_k_dense_replace": 1,
    "routed_scaling_factor": 2.5, "layer_group_size": 2, "short_conv_kernel_size": 4, "kda_safe_gate": True,
    "kda_lower_bound": -5.0, "hidden_act": "silu", "rms_norm_eps": 1e-6, "num_nextn_predict_layers": 0,
    "tie_word_embeddings": False, "pad_token_id": None,
}  # fmt: skip
YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "mscale_all_dim": 1.0}
CHANGES: dict[str, dict[str, Any]] = {
    "plain": {},
    "unbounded": {"kda_safe_gate": False, "kda_lower_bound": ABSENT, "q_lora_rank": 14, "attention_bias": True}
    | {"layer_types": ["full_attention", "linear_attention", "linear_attention"], "layer_group_size": ABSENT}
    | {"mlp_layer_types": ["sparse", "dense", "sparse"], "short_conv_kernel_size": 2, "rms_norm_eps": 0.03}
    | {"rope_scaling": YARN, "partial_rotary_factor": ABSENT, "norm_topk_prob": False, "num_shared_experts": 2},
    "defaults": dict.fromkeys(
        ("rope_theta", "partial_rotary_factor", "num_shared_experts", "n_group", "topk_group", "norm_topk_prob",
         "num_experts_per_tok", "first_k_dense_replace", "routed_scaling_factor", "hidden_act",
         "short_conv_kernel_size", "kda_safe_gate", "kda_lower_bound", "rms_norm_eps", "max_position_embeddings"),
        ABSENT)
    | {"num_hidden_layers": 4, "num_experts": 16},
}  # fmt: skip
VARIANTS = variants(CONFIG, CHANGES, dict.fromkeys(CHANGES, BLOCKS))
