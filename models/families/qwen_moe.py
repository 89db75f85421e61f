"""Qwen1.5-MoE, Qwen2-MoE (Yang et al. 2024), Qwen3-MoE (2025), Mellum 2 (JetBrains 2026), Flint and Kolibri 1 (Aleph
Alpha): experts instead of the MLP, in some layers or in all."""

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from models.checkpoint.fields import Fields
from models.config import FULL, SLIDING, Config, Experts
from models.decoder import Decoder
from models.families.deepseek_v2 import NAMES
from models.reading import experts, layer_types, optional_window, ropes, rotary, sparse_layers, true_if_absent, windows
from models.rope import BUFFERS

MELLUM_BASES = {FULL: ("", 5e5), SLIDING: ("", 1e4)}


class Qwen2Moe(Decoder):
    """A Qwen2 with experts, and a shared expert that a gate weights."""

    architectures = ("Qwen2MoeForCausalLM", "Qwen2MoeForSequenceClassification")
    default_eos_token_ids = frozenset([151645])

    @staticmethod
    def read(fields: Fields) -> Config:
        options = rotary(fields, positions=32768, kv_heads=16, inner=5632, eps=1e-6)
        layers, window = options["layers"], optional_window(fields)
        first = fields.int("max_window_layers", default=28, low=0) if window else 0
        kinds = layer_types(fields, [SLIDING if i % 2 == 0 and i < first else FULL for i in range(layers)])
        shared = {
            "shared_width": fields.int("shared_expert_intermediate_size", default=5632),
            "shared_gate": True,
        }
        return Config(
            attention_bias=fields.bool("qkv_bias", default=True),
            out_bias=False,
            windows=windows(fields, kinds, window),
            experts=experts_by_step(fields, layers, count=60, chosen=4, width=1408, **shared),
            **options,
        )


class Qwen3Moe(Decoder):
    """A Qwen3 with experts."""

    architectures = ("Qwen3MoeForCausalLM", "Qwen3MoeForSequenceClassification")
    default_eos_token_ids = frozenset([151645])

    @staticmethod
    def read(fields: Fields) -> Config:
        options = rotary(fields, positions=32768, kv_heads=4, inner=6144, eps=1e-6, bias=False)
        layers = options["layers"]
        return Config(
            head_norms="each",
            windows=(optional_window(fields),) * layers,
            experts=experts_by_step(fields, layers, count=128, chosen=8, width=768),
            **options,
        )


class Mellum(Decoder):
    """A Qwen3-MoE with windows in some layers, which have a separate rotary table."""

    architectures = ("MellumForCausalLM",)
    ignored = (*BUFFERS, re.compile(r"mtp\..*"))  # draft heads

    @staticmethod
    def read(fields: Fields) -> Config:
        sizes: dict[str, Any] = {"kv_heads": 4, "head_dim": 128, "inner": 7168}
        options = rotary(fields, positions=131072, one_rope=False, **sizes, eps=1e-6, bias=False)
        layers, width = options["layers"], fields.int("moe_intermediate_size", default=896)
        window = fields.int("sliding_window", None, high=2**31) if "sliding_window" in fields.config else 1024
        kinds, sparse = layer_types(fields, [FULL] * layers), sparse_layers(fields, layers, 0)
        found = fields.sub("rope_scaling") or fields.sub("rope_parameters")
        if found and not {*kinds} <= {*found.config}:
            raise fields.error("rope_parameters", "an object for each kind of layer, and no rope_scaling")
        normalized = true_if_absent(fields, "norm_topk_prob")
        return Config(
            head_norms="each",
            windows=windows(fields, kinds, window),
            ropes=ropes(fields, kinds, options["head_dim"], options["max_positions"], MELLUM_BASES, 1.0),
            experts=experts(fields, count=64, chosen=8, width=width, layers=sparse, normalized=normalized),
            **options,
        )


class Flint(Decoder):
    """Sinks and windows; experts that sigmoids choose, after the first layers."""

    architectures = ("FlintForCausalLM",)

    @staticmethod
    def read(fields: Fields) -> Config:
        last = fields.int("num_hidden_layers", 49, high=2**14) - 1
        options = _windowed(fields, lambda i: i < 2 or i % 4 == 1 or i == last, inner=6144)
        if fields.config.get("mlp_only_layers") is None:
            fields = fields.changed({"mlp_only_layers": [0, 1]})
        shared = fields.int("shared_expert_intermediate_size", default=1024)
        rules = {"scores": "sigmoid", "normalized": True, "shared_width": shared}
        return Config(
            sinks=True,
            attention_bias=fields.bool("attention_bias", default=False),
            experts=experts_by_step(fields, options["layers"], count=256, chosen=6, width=512, **rules),
            **options,
        )


class Kolibri1(Decoder):
    """Norms of inputs and outputs, and windows; experts whose choice has a bias, in all layers."""

    architectures = ("Kolibri1ForCausalLM",)
    names = replace(NAMES, attention_out_norm="post_attn_norm", mlp_out_norm="post_ffn_norm")

    @staticmethod
    def read(fields: Fields) -> Config:
        width = fields.int("moe_intermediate_size", default=512)
        options = _windowed(fields, lambda i: (i + 1) % 5 == 0, mlp_width=width)
        rules = {
            "scores": "sigmoid_of_chosen",
            "normalized": fields.bool("norm_topk_prob", default=False),
            "choice_bias": True,
            "shared_width": fields.int("shared_expert_intermediate_size", default=512),
        }
        every = [True] * options["layers"]
        mixed = experts(fields, count=384, chosen=6, width=width, layers=every, **rules)
        return Config(norms=("input", "output"), experts=mixed, **options)


def _windowed(fields: Fields, full: Callable[[int], bool], **sizes: Any) -> dict[str, Any]:
    """Read the arguments of a `Config` whose layers have norms of heads, and windows or no rotation.

    Args:
        full: whether a layer has no window, if the config does not give the kinds of layers.
        sizes: see `rotary`.
    """
    options = rotary(fields, positions=262144, kv_heads=4, head_dim=128, **sizes, eps=1e-6)
    window = fields.int("sliding_window", *([] if "sliding_window" in fields.config else [513]), high=2**31)
    kinds = layer_types(fields, [FULL if full(i) else SLIDING for i in range(options["layers"])])
    return options | {
        "head_norms": "each",
        "windows": windows(fields, kinds, window),
        "ropes": tuple(options["rope"] if kind == SLIDING else None for kind in kinds),
    }


def experts_by_step(
    fields: Fields, layers: int, *, count: int, chosen: int, width: int, normalized: bool = False, **more: Any
) -> Experts | None:
    """Read `Config.experts`: every `decoder_sparse_step`-th layer has them, except those that `mlp_only_layers` lists;
    none has if there are 0.

    Args:
        count, chosen, width, normalized: values of absent fields; see `models.config.Experts` and `Routing`.
        more: further arguments of `Experts` and of `Routing`.

    Raises:
        CheckpointError: it names the field.
    """
    step, dense = fields.int("decoder_sparse_step", default=1), fields.config.get("mlp_only_layers") or []
    if type(dense) is not list or any(type(i) is not int for i in dense):
        raise fields.error("mlp_only_layers", "a list of numbers of layers")
    some = fields.int("num_experts", fields.int("num_local_experts", count, low=0), low=0) > 0
    return experts(
        fields,
        count=count,
        chosen=chosen,
        width=fields.int("moe_intermediate_size", default=width),
        layers=[some and i not in dense and (i + 1) % step == 0 for i in range(layers)],
        normalized=fields.bool("norm_topk_prob", default=normalized),
        **more,
    )
