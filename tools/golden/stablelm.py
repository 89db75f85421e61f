"""StableLM: LayerNorms, heads rotated in part, biases of three matrices, MLP beside or after attention, spellings."""

from typing import Any

from tools.golden.base import ABSENT, VOCAB, variants

CONFIG = {
    "architectures": ["StableLmForCausalLM"], "model_type": "stablelm", "vocab_size": VOCAB, "hidden_size": 32,
    "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "hidden_act": "silu", "max_position_embeddings": 128, "layer_norm_eps": 1e-5, "tie_word_embeddings": False,
    "attention_dropout": 0.0, "hidden_dropout": 0.0, "pad_token_id": None, "use_qkv_bias": True,
    "qk_layernorm": False, "use_parallel_residual": False,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
}  # fmt: skip
V4 = {"rope_parameters": ABSENT, "rope_theta": 1e4, "rope_scaling": None, "partial_rotary_factor": 0.5,
      "torch_dtype": "bfloat16"}  # fmt: skip

CHANGES: dict[str, dict[str, Any]] = {
    "plain": {},
    "plain_v4": V4,
    "defaults": dict.fromkeys(
        ("rope_parameters", "hidden_act", "layer_norm_eps", "tie_word_embeddings",
         "use_qkv_bias", "qk_layernorm", "use_parallel_residual"), ABSENT),
    "parallel": {"use_parallel_residual": True, "use_qkv_bias": False, "tie_word_embeddings": True},
    "qk_layernorm": {"qk_layernorm": True},
    "qk_parallel": {"qk_layernorm": True, "use_parallel_residual": True, "num_key_value_heads": 1},
    "classifier": {"architectures": ["StableLmForSequenceClassification"], "num_labels": 1},
}  # fmt: skip
VARIANTS = variants(CONFIG, CHANGES, {})
