"""The times of CUDA graphs as a search replays them, each between two events.

Nothing is replayed for the sake of a measurement: graphs of all buckets share the memory of their inputs.
"""

import contextlib
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import torch

from engine.step.runner import Runner

Times = dict[tuple[int, int, int], list[float]]  # seconds by bucket: tokens, words, trees


@contextlib.contextmanager
def graph_times(runner: Runner) -> Iterator[Times]:
    """Context that yields the seconds of all replays of graphs recorded before; complete after the block."""
    steps = [(key, step) for key, step in getattr(runner, "_steps", {}).items() if step.replay is not None]
    marks: dict[tuple[int, int, int], list[tuple[Any, Any]]] = defaultdict(list)
    replays, times = [step.replay for _, step in steps], Times()

    def timed(key: tuple[int, int, int], replay: Callable[[], None]) -> Callable[[], None]:
        def run() -> None:
            before = mark(runner.device)
            replay()
            marks[key].append((before, mark(runner.device)))

        return run

    for key, step in steps:
        step.replay = timed(key, step.replay)
    try:
        yield times
    finally:
        for (_, step), replay in zip(steps, replays, strict=True):
            step.replay = replay
        if runner.device.type == "cuda":
            torch.cuda.synchronize()  # the last pass may be a guess that nothing waited for
        times |= {key: [seconds(*pair) for pair in pairs] for key, pairs in marks.items()}


def largest(times: Times) -> float | None:
    """The median of the bucket with the most trees, then the most tokens; None if nothing was replayed."""
    key = max(times, key=lambda key: (key[2], key[0]), default=None)
    return None if key is None else statistics.median(times[key])


def mark(device: torch.device) -> Any:
    """A point of time on a device."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def seconds(before: Any, after: Any) -> float:
    """The seconds between two points."""
    return after - before if isinstance(before, float) else before.elapsed_time(after) / 1e3
