"""OPT: norms before and after, projections, fields that the config can leave out, the longest text."""

from typing import Any

import torch

from tools.golden.base import VOCAB, variants

SMALL: dict[str, Any] = {
    "architectures": ["OPTForCausalLM"], "model_type": "opt", "vocab_size": VOCAB, "hidden_size": 32, "ffn_dim": 48,
    "num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 64, "do_layer_norm_before": True,
    "word_embed_proj_dim": 32, "activation_function": "relu", "pad_token_id": 1,
}  # fmt: skip
CHANGES: dict[str, dict[str, Any]] = {
    "plain": {},
    "base_prefix": {"torch_dtype": "bfloat16"},
    "post_norm": {"do_layer_norm_before": False, "hidden_size": 64, "torch_dtype": "bfloat16"},
    "no_biases": {"enable_bias": False},
    "no_affine": {"layer_norm_elementwise_affine": False},
    "no_final_norm": {"_remove_final_layer_norm": True, "activation_function": "gelu"},
    "untied": {"tie_word_embeddings": False, "word_embed_proj_dim": None},
    "max_length": {"word_embed_proj_dim": 16},
    "classifier": {"architectures": ["OPTForSequenceClassification"], "num_labels": 1, "word_embed_proj_dim": 16},
}
OTHERS: dict[str, dict[str, Any]] = {
    "base_prefix": {"twin": "plain"},
    "post_norm": {"full": True},
    # The searches' last token is one past the table: it is never evaluated.
    "max_length": {"logits": [(64, 64), (63, 1)], "prompts": [41]},
    "classifier": {"logits": [(1, 1), (2, 1), (17, 1), (40, 1), (64, 1)]},
}


def alter(name: str, drawn: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Name tensors of `base_prefix` as a save of the bare OPTModel does."""
    return {key.removeprefix("model."): x for key, x in drawn.items()} if name == "base_prefix" else drawn


VARIANTS = variants(
    SMALL, CHANGES, {name: {"grid": ()} | OTHERS.get(name, {}) for name in CHANGES},
    ("out_proj.weight", "fc2.weight"), alter=alter,
)  # fmt: skip
