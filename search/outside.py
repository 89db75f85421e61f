"""External searches: `module:Class`, and the entry points of installed distributions."""

import importlib
import importlib.metadata
import os
import re
import sys
import traceback
from collections.abc import Iterator
from typing import Any

from engine.contract import Search
from engine.errors import UsageError
from engine.words import ENTRY_POINTS
from search.base import ALIASES, REGISTRY, check_class, name_of, register


def find_search(text: str) -> str | None:
    """Return the registered name of the search that `--search TEXT` names; an external search is loaded.

    Args:
        text: a registered name or its alias, the name of an entry point, or `module:Class`.

    Returns:
        None if no search has this name.

    Raises:
        UsageError: the search exists but cannot be loaded.
    """
    text = ALIASES.get(text, text)
    if text in REGISTRY:
        return text
    if ":" in text:
        return load_class(text)
    found = [entry for entry in entry_points() if entry.name == text]
    if not found:
        return None
    if len(found) > 1:
        places = ", ".join(f"{distribution(entry)} ({entry.value})" for entry in found)
        raise UsageError(
            f"the search {text!r} comes from several distributions: {places}",
            remedy=f"choose one by its class: --search {found[0].value}",
        )
    load_entry_point(found[0])
    return text


def load_class(text: str) -> str:
    """Import `module:Class` and register the class. Returns its name; raises UsageError."""
    cls = import_class(text)
    name = name_of(cls)
    if name is None:
        name = re.sub(r"_+", "-", cls.__name__.lower()).strip("-")
        try:
            register(name)(cls)
        except UsageError as error:
            error.where = f"{text} has this name because its class is called {cls.__name__}"
            error.remedy = 'rename the class, or write @register("another-name") above it'
            raise
    return name


def entry_points() -> Iterator[importlib.metadata.EntryPoint]:
    """Iterate over the searches that installed distributions offer, each once, without importing them."""
    seen = set()
    for entry in importlib.metadata.entry_points(group=ENTRY_POINTS):
        if (entry.name, entry.value) not in seen:  # a distribution may be found twice on sys.path
            seen.add((entry.name, entry.value))
            yield entry


def load_entry_point(entry: importlib.metadata.EntryPoint) -> None:
    """Import an entry point's search and register it under the entry point's name. Raises UsageError."""
    try:
        cls = import_class(entry.value.replace(" ", ""))
        if name_of(cls) != entry.name:
            register(entry.name)(cls)
    except UsageError as error:
        error.what = f"the search {entry.name!r} of the distribution {distribution(entry)} is unusable: {error.what}"
        raise


def load_entry_points() -> list[UsageError]:
    """Register every search that installed distributions offer. Returns the errors of those that cannot be loaded."""
    errors = []
    for entry in entry_points():
        try:
            if entry.name not in REGISTRY:
                load_entry_point(entry)
            elif name_of(import_class(entry.value.replace(" ", ""))) != entry.name:
                what = f"the search {entry.name!r} of the distribution {distribution(entry)} is unusable: "
                raise UsageError(f"{what}{REGISTRY[entry.name].__qualname__} has this name")
        except UsageError as error:
            errors.append(error)
    return errors


def distribution(entry: importlib.metadata.EntryPoint) -> str:
    """The name of the distribution that an entry point comes from."""
    return entry.dist.metadata["Name"] if entry.dist is not None else "(unknown)"


def import_class(text: str) -> type[Search]:
    """Import `module:Class`; the current folder comes last on the path.

    Raises:
        UsageError: there is no such module or class, the module raises, or the class is no search.
    """
    module_name, _, class_name = text.partition(":")
    names = [*module_name.split("."), *class_name.split(".")]
    if not all(name.isidentifier() for name in names):
        raise UsageError(
            f"search: expected module:Class, got {text!r}",
            remedy="for a file my_search.py in the current folder: my_search:MyClass",
        )
    here = os.getcwd()
    if here not in sys.path and "" not in sys.path:
        sys.path.append(here)
        importlib.invalidate_caches()
    found: Any = _import(module_name)
    for name in class_name.split("."):
        if not hasattr(found, name):
            classes = [value for value in vars(found).values() if isinstance(value, type) and issubclass(value, Search)]
            there = [cls.__name__ for cls in classes if cls.__module__ == module_name]
            raise UsageError(
                f"the module {module_name} has no {class_name}",
                where=str(getattr(sys.modules[module_name], "__file__", None) or ""),
                remedy=f"its searches: {', '.join(there)}" if there else "it has no search",
            )
        found = getattr(found, name)
    check_class(found, text)
    return found


def _import(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and f"{name}.".startswith(f"{error.name}."):
            raise UsageError(
                f"there is no module {error.name}",
                where=f"searched: the current folder {os.getcwd()}, and sys.path",
                remedy="start in the folder of the module, or put that folder into PYTHONPATH",
            ) from None
        fault: BaseException = error
    except UsageError:  # raised by `register`
        raise
    except (Exception, SystemExit) as error:
        fault = error
    frames = [frame for frame in traceback.extract_tb(fault.__traceback__) if "importlib" not in frame.filename]
    line = next((f"{f.filename}:{f.lineno}" for f in reversed(frames) if f.filename != __file__), "")
    if isinstance(fault, SyntaxError):
        line = f"{fault.filename}:{fault.lineno}"
    what = f"{type(fault).__name__}: {fault}".rstrip(": ")
    raise UsageError(
        f"the module {name} failed while it was imported: {what}", where=line, remedy="-v shows the traceback"
    ) from fault
