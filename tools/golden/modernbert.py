"""ModernBERT decoders: kinds of layers, biases, both spellings of rotary tables, the layer before the head."""

from typing import Any

from tools.golden.base import ABSENT, BORDER, VOCAB, variants

CONFIG: dict[str, Any] = {
    "architectures": ["ModernBertDecoderForCausalLM"], "model_type": "modernbert-decoder", "vocab_size": VOCAB,
    "hidden_size": 24, "intermediate_size": 20, "num_hidden_layers": 3, "num_attention_heads": 3,
    "max_position_embeddings": 128, "norm_eps": 1e-5, "norm_bias": False, "local_attention": 32, "pad_token_id": 0,
    "global_rope_theta": 20000.0, "local_rope_theta": 5000.0, "global_attn_every_n_layers": 2,
    "bos_token_id": 1, "cls_token_id": 1, "sep_token_id": 2,
}  # fmt: skip
ROPES = {
    "full_attention": {"rope_type": "default", "rope_theta": 20000.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 5000.0},
}
OLD = ("global_rope_theta", "local_rope_theta", "global_attn_every_n_layers")

CHANGES: dict[str, dict[str, Any]] = {
    "plain": dict.fromkeys(OLD, ABSENT) | {
        "rope_parameters": ROPES, "layer_types": ["full_attention", "sliding_attention", "full_attention"]},
    "plain_v4": {},
    "biases": {
        "norm_bias": True, "attention_bias": True, "mlp_bias": True, "decoder_bias": False, "classifier_bias": True,
        "tie_word_embeddings": False, "classifier_activation": "silu", "hidden_activation": "gelu_new"},
    "defaults": dict.fromkeys((*OLD, "norm_eps", "norm_bias"), ABSENT) | {"num_hidden_layers": 4},
}  # fmt: skip
VARIANTS = variants(CONFIG, CHANGES, dict.fromkeys(CHANGES, BORDER) | {"plain_v4": BORDER})
