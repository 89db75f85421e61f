"""Ctrl-C between steps, never within one."""

import threading

# The module `signal` converts arguments and results to enumerations, which takes longer than a small model's layer.
from _signal import SIGINT, default_int_handler, getsignal, signal  # pyright: ignore[reportMissingImports]
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Delay Python's KeyboardInterrupt until the end of the block; a second Ctrl-C is not delayed.

    Between two lines of the block the interrupt could leak pages. The block changes nothing in threads other than the
    main one, which signals do not reach, or if SIGINT has another handler than Python's own.
    """
    own = threading.current_thread() is threading.main_thread()
    if not own or getsignal(SIGINT) is not default_int_handler:
        yield
        return
    pressed = False

    def note(*_: object) -> None:
        nonlocal pressed
        if pressed:
            raise KeyboardInterrupt
        pressed = True

    signal(SIGINT, note)
    try:
        yield
    finally:
        signal(SIGINT, default_int_handler)
        if pressed:
            raise KeyboardInterrupt
