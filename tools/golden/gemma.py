"""Gemma 1, 2 and 3: caps, windows and rotary tables by layer, both spellings, other kinds of layers, scalar heads."""

from typing import Any

import torch

from tools.golden.base import ABSENT, BORDER, VOCAB, variants

WIDTH, MLP, SIZE = 24, 40, 10
PLAIN = {"rope_type": "default", "rope_theta": 10000.0}
CONFIG = {
    "architectures": ["GemmaForCausalLM"], "model_type": "gemma", "vocab_size": VOCAB, "hidden_size": WIDTH,
    "intermediate_size": MLP, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": SIZE, "hidden_act": "gelu_pytorch_tanh", "max_position_embeddings": 128, "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True, "attention_bias": False, "attention_dropout": 0.0, "pad_token_id": None,
    "rope_parameters": PLAIN,
}  # fmt: skip
TWO = {
    "architectures": ["Gemma2ForCausalLM"], "model_type": "gemma2", "num_hidden_layers": 3, "hidden_act": ABSENT,
    "hidden_activation": "gelu_pytorch_tanh", "query_pre_attn_scalar": 7, "sliding_window": 16,
    "attn_logit_softcapping": 1.5, "final_logit_softcapping": 6.0,
}  # fmt: skip
LOCAL, GLOBAL = "sliding_attention", "full_attention"
TABLES = {
    LOCAL: {"rope_type": "default", "rope_theta": 100.0},
    GLOBAL: {"rope_type": "linear", "factor": 8.0, "rope_theta": 5000.0},
}
THREE = TWO | {
    "architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", "attn_logit_softcapping": None,
    "final_logit_softcapping": None, "rope_parameters": TABLES, "layer_types": [LOCAL, GLOBAL, LOCAL],
}  # fmt: skip
V4 = {"rope_parameters": ABSENT, "rope_theta": 10000.0, "rope_scaling": None, "torch_dtype": "bfloat16"}
CHANGES: dict[str, dict[str, Any]] = {
    "one": {},
    "one_v4": V4 | {"hidden_act": "gelu", "hidden_activation": None, "attention_bias": ABSENT},
    "one_classifier": {"architectures": ["GemmaForSequenceClassification"], "num_labels": 1},
    "two": TWO,
    "two_v4": TWO | V4 | {"hidden_act": "gelu", "tie_word_embeddings": ABSENT, "layer_types": ABSENT},
    "two_full": TWO | {
        "attn_logit_softcapping": None, "final_logit_softcapping": None, "tie_word_embeddings": False,
        "layer_types": [GLOBAL, GLOBAL, LOCAL], "num_key_value_heads": 1, "attention_bias": True},
    "two_classifier": TWO | {"architectures": ["Gemma2ForSequenceClassification"], "num_labels": 1},
    "three": THREE,
    "three_v4": THREE | V4 | {
        "rope_theta": 5000.0, "rope_local_base_freq": 100.0, "layer_types": ABSENT, "sliding_window_pattern": 2,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0}},
    "three_defaults": THREE | {
        "rope_parameters": ABSENT, "layer_types": ABSENT, "num_hidden_layers": 6, "final_logit_softcapping": 6.0,
        "query_pre_attn_scalar": ABSENT, "num_key_value_heads": 4, "hidden_activation": "silu"},
    "three_classifier": THREE | {"architectures": ["Gemma3TextForSequenceClassification"], "num_labels": 1},
}  # fmt: skip
SHORT = [(1, 1.0, False, 1, "own", 24), (4, 0.6, "never", 4, "several", 24), (15, 1.0, False, 15, "own", 16)]
WINDOW = BORDER | {"grid": [*SHORT, (15, 2.0, True, 15, "several", 24)]}
OTHERS: dict[str, dict[str, Any]] = {
    **{name: {"grid": SHORT} for name in CHANGES},
    **{name: WINDOW | {"own_eos": (0, 2)} for name in ("two", "two_v4")},
    **{name: WINDOW for name in ("three", "three_v4")},
}


def alter(name: str, drawn: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Center norms on 0, and enlarge what attention and MLP add, to count beside an embedding that is multiplied by the
    root of the width."""
    first = name.startswith("one")
    for key, x in drawn.items():
        if x.dim() == 1 and key.endswith(".weight"):
            x -= 1
        if first and key.endswith(("o_proj.weight", "down_proj.weight")):
            x *= 6
        if not first and key.endswith(("post_attention_layernorm.weight", "post_feedforward_layernorm.weight")):
            x += 3
    return drawn


VARIANTS = variants(CONFIG, CHANGES, OTHERS, (), alter=alter)
