"""The errors that `kernels` and `models` raise; `engine.errors` adds the rest."""

import copyreg
import difflib
from collections.abc import Iterable
from typing import Any


class CoppiceError(Exception):
    """An error meant for the user: what went wrong, where, and what to do about it, one line each.

    `exit_code` is the status of a command line that ends with it, `code` its name in JSON records.
    """

    exit_code = 1
    code = "internal"

    def __init__(self, what: str, *, where: str = "", remedy: str = ""):
        self.what, self.where, self.remedy = what, where, remedy
        super().__init__(what, where, remedy)

    def __reduce__(self) -> tuple[Any, ...]:
        # The inherited one calls the class with `args` by position, which __init__ refuses: a multiprocessing pool that
        # cannot unpickle an error waits for its result without end. A cause is not pickled, as with every exception:
        # pools send the traceback as text.
        return copyreg.__newobj__, (type(self), *self.args), self.__dict__  # type: ignore[attr-defined]

    def __str__(self) -> str:
        return "\n".join(line for line in (self.what, self.where, self.remedy) if line)


class CheckpointError(CoppiceError):
    """A file in the model's folder is absent, damaged, unsupported, or contradicts another file."""

    exit_code = 3
    code = "checkpoint"


def nearest(name: str, known: Iterable[str], rest: str) -> str:
    """Return the remedy for an unknown name: at most three known names, the nearest first, and where to find the rest.

    Args:
        name: the unknown name.
        known: the names to choose from.
        rest: a clause such as "docs/checkpoints.md lists all".
    """
    close = difflib.get_close_matches(name, known, 3)
    return f"the nearest: {', '.join(close)}; {rest}" if close else rest


def reason_of(error: BaseException) -> str:
    """Return what an error says, without the number and the path that the text of an OSError also has."""
    return getattr(error, "strerror", None) or str(error)


def show(name: object) -> str:
    """Make a name from a file safe to print: no control characters, no lone surrogates, bounded length."""
    text = str(name).encode("utf-8", "backslashreplace").decode()
    text = "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text)
    return text if len(text) <= 300 else f"{text[:150]}...{text[-150:]}"
