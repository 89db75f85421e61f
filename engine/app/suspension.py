"""Ctrl-Z and `fg`: the terminal gets the shell's modes while the process is stopped, and the chat's afterwards."""

import contextlib
import errno
import os
import signal
import sys
import termios
import threading
from collections.abc import Callable, Iterator
from typing import Any

Modes = list[Any]  # as `termios.tcgetattr` returns them


class Suspended(Exception):
    """Raised while a line is read: the line editor must restore the terminal and draw again.

    Args:
        stop: the process has to stop (SIGTSTP); otherwise it was stopped and continues (SIGCONT).
    """

    def __init__(self, stop: bool):
        self.stop = stop
        super().__init__(stop)


class Suspension:
    """Handles SIGTSTP and SIGCONT as a context manager, in the main thread and unless the process ignores SIGTSTP.

    A shell restores its own terminal modes when a job stops, but not the job's modes when the job continues. SIGCONT
    also follows SIGSTOP, which no process can handle, so the modes are set again whenever the process continues in the
    foreground. In the background it must not set them: the kernel would stop it.
    """

    def __init__(self):
        self._asking = False
        self._silent: Modes | None = None  # modes while echo is off, and those before
        self._before: Modes | None = None
        self._handlers: dict[int, Any] = {}

    def __enter__(self) -> "Suspension":
        own = threading.current_thread() is threading.main_thread()
        if own and signal.getsignal(signal.SIGTSTP) is signal.SIG_DFL:
            for number, handler in ((signal.SIGTSTP, self._stop_asked), (signal.SIGCONT, self._continued)):
                self._handlers[number] = signal.signal(number, handler)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        self._handlers.clear()

    def ask(self, read: Callable[[], str]) -> str:
        """Return what `read` returns; `read` is called again each time that the process was stopped meanwhile.

        `read` must let `Suspended` pass, with the terminal's modes as they were before the call.
        """
        while True:
            try:
                self._asking = True
                try:
                    return read()
                finally:
                    self._asking = False
            except Suspended as suspended:
                if suspended.stop:
                    self._stop()

    @contextlib.contextmanager
    def no_echo(self) -> Iterator[None]:
        """Do not echo typed text in this block; the next prompt shows it. Without a terminal, do nothing."""
        try:
            before = termios.tcgetattr(sys.stdin.fileno())
        except (OSError, ValueError, AttributeError, termios.error):
            yield
            return
        self._before, self._silent = before, [*before[:3], before[3] & ~termios.ECHO, *before[4:]]
        _set_modes(self._silent)
        try:
            yield
        finally:
            self._silent = None
            _set_modes(before)

    def _stop_asked(self, *_: object) -> None:
        if self._asking:
            self._asking = False
            raise Suspended(stop=True)
        self._stop()

    def _continued(self, *_: object) -> None:
        if not _in_foreground():
            return
        if self._asking:
            self._asking = False
            raise Suspended(stop=False)
        if self._silent is not None:
            _set_modes(self._silent)

    def _stop(self) -> None:
        """Stop the process, as the signal's default action does; return when it continues in the foreground."""
        if self._silent is not None and self._before is not None:
            _set_modes(self._before)
        signal.signal(signal.SIGTSTP, signal.SIG_DFL)
        signal.pthread_kill(threading.get_ident(), signal.SIGTSTP)  # to this thread: it takes effect before the return
        signal.signal(signal.SIGTSTP, self._stop_asked)
        self._continued()  # where the kernel does not stop an orphaned process group, no SIGCONT comes


def _in_foreground() -> bool:
    try:
        return os.tcgetpgrp(sys.stdin.fileno()) == os.getpgrp()
    except (OSError, ValueError, AttributeError):
        return True  # the terminal has no job control


def _set_modes(modes: Modes) -> None:
    """Set the terminal's modes; a background process is stopped here until it is in the foreground."""
    while True:
        try:
            termios.tcsetattr(sys.stdin.fileno(), termios.TCSANOW, modes)
            return
        except termios.error as error:
            if error.args[0] != errno.EINTR:  # the terminal is gone: the next write raises the error
                return
        except (OSError, ValueError, AttributeError):
            return
