"""Kimi Linear: gated delta nets with a decay per element of a key, latent attention without rotary embeddings, groups
of experts; layers listed by Kimi's numbers, by kinds, or not at all."""

from typing import Any

from tools.golden.base import ABSENT, BLOCKS, VOCAB, variants

CONFIG: dict[str, Any] = {
    "architectures": ["KimiLinearForCausalLM"], "model_type": "kimi_linear", "vocab_size": VOCAB, "hidden_size": 24,
    "intermediate_size": 32, "moe_intermediate_size": 16, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 4, "head_dim": 6, "model_max_length": 128, "q_lora_rank": None, "kv_lora_rank": 16,
    "qk_nope_head_dim": 10, "qk_rope_head_dim": 8, "v_head_dim": 12, "mla_use_nope": True, "rope_theta": 10000.0,
    "rope_scaling": None, "num_experts": 6, "num_experts_per_token": 2, "num_shared_experts": 1,
    "num_expert_group": 1, "topk_group": 1, "use_grouped_topk": True, "moe_renormalize": True, "moe_layer_freq": 1,
    "moe_router_activation_func": "sigmoid", "first_k_dense_replace": 1, "routed_scaling_factor": 2.446,
    "linear_attn_config": {"kda_layers": [1, 3], "full_attn_layers": [2], "head_dim": 6, "num_heads": 3,
                           "short_conv_kernel_size": 4},
    "hidden_act": "silu", "rms_norm_eps": 1e-5, "num_nextn_predict_layers": 0, "tie_word_embeddings": False,
    "pad_token_id": None,
}  # fmt: skip
SIZES = {"linear_head_dim": 8, "linear_num_heads": 2, "linear_conv_kernel_dim": 2}
CHANGES: dict[str, dict[str, Any]] = {
    "plain": {},
    "kinds": SIZES
    | {"linear_attn_config": ABSENT, "layer_types": ["full_attention", "linear_attention", "linear_attention"]}
    | {"mlp_layer_types": ["sparse", "dense", "sparse"], "first_k_dense_replace": ABSENT, "q_lora_rank": 14}
    | {"attention_bias": True, "num_experts": 8, "num_experts_per_token": 3, "num_expert_group": 4, "topk_group": 2}
    | {"moe_renormalize": False, "routed_scaling_factor": 1.5, "num_shared_experts": 2, "rms_norm_eps": 0.03},
    "defaults": SIZES
    | dict.fromkeys(
        ("linear_attn_config", "first_k_dense_replace", "moe_renormalize", "num_expert_group", "topk_group",
         "routed_scaling_factor", "num_shared_experts", "num_experts_per_token", "hidden_act", "rms_norm_eps",
         "q_lora_rank", "rope_theta", "mla_use_nope", "model_max_length"), ABSENT)
    | {"num_hidden_layers": 5, "num_experts": 9},
}  # fmt: skip
VARIANTS = variants(CONFIG, CHANGES, dict.fromkeys(CHANGES, BLOCKS))
