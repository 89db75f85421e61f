"""Laguna: numbers of heads by layer, gates of heads, kinds of layers, experts, published names."""

from typing import Any

from tools.golden.base import ABSENT, BORDER, VOCAB, variants

SLIDING, FULL = "sliding_attention", "full_attention"
CONFIG: dict[str, Any] = {
    "architectures": ["LagunaForCausalLM"], "model_type": "laguna", "vocab_size": VOCAB, "hidden_size": 24,
    "intermediate_size": 20, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
    "max_position_embeddings": 128, "pad_token_id": None, "sliding_window": 16, "num_experts": 6,
    "layer_types": [FULL, SLIDING, FULL], "num_attention_heads_per_layer": [4, 6, 2], "gating": "per-head",
    "num_experts_per_tok": 2, "moe_intermediate_size": 12, "shared_expert_intermediate_size": 16,
}  # fmt: skip
YARN = {
    "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32,
    "partial_rotary_factor": 0.5,
}  # fmt: skip

CHANGES: dict[str, dict[str, Any]] = {
    "plain": {},
    "bias": {
        "attention_bias": True, "mlp_layer_types": ["sparse", "dense", "sparse"], "moe_routed_scaling_factor": 2.5,
        "rope_parameters": {FULL: YARN, SLIDING: {"rope_type": "default", "rope_theta": 5000.0}}},
    "elements": {  # as in Laguna M.1
        "gating": "per-element", "sliding_window": 0, "layer_types": ABSENT, "num_attention_heads_per_layer": ABSENT,
        "mlp_layer_types": ["dense", "sparse", "sparse"],
        "rope_parameters": {FULL: YARN | {"beta_fast": 64.0, "partial_rotary_factor": 1.0}}},
    "defaults": dict.fromkeys(("layer_types", "num_attention_heads_per_layer", "gating", "sliding_window"), ABSENT),
}  # fmt: skip
VARIANTS = variants(CONFIG, CHANGES, dict.fromkeys(CHANGES, BORDER))
