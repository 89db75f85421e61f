"""The number of threads for a step or for packing a matrix: no more than the cores that other programs leave free.

The threads of an operator wait for each other. If one of them shares its core with another program, all wait until it
runs again; then two threads are slower than one.
"""

import contextlib
import ctypes
import os
import time
from collections.abc import Callable, Iterator

import torch

INTERVAL, STALE = 0.2, 2.0  # seconds that a measurement takes at least, and at most
PAUSE_SOFT = 1  # of OpenMP: keep the settings
Times = tuple[float, float, float]  # seconds: now, of all programs on these cores, of this process


class Threads:
    """Limits torch's threads while others use the cores.

    Args:
        cores: of this process; by default those that it may run on.
        read: returns the times so far, None where the system has none; by default those of Linux.
    """

    def __init__(self, cores: int | None = None, read: Callable[[], Times | None] | None = None):
        numbers = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))
        self.cores = cores or len(numbers)
        self.free = float(self.cores)  # of others, when last measured
        self._read = read or (lambda: _times(numbers))
        self._last = self._read()

    @contextlib.contextmanager
    def limited(self) -> Iterator[None]:
        """Steps and the packing of matrices run within: on fewer threads than torch has if fewer cores are free."""
        most = torch.get_num_threads()
        count = min(most, self.count()) if most > 1 else most
        if count == most:
            yield
            return
        torch.set_num_threads(count)
        try:
            yield
        finally:
            torch.set_num_threads(most)

    def count(self) -> int:
        """The number of threads that have cores of their own, at least 1."""
        if self._last is not None and time.monotonic() - self._last[0] >= INTERVAL:
            self._measure()
        return max(1, round(self.free))

    def ignore_others(self) -> None:
        """Steps get all of torch's threads from now on, as benchmarks want that compare engines on as many threads."""
        self._last, self.free = None, float(self.cores)

    def _measure(self) -> None:
        last, now = self._last, self._read()
        self._last = now
        if last is None or now is None or now[0] - last[0] > STALE:  # an average over a pause says nothing
            return
        seconds = now[0] - last[0]
        others = (now[1] - last[1]) - (now[2] - last[2])
        self.free = self.cores - max(0.0, others) / seconds


def release_threads() -> None:
    """End the threads that OpenMP keeps for the calling thread; its next operator starts new ones.

    A thread that waits for its part of the next operator spins only while OpenMP has no more threads than there are
    cores, and the threads that it keeps for every thread of the program count. With more of them each operator wakes a
    sleeping thread, several hundred times in a pass of 30 layers.
    """
    with contextlib.suppress(AttributeError, OSError):  # no OpenMP, or none that knows of this
        ctypes.CDLL(torch._C.__file__).omp_pause_resource_all(PAUSE_SOFT)


def _times(cores: set[int]) -> Times | None:
    try:
        with open("/proc/stat", encoding="ascii") as file:
            lines = [line.split() for line in file if line.startswith("cpu") and line[3].isdigit()]
        tick, busy = os.sysconf("SC_CLK_TCK"), 0
        for name, user, nice, system, _idle, _wait, hard, soft, *_ in lines:
            if int(name[3:]) in cores:
                busy += sum(map(int, (user, nice, system, hard, soft)))
    except (OSError, ValueError):
        return None
    return time.monotonic(), busy / tick, time.process_time()


MACHINE = Threads()  # of this process: all engines share its cores
