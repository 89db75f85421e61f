"""SmolLM3: layers without rotation, windows in them or in others, biases, ties, spellings."""

from typing import Any

from tools.golden.base import ABSENT, BORDER, VOCAB, variants

CONFIG = {
    "architectures": ["SmolLM3ForCausalLM"], "model_type": "smollm3", "vocab_size": VOCAB, "hidden_size": 24,
    "intermediate_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
    "hidden_act": "silu", "max_position_embeddings": 128, "rms_norm_eps": 1e-5, "tie_word_embeddings": False,
    "attention_dropout": 0.0, "attention_bias": False, "pad_token_id": None,
    "rope_parameters": {"rope_type": "default", "rope_theta": 2e6},
}  # fmt: skip
V4 = {"rope_parameters": ABSENT, "rope_theta": 2e6, "rope_scaling": None, "torch_dtype": "bfloat16"}

CHANGES: dict[str, dict[str, Any]] = {
    "plain": {"no_rope_layers": [1, 0, 1]},
    "plain_v4": V4 | {"no_rope_layers": [1, 0, 1]},
    "defaults": {"num_hidden_layers": 4} | dict.fromkeys(
        ("num_key_value_heads", "rope_parameters", "hidden_act", "rms_norm_eps", "tie_word_embeddings",
         "attention_bias"), ABSENT),
    "windows": {"use_sliding_window": True, "sliding_window": 16, "no_rope_layer_interval": 2, "attention_bias": True},
    "layer_types": {"sliding_window": 16, "no_rope_layers": [0, 0, 0], "mlp_bias": True,
                    "layer_types": ["sliding_attention", "full_attention", "attention"]},
    "classifier": {"architectures": ["SmolLM3ForSequenceClassification"], "num_labels": 1},
}  # fmt: skip
VARIANTS = variants(CONFIG, CHANGES, {"windows": BORDER, "layer_types": BORDER})
