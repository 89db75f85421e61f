"""Llama 4: chunks in some layers, rotation and norms of heads in the same or others, experts in all layers or in turns,
queries that grow with their position."""

from typing import Any

from tools.golden.base import ABSENT, VOCAB, variants

CONFIG: dict[str, Any] = {
    "architectures": ["Llama4ForCausalLM"], "model_type": "llama4_text", "vocab_size": VOCAB, "hidden_size": 24,
    "intermediate_size": 20, "intermediate_size_mlp": 32, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 1,
    "max_position_embeddings": 128, "attention_chunk_size": 16, "floor_scale": 8, "attn_scale": 0.4,
    "tie_word_embeddings": False, "pad_token_id": None,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}  # fmt: skip
OLD = {"factor": 4.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0, "original_max_position_embeddings": 32,
       "rope_type": "llama3"}  # fmt: skip
CHANGES: dict[str, dict[str, Any]] = {
    "plain": {},
    "steps": {  # as Maverick
        "interleave_moe_layer_step": 2, "use_qk_norm": False, "num_experts_per_tok": 2, "attention_bias": True,
        "no_rope_layers": [1, 0, 0, 1], "attn_temperature_tuning": False,
    },
    "types": {  # chunks in layers without rotation; others have both
        "layer_types": ["chunked_attention", "full_attention"] * 2, "no_rope_layers": [], "moe_layers": [1],
        "no_rope_layer_interval": 3, "attention_chunk_size": 7, "rope_parameters": ABSENT, "rope_theta": 10000.0,
        "rope_scaling": OLD,
    },
    "defaults": dict.fromkeys(
        ("intermediate_size_mlp", "attention_chunk_size", "floor_scale", "attn_scale", "num_local_experts",
         "num_experts_per_tok", "rope_parameters"), ABSENT) | {"intermediate_size": 4, "moe_layers": [0, 1, 2, 3]},
    "dense": {  # as MobileLLM-R1
        "num_local_experts": 0, "num_experts_per_tok": 0, "moe_layers": [], "interleave_moe_layer_step": 0,
        "no_rope_layers": [1] * 4, "layer_types": ["full_attention"] * 4, "tie_word_embeddings": True,
    },
}  # fmt: skip
BORDER: dict[str, Any] = {"logits": [(15, 4), (16, 4), (17, 4), (60, 8)], "prompts": (15, 16, 17, 5)}
VARIANTS = variants(CONFIG, CHANGES, dict.fromkeys(CHANGES, BORDER))
