"""Stages run in a process of their own, so that one that ends the process, or never ends, leaves the others."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from engine.errors import UsageError
from tools.bench.gpu.journal import Journal
from tools.bench.measure import progress

PATIENCE = 120  # seconds in which a case ends, or something is wrong
PERIOD = 0.2  # seconds between looks
LOST = 75  # exit code of a process whose GPU answers no more, see `Setting.check_device`


def watch(
    command: Sequence[str],
    journal: Journal,
    stages: Sequence[str],
    end: float,
    patience: Callable[[str], float] = lambda stage: PATIENCE,
) -> None:
    """Run the stages that the journal lacks in a process; if it ends too early, another process runs the rest.

    Args:
        command: of a process that writes into the journal.
        end: on the clock `time.time`; a process that still runs then is ended.
        patience: seconds without a line in the journal, by the stage under way, after which a process is ended.

    Raises:
        UsageError: the process says that its command is wrong.
    """
    while (left := [name for name in stages if name not in journal.stages]) and time.time() < end:
        before = {*journal.ended}
        why = ended(command, journal, end, patience)
        journal.catch_up()
        if not why and not [name for name in left if name not in journal.stages]:
            return
        why = why or "the process ended without it"
        of_stages = {stage for stage, _ in journal.ended.keys() - before}
        if len(journal.begun) == 1 and journal.begun[0][0] in of_stages:  # between two cases: the first got its note
            journal.stage = journal.begun[0][0]
        elif not journal.blame(why):
            progress(f"no stage had begun when the process ended: {why}")
            return
        progress(f"{journal.stage}: {why}; a new process goes on")


def ended(command: Sequence[str], journal: Journal, end: float, patience: Callable[[str], float]) -> str:
    """Run a process to its end; returns why it ended too early, or ""."""
    assert journal.path is not None
    process = subprocess.Popen(command, process_group=0)  # to be ended with what it starts itself
    try:
        seen, since, stage = size_of(journal.path), time.time(), ""
        while (code := process.poll()) is None:
            if (size := size_of(journal.path)) != seen:
                seen, since = size, time.time()
                journal.catch_up()
                stage = journal.begun[-1][0] if journal.begun else ""
            now, most = time.time(), patience(stage)
            if now > end:
                return "the time is over"
            if now - since > most:
                return f"nothing ended in {most:.0f} s"
            time.sleep(PERIOD)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    if code == UsageError.exit_code:
        raise UsageError("the stages were not run, see above")
    if code == LOST:
        return "the GPU answered no more"
    return "" if code == 0 else f"the process ended with exit code {code}"


def size_of(path: Path) -> int:
    """Bytes of a file; 0 if it is not there."""
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def leave() -> None:
    """End this process at once: its GPU is lost, and freeing memory could wait for it."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(LOST)


def end_with_parent() -> None:
    """Have this process end when the one that watches it does, however that ends."""
    parent = os.getppid()

    def look() -> None:
        while os.getppid() == parent:
            time.sleep(PERIOD)
        os._exit(1)

    threading.Thread(target=look, daemon=True).start()


@contextlib.contextmanager
def ending_on_signals() -> Iterator[None]:
    """Context in which SIGTERM raises SystemExit, so that a process that was started here ends first."""

    def stop(*_: object) -> None:
        raise SystemExit(143)

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
