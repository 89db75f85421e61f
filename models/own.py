"""Checks that the packages which Python finds under our names are ours. A separate file, because `run_path` runs it
before any package is imported, see `engine.load.startup` and `tools`.

A folder that comes first on the path, often the current one, may have its own `models.py` or `search/`. Hugging
Face distributes a package `kernels`, which can also overwrite our files. Imports would then fail with errors that
name neither package, or run the other code.
"""

import importlib.util
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
MARK = 'DISTRIBUTION = "coppice"'  # in kernels/__init__.py
NEEDED = ("cpp.py", "layout.py")  # beside it


class ShadowedError(ImportError):
    """Another package takes the place of ours. It is no `CoppiceError`, because that error's module may be replaced."""


def check(*names: str) -> None:
    """Check that `import NAME` gives our package for each name, without running code of another package.

    A program that `python -m` is starting ends here, with the error on stderr and the exit code of wrong usage.

    Raises:
        ShadowedError: names the file that Python finds, our file, and what to do.
    """
    fault = next(filter(None, map(_fault, names)), "")
    if fault and sys.argv[:1] == ["-m"]:  # Python's placeholder until it has found the module to run
        print(f"error: {fault}", file=sys.stderr)
        sys.exit(2)
    if fault:
        raise ShadowedError(fault)


def _fault(name: str) -> str:
    """Return the message for a name; "" if its package is ours."""
    found, ours = _found(name), ROOT / name / "__init__.py"
    same = found is not None and found.resolve() == ours
    if same and (name != "kernels" or _is_whole(ours)):
        return ""
    where = f"Coppice needs {ours}"
    remedy = "install Coppice into an environment of its own, without the other package; if need be, install it again"
    if found is None:
        what = f"Python finds no package {name}"
    elif same:
        what = f"{found} is not Coppice's: another distribution wrote over its files, or removed some of them"
        from importlib import metadata  # imported here because it takes long

        names = metadata.packages_distributions().get(name, [])
        where += f", and {name} is a package of the distributions {', '.join(sorted({*names, 'coppice'}))}"
    else:
        what = f"Python finds another package {name}: {found}"
        if Path.cwd() in found.parents[:2]:
            remedy = "that is in the current folder: start in another one, or with python -P (or PYTHONSAFEPATH=1)"
    return "\n".join((what, where, remedy))


def _found(name: str) -> Path | None:
    """Return the file of the package that is or would be imported."""
    module = sys.modules.get(name)
    if module is not None:
        return Path(module.__file__) if module.__file__ else None
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        return None
    if spec is None:
        return None
    places = [spec.origin, *(spec.submodule_search_locations or ())]  # a folder without __init__.py has no origin
    return next((Path(place) for place in places if place), None)


def _is_whole(ours: Path) -> bool:
    return MARK in ours.read_text("utf-8") and all(ours.with_name(name).is_file() for name in NEEDED)


if __spec__ is not None:  # not under `run_path`: the first import of `models`
    check("kernels")
