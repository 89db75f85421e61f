"""Ctrl-C between steps, never within one."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Put Python's KeyboardInterrupt off to the end of the block; a second Ctrl-C does not wait.

    Raised between two lines of its bookkeeping, it would leave pages that nobody knows of. Another handler of SIGINT
    than Python's own is left alone, as are other threads, which signals do not reach.
    """
    own = threading.current_thread() is threading.main_thread()
    if not own or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    pressed = False

    def note(*_: object) -> None:
        nonlocal pressed
        if pressed:
            raise KeyboardInterrupt
        pressed = True

    signal.signal(signal.SIGINT, note)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        if pressed:
            raise KeyboardInterrupt
