"""Maps the tensor names of a checkpoint to one spelling, that of `models.names.Names`."""

import re
from collections.abc import Mapping
from dataclasses import replace

from models.checkpoint.experts import one_by_one
from models.checkpoint.tensors import TensorInfo, View
from models.errors import CheckpointError, show

_USUAL = {  # in this order
    "backbone.": "model.",  # Nemotron-H before transformers 5, Mamba
    "model.embedding.weight": "model.embeddings.weight",  # Mamba as first published
    "embed_out.": "lm_head.",  # GPT-NeoX in transformers 4
    ".attention.dense_bias": ".attention.dense.bias",  # of the Japanese GPT-NeoX
    "output_projection.": "lm_head.",  # BioGPT
    ".ln_attn.": ".input_layernorm.",  # Falcon with separate norms of attention and MLP
    ".ln_mlp.": ".post_attention_layernorm.",
    ".block_sparse_moe.router.layer.": ".mlp.gate.",
    ".block_sparse_moe.router.": ".mlp.gate.",
    ".attention_layer_norm.": ".input_layernorm.",  # of OLMo Hybrid
    ".feedforward_layer_norm.": ".post_attention_layernorm.",
    ".self_attn.g_proj.": ".self_attn.gate_proj.",  # of LFM3
    ".mlp.router.gate.": ".mlp.gate.",
    ".mlp.router.": ".mlp.gate.",
    ".block_sparse_moe.": ".mlp.",
    ".mamba_decoder.": ".",  # of Zamba2, in layers with a block
    ".base_layer.": ".",  # beside the adapters of Phi-4-multimodal
    ".mlp.gate.wg.": ".mlp.gate.",  # Hunyuan
    ".mlp.shared_mlp.": ".mlp.shared_experts.",
    ".mlp.e_score_correction_bias": ".mlp.gate.e_score_correction_bias",  # MiniMax-M2, K-EXAONE
    ".mlp.post_mlp_layernorm.": ".post_mlp_layernorm.",  # of A.X-K1
    ".mlp.expert_bias": ".mlp.gate.e_score_correction_bias",  # AFMoE, Hy3
    ".mlp.experts.e_score_correction_bias": ".mlp.gate.e_score_correction_bias",  # Laguna
    ".moe.router.expert_bias": ".mlp.gate.e_score_correction_bias",  # Kolibri
    ".self_attn.softmax_offset": ".self_attn.sinks",  # Flint
    **dict.fromkeys((".mlp.gate.proj.", ".mlp.gate.gate_proj."), ".mlp.gate."),  # Laguna and Ling, by MLX
}


# Of ModernBERT and InternLM2; other decoders have parts, that of OPT also a version.
_HEAD = re.compile(r"(?:decoder|output)\.(?!version)(\w+)")


def usual_name(name: str) -> str:
    """Return the one spelling of a name."""
    if head := _HEAD.fullmatch(name):
        return f"lm_head.{head[1]}"
    for other, usual in _USUAL.items():
        name = name.replace(other, usual)
    return name


def spelled_alike(tensors: Mapping[str, TensorInfo]) -> dict[str, TensorInfo]:
    """Return the tensors by one spelling of their names, and experts one by one.

    Raises:
        CheckpointError: two spellings of one matrix.
    """
    found: dict[str, TensorInfo] = {}
    for name, whole in tensors.items():
        for own, info in one_by_one(name, whole, tensors):
            spelled = usual_name(own)
            if spelled.endswith(".A_log") and info.shape[:2] + info.shape[3:] == (1, 1, 1):  # of Kimi Linear
                info = replace(info, shape=info.shape[2:3], name=info.name or own, part=View(info.shape[2:3]))
            if spelled in found:
                what = f"{show(found[spelled].name or spelled)} and {show(name)} are both {show(spelled)}"
                raise CheckpointError(what, where=show(whole.file), remedy="Keep one of them.")
            found[spelled] = info if spelled == own else replace(info, name=info.name or own)
    return found
