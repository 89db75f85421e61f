"""Granite 3 (IBM 2024): a Llama with four multipliers, and in some models with experts."""

from typing import Any

from models.checkpoint.fields import Fields
from models.config import Config
from models.decoder import Decoder
from models.names import Names
from models.reading import architecture, experts, rotary


class Granite(Decoder):
    """A Llama with factors of embedding, attention, stream and logits."""

    architectures = ("GraniteForCausalLM",)

    @staticmethod
    def read(fields: Fields) -> Config:
        options = rotary(fields, positions=2048)
        mlp_bias = fields.bool("mlp_bias", default=False)
        return Config(mlp_bias=mlp_bias, **factors(fields, options["layers"]), **options)


class GraniteMoe(Decoder):
    """A Granite with experts in all layers, and perhaps one that all tokens have."""

    architectures = ("GraniteMoeForCausalLM", "GraniteMoeSharedForCausalLM")
    names = Names(shared=("shared_mlp.input_linear", "shared_mlp.output_linear"))

    @staticmethod
    def read(fields: Fields) -> Config:
        width = fields.int("intermediate_size", default=11008)
        options = rotary(fields, positions=2048, mlp_width=width)
        shared = architecture(fields).startswith("GraniteMoeShared")
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


def factors(fields: Fields, layers: int) -> dict[str, Any]:
    """The factors that all have beyond a Llama."""
    names = ("embedding_multiplier", "attention_multiplier", "residual_multiplier", "logits_scaling")
    embedding, attention, residual, logits = (fields.float(name, default=1.0) for name in names)
    if not logits:
        raise fields.error("logits_scaling", "a number other than 0")
    return {
        "norm_eps": fields.float("rms_norm_eps", default=1e-6, low=0.0),
        "attention_bias": fields.bool("attention_bias", default=False),
        "embedding_scale": embedding,
        "scales": (attention,) * layers,
        "residual_scale": residual,
        "logit_divisor": logits,
    }
