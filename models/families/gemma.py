"""Gemma 1, 2 and 3, text only (Gemma Team 2024, 2024, 2025): GELU gates, norms that multiply by 1 + weight."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from models.checkpoint.fields import Fields
from models.config import FULL, SLIDING, Config
from models.decoder import Decoder
from models.names import Names
from models.reading import kinds_by_period, ropes, rotary, window_of, windows

BASES = {FULL: ("rope_theta", 1e6), SLIDING: ("rope_local_base_freq", 1e4)}  # for Gemma 3


def common(fields: Fields, *, positions: int, kv_heads: int, activation: str, **options: bool) -> dict[str, Any]:
    """Read the arguments of a `Config` that are the same in all Gemmas; see `rotary`."""
    if fields.bool("use_bidirectional_attention", default=False):
        raise fields.error("use_bidirectional_attention", "false: a token that sees later ones is not supported")
    found = rotary(
        fields,
        positions=positions,
        kv_heads=kv_heads,
        head_dim=256,
        tied=True,
        activation="gelu_pytorch_tanh",
        activation_field=activation,
        **options,
        eps=1e-6,
        bias=False,
    )
    return found | {
        "plus_one": True,
        "embedding_scale": found["width"] ** 0.5,
        "rounded_scale": True,
    }


def alternating(fields: Fields, kinds: Sequence[str]) -> dict[str, Any]:
    """Read the arguments of a `Config` that are the same in Gemma 2 and 3, for layers of these kinds."""
    scale = fields.float("query_pre_attn_scalar", default=256.0, low=1e-6) ** -0.5
    return {
        "norms": ("input", "output"),
        "windows": windows(fields, kinds, window_of(fields, 4096)),
        "scales": (scale,) * len(kinds),
    }


def cap(fields: Fields, name: str, default: float | None) -> float | None:
    """Read a cap: null means none, absent means the default."""
    return fields.float(name, None, low=1e-6) if name in fields.config else default


class Gemma(Decoder):
    """A Llama except for its embedding's scale, its norms and its gates."""

    architectures = ("GemmaForCausalLM", "GemmaForSequenceClassification")
    default_eos_token_ids = frozenset([1])
    default_pad_token_id = 0

    @staticmethod
    def read(fields: Fields) -> Config:
        options = common(fields, positions=8192, kv_heads=16, activation="hidden_act")
        if options["activation"] == "gelu":  # early configs mean the approximation
            options["activation"] = "gelu_tanh"
        return Config(**options)


class Gemma2(Gemma):
    """Norms on both sides of attention and MLP, capped scores and logits, a window in every other layer."""

    architectures = ("Gemma2ForCausalLM", "Gemma2ForSequenceClassification")
    names = Names(mlp_norm="pre_feedforward_layernorm")

    @staticmethod
    def read(fields: Fields) -> Config:
        options = common(fields, positions=8192, kv_heads=4, activation="hidden_activation")
        return Config(
            **options,
            **alternating(fields, kinds_by_period(fields, options["layers"], 2)),
            attention_cap=cap(fields, "attn_logit_softcapping", 50.0),
            logit_cap=cap(fields, "final_logit_softcapping", 30.0),
        )


class Gemma3(Gemma2):
    """Norms of heads, no capped scores, and a separate rotary table for layers with a window."""

    architectures = ("Gemma3ForCausalLM", "Gemma3TextForSequenceClassification")

    @staticmethod
    def read(fields: Fields) -> Config:
        options = common(fields, positions=131072, kv_heads=4, activation="hidden_activation", one_rope=False)
        every = fields.int("sliding_window_pattern", default=6)
        kinds = kinds_by_period(fields, options["layers"], every)
        return Config(
            **options,
            **alternating(fields, kinds),
            head_norms="each",
            ropes=ropes(fields, kinds, options["head_dim"], options["max_positions"], BASES),
            logit_cap=cap(fields, "final_logit_softcapping", None),
        )


class VaultGemma(Gemma2):
    """VaultGemma (Google 2025): a Gemma 2 without norms of outputs."""

    architectures = ("VaultGemmaForCausalLM",)

    @staticmethod
    def read(fields: Fields) -> Config:
        return replace(Gemma2.read(fields), norms=("input",))
