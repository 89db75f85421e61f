"""OLMoE (Muennighoff et al. 2024) and FlexOlmo (Shi et al. 2025): experts in all layers, norms over all heads as one
row."""

from typing import Any

from models.checkpoint.fields import Fields
from models.config import Config
from models.decoder import Decoder
from models.reading import experts, rotary


class Olmoe(Decoder):
    """A Llama with experts and norms of queries and keys."""

    architectures = ("OlmoeForCausalLM",)
    default_eos_token_ids = frozenset([50279])

    @staticmethod
    def read(fields: Fields) -> Config:
        options = _options(fields, width=2048, count=64, chosen=8, eps=1e-5)
        if options["head_dim"] * options["heads"] != options["width"]:
            raise fields.error("head_dim", "hidden_size / num_attention_heads, or nothing")
        return Config(**options, clip=fields.float("clip_qkv", None, low=0.0))


class FlexOlmo(Decoder):
    """An OLMo 2 with experts."""

    architectures = ("FlexOlmoForCausalLM",)
    default_eos_token_ids = frozenset([100257])

    @staticmethod
    def read(fields: Fields) -> Config:
        return Config(**_options(fields, width=11008, count=7, chosen=5, eps=1e-6, theta=5e5), norms=("output",))


def _options(fields: Fields, *, width: int, count: int, chosen: int, eps: float, **rope: Any) -> dict[str, Any]:
    """Read the arguments of a `Config` that both families have; arguments are values of absent fields."""
    width = fields.int("intermediate_size", default=width)
    options = rotary(fields, positions=4096, mlp_width=width, **rope, eps=eps, bias=False)
    sizes = {"count": count, "chosen": chosen, "width": width, "layers": [True] * options["layers"]}
    return options | {
        "head_norms": "all",
        "experts": experts(fields, normalized=fields.bool("norm_topk_prob", default=False), **sizes),
    }
