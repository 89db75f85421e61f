"""The cache of files derived while loading: whether it is used, where it is, and how large it may be."""

import os
from functools import lru_cache

from engine.errors import UsageError
from engine.load.sizes import read_size
from kernels import cpp
from models.file_cache import FileCache

VARIABLE = "COPPICE_CACHE"  # environment variable: off, or the most bytes
BOUND = "16G"
_at = lru_cache(maxsize=4)(FileCache)  # the same one for each place, which reports a fault once


def file_cache(cache: str) -> FileCache | None:
    """The files that later starts read; None: nothing is kept or read.

    Args:
        cache: see `LoadOptions`.

    Raises:
        UsageError: the environment variable has another value than off or a size.
    """
    value = os.environ.get(VARIABLE) or BOUND
    if "off" in (cache, value):
        return None
    try:
        return _at(cpp.cache_folder() / "models", read_size(value))
    except ValueError:
        what = f"{VARIABLE}: expected off, or the most bytes of files such as {BOUND}, got {value!r}"
        raise UsageError(what, remedy=f"unset it: the bound is {BOUND} then") from None
    except RuntimeError:  # a user without a home
        return None
