"""Imports that wait until a command line has parsed its flags, so that help and wrong flags need no torch.

A module that defines flags puts imports that only its work needs under `with later():`. The parser is built without
them; `import_now`, which `engine.app.cli.run` calls before the work, performs them. Other programs import them at once.
"""

import builtins
import functools
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_modules: list[dict[str, Any]] | None = None  # namespaces of modules whose imports wait; None: none may wait


class Later:
    """A name whose import waits. It may stand in annotations; anything else needs `import_now`.

    Args:
        statement: the arguments of `__import__`.
        path: names of attributes, followed from the module that `__import__` returns.
    """

    def __init__(self, statement: tuple[Any, ...], path: tuple[str, ...] = ()):
        self._statement, self._path = statement, path

    def __getattr__(self, name: str) -> "Later":
        return Later(self._statement, (*self._path, name))

    def __or__(self, other: object) -> "Later":  # in annotations
        return self

    __ror__ = __or__

    def imported(self) -> Any:
        """Import and return the object."""
        return functools.reduce(getattr, self._path, __import__(*self._statement))


def let_wait(package: str) -> None:
    """Let imports under `later` wait, if `python -m` is starting a module of this package."""
    global _modules
    if sys.argv[:1] == ["-m"] and any(word.startswith(f"{package}.") for word in sys.orig_argv):
        _modules = []


@contextmanager
def later() -> Iterator[None]:
    """Context whose import statements wait for `import_now`, if imports may wait."""
    if (modules := _modules) is None:
        yield
        return

    def wait(name: str, names: Any, *others: Any) -> Later:
        modules.append(names)
        return Later((name, names, *others))

    importing, builtins.__import__ = builtins.__import__, wait  # type: ignore[assignment]
    try:
        yield
    finally:
        builtins.__import__ = importing


def import_now() -> None:
    """Perform the waiting imports; later imports do not wait."""
    global _modules
    modules, _modules = _modules or [], None
    for names in modules:
        for name, value in [*names.items()]:
            if isinstance(value, Later):
                names[name] = value.imported()
