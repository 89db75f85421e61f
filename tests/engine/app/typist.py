"""Tests of command lines: random models, a process at a pseudo-terminal, and somebody who types there and reads."""

import contextlib
import fcntl
import io
import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import termios
import time
from pathlib import Path
from typing import Any

from tools.random_checkpoint import make

ROOT = Path(__file__).parents[3]
CHAT = (sys.executable, "-m", "engine.chat", "--kv-memory", "64M")
STATUS = r"(?:\x1bD)+\x1b\[\d+A\x1b7.*?\x1b8|\x1b\[J"  # drawn and erased before the text, if that takes its time
REPLY = rf"(?:\x1b\[\?2004l\r)?(?:{STATUS})*[^\x1b]{{12}}"  # a prompt that is drawn again has other sequences sooner

SHAPE = {"layers": 2, "width": 32, "mlp": 64, "heads": 2, "vocab": 400}


class Terminal(io.StringIO):
    """A stream that claims to be a terminal."""

    def isatty(self) -> bool:
        return True


def make_templated(folder: Path, template: str) -> str:
    """A model with a chat template; returns its folder."""
    make(folder, max_positions=512, **SHAPE)
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"chat_template": template}))
    return str(folder)


def spawn(*argv: str, lead: Any = None, environment: dict[str, str] | None = None, **options: Any) -> subprocess.Popen:
    """A process that finds this project, with the signals' default actions.

    Args:
        argv: the command.
        lead: called in the new process, too.
        environment: variables to add.
    """

    def prepare() -> None:
        for number in (signal.SIGINT, signal.SIGTSTP, signal.SIGCONT):
            signal.signal(number, signal.SIG_DFL)
        if lead is not None:
            lead()

    variables = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "TERM": "xterm", **(environment or {})}
    variables.pop("NO_COLOR", None)
    return subprocess.Popen(argv, env=variables, preexec_fn=prepare, **options)


class Typist:
    """Somebody at the terminal of a process, which leads its session.

    Args:
        argv: the command.
        job_control: the terminal is the session's.
        environment: variables to add.

    Attributes:
        before, matched: see `wait_for`.
    """

    def __init__(self, *argv: str, job_control: bool = False, **environment: str):
        self.master, slave = pty.openpty()
        lead = (lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0)) if job_control else None
        files = {"stdin": slave, "stdout": slave, "stderr": slave}
        self.process = spawn(*argv, lead=lead, environment=environment, start_new_session=True, **files)
        os.close(slave)
        self.seen = b""  # and not waited for
        self.job_control = job_control

    def wait_for(self, pattern: str) -> str:
        """Read until the pattern comes; returns all that came, `before` it and what `matched`."""
        deadline = time.monotonic() + 120
        while not (found := re.search(pattern.encode(), self.seen, re.DOTALL)):
            assert time.monotonic() < deadline, (pattern, self.seen[-2000:])
            if select.select([self.master], [], [], 3)[0]:
                with contextlib.suppress(OSError):
                    self.seen += os.read(self.master, 65536)
        self.before, self.matched = (x.decode(errors="replace") for x in (self.seen[: found.start()], found[0]))
        self.seen = self.seen[found.end() :]
        return self.before + self.matched

    def type(self, text: str) -> None:
        """Press these keys."""
        os.write(self.master, text.encode())

    def interrupt(self) -> None:
        """Send the signal of Ctrl-C, for a terminal that is not the session's."""
        self.process.send_signal(signal.SIGINT)

    @property
    def echoes(self) -> bool:
        """Whether the terminal shows what is typed."""
        return bool(termios.tcgetattr(self.master)[3] & termios.ECHO)

    def hang_up(self) -> None:
        """Close the terminal."""
        if self.master >= 0:
            os.close(self.master)
        self.master = -1

    def __enter__(self) -> "Typist":
        return self

    def __exit__(self, *_: object) -> None:
        if self.job_control:
            self.hang_up()  # what a shell runs there ends
        self.process.kill()
        self.process.wait()
        self.hang_up()
