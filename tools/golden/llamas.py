"""Families an option or two from Llama: EXAONE 4, Seed-OSS, Nemotron, Arcee, ERNIE, Helium, InternLM3, StarCoder 2."""

from typing import Any

from tools.golden.base import ABSENT, BORDER, VOCAB, variants

CONFIG: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 128, "tie_word_embeddings": False,
    "pad_token_id": None, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}  # fmt: skip
DEFAULTS = dict.fromkeys(("rope_parameters", "tie_word_embeddings"), ABSENT)


def named(architecture: str, kind: str, **changes: Any) -> dict[str, Any]:
    return {"architectures": [architecture], "model_type": kind, **changes}


TYPES = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 16}
PART = {"partial_rotary_factor": 0.5}
HALF = {"rope_parameters": CONFIG["rope_parameters"] | PART} | PART

CHANGES: dict[str, dict[str, Any]] = {
    "exaone": named("Exaone4ForCausalLM", "exaone4", sliding_window=None, layer_types=["full_attention"] * 2),
    "exaone_windows": named("Exaone4ForCausalLM", "exaone4", **TYPES),
    "exaone_defaults": named("Exaone4ForCausalLM", "exaone4", num_hidden_layers=4, **DEFAULTS),
    "exaone_classifier": named("Exaone4ForSequenceClassification", "exaone4", num_labels=1, **TYPES),
    "seed": named("SeedOssForCausalLM", "seed_oss", attention_out_bias=True, mlp_bias=True),
    "seed_defaults": named("SeedOssForCausalLM", "seed_oss", **DEFAULTS),
    "internlm3": named("InternLM3ForCausalLM", "internlm3", qkv_bias=True, bias=True),
    "nemotron": named("NemotronForCausalLM", "nemotron", **HALF),
    "nemotron_biases": named("NemotronForCausalLM", "nemotron", attention_bias=True, mlp_bias=True, **DEFAULTS),
    "arcee": named("ArceeForCausalLM", "arcee", head_dim=ABSENT),
    "arcee_biases": named("ArceeForCausalLM", "arcee", attention_bias=True, mlp_bias=True, **DEFAULTS),
    "ernie": named("Ernie4_5ForCausalLM", "ernie4_5", use_bias=False),
    "ernie_biases": named("Ernie4_5ForCausalLM", "ernie4_5", use_bias=True, **DEFAULTS),
    "helium": named("HeliumForCausalLM", "helium", attention_bias=True, mlp_bias=True),
    "starcoder2": named("Starcoder2ForCausalLM", "starcoder2", head_dim=ABSENT, sliding_window=16),
    "starcoder2_plain": named("Starcoder2ForCausalLM", "starcoder2", use_bias=False, **DEFAULTS),
}  # fmt: skip
VARIANTS = variants(CONFIG, CHANGES, dict.fromkeys(("exaone_windows", "starcoder2"), BORDER))
