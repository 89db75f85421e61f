"""Command R, R7B, A and Aya (Cohere 2024, 2025): parallel attention and MLP, LayerNorms without
biases, in some models experts."""

from typing import Any

from models.checkpoint.fields import Fields
from models.config import FULL, SLIDING, Config
from models.decoder import Decoder
from models.families.deepseek_v2 import NAMES
from models.names import Names
from models.reading import (
    experts,
    kinds_by_period,
    layer_types,
    rotary,
    sparse_layers,
    true_if_absent,
    window_of,
    windows,
)
from models.rope import RopeConfig


class Cohere(Decoder):
    """One norm for attention and MLP, scaled logits; in the largest model a norm of each head."""

    architectures = ("CohereForCausalLM",)
    names = Names()  # one tensor has the weights of the norms of all heads
    default_eos_token_ids = frozenset([255001])

    @staticmethod
    def read(fields: Fields) -> Config:
        head_norms = "own" if fields.bool("use_qk_norm", default=False) else ""
        return Config(**_options(fields, theta=5e5), head_norms=head_norms)


class Cohere2(Decoder):
    """Windows in three of four layers; only these have rotary embeddings."""

    architectures = ("Cohere2ForCausalLM",)
    default_eos_token_ids = frozenset([255001])

    @staticmethod
    def read(fields: Fields) -> Config:
        options = _options(fields, theta=1e4)
        every = fields.int("sliding_window_pattern", default=4)
        kinds = kinds_by_period(fields, options["layers"], every)
        ropes = tuple(options["rope"] if kind == SLIDING else None for kind in kinds)
        return Config(**options, windows=windows(fields, kinds, window_of(fields, 4096)), ropes=ropes)


class CohereCompass(Decoder):
    """North Micro Vision (Cohere 2026): Cohere 2 rotated by halves, with a rotary table for each kind of layer or none;
    in a model without images the logits are not scaled unless the config has a factor."""

    architectures = ("CohereCompassForCausalLM", "CohereCompassTextForSequenceClassification")
    default_eos_token_ids = frozenset([255001])
    default_pad_token_id = 0

    @staticmethod
    def read(fields: Fields) -> Config:
        fields.choice("pooling", ("eos",), default="eos")
        options: dict[str, Any] = _options(fields, theta=1e4, one_rope=False) | {"interleaved": False}
        kinds = layer_types(fields, [FULL] * options["layers"])
        nested, ropes = fields.config.get("rope_parameters"), dict[str, RopeConfig | None]()
        for kind in kinds:
            if not isinstance(nested, dict) or kind not in nested:
                raise fields.error("rope_parameters", f"the parameters of {kind}, or null for no rotation")
            ropes[kind] = None
            if (found := nested[kind]) is not None:
                if not isinstance(found, dict) or found.get("rope_theta") is None:
                    raise fields.error("rope_parameters", f"a rope_theta of {kind}")
                own = Fields({"rope_parameters": found}, fields.file)
                ropes[kind] = RopeConfig.from_hf(own, options["head_dim"], options["max_positions"])
        window = window_of(fields, 4096)
        options["logit_divisor"] = 1 / fields.float("logit_scale", default=1.0, low=1e-6)
        options |= {"windows": windows(fields, kinds, window), "ropes": tuple(ropes[kind] for kind in kinds)}
        return Config(**options)


class Cohere2Moe(Decoder):
    """Experts after the first layers, which may have rotary embeddings without a window."""

    architectures = ("Cohere2MoeForCausalLM",)
    names = NAMES
    default_eos_token_ids = frozenset([255001])

    @staticmethod
    def read(fields: Fields) -> Config:
        if fields.sub("rope_scaling"):
            raise fields.error("rope_scaling", "nothing: transformers ignores it here, and reads rope_parameters")
        width = fields.int("intermediate_size", default=22528)
        options = _options(fields, theta=1e4, mlp_width=width, head_dim=128)
        layers, dense = options["layers"], fields.int("first_k_dense_replace", default=0, low=0)
        first = fields.int("prefix_dense_sliding_window_pattern", default=1)
        every = fields.int("sliding_window_pattern", default=4)
        places = [(i + 1, first) if i < dense else (i + 1 - dense, every) for i in range(layers)]
        kinds = layer_types(fields, [SLIDING if place % period else FULL for place, period in places])
        sparse = sparse_layers(fields, layers, dense)
        rotated = [kind == SLIDING or (first == 1 and not some) for kind, some in zip(kinds, sparse, strict=True)]
        softmax = fields.choice("expert_selection_fn", ("softmax", "sigmoid"), default="softmax") == "softmax"
        shared = fields.int("num_shared_experts", default=0, low=0, high=2**8)
        way = fields.choice("shared_expert_combination_strategy", ("sum", "average"), default="average")
        mixed = experts(
            fields,
            count=8,
            chosen=2,
            width=width,
            layers=sparse,
            scores="softmax_of_chosen" if softmax else "sigmoid",
            normalized=not softmax and true_if_absent(fields, "norm_topk_prob"),
            shared_width=width * shared,
            factor=0.5 if shared and way == "average" else 1.0,
        )
        options["mlp_width"] = fields.int("prefix_dense_intermediate_size", default=width)
        if (eps := fields.float("rms_norm_eps", None, low=0.0)) is not None:
            options |= {"rms": True, "norm_eps": eps}
        return Config(
            **options,
            experts=mixed,
            windows=windows(fields, kinds, window_of(fields, 4096)),
            ropes=tuple(options["rope"] if turns else None for turns in rotated),
        )


def _options(fields: Fields, **more: Any) -> dict[str, Any]:
    """Read the arguments of a `Config` that all these families have; `more`: arguments of `rotary`."""
    return rotary(fields, positions=8192, tied=True, **more, bias=False) | {
        "norm_eps": fields.float("layer_norm_eps", default=1e-5, low=0.0),
        "rms": False,
        "norm_bias": False,
        "parallel": "shared",
        "interleaved": True,
        "logit_divisor": 1 / fields.float("logit_scale", default=0.0625, low=1e-6),
    }
