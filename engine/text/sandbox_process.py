"""The process that renders chat templates: one for all templates and engines, started when needed, ended when idle."""

import atexit
import contextlib
import json
import os
import re
import select
import shutil
import signal
import subprocess
import sys
import sysconfig
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import jinja2
import tokenizers

from engine.errors import UsageError
from engine.text import sandbox

VARIABLE = "COPPICE_PYTHON"  # environment variable: the interpreter
START_SECONDS = 60.0  # an interpreter's own start, on a machine that may be busy
WALL_SECONDS = 10.0  # besides the CPU limit; templates cannot sleep, so only a stalled machine reaches it
IDLE_SECONDS = 60.0  # without a request the process ends
# While the new process is still in our process group, the terminal's signals reach it too.
TERMINAL_SIGNALS = {signal.SIGINT, signal.SIGQUIT, signal.SIGTSTP, signal.SIGHUP}


def interpreter() -> str:
    """Return the path of a Python interpreter that can run a script.

    That is COPPICE_PYTHON if it is set. Otherwise it is `sys.executable`, but not in an application that embeds Python
    or is frozen, where that is the application: there it is the installation's own interpreter.

    Raises:
        UsageError: there is none.
    """
    if chosen := os.environ.get(VARIABLE):
        if path := shutil.which(chosen):
            return path
        raise UsageError(
            f"{VARIABLE} names no executable file", where=chosen, remedy="give the path of a Python 3 interpreter"
        )
    found = [sys.executable, getattr(sys, "_base_executable", "")]
    if getattr(sys, "frozen", False):
        found = []
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    for folder in (sysconfig.get_config_var("BINDIR"), os.path.join(sys.base_prefix, "bin")):
        found += [os.path.join(folder, name) for name in (version, "python3") if folder]
    for path in found:
        if path and re.match(r"python|pypy", os.path.basename(path), re.IGNORECASE) and _runs(path):
            return path
    raise UsageError(
        "a chat template is rendered in a process of its own, and no Python interpreter was found for it",
        where=f"this process is {sys.executable or 'an application without sys.executable'}",
        remedy=f"set {VARIABLE} to a Python 3 interpreter, or leave the template out (--chat-template none)",
    )


def _runs(path: str) -> bool:
    return os.path.isabs(path) and os.path.isfile(path) and os.access(path, os.X_OK)


def ask(request: dict[str, Any], seconds: float = WALL_SECONDS) -> dict[str, Any] | None:
    """Have a request answered by this process's sandbox; threads take turns.

    Args:
        request: see `engine.text.sandbox.answer` and `engine.text.sandbox.split`.
        seconds: after which, at the latest, the sandbox is ended.

    Returns:
        The answer; None if the request broke a limit, which ended the sandbox.

    Raises:
        UsageError: the sandbox cannot be started.
    """
    global _process
    with _lock:
        if _process is not None and not _process.alive():
            _end()
        process = _process = _process or _Process()
        try:
            reply = process.ask(request, seconds)
        except BaseException:  # also Ctrl-C: a late reply would answer the next request
            _end()
            raise
        if reply is None or reply.pop("spent", None):
            _end()
        return reply


class _Process:
    """A running sandbox. Not to be used by two threads at once, except for `close`."""

    def __init__(self):
        path = interpreter()
        # Folders of packages come after the library of the interpreter, which may be of another version.
        packages = jinja2, sys.modules["markupsafe"], tokenizers
        folders = {str(Path(package.__file__ or "").parent.parent) for package in packages}
        with _blocked(TERMINAL_SIGNALS):
            try:
                # A session of its own: Ctrl-C in the terminal must not reach the renderer.
                self._popen = subprocess.Popen(
                    [path, "-I", "-S", sandbox.__file__, *sorted(folders)],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.DEVNULL,
                    start_new_session=True,
                    bufsize=0,
                )
            except OSError as error:
                raise _failed(path, error.strerror or str(error)) from None
        assert self._popen.stdin and self._popen.stdout
        self._in, self._out = self._popen.stdin, self._popen.stdout
        os.set_blocking(self._in.fileno(), False)
        self._ended = threading.Event()
        try:
            reply = self._read(START_SECONDS)
            if reply is None or reply.get("ready") is not True:
                raise _failed(path, str((reply or {}).get("failed", f"it does not run {sandbox.__file__}")))
            self.used = time.monotonic()
            threading.Thread(target=self._expire, name="coppice-sandbox-idle", daemon=True).start()
        except BaseException:
            self.close()
            raise

    @property
    def pid(self) -> int:
        return self._popen.pid

    def alive(self) -> bool:
        return self._popen.poll() is None

    def ask(self, request: dict[str, Any], seconds: float = WALL_SECONDS) -> dict[str, Any] | None:
        """Send a request; None when the process is dead or did not answer in time."""
        deadline = time.monotonic() + seconds
        try:
            sent = self._write(json.dumps(request).encode() + b"\n", deadline)
        except BrokenPipeError:
            return None
        reply = self._read(deadline - time.monotonic()) if sent else None
        self.used = time.monotonic()
        return reply

    def close(self) -> None:
        """End the process, for good and without a zombie."""
        self._ended.set()
        self._popen.kill()
        self._popen.wait()
        self._in.close()
        self._out.close()

    def abandon(self) -> None:
        """Drop the process in a fork: it belongs to the parent."""
        self._popen.returncode = 0  # do not wait for it
        self._in.close()
        self._out.close()

    def _write(self, data: bytes, deadline: float) -> bool:
        left = memoryview(data)
        while left:
            if not _ready(self._in, select.POLLOUT, deadline):
                return False
            with contextlib.suppress(BlockingIOError):
                left = left[os.write(self._in.fileno(), left) :]
        return True

    def _read(self, seconds: float) -> dict[str, Any] | None:
        chunks, deadline = [], time.monotonic() + seconds
        while not chunks or not chunks[-1].endswith(b"\n"):
            if not _ready(self._out, select.POLLIN, deadline):
                return None
            if not (chunk := os.read(self._out.fileno(), 1 << 16)):
                return None
            chunks.append(chunk)
        try:
            reply = json.loads(b"".join(chunks))
        except ValueError:
            return None
        return reply if isinstance(reply, dict) else None

    def _expire(self) -> None:
        """In a thread: end the process when it was idle long enough."""
        while not self._ended.wait(max(0.0, self.used + IDLE_SECONDS - time.monotonic())):
            with _lock:
                if _process is self and time.monotonic() >= self.used + IDLE_SECONDS:
                    _end()
                elif _process is not self:
                    return


def _ready(pipe: IO[bytes], event: int, deadline: float) -> bool:
    poll = select.poll()  # `select.select` refuses descriptors from 1024 on
    poll.register(pipe, event)
    return bool(poll.poll(max(0.0, deadline - time.monotonic()) * 1000))


def _failed(path: str, why: str) -> UsageError:
    return UsageError(
        f"the process that renders chat templates cannot be started: {why}",
        where=path,
        remedy=f"set {VARIABLE} to a Python 3 interpreter, or leave the template out (--chat-template none)",
    )


@contextlib.contextmanager
def _blocked(signals: set[signal.Signals]) -> Iterator[None]:
    """Hold signals back from this thread, and from the processes that it starts."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


_lock = threading.Lock()
_process: _Process | None = None


def _end() -> None:
    global _process
    process, _process = _process, None
    if process is not None:
        process.close()


def _forked() -> None:
    """In a fork: leave the sandbox to the parent, and replace the lock, whose holder may be a thread of the parent."""
    global _lock, _process
    process, _process, _lock = _process, None, threading.Lock()
    if process is not None:
        process.abandon()


atexit.register(_end)
os.register_at_fork(after_in_child=_forked)
