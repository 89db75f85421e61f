"""Granite 3 (IBM 2024): a Llama with four multipliers, and in some models with experts or windows; HyperCLOVA X."""

from dataclasses import replace
from typing import Any

from models.checkpoint.fields import Fields
from models.config import FULL, SLIDING, Config
from models.decoder import Decoder
from models.names import Names
from models.reading import architecture, experts, layer_bases, layer_types, rotary, window_of, windows


class Granite(Decoder):
    """A Llama with factors of embedding, attention, stream and logits."""

    architectures = ("GraniteForCausalLM",)

    @staticmethod
    def read(fields: Fields) -> Config:
        options = rotary(fields, positions=2048)
        mlp_bias = fields.bool("mlp_bias", default=False)
        return Config(mlp_bias=mlp_bias, **factors(fields, options["layers"]), **options)


class GraniteMoe(Decoder):
    """A Granite with experts in all layers, in some models also a shared one."""

    architectures = ("GraniteMoeForCausalLM", "GraniteMoeSharedForCausalLM")
    names = Names(shared=("shared_mlp.input_linear", "shared_mlp.output_linear"))

    @staticmethod
    def read(fields: Fields) -> Config:
        width = fields.int("intermediate_size", default=11008)
        options = rotary(fields, positions=2048, mlp_width=width)
        shared = architecture(fields).startswith(("GraniteMoeShared", "GraniteMoeSWA"))
        mixed = experts(
            fields,
            count=8,
            chosen=2,
            width=width,
            layers=[True] * options["layers"],
            scores="softmax_of_chosen",
            shared_width=fields.int("shared_intermediate_size", default=0, low=0) if shared else 0,
        )
        return Config(experts=mixed, **factors(fields, options["layers"]), **options)


class GraniteSWA(Decoder):
    """Granite Swash (IBM 2026): windows in three of four layers, a sink for each head, a rotary base per layer."""

    architectures = ("GraniteSWAForCausalLM",)
    default_eos_token_ids = frozenset([100257])

    @staticmethod
    def read(fields: Fields) -> Config:
        options = rotary(fields, positions=8192, kv_heads=4, tied=True)
        bias, multipliers = fields.bool("mlp_bias", default=False), factors(fields, options["layers"], eps=1e-5)
        return Config(mlp_bias=bias, **multipliers, **_sliding(fields, options), **options)


class GraniteMoeSWA(GraniteMoe):
    """The same with experts."""

    architectures = ("GraniteMoeSWAForCausalLM",)

    @staticmethod
    def read(fields: Fields) -> Config:
        c = GraniteMoe.read(fields)
        return replace(c, **_sliding(fields, {"layers": c.layers, "rope": c.rope}))


class HyperCLOVAX(Granite):
    """HyperCLOVA X SEED Think (NAVER 2025): also norms of outputs, and logits that are multiplied."""

    architectures = ("HyperCLOVAXForCausalLM",)
    names = Names(attention_out_norm="post_norm1", mlp_out_norm="post_norm2")

    @staticmethod
    def read(fields: Fields) -> Config:
        c = Granite.read(fields)
        given = fields.config.get("attention_multiplier") is not None
        norms = ("input", "output") if fields.bool("use_post_norm", default=True) else ("input",)
        return replace(c, norms=norms, scales=c.scales if given else (), logit_divisor=1 / c.logit_divisor)


def _sliding(fields: Fields, options: dict[str, Any]) -> dict[str, Any]:
    """Read windows, sinks and rotary tables of layers; a base of 0 means no rotation."""
    layers, rope = options["layers"], options["rope"]
    bases = layer_bases(fields, [rope.theta] * layers)
    kinds = layer_types(fields, [SLIDING if i % 4 else FULL for i in range(layers)])
    return {
        "sinks": True,
        "windows": windows(fields, kinds, window_of(fields, 128)),
        "ropes": tuple(replace(rope, theta=float(base)) if base else None for base in bases),
    }


def factors(fields: Fields, layers: int, *, eps: float = 1e-6) -> dict[str, Any]:
    """Read the factors that these families add to a Llama; `eps`: epsilon of norms if the field is absent."""
    names = ("embedding_multiplier", "attention_multiplier", "residual_multiplier", "logits_scaling")
    embedding, attention, residual, logits = (fields.float(name, default=1.0) for name in names)
    if not logits:
        raise fields.error("logits_scaling", "a number other than 0")
    return {
        "norm_eps": fields.float("rms_norm_eps", default=eps, low=0.0),
        "attention_bias": fields.bool("attention_bias", default=False),
        "embedding_scale": embedding,
        "scales": (attention,) * layers,
        "residual_scale": residual,
        "logit_divisor": logits,
    }
