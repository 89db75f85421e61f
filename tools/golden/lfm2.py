"""LFM2: short convolutions and attention in any order, taps, biases, spellings, widths of the MLP, ties."""

from typing import Any

from tools.golden.base import ABSENT, VOCAB, variants

CONFIG = {
    "architectures": ["Lfm2ForCausalLM"], "model_type": "lfm2", "vocab_size": VOCAB, "hidden_size": 24,
    "intermediate_size": 48, "block_auto_adjust_ff_dim": True, "block_ffn_dim_multiplier": 1.0,
    "block_multiple_of": 16, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 128, "norm_eps": 1e-5, "conv_L_cache": 3, "conv_bias": False,
    "tie_word_embeddings": True, "pad_token_id": 0, "layer_types": ["conv", "full_attention", "conv"],
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}  # fmt: skip
V4 = {
    "rope_parameters": ABSENT, "rope_theta": 10000.0, "torch_dtype": "bfloat16", "layer_types": ABSENT,
    "full_attn_idxs": [1], "tie_word_embeddings": ABSENT, "tie_embedding": True, "intermediate_size": ABSENT,
    "block_ff_dim": 48,
}  # fmt: skip

CHANGES: dict[str, dict[str, Any]] = {
    "plain": {},
    "plain_v4": V4,
    "bias": {"conv_bias": True, "conv_L_cache": 5, "layer_types": ["full_attention", "conv", "conv"]},
    "untied": {"tie_word_embeddings": False, "conv_L_cache": 2, "norm_eps": 0.03, "num_key_value_heads": 1,
               "intermediate_size": 32, "block_auto_adjust_ff_dim": False},
    "one_tap": {"conv_L_cache": 1, "block_ffn_dim_multiplier": 0.8, "rope_parameters": {"rope_type": "yarn",
                "factor": 4.0, "original_max_position_embeddings": 32, "rope_theta": 1000000.0}},
}  # fmt: skip
PROMPTS = (17, 1, 2, 40, 5)  # shorter than the taps, too

OTHERS: dict[str, Any] = {"grid": (), "prompts": PROMPTS}
VARIANTS = variants(CONFIG, CHANGES, dict.fromkeys(CHANGES, OTHERS), ("out_proj.weight", "w2.weight"))
