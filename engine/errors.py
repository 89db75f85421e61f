"""The errors, each with its exit code; every error states what happened, where, and what to do. Checks of ranges."""

import math
from typing import Any

from models.errors import CheckpointError, CoppiceError, reason_of  # noqa: F401


class UsageError(CoppiceError):
    """The request is invalid."""

    exit_code = 2
    code = "usage"


class ContextError(UsageError):
    """A prompt has more tokens than the model's context holds, or than a server accepts.

    `code` is OpenAI's, by which clients recognise the error; LiteLLM up to 1.83 looks for "this model's maximum context
    length is" in the message.
    """

    code = "context_length_exceeded"


class KVMemoryError(CoppiceError):
    """The pool of KV pages is too small for the request, or is full, or the machine has no memory left."""

    exit_code = 4
    code = "memory"


class NumericsError(CoppiceError):
    """NaN or Inf in a result."""

    exit_code = 5
    code = "numerics"


class SearchError(CoppiceError):
    """A search that is not part of this project failed or broke the contract of `engine.contract`.

    `__cause__` is the exception that its code raised, if it raised one.
    """

    exit_code = 2
    code = "search"


def shortened(text: str, most: int = 80) -> str:
    """The text, cut to `most` characters."""
    return text if len(text) <= most else text[: most - 1] + "…"


def check_integer(name: str, value: Any, low: float, high: float = math.inf, *, also: str = "") -> None:
    """Check that a value is an integer from `low` to `high`; True and False are none. Raises UsageError.

    Args:
        also: words before "an integer" in the message, such as "auto or ".
    """
    _check_range(name, value, low, high, int, f"{also}an integer")


def check_number(name: str, value: Any, low: float, high: float = math.inf) -> None:
    """Check that a value is a float or an integer from `low` to `high`. Raises UsageError."""
    _check_range(name, value, low, high, int | float, "a number")


def check_flag(name: str, value: Any) -> None:
    """Check that a value is True or False. Raises UsageError."""
    if not isinstance(value, bool):
        raise UsageError(f"{name}: expected true or false, got {shortened(repr(value))}")


def check_utf8(text: str, name: str = "") -> str:
    """Return `text` if it can be encoded as UTF-8; errors begin with the name of what has it, if one is given.

    Raises:
        UsageError: it has lone surrogates (from bytes that are not UTF-8, or from an escape in JSON).
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        lead, lone = f"{name}: " if name else "", f"lone surrogate U+{ord(text[error.start]):04X}"
        what = f"{lead}the text is not valid UTF-8: {lone} at character {error.start}"
        raise UsageError(what, remedy="give the input as UTF-8") from None
    return text


def _check_range(name: str, value: Any, low: float, high: float, kind: Any, words: str) -> None:
    if not isinstance(value, kind) or isinstance(value, bool) or not low <= value <= high:
        limits = f">= {low}" if high == math.inf else f"from {low} to {high}"
        raise UsageError(f"{name}: expected {words} {limits}, got {shortened(repr(value))}")
