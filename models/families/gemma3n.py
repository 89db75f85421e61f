"""Gemma 3n, text only (Gemma Team 2025): several residual streams (AltUp), a learned residual beside attention
(LAuReL), sparse gates, keys and values of earlier layers, per-layer embeddings."""

import math
import re

import torch

from kernels.rows.checks import MOST_ROWS
from models.checkpoint.fields import Fields
from models.config import Config, LayerInputs, Streams, Uneven
from models.decoder import Decoder
from models.families.gemma import BASES, cap
from models.families.gemma4 import Gemma4, common, shared
from models.names import Names
from models.reading import kinds_by_period, ropes, windows

SPARSE = (0.95,) * 10  # the shares of gates that are 0 in the first layers, of configs that do not say


class Gemma3n(Decoder):
    """A Gemma 3 with unscaled scores, normed values and norms that multiply by their weight, like a Gemma 4; the rest
    is its own."""

    architectures = ("Gemma3nForCausalLM",)
    names = Names(mlp_norm="pre_feedforward_layernorm")
    default_eos_token_ids = frozenset([1])
    ignored = (*Gemma4.ignored, re.compile(r"(model\.)?layers\.\d+\.altup\.correct_output_scale"))

    @staticmethod
    def read(fields: Fields) -> Config:
        options = common(fields, positions=32768, kv_heads=2, mlp_width=1)  # that of each layer is below
        layers, width, size = options["layers"], options["width"], fields.int("hidden_size_per_layer_input", 256)
        kinds, widths = kinds_by_period(fields, layers, 5), mlp_widths(fields, layers)
        options["mlp_width"] = max(widths)
        sizes = ((options["kv_heads"], options["head_dim"]),) * layers
        count = fields.int("altup_num_inputs", 4, low=2, high=MOST_ROWS)
        active = fields.int("altup_active_idx", 0, low=0, high=count - 1)
        known = fields.int("vocab_size_per_layer_input", 262144)
        return Config(
            **options,
            windows=windows(fields, kinds, fields.int("sliding_window", 512, high=2**31)),
            ropes=ropes(fields, kinds, options["head_dim"], options["max_positions"], BASES),
            uneven=Uneven(sizes, shared(fields, kinds, 15), (False,) * layers, widths),
            layer_inputs=LayerInputs(size, known, scale=size**0.5, made_scale=width**-0.5),
            streams=Streams(count, active, fields.bool("altup_correct_scale", default=True)),
            laurel=fields.int("laurel_rank", 64),
            sparsity=sparsity(fields, layers),
            logit_cap=cap(fields, "final_logit_softcapping", 30.0),
        )


def mlp_widths(fields: Fields, layers: int) -> tuple[int, ...]:
    """Read the inner width of each layer's MLP, one number or a list."""
    given = fields.config.get("intermediate_size")
    if not isinstance(given, list):
        return (fields.int("intermediate_size"),) * layers
    if len(given) != layers or any(type(width) is not int or not 0 < width <= 2**24 for width in given):
        raise fields.error("intermediate_size", f"a number, or {layers} of them")
    return tuple(given)


def sparsity(fields: Fields, layers: int) -> tuple[float | None, ...]:
    """Return `Config.sparsity` for the shares of gates that are 0, if gates are normally distributed."""
    shares = fields.config.get("activation_sparsity_pattern")
    if shares is None:
        shares = [*SPARSE, *[0.0] * (layers - len(SPARSE))] if layers > len(SPARSE) else [0.0] * layers
    fits = type(shares) is list and len(shares) == layers
    if not fits or not all(type(share) in (int, float) and 0 <= share < 1 for share in shares):
        raise fields.error("activation_sparsity_pattern", f"{layers} numbers from 0 to less than 1")
    return tuple(quantile(share) if share else None for share in shares)


def quantile(share: float) -> float:
    """Return the quantile of the normal distribution, in the float32 arithmetic of `torch.distributions.Normal`."""
    return (torch.erfinv(2 * torch.tensor(share, dtype=torch.float32) - 1) * math.sqrt(2)).item()
