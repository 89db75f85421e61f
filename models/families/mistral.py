"""Mistral (Jiang et al. 2023), Ministral and CWM: Llamas with windows in all or some layers; Ministral 3; Mistral 4."""

import math
from dataclasses import replace
from typing import Any

from models.checkpoint.fields import Fields
from models.config import FULL, SLIDING, Config
from models.decoder import Decoder
from models.families.deepseek_v2 import NAMES, latent_attention, mixture
from models.families.deepseek_v3 import interleaved, sigmoids
from models.reading import after_dense, layer_types, rotary, window_of, windows, with_rope
from models.rope import RopeConfig

MINISTRAL3_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 1e6,
    "factor": 16.0,
    "original_max_position_embeddings": 16384,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale_all_dim": 1.0,
    "mscale": 1.0,
    "llama_4_scaling_beta": 0.1,
}
MISTRAL4_ROPE = MINISTRAL3_ROPE | {"rope_theta": 1e4, "factor": 128.0, "original_max_position_embeddings": 8192}

CWM_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 1e6,
    "factor": 16.0,
    "original_max_position_embeddings": 8192,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}


class Mistral(Decoder):
    """A Llama with windows and without biases."""

    architectures = (
        "MistralForCausalLM",
        "MistralForSequenceClassification",
        "MinistralForCausalLM",
        "MinistralForSequenceClassification",
    )

    @staticmethod
    def read(fields: Fields) -> Config:
        options = rotary(fields, positions=4096 * 32, kv_heads=8, eps=1e-6)
        window = window_of(fields, 4096)
        kinds = layer_types(fields, [SLIDING if window else FULL] * options["layers"])
        return Config(
            windows=windows(fields, kinds, window),
            **options,
        )


class Cwm(Decoder):
    """Code World Model (Meta 2025): a Llama with windows in three of four layers."""

    architectures = ("CwmForCausalLM",)
    default_eos_token_ids = frozenset([128001, 128008, 128009])

    @staticmethod
    def read(fields: Fields) -> Config:
        options = rotary(with_rope(fields, CWM_ROPE), positions=131072, kv_heads=8, head_dim=128, theta=1e6, eps=1e-5)
        window = fields.int("sliding_window", None, low=0, high=2**31) if "sliding_window" in fields.config else 8192
        kinds = layer_types(fields, [SLIDING if i % 4 else FULL for i in range(options["layers"])])
        return Config(
            mlp_bias=fields.bool("mlp_bias", default=False),
            windows=windows(fields, kinds, window or None),
            **options,
        )


class Ministral3(Decoder):
    """A Llama whose queries grow with their position."""

    architectures = ("Ministral3ForCausalLM", "Ministral3ForSequenceClassification")
    default_pad_token_id = 11

    @staticmethod
    def read(fields: Fields) -> Config:
        fields = with_rope(fields, MINISTRAL3_ROPE)
        options = rotary(fields, positions=262144, kv_heads=8, head_dim=128, eps=1e-5)
        options["rope"] = replace(options["rope"], **_growth(fields, options["rope"]))
        window = fields.int("sliding_window", None, high=2**31)
        return Config(windows=(window,) * options["layers"], **options)


class Mistral4(Decoder):
    """DeepSeek-V3 with parts of a softmax in place of sigmoids; queries grow with their position."""

    architectures = ("Mistral4ForCausalLM", "Mistral4ForSequenceClassification")
    names = NAMES
    default_pad_token_id = 11

    @staticmethod
    def read(fields: Fields) -> Config:
        fields = _with_whole_rope(with_rope(fields, MISTRAL4_ROPE))
        sizes = {"mlp_width": 12288, "query_rank": 1024, "rank": 256, "plain": 64}
        options = latent_attention(fields, positions=1048576, interleaved=interleaved(fields), **sizes)
        latent, rope = options["latent"], options["rope"]
        if rope.kind == "default":
            raise fields.error("rope_parameters", "a kind of stretching: transformers rotates no others")
        if (growth := _growth(fields, rope))["growth"]:
            if latent.query_rank % 2 or not latent.query_rank:
                raise fields.error("q_lora_rank", "an even number, as queries grow with their position")
            table = RopeConfig(math.gcd(latent.query_rank, 16), "proportional", **growth)
            options["latent"] = replace(latent, growth=table)
        sparse = after_dense(fields, options["layers"], 0)
        rules = sigmoids(fields, groups=1, kept=1) | {"scores": "softmax", "choice_bias": False, "chosen": 4}
        if rules["groups"] > 1:
            raise fields.error("n_group", "1: groups of experts with parts of a softmax are not supported")
        sizes = {"count": 128, "width": 2048, "shared": 1, "scale": 1.0}
        return Config(**options, experts=mixture(fields, sparse, **sizes, **rules))


def _growth(fields: Fields, rope: RopeConfig) -> dict[str, Any]:
    """Read how queries grow with their position, as arguments of `RopeConfig`."""
    found = fields.sub("rope_scaling") or fields.within("rope_parameters")
    growth, length = found.float("llama_4_scaling_beta", low=0.0, high=1e6), rope.original_length
    if rope.kind not in ("llama3", "longrope", "yarn"):
        length = found.int("original_max_position_embeddings", high=2**31)
    return {"growth": growth, "growth_length": length}


def _with_whole_rope(fields: Fields) -> Fields:
    """Return the fields without a share of rotated elements, which is that of the latent's sizes.

    Raises:
        CheckpointError: it is another share.
    """
    config = dict(fields.config)
    rotated, plain = fields.int("qk_rope_head_dim", default=64), fields.int("qk_nope_head_dim", default=64)
    for name in ("rope_scaling", "rope_parameters"):
        if (rope := fields.sub(name)) and (share := rope.float("partial_rotary_factor", None)) is not None:
            if int(share * (rotated + plain)) != rotated:
                raise rope.error("partial_rotary_factor", f"{rotated / (rotated + plain):g}, as the sizes of heads say")
            config[name] = {key: value for key, value in rope.config.items() if key != "partial_rotary_factor"}
    return Fields(config, fields.file, fields.prefix)
