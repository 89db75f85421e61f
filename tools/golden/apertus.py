"""Apertus: a learned and another activation, biases, ties, spellings, defaults, other numbers of heads."""

from typing import Any

from tools.golden.base import ABSENT, VOCAB, variants

LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 500.0, "factor": 4.0, "original_max_position_embeddings": 32,
    "low_freq_factor": 1.0, "high_freq_factor": 4.0,
}  # fmt: skip
CONFIG: dict[str, Any] = {
    "architectures": ["ApertusForCausalLM"], "model_type": "apertus", "vocab_size": VOCAB, "hidden_size": 24,
    "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "hidden_act": "xielu", "max_position_embeddings": 128, "rms_norm_eps": 1e-5, "tie_word_embeddings": False,
    "attention_dropout": 0.0, "attention_bias": False, "pad_token_id": None, "rope_parameters": LLAMA3,
}  # fmt: skip
V4 = {
    "rope_parameters": ABSENT, "rope_theta": 500.0, "torch_dtype": "bfloat16",
    "rope_scaling": {name: value for name, value in LLAMA3.items() if name != "rope_theta"},
}  # fmt: skip
CHANGES: dict[str, dict[str, Any]] = {
    "plain": {},
    "plain_v4": V4,
    "bias": {"attention_bias": True, "tie_word_embeddings": True, "head_dim": 10, "rms_norm_eps": 0.03,
             "num_attention_heads": 6, "num_key_value_heads": 3},
    "defaults": dict.fromkeys(("rope_parameters", "num_key_value_heads", "hidden_act", "rms_norm_eps"), ABSENT),
    "silu": {"hidden_act": "silu", "rope_parameters": {"rope_type": "linear", "factor": 2.0}},
    "pruned": {"architectures": ["Apertus1p5TextForCausalLM"], "model_type": "apertus1p5_text",
               "vocab_size": VOCAB + 16, "output_vocab_size": VOCAB},
}  # fmt: skip
VARIANTS = variants(CONFIG, CHANGES, {})
