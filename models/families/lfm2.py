"""LFM2 and LFM2.5 (Liquid AI, 2025): short convolutions in most layers, attention with head norms in the others."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from models.checkpoint.fields import Fields
from models.config import Config, ShortConvs
from models.decoder import Decoder
from models.names import Names
from models.reading import experts, rotary

CONV, FULL = "conv", "full_attention"


class LFM2(Decoder):
    """The dense models."""

    architectures = ("Lfm2ForCausalLM",)
    names = Names(
        attention_norm="operator_norm",
        q_norm="self_attn.q_layernorm",
        k_norm="self_attn.k_layernorm",
        out="self_attn.out_proj",
        mlp_norm="ffn_norm",
        up=("feed_forward.w1", "feed_forward.w3"),
        down="feed_forward.w2",
        norm="model.embedding_norm",
    )

    @staticmethod
    def read(fields: Fields) -> Config:
        fields = _renamed(fields)
        options = rotary(fields, positions=128_000, kv_heads=8)
        kinds = _kinds(fields, options["layers"])
        return Config(
            norm_eps=fields.float("norm_eps", default=1e-5, low=0.0),
            head_norms="each",
            convs=convs(fields, kinds, options["width"]),
            **options | {"mlp_width": _mlp_width(fields), "tied": fields.bool("tie_word_embeddings", default=True)},
        )


class LFM2Moe(Decoder):
    """The models with experts in all layers except the first ones."""

    architectures = ("Lfm2MoeForCausalLM",)
    names = replace(
        LFM2.names,
        router="feed_forward.gate",
        choice_bias="feed_forward.expert_bias",
        expert=(
            "feed_forward.experts.{}.gate_proj",
            "feed_forward.experts.{}.up_proj",
            "feed_forward.experts.{}.down_proj",
        ),
    )

    @staticmethod
    def read(fields: Fields) -> Config:
        if fields.config.get("layer_types") is None:
            raise fields.error("layer_types", f"the kind of each layer, {CONV} or {FULL}")
        plain = Fields({"block_auto_adjust_ff_dim": False, "intermediate_size": 7168} | {
            name: value for name, value in fields.config.items()
            if not name.startswith("block_") and value is not None
        }, fields.file, fields.prefix)  # fmt: skip
        config = LFM2.read(plain)
        dense = fields.int("num_dense_layers", default=2, low=0)
        mixed = experts(
            fields,
            count=32,
            chosen=4,
            width=fields.int("moe_intermediate_size", default=1792),
            layers=[i >= dense for i in range(config.layers)],
            scores="sigmoid",
            normalized=fields.bool("norm_topk_prob", default=True),
            epsilon=1e-6,
            scale=fields.float("routed_scaling_factor", default=1.0),
            choice_bias=fields.bool("use_expert_bias", default=True),
        )
        return replace(config, experts=mixed)


def _renamed(fields: Fields) -> Fields:
    """Return the fields by their present names. The rotary base defaults to 1e6; the activation is fixed."""
    config: dict[str, Any] = {name: value for name, value in fields.config.items() if name != "hidden_act"}
    for new, old in (("intermediate_size", "block_ff_dim"), ("tie_word_embeddings", "tie_embedding")):
        if old in config:  # in transformers the older name takes precedence
            config[new] = config[old]
    config.setdefault("intermediate_size", 12288)
    if config.get("rope_theta") is None:
        config["rope_theta"] = 1e6
    return Fields(config, fields.file, fields.prefix)


def convs(fields: Fields, kinds: Sequence[str], width: int, taps: int = 3) -> ShortConvs | None:
    """`Config.convs` of layers of these kinds, with so many taps where the field is absent."""
    taps, bias = fields.int("conv_L_cache", default=taps, high=64), fields.bool("conv_bias", default=False)
    return ShortConvs(tuple(taps if kind == CONV else 0 for kind in kinds), width, bias) if CONV in kinds else None


def _kinds(fields: Fields, layers: int) -> list[str]:
    kinds = fields.config.get("layer_types")
    if kinds is None:
        attention = fields.config.get("full_attn_idxs")
        if attention is None:
            return [FULL] * layers
        if type(attention) is not list or any(type(i) is not int or not 0 <= i < layers for i in attention):
            raise fields.error("full_attn_idxs", f"numbers of layers below {layers}")
        return [FULL if i in attention else CONV for i in range(layers)]
    if type(kinds) is not list or len(kinds) != layers or any(kind not in (CONV, FULL) for kind in kinds):
        raise fields.error("layer_types", f"{layers} of {CONV} and {FULL}")
    return kinds


def _mlp_width(fields: Fields) -> int:
    """Compute two thirds of the field, times a factor, rounded up to the next multiple."""
    width = fields.int("intermediate_size")
    if not fields.bool("block_auto_adjust_ff_dim", default=True):
        return width
    width = int(2 * width / 3)
    if "block_ffn_dim_multiplier" in fields.config and fields.config["block_ffn_dim_multiplier"] is None:
        return width
    width = int(fields.float("block_ffn_dim_multiplier", default=1.0, low=1e-3, high=1e3) * width)
    multiple = fields.int("block_multiple_of", default=256)
    return multiple * -(-width // multiple)
