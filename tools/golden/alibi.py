"""ALiBi: BLOOM, MPT, and the Falcons that have it. Texts past 256 tokens show which positions are rounded."""

from typing import Any

from tools.golden.base import ABSENT, VOCAB, variants
from tools.golden.llamas import named

BLOOM: dict[str, Any] = {"n_layer": 2, "n_head": 4, "hidden_size": 32, "seq_length": 512}
OLD = {"n_head": ABSENT, "num_attention_heads": 6, "hidden_size": ABSENT, "n_embed": 24, "layer_norm_epsilon": 0.03}
MPT: dict[str, Any] = {"n_layers": 2, "n_heads": 4, "d_model": 32, "max_seq_len": 512}
FALCON: dict[str, Any] = {
    "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 6, "max_position_embeddings": 512, "alibi": True,
}  # fmt: skip
RW = {"multi_query": False, "parallel_attn": False, "bias": True}

CHANGES: dict[str, dict[str, Any]] = {
    "mpt": named("MptForCausalLM", "mpt", **MPT),
    "bloom": named("BloomForCausalLM", "bloom", **BLOOM),
    "bloom_old": named("BloomForCausalLM", "bloom", **BLOOM | OLD, tie_word_embeddings=False, torch_dtype="float16"),
    "bloom_normed": named("BloomForCausalLM", "bloom", **BLOOM, apply_residual_connection_post_layernorm=True),
    "bloom_classifier": named("BloomForSequenceClassification", "bloom", **BLOOM, num_labels=1),
    "mpt_clipped": named("MptForCausalLM", "mpt", **MPT | {"n_heads": 3, "d_model": 24}, tie_word_embeddings=False,
                         attn_config={"clip_qkv": 0.5, "softmax_scale": 0.3, "alibi": True, "attn_impl": "triton"}),
    "mpt_classifier": named("MptForSequenceClassification", "mpt", **MPT, num_labels=1),
    "falcon": named("FalconForCausalLM", "falcon", **FALCON | RW),
    "falcon_shared": named("FalconForCausalLM", "falcon", **FALCON | {"num_attention_heads": 4, "hidden_size": 32}),
}  # fmt: skip
LONG = {"logits": [(3, 3), (17, 17), (300, 4)], "prompts": (17, 40, 270)}
VARIANTS = variants({"vocab_size": VOCAB}, CHANGES, dict.fromkeys(CHANGES, LONG))
