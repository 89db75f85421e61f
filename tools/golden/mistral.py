"""Mistral and Ministral: sizes of heads, windows in all layers, some or none, spellings."""

from typing import Any

from tools.golden.base import ABSENT, BORDER, VOCAB, variants

CONFIG = {
    "architectures": ["MistralForCausalLM"], "model_type": "mistral", "vocab_size": VOCAB, "hidden_size": 24,
    "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 8, "hidden_act": "silu", "max_position_embeddings": 128, "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False, "attention_dropout": 0.0, "pad_token_id": None, "sliding_window": None,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
}  # fmt: skip
V4 = {"rope_parameters": ABSENT, "rope_theta": 1e6, "rope_scaling": None, "torch_dtype": "bfloat16"}
GROWN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16,
         "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.3}  # fmt: skip
MINISTRAL3 = {"architectures": ["Ministral3ForCausalLM"], "model_type": "ministral3", "rope_parameters": GROWN}
MISTRAL4 = {
    "architectures": ["Mistral4ForCausalLM"], "model_type": "mistral4", "rope_parameters": GROWN, "kv_lora_rank": 14,
    "q_lora_rank": 18, "qk_nope_head_dim": 5, "qk_rope_head_dim": 6, "v_head_dim": 7, "moe_intermediate_size": 12,
    "n_routed_experts": 6, "num_experts_per_tok": 2, "num_key_value_heads": 4, "head_dim": ABSENT,
    "sliding_window": ABSENT, "attention_dropout": ABSENT, "n_shared_experts": 2, "routed_scaling_factor": 1.5,
}  # fmt: skip
MINISTRAL = {"architectures": ["MinistralForCausalLM"], "model_type": "ministral", "sliding_window": 16}

CHANGES: dict[str, dict[str, Any]] = {
    "plain": {},
    "plain_v4": V4,
    "defaults": {"num_attention_heads": 8, "head_dim": None, "hidden_size": 32} | dict.fromkeys(
        ("num_key_value_heads", "rope_parameters", "hidden_act", "rms_norm_eps", "tie_word_embeddings",
         "sliding_window"), ABSENT),
    "window": {"sliding_window": 16, "layer_types": ["full_attention", "full_attention"]},
    "ministral": MINISTRAL | {"layer_types": ["full_attention", "sliding_attention"]},
    "ministral_v4": MINISTRAL | V4 | {"layer_types": ["full_attention", "sliding_attention"]},
    "ministral_sliding": MINISTRAL | {"tie_word_embeddings": True},
    "ministral_classifier": MINISTRAL | {"architectures": ["MinistralForSequenceClassification"], "num_labels": 1},
    "ministral3": MINISTRAL3,
    "ministral3_v4": MINISTRAL3 | {"rope_parameters": ABSENT, "rope_scaling": GROWN, "torch_dtype": "bfloat16"},
    "mistral4": MISTRAL4,
    "mistral4_dense": MISTRAL4 | {
        "num_hidden_layers": 3, "first_k_dense_replace": 1, "rope_interleave": False, "norm_topk_prob": False,
        "attention_bias": True, "rope_parameters": GROWN | {"mscale": 0.8, "llama_4_scaling_beta": 0.0},
        "q_lora_rank": None},
    "mistral4_defaults": MISTRAL4 | {"q_lora_rank": 16, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4} | dict.fromkeys(
        ("rope_parameters", "num_key_value_heads", "rms_norm_eps", "n_shared_experts", "routed_scaling_factor",
         "hidden_act"), ABSENT) | {"num_attention_heads": 32},
    "mistral4_classifier": MISTRAL4 | {"architectures": ["Mistral4ForSequenceClassification"], "num_labels": 1},
    "ministral3_defaults": MINISTRAL3 | {"num_attention_heads": 8} | dict.fromkeys(
        ("num_key_value_heads", "rope_parameters", "hidden_act", "rms_norm_eps"), ABSENT) | {"sliding_window": 9},
}  # fmt: skip
WINDOWS = ("window", "ministral", "ministral_v4", "ministral_sliding")
VARIANTS = variants(CONFIG, CHANGES, dict.fromkeys(WINDOWS, BORDER))
