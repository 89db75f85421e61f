"""The end of every command line: output that cannot be written is an exit code or a message, and no traceback.

It imports no other module of ours, because `coppice` runs this file without importing a package.
"""

import errno
import os
import sys
from collections.abc import Callable
from contextlib import suppress

CLOSED_PIPE = 141
FULL = errno.ENOSPC, errno.EDQUOT, errno.EIO


def ended(main: Callable[[], int | None]) -> int:
    """Runs a command line and writes out what stdout has buffered.

    Returns:
        The exit code of `main`, 0 for None; 141 if the pipe of stdout is closed, 2 if its disk is full.
    """
    try:
        try:
            return main() or 0
        finally:
            if sys.stdout is not None:
                sys.stdout.flush()
    except BrokenPipeError:
        discard_stdout()
        return CLOSED_PIPE
    except OSError as error:
        if error.errno not in FULL or error.filename is not None:
            raise
        discard_stdout()
        with suppress(OSError):  # the exit code alone reports the error
            print(f"error: the output cannot be written: {error.strerror}", file=sys.stderr)
        return 2


def discard_stdout() -> None:
    """Redirects stdout to the null device, so that writing its buffer at exit raises no error."""
    try:
        number = sys.stdout.fileno()
    except (AttributeError, OSError, ValueError):
        return
    nothing = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, number)
    os.close(nothing)
