"""Hunyuan, dense: norms of heads after the rotation, a stretched base, biases, ties, spellings."""

from typing import Any

from tools.golden.base import ABSENT, VOCAB, variants

CONFIG = {
    "architectures": ["HunYuanDenseV1ForCausalLM"], "model_type": "hunyuan_v1_dense", "head_dim": 8,
    "vocab_size": VOCAB, "hidden_size": 24,
    "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "hidden_act": "silu", "max_position_embeddings": 128, "rms_norm_eps": 1e-5, "tie_word_embeddings": False,
    "attention_dropout": 0.0, "attention_bias": False, "pad_token_id": None,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
}  # fmt: skip
V4 = {"rope_parameters": ABSENT, "rope_theta": 1e4, "rope_scaling": None, "torch_dtype": "bfloat16"}
ALPHA = {"type": "dynamic", "alpha": 50.0, "factor": 1.0, "beta_fast": 32, "beta_slow": 1, "mscale": 1.0,
         "mscale_all_dim": 1.0}  # fmt: skip

CHANGES: dict[str, dict[str, Any]] = {
    "plain": {},
    "plain_v4": V4,
    "alpha": V4 | {"rope_scaling": ALPHA, "max_position_embeddings": 64},
    "bias": {"attention_bias": True, "tie_word_embeddings": True, "rms_norm_eps": 0.03, "head_dim": 10},
    "classifier": {"architectures": ["HunYuanDenseV1ForSequenceClassification"], "num_labels": 1},
}  # fmt: skip
VARIANTS = variants(CONFIG, CHANGES, {})
