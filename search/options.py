"""Fields that several searches have, and the checks of fields."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from engine.errors import UsageError
from engine.requests import Search
from engine.sampling import Warp
from search.values import written

MAX_SEED = 2**63 - 1
MAX_PENALTY = 20  # lengths to this power stay within a float


def check_integers(config: Any, *, also: str = "", **ranges: tuple[float, float]) -> None:
    """Refuse fields that are no integers in their range (inclusive). Raises UsageError.

    Args:
        config: has the fields.
        also: what the message names before the integer, such as "auto or ".
        ranges: least and largest value of each field.
    """
    _check_numbers(config, int, f"{also}an integer", ranges)


def check_numbers(config: Any, **ranges: tuple[float, float]) -> None:
    """Refuse fields that are neither float nor int, or out of their range (inclusive). Raises UsageError."""
    _check_numbers(config, int | float, "a number", ranges)


def _check_numbers(config: Any, kind: Any, what: str, ranges: dict[str, tuple[float, float]]) -> None:
    for name, (low, high) in ranges.items():
        value = getattr(config, name)
        if not isinstance(value, kind) or isinstance(value, bool) or not low <= value <= high:
            limits = f">= {low}" if high == math.inf else f"from {low} to {high}"
            raise UsageError(f"{name}: expected {what} {limits}, got {value!r}")


def check_choices(config: Any, **choices: Sequence[Any]) -> None:
    """Refuse fields that are none of the given values. Raises UsageError."""
    for name, words in choices.items():
        value = getattr(config, name)
        if not any(type(value) is type(word) and value == word for word in words):
            *first, last = map(written, words)
            raise UsageError(f"{name}: expected {', '.join(first)} or {last}, got {value!r}")


@dataclass(frozen=True)
class Sampling(Search):
    """Base of searches that draw from warped distributions; the draws are keyed by a seed."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self):
        self.warp()
        check_integers(self, seed=(0, MAX_SEED))

    def warp(self) -> Warp:
        """Temperature, top-k and top-p. Raises UsageError for values out of range."""
        return Warp(self.temperature, self.top_k, self.top_p)
