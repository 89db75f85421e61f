"""Text models inside checkpoints of several modalities: prefixes of tensors, places of fields, plain angles of "mrope".

The files hold one tensor of the other parts, which transformers fills with noise: no text depends on them.
"""

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from tools import random_checkpoint
from tools.golden import gemma, hunyuan, lfm2, qwen3
from tools.golden.base import ABSENT, VOCAB, Variant, edit, write_json, write_tensors
from tools.golden.llama import MISTRAL, SMALL

NAMES: dict[str, Callable[[str], str]] = {
    "inner": lambda name: f"language_model.{name}",
    "outer": lambda name: name.replace("model.", "model.language_model.", 1),
    "text": lambda name: name.replace("model.", "model.text_model.", 1),
    "flat": lambda name: name,
    "first": lambda name: f"text_model.{name}",
}
VISION = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
IMAGE = VISION | {"image_size": 8, "patch_size": 4}
CLIP = {"model_type": "clip_vision_model", **IMAGE, "projection_dim": 8}
PIXTRAL = {"model_type": "pixtral", **IMAGE, "head_dim": 8}
SIGLIP = {"model_type": "siglip_vision_model", **IMAGE}
SIGLIP2 = {"model_type": "siglip2_vision_model", **VISION, "num_patches": 4, "patch_size": 4}
IDEFICS = {"model_type": "idefics3_vision", **IMAGE}
LLAMA4 = {"model_type": "llama4_vision_model", **IMAGE, "vision_output_dim": 8, "projector_input_dim": 8,
          "projector_output_dim": 8, "pixel_shuffle_ratio": 1.0}  # fmt: skip
MLLAMA = {"model_type": "mllama_vision_model", "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1,
          "num_global_layers": 1, "attention_heads": 1, "image_size": 8, "patch_size": 4, "vision_output_dim": 16,
          "max_num_tiles": 1, "intermediate_layers_indices": [0], "supported_aspect_ratios": [[1, 1]]}  # fmt: skip
KIMI = VISION | {"patch_size": 4, "pos_emb_height": 2, "pos_emb_width": 2, "pos_emb_time": 1}
PATCHES = {"patch_size": 4, "spatial_merge_size": 1, "temporal_patch_size": 1}
DEEP = {"depth": 1, "hidden_size": 8, "intermediate_size": 8, "num_heads": 1}
OMNI = DEEP | PATCHES | {"out_hidden_size": 24}
QWEN3_5 = {"model_type": "qwen3_5", **OMNI, "num_position_embeddings": 4}
QWEN3_VL = QWEN3_5 | {"model_type": "qwen3_vl", "deepstack_visual_indexes": []}
QWEN2_VL = {"model_type": "qwen2_vl", "depth": 1, "embed_dim": 8, "hidden_size": 24, "num_heads": 1, "mlp_ratio": 1,
            **PATCHES}  # fmt: skip
GLM4V = {"model_type": "glm4v_vision", **DEEP, "image_size": 8, **PATCHES, "out_hidden_size": 32}
GLM4V_OUTER = {
    "architectures": ["Glm4vForConditionalGeneration"], "model_type": "glm4v", "vision_config": GLM4V,
    "tie_word_embeddings": False,
}  # fmt: skip
GLM4V_OUTER |= {f"{kind}{mark}_token_id": 2 for kind in ("image", "video") for mark in ("", "_start", "_end")}
EMU3 = {"codebook_size": 4, "embed_dim": 4, "latent_channels": 4, "base_channels": 32, "channel_multiplier": [1],
        "num_res_blocks": 1, "attn_resolutions": [], "hidden_size": 8}  # fmt: skip
SOUND = {"num_mel_bins": 8, "encoder_layers": 1, "encoder_attention_heads": 1, "encoder_ffn_dim": 8, "d_model": 8,
         "max_source_positions": 10, "n_window": 4, "output_dim": 24}  # fmt: skip


@dataclass(frozen=True)
class Wrapper:
    """How a checkpoint of a text model becomes a checkpoint of several modalities.

    Args:
        text: writes the text model's checkpoint into a folder, by a seed.
        outer: fields of the outer config.
        names: how tensors are named, a key of `NAMES`.
        changes: of the text's fields, which are nested in `text_config` unless the names are flat.
        part: the tensor of another part.
    """

    text: Callable[[Path, int], object]
    outer: Mapping[str, Any]
    names: str
    part: str
    changes: Mapping[str, Any]


def _llama(changes: Mapping[str, Any]) -> Callable[[Path, int], object]:
    options: dict[str, Any] = {**SMALL, "kv_heads": 2, **changes}
    return lambda folder, seed: random_checkpoint.make(folder, **options, seed=seed)


def _golden(variant: str, spelling: str = "") -> Callable[[Path, int], object]:
    """Copy another family's golden checkpoint without its results; the config is that of the variant `spelling`."""
    golden = Path(__file__).parents[2] / "tests" / "golden"

    def write(folder: Path, seed: int) -> None:
        results = shutil.ignore_patterns("golden.*")
        shutil.copytree(golden / variant, folder, ignore=results, dirs_exist_ok=True)
        shutil.copy(golden / (spelling or variant) / "config.json", folder)

    return write


def _columns(variant: str, folder: Path, seed: int) -> None:
    """Copy a golden checkpoint; all experts of a layer are stored as columns."""
    _golden(variant)(folder, seed)
    stored = load_file(folder / "model.safetensors").items()
    turned = {name: x.mT.contiguous() if ".experts." in name else x.clone() for name, x in stored}
    write_tensors(folder / "model.safetensors", turned, "bfloat16")


def _unbiased(variant: str, folder: Path, seed: int) -> None:
    """Copy a golden checkpoint without its biases."""
    _golden(variant)(folder, seed)
    stored = load_file(folder / "model.safetensors").items()
    kept = {name: x.clone() for name, x in stored if not name.endswith(".bias")}
    write_tensors(folder / "model.safetensors", kept, "bfloat16")


NO_TOKENS: dict[str, Any] = dict.fromkeys(("architectures", "bos_token_id", "eos_token_id", "dtype"), ABSENT)
LLAVA = {"architectures": ["LlavaForConditionalGeneration"], "model_type": "llava", "vision_config": CLIP,
         "image_token_index": 2, "vision_feature_layer": -1, "vocab_size": 7}  # fmt: skip
QWEN3_5_OUTER = {"architectures": ["Qwen3_5ForConditionalGeneration"], "model_type": "qwen3_5",
                 "vision_config": QWEN3_5, "image_token_id": 2, "video_token_id": 2, "vision_start_token_id": 2,
                 "vision_end_token_id": 2, "tie_word_embeddings": False}  # fmt: skip
MROPE = {"type": "mrope", "mrope_section": [2, 1, 1], "rope_type": "default"}
WRAPPERS = {
    "llava": Wrapper(_llama({}), LLAVA, "inner", "multi_modal_projector.linear_1.weight", NO_TOKENS),
    "llava_outer": Wrapper(
        _llama({}), LLAVA, "outer", "model.multi_modal_projector.linear_1.weight",
        NO_TOKENS | {"architectures": ["LlamaForCausalLM"]}),
    "mistral3": Wrapper(
        _llama({"tied": True}),
        {"architectures": ["Mistral3ForConditionalGeneration"], "model_type": "mistral3", "vision_config": PIXTRAL,
         "image_token_index": 2, "spatial_merge_size": 2},
        "inner", "multi_modal_projector.linear_1.weight", NO_TOKENS | MISTRAL | {"tie_word_embeddings": ABSENT}),
    "idefics3": Wrapper(
        _llama({}),
        {"architectures": ["Idefics3ForConditionalGeneration"], "model_type": "idefics3", "vision_config": IDEFICS,
         "image_token_id": 2, "tie_word_embeddings": False, "scale_factor": 1},
        "text", "model.connector.modality_projection.proj.weight", NO_TOKENS),
    "qwen3_vl": Wrapper(
        qwen3.VARIANTS["plain"].write,
        {"architectures": ["Qwen3VLForConditionalGeneration"], "model_type": "qwen3_vl", "vision_config": QWEN3_VL,
         "image_token_id": 2, "video_token_id": 2, "vision_start_token_id": 2, "vision_end_token_id": 2,
         "tie_word_embeddings": False},
        "outer", "model.visual.merger.norm.weight",
        NO_TOKENS | {"model_type": "qwen3_vl_text", "rope_parameters": ABSENT, "rope_theta": 10000.0,
                     "rope_scaling": MROPE}),
    "cohere_compass": Wrapper(
        _golden("cohere/compass"),
        {"architectures": ["CohereCompassForConditionalGeneration"], "model_type": "cohere_compass",
         "vision_config": QWEN3_VL | {"model_type": "cohere_compass_vision", "out_hidden_size": 32},
         "image_token_id": 2, "video_token_id": 2, "vision_start_token_id": 2, "vision_end_token_id": 2,
         "tie_word_embeddings": True},
        "outer", "model.visual.merger.norm.weight",
        NO_TOKENS | {"tie_word_embeddings": ABSENT, "logit_scale": 0.5}),
    "qwen2_vl": Wrapper(
        _golden("qwen2/tied"),
        {"architectures": ["Qwen2VLForConditionalGeneration"], "model_type": "qwen2_vl", "vision_config": QWEN2_VL,
         "image_token_id": 2, "video_token_id": 2, "vision_start_token_id": 2, "vision_end_token_id": 2},
        "flat", "visual.merger.ln_q.weight",
        {"rope_parameters": ABSENT, "rope_theta": 1e6, "rms_norm_eps": ABSENT,
         "rope_scaling": {"type": "mrope", "mrope_section": [1, 1, 1]}}),
    "gemma3": Wrapper(
        gemma.VARIANTS["three_v4"].write,
        {"architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3", "vision_config": SIGLIP,
         "image_token_index": 2, "boi_token_index": 2, "eoi_token_index": 2, "mm_tokens_per_image": 1},
        "inner", "multi_modal_projector.mm_soft_emb_norm.weight",
        NO_TOKENS | dict.fromkeys(("tie_word_embeddings", "hidden_activation", "rms_norm_eps"), ABSENT)),
    "gemma3_reward": Wrapper(
        _golden("gemma/three_classifier"),
        {"architectures": ["Gemma3ForSequenceClassification"], "model_type": "gemma3", "vision_config": SIGLIP,
         "image_token_index": 2, "boi_token_index": 2, "eoi_token_index": 2, "mm_tokens_per_image": 1, "num_labels": 1},
        "outer", "model.multi_modal_projector.mm_soft_emb_norm.weight", NO_TOKENS),
    "lfm2_vl": Wrapper(
        lfm2.VARIANTS["plain"].write,
        {"architectures": ["Lfm2VlForConditionalGeneration"], "model_type": "lfm2_vl", "vision_config": SIGLIP2,
         "image_token_id": 2, "downsample_factor": 1},
        "outer", "model.multi_modal_projector.linear_1.weight", NO_TOKENS),
    "qwen3_5": Wrapper(
        _golden("qwen3_5/plain"), QWEN3_5_OUTER, "outer", "model.visual.merger.norm.weight", NO_TOKENS),
    "qwen3_5_reward": Wrapper(
        _golden("qwen3_5/classifier"),
        QWEN3_5_OUTER | {"architectures": ["Qwen3_5ForSequenceClassification"], "num_labels": 1},
        "outer", "model.visual.merger.norm.weight", NO_TOKENS),
    "qwen3_5_moe": Wrapper(
        _golden("experts/qwen3_5"),
        QWEN3_5_OUTER | {"architectures": ["Qwen3_5MoeForConditionalGeneration"], "model_type": "qwen3_5_moe",
                         "vision_config": QWEN3_5 | {"model_type": "qwen3_5_moe"}},
        "outer", "model.visual.merger.norm.weight", NO_TOKENS),
    "gemma3n": Wrapper(  # needs timm
        _golden("gemma3n/plain"),
        {"architectures": ["Gemma3nForConditionalGeneration"], "model_type": "gemma3n",
         "vision_config": {"model_type": "gemma3n_vision", "architecture": "test_resnet", "hidden_size": 8,
                           "vocab_size": 2, "vocab_offset": VOCAB},
         "audio_config": {"model_type": "gemma3n_audio", "hidden_size": 8, "vocab_size": 2, "vocab_offset": VOCAB + 2,
                          "conf_num_attention_heads": 1, "conf_num_hidden_layers": 1,
                          "sscp_conv_channel_size": [4, 4]}},
        "outer", "model.embed_vision.embedding_projection.weight",
        NO_TOKENS | {"final_logit_softcapping": 12.0} | dict.fromkeys(
            ("tie_word_embeddings", "hidden_activation", "rms_norm_eps"), ABSENT)),
    "gemma4": Wrapper(
        _golden("gemma4/inputs"),
        {"architectures": ["Gemma4ForConditionalGeneration"], "model_type": "gemma4", "vision_config": None,
         "audio_config": None},
        "outer", "model.embed_vision.embedding_projection.weight",
        NO_TOKENS | {"pad_token_id": 0, "final_logit_softcapping": 12.0} | dict.fromkeys(
            ("tie_word_embeddings", "hidden_activation", "rms_norm_eps"), ABSENT)),
    "gemma4_unified": Wrapper(
        _golden("gemma4/plain", "gemma4/plain_v4"),
        {"architectures": ["Gemma4UnifiedForConditionalGeneration"], "model_type": "gemma4_unified",
         "vision_config": None, "audio_config": None},
        "outer", "model.embed_vision.patch_ln1.weight",
        NO_TOKENS | {"model_type": "gemma4_unified_text", "pad_token_id": 0, "hidden_size_per_layer_input": ABSENT,
                     "final_logit_softcapping": 12.0, "tie_word_embeddings": ABSENT,
                     "use_bidirectional_attention": ABSENT}),
    "emu3": Wrapper(
        _llama({}),
        {"architectures": ["Emu3ForConditionalGeneration"], "model_type": "emu3", "vq_config": EMU3,
         "vocabulary_map": {"<image>": 2}},
        "first", "vqmodel.post_quant_conv.proj.weight",
        NO_TOKENS | {"model_type": "emu3_text_model", "rope_parameters": ABSENT, "rms_norm_eps": ABSENT,
                     "pad_token_id": 0}),
    "mistral4": Wrapper(
        _golden("mistral/mistral4"),
        {"architectures": ["Mistral3ForConditionalGeneration"], "model_type": "mistral3", "vision_config": PIXTRAL,
         "image_token_index": 2, "spatial_merge_size": 2, "tie_word_embeddings": False},
        "inner", "multi_modal_projector.linear_1.weight", NO_TOKENS),
    "llama4": Wrapper(
        _golden("llama4/plain"),
        {"architectures": ["Llama4ForConditionalGeneration"], "model_type": "llama4", "vision_config": LLAMA4},
        "inner", "multi_modal_projector.linear_1.weight", NO_TOKENS),
    "aria": Wrapper(
        _golden("experts/aria"),
        {"architectures": ["AriaForConditionalGeneration"], "model_type": "aria", "vision_config": IDEFICS,
         "image_token_index": 2},
        "inner", "multi_modal_projector.layer_norm.weight", NO_TOKENS),
    "mllama": Wrapper(
        _golden("relatives/mllama"),
        {"architectures": ["MllamaForConditionalGeneration"], "model_type": "mllama", "vision_config": MLLAMA,
         "image_token_index": 2},
        "inner", "multi_modal_projector.bias", NO_TOKENS),
    "qwen3_vl_moe": Wrapper(
        partial(_columns, "experts/qwen3"),
        {"architectures": ["Qwen3VLMoeForConditionalGeneration"], "model_type": "qwen3_vl_moe",
         "vision_config": QWEN3_VL | {"model_type": "qwen3_vl_moe"}, "image_token_id": 2, "video_token_id": 2,
         "vision_start_token_id": 2, "vision_end_token_id": 2, "tie_word_embeddings": False},
        "outer", "model.visual.merger.norm.weight",
        NO_TOKENS | {"model_type": "qwen3_vl_moe_text", "norm_topk_prob": False, "rope_parameters": ABSENT,
                     "rope_theta": 10000.0, "rope_scaling": MROPE | {"mrope_interleaved": True}}),
    "aya_vision": Wrapper(
        _golden("cohere/two"),
        {"architectures": ["AyaVisionForConditionalGeneration"], "model_type": "aya_vision", "vision_config": SIGLIP,
         "image_token_index": 2},
        "inner", "multi_modal_projector.layernorm.weight", NO_TOKENS | {"tie_word_embeddings": ABSENT}),
    "lfm3_vl": Wrapper(
        _golden("lfm3/plain"),
        {"architectures": ["Lfm3VlForConditionalGeneration"], "model_type": "lfm3_vl",
         "vision_config": SIGLIP2 | {"model_type": "lfm3_vl_vision"}, "image_token_id": 2, "video_token_id": 2,
         "vision_start_token_id": 2, "vision_end_token_id": 2, "downsample_factor": 1},
        "outer", "model.multi_modal_projector.linear_1.weight", NO_TOKENS),
    "exaone4_5": Wrapper(
        _golden("llamas/exaone"),
        {"architectures": ["Exaone4_5_ForConditionalGeneration"], "model_type": "exaone4_5",
         "vision_config": QWEN2_VL | {"model_type": "exaone4_5_vision"}, "image_token_id": 2, "video_token_id": 2},
        "outer", "model.visual.merger.ln_q.weight", NO_TOKENS),
    "glm4v": Wrapper(
        _golden("glm/four_even"), GLM4V_OUTER, "outer", "model.visual.merger.post_projection_norm.weight",
        NO_TOKENS | {"model_type": "glm4v_text", "head_dim": ABSENT, "attention_bias": False,
                     "rope_scaling": {"rope_type": "default", "mrope_section": [1, 1]},
                     "rope_parameters": ABSENT, "rope_theta": 10000.0}),
    "glm4v_moe": Wrapper(
        _golden("glm/moe_biases"),
        GLM4V_OUTER | {"architectures": ["Glm4vMoeForConditionalGeneration"], "model_type": "glm4v_moe",
                       "vision_config": GLM4V | {"model_type": "glm4v_moe_vision"}},
        "outer", "model.visual.merger.post_projection_norm.weight",
        NO_TOKENS | {"model_type": "glm4v_moe_text", "attention_bias": ABSENT, "use_qk_norm": True,
                     "partial_rotary_factor": ABSENT,
                     "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1]}}),
    "glm_ocr": Wrapper(
        partial(_unbiased, "glm/four_even"),
        GLM4V_OUTER | {"architectures": ["GlmOcrForConditionalGeneration"], "model_type": "glm_ocr",
                       "vision_config": GLM4V | {"model_type": "glm_ocr_vision"}},
        "outer", "model.visual.merger.post_projection_norm.weight",
        NO_TOKENS | {"model_type": "glm_ocr_text", "attention_bias": ABSENT, "partial_rotary_factor": ABSENT,
                     "rms_norm_eps": ABSENT,
                     "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]}}),
    "paddleocr_vl": Wrapper(
        _llama({"tied": True, "head_dim": 16}),
        {"architectures": ["PaddleOCRVLForConditionalGeneration"], "model_type": "paddleocr_vl",
         "vision_config": SIGLIP | {"model_type": "paddleocr_vl", "spatial_merge_size": 1}, "image_token_id": 2},
        "flat", "visual.vision_model.post_layernorm.weight",
        {"rope_parameters": ABSENT, "rope_scaling": MROPE | {"mrope_section": [4, 2, 2]}}
        | dict.fromkeys(("rms_norm_eps", "rope_theta", "max_position_embeddings", "tie_word_embeddings"), ABSENT)),
    "granite4_vision": Wrapper(
        _golden("granite/plain"),
        {"architectures": ["Granite4VisionForConditionalGeneration"], "model_type": "granite4_vision",
         "vision_config": CLIP | {"hidden_size": 64}, "image_token_index": 2, "downsample_rate": "1/2",
         "deepstack_layer_map": [], "tie_word_embeddings": False},
        "outer", "model.image_newline", NO_TOKENS | {"model_type": "granite4_vision_text"}),
    "granite_docling": Wrapper(
        _golden("granite/bias"),
        {"architectures": ["GraniteDoclingForConditionalGeneration"], "model_type": "granite_docling",
         "vision_config": SIGLIP | {"model_type": "granite_docling_vision", "out_hidden_size": 24},
         "image_token_id": 2, "pad_token_id": 0},
        "text", "model.vision_tower.post_layernorm.weight",
        NO_TOKENS | {"model_type": "granite_docling_text", "pad_token_id": 0} | dict.fromkeys(
            ("tie_word_embeddings", "logits_scaling", "rms_norm_eps"), ABSENT)),
    "hunyuan_vl": Wrapper(
        _golden("hunyuan/alpha"),
        {"architectures": ["HunYuanVLForConditionalGeneration"], "model_type": "hunyuan_vl",
         "vision_config": SIGLIP | {"model_type": "hunyuan_vl", "out_hidden_size": 24}, "image_token_id": 2},
        "flat", "vit.norm.weight",
        {"rope_scaling": hunyuan.ALPHA | {"type": "xdrope", "xdrope_section": [1, 1, 1, 1]}}),
    "hyperclovax": Wrapper(
        _golden("relatives/hyperclovax"),
        {"architectures": ["HyperCLOVAXVisionV2ForConditionalGeneration"], "model_type": "hyperclovax_vision_v2",
         "vision_config": OMNI | {"model_type": "qwen2_5_vl"}, "image_token_id": 2, "video_token_id": 2,
         "tie_word_embeddings": False},
        "outer", "model.visual.merger.ln_q.weight", NO_TOKENS),
    "qwen2_5_omni": Wrapper(
        _golden("qwen2/windows"),
        {"architectures": ["Qwen2_5OmniThinkerForConditionalGeneration"], "model_type": "qwen2_5_omni_thinker",
         "vision_config": OMNI, "audio_config": SOUND, "tie_word_embeddings": False, "vision_start_token_id": VOCAB}
        | {f"{kind}_token_index": VOCAB for kind in ("audio", "image", "video")},
        "outer", "model.visual.merger.ln_q.weight",
        NO_TOKENS | {"model_type": "qwen2_5_omni_text", "rope_parameters": ABSENT, "rope_theta": ABSENT,
                     "rope_scaling": MROPE | {"mrope_section": [1, 1, 1]}}),
    "qwen3_omni": Wrapper(
        _golden("experts/qwen3"),
        {"architectures": ["Qwen3OmniMoeThinkerForConditionalGeneration"], "model_type": "qwen3_omni_moe_thinker",
         "vision_config": OMNI | {"num_position_embeddings": 4, "deepstack_visual_indexes": []},
         "audio_config": SOUND | {"downsample_hidden_size": 4, "n_window_infer": 4, "conv_chunksize": 4},
         "tie_word_embeddings": False, "vision_start_token_id": VOCAB}
        | {f"{kind}_token_id": VOCAB for kind in ("audio", "image", "video")},
        "outer", "model.visual.merger.ln_q.weight",
        NO_TOKENS | {"model_type": "qwen3_omni_moe_text", "norm_topk_prob": ABSENT, "use_sliding_window": True,
                     "rope_parameters": ABSENT, "rope_theta": ABSENT, "rope_scaling": MROPE}),
    "minimax_m3": Wrapper(
        _golden("experts/minimax_three"),
        {"architectures": ["MiniMaxM3SparseForConditionalGeneration"], "model_type": "minimax_m3_vl",
         "vision_config": SIGLIP | {"model_type": "minimax_m3_vl_vision", "spatial_merge_size": 1},
         "projector_hidden_size": 8, "image_token_index": 2, "video_token_index": 2},
        "outer", "model.multi_modal_projector.linear_1.weight", NO_TOKENS),
    "kimi_k25": Wrapper(
        _golden("deepseek/three"),
        {"architectures": ["KimiK25ForConditionalGeneration"], "model_type": "kimi_k25", "vision_config": KIMI,
         "projection_hidden_size": 8},
        "inner", "mm_projector.pre_norm.weight", NO_TOKENS | {"model_type": "kimi_k2"}),
}  # fmt: skip
SHAPES = {"linear_1": (32, 8), "proj": (32, 32), "embedding_projection": (24, 8)}  # of parts
NORMS = "norm", "ln_q", "mm_soft_emb_norm", "patch_ln1", "layer_norm", "layernorm", "pre_norm", "post_layernorm"
SHAPES |= dict.fromkeys(NORMS, (8,)) | {
    "model": (24,),
    "multi_modal_projector": (16,),
    "post_projection_norm": (32,),
}


def write(name: str, folder: Path, seed: int) -> None:
    wrapper = WRAPPERS[name]
    wrapper.text(folder, seed)
    mapped = load_file(folder / "model.safetensors")
    stored = {NAMES[wrapper.names](name): x.clone() for name, x in mapped.items()}
    stored[wrapper.part] = torch.ones(SHAPES[wrapper.part.split(".")[-2]])
    write_tensors(folder / "model.safetensors", stored, "bfloat16")
    edit(folder / "config.json", wrapper.changes)
    text = json.loads((folder / "config.json").read_text())
    inside = text if wrapper.names == "flat" else {"text_config": text}
    write_json(folder / "config.json", {**inside, **wrapper.outer, "dtype": "bfloat16", "bos_token_id": 1})


GRID = [(1, 1.0, False, 1, "own", 24), (4, 1.0, False, 4, "several", 24), (15, 2.0, True, 15, "own", 12)]
VARIANTS = {
    name: Variant(partial(write, name), grid=GRID, twin="llava" if name == "llava_outer" else "") for name in WRAPPERS
}
