"""Granite 3 and 4: factors, biases, ties, spellings, with and without rotation; scans of Mamba-2, experts."""

from typing import Any

from tools.golden.base import ABSENT, BLOCKS, VOCAB, variants

CONFIG = {
    "architectures": ["GraniteForCausalLM"], "model_type": "granite", "vocab_size": VOCAB, "hidden_size": 24,
    "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "hidden_act": "silu", "max_position_embeddings": 128, "rms_norm_eps": 1e-5, "tie_word_embeddings": False,
    "attention_dropout": 0.0, "attention_bias": False, "pad_token_id": None,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
}  # fmt: skip
V4 = {"rope_parameters": ABSENT, "rope_theta": 1e4, "rope_scaling": None, "torch_dtype": "bfloat16"}
FACTORS = {"embedding_multiplier": 1.7, "attention_multiplier": 0.6, "residual_multiplier": 0.7, "logits_scaling": 1.3}
HYBRID = FACTORS | {
    "architectures": ["GraniteMoeHybridForCausalLM"], "model_type": "granitemoehybrid", "num_local_experts": 0,
    "num_experts_per_tok": 0, "shared_intermediate_size": 40, "layer_types": ["attention", "attention"],
    "mamba_n_heads": 4, "mamba_d_head": 12, "position_embedding_type": "nope",
}  # fmt: skip
SCANS = HYBRID | {
    "layer_types": ["mamba", "attention"], "mamba_n_heads": 8, "mamba_d_head": 6, "mamba_d_state": 10,
    "mamba_n_groups": 1, "mamba_d_conv": 4, "mamba_expand": 2, "mamba_conv_bias": True, "mamba_proj_bias": False,
    "num_local_experts": 6, "num_experts_per_tok": 2, "intermediate_size": 20, "mamba_chunk_size": 16,
}  # fmt: skip

CHANGES: dict[str, dict[str, Any]] = {
    "plain": FACTORS,
    "plain_v4": V4 | FACTORS,
    "defaults": {"num_key_value_heads": None} | dict.fromkeys(
        ("rope_parameters", "hidden_act", "rms_norm_eps", "tie_word_embeddings", "attention_bias"), ABSENT),
    "bias": FACTORS | {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    "hybrid": HYBRID | {"tie_word_embeddings": True},
    "hybrid_rope": HYBRID | V4 | {"position_embedding_type": "rope", "layer_types": ABSENT, "attention_bias": True,
                                  "layers_block_type": ["attention", "attention"]},
    "scans": SCANS | {"num_local_experts": 0, "num_experts_per_tok": 0},
    "scans_experts": SCANS | {"layer_types": ["linear_attention", "full_attention", "linear_attention"],
                              "num_hidden_layers": 3},
    "scans_groups": SCANS | V4 | {"num_local_experts": 0, "position_embedding_type": "rope", "layer_types": ABSENT,
                                  "layers_block_type": ["attention", "mamba"], "mamba_n_groups": 4, "mamba_d_conv": 2,
                                  "mamba_d_head": "auto", "mamba_expand": 3, "mamba_n_heads": 12, "rms_norm_eps": 0.03,
                                  "mamba_conv_bias": False, "mamba_proj_bias": True, "attention_bias": True},
}  # fmt: skip

OTHERS: dict[str, dict[str, Any]] = {name: BLOCKS for name in CHANGES if name.startswith("scans")}
VARIANTS = variants(CONFIG, CHANGES, OTHERS)
