"""GPT-2: both prefixes, buffers, scales of attention, widths and activations of the MLP."""

from typing import Any

import torch

from tools.golden.base import VOCAB, variants

SMALL: dict[str, Any] = {
    "architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "vocab_size": VOCAB, "n_embd": 32, "n_layer": 2,
    "n_head": 4, "n_positions": 64, "n_inner": 48, "activation_function": "gelu_new", "layer_norm_epsilon": 1e-5,
}  # fmt: skip
CHANGES: dict[str, dict[str, Any]] = {
    "plain": {},
    "base_prefix": {"torch_dtype": "bfloat16"},
    "gelu": {"activation_function": "gelu", "layer_norm_epsilon": 0.03},
    "wide": {"n_inner": None, "n_embd": 24},
    "by_layer": {"scale_attn_by_inverse_layer_idx": True, "n_layer": 3},
    "unscaled": {"scale_attn_weights": False, "activation_function": "quick_gelu"},
    "upcast": {"reorder_and_upcast_attn": True, "scale_attn_by_inverse_layer_idx": True},
    "untied": {"tie_word_embeddings": False, "torch_dtype": "bfloat16"},
    "max_length": {"activation_function": "relu"},
    "classifier": {"architectures": ["GPT2ForSequenceClassification"], "num_labels": 1},
}
OTHERS: dict[str, dict[str, Any]] = {
    "base_prefix": {"twin": "plain"},
    "untied": {"full": True},
    # The searches' last token is one past the table: it is never evaluated.
    "max_length": {"logits": [(64, 64), (63, 1)], "prompts": [41]},
    "classifier": {"logits": [(1, 1), (2, 1), (17, 1), (40, 1), (64, 1)]},
}


def alter(name: str, drawn: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Name tensors of `base_prefix` as a save of the bare GPT2Model does, with the causal masks that old ones hold."""
    if name != "base_prefix":
        return drawn
    masks = {f"h.{i}.attn.bias": torch.ones(1, 1, 64, 64).tril() for i in range(SMALL["n_layer"])}
    return {key.removeprefix("transformer."): x for key, x in drawn.items()} | masks


VARIANTS = variants(
    SMALL, CHANGES, {name: {"grid": ()} | OTHERS.get(name, {}) for name in CHANGES},
    ("c_proj.weight",), ("c_attn.weight", "c_proj.weight", "c_fc.weight"), alter,
)  # fmt: skip
