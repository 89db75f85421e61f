"""Mamba and Falcon Mamba: ranks, biases, taps, norms of parts, absent fields."""

from typing import Any

from tools.golden.base import ABSENT, BLOCKS, VOCAB, variants

CONFIG: dict[str, Any] = {
    "architectures": ["MambaForCausalLM"], "model_type": "mamba", "vocab_size": VOCAB, "hidden_size": 24,
    "num_hidden_layers": 3, "state_size": 16, "conv_kernel": 4, "expand": 2, "time_step_rank": "auto",
    "layer_norm_epsilon": 1e-5, "hidden_act": "silu", "residual_in_fp32": True, "use_bias": False,
    "use_conv_bias": True, "tie_word_embeddings": False, "pad_token_id": None,
}  # fmt: skip
FALCON = {"architectures": ["FalconMambaForCausalLM"], "model_type": "falcon_mamba", "mixer_rms_eps": 0.02}
DEFAULTS = ("time_step_rank", "tie_word_embeddings", "state_size", "conv_kernel", "expand", "use_bias", "use_conv_bias")
CHANGES: dict[str, dict[str, Any]] = {
    "plain": {},
    "bias": {"use_bias": True, "use_conv_bias": False, "conv_kernel": 3, "time_step_rank": 5, "expand": 3,
             "layer_norm_epsilon": 0.03, "state_size": 7, "residual_in_fp32": False},
    "defaults": dict.fromkeys(DEFAULTS, ABSENT),
    "falcon": FALCON,
    "falcon_bias": FALCON | {"use_bias": True, "mixer_rms_eps": ABSENT, "conv_kernel": 2, "time_step_rank": 7},
}  # fmt: skip
VARIANTS = variants(CONFIG, CHANGES, dict.fromkeys(CHANGES, BLOCKS))
