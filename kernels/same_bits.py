"""Whether a row's bits may depend on the other rows of a pass on a GPU. With the C++ kernels they never do."""

import contextlib
import os
from collections.abc import Iterator

NAME = "COPPICE_SAME_BITS"
MOST_HEAD = 256  # elements of a head that attention in one order takes


def asked() -> bool:
    """Whether `COPPICE_SAME_BITS=on` asks for one order of all sums in attention and products. What that costs on a GPU
    is not measured, so it is off by default."""
    return os.environ.get(NAME) == "on"


def check() -> None:
    """Raise ValueError if the variable is neither "on", "off" nor empty."""
    if (value := os.environ.get(NAME, "")) not in ("", "on", "off"):
        raise ValueError(f"{NAME}: expected on or off, got {value!a:.80}")


@contextlib.contextmanager
def asking(choice: str) -> Iterator[None]:
    """Context in which the variable is "on" or "off"; a CUDA graph stays as it was recorded."""
    before = os.environ.get(NAME)
    os.environ[NAME] = choice
    try:
        yield
    finally:
        os.environ.pop(NAME)
        if before is not None:
            os.environ[NAME] = before
