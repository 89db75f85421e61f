"""Zamba2: one and two blocks that layers share or do not, their adapters, rotation, biases, groups, absent fields."""

from typing import Any

from tools.golden.base import ABSENT, BLOCKS, VOCAB, variants

MAMBA, HYBRID = "linear_attention", "hybrid"
CONFIG: dict[str, Any] = {
    "architectures": ["Zamba2ForCausalLM"], "model_type": "zamba2", "vocab_size": VOCAB, "hidden_size": 24,
    "intermediate_size": 40, "num_hidden_layers": 3, "layers_block_type": [MAMBA, HYBRID, HYBRID],
    "num_attention_heads": 4, "num_key_value_heads": 4, "attention_head_dim": 12, "attention_hidden_size": 48,
    "mamba_d_state": 9, "mamba_d_conv": 4, "mamba_expand": 2, "mamba_ngroups": 2, "n_mamba_heads": 8, "chunk_size": 16,
    "add_bias_linear": False, "hidden_act": "gelu", "num_mem_blocks": 1, "use_shared_attention_adapter": True,
    "adapter_rank": 5, "use_mem_rope": True, "rope_theta": 10000, "max_position_embeddings": 128, "rms_norm_eps": 1e-5,
    "use_conv_bias": True, "tie_word_embeddings": True, "pad_token_id": 0,
}  # fmt: skip
CHANGES: dict[str, dict[str, Any]] = {
    "defaults": {"num_key_value_heads": None, "intermediate_size": None, "num_hidden_layers": 2, "n_mamba_heads": 4,
                 "layers_block_type": [MAMBA, HYBRID]} | dict.fromkeys(
        ("attention_head_dim", "attention_hidden_size", "mamba_d_conv", "mamba_expand", "mamba_ngroups",
         "add_bias_linear", "hidden_act", "num_mem_blocks", "use_shared_attention_adapter", "use_mem_rope",
         "rope_theta", "max_position_embeddings", "rms_norm_eps", "use_conv_bias", "tie_word_embeddings",
         "pad_token_id"), ABSENT),
    "plain": {},
    "bias": {"add_bias_linear": True, "mamba_ngroups": 4, "mamba_d_conv": 2, "use_long_context": True,
             "adapter_rank": 1, "num_mem_blocks": 3, "layers_block_type": [MAMBA, MAMBA, HYBRID]},
    "two": {"num_mem_blocks": 2, "use_shared_attention_adapter": False, "use_mem_rope": False, "hidden_act": "silu",
            "num_hidden_layers": 4, "layers_block_type": ["mamba", "hybrid", "hybrid", "hybrid"],
            "num_key_value_heads": 2, "mamba_ngroups": 1, "rms_norm_eps": 0.03, "use_conv_bias": False},
    "untied": {"tie_word_embeddings": False},
    "classifier": {"architectures": ["Zamba2ForSequenceClassification"], "num_labels": 1},
}  # fmt: skip
VARIANTS = variants(CONFIG, CHANGES, dict.fromkeys(CHANGES, BLOCKS))
