"""Weights with the names and shapes that transformers gives a model. Imported where such weights are drawn alone."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, AutoModelForSequenceClassification

from tools.golden.random_tensors import draw_all

# Of tokens and positions.
TABLES = (
    "embed_tokens",
    "embed_in",
    "word_embeddings",
    "wte",
    "wpe",
    "s_embed",
    "embed_positions",
    ".w",
    "tok_embeddings",
)
DIVIDED = ("altup.modality_router.weight",)  # matrices whose input is divided by its width are drawn larger
PUBLISHED = {  # names in published files, by model_type: transformers gives modules others
    "aria_text": {".experts.gate_up_proj": ".experts.fc1.weight", ".experts.down_proj": ".experts.fc2.weight"},
    "axk1": {".mlp.post_mlp_layernorm.": ".post_mlp_layernorm."},
    "kolibri1": {".post_self_attn_layernorm.": ".post_attn_norm.", ".post_mlp_layernorm.": ".post_ffn_norm.",
                 ".mlp.gate.e_score_correction_bias": ".moe.router.expert_bias"},
    "laguna": {".mlp.gate.e_score": ".mlp.experts.e_score", ".mlp.shared_experts.": ".mlp.shared_expert."},
    "bailing_hybrid": {".forget_gate.": ".", ".self_attn.": ".attention.", ".o_proj.": ".dense.",
                       "model.embed_tokens.": "model.word_embeddings.", "e_score_correction_bias": "expert_bias"},
    "kimi_linear": {".forget_gate.": ".", ".mlp.experts.": ".block_sparse_moe.experts.",
                    ".mlp.gate.": ".block_sparse_moe.gate.", ".mlp.shared_": ".block_sparse_moe.shared_"},
    "flint": {".self_attn.sinks": ".self_attn.softmax_offset"},
    "hy_v3": {".mlp.gate.weight": ".mlp.router.gate.weight", ".mlp.e_score_correction_bias": ".mlp.expert_bias",
              ".mlp.shared_experts.": ".mlp.shared_mlp."},
}  # fmt: skip
CONVOLVED_APART = "bailing_hybrid", "kimi_linear"  # whose files have three convolutions, and transformers one
KINDS = {
    "SequenceClassification": AutoModelForSequenceClassification,
    "ConditionalGeneration": AutoModelForImageTextToText,
}


def draw(folder: Path, seed: int, outputs: Sequence[str], transposed: Sequence[str] = ()) -> dict[str, torch.Tensor]:
    """Random weights of the names and shapes of the folder's model, tied ones once; see `draw_all`."""
    config = transformers.AutoConfig.from_pretrained(folder)
    scores = config.architectures[0].endswith("ForSequenceClassification")
    kind = KINDS.get(config.architectures[0].rpartition("For")[2], AutoModelForCausalLM)
    with torch.device("meta"):
        model = kind.from_config(config)
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    own = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    shapes |= {name: tuple(x.shape) for name, x in model.state_dict().items() if name not in own}  # buffers
    embeddings = [name for name in shapes if name.rpartition(".")[0].endswith(TABLES)]
    heads = ["score.weight"] if scores else ["lm_head.weight", "decoder.weight"]
    tables = embeddings or [name for name in shapes if name.endswith("embeddings.weight")]  # the latter of Mamba
    head = next((name for name in heads if name in shapes), tables[0])
    tensors = draw_all(shapes, seed, embeddings=embeddings, head=head, outputs=outputs, transposed=transposed)
    tensors |= {name: x * x.shape[1] ** 0.5 for name, x in tensors.items() if name.endswith(DIVIDED)}
    for old, new in PUBLISHED.get(config.model_type, {}).items():
        tensors = {name.replace(old, new): x for name, x in tensors.items()}
    if config.model_type in CONVOLVED_APART:
        tensors = {own: part for name, x in tensors.items() for own, part in convolved_apart(name, x)}
    return tensors


def convolved_apart(name: str, x: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """The convolutions of queries, keys and values, which transformers has in one tensor; others as they are."""
    if not name.endswith(".conv1d.weight"):
        yield name, x
        return
    for part, own in zip("qkv", x.chunk(3), strict=True):
        yield name.replace(".conv1d.", f".{part}_conv1d."), own.contiguous()
