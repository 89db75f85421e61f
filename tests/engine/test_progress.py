"""ProgressLine of long work on stderr."""

import io
import sys

import pytest

from engine import progress
from engine.progress import ProgressLine


class Stream(io.StringIO):
    def __init__(self, terminal):
        super().__init__()
        self.terminal = terminal

    def isatty(self):
        return self.terminal


@pytest.fixture
def clock(monkeypatch):
    now = [1000.0]
    monkeypatch.setattr(progress.time, "perf_counter", lambda: now[0])
    return now


def told(monkeypatch, clock, terminal):
    monkeypatch.setattr(sys, "stderr", stream := Stream(terminal))
    shown = ProgressLine(2.0)
    for seconds, text in ((1, "early"), (3, "first"), (3.01, "at once"), (4, "later")):
        clock[0] = 1000.0 + seconds
        shown.tell(text)
    shown.end(f"done in {shown.seconds:.0f} s")
    return stream.getvalue()


def test_a_file_gets_the_beginning_and_the_end(monkeypatch, clock):
    assert told(monkeypatch, clock, False) == "coppice: first\ncoppice: done in 4 s\n"


def test_a_terminal_gets_a_line_that_changes(monkeypatch, clock):
    lines = [f"\rcoppice: {text}\x1b[K" for text in ("first", "later", "done in 4 s")]
    assert told(monkeypatch, clock, True) == "".join(lines) + "\n"


@pytest.mark.parametrize("stderr", [None, Stream(False)])
def test_short_work_and_no_stderr_are_silent(stderr, monkeypatch, clock):
    monkeypatch.setattr(sys, "stderr", stderr)
    shown = ProgressLine(2.0 if stderr else 0.0)
    shown.tell("half")
    shown.end("done")
    assert stderr is None or stderr.getvalue() == ""
