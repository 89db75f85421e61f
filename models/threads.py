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

INTERVAL, STALE = 0.2, 2.0  # shortest and longest time of a measurement, in seconds
PAUSE_SOFT = 1  # OpenMP's kind of pause that keeps the settings
Times = tuple[float, float, float]  # seconds: clock time, those used by all programs on these cores, by this process


class Threads:
    """Limits torch's threads while other programs use the cores.

    Args:
        cores: number of this process's cores; by default those that it may run on.
        read: returns the times so far, or None if the system does not give them; by default those of Linux.
    """

    def __init__(self, cores: int | None = None, read: Callable[[], Times | None] | None = None):
        numbers = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))
        self.cores = cores or len(numbers)
        self.free = float(self.cores)  # cores that other programs left free when last measured
        self._read = read or (lambda: _times(numbers))
        self._last = self._read()

    @contextlib.contextmanager
    def limited(self) -> Iterator[None]:
        """Context for steps and the packing of matrices, which use fewer of torch's threads if fewer cores are free."""
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
        """Return the number of threads that get a core each, at least 1."""
        if self._last is not None and time.monotonic() - self._last[0] >= INTERVAL:
            self._measure()
        return max(1, round(self.free))

    def ignore_others(self) -> None:
        """Use all of torch's threads from now on, for benchmarks that compare engines on equal numbers of threads."""
        self._last, self.free = None, float(self.cores)

    def _measure(self) -> None:
        last, now = self._last, self._read()
        self._last = now
        if last is None or now is None or now[0] - last[0] > STALE:  # an average over a pause means nothing
            return
        seconds = now[0] - last[0]
        others = (now[1] - last[1]) - (now[2] - last[2])
        self.free = self.cores - max(0.0, others) / seconds


def release_threads() -> None:
    """End the threads that OpenMP keeps for the calling thread; its next operator starts new ones.

    A thread that waits for its part of the next operator spins only while OpenMP has no more threads than there are
    cores, and the threads that it keeps for every thread of the program count. With more threads each operator wakes a
    sleeping one, several hundred times in a pass of 30 layers.
    """
    with contextlib.suppress(AttributeError, OSError):  # no OpenMP, or one without this function
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


MACHINE = Threads()  # one per process, because all engines share its cores
