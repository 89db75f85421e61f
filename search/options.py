"""Fields that several searches share, and checks of fields."""

import math
import struct
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from engine.contract import Search
from engine.contract.sampling import Warp
from engine.errors import UsageError, check_integer, check_number
from engine.values import written

MAX_SEED = 2**63 - 1
# These apply to draws from one row at a time only.
OF_ROWS = ("typical_p", "epsilon_cutoff", "eta_cutoff", "top_n_sigma", "xtc_probability", "xtc_threshold")
DRAWS = ("temperature", "top_k", "top_p", "min_p", *OF_ROWS)
MAX_PENALTY = 20  # lengths to this power do not overflow a float
MAX_PATIENCE = 100  # bounds the finished hypotheses that are kept for each beam


def check_integers(config: Any, *, also: str = "", **ranges: tuple[float, float]) -> None:
    """Call `check_integer` for fields of a configuration; `ranges` maps names to (least, largest)."""
    for name, (low, high) in ranges.items():
        check_integer(name, getattr(config, name), low, high, also=also)


def check_numbers(config: Any, **ranges: tuple[float, float]) -> None:
    """Call `check_number` for fields of a configuration; `ranges` maps names to (least, largest)."""
    for name, limits in ranges.items():
        check_number(name, getattr(config, name), *limits)


def hypotheses(beams: int, patience: float | None) -> int:
    """Return the number of finished hypotheses at which a search ends: round(beams * patience); None: `beams`.

    It is computed as in CTranslate2: in float32, halves are rounded up. Raises UsageError.
    """
    if patience is None:
        return beams
    check_number("patience", patience, 0, MAX_PATIENCE)
    count = math.floor(_float32(_float32(patience) * beams) + 0.5)
    if count < 1:
        raise UsageError(f"patience: {beams} x {patience} rounds to no hypothesis", remedy="give a larger one")
    return count


def _float32(value: float) -> float:
    return struct.unpack("f", struct.pack("f", value))[0]


def check_choices(config: Any, **choices: Sequence[Any]) -> None:
    """Check that each field has one of the given values. Raises UsageError."""
    for name, words in choices.items():
        value = getattr(config, name)
        if not any(type(value) is type(word) and value == word for word in words):
            *first, last = map(written, words)
            raise UsageError(f"{name}: expected {', '.join(first)} or {last}, got {value!r}")


def without_draws(params: Mapping[str, Any], known: Collection[str]) -> dict[str, Any]:
    """Return the parameters without those of draws, if the search has none and the temperature is 0 (greedy).

    Args:
        params: values by the names that users write.
        known: the parameters of the search.

    Raises:
        UsageError: a parameter that is left out has a value out of range.
    """
    temperature = params.get("temperature")
    if "temperature" in known or isinstance(temperature, bool) or temperature != 0:
        return dict(params)
    Warp(**{key: params[key] for key in DRAWS if key in params})
    check_integer("seed", params.get("seed", 0), 0, MAX_SEED)
    return {key: value for key, value in params.items() if key in known or key not in (*DRAWS, "seed")}


@dataclass(frozen=True)
class Sampling(Search):
    """Base of searches that draw from warped distributions; a seed keys the draws."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    min_p: float = field(default=0.0, kw_only=True)

    def __post_init__(self):
        self.warp()
        check_integers(self, seed=(0, MAX_SEED))

    def warp(self) -> Warp:
        """The warp of temperature, top-k, top-p and min-p. Raises UsageError for values out of range."""
        return Warp(self.temperature, self.top_k, self.top_p, self.min_p)


@dataclass(frozen=True)
class RowSampling(Sampling):
    """Base of searches that draw from one row at a time, which can be warped in more ways than joint distributions."""

    typical_p: float = field(default=1.0, kw_only=True)
    epsilon_cutoff: float = field(default=0.0, kw_only=True)
    eta_cutoff: float = field(default=0.0, kw_only=True)
    top_n_sigma: float = field(default=0.0, kw_only=True)
    xtc_probability: float = field(default=0.0, kw_only=True)
    xtc_threshold: float = field(default=0.1, kw_only=True)

    def warp(self) -> Warp:
        return replace(super().warp(), **{name: getattr(self, name) for name in OF_ROWS})
