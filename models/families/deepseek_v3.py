"""DeepSeek-V3 (DeepSeek-AI, 2024), GLM-4.7-Flash (Zhipu AI, 2026), A.X-K1 (SK Telecom 2026): DeepSeek-V2 with sigmoid
routing; Youtu-LLM (Tencent 2025), without experts."""

import re
from dataclasses import replace
from typing import Any

from models.checkpoint.fields import Fields
from models.checkpoint.headers import Checkpoint
from models.config import Config
from models.decoder import Decoder
from models.families.deepseek_v2 import NAMES, latent_attention, mixture
from models.names import Names
from models.reading import after_dense, sparse_layers, true_if_absent
from models.rope import BUFFERS

CHOICE_BIAS = "has_choice_bias"  # a field that no file has


class DeepseekV3(Decoder):
    """Experts are chosen with a bias, from the groups with the largest sums of their two best scores."""

    architectures = ("DeepseekV3ForCausalLM", "DeepseekV3ForSequenceClassification")
    names = NAMES
    default_eos_token_ids = frozenset([1])
    ignored = (*BUFFERS, re.compile(r"model\.layers\.61\..*"))  # tensors of a draft head, as in transformers

    @staticmethod
    def read(fields: Fields) -> Config:
        options = latent_attention(
            fields, positions=4096, mlp_width=18432, query_rank=1536, interleaved=interleaved(fields)
        )
        sparse, rules = after_dense(fields, options["layers"], 3), sigmoids(fields, groups=8, kept=4)
        sizes = {"count": 256, "chosen": 8, "width": 2048, "shared": 1, "scale": 2.5}
        return Config(**options, experts=mixture(fields, sparse, **sizes, **rules))


class Glm4MoeLite(Decoder):
    """Other sizes, and a list of the layers that have experts."""

    architectures = ("Glm4MoeLiteForCausalLM",)
    names = NAMES
    default_eos_token_ids = frozenset([1])
    ignored = (*BUFFERS, re.compile(r"model\.layers\.47\..*"))

    @staticmethod
    def read(fields: Fields) -> Config:
        sizes = {"mlp_width": 10240, "query_rank": 768, "plain": 192, "value": 256}
        options = latent_attention(
            fields, positions=202752, eps=1e-5, interleaved=interleaved(fields), partial=1.0, **sizes
        )
        sparse, rules = sparse_layers(fields, options["layers"], 1), sigmoids(fields, groups=1, kept=1)
        sizes = {"count": 64, "chosen": 4, "width": 1536, "shared": 1, "scale": 1.8}
        return Config(**options, experts=mixture(fields, sparse, **sizes, **rules))


class AXK1(Decoder):
    """A norm follows the experts, of which published files choose without a bias."""

    architectures = ("AXK1ForCausalLM", "AXK1ForSequenceClassification")
    names = replace(NAMES, experts_out_norm="post_mlp_layernorm")
    default_eos_token_ids = frozenset([163691])
    ignored = (*BUFFERS, re.compile(r"(model\.)?layers\.\d+\.post_mlp_layernorm\.weight"))  # of layers without experts

    @classmethod
    def view(cls, checkpoint: Checkpoint) -> Checkpoint:
        return note_choice_bias(checkpoint, cls.names)

    @staticmethod
    def read(fields: Fields) -> Config:
        options = latent_attention(
            fields, positions=32768, mlp_width=18432, query_rank=1536, interleaved=interleaved(fields)
        )
        first, step = fields.int("first_k_dense_replace", default=1, low=0), fields.int("moe_layer_freq", default=1)
        sparse = sparse_layers(fields, options["layers"], first, step)
        rules = sigmoids(fields, groups=8, kept=4)
        sizes = {"count": 192, "chosen": 8, "width": 2048, "shared": 1, "scale": 2.5}
        return Config(**options, experts=mixture(fields, sparse, **sizes, **rules, normed=True))


class Youtu(Decoder):
    """Latent attention and an MLP in all layers."""

    architectures = ("YoutuForCausalLM",)
    default_eos_token_ids = frozenset([128001])

    @staticmethod
    def read(fields: Fields) -> Config:
        sizes = {"positions": 131072, "mlp_width": 6144, "query_rank": 1536, "tied": True}
        return Config(**latent_attention(fields, interleaved=interleaved(fields), **sizes))


def interleaved(fields: Fields) -> bool:
    """Whether elements that are rotated with each other lie side by side."""
    return true_if_absent(fields, "rope_interleave")


def note_choice_bias(checkpoint: Checkpoint, names: Names) -> Checkpoint:
    """Return a checkpoint whose config says whether experts are chosen with a bias: some files have no such tensor."""
    given = any(name.endswith(names.choice_bias) for name in checkpoint.tensors)
    return replace(checkpoint, config=checkpoint.config | {CHOICE_BIAS: given})


def sigmoids(fields: Fields, *, groups: int, kept: int, normalized: bool = True) -> dict[str, Any]:
    """Read the arguments of `Routing`; `groups`, `kept` and `normalized` are values of absent fields."""
    return {
        "scores": "sigmoid",
        "normalized": fields.bool("norm_topk_prob", default=normalized and "norm_topk_prob" not in fields.config),
        "epsilon": 1e-20,
        "groups": fields.int("n_group", default=groups),
        "kept": fields.int("topk_group", default=kept),
        "best": 2,
        "choice_bias": fields.bool(CHOICE_BIAS, default=True),
    }
