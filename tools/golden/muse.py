"""Muse Glimmer, which exists with vision only: windows, layers without rotation, epsilons, factors, defaults."""

from typing import Any

from tools.golden.base import BORDER, VOCAB, variants

TEXT: dict[str, Any] = {
    "model_type": "muse_glimmer_text", "vocab_size": VOCAB, "hidden_size": 24, "intermediate_size": 32,
    "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
    "max_position_embeddings": 128, "sliding_window": 16, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
CONFIG: dict[str, Any] = {
    "architectures": ["MuseGlimmerForConditionalGeneration"], "model_type": "muse_glimmer", "vocab_size": VOCAB,
    "vision_config": {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1,
                      "patch_size": 4, "max_position_embeddings": 4},
    "out_hidden_size": 8, "projector_hidden_size": 8, "image_token_id": VOCAB, "video_token_id": VOCAB + 1,
}  # fmt: skip
OTHERS: dict[str, Any] = {
    "num_attention_heads": 6, "num_key_value_heads": 3, "hidden_activation": "gelu_pytorch_tanh", "rms_norm_eps": 1e-3,
    "post_norm_eps": 0.5, "qk_scale_factor": 1.5, "output_multiplier": 0.7, "final_logit_softcapping": 5.0,
    "layer_types": ["full_attention", "sliding_attention", "full_attention"], "layer_rope_theta": [0, 7.0, 500],
    "rope_parameters": {"rope_type": "default", "rope_theta": 500.0}, "tie_word_embeddings": True,
}  # fmt: skip
CHANGES: dict[str, dict[str, Any]] = {
    "plain": {"text_config": TEXT},
    "others": {"text_config": TEXT | OTHERS, "tie_word_embeddings": True},
}

VARIANTS = variants(CONFIG, CHANGES, dict.fromkeys(CHANGES, BORDER))
