"""DeepSeek-V2, V3 and V3.2, GLM-4.7-Flash, GLM-5, A.X-K1: attention with a latent, groups of experts, orders of rotated
elements."""

from typing import Any

from tools.golden.base import ABSENT, VOCAB, variants

YARN = {
    "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32,
    "beta_fast": 32, "beta_slow": 1, "mscale": 0.707, "mscale_all_dim": 0.707,
}  # fmt: skip
OLD = {("type" if name == "rope_type" else name): value for name, value in YARN.items() if name != "rope_theta"}
CONFIG: dict[str, Any] = {
    "architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2", "vocab_size": VOCAB, "hidden_size": 24,
    "intermediate_size": 32, "moe_intermediate_size": 20, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 4, "max_position_embeddings": 128, "q_lora_rank": None, "kv_lora_rank": 16,
    "qk_nope_head_dim": 10, "qk_rope_head_dim": 8, "v_head_dim": 12, "n_routed_experts": 6, "n_shared_experts": 2,
    "num_experts_per_tok": 2, "first_k_dense_replace": 1, "routed_scaling_factor": 1.0, "topk_method": "greedy",
    "n_group": 1, "topk_group": 1, "norm_topk_prob": False, "rms_norm_eps": 1e-4, "hidden_act": "silu",
    "attention_bias": False, "tie_word_embeddings": False, "rope_parameters": YARN, "pad_token_id": None,
}  # fmt: skip
GROUPS = {"n_routed_experts": 8, "n_group": 4, "topk_group": 2, "num_experts_per_tok": 3, "routed_scaling_factor": 1.5}
THREE: dict[str, Any] = GROUPS | {
    "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "q_lora_rank": 14, "n_shared_experts": 1,
    "topk_method": "noaux_tc", "norm_topk_prob": True, "rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0},
}  # fmt: skip
PLAIN = {"rope_type": "default", "rope_theta": 10000.0}
GLM: dict[str, Any] = {
    "architectures": ["Glm4MoeLiteForCausalLM"], "model_type": "glm4_moe_lite", "q_lora_rank": 14,
    "n_shared_experts": 1, "first_k_dense_replace": ABSENT, "topk_method": ABSENT, "norm_topk_prob": True,
    "routed_scaling_factor": 1.8, "rope_parameters": PLAIN,
}  # fmt: skip
SPARSE: dict[str, Any] = THREE | {  # an indexer, which selects every token of a text that is as long as index_topk
    "architectures": ["DeepseekV32ForCausalLM"], "model_type": "deepseek_v32", "index_topk": 64, "index_n_heads": 2,
    "index_head_dim": 12,
}  # fmt: skip
GLM_SPARSE = SPARSE | {"architectures": ["GlmMoeDsaForCausalLM"], "model_type": "glm_moe_dsa", "rope_parameters": PLAIN}

CHANGES: dict[str, dict[str, Any]] = {
    "plain": {},
    "plain_v4": {"rope_parameters": ABSENT, "rope_theta": 10000.0, "torch_dtype": "bfloat16",
                 "rope_scaling": OLD},
    "groups": GROUPS | {
        "q_lora_rank": 14, "attention_bias": True, "topk_method": "group_limited_greedy",
        "rope_parameters": YARN | {"mscale": 1.0}},
    "dense": {
        "first_k_dense_replace": 3, "rope_parameters": PLAIN, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4,
        "num_key_value_heads": ABSENT, "tie_word_embeddings": True},
    "defaults": dict.fromkeys(
        ("num_key_value_heads", "first_k_dense_replace", "routed_scaling_factor", "topk_method", "n_group",
         "topk_group", "norm_topk_prob", "rms_norm_eps", "hidden_act", "attention_bias", "rope_parameters"), ABSENT),
    "three": THREE,
    "three_halves": THREE | {
        "rope_interleave": False, "n_group": 1, "topk_group": 1, "norm_topk_prob": False, "attention_bias": True,
        "first_k_dense_replace": 0, "q_lora_rank": None},
    "classifier": {"architectures": ["DeepseekV2ForSequenceClassification"], "num_labels": 1},
    "three_classifier": THREE | {"architectures": ["DeepseekV3ForSequenceClassification"], "num_labels": 1},
    "glm": GLM,
    "glm_kinds": GLM | {
        "mlp_layer_types": ["sparse", "dense", "sparse"], "n_group": 2, "topk_group": 1, "rope_interleave": False},
    "axk1": THREE | {"architectures": ["AXK1ForCausalLM"], "model_type": "axk1", "moe_layer_freq": 2},
    "axk1_classifier": THREE | {"architectures": ["AXK1ForSequenceClassification"], "model_type": "axk1",
                                "mlp_layer_types": ["sparse", "dense"], "num_hidden_layers": 2, "num_labels": 1},
    "sparse": SPARSE,
    "sparse_kinds": SPARSE | {
        "mlp_layer_types": ["sparse", "dense", "sparse"], "attention_bias": True, "norm_topk_prob": False,
        "tie_word_embeddings": True, "rope_parameters": PLAIN},
    "glm_sparse": GLM_SPARSE | {
        "indexer_types": ["full", "shared", "full"], "n_group": 2, "topk_group": 1, "n_shared_experts": 2},
    "glm_sparse_defaults": GLM_SPARSE | {"index_topk_freq": 2, "first_k_dense_replace": 0} | dict.fromkeys(
        ("routed_scaling_factor", "topk_method", "n_group", "topk_group", "norm_topk_prob", "rms_norm_eps",
         "hidden_act", "attention_bias", "rope_parameters"), ABSENT),
}  # fmt: skip

VARIANTS = variants(CONFIG, CHANGES, {})
