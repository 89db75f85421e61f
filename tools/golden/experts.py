"""Mixtures of experts of every family: rules of the choice, shared experts, dense layers among them, windows."""

from typing import Any

from tools.golden.base import ABSENT, BLOCKS, BORDER, VOCAB, variants
from tools.golden.qwen3_5 import RECURRENT

WIDTH = 24
CONFIG: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": WIDTH, "intermediate_size": 32, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128, "num_experts_per_tok": 2,
    "tie_word_embeddings": False, "pad_token_id": None,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}  # fmt: skip
WINDOW = {"use_sliding_window": True, "sliding_window": 16}
QWEN = {
    "num_experts": 6, "moe_intermediate_size": 20, "decoder_sparse_step": 1, "mlp_only_layers": [],
    "norm_topk_prob": False, "hidden_act": "silu", "rms_norm_eps": 1e-6, "use_sliding_window": False,
}  # fmt: skip
QWEN2 = QWEN | {
    "architectures": ["Qwen2MoeForCausalLM"], "model_type": "qwen2_moe", "shared_expert_intermediate_size": 28,
}  # fmt: skip
QWEN3 = QWEN | {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "head_dim": 8}
OLMOE = {
    "architectures": ["OlmoeForCausalLM"], "model_type": "olmoe", "num_experts": 6, "norm_topk_prob": False,
    "rms_norm_eps": 1e-5, "hidden_act": "silu", "eos_token_id": 2,
}  # fmt: skip
MIXTRAL = {
    "architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "num_local_experts": 5, "rms_norm_eps": 1e-5,
    "sliding_window": None, "hidden_act": "silu",
}  # fmt: skip
GRANITE = {
    "architectures": ["GraniteMoeForCausalLM"], "model_type": "granitemoe", "num_local_experts": 6,
    "rms_norm_eps": 1e-6, "embedding_multiplier": 12.0, "logits_scaling": 4.0, "residual_multiplier": 0.5,
    "attention_multiplier": 0.3, "hidden_act": "silu", "attention_bias": False,
}  # fmt: skip
SHARED = GRANITE | {"architectures": ["GraniteMoeSharedForCausalLM"], "model_type": "granitemoeshared"}
LFM2 = {
    "architectures": ["Lfm2MoeForCausalLM"], "model_type": "lfm2_moe", "num_experts": 6, "moe_intermediate_size": 20,
    "num_dense_layers": 1, "use_expert_bias": True, "routed_scaling_factor": 1.5, "norm_topk_prob": True,
    "norm_eps": 1e-5, "conv_L_cache": 3, "conv_bias": False, "layer_types": ["conv", "full_attention", "conv"],
    "tie_word_embeddings": True, "pad_token_id": 0,
}  # fmt: skip
PHI = {
    "architectures": ["PhimoeForCausalLM"], "model_type": "phimoe", "num_local_experts": 6, "rms_norm_eps": 1e-5,
    "router_jitter_noise": 0.1, "attention_bias": True, "lm_head_bias": True, "sliding_window": None,
    "hidden_act": "silu",
}  # fmt: skip
LONG = {
    "rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0, 1.5, 2.0], "long_factor": [2.0, 3.0, 8.0],
    "short_mscale": 1.25, "long_mscale": 1.25, "original_max_position_embeddings": 64, "factor": 2.0,
}  # fmt: skip

QWEN3_5 = {
    "architectures": ["Qwen3_5MoeForCausalLM"], "model_type": "qwen3_5_moe_text", "num_experts": 6, "head_dim": 16,
    "moe_intermediate_size": 20, "shared_expert_intermediate_size": 28, "hidden_act": "silu", "rms_norm_eps": 1e-6,
    "layer_types": ["full_attention"] * 3, "intermediate_size": ABSENT,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25},
}  # fmt: skip
NEXT = QWEN3_5 | {
    "architectures": ["Qwen3NextForCausalLM"], "model_type": "qwen3_next", "intermediate_size": 32,
    "decoder_sparse_step": 1, "mlp_only_layers": [1], "norm_topk_prob": True,
}  # fmt: skip

SIGMOIDS: dict[str, Any] = {
    "head_dim": 8, "n_routed_experts": 6, "moe_intermediate_size": 20, "n_shared_experts": 2, "norm_topk_prob": True,
    "routed_scaling_factor": 1.5, "first_k_dense_replace": 1, "rms_norm_eps": 1e-5,
}  # fmt: skip
DOTS = SIGMOIDS | {"architectures": ["Dots1ForCausalLM"], "model_type": "dots1", "sliding_window": None}
MINIMAX = {
    "architectures": ["MiniMaxM2ForCausalLM"], "model_type": "minimax_m2", "num_local_experts": 6, "head_dim": 8,
    "rotary_dim": 4, "rms_norm_eps": 1e-5,
}  # fmt: skip
MINIMAX_THREE = {
    "architectures": ["MiniMaxM3VLForCausalLM"], "model_type": "minimax_m3_vl_text", "num_local_experts": 6,
    "head_dim": 8, "rms_norm_eps": 1e-5, "intermediate_size": 20, "dense_intermediate_size": 28,
    "shared_intermediate_size": 12, "index_n_heads": 2, "index_head_dim": 8, "index_block_size": 8,
    "index_topk_blocks": 8, "layer_types": ["full_attention", "minimax_m3_sparse", "minimax_m3_sparse"],
    "mlp_layer_types": ["dense", "sparse", "sparse"], "bos_token_id": 1,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
}  # fmt: skip
AFMOE = {
    "architectures": ["AfmoeForCausalLM"], "model_type": "afmoe", "head_dim": 8, "num_experts": 6,
    "moe_intermediate_size": 20, "num_shared_experts": 1, "num_dense_layers": 1, "route_scale": 1.5,
    "mup_enabled": True, "sliding_window": 16, "num_hidden_layers": 4,
}  # fmt: skip
ERNIE = {
    "architectures": ["Ernie4_5_MoeForCausalLM"], "model_type": "ernie4_5_moe", "head_dim": 8, "moe_num_experts": 6,
    "moe_k": 2, "num_experts_per_tok": ABSENT, "moe_intermediate_size": 20, "moe_num_shared_experts": 2,
    "moe_layer_start_index": 1, "moe_layer_interval": 1, "tie_word_embeddings": True,
}  # fmt: skip
ARIA = {
    "architectures": ["AriaTextForCausalLM"], "model_type": "aria_text", "intermediate_size": 12, "moe_num_experts": 5,
    "moe_topk": 3, "moe_num_shared_experts": 2, "num_hidden_layers": 2, "num_experts_per_tok": ABSENT,
}  # fmt: skip

CHANGES: dict[str, dict[str, Any]] = {
    "qwen2": QWEN2 | {"mlp_only_layers": [1]},
    "qwen2_windows": QWEN2 | WINDOW | {"max_window_layers": 2, "qkv_bias": False, "norm_topk_prob": True},
    "qwen3": QWEN3 | {"norm_topk_prob": True, "num_experts_per_tok": 3},
    "qwen3_steps": QWEN3 | WINDOW | {"decoder_sparse_step": 2, "attention_bias": True, "hidden_act": "gelu"},
    "qwen3_defaults": QWEN3 | dict.fromkeys(
        ("decoder_sparse_step", "mlp_only_layers", "norm_topk_prob", "hidden_act", "rms_norm_eps",
         "use_sliding_window"), ABSENT),
    "qwen3_classifier": QWEN3 | {"architectures": ["Qwen3MoeForSequenceClassification"], "num_labels": 1},
    "olmoe": OLMOE,
    "mixtral": MIXTRAL | {"head_dim": 8},
    "mixtral_window": MIXTRAL | {"sliding_window": 16, "num_experts_per_tok": 1},
    "granite": GRANITE,
    "granite_shared": SHARED | {"shared_intermediate_size": 28, "num_experts_per_tok": 3},
    "lfm2": LFM2,
    "lfm2_plain": LFM2 | {"use_expert_bias": False, "norm_topk_prob": False, "conv_bias": True, "num_dense_layers": 0},
    "phi": PHI,
    "phi_longrope": PHI | {"rope_parameters": LONG},
    "qwen3_5": QWEN3_5 | {"num_experts_per_tok": 3},
    "qwen3_next": NEXT,
    "qwen3_next_steps": NEXT | {
        "decoder_sparse_step": 2, "mlp_only_layers": [], "norm_topk_prob": False, "attention_bias": True},
    "qwen3_next_recurrent": NEXT | RECURRENT | {"layer_types": ["linear_attention"] * 2 + ["full_attention"]},
    "qwen3_next_defaults": NEXT | dict.fromkeys(
        ("decoder_sparse_step", "mlp_only_layers", "norm_topk_prob", "hidden_act", "rms_norm_eps", "rope_parameters"),
        ABSENT),
    "qwen3_5_recurrent": QWEN3_5 | RECURRENT | {
        "layer_types": ["linear_attention", "full_attention", "linear_attention"], "rms_norm_eps": 1e-3},
    "dots": DOTS,
    "dots_window": DOTS | {
        "sliding_window": 16, "max_window_layers": 1, "attention_bias": True, "first_k_dense_replace": 0},
    "minimax": MINIMAX,
    "minimax_three": MINIMAX_THREE,
    "minimax_three_v4": MINIMAX_THREE | {
        "rope_parameters": ABSENT, "rope_theta": 10000.0, "partial_rotary_factor": 0.5, "rotary_dim": 6,
        "torch_dtype": "bfloat16", "hidden_act": "swigluoai", "moe_layer_freq": [0, 1, 1], "mlp_layer_types": ABSENT,
        "layer_types": ABSENT, "index_n_heads": ABSENT, "index_head_dim": ABSENT,
        "sparse_attention_config": {
            "sparse_num_index_heads": 2, "sparse_index_dim": 8, "sparse_block_size": 16, "sparse_topk_blocks": 4,
            "sparse_local_block": 1, "sparse_attention_freq": [0, 1, 1]}},
    "minimax_three_defaults": MINIMAX_THREE | {"routed_scaling_factor": 1.0, "tie_word_embeddings": True}
    | dict.fromkeys(("layer_types", "mlp_layer_types", "rope_parameters", "rms_norm_eps"), ABSENT),
    "afmoe": AFMOE,
    "afmoe_types": AFMOE | {
        "layer_types": ["full_attention", "sliding_attention"], "mup_enabled": False, "num_hidden_layers": 2,
        "num_dense_layers": 0, "num_shared_experts": 2},
    "ernie": ERNIE,
    "ernie_some": ERNIE | {"moe_layer_interval": 2, "moe_layer_start_index": 0, "moe_num_shared_experts": 0},
    "aria": ARIA | {"attention_bias": True},
}  # fmt: skip
OTHERS: dict[str, dict[str, Any]] = dict.fromkeys((
    "qwen2_windows", "qwen3_steps", "mixtral_window", "dots_window", "afmoe", "afmoe_types"), BORDER)  # fmt: skip
OTHERS |= dict.fromkeys(("qwen3_next_recurrent", "qwen3_5_recurrent"), BLOCKS)

VARIANTS = variants(CONFIG, CHANGES, OTHERS)
