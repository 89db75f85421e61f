"""Command R, R7B, A and Aya (Cohere 2024, 2025): parallel attention and MLP, LayerNorms without biases."""

from typing import Any

from models.checkpoint.fields import Fields
from models.config import FULL, SLIDING, Config
from models.decoder import Decoder
from models.names import Names
from models.reading import layer_types, rotary, windows


class Cohere(Decoder):
    """One norm for attention and MLP, scaled logits; in the largest a norm of each head."""

    architectures = ("CohereForCausalLM",)
    names = Names()  # one tensor has the weights of the norms of all heads
    default_eos_token_ids = frozenset([255001])

    @staticmethod
    def read(fields: Fields) -> Config:
        head_norms = "own" if fields.bool("use_qk_norm", default=False) else ""
        return Config(**_options(fields, theta=5e5), head_norms=head_norms)


class Cohere2(Decoder):
    """Windows in three of four layers, which alone are rotated."""

    architectures = ("Cohere2ForCausalLM",)
    default_eos_token_ids = frozenset([255001])

    @staticmethod
    def read(fields: Fields) -> Config:
        options = _options(fields, theta=1e4)
        window = fields.int("sliding_window", None, high=2**31) if "sliding_window" in fields.config else 4096
        every = fields.int("sliding_window_pattern", default=4)
        kinds = layer_types(fields, [SLIDING if (i + 1) % every else FULL for i in range(options["layers"])])
        ropes = tuple(options["rope"] if kind == SLIDING else None for kind in kinds)
        return Config(**options, windows=windows(fields, kinds, window), ropes=ropes)


def _options(fields: Fields, *, theta: float) -> dict[str, Any]:
    """Arguments of a `Config` that both have; the rotary base where there is none."""
    return rotary(fields, positions=8192, tied=True, theta=theta) | {
        "norm_eps": fields.float("layer_norm_eps", default=1e-5, low=0.0),
        "rms": False,
        "norm_bias": False,
        "parallel": "shared",
        "interleaved": True,
        "attention_bias": fields.bool("attention_bias", default=False),
        "logit_divisor": 1 / fields.float("logit_scale", default=0.0625, low=1e-6),
    }
