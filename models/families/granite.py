"""Granite 3 and dense Granite 4 (IBM 2024, 2025): a Llama with four factors, in Granite 4 also without rotation, and in
some models of Granite 3 with experts."""

from typing import Any

from models.checkpoint.fields import Fields
from models.config import FULL, Config, Names, architecture, experts, layer_types, rotary
from models.decoder import Decoder


class Granite(Decoder):
    """A Llama with factors of embedding, attention, stream and logits."""

    architectures = ("GraniteForCausalLM",)
    base = "model."

    @staticmethod
    def read(fields: Fields) -> Config:
        options = rotary(fields, positions=2048)
        mlp_bias = fields.bool("mlp_bias", default=False)
        return Config(mlp_bias=mlp_bias, **factors(fields, options["layers"]), **options)


class GraniteMoe(Decoder):
    """A Granite with experts in all layers, and perhaps one that all tokens have."""

    architectures = ("GraniteMoeForCausalLM", "GraniteMoeSharedForCausalLM")
    names = Names(shared=("shared_mlp.input_linear", "shared_mlp.output_linear"))
    base = "model."

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


class GraniteHybrid(Decoder):
    """Granite 4 without Mamba layers and experts: one matrix for both halves of the MLP."""

    architectures = ("GraniteMoeHybridForCausalLM",)
    names = Names(up=("shared_mlp.input_linear",), down="shared_mlp.output_linear")
    base = "model."

    @staticmethod
    def read(fields: Fields) -> Config:
        if fields.config.get("num_local_experts") != 0:  # absent is 8
            raise fields.error("num_local_experts", "0: experts are not supported")
        options = rotary(fields, positions=2048, mlp_width=fields.int("shared_intermediate_size", default=1024))
        if not fields.config.get("layer_types"):  # absent is Mamba in all layers
            fields = Fields({**fields.config, "layer_types": fields.config.get("layers_block_type")}, fields.file)
        if set(layer_types(fields, ["Mamba"] * options["layers"], (FULL, "Mamba"))) != {FULL}:
            raise fields.error("layer_types", "attention in all layers: Mamba layers are not supported")
        if fields.config.get("position_embedding_type") != "rope":
            options["rope"] = None
        return Config(**factors(fields, options["layers"]), **options)


def factors(fields: Fields, layers: int) -> dict[str, Any]:
    """The factors that both have beyond a Llama."""
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
