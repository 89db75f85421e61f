"""The values of flags: argparse types with readable errors, and JSON from bytes."""

import argparse
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from engine.errors import UsageError, check_utf8, reason_of, shortened
from models.checkpoint.files import obstacle, read_regular

MAX_TEXT = 16 << 20  # bytes of a file of text
T = TypeVar("T")


def parse_json(data: bytes, **hooks: Any) -> Any:
    """A JSON value from bytes; `hooks` are options of `json.loads`. Raises ValueError with the fault."""
    try:
        return json.loads(data.decode(), **hooks)
    except UnicodeDecodeError as error:
        raise ValueError(f"not valid UTF-8: byte 0x{data[error.start]:02X} at {error.start}") from None
    except RecursionError:
        raise ValueError("malformed JSON: nested too deep") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"malformed JSON: {error}") from None
    except ValueError:  # Python limits the digits of an integer
        raise ValueError("a number is out of range") from None


def parse_object(data: bytes, **hooks: Any) -> dict[str, Any]:
    """A JSON object from bytes, see `parse_json`. Raises ValueError with the fault."""
    value = parse_json(data, **hooks)
    if not isinstance(value, dict):
        raise ValueError(f"expected a JSON object, got {shortened(json.dumps(value))}")
    return value


def argument(read: Callable[[str], T]) -> Callable[[str], T]:
    """Make an argparse type of a function that raises ValueError, whose text becomes the error message."""

    def parse(text: str) -> T:
        try:
            return read(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return parse


def output_file(path: str) -> Path:
    """A file that is written at the end of some work, checked before it begins. An argparse type."""
    if found := obstacle(path):
        raise argparse.ArgumentTypeError(f"cannot be written: {found[0]}: {found[1]}")
    return Path(path)


def positive(text: str) -> int:
    """An integer from 1 to 10**18 - 1. An argparse type."""
    if not re.fullmatch(r"[0-9]{1,18}", text) or not int(text):
        bound = "of at most 18 digits" if re.fullmatch("[0-9]{19,}", text) else ">= 1"
        raise argparse.ArgumentTypeError(f"expected an integer {bound}, got {text!r}")
    return int(text)


def plain_text(text: str) -> str:
    """A text that is not empty, in valid UTF-8. An argparse type."""
    if not text:
        raise argparse.ArgumentTypeError("expected a text, got none")
    try:
        return check_utf8(text)
    except UsageError as error:
        raise argparse.ArgumentTypeError(error.what) from None


def read_text(path: str, what: str) -> str:
    """The text of a file, which errors call `what`. Raises UsageError."""
    try:
        data = read_regular(path, MAX_TEXT)
        if len(data) > MAX_TEXT:
            raise ValueError(f"it is larger than {MAX_TEXT >> 20} MB")
        return data.decode()
    except (OSError, ValueError) as error:
        raise UsageError(f"cannot read {what}: {reason_of(error)}", where=path) from None


def text_file(path: str) -> str:
    """The text of a file. An argparse type."""
    try:
        return read_text(path, path)
    except UsageError as error:
        raise argparse.ArgumentTypeError(error.what) from None


def json_file(path: str) -> Any:
    """The value of a JSON file. An argparse type."""
    try:
        return json.loads(text_file(path))
    except (ValueError, RecursionError) as error:
        raise argparse.ArgumentTypeError(f"{path} is not valid JSON: {error}") from None


def token_ids(text: str) -> list[int]:
    """Token ids with commas between them. An argparse type."""
    if not re.fullmatch(r"[0-9]{1,17}(,[0-9]{1,17})*", text):
        raise argparse.ArgumentTypeError(f"expected token ids such as 5,17, got {text!r}")
    return [int(part) for part in text.split(",")]


def bias(text: str) -> tuple[str, float]:
    """ID=X. An argparse type."""
    token, _, number = text.partition("=")
    try:
        return str(int(token)), float(number)
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected a token id and a number such as 17=-2.5, got {text!r}") from None
