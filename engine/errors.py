"""What can go wrong, and the exit code of each. Every error says what, where and what to do. The check of a range."""

from typing import Any

from models.errors import CheckpointError, CoppiceError

__all__ = [
    "CheckpointError",
    "CoppiceError",
    "KVMemoryError",
    "NumericsError",
    "SearchError",
    "UsageError",
]


class UsageError(CoppiceError):
    """The request cannot be served as it was made."""

    exit_code = 2
    code = "usage"


class KVMemoryError(CoppiceError):
    """The pool of KV pages cannot hold what is asked for, or ran out."""

    exit_code = 4
    code = "memory"


class NumericsError(CoppiceError):
    """NaN or Inf where a number must be."""

    exit_code = 5
    code = "numerics"


class SearchError(CoppiceError):
    """A search that is not part of this project failed or broke the contract of `engine.requests`.

    `__cause__` is the exception that its code raised, if it raised one.
    """

    exit_code = 2
    code = "search"


def check_integer(name: str, value: Any, low: int, high: int | None = None) -> None:
    """Refuse what is no integer from `low` to `high`; True and False are none. Raises UsageError."""
    if type(value) is not int or value < low or (high is not None and value > high):
        wanted = f">= {low}" if high is None else f"from {low} to {high}"
        raise UsageError(f"{name}: expected an integer {wanted}, got {value!r}")
