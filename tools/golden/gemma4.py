"""Gemma 4: heads by layer, values that are keys, shared keys, inputs of layers, experts; spellings, absent fields."""

from typing import Any

from tools.golden.base import ABSENT, BORDER, VOCAB, variants

LOCAL, GLOBAL = "sliding_attention", "full_attention"
TABLES = {
    LOCAL: {"rope_type": "default", "rope_theta": 100.0},
    GLOBAL: {"rope_type": "proportional", "partial_rotary_factor": 0.5, "rope_theta": 5000.0},
}
CONFIG: dict[str, Any] = {
    "architectures": ["Gemma4ForCausalLM"], "model_type": "gemma4_text", "vocab_size": VOCAB, "hidden_size": 24,
    "intermediate_size": 40, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
    "layer_types": [LOCAL, GLOBAL, GLOBAL], "attention_k_eq_v": True, "sliding_window": 16,
    "per_layer_config": {number: {"head_dim": 20, "num_key_value_heads": 1} for number in "12"},
    "hidden_size_per_layer_input": 0, "hidden_activation": "gelu_pytorch_tanh", "max_position_embeddings": 128,
    "rms_norm_eps": 1e-6, "tie_word_embeddings": True, "attention_bias": False, "attention_dropout": 0.0,
    "final_logit_softcapping": 6.0, "use_bidirectional_attention": "vision", "pad_token_id": None,
    "rope_parameters": TABLES,
}  # fmt: skip
BEFORE = {"per_layer_config": ABSENT, "global_head_dim": 20, "num_global_key_value_heads": 1}
INPUTS = BEFORE | {
    "attention_k_eq_v": False, "num_hidden_layers": 6, "num_kv_shared_layers": 3, "use_double_wide_mlp": True,
    "layer_types": [LOCAL, LOCAL, GLOBAL, LOCAL, GLOBAL, LOCAL], "hidden_size_per_layer_input": 6,
    "vocab_size_per_layer_input": VOCAB + 3,
}  # fmt: skip
EXPERTS = {"enable_moe_block": True, "num_experts": 6, "top_k_experts": 2, "moe_intermediate_size": 16}
CHANGES: dict[str, dict[str, Any]] = {
    "plain": {},
    "plain_v4": BEFORE,
    "inputs": INPUTS,
    "experts": EXPERTS | {"final_logit_softcapping": ABSENT},
    "everything": INPUTS | EXPERTS | {
        "attention_k_eq_v": True, "attention_bias": True, "tie_word_embeddings": False,
        "layer_types": [GLOBAL, LOCAL, GLOBAL, GLOBAL, LOCAL, GLOBAL]},
    "defaults": {"num_hidden_layers": 6, "vocab_size_per_layer_input": VOCAB} | dict.fromkeys(
        ("layer_types", "attention_k_eq_v", "per_layer_config", "sliding_window", "hidden_activation", "rms_norm_eps",
         "tie_word_embeddings", "attention_bias", "final_logit_softcapping", "use_bidirectional_attention",
         "rope_parameters", "num_key_value_heads"), ABSENT),
    "unified": {"architectures": ["Gemma4UnifiedForCausalLM"], "model_type": "gemma4_unified_text",
                "hidden_size_per_layer_input": ABSENT, "attention_bias": True},
}  # fmt: skip
VARIANTS = variants(CONFIG, CHANGES, dict.fromkeys(("plain", "plain_v4", "inputs", "everything"), BORDER))
