"""First import of the package: the `kernels` that Python finds has to be ours.

Hugging Face distributes a package of that name too. Where both are installed one of them takes the other's place, as a
folder that comes first on the path, or file by file in one folder, and imports fail with errors that name neither.
"""

import importlib.util
import sys
from importlib import metadata
from pathlib import Path

from models.errors import CoppiceError

OURS = Path(__file__).resolve().parents[1] / "kernels" / "__init__.py"
MARK = 'DISTRIBUTION = "coppice"'  # in that file
NEEDED = ("cpp.py", "layout.py")  # beside it


class ShadowedError(CoppiceError, ImportError):
    """Another distribution's package `kernels` is in the place of ours."""

    exit_code = 2
    code = "usage"


def check() -> None:
    """Raises ShadowedError if `import kernels` does not give ours; nothing of another one is run."""
    found = _found()
    if found is not None and found.resolve() == OURS and _is_ours():
        return
    where = f"Coppice needs {OURS}"
    if found is None:
        what = "Python finds no package kernels"
    elif found.resolve() == OURS:
        what = f"{found} is not Coppice's: another distribution wrote over its files, or removed some of them"
        names = metadata.packages_distributions().get("kernels", [])
        where += f", and kernels is a package of the distributions {', '.join(sorted({*names, 'coppice'}))}"
    else:
        what = f"Python finds another package kernels: {found}"
    remedy = "install Coppice into an environment of its own, without the other package; if need be, install it again"
    raise ShadowedError(what, where=where, remedy=remedy)


def _found() -> Path | None:
    """The file of the package that is imported already, or would be."""
    module = sys.modules.get("kernels")
    if module is not None:
        return Path(module.__file__) if module.__file__ else None
    try:
        spec = importlib.util.find_spec("kernels")
    except (ImportError, ValueError):
        return None
    if spec is None:
        return None
    places = [spec.origin, *(spec.submodule_search_locations or ())]  # a folder without __init__.py has no origin
    return next((Path(place) for place in places if place), None)


def _is_ours() -> bool:
    try:
        return MARK in OURS.read_text("utf-8") and all(OURS.with_name(name).is_file() for name in NEEDED)
    except OSError:  # imported from an archive, which nobody writes over
        return True


check()
