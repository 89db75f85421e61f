"""Phi-3: fused projections, sliding windows, and texts on both sides of longrope's border."""

from typing import Any

from tools.golden.base import ABSENT, VOCAB, variants

LIMIT, WINDOW = 32, 16
BORDER = {"logits": [(31, 4), (32, 4), (33, 4), (60, 8)], "prompts": (31, 20, 32, 33)}
CONFIG = {
    "architectures": ["Phi3ForCausalLM"], "model_type": "phi3", "vocab_size": VOCAB, "hidden_size": 24,
    "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": None,
    "hidden_act": "silu", "max_position_embeddings": 128, "original_max_position_embeddings": 128,
    "rms_norm_eps": 1e-5, "tie_word_embeddings": False, "sliding_window": None, "resid_pdrop": 0.1, "embd_pdrop": 0.0,
    "attention_dropout": 0.0, "attention_bias": False, "pad_token_id": None,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 1.0},
}  # fmt: skip
V4 = {"rope_parameters": ABSENT, "rope_theta": 10000.0, "rope_scaling": None, "torch_dtype": "bfloat16"}
FACTORS = {"short_factor": [1.0 + 0.1 * i for i in range(6)], "long_factor": [1.0 + 1.3 * i for i in range(6)]}
STRETCHED = {"original_max_position_embeddings": LIMIT}
LONGROPE = STRETCHED | {"rope_parameters": {"rope_type": "longrope", "rope_theta": 10000.0, **FACTORS}}

CHANGES: dict[str, dict[str, Any]] = {
    "plain": {},
    "plain_v4": V4,
    "defaults": V4 | dict.fromkeys(
        ("rope_theta", "num_key_value_heads", "hidden_act", "rms_norm_eps", "tie_word_embeddings", "sliding_window",
         "max_position_embeddings", "original_max_position_embeddings"), ABSENT),
    "gqa": {"num_attention_heads": 4, "num_key_value_heads": 2},
    "window": V4 | {"sliding_window": WINDOW},
    "longrope": LONGROPE,
    "longrope_v4": V4 | STRETCHED | {"rope_scaling": {"type": "longrope", **FACTORS}},
    # transformers takes the old label only where the original length stands beside it as well
    "longrope_su": V4 | STRETCHED | {"rope_scaling": {"type": "su", **FACTORS, **STRETCHED}},
    "longrope_window": LONGROPE | {"sliding_window": WINDOW},
    # as Phi-4-mini: rotated in part, groups of heads, tied; and a scaling of its own
    "mini": STRETCHED | {
        "num_attention_heads": 3, "num_key_value_heads": 1, "tie_word_embeddings": True, "rope_parameters": {
            "rope_type": "longrope", "rope_theta": 10000.0, "partial_rotary_factor": 0.75, "attention_factor": 1.3,
            **{name: values[:3] for name, values in FACTORS.items()}}},
    "classifier": LONGROPE | {"architectures": ["Phi3ForSequenceClassification"], "num_labels": 1},
}  # fmt: skip
OTHERS: dict[str, dict[str, Any]] = {
    "window": {"logits": [(15, 4), (16, 4), (17, 4), (40, 4)], "prompts": (15, 16, 17, 5)},
    "longrope": BORDER,
    "longrope_v4": BORDER,
    "longrope_su": BORDER | {"twin": "longrope"},
    "longrope_window": BORDER,
    "mini": BORDER,
    "classifier": BORDER,
}

VARIANTS = variants(CONFIG, CHANGES, {name: {"grid": ()} | OTHERS.get(name, {}) for name in CHANGES})
