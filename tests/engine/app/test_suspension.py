"""Ctrl-Z and `fg`, under real shells and without one: prompt, typed text and terminal modes come back."""

import os
import shutil
import signal
import sys
import termios
import time

import pytest

from engine.app import suspension
from engine.app.suspension import Suspension
from tests.engine.app.typist import CHAT, REPLY, Typist

SHELLS = {"bash": ["--norc", "-i"], "dash": ["-i"]}
LONG = [*CHAT, "--ignore-eos", "--max-new-tokens", "50000"]


@pytest.mark.parametrize("shell", SHELLS)
def test_suspended_and_continued_by_a_shell(shell, long):
    path = shutil.which(shell)
    if path is None:
        pytest.skip(f"{shell} is not installed")
    with Typist(path, *SHELLS[shell], job_control=True, PS1="SHELL$ ") as person:
        person.wait_for(r"SHELL\$ ")
        person.type(" ".join([*LONG, "--model", long]) + "\n")
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
        person.wait_for(r"a time\r\n" + REPLY)
        assert not person.echoes
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


def test_continued_after_a_stop_that_cannot_be_handled(long):
    """And Ctrl-Z where nothing can stop the process: it leads its session, so no shell would continue it."""
    with Typist(*LONG, "--model", long, job_control=True) as person:
        person.wait_for(r"Ctrl-D leaves.*> ")
        person.type("Once")
        person.wait_for("Once")
        person.type("\x1a")
        person.wait_for(r"> Once")
        person.change_modes(termios.ECHO | termios.ICANON)
        person.wait_for(r"> Once")
        person.type(" upon\n")
        person.wait_for(r"upon\r\n" + REPLY)  # before that, it is still at the prompt
        assert not person.echoes
        person.change_modes(termios.ECHO)
        assert person.echo_becomes(False)
        person.type("\x1a")
        time.sleep(0.3)
        assert person.echo_becomes(False)  # it is on while the process tries to stop
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
