"""Ctrl-Z and `fg` under a shell: the chat goes on, at its prompt and in a reply."""

import shutil

import pytest

from tests.engine.app.typist import CHAT, REPLY, Typist


@pytest.mark.skipif(shutil.which("bash") is None, reason="bash is not installed")
def test_suspended_and_continued_by_a_shell(long):
    with Typist(shutil.which("bash") or "", "--norc", "-i", job_control=True, PS1="SHELL$ ") as person:
        person.wait_for(r"SHELL\$ ")
        person.type(" ".join([*CHAT, "--ignore-eos", "--max-new-tokens", "50000", "--model", long]) + "\n")
        person.wait_for(r"Ctrl-D leaves.*> ")
        person.type("Once upon")
        person.wait_for("Once upon")
        person.type("\x1a")
        person.wait_for(r"Stopped.*SHELL\$ ")
        person.type("fg\n")
        person.wait_for(r"engine\.chat[^\n]*\n")
        person.type(" a time\n")
        person.wait_for(r"a time\r\n" + REPLY)
        person.type("\x1a")  # while it answers
        person.wait_for(r"Stopped.*SHELL\$ ")
        person.type("fg\n")
        person.wait_for(r"engine\.chat[^\n]*\n.{12}")  # the reply goes on: the terminal is the chat's again
        person.type("\x03")
        person.wait_for(r"\[interrupted\].*> ")
        person.type("And then\n")
        person.wait_for(r"And then\r\n" + REPLY)
        assert not person.echoes  # as before the first stop
        person.type("\x03")
        person.wait_for(r"\[interrupted\].*> ")
        person.type("/stats\n")
        assert "2 turn" in person.wait_for(r"/stats.*turn.*> ")
        person.type("/exit\n")
        person.wait_for(r"SHELL\$ ")
