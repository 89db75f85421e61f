"""OLMo 2 and 3: norms of outputs and of all heads, biases, ties, windows, a rotary table for each kind of layer."""

from typing import Any

from tools.golden.base import ABSENT, BORDER, VOCAB, variants

CONFIG = {
    "architectures": ["Olmo2ForCausalLM"], "model_type": "olmo2", "vocab_size": VOCAB, "hidden_size": 24,
    "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "hidden_act": "silu", "max_position_embeddings": 128, "rms_norm_eps": 1e-5, "tie_word_embeddings": False,
    "attention_dropout": 0.0, "attention_bias": False, "pad_token_id": None,
    "rope_parameters": {"rope_type": "default", "rope_theta": 5e5},
}  # fmt: skip
V4 = {"rope_parameters": ABSENT, "rope_theta": 5e5, "rope_scaling": None, "torch_dtype": "bfloat16"}
OLMO3 = {"architectures": ["Olmo3ForCausalLM"], "model_type": "olmo3", "sliding_window": 16, "num_hidden_layers": 4}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "attention_factor": 1.2}
ROPES = {"sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
         "full_attention": {**YARN, "rope_theta": 5e5}}  # fmt: skip

CHANGES: dict[str, dict[str, Any]] = {
    "plain": {},
    "plain_v4": V4,
    "defaults": {"num_key_value_heads": None} | dict.fromkeys(
        ("rope_parameters", "hidden_act", "rms_norm_eps", "tie_word_embeddings", "attention_bias"), ABSENT),
    "bias": {"attention_bias": True, "tie_word_embeddings": True},
    "classifier": {"architectures": ["Olmo2ForSequenceClassification"], "num_labels": 1},
    "olmo3": OLMO3 | {"rope_parameters": ROPES},
    "olmo3_old": OLMO3 | V4 | {"rope_theta": 2e4, "rope_scaling": YARN},
    "olmo3_types": OLMO3 | {"rope_parameters": ABSENT, "num_hidden_layers": 2, "attention_bias": True,
                            "layer_types": ["full_attention", "sliding_attention"]},
    "olmo3_classifier": OLMO3 | {"architectures": ["Olmo3ForSequenceClassification"], "num_labels": 1,
                                 "rope_parameters": ROPES},
}  # fmt: skip
VARIANTS = variants(CONFIG, CHANGES, dict.fromkeys(("olmo3", "olmo3_old", "olmo3_types"), BORDER))
