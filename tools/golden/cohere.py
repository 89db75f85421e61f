"""Command R and R7B: LayerNorms without biases, norms of heads, scaled logits, windows in layers that are rotated."""

from typing import Any

from tools.golden.base import ABSENT, BORDER, VOCAB, variants

CONFIG: dict[str, Any] = {
    "architectures": ["CohereForCausalLM"], "model_type": "cohere", "vocab_size": VOCAB, "hidden_size": 32,
    "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "hidden_act": "silu", "max_position_embeddings": 128, "layer_norm_eps": 1e-5, "tie_word_embeddings": True,
    "logit_scale": 0.5, "use_qk_norm": False, "attention_bias": False, "pad_token_id": 0,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}  # fmt: skip
TWO: dict[str, Any] = {
    "architectures": ["Cohere2ForCausalLM"], "model_type": "cohere2", "sliding_window": 16, "use_qk_norm": ABSENT,
}  # fmt: skip
COMPASS: dict[str, Any] = {
    "architectures": ["CohereCompassForCausalLM"], "model_type": "cohere_compass_text", "sliding_window": 16,
    "use_qk_norm": ABSENT, "logit_scale": ABSENT, "layer_types": ["sliding_attention", "full_attention"],
    "rope_parameters": {"full_attention": None, "sliding_attention": {"rope_type": "default", "rope_theta": 5000.0}},
}  # fmt: skip

CHANGES: dict[str, dict[str, Any]] = {
    "plain": {},
    "norms": {"use_qk_norm": True, "attention_bias": True, "tie_word_embeddings": False},
    "defaults": {"num_key_value_heads": None} | dict.fromkeys(
        ("rope_parameters", "hidden_act", "layer_norm_eps", "tie_word_embeddings", "logit_scale", "use_qk_norm",
         "attention_bias"), ABSENT),
    "two": TWO | {"num_hidden_layers": 4},
    "compass": COMPASS,
    "compass_tables": COMPASS | {
        "layer_types": ABSENT, "logit_scale": 0.7, "attention_bias": True, "tie_word_embeddings": False,
        "rope_parameters": {"full_attention": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}}},
    "compass_classifier": COMPASS | {"architectures": ["CohereCompassTextForSequenceClassification"], "num_labels": 1},
    "two_types": TWO | {"layer_types": ["full_attention", "sliding_attention"], "attention_bias": True},
}  # fmt: skip
VARIANTS = variants(CONFIG, CHANGES, dict.fromkeys(("two", "two_types", "compass"), BORDER))
