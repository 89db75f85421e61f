"""ERNIE 4.5 (Baidu 2025), dense and with experts: Llamas with interleaved rotation; the text model of PaddleOCR-VL
(2025)."""

import re
from dataclasses import replace
from typing import Any

from models.checkpoint.fields import Fields
from models.config import Config
from models.decoder import Decoder
from models.families.deepseek_v2 import NAMES
from models.reading import experts, rotary
from models.rope import BUFFERS


class Ernie(Decoder):
    """The dense models."""

    architectures = ("Ernie4_5ForCausalLM",)

    @staticmethod
    def read(fields: Fields) -> Config:
        bias = fields.bool("use_bias", default=False)
        return Config(**_options(fields, kv_heads=2, head_dim=128), attention_bias=bias, mlp_bias=bias)


class PaddleOCR(Ernie):
    """Rotated by halves."""

    architectures = ("PaddleOCRForCausalLM",)

    @staticmethod
    def read(fields: Fields) -> Config:
        return replace(Ernie.read(fields), interleaved=False)


class ErnieMoe(Decoder):
    """Experts are chosen by their part of a softmax plus a bias; their weights add up to 1."""

    architectures = ("Ernie4_5_MoeForCausalLM",)
    names = NAMES
    ignored = (*BUFFERS, re.compile(r"model\.mtp_.*"))  # draft heads

    @staticmethod
    def read(fields: Fields) -> Config:
        if fields.bool("use_bias", default=False):
            raise fields.error("use_bias", "false: experts with biases are not supported")
        fields.float("moe_norm_min", default=1e-12, low=0.0, high=1e-6)  # of the sum that divides weights
        options, width = _options(fields, kv_heads=4), fields.int("moe_intermediate_size", default=1536)
        first, last = (
            fields.int(f"moe_layer_{end}_index", default=i, low=-1) for end, i in (("start", 1), ("end", -1))
        )
        step = fields.int("moe_layer_interval", default=1)
        layers = [(i + 1) % step == 0 and i >= first and (i <= last or last == -1) for i in range(options["layers"])]
        chosen = fields.int("moe_k", default=fields.int("num_experts_per_tok", default=6), high=2**12)
        named = fields.changed({"num_experts_per_tok": chosen})
        shared = width * fields.int("moe_num_shared_experts", default=2, low=0, high=2**8)
        rules = {"normalized": True, "choice_bias": True, "shared_width": shared}
        name = "moe_num_experts" if fields.config.get("moe_num_experts") is not None else "num_experts"
        mixed = experts(named, name=name, count=64, chosen=chosen, width=width, layers=layers, **rules)
        return Config(**options, experts=mixed)


def _options(fields: Fields, *, kv_heads: int, head_dim: int | None = None) -> dict[str, Any]:
    """Read the arguments of a `Config` that both families have; arguments are values of absent fields."""
    options = rotary(fields, positions=131072, kv_heads=kv_heads, head_dim=head_dim, tied=True, theta=5e5, eps=1e-5)
    return options | {"interleaved": True}
