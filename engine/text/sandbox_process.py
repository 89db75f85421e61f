"""The processes of the sandbox: one for all templates, one for all grammars, started when needed, ended when idle.

A grammar may take seconds, so templates have a process of their own and need not wait.
"""

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
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any

import jinja2
import tokenizers

from engine.errors import UsageError, reason_of
from engine.text import sandbox

VARIABLE = "COPPICE_PYTHON"  # environment variable: the interpreter
START_SECONDS = 60.0  # an interpreter's own start, on a machine that may be busy
WALL_SECONDS = 10.0  # in addition to the CPU limit; templates cannot sleep, so only a stalled machine reaches it
IDLE_SECONDS = 60.0  # without a request, after which the process ends
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
        "chat templates and grammars have processes of their own, and no Python interpreter was found for them",
        where=f"this process is {sys.executable or 'an application without sys.executable'}",
        remedy=f"set {VARIABLE} to a Python 3 interpreter, or leave the template out (--chat-template none)",
    )


def _runs(path: str) -> bool:
    return os.path.isabs(path) and os.path.isfile(path) and os.access(path, os.X_OK)


class Sandbox:
    """A process for requests of a kind; threads take turns.

    Args:
        task: what the process does, for messages.
        remedy: advice for the case that it cannot be started.
        packages: packages that it imports in addition to those of templates; the caller has imported them.

    Attributes:
        process: the running process; None if there is none.
    """

    def __init__(self, task: str, remedy: str, packages: Sequence[str] = ()):
        self.task, self.remedy, self.packages = task, remedy, packages
        self.lock = threading.Lock()
        self.process: _Process | None = None

    def ask(self, request: dict[str, Any], seconds: float = WALL_SECONDS) -> dict[str, Any] | None:
        """Send a request to the process.

        Args:
            request: see `engine.text.sandbox`: `answer`, `split` and `compile_grammar`.
            seconds: time after which the process is ended at the latest.

        Returns:
            The answer; None if the request broke a limit, which ended the process.

        Raises:
            UsageError: the process cannot be started.
        """
        with self.lock:
            if self.process is not None and not self.process.alive():
                self.end()
            process = self.process = self.process or _Process(self)
            try:
                reply = process.ask(request, seconds)
            except BaseException:  # also Ctrl-C: a late reply would answer the next request
                self.end()
                raise
            if reply is None or reply.pop("spent", None):
                self.end()
            return reply

    def end(self) -> None:
        """End the process; the next request starts another."""
        process, self.process = self.process, None
        if process is not None:
            process.close()

    def forked(self) -> None:
        """In a fork: leave the process to the parent, and replace the lock, whose holder may be a parent's thread."""
        process, self.process, self.lock = self.process, None, threading.Lock()
        if process is not None:
            process.abandon()

    def failed(self, path: str, why: str) -> UsageError:
        """The error for a process that cannot be started."""
        return UsageError(
            f"the process that {self.task} cannot be started: {why}",
            where=path,
            remedy=f"set {VARIABLE} to a Python 3 interpreter, or {self.remedy}",
        )


class _Process:
    """A running sandbox. Not to be used by two threads at once, except for `close`."""

    def __init__(self, sandbox_of: Sandbox):
        self._sandbox = sandbox_of
        path = interpreter()
        # Folders of packages come after the library of the interpreter, which may be of another version.
        packages = [jinja2, sys.modules["markupsafe"], tokenizers]
        packages += [sys.modules[name] for name in sandbox_of.packages]
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
                    env=os.environ | {"MALLOC_ARENA_MAX": "1"},  # further arenas would use up the address space
                )
            except OSError as error:
                raise sandbox_of.failed(path, reason_of(error)) from None
        assert self._popen.stdin and self._popen.stdout
        self._in, self._out = self._popen.stdin, self._popen.stdout
        os.set_blocking(self._in.fileno(), False)
        self._ended = threading.Event()
        try:
            reply = self._read(START_SECONDS)
            if reply is None or reply.get("ready") is not True:
                raise sandbox_of.failed(path, str((reply or {}).get("failed", f"it does not run {sandbox.__file__}")))
            self.used = time.monotonic()
            threading.Thread(target=self._expire, name="coppice-sandbox-idle", daemon=True).start()
        except BaseException:
            self.close()
            raise

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
        """End the process for good, without leaving a zombie."""
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
            with self._sandbox.lock:
                if self._sandbox.process is not self:
                    return
                if time.monotonic() >= self.used + IDLE_SECONDS:
                    self._sandbox.end()


def _ready(pipe: IO[bytes], event: int, deadline: float) -> bool:
    poll = select.poll()  # `select.select` refuses descriptors from 1024 on
    poll.register(pipe, event)
    return bool(poll.poll(max(0.0, deadline - time.monotonic()) * 1000))


@contextlib.contextmanager
def _blocked(signals: set[signal.Signals]) -> Iterator[None]:
    """Block signals in this thread, and in the processes that it starts."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


TEMPLATES = Sandbox("renders chat templates", "leave the template out (--chat-template none)")
GRAMMARS = Sandbox("compiles grammars", "leave the grammar out", ["llguidance"])
for _sandbox in (TEMPLATES, GRAMMARS):
    atexit.register(_sandbox.end)
    os.register_at_fork(after_in_child=_sandbox.forked)
