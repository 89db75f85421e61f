"""Rotary position embeddings, numerically those of transformers 5 (`modeling_rope_utils.py`).

Shapes: T tokens of a pass, H heads, D rotary dims of a head, F = D / 2 frequencies.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kernels.stack import Angles
from models.checkpoint.fields import Fields
from models.errors import CheckpointError
from models.trim import own_pages

KINDS = {kind: kind for kind in ("default", "dynamic", "linear", "llama3", "longrope", "proportional", "yarn")}
LEAST_KEPT = 256  # the fewest positions whose tables are kept
BLOCK = 1024  # positions whose tables are computed at once: intermediate results take twice the memory of tables
BUFFERS = (  # tables of rotations and positions in older checkpoints, which are computed here instead
    re.compile(r"(.+\.)?(rotary_emb\.((original_)?inv_freq|(cos|sin)_cached)|position_ids)"),
)


@dataclass(frozen=True)
class RopeConfig:
    """The rule that maps positions to angles. `original_length` is the length of training, before any stretching."""

    head_dim: int  # the dims of a head that are rotated (D), not those that pass through
    kind: str = "default"
    theta: float = 10000.0
    original_length: int = 2048
    factor: float = 1.0
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    truncate: bool = True  # yarn
    short_factor: tuple[float, ...] = ()  # longrope: divisors of the F frequencies, up to the original length
    long_factor: tuple[float, ...] = ()  # longrope: for longer sequences, from their first token on
    attention_factor: float = 1.0  # scales cos and sin
    turned: int = 0  # proportional: number of the first pairs of dims, which turn; the others do not
    growth: float = 0.0  # scales queries also by 1 + growth * ln(1 + position // growth_length) (Llama 4)
    growth_length: int = 1
    growth_start: int = 0  # added to the position there
    backwards: bool = False  # rotations have the opposite sign (nanochat)
    # The share of a head is an odd number of dims: one more is rotated, by the frequencies of that number.
    odd: bool = False

    @property
    def divisor(self) -> int:
        """The number of dims by which the exponents of frequencies are divided."""
        return self.head_dim - self.odd

    @staticmethod
    def from_hf(
        config: Fields | Mapping[str, Any],
        head_dim: int,
        max_positions: int,
        *,
        theta: float = 10000.0,
        partial: float | None = None,
        even: bool = False,
        kinds: Mapping[str, str] = KINDS,
        original: int | None = None,
    ) -> RopeConfig:
        """Read both spellings: `rope_parameters` (transformers 5), and `rope_theta` with `rope_scaling` (before).

        `head_dim` is the whole head, `max_positions` the config's `max_position_embeddings`. `theta` is the family's
        default base, `partial` its default share of rotated dims; with None the family rotates whole heads, and a share
        is ignored or, where transformers would read it, refused. `even`: shares that are an odd number of dims are
        refused; most families rotate one more. `kinds` maps the labels that the family knows to kinds; `original` is
        its default for a top-level `original_max_position_embeddings`.
        Raises CheckpointError for unknown kinds and for invalid parameters.
        """
        fields = config if isinstance(config, Fields) else Fields(config, "config.json")
        # As in transformers, a non-empty `rope_scaling` takes precedence, and so does the dict over the top level.
        name = "rope_scaling" if fields.sub("rope_scaling") else "rope_parameters"
        rope = fields.within(name)
        if nested := [key for key, value in rope.config.items() if isinstance(value, dict)]:
            raise rope.error(nested[0], "a plain value: rope per type of layer is not supported")
        spelling = "rope_type" if rope.str("rope_type", None) is not None else "type"
        kind = kinds[rope.choice(spelling, kinds, "default")]

        theta = _holder(rope, fields, "rope_theta").float("rope_theta", theta, low=1.0, high=1e15)
        if kind == "proportional":
            share = _read_share(_holder(rope, fields, "partial_rotary_factor"), partial or 1.0)
            if even and int(head_dim * share) != head_dim:
                raise rope.error(spelling, "another kind: transformers rotates whole heads by it, and here only a part")
            base = {
                "theta": theta,
                "original_length": max_positions,
                "factor": rope.float("factor", 1.0, low=1e-3, high=1e6),
            }
            return RopeConfig(head_dim, kind, turned=int(share * head_dim // 2), **base)
        whole = partial is None and kind == "default"  # whose frequencies depend on no share in transformers
        share = 1.0 if whole else _read_share(_holder(rope, fields, "partial_rotary_factor"), partial)
        dims = int(head_dim * share)
        odd = not even and dims % 2 == 1 and dims < head_dim and kind in ("default", "dynamic", "linear", "llama3")
        if dims % 2 > odd or dims < (3 if kind == "dynamic" else 1):
            raise CheckpointError(f"head_dim: {dims} of {head_dim} dims cannot be rotated in pairs", where=fields.file)
        base: dict[str, Any] = {"head_dim": dims + odd, "kind": kind, "theta": theta, "original_length": max_positions}
        base["odd"] = odd
        if kind == "default":
            return RopeConfig(**base)
        if kind in ("linear", "dynamic"):  # dynamic stretches from max_positions and ignores an original length
            return RopeConfig(**base, factor=rope.float("factor", low=1e-3, high=1e6))

        # Phi gives the original length at the top level, which takes precedence.
        top = fields.int("original_max_position_embeddings", original)
        base["original_length"] = length = top or rope.int("original_max_position_embeddings", max_positions)
        if kind == "llama3":
            return RopeConfig(**base, **_read_llama3(rope))
        base["factor"] = rope.float("factor", max_positions / length, low=1e-3, high=1e6)
        if kind == "yarn" and theta == 1.0:
            raise fields.error("rope_theta", "more than 1")
        read = _read_longrope if kind == "longrope" else _read_yarn
        return RopeConfig(**base, **read(rope, base))

    def reach(self, max_positions: int) -> int:
        """Return the longest sequence that the stretching was made for; `max_positions` as given to `from_hf`."""
        if self.kind in ("linear", "dynamic", "yarn"):
            return max(max_positions, int(self.original_length * self.factor))
        return max_positions

    @property
    def steady_length(self) -> int | None:
        """Keys of longer sequences depend on how long the sequence was when they were computed; None: they never do."""
        return self.original_length if self.kind == "dynamic" else None

    @property
    def switch_length(self) -> int | None:
        """Longer sequences are rotated differently from their first token on; None: there is no such length."""
        return self.original_length if self.kind == "longrope" else None


def _holder(rope: Fields, fields: Fields, name: str) -> Fields:
    """Return the object that has a field: the dict, or the top level."""
    return rope if rope.config.get(name) is not None else fields


def _read_share(holder: Fields, partial: float | None) -> float:
    share = holder.float("partial_rotary_factor", partial or 1.0, low=0.0, high=1.0)
    if partial is None and share != 1.0:
        raise holder.error("partial_rotary_factor", "1: this family rotates whole heads")
    return share


def _read_llama3(rope: Fields) -> dict[str, Any]:
    low = rope.float("low_freq_factor", low=1e-6, high=1e6)
    high = rope.float("high_freq_factor", low=1e-6, high=1e6)
    if high <= low:
        raise rope.error("high_freq_factor", f"more than low_freq_factor ({low:g})")
    factor = rope.float("factor", low=1e-3, high=1e6)
    return {"factor": factor, "low_freq_factor": low, "high_freq_factor": high}


def _read_longrope(rope: Fields, base: Mapping[str, Any]) -> dict[str, Any]:
    factor, length, count = base["factor"], base["original_length"], base["head_dim"] // 2
    if factor > 1 and length == 1:
        raise CheckpointError("original_max_position_embeddings: expected more than 1, got 1", where=rope.file)
    attention = math.sqrt(1 + math.log(factor) / math.log(length)) if factor > 1 else 1.0
    return {
        "short_factor": _factors(rope, "short_factor", count),
        "long_factor": _factors(rope, "long_factor", count),
        "attention_factor": rope.float("attention_factor", attention),
    }


def _read_yarn(rope: Fields, base: Mapping[str, Any]) -> dict[str, Any]:
    mscale, mscale_all = rope.float("mscale", 0.0), rope.float("mscale_all_dim", 0.0)
    attention = _mscale(base["factor"], 1.0)
    if mscale and mscale_all:
        attention = _mscale(base["factor"], mscale) / (_mscale(base["factor"], mscale_all) or math.nan)
        if not math.isfinite(attention):
            raise rope.error("mscale_all_dim", "a value that does not cancel the scale")
    return {
        "beta_fast": rope.float("beta_fast", 0.0, low=0.0) or 32.0,  # 0 means the default, as in transformers
        "beta_slow": rope.float("beta_slow", 0.0, low=0.0) or 1.0,
        "truncate": rope.bool("truncate", "truncate" not in rope.config),  # null is false, as in transformers
        "attention_factor": rope.float("attention_factor", attention),
    }


def _factors(rope: Fields, name: str, count: int) -> tuple[float, ...]:
    values = rope.config.get(name)
    if type(values) is not list or len(values) != count:
        raise rope.error(name, f"a list of {count} numbers, one for each pair of rotated dims")
    if any(type(value) not in (int, float) or not 1e-6 <= value <= 1e9 for value in values):  # refuses NaN as well
        raise rope.error(name, "numbers from 1e-06 to 1e+09")
    return tuple(map(float, values))


def _mscale(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


class RotaryEmbedding:
    """Cosines and sines of token positions. Not a module: casting a model must not cast its frequencies."""

    def __init__(self, config: RopeConfig):
        self.config = config
        self.inv_freq = _inv_freq(config)  # [F] float32
        self.long_inv_freq = _longrope(config, config.long_factor) if config.kind == "longrope" else None
        self._kept: Angles | None = None  # tables of the first positions

    def to(self, device: torch.device | str) -> RotaryEmbedding:
        """Move the frequencies to a device, in place."""
        self.inv_freq = self.inv_freq.to(device)
        if self.long_inv_freq is not None:
            self.long_inv_freq = self.long_inv_freq.to(device)
        return self

    def angles(self, positions_T: Tensor, spans_T: Tensor, dtype: torch.dtype) -> Angles:
        """Return the tables of `cos_sin`; those that depend only on positions are kept for all up to the greatest.

        They take a few hundred bytes per position, about 1% of a float32 cache's bytes per position.
        """
        if self.config.kind in ("dynamic", "longrope"):
            return Angles(self.cos_sin(positions_T, spans_T, dtype))
        most, kept = max(positions_T.tolist()), self._kept
        if kept is None or most >= len(kept.tables[0]) or kept.tables[0].dtype != dtype:
            self._kept = kept = None  # before others take memory
            step = max(LEAST_KEPT, 1 << most.bit_length() >> 3)
            kept = self._kept = Angles(self._by_position((most // step + 1) * step, dtype), by_position=True)
        return kept

    def _by_position(self, count: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
        """Return the tables of the first positions."""
        tables: tuple[Tensor, ...] = ()
        for positions_P in torch.arange(count).split(BLOCK):
            rows = self.cos_sin(positions_P, positions_P, dtype)
            tables = tables or tuple(own_pages((count, x.shape[1]), dtype) for x in rows)
            for table, some in zip(tables, rows, strict=True):
                table[positions_P] = some
        return tables

    def cos_sin(self, positions_T: Tensor, spans_T: Tensor, dtype: torch.dtype) -> tuple[Tensor, ...]:
        """Return cos_TD and sin_TD in `dtype`, with equal halves, for int64 positions; then those of queries, if
        `growth` scales them.

        `spans_T` is the length of each token's sequence at the time when the token was evaluated: the prompt's length
        for tokens of the prompt, position + 1 for generated ones. Only `dynamic` and `longrope` read it. longrope
        requires that all tokens of a sequence have spans on the same side of the original length.
        The arithmetic is float32 and only its result is cast, even to float64, as in transformers; so a float64 run is
        comparable to transformers and to our runs in lower precision.
        """
        inv_freq = self.inv_freq
        if self.config.kind == "dynamic":
            # Per token, because a branch on the data would stall a GPU and break a compiled graph.
            stretched_TF = _geometric(_dynamic_theta(self.config, spans_T)[:, None], self.config.divisor)
            inv_freq = torch.where(spans_T[:, None] > self.config.original_length, stretched_TF, inv_freq)
        if self.long_inv_freq is not None:
            inv_freq = torch.where(spans_T[:, None] > self.config.original_length, self.long_inv_freq, inv_freq)
        angles_TF = (-1 if self.config.backwards else 1) * positions_T[:, None].float() * inv_freq
        angles_TD = torch.cat((angles_TF, angles_TF), dim=-1)
        scale, growth = self.config.attention_factor, self.config.growth
        tables = (angles_TD.cos() * scale, angles_TD.sin() * scale)
        if growth:
            steps_T = (positions_T + self.config.growth_start) // self.config.growth_length
            grown_T1 = 1 + growth * torch.log1p(steps_T.float())[:, None]
            tables += tuple(table_TD * grown_T1 for table_TD in tables)
        return tuple(table_TD.to(dtype) for table_TD in tables)


def _geometric(theta: float | Tensor, dims: int) -> Tensor:
    """Return the plain frequencies, theta ** -(2i / dims), in the operation order of transformers: equal bit by bit."""
    steps = torch.arange(0, dims, 2, dtype=torch.float32, device=getattr(theta, "device", None))
    return 1.0 / (theta ** (steps / dims))


def _dynamic_theta(c: RopeConfig, spans_T: Tensor) -> Tensor:
    """Return the NTK-aware base past the original length. The float64 power rounds to that of transformers."""
    growth = (c.factor * spans_T / c.original_length) - (c.factor - 1)
    return c.theta * (growth.double() ** (c.divisor / (c.divisor - 2))).float()


def _inv_freq(c: RopeConfig) -> Tensor:
    """Return the float32 frequencies [F] that apply up to the original length."""
    if c.kind == "longrope":
        return _longrope(c, c.short_factor)
    if c.kind == "yarn":
        return _yarn(c)
    inv_freq = _geometric(c.theta, c.divisor)
    if c.kind == "proportional":
        inv_freq[c.turned :] = 0.0
    if c.kind in ("linear", "proportional"):
        return inv_freq / c.factor
    return _llama3(c, inv_freq) if c.kind == "llama3" else inv_freq


def _longrope(c: RopeConfig, factors: tuple[float, ...]) -> Tensor:
    """Divide each frequency by a factor from the checkpoint, which was found by a search (LongRoPE)."""
    steps = torch.arange(0, c.head_dim, 2, dtype=torch.float32)
    return 1.0 / (torch.tensor(factors) * c.theta ** (steps / c.head_dim))


def _llama3(c: RopeConfig, inv_freq: Tensor) -> Tensor:
    """Slow long waves by `factor`, keep short ones, and interpolate those between (Llama 3.1)."""
    wavelength = 2 * math.pi / inv_freq
    long, short = c.original_length / c.low_freq_factor, c.original_length / c.high_freq_factor
    slowed = torch.where(wavelength > long, inv_freq / c.factor, inv_freq)
    smooth = (c.original_length / wavelength - c.low_freq_factor) / (c.high_freq_factor - c.low_freq_factor)
    blend = (1 - smooth) * slowed / c.factor + smooth * slowed
    return torch.where((wavelength >= short) & (wavelength <= long), blend, slowed)


def _yarn(c: RopeConfig) -> Tensor:
    """Ramp over the dims from plain frequencies to slowed ones (YaRN, section 3.2)."""

    def dim_of(rotations: float) -> float:
        return (c.head_dim * math.log(c.original_length / (rotations * 2 * math.pi))) / (2 * math.log(c.theta))

    low, high = dim_of(c.beta_fast), dim_of(c.beta_slow)
    if c.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, c.head_dim - 1)
    high += 0.001 if low == high else 0  # no division by zero
    ramp = torch.clamp((torch.arange(c.head_dim // 2, dtype=torch.float32) - low) / (high - low), 0, 1)
    plain = 1 - ramp
    powers = c.theta ** (torch.arange(0, c.head_dim, 2, dtype=torch.float32) / c.head_dim)
    return 1.0 / (c.factor * powers) * (1 - plain) + 1.0 / powers * plain
