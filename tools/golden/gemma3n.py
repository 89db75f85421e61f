"""Gemma 3n: streams, learned residuals, sparse gates, shared keys, inputs of layers; spellings, absent fields."""

from typing import Any

from tools.golden.base import ABSENT, BORDER, VOCAB, variants

LOCAL, GLOBAL = "sliding_attention", "full_attention"
CONFIG: dict[str, Any] = {
    "architectures": ["Gemma3nForCausalLM"], "model_type": "gemma3n_text", "vocab_size": VOCAB, "hidden_size": 24,
    "intermediate_size": [40, 48, 40, 40, 56, 40], "num_hidden_layers": 6, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "layer_types": [LOCAL, LOCAL, GLOBAL, LOCAL, GLOBAL, LOCAL],
    "num_kv_shared_layers": 3, "sliding_window": 16, "hidden_size_per_layer_input": 6,
    "vocab_size_per_layer_input": VOCAB - 9, "altup_num_inputs": 4, "altup_active_idx": 0, "altup_correct_scale": True,
    "altup_coef_clip": 1e-3, "laurel_rank": 5, "activation_sparsity_pattern": [0.95, 0.6, 0.0, 0.3, 0.0, 0.95],
    "hidden_activation": "gelu_pytorch_tanh", "max_position_embeddings": 128, "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True, "attention_bias": False, "attention_dropout": 0.0, "final_logit_softcapping": 6.0,
    "pad_token_id": None,
    "rope_parameters": {LOCAL: {"rope_type": "default", "rope_theta": 100.0},
                        GLOBAL: {"rope_type": "linear", "factor": 2.0, "rope_theta": 5000.0}},
}  # fmt: skip
CHANGES: dict[str, dict[str, Any]] = {
    "plain": {},
    "plain_v4": {"rope_parameters": ABSENT, "rope_theta": 5000.0, "rope_local_base_freq": 100.0,
                 "rope_scaling": {"rope_type": "linear", "factor": 2.0}},
    "others": {"altup_num_inputs": 3, "altup_active_idx": 1, "altup_correct_scale": False, "attention_bias": True,
               "tie_word_embeddings": False, "num_kv_shared_layers": 0, "intermediate_size": 40,
               "layer_types": [GLOBAL, LOCAL, LOCAL, LOCAL, GLOBAL, LOCAL]},
    "defaults": {"num_kv_shared_layers": 1, "intermediate_size": 40} | dict.fromkeys(
        ("layer_types", "sliding_window", "hidden_activation", "rms_norm_eps", "tie_word_embeddings", "attention_bias",
         "final_logit_softcapping", "rope_parameters", "num_key_value_heads", "altup_num_inputs", "altup_active_idx",
         "altup_correct_scale", "laurel_rank", "activation_sparsity_pattern"), ABSENT),
}  # fmt: skip
VARIANTS = variants(CONFIG, CHANGES, dict.fromkeys(("plain", "plain_v4", "others"), BORDER))
