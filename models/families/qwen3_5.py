"""Qwen3.5 (Qwen Team, 2026): a Qwen3 whose queries make gates of attention's output, with norms of 1 + weight."""

import re
from typing import Any

from models.checkpoint.fields import Fields
from models.config import FULL, Config, layer_types, rotary
from models.decoder import Decoder
from models.rope import BUFFERS

LINEAR = "linear_attention"  # a kind of layers
BESIDE = tuple(map(re.compile, (r"mtp\..+", r"model\.visual\..+")))  # draft layers and encoders, which no text needs


def common(fields: Fields, *, kv_heads: int, mlp_width: int | None = None) -> dict[str, Any]:
    """Arguments of a `Config` that Qwen3-Next and Qwen3.5 read alike; see `rotary`."""
    found = rotary(fields, positions=32768, kv_heads=kv_heads, head_dim=256, mlp_width=mlp_width, partial=0.25)
    step = fields.int("full_attention_interval", default=4)
    kinds = layer_types(fields, [LINEAR if i % step else FULL for i in range(1, found["layers"] + 1)], (FULL, LINEAR))
    if LINEAR in kinds:
        raise fields.error("layer_types", f"layers of {FULL}: {LINEAR} is not supported")
    return found | {
        "norm_eps": fields.float("rms_norm_eps", default=1e-6, low=0.0),
        "attention_bias": fields.bool("attention_bias", default=False),
        "plus_one": True,
        "head_norms": "each",
        "query_gate": True,
    }


class Qwen35(Decoder):
    """The dense models."""

    architectures = ("Qwen3_5ForCausalLM", "Qwen3_5TextForSequenceClassification")
    default_eos_token_ids = frozenset([248046])
    ignored = (*BUFFERS, *BESIDE)
    base = "model."

    @staticmethod
    def read(fields: Fields) -> Config:
        return Config(**common(fields, kv_heads=4))
