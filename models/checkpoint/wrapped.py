"""The text model inside a multimodal checkpoint: its config, its tensors, and what is left out."""

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from models.checkpoint.fields import Fields
from models.errors import CheckpointError, nearest

REQUIRED = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
OUTER = ("tie_word_embeddings", "bos_token_id", "eos_token_id", "quantization_config")  # override the text model's own
DTYPES = ("dtype", "torch_dtype")
# Names of a text model's tensors: `language_model.model.layers.0`, `model.language_model.layers.0`, ...
NESTED = re.compile(r"(?:model\.)?(?:language_model|text_model)\.(.+)")
BLOCKS = re.compile(r"^model\.(?:blocks|encoder\.layers)\.")  # transformers 5.24 saves Kimi-K2.5 and Qianfan-OCR so
HEAD = re.compile(r"^model\.lm_head\.")  # of a head that was saved as a part of the model around it
TEXT = re.compile(r"(?:model\.(?:layers|embed_tokens|norm|decoder|rotary_emb)|transformer|lm_head)\..+")
# Models whose head is the embedding unless their outer config says otherwise, whatever the text model's config says.
TIED = frozenset(
    (
        "aya_vision",
        "cohere2_vision",
        "deepseek_vl",
        "deepseek_vl_hybrid",
        "fun_asr_nano",
        "gemma3",
        "gemma3n",
        "gemma4",
        "gemma4_unified",
        "glmasr",
        "got_ocr2",
        "granite_docling",
        "granite_speech",
        "granite_speech_plus",
        "hunyuan_vl",
        "hyperclovax_vision_v2",
        "internvl",
        "janus",
        "kimi_k25",
        "lfm2_vl",
        "lfm3_vl",
        "lighton_ocr",
        "minicpm_ocr",
        "mistral3",
        "moss_transcribe_diarize",
        "ovis2",
        "paddleocr_vl",
        "pp_chart2table",
        "qwen3_asr",
        "vlm",
    )
)
REWARDS = {  # the architecture of a reward model -> that of its text model
    "Gemma3ForSequenceClassification": "Gemma3TextForSequenceClassification",
    "Qwen3_5ForSequenceClassification": "Qwen3_5TextForSequenceClassification",
}
THINKER = "thinker_config"  # of a model that speaks, around the model that writes (Qwen2.5-Omni, Qwen3-Omni)
THOUGHT = "thinker."  # prefix of the latter's tensors
WHOLES = ("HCXVisionV2ForCausalLM",)  # models of several modalities whose names do not say so
ROPES = {"mrope": "default", "xdrope": "dynamic"}  # kinds of rotation along several axes -> those along one
REFUSED = {"paligemma": "it attends to a prompt in both directions"}


@dataclass(frozen=True)
class TextModel:
    """A text model by the `model_type` of its config.

    Args:
        architecture: the architecture of the text model alone.
        required: transformers' values of `REQUIRED` if the config omits them.
        more: further fields that differ from the architecture's own defaults.
        unused: fields that transformers uses in the text model alone, but not inside a multimodal model.
        fixed: values of such fields that are not those of null.
    """

    architecture: str
    required: tuple[int, int, int, int, int]
    more: Mapping[str, Any] = field(default_factory=dict)
    unused: tuple[str, ...] = ()
    fixed: Mapping[str, Any] = field(default_factory=dict)

    def defaults(self) -> dict[str, Any]:
        """Return all fields that a config may omit."""
        return dict(zip(REQUIRED, self.required, strict=True)) | dict(self.more)


_QWEN_VL = TextModel(
    "Qwen2ForCausalLM",
    (152064, 8192, 29568, 80, 64),
    {"num_key_value_heads": 8, "rms_norm_eps": 1e-5, "max_window_layers": 80, "rope_theta": 1e6},
)
_HUNYUAN_VL = TextModel("HunYuanDenseV1ForCausalLM", (290943, 4096, 11008, 32, 32))
_PADDLE = TextModel("PaddleOCRForCausalLM", (103424, 1024, 3072, 18, 16))
_KIMI = TextModel("DeepseekV3ForCausalLM", (129280, 7168, 18432, 61, 128))
TEXT_MODELS = {
    "apertus1p5_text": TextModel("Apertus1p5TextForCausalLM", (266752, 4096, 14336, 32, 32)),
    "aria_text": TextModel("AriaTextForCausalLM", (32000, 4096, 4096, 32, 32)),
    "cohere2": TextModel("Cohere2ForCausalLM", (256000, 8192, 22528, 40, 64), fixed={"logit_scale": 1.0}),
    "cohere_compass_text": TextModel("CohereCompassForCausalLM", (256000, 8192, 22528, 40, 64)),
    "deepseek_v3": _KIMI,
    "emu3_text_model": TextModel("Emu3ForCausalLM", (184622, 4096, 14336, 32, 32)),
    "exaone4": TextModel("Exaone4ForCausalLM", (102400, 4096, 16384, 32, 32)),
    "gemma2": TextModel("Gemma2ForCausalLM", (256000, 2304, 9216, 26, 8), unused=("final_logit_softcapping",)),
    "gemma3_text": TextModel("Gemma3ForCausalLM", (262208, 2304, 9216, 26, 8), unused=("final_logit_softcapping",)),
    "gemma3n_text": TextModel("Gemma3nForCausalLM", (262400, 2048, 16384, 35, 8)),
    "gemma4_text": TextModel("Gemma4ForCausalLM", (262144, 2304, 9216, 30, 8)),
    "gemma4_unified_text": TextModel("Gemma4UnifiedForCausalLM", (262144, 2304, 9216, 30, 8)),
    "glm4v_text": TextModel(
        "Glm4ForCausalLM",
        (151552, 4096, 13696, 40, 32),
        {"rms_norm_eps": 1e-5, "max_position_embeddings": 32768, "partial_rotary_factor": 1.0, "head_dim": None},
        fixed={"attention_bias": True},
    ),
    "glm4v_moe_text": TextModel(
        "Glm4MoeForCausalLM",
        (151424, 4096, 10944, 46, 96),
        {"max_position_embeddings": 65536, "attention_bias": True},
        unused=("use_qk_norm",),
    ),
    "glm_ocr_text": TextModel(
        "Glm4ForCausalLM",
        (59392, 1024, 4096, 16, 16),
        {"num_key_value_heads": 8, "rms_norm_eps": 1e-5, "partial_rotary_factor": 1.0, "head_dim": None},
        fixed={"attention_bias": False},
    ),
    "granite": TextModel("GraniteForCausalLM", (32000, 4096, 11008, 32, 32), unused=("logits_scaling",)),
    "granite4_vision_text": TextModel("GraniteForCausalLM", (32000, 4096, 11008, 32, 32)),
    "granite_docling_text": TextModel(
        "GraniteForCausalLM",
        (133800, 1024, 2048, 28, 16),
        {"num_key_value_heads": 4, "max_position_embeddings": 32768, "rms_norm_eps": 1e-5}
        | {"embedding_multiplier": 12.0, "logits_scaling": 4.0, "residual_multiplier": 0.263}
        | {"attention_multiplier": 0.015625},
    ),
    "hunyuan_v1_dense": TextModel("HunYuanDenseV1ForCausalLM", (290943, 4096, 11008, 32, 32)),
    "hunyuan_vl": _HUNYUAN_VL,
    "hunyuan_vl_text": _HUNYUAN_VL,
    "hyperclovax": TextModel("HyperCLOVAXForCausalLM", (32000, 4096, 11008, 32, 32)),
    "lfm2": TextModel("Lfm2ForCausalLM", (65536, 2560, 12288, 32, 32)),
    "lfm3": TextModel("Lfm3ForCausalLM", (128000, 2048, 7680, 24, 16)),
    "kimi_k2": _KIMI,
    "llama": TextModel("LlamaForCausalLM", (32000, 4096, 11008, 32, 32)),
    "llama4_text": TextModel("Llama4ForCausalLM", (202048, 5120, 8192, 48, 40)),
    "minimax_m3_vl_text": TextModel("MiniMaxM3VLForCausalLM", (200064, 6144, 3072, 60, 64)),
    "ministral": TextModel("MinistralForCausalLM", (32000, 4096, 14336, 32, 32)),
    "ministral3": TextModel("Ministral3ForCausalLM", (131072, 4096, 14336, 34, 32)),
    "mllama_text_model": TextModel("MllamaForCausalLM", (128256, 4096, 14336, 40, 32)),
    "mistral4": TextModel("Mistral4ForCausalLM", (131072, 4096, 12288, 36, 32)),
    "mistral": TextModel("MistralForCausalLM", (32000, 4096, 14336, 32, 32)),
    "muse_glimmer_text": TextModel("MuseGlimmerForCausalLM", (202048, 6656, 19968, 52, 32)),
    "olmo2": TextModel("Olmo2ForCausalLM", (50304, 4096, 11008, 32, 32)),
    "olmo3": TextModel("Olmo3ForCausalLM", (50304, 4096, 11008, 32, 32)),
    "paddleocr_vl": _PADDLE,
    "paddleocr_vl_text": _PADDLE,
    "phi": TextModel("PhiForCausalLM", (51200, 2048, 8192, 24, 32)),
    "phi3": TextModel("Phi3ForCausalLM", (32064, 3072, 8192, 32, 32)),
    "qwen2": TextModel("Qwen2ForCausalLM", (151936, 4096, 22016, 32, 32)),
    "qwen2_vl": _QWEN_VL,
    "qwen2_vl_text": _QWEN_VL,
    "qwen2_5_vl": _QWEN_VL,
    "qwen2_5_vl_text": _QWEN_VL,
    "qwen2_5_omni_text": TextModel(
        "Qwen2ForCausalLM", (152064, 3584, 18944, 28, 28), {"num_key_value_heads": 4, "rope_theta": 1e6}
    ),
    "qwen3": TextModel("Qwen3ForCausalLM", (151936, 4096, 22016, 32, 32)),
    "qwen3_5_text": TextModel("Qwen3_5ForCausalLM", (248320, 4096, 12288, 32, 16)),
    "qwen3_5_moe_text": TextModel("Qwen3_5MoeForCausalLM", (248320, 2048, 512, 40, 16)),
    "qwen3_omni_moe_text": TextModel(
        "Qwen3MoeForCausalLM",
        (3584, 2048, 18944, 28, 28),
        {"num_key_value_heads": 4, "rope_theta": 1e6, "norm_topk_prob": True, "head_dim": None},
        unused=("use_sliding_window",),
    ),
    "qwen3_vl_text": TextModel(
        "Qwen3ForCausalLM",
        (151936, 4096, 22016, 32, 32),
        {"rope_theta": 5e5, "max_position_embeddings": 128000},
        unused=("use_sliding_window", "layer_types"),
    ),
    "qwen3_vl_moe_text": TextModel(
        "Qwen3MoeForCausalLM",
        (151936, 2048, 5632, 24, 16),
        {"num_key_value_heads": 16, "rope_theta": 5e5, "max_position_embeddings": 128000, "num_local_experts": 60}
        | {"num_experts_per_tok": 4, "moe_intermediate_size": 1408},
        unused=("use_sliding_window",),
        fixed={"norm_topk_prob": True},
    ),
    "smollm3": TextModel("SmolLM3ForCausalLM", (128256, 2048, 11008, 36, 16)),
    "stablelm": TextModel("StableLmForCausalLM", (50304, 2560, 6912, 32, 32)),
}


# Fields that a text model may omit, where those of the whole model differ from those in `TEXT_MODELS`.
WHOLE_DEFAULTS: dict[str, dict[str, Any]] = {
    "glmasr": dict(zip(REQUIRED, (59264, 2048, 6144, 28, 16), strict=True))
    | {"num_key_value_heads": 4, "max_position_embeddings": 8192, "rms_norm_eps": 1e-5}
    | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},  # precedes a `rope_theta` of the text model
    "voxtral": dict(zip(REQUIRED, (131072, 3072, 8192, 30, 32), strict=True))
    | {"num_key_value_heads": 8, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "head_dim": 128}
    | {"rope_theta": 1e8},
}


def is_wrapped(config: Mapping[str, Any]) -> bool:
    """Whether a config describes a text model and encoders of other modalities around it."""
    names = config.get("architectures")
    name = names[0] if isinstance(names, list) and names else None
    inside = "text_config" in config or "vision_config" in config
    wraps = isinstance(name, str) and name.endswith(("ForConditionalGeneration", *REWARDS, *WHOLES)) and inside
    return wraps or (isinstance(name, str) and isinstance(config.get(THINKER), dict))


def text_config(config: Mapping[str, Any], file: str) -> dict[str, Any]:
    """Return the config of the text model alone, as if it were a checkpoint's own.

    Fields of the outer config take precedence if transformers reads them there. Older Qwen-VL configs have the text's
    fields at the top. Rotary embeddings of several axes ("mrope") are plain ones for text, whose positions are equal on
    all axes.

    Raises:
        CheckpointError: the text model is not supported, or the whole model computes text differently.
    """
    if isinstance(thinker := config.get(THINKER), dict):
        config = {**config, **thinker, "architectures": config["architectures"]}
    outer = Fields(config, file)
    given = outer.sub("text_config")
    inner = dict(given.config if given else config)
    architecture, whole = config["architectures"][0], outer.str("model_type", "")
    kind = (given or outer).str("model_type", "")
    if whole in REFUSED:
        raise CheckpointError(f"{architecture} is not loaded as a text model: {REFUSED[whole]}", where=file)
    if kind not in TEXT_MODELS:
        where = "text_config.model_type" if given else "model_type"
        raise CheckpointError(
            f"architecture {architecture!r}: {where} {kind[:80]!r} is not supported",
            where=file,
            remedy=nearest(kind, TEXT_MODELS, "docs/checkpoints.md lists all that are supported"),
        )
    model = TEXT_MODELS[kind]
    outside = [name for name in DTYPES if config.get(name) is not None]
    if outside:
        inner = {name: value for name, value in inner.items() if name not in DTYPES}
    inner |= {name: config[name] for name in (*OUTER, *outside) if config.get(name) is not None}
    before_5 = given is not None and given.config.get("tie_word_embeddings") is True  # configs of transformers 4
    # A flat config's own is that of the text model.
    if before_5 or (whole in TIED and (given is None or config.get("tie_word_embeddings") is None)):
        inner["tie_word_embeddings"] = True
    # The wrappers' defaults differ for both; a file without a head uses its embedding as the head.
    inner.setdefault("tie_word_embeddings", True)
    defaults = model.defaults() | WHOLE_DEFAULTS.get(whole, {})
    inner |= {name: value for name, value in defaults.items() if inner.get(name) is None}
    inner |= {**dict.fromkeys(model.unused), **model.fixed}
    for name in ("rope_scaling", "rope_parameters"):
        if isinstance(rope := inner.get(name), dict):
            inner[name] = {key: ROPES.get(str(value), value) for key, value in rope.items()}
    return inner | {"architectures": [REWARDS.get(architecture, model.architecture)]}


def text_names(names: Iterable[str]) -> dict[str, str]:
    """Map the text model's own names of tensors to the stored names."""
    stored = {HEAD.sub("lm_head.", name.removeprefix(THOUGHT)): name for name in names}
    nested = {name: BLOCKS.sub("model.layers.", found[1]) for name in stored if (found := NESTED.fullmatch(name))}
    if not nested:
        return {name: stored[name] for name in stored if TEXT.fullmatch(name)}
    heads = {name: name for name in stored if name.startswith(("lm_head.", "mtp.", "score."))}
    own = {
        name: rest if rest.startswith("model.") or TEXT.fullmatch(rest) else f"model.{rest}"
        for name, rest in nested.items()
    }
    return {text: stored[name] for name, text in (heads | own).items()}


def parts(sizes: Mapping[str, int]) -> dict[str, int]:
    """Sum the bytes of each part of a model, such as "vision_tower", from those of its tensors."""
    found: Counter[str] = Counter()
    for name, size in sizes.items():
        found[name.removeprefix(THOUGHT).removeprefix("model.").partition(".")[0]] += size
    return dict(found)
