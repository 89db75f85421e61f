"""GLM-4, GLM-4-0414, GLM-4.5 and Solar Open: heads rotated in part, side by side or by halves; norms; experts."""

from typing import Any

from tools.golden.base import ABSENT, VOCAB, variants

CONFIG: dict[str, Any] = {
    "architectures": ["GlmForCausalLM"], "model_type": "glm", "vocab_size": VOCAB, "hidden_size": 24,
    "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
    "hidden_act": "silu", "max_position_embeddings": 128, "rms_norm_eps": 1e-5, "tie_word_embeddings": False,
    "attention_bias": True, "pad_token_id": None, "partial_rotary_factor": 0.5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
}  # fmt: skip
FOUR = {"architectures": ["Glm4ForCausalLM"], "model_type": "glm4"}
DEFAULTS = dict.fromkeys(
    ("rope_parameters", "partial_rotary_factor", "hidden_act", "rms_norm_eps", "tie_word_embeddings", "attention_bias"),
    ABSENT,
)
MOE: dict[str, Any] = {
    "architectures": ["Glm4MoeForCausalLM"], "model_type": "glm4_moe", "num_hidden_layers": 3, "n_routed_experts": 8,
    "num_experts_per_tok": 3, "moe_intermediate_size": 20, "n_shared_experts": 1, "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.5, "norm_topk_prob": True, "n_group": 1, "topk_group": 1, "use_qk_norm": True,
}  # fmt: skip
SOLAR = {"architectures": ["SolarOpenForCausalLM"], "model_type": "solar_open", "num_hidden_layers": 2}

CHANGES: dict[str, Any] = {
    "plain": {},
    "plain_v4": {"rope_parameters": ABSENT, "rope_theta": 10000.0, "torch_dtype": "bfloat16"},
    "defaults": DEFAULTS,
    "four": FOUR | {"tie_word_embeddings": True},
    "four_classifier": FOUR | {"architectures": ["Glm4ForSequenceClassification"], "num_labels": 1},
    "four_even": FOUR | {"hidden_size": 32},
    "moe": MOE,
    "moe_biases": MOE | {"use_qk_norm": False},
    "moe_defaults": MOE | DEFAULTS | dict.fromkeys(
        ("first_k_dense_replace", "routed_scaling_factor", "norm_topk_prob", "n_group", "topk_group", "use_qk_norm",
         "n_shared_experts"), ABSENT),
    "solar": MOE | SOLAR | {
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}, "partial_rotary_factor": ABSENT,
        "first_k_dense_replace": ABSENT, "use_qk_norm": ABSENT, "intermediate_size": ABSENT},
}  # fmt: skip

VARIANTS = variants(CONFIG, CHANGES, {})
