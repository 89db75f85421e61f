"""The architecture of a config by its `model_type`, as in transformers, if it names none or that of another type."""

from collections.abc import Mapping
from typing import Any

from models.checkpoint.wrapped import TEXT_MODELS

# Suffixes of text models that only exist inside another model.
WHOLES = "_vl", "_vl_text", "_vl_moe_text", "4v_text", "4v_moe_text", "_omni_text", "_omni_moe_text"
WHOLES += "_ocr_text", "_vision_text", "_docling_text"
LANGUAGE_MODELS = {kind: model.architecture for kind, model in TEXT_MODELS.items() if not kind.endswith(WHOLES)} | {
    "afmoe": "AfmoeForCausalLM",
    "apertus": "ApertusForCausalLM",
    "arcee": "ArceeForCausalLM",
    "axk1": "AXK1ForCausalLM",
    "bailing_moe_v2": "BailingMoeV2ForCausalLM",
    "bailing_hybrid": "BailingHybridForCausalLM",
    "bamba": "BambaForCausalLM",
    "biogpt": "BioGptForCausalLM",
    "bitnet": "BitNetForCausalLM",
    "bloom": "BloomForCausalLM",
    "codegen": "CodeGenForCausalLM",
    "cohere": "CohereForCausalLM",
    "cohere2_moe": "Cohere2MoeForCausalLM",
    "ctrl": "CTRLLMHeadModel",
    "cwm": "CwmForCausalLM",
    "dbrx": "DbrxForCausalLM",
    "deepseek_v2": "DeepseekV2ForCausalLM",
    "deepseek_v32": "DeepseekV32ForCausalLM",
    "dots1": "Dots1ForCausalLM",
    "ernie4_5": "Ernie4_5ForCausalLM",
    "ernie4_5_moe": "Ernie4_5_MoeForCausalLM",
    "exaone": "ExaoneForCausalLM",
    "exaone_moe": "ExaoneMoeForCausalLM",
    "falcon": "FalconForCausalLM",
    "falcon_h1": "FalconH1ForCausalLM",
    "falcon_mamba": "FalconMambaForCausalLM",
    "flex_olmo": "FlexOlmoForCausalLM",
    "flint": "FlintForCausalLM",
    "gemma": "GemmaForCausalLM",
    "glm": "GlmForCausalLM",
    "glm4": "Glm4ForCausalLM",
    "glm4_moe": "Glm4MoeForCausalLM",
    "glm4_moe_lite": "Glm4MoeLiteForCausalLM",
    "glm_moe_dsa": "GlmMoeDsaForCausalLM",
    "gpt2": "GPT2LMHeadModel",
    "gpt_bigcode": "GPTBigCodeForCausalLM",
    "gpt_neo": "GPTNeoForCausalLM",
    "gpt_neox": "GPTNeoXForCausalLM",
    "gpt_neox_japanese": "GPTNeoXJapaneseForCausalLM",
    "gpt_oss": "GptOssForCausalLM",
    "gptj": "GPTJForCausalLM",
    "granite_swa": "GraniteSWAForCausalLM",
    "granitemoe": "GraniteMoeForCausalLM",
    "granitemoe_swa": "GraniteMoeSWAForCausalLM",
    "granitemoehybrid": "GraniteMoeHybridForCausalLM",
    "granitemoeshared": "GraniteMoeSharedForCausalLM",
    "helium": "HeliumForCausalLM",
    "hunyuan_v1_moe": "HunYuanMoEV1ForCausalLM",
    "hy_v3": "HYV3ForCausalLM",
    "internlm2": "InternLM2ForCausalLM",
    "internlm3": "InternLM3ForCausalLM",
    "iquestcoder": "IQuestCoderForCausalLM",
    "jais2": "Jais2ForCausalLM",
    "jamba": "JambaForCausalLM",
    "kolibri1": "Kolibri1ForCausalLM",
    "laguna": "LagunaForCausalLM",
    "kimi_linear": "KimiLinearForCausalLM",
    "lara_mini": "LaraMiniForCausalLM",
    "lfm2_moe": "Lfm2MoeForCausalLM",
    "mamba": "MambaForCausalLM",
    "mamba2": "Mamba2ForCausalLM",
    "mellum": "MellumForCausalLM",
    "mimo": "MiMoForCausalLM",
    "minicpm": "MiniCPMForCausalLM",
    "minicpm3": "MiniCPM3ForCausalLM",
    "minimax_m2": "MiniMaxM2ForCausalLM",
    "minimax_m3_vl_text": "MiniMaxM3VLForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "modernbert-decoder": "ModernBertDecoderForCausalLM",
    "mpt": "MptForCausalLM",
    "nanochat": "NanoChatForCausalLM",
    "nemotron": "NemotronForCausalLM",
    "nemotron_h": "NemotronHForCausalLM",
    "olmo": "OlmoForCausalLM",
    "olmo_hybrid": "OlmoHybridForCausalLM",
    "olmoe": "OlmoeForCausalLM",
    "openai-gpt": "OpenAIGPTLMHeadModel",
    "opt": "OPTForCausalLM",
    "paddleocr_vl_text": "PaddleOCRForCausalLM",
    "persimmon": "PersimmonForCausalLM",
    "phi4_multimodal": "Phi4MultimodalForCausalLM",
    "phi4mm": "Phi4MMForCausalLM",
    "phimoe": "PhimoeForCausalLM",
    "qwen2_moe": "Qwen2MoeForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "qwen3_next": "Qwen3NextForCausalLM",
    "sarvam_mla": "SarvamMLAForCausalLM",
    "sarvam_moe": "SarvamMoEForCausalLM",
    "seed_oss": "SeedOssForCausalLM",
    "solar_open": "SolarOpenForCausalLM",
    "starcoder2": "Starcoder2ForCausalLM",
    "vaultgemma": "VaultGemmaForCausalLM",
    "xglm": "XGLMForCausalLM",
    "youtu": "YoutuForCausalLM",
    "zamba2": "Zamba2ForCausalLM",
}


def with_architecture(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config; if it has a known `model_type` and names no architecture, or the language model of another
    `model_type` (transformers ignores that name), with the architecture of its `model_type`."""
    kind, names = config.get("model_type"), config.get("architectures") or [None]
    if not isinstance(kind, str) or kind not in LANGUAGE_MODELS or not isinstance(names, list):
        return dict(config)
    if names[0] is not None and _folded(names[0]) not in map(_folded, LANGUAGE_MODELS.values()):
        return dict(config)
    return {**config, "architectures": [LANGUAGE_MODELS[kind]]}


def _folded(name: Any) -> str:
    """Return a name without underscores and capitals, in which early configs differ (LLaMAForCausalLM)."""
    return str(name).replace("_", "").lower()
