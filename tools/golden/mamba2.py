"""Mamba-2: groups, biases, and taps."""

from typing import Any

from tools.golden.base import BLOCKS, VOCAB, variants

CONFIG: dict[str, Any] = {
    "architectures": ["Mamba2ForCausalLM"], "model_type": "mamba2", "vocab_size": VOCAB, "hidden_size": 24,
    "num_hidden_layers": 3, "num_heads": 8, "head_dim": 6, "n_groups": 2, "state_size": 9, "conv_kernel": 4,
    "expand": 2, "chunk_size": 16, "layer_norm_epsilon": 1e-5, "hidden_act": "silu", "residual_in_fp32": True,
    "use_bias": False, "use_conv_bias": True, "tie_word_embeddings": False, "pad_token_id": None,
}  # fmt: skip
CHANGES: dict[str, dict[str, Any]] = {
    "plain": {},
    "bias": {"use_bias": True, "use_conv_bias": False, "n_groups": 1, "conv_kernel": 3, "layer_norm_epsilon": 0.03,
             "residual_in_fp32": False},
}  # fmt: skip
VARIANTS = variants(CONFIG, CHANGES, dict.fromkeys(CHANGES, BLOCKS))
