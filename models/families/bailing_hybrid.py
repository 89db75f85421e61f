"""Ling 3 (Ant Group, 2026): gated delta nets whose decays differ from element to element of a key, and are bounded, in
most layers, latent attention with a gate for each head in the others, the experts of DeepSeek-V3."""

import re
from dataclasses import replace
from typing import Any

from kernels.layout import DeltaKind
from models.checkpoint.fields import Fields
from models.checkpoint.headers import Checkpoint
from models.config import RECURRENT, Config, Recurrent
from models.decoder import Decoder
from models.families.deepseek_v2 import latent_attention, mixture
from models.families.deepseek_v3 import sigmoids
from models.families.kimi_linear import PUBLISHED, KimiLinear
from models.reading import kinds_by_period, sparse_layers

SPELLED = {  # parts of names in published files -> those of Kimi Linear
    "model.word_embeddings.": "model.embed_tokens.",
    ".attention.": ".self_attn.",
    ".self_attn.g_proj.": ".self_attn.gate_proj.",
    ".self_attn.dense.": ".self_attn.o_proj.",
    ".mlp.gate.expert_bias": ".mlp.gate.e_score_correction_bias",
}


class BailingHybrid(Decoder):
    """An MLP in the first layers, experts in the others."""

    architectures = ("BailingHybridForCausalLM",)
    names = replace(
        KimiLinear.names,
        recurrent_in=tuple(f"self_attn.{name}_proj" for name in ("q", "k", "v", "gate", "b", "f")),
        recurrent_low=(),
    )
    default_eos_token_ids = frozenset([156895])

    @classmethod
    def view(cls, checkpoint: Checkpoint) -> Checkpoint:
        layers, tensors = checkpoint.fields.int("num_hidden_layers", high=2**14), {}
        for name, info in checkpoint.tensors.items():
            at = re.match(r"model\.layers\.(\d+)\.", name)
            if at is not None and int(at[1]) >= layers:
                continue  # of a draft head
            spelled = name
            for published, own in SPELLED.items():
                spelled = spelled.replace(published, own)
            tensors[spelled] = info if spelled == name else replace(info, name=info.name or name)
        return replace(checkpoint, tensors=tensors)

    @staticmethod
    def read(fields: Fields) -> Config:
        fields = fields.changed({new: fields.config[old] for old, new in PUBLISHED.items() if old in fields.config})
        options: dict[str, Any] = latent_attention(rotated(fields), positions=262144, mlp_width=6144, query_rank=0)
        layers = options["layers"]
        sparse = sparse_layers(fields, layers, fields.int("first_k_dense_replace", default=2, low=0))
        rules = {"count": 512, "width": 768, "shared": 1, "scale": 2.5, "name": "num_experts"}
        rules |= {"chosen": fields.int("num_experts_per_tok", default=8)} | sigmoids(fields, groups=8, kept=4)
        every = fields.int("layer_group_size", default=6)
        recurs = tuple(kind == RECURRENT for kind in kinds_by_period(fields, layers, every, RECURRENT))
        return Config(
            experts=mixture(fields, sparse, **rules),
            recurrent=delta_nets(fields, options["heads"], recurs) if any(recurs) else None,
            head_gates=True,
            **options,
        )


def rotated(fields: Fields) -> Fields:
    """Return the fields with a base of rotary embeddings."""
    return fields.changed({"rope_theta": fields.float("rope_theta", default=6e6)})


def delta_nets(fields: Fields, heads: int, recurs: tuple[bool, ...]) -> Recurrent:
    """Read the layers with a gated delta net. A config that transformers has saved has the size of their heads in
    `linear_head_dim`, and in `head_dim` that of another part."""
    fields.choice("hidden_act", ("silu", "swish"), default="silu")
    heads = fields.int("linear_num_heads", default=heads, high=2**16)
    size = fields.int("linear_head_dim", default=fields.int("head_dim", default=128, high=2**16), high=2**16)
    taps = fields.int("short_conv_kernel_size", default=4, high=64)
    taps = fields.int("linear_conv_kernel_dim", default=taps, high=64)
    bound = 0.0
    if fields.bool("kda_safe_gate", default=True):
        bound = fields.float("kda_lower_bound", default=-5.0)
        if bound >= 0:
            raise fields.error("kda_lower_bound", "a number below 0")
    return Recurrent(DeltaKind(heads, heads, size, size, taps, key_decays=True), recurs, sigmoid=True, bound=bound)
