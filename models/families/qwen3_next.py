"""Qwen3-Next (Qwen Team, 2025): gated delta nets (Yang et al., 2025) in most layers, gated attention in the others;
norms of 1 + weight, partially rotated heads, experts with a shared expert."""

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from kernels.layout import DeltaKind
from models.checkpoint.fields import Fields
from models.config import RECURRENT, Config, Recurrent
from models.decoder import Decoder
from models.families.qwen_moe import experts_by_step
from models.reading import kinds_by_period, rotary
from models.rope import BUFFERS

BESIDE = tuple(map(re.compile, (r"mtp\..+", r"model\.visual\..+")))  # draft layers and encoders, unused for text


def common(fields: Fields, *, kv_heads: int, interleaved: bool = False, **sizes: Any) -> dict[str, Any]:
    """Read the arguments of a `Config` that are the same in Qwen3-Next and Qwen3.5; see `rotary` and `Recurrent`."""
    found = rotary(
        fields, positions=32768, kv_heads=kv_heads, head_dim=256, partial=0.25, eps=1e-6, bias=False, **sizes
    )
    every = fields.int("full_attention_interval", default=4)
    kinds = kinds_by_period(fields, found["layers"], every, RECURRENT)
    return found | {
        "recurrent": recurrent(fields, kinds, interleaved) if RECURRENT in kinds else None,
        "plus_one": True,
        "head_norms": "each",
        "query_gate": "below",
    }


def recurrent(fields: Fields, kinds: Sequence[str], interleaved: bool) -> Recurrent:
    """Read the layers with a gated delta net."""
    return Recurrent(delta_kind(fields, 16, 32, 128, 128, 4), tuple(kind == RECURRENT for kind in kinds), interleaved)


def delta_kind(fields: Fields, *defaults: int) -> DeltaKind:
    """Read the sizes of gated delta nets, whose convolution has the activation of the MLP; `defaults` are values of
    absent fields."""
    fields.choice("hidden_act", ("silu", "swish"), default="silu")
    names = "num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim", "conv_kernel_dim"
    most = dict.fromkeys(names[:-1], 2**16) | {names[-1]: 64}
    sizes = (fields.int(f"linear_{name}", size, high=most[name]) for name, size in zip(names, defaults, strict=True))
    key_heads, value_heads, key_size, value_size, taps = sizes
    kind = DeltaKind(key_heads, value_heads, key_size, value_size, taps)
    if kind.value_heads % kind.key_heads:
        raise fields.error("linear_num_value_heads", f"a multiple of linear_num_key_heads, {kind.key_heads}")
    return kind


def shared(fields: Fields) -> dict[str, Any]:
    """Read the arguments of `Experts` for the shared expert."""
    return {"shared_width": fields.int("shared_expert_intermediate_size", default=512), "shared_gate": True}


class Qwen3Next(Decoder):
    """Experts in some layers or in all."""

    architectures = ("Qwen3NextForCausalLM", "Qwen3NextForSequenceClassification")
    names = replace(Decoder.names, recurrent_in=("linear_attn.in_proj_qkvz", "linear_attn.in_proj_ba"))
    default_eos_token_ids = frozenset([151645])
    ignored = (*BUFFERS, *BESIDE)
    has_mtp = True

    @staticmethod
    def read(fields: Fields) -> Config:
        options = common(fields, kv_heads=2, inner=5632, interleaved=True)
        rules = {"count": 512, "chosen": 10, "width": 512, "normalized": True}
        mixed = experts_by_step(fields, options["layers"], **rules, **shared(fields))
        return Config(experts=mixed, **options)
