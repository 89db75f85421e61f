"""Observation of the driver's phases, for profilers."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol

from torch import Tensor

from engine.contract import Read


class PhaseObserver(Protocol):
    """An object that `Engine.observer` notifies of the phases of each step. Phases nest:

    - "step" contains "admit", "schedule", "run" and "commit", see `Driver.step`, and on a GPU "wait": for the answer of
      a pass that an earlier "run" launched;
    - "run" contains "pack", "forward", "logits", "log-softmax" and "fetch", see `Runner.evaluate`; for a CUDA graph
      the three in the middle occur only while it is recorded, and top sums that a CPU finds without rows need no
      "fetch". With an observer such sums are not computed by the call that evaluates the layers;
    - "search", inside any of them, is the time of a search's generator and of its `Evaluate.read`.

    The methods must not raise.
    """

    def begin(self, phase: str, batch: Any) -> None:
        """A phase begins; `batch` is the `Batch` of "run" and "commit", None in all other phases.

        The batch of a "run" that looks ahead has no shares yet.
        """

    def end(self, phase: str) -> None:
        """The phase that began last ends, possibly by an exception."""


_UNOBSERVED = nullcontext()


def phase(observer: PhaseObserver | None, name: str, batch: Any = None) -> AbstractContextManager[None]:
    """A context that notifies the observer of a phase; without an observer it does nothing."""
    return _UNOBSERVED if observer is None else _observed(observer, name, batch)


@contextmanager
def _observed(observer: PhaseObserver, name: str, batch: Any) -> Iterator[None]:
    observer.begin(name, batch)
    try:
        yield
    finally:
        observer.end(name)


def observed_read(observer: PhaseObserver, read: Read) -> Read:
    """An `Evaluate.read` whose time counts as the search's."""

    def run(logp_NV: Tensor, peaks_NB: Tensor | None) -> Tensor:
        with phase(observer, "search"):
            return read(logp_NV, peaks_NB)

    return run
