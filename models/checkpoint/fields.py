"""Validated reading of Hugging Face configuration dicts: a bad field is an error that names it, never a crash later."""

from __future__ import annotations

import builtins
from collections.abc import Collection, Mapping
from typing import Any, TypeVar

from models.errors import CheckpointError

D = TypeVar("D")
REQUIRED: Any = object()


class Fields:
    """Typed access to `config`, read from `file`. An absent or null field takes the default, if it has one.

    Every reader raises a `CheckpointError` that names the file, the field, the expected and the actual value.
    """

    def __init__(self, config: Mapping[builtins.str, Any], file: builtins.str, prefix: builtins.str = ""):
        self.config, self.file, self.prefix = config, file, prefix

    def int(self, name: builtins.str, default: D = REQUIRED, *, low: int = 1, high: int = 2**24) -> builtins.int | D:
        """Read a whole number in [low, high]."""
        value = self._get(name, default)
        if value is not default and (type(value) is not builtins.int or not low <= value <= high):
            raise self.error(name, f"a whole number from {low} to {high}")
        return value

    def float(
        self, name: builtins.str, default: D = REQUIRED, *, low: float = -1e30, high: float = 1e30
    ) -> builtins.float | D:
        """Read a finite number in [low, high]."""
        value = self._get(name, default)
        if value is default:
            return value
        if type(value) not in (builtins.int, builtins.float) or not low <= value <= high:  # refuses NaN as well
            raise self.error(name, f"a number from {low:g} to {high:g}")
        return builtins.float(value)

    def bool(self, name: builtins.str, default: D = REQUIRED) -> builtins.bool | D:
        """Read true or false."""
        value = self._get(name, default)
        if value is not default and type(value) is not builtins.bool:
            raise self.error(name, "true or false")
        return value

    def str(self, name: builtins.str, default: D = REQUIRED) -> builtins.str | D:
        """Read a string."""
        value = self._get(name, default)
        if value is not default and type(value) is not builtins.str:
            raise self.error(name, "a string")
        return value

    def choice(self, name: builtins.str, allowed: Collection[builtins.str], default: D = REQUIRED) -> builtins.str | D:
        """Read one of the strings in `allowed`."""
        value = self._get(name, default)
        if value is not default and (type(value) is not builtins.str or value not in allowed):
            raise self.error(name, f"one of {', '.join(sorted(allowed))}")
        return value

    def sub(self, name: builtins.str) -> Fields | None:
        """Return the fields of a nested dict; None if it is absent, null or empty."""
        value = self._get(name, None)
        if value is not None and type(value) is not dict:
            raise self.error(name, "an object or null")
        return Fields(value, self.file, f"{self.prefix}{name}.") if value else None

    def within(self, name: builtins.str) -> Fields:
        """Return the fields of a nested dict; no fields if it is absent, null or empty."""
        return self.sub(name) or Fields({}, self.file, f"{self.prefix}{name}.")

    def changed(self, changes: Mapping[builtins.str, Any]) -> Fields:
        """Return the fields with other values of some."""
        return Fields({**self.config, **changes}, self.file, self.prefix)

    def ids(self, name: builtins.str) -> frozenset[builtins.int]:
        """Read token ids: a number, a list of numbers, or nothing."""
        value = self._get(name, [])
        ids = value if type(value) is list else [value]
        if any(type(token) is not builtins.int or not 0 <= token < 2**31 for token in ids):
            raise self.error(name, "a token id, a list of token ids, or null")
        return frozenset(ids)

    def error(self, name: builtins.str, expected: builtins.str) -> CheckpointError:
        """Return the error for `name`, for the caller to raise."""
        value = self.config.get(name)
        try:
            got = "nothing" if value is None else repr(value)
        except ValueError:  # Python refuses to print integers of thousands of digits
            got = "an enormous number"
        got = got if len(got) <= 80 else got[:77] + "..."
        return CheckpointError(
            f"{self.prefix}{name}: expected {expected}, got {got}", where=self.file, remedy="Correct the file."
        )

    def _get(self, name: builtins.str, default: Any) -> Any:
        value = self.config.get(name)
        if value is not None:
            return value
        if default is REQUIRED:
            raise self.error(name, "a value")
        return default
