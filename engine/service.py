"""Requests that come and go while one driver steps them all: the engine of a server."""

from collections.abc import Callable
from dataclasses import dataclass

from engine.driver import Driver
from engine.engine import Engine, Request, _Prepared
from engine.errors import CoppiceError
from engine.jobs import Job
from engine.requests import SearchResult
from engine.text.stopping import TextStream

Checked = _Prepared  # a request after `Service.check`
Outcome = SearchResult | CoppiceError


@dataclass(frozen=True)
class News:
    """What a step did for one request.

    Attributes:
        began: when the search started, by `time.perf_counter`.
        text: further text of the best output, which is certain.
        outcome: the result or the error; None while the search runs.
    """

    began: float
    text: str = ""
    outcome: Outcome | None = None


@dataclass(eq=False)
class Entry:
    """A request under way.

    Attributes:
        tell: called with every `News`, by the thread that steps; it must not raise.
        text: makes text of settled tokens; None if the caller wants the result alone.
        told: whether `tell` was called, which happens first when the search starts.
    """

    checked: Checked
    tell: Callable[[News], None]
    text: TextStream | None
    told: bool = False

    @property
    def job(self) -> Job:
        return self.checked.job


class Service:
    """Steps the requests of one engine. All methods but `check` belong to one thread, `check` to one thread as well.

    An error of a request ends that request. An error of a step, such as a machine out of memory, ends those that were
    under way; the next request finds a new driver and an empty pool.
    """

    def __init__(self, engine: Engine):
        self.engine = engine
        self.driver: Driver = engine._driver()
        self.entries: list[Entry] = []

    def check(self, request: Request) -> Checked:
        """Check a request against the model and its memory; compiles its grammar. Raises UsageError, KVMemoryError."""
        return self.engine._prepare(request)

    def submit(self, checked: Checked, tell: Callable[[News], None], *, stream: bool = False) -> Entry:
        """Queue a request; `stream`: its text is wanted as soon as it is certain."""
        text = TextStream(self.engine.model.tokenizer, checked.request.stop) if stream else None
        entry = Entry(self.engine._start(self.driver, checked), tell, text)
        self.entries.append(entry)
        return entry

    def cancel(self, entry: Entry) -> None:
        """Abandon a request: its pages return to the pool now. Without effect on one that has ended."""
        if entry in self.entries:
            self.entries.remove(entry)
            self.driver.cancel(entry.job)
            entry.job.error = None  # see `Engine._submit`

    @property
    def busy(self) -> bool:
        return self.driver.busy

    def step(self) -> None:
        """Evaluate one pass, and tell what it did."""
        try:
            self.engine._step(self.driver)
            for entry in [*self.entries]:
                self._report(entry)
        except BaseException as error:  # also what libraries in other languages raise when they panic
            self._fail(error)

    def close(self) -> None:
        """Abandon all requests and return their pages."""
        entries, self.entries = self.entries, []
        self.driver.close()
        for entry in entries:
            entry.job.error = None

    def _report(self, entry: Entry) -> None:
        job, text = entry.job, ""
        if not job.started:  # it waits in the driver's queue
            return
        if entry.text is not None and job.settled:
            text = entry.text.push(job.settled)
        outcome = None
        if job.done:
            self.entries.remove(entry)
            outcome = self.engine._outcome(entry.checked)
            if entry.text is not None and isinstance(outcome, SearchResult):
                text += entry.text.finish(outcome.outputs[0].text)
        if text or outcome is not None or not entry.told:
            entry.told = True
            entry.tell(News(job.started, text, outcome))

    def _fail(self, error: BaseException) -> None:
        """End all requests with an error, and begin afresh."""
        if not isinstance(error, CoppiceError):
            failure = CoppiceError(f"a forward pass failed: {type(error).__name__}: {error}"[:500])
            failure.__cause__ = error
            error = failure
        entries, work = self.entries, self.driver.work
        self.close()
        self.driver = self.engine._driver()
        self.driver.work = work
        for entry in entries:
            entry.tell(News(entry.job.started, outcome=error))
