"""Names that a package exports from its modules, imported at first use: `__getattr__` of a module (PEP 562).

Importing a package then does not import the dependencies of its names, above all torch, so a command line can parse its
flags, show its help or refuse a folder first.
"""

import importlib
import sys
from collections.abc import Callable, Mapping
from typing import Any


def exports(package: str, modules: Mapping[str, str]) -> Callable[[str], Any]:
    """Return the `__getattr__` of a package.

    Args:
        package: the package's `__name__`.
        modules: maps each module to the names that the package exports from it, separated by spaces.
    """
    homes = {name: module for module, names in modules.items() for name in names.split()}

    def find(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        found = getattr(importlib.import_module(homes[name]), name)
        setattr(sys.modules[package], name, found)
        return found

    return find
