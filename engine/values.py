"""Converts values of search parameters, from a command line or JSON, by the annotations of their fields."""

import dataclasses
import inspect
import math
import re
import types
import typing
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

PLAIN = (bool, int, float, str, Path)
NAMES = {bool: "true or false", int: "an integer", float: "a number", str: "a text", Path: "a file"}
METAVARS = {bool: "true|false", int: "N", float: "X", str: "TEXT", Path: "FILE"}


class Kind(NamedTuple):
    """The values that a field accepts.

    Attributes:
        words: single values, of `Literal` and `None`.
        types: the types of `PLAIN` in the annotation.
        others: whether it also accepts values that no command line can write, such as functions.
    """

    words: tuple[Any, ...]
    types: tuple[type, ...]
    others: bool

    @property
    def is_flag(self) -> bool:
        """Whether a command line can write any value but None."""
        return bool(self.types) or any(word is not None for word in self.words)

    @property
    def metavar(self) -> str:
        """The placeholder for a value in `--help`."""
        if self.others and self.types == PLAIN:
            return "VALUE"
        return "|".join([*(written(word) for word in self.words if word is not None), *map(METAVARS.get, self._shown)])  # type: ignore[arg-type]

    @property
    def _shown(self) -> list[type]:
        """The types, without those that another one includes."""
        covered = {str: Path, int: float}
        return [kind for kind in self.types if covered.get(kind) not in self.types]

    def parse(self, text: str) -> Any:
        """A value from the command line. Raises ValueError with the expected values."""
        for word in self.words:
            if text == written(word):
                return word
        if bool in self.types and text in ("true", "false"):
            return text == "true"
        for kind in (int, float):
            try:
                if kind in self.types and math.isfinite(value := kind(text)):
                    return value
            except (ValueError, OverflowError):
                pass
        if str in self.types:
            return text
        if Path in self.types and text:
            return Path(text)
        raise ValueError(f"expected {self}, got {text!r}")

    def convert(self, value: Any) -> Any:
        """A value from JSON or from Python. Raises ValueError with the expected values."""
        for word in self.words:
            if type(word) is type(value) and word == value:
                return word
        if type(value) in self.types:
            return value
        if float in self.types and type(value) is int:
            return float(value)
        if self.others or (Path in self.types and isinstance(value, Path)):
            return value
        if Path in self.types and isinstance(value, str) and value:
            return Path(value)
        raise ValueError(f"expected {self}, got {value!r}")

    def __str__(self) -> str:
        return " or ".join([*(written(word) for word in self.words), *(NAMES[kind] for kind in self._shown)])


def kinds(cls: type) -> dict[str, Kind]:
    """The kind of each field of a configuration; a field whose annotation cannot be evaluated accepts any value."""
    try:
        hints = typing.get_type_hints(cls, include_extras=True)
    except Exception:  # names that are imported for type checkers only
        hints = {}
    return {f.name: kind_of(hints.get(f.name, Any)) for f in dataclasses.fields(cls) if f.init}  # type: ignore[arg-type]


def kind_of(annotation: Any) -> Kind:
    """The kind of an annotation."""
    words: list[Any] = []
    found: list[type] = []
    others = False
    for member in _members(annotation):
        if member is Any:
            return Kind((None,), PLAIN, True)
        if typing.get_origin(member) is typing.Literal:
            words += typing.get_args(member)
        elif member is type(None):
            words.append(None)
        elif member in PLAIN:
            found.append(member)
        else:
            others = True
    return Kind(tuple(words), tuple(kind for kind in PLAIN if kind in found), others)


def _members(annotation: Any) -> list[Any]:
    """The members of a union, without `Annotated`."""
    origin = typing.get_origin(annotation)
    if origin is typing.Annotated:
        return _members(typing.get_args(annotation)[0])
    if origin is typing.Union or origin is types.UnionType:
        return [member for part in typing.get_args(annotation) for member in _members(part)]
    return [annotation]


def default_of(cls: type, name: str) -> Any:
    """A field's default; `dataclasses.MISSING` if it has none."""
    [field] = [f for f in dataclasses.fields(cls) if f.name == name]  # type: ignore[arg-type]
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return field.default


def argument_doc(cls: type, name: str) -> str:
    """The description of a field in its class's docstring, or in a base class's, on one line; "" without one."""
    text = "\n".join(inspect.getdoc(base) or "" for base in cls.__mro__[:-1])
    found = re.search(rf"^ +{name}: (.+(?:\n {{8,}}.+)*)", text, re.MULTILINE)
    return re.sub(r"\s+", " ", found[1]) if found else ""


def written(value: Any) -> str:
    """A value as users write it on a command line."""
    if value is dataclasses.MISSING:
        return "must be given"
    if value is None or isinstance(value, bool):
        return str(value).lower()
    return str(value)


def plain(value: Any) -> Any:
    """A value of JSON: the value itself, a list of such values, or its text."""
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return [plain(item) for item in value]
    return value if isinstance(value, bool | int | float | str | None) else str(value)
