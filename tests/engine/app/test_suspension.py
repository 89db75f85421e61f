"""Ctrl-Z and `fg`, under real shells and without one: prompt, typed text and terminal modes come back."""

import contextlib
import fcntl
import os
import pty
import re
import select
import shutil
import signal
import subprocess
import sys
import termios
import time
from pathlib import Path

import pytest

from engine.app import suspension
from engine.app.suspension import Suspension
from tools.random_checkpoint import make

ROOT = Path(__file__).parents[3]
SHELLS = {"bash": ["--norc", "-i"], "dash": ["-i"]}
CHAT = [sys.executable, "-m", "engine.chat", "--kv-memory", "64M", "--ignore-eos", "--max-new-tokens", "50000"]


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("long")
    return make(folder, layers=2, width=32, mlp=64, heads=2, vocab=400, max_positions=60000)["path"]


class Terminal:
    """Somebody at a terminal that has job control, and the process that leads its session."""

    def __init__(self, argv: list[str]):
        self.master, slave = pty.openpty()
        env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "TERM": "xterm", "PS1": "SHELL$ "}

        def lead() -> None:
            os.setsid()
            fcntl.ioctl(0, termios.TIOCSCTTY, 0)
            for number in (signal.SIGINT, signal.SIGTSTP, signal.SIGCONT):
                signal.signal(number, signal.SIG_DFL)

        self.process = subprocess.Popen(argv, env=env, stdin=slave, stdout=slave, stderr=slave, preexec_fn=lead)
        os.close(slave)
        self.seen = b""

    def wait_for(self, pattern: str) -> str:
        deadline = time.monotonic() + 60
        while not (found := re.search(pattern.encode(), self.seen, re.DOTALL)):
            assert time.monotonic() < deadline, (pattern, self.seen[-2000:])
            if select.select([self.master], [], [], 3)[0]:
                with contextlib.suppress(OSError):
                    self.seen += os.read(self.master, 65536)
        before, self.seen = self.seen[: found.end()], self.seen[found.end() :]
        return before.decode(errors="replace")

    def type(self, text: str) -> None:
        os.write(self.master, text.encode())

    @property
    def echoes(self) -> bool:
        return bool(termios.tcgetattr(self.master)[3] & termios.ECHO)

    def echo_becomes(self, wanted: bool) -> bool:
        deadline = time.monotonic() + 30
        while self.echoes != wanted and time.monotonic() < deadline:
            time.sleep(0.02)
        return self.echoes == wanted

    def __enter__(self) -> "Terminal":
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self.master)  # hangs up: what runs there ends
        self.process.kill()
        self.process.wait()


@pytest.mark.parametrize("shell", SHELLS)
def test_suspended_and_continued_by_a_shell(shell, model):
    path = shutil.which(shell)
    if path is None:
        pytest.skip(f"{shell} is not installed")
    with Terminal([path, *SHELLS[shell]]) as person:
        person.wait_for(r"SHELL\$ ")
        person.type(" ".join([*CHAT, "--model", model]) + "\n")
        person.wait_for(r"Ctrl-D leaves.*> ")
        person.type("Once upon")
        person.wait_for("Once upon")
        for _ in range(2):
            person.type("\x1a")
            person.wait_for(r"Stopped.*SHELL\$ ")
            if shell == "dash":  # bash edits its lines itself, with modes of its own
                assert person.echoes
            person.type("fg\n")
            person.wait_for(r"> Once upon")  # the prompt and what was typed
        person.type(" a time\n")
        person.wait_for(r"a time\r\n")
        assert person.echo_becomes(False)
        time.sleep(0.3)
        person.type("\x1a")  # while it answers
        person.wait_for(r"Stopped.*SHELL\$ ")
        if shell == "dash":
            assert person.echoes
        person.type("fg\n")
        person.wait_for(r"engine\.chat[^\n]*\n")
        assert person.echo_becomes(False)
        person.type("not shown")
        time.sleep(0.3)
        person.type("\x03")
        assert "not shown" not in person.wait_for(r"\[interrupted\].*> ")
        person.type("/stats\n")
        assert "1 turn" in person.wait_for(r"/stats.*turn.*> ")
        person.type("/exit\n")
        person.wait_for(r"SHELL\$ ")


def test_continued_after_a_stop_that_cannot_be_handled(model):
    """And Ctrl-Z where nothing can stop the process: it leads its session, so no shell would continue it."""
    with Terminal([*CHAT, "--model", model]) as person:
        person.wait_for(r"Ctrl-D leaves.*> ")
        person.type("Once")
        person.wait_for("Once")
        person.type("\x1a")
        person.wait_for(r"> Once")
        person.process.send_signal(signal.SIGSTOP)
        time.sleep(0.2)
        modes = termios.tcgetattr(person.master)
        modes[3] |= termios.ECHO | termios.ICANON  # as a shell sets them
        termios.tcsetattr(person.master, termios.TCSANOW, modes)
        person.process.send_signal(signal.SIGCONT)
        person.wait_for(r"> Once")
        person.type(" upon\n")
        person.wait_for(r"upon\r\n")
        assert person.echo_becomes(False)
        person.process.send_signal(signal.SIGSTOP)
        time.sleep(0.2)
        modes = termios.tcgetattr(person.master)
        modes[3] |= termios.ECHO
        termios.tcsetattr(person.master, termios.TCSANOW, modes)
        person.process.send_signal(signal.SIGCONT)
        assert person.echo_becomes(False)
        person.type("\x1a")
        time.sleep(0.3)
        assert not person.echoes
        person.type("\x03")
        person.wait_for(r"\[interrupted\].*> ")
        person.type("\x04")
        assert person.process.wait(30) == 0


def test_asked_again_after_each_stop(monkeypatch):
    stops = []
    monkeypatch.setattr(signal, "pthread_kill", lambda _, number: stops.append(number))
    monkeypatch.setattr(suspension, "_in_foreground", lambda: True)
    asked = iter([signal.SIGTSTP, signal.SIGCONT, None])

    def read() -> str:
        if (number := next(asked)) is not None:
            signal.raise_signal(number)
        return "line"

    before = signal.getsignal(signal.SIGTSTP), signal.getsignal(signal.SIGCONT)
    with Suspension() as handled:
        assert handled.ask(read) == "line"
        signal.raise_signal(signal.SIGCONT)  # nobody is asked
    assert stops == [signal.SIGTSTP]
    assert before == (signal.getsignal(signal.SIGTSTP), signal.getsignal(signal.SIGCONT))


def test_in_the_background_nothing_is_drawn(monkeypatch):
    monkeypatch.setattr(suspension, "_in_foreground", lambda: False)
    with Suspension() as handled:
        assert handled.ask(lambda: (signal.raise_signal(signal.SIGCONT), "line")[1]) == "line"


def test_a_process_that_ignores_the_key_goes_on_ignoring_it():
    before = signal.signal(signal.SIGTSTP, signal.SIG_IGN)
    try:
        with Suspension() as handled:
            assert handled.ask(lambda: (signal.raise_signal(signal.SIGTSTP), "line")[1]) == "line"
        assert signal.getsignal(signal.SIGTSTP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGTSTP, before)


def test_modes_are_set_although_signals_come_between(monkeypatch):
    calls = []

    def interrupted(*_: object) -> None:
        calls.append(1)
        if len(calls) < 3:
            raise termios.error(4, "Interrupted system call")
        raise termios.error(5, "Input/output error")  # the terminal is gone

    monkeypatch.setattr(termios, "tcsetattr", interrupted)
    monkeypatch.setattr(sys, "stdin", open(os.devnull))  # noqa: SIM115
    suspension._set_modes([])
    assert len(calls) == 3
    sys.stdin.close()
