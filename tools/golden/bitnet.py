"""BitNet as floats: norms before the last matrices of attention and MLP, squared ReLU. Packed ones: `quantized`."""

from typing import Any

from tools.golden.base import ABSENT, VOCAB, variants

CONFIG: dict[str, Any] = {
    "architectures": ["BitNetForCausalLM"], "model_type": "bitnet", "vocab_size": VOCAB, "hidden_size": 24,
    "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "hidden_act": "relu2", "max_position_embeddings": 128, "rms_norm_eps": 1e-5, "tie_word_embeddings": True,
    "attention_bias": False, "pad_token_id": None, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}  # fmt: skip
CHANGES: dict[str, dict[str, Any]] = {
    "plain": {},
    "defaults": dict.fromkeys(("hidden_act", "rms_norm_eps", "tie_word_embeddings", "attention_bias"), ABSENT)
    | {"rope_parameters": ABSENT, "num_key_value_heads": None},
    "bias": {"attention_bias": True, "rms_norm_eps": 0.03, "hidden_act": "silu"},
}

VARIANTS = variants(CONFIG, CHANGES, {})
