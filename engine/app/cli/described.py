"""Descriptions of searches for command lines: names, parameters and help texts.

Those of the built-in searches are read from `searches.json`, which `python -m tools.search_flags` writes from their
classes, because importing the classes imports torch, which neither flags nor their help need.
"""

import functools
import inspect
import json
import sys
from collections.abc import Collection
from pathlib import Path
from typing import Any, NamedTuple

from engine.errors import UsageError
from engine.values import PLAIN, Kind, argument_doc, default_of, kinds, written
from engine.words import ENTRY_POINTS

FILE = Path(__file__).with_name("searches.json")
TYPES = {kind.__name__: kind for kind in PLAIN}


class DescribedParameter(NamedTuple):
    """A parameter of a search: the field of its class, what it accepts, its default as text, and what it means.

    `shared`: other searches have a parameter of this name and meaning.
    """

    field: str
    kind: Kind
    default: str
    text: str
    shared: bool

    @staticmethod
    def of(record: dict[str, Any]) -> "DescribedParameter":
        """Make a parameter from its entry in `searches.json`."""
        kind = record["kind"]
        types = tuple(TYPES[name] for name in kind["types"])
        return DescribedParameter(**{**record, "kind": Kind(tuple(kind["words"]), types, kind["others"])})


class DescribedSearch(NamedTuple):
    """A search: its class, the first line about it, its other names, its parameters by the names that users write."""

    where: str
    summary: str
    aliases: list[str]
    parameters: dict[str, DescribedParameter]


def described() -> dict[str, DescribedSearch]:
    """The searches of this project, then those from outside that are registered."""
    found, base = {**own()}, sys.modules.get("search.base")
    for name in base.REGISTRY if base is not None else ():
        if name not in found:
            found[name] = describe(name)
    return found


def describe(name: str) -> DescribedSearch:
    """Describe a registered search by its class."""
    from search.base import ALIASES, REGISTRY, SHARED_PARAMS, parameters  # imports torch

    cls = REGISTRY[name]
    accepted = kinds(cls)
    found = {
        key: DescribedParameter(
            field,
            accepted[field],
            written(default_of(cls, field)).lower(),
            "" if key in SHARED_PARAMS else argument_doc(cls, field).rstrip(".") or field,
            key in SHARED_PARAMS,
        )
        for key, field in parameters(name).items()
    }
    where, aliases = f"{cls.__module__}:{cls.__qualname__}", [alias for alias, real in ALIASES.items() if real == name]
    return DescribedSearch(where, _summary(cls), aliases, found)


def find(text: str) -> str | None:
    """The name of the search that `--search TEXT` names, see `search.outside.find_search`. Raises UsageError."""
    for name, search in described().items():
        if text in (name, *search.aliases):
            return name
    if ":" not in text and not _entry_points(text):
        return None
    from search.outside import find_search  # imports torch, like a search from outside

    return find_search(text)


def load_entry_points() -> list[UsageError]:
    """Register the searches that installed distributions offer, see `search.outside.load_entry_points`."""
    if not _entry_points():
        return []
    from search import outside  # imports torch, like a search from outside

    return outside.load_entry_points()


@functools.cache
def own() -> dict[str, DescribedSearch]:
    """The searches of this project."""
    found = json.loads(FILE.read_text("utf-8"))
    return {
        name: DescribedSearch(
            **{**search, "parameters": {k: DescribedParameter.of(one) for k, one in search["parameters"].items()}}
        )
        for name, search in found.items()
    }


def _entry_points(name: str | None = None) -> Collection[Any]:
    """The entry points of all searches, or those with a name; the searches themselves are not loaded."""
    from importlib.metadata import entry_points  # here, because importing it takes long

    return entry_points(group=ENTRY_POINTS) if name is None else entry_points(group=ENTRY_POINTS, name=name)


def _summary(cls: type) -> str:
    """The first line of a class's docstring; "" for a dataclass whose docstring is generated."""
    own = cls.__doc__ or ""
    return "" if own.startswith(f"{cls.__name__}(") else inspect.cleandoc(own).partition("\n")[0]
