"""The architecture of a config that names none: that of a language model of its `model_type`, as in transformers."""

from collections.abc import Mapping
from typing import Any

from models.checkpoint.wrapped import TEXT_MODELS

WHOLES = "_vl", "_vl_text", "_unified_text"  # of text models that are no models alone
LANGUAGE_MODELS = {kind: model.architecture for kind, model in TEXT_MODELS.items() if not kind.endswith(WHOLES)} | {
    "deepseek_v2": "DeepseekV2ForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
    "gemma": "GemmaForCausalLM",
    "glm4_moe_lite": "Glm4MoeLiteForCausalLM",
    "gpt2": "GPT2LMHeadModel",
    "gpt_oss": "GptOssForCausalLM",
    "granitemoe": "GraniteMoeForCausalLM",
    "granitemoehybrid": "GraniteMoeHybridForCausalLM",
    "granitemoeshared": "GraniteMoeSharedForCausalLM",
    "lfm2_moe": "Lfm2MoeForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "olmoe": "OlmoeForCausalLM",
    "opt": "OPTForCausalLM",
    "phimoe": "PhimoeForCausalLM",
    "qwen2_moe": "Qwen2MoeForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "qwen3_next": "Qwen3NextForCausalLM",
}


def with_architecture(config: Mapping[str, Any]) -> dict[str, Any]:
    """The config with an architecture, if it names none and has a known `model_type`."""
    kind = config.get("model_type")
    if config.get("architectures") or not isinstance(kind, str) or kind not in LANGUAGE_MODELS:
        return dict(config)
    return {**config, "architectures": [LANGUAGE_MODELS[kind]]}
