"""Requests that come and go while one driver steps them all, and the thread that steps."""

import asyncio
import contextlib
import queue
import sys
import threading
import traceback
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

import torch

from engine.driver import Driver
from engine.engine import Engine, Prefill, Progress, Request, _event_of, _Prepared
from engine.errors import CoppiceError
from engine.jobs import Job
from engine.requests import SearchResult
from engine.text.stopping import TextStream

T = TypeVar("T")
Checked = _Prepared  # a request after `Service.check`
Outcome = SearchResult | CoppiceError


@dataclass(frozen=True)
class News:
    """What a step did for one request.

    Attributes:
        began: when the search started, by `time.perf_counter`.
        text: further text of the best output, which is certain.
        outcome: the result or the error; None while the search runs.
        event: the state of the search, if `Entry.wants` is set; what its report says is computed already.
    """

    began: float
    text: str = ""
    outcome: Outcome | None = None
    event: Prefill | Progress | None = None


@dataclass(eq=False)
class Entry:
    """A request under way.

    Attributes:
        tell: called with every `News`, by the thread that steps; it must not raise.
        text: makes text of settled tokens; None if the caller wants the result alone.
        wants: set by the caller while it waits for the next event; None if it wants none.
        told: whether `tell` was called, which happens first when the search starts.
        seen: the latest event.
    """

    checked: Checked
    tell: Callable[[News], None]
    text: TextStream | None
    wants: threading.Event | None = None
    told: bool = False
    seen: Prefill | Progress | None = None

    @property
    def job(self) -> Job:
        return self.checked.job


class Service:
    """Steps the requests of one engine. All methods but `check` belong to one thread, `check` to one thread as well.

    An error of a request ends that request. An error of a pass, such as a machine out of memory, ends those that were
    under way; the next request finds a new driver and an empty pool.
    """

    def __init__(self, engine: Engine):
        self.engine = engine
        self.driver: Driver = engine._driver()
        self.entries: list[Entry] = []

    def check(self, request: Request) -> Checked:
        """Check a request against the model and its memory; compiles its grammar. Raises UsageError, KVMemoryError."""
        return self.engine._prepare(request)

    def submit(
        self,
        checked: Checked,
        tell: Callable[[News], None],
        *,
        stream: bool = False,
        wants: threading.Event | None = None,
    ) -> Entry:
        """Queue a request; `stream`: its text is wanted as soon as it is certain. `tell`, `wants`: see `Entry`."""
        text = TextStream(self.engine.model.tokenizer, checked.request.stop) if stream else None
        entry = Entry(self.engine._start(self.driver, checked), tell, text, wants)
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
        except BaseException as error:  # libraries in other languages panic with one
            self.end(_ours(error, "a forward pass failed"))
        for entry in [*self.entries]:
            try:
                self._report(entry)
            except BaseException as error:
                self.cancel(entry)
                entry.tell(News(entry.job.started, outcome=_ours(error, "the answer failed")))

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
        outcome = event = None
        if job.done:
            outcome = self.engine._outcome(entry.checked)
            if entry.text is not None and isinstance(outcome, SearchResult):
                text += entry.text.finish(outcome.outputs[0].text)
            self.entries.remove(entry)
        elif entry.wants is not None and entry.wants.is_set():
            event = self._event(entry)
        if text or event or outcome is not None or not entry.told:
            entry.told = True
            entry.tell(News(job.started, text, outcome, event))

    @staticmethod
    def _event(entry: Entry) -> Prefill | Progress | None:
        """The state of a search, if it is new."""
        event = _event_of(entry.job, entry.seen)
        if event is None:
            return None
        assert entry.wants is not None
        entry.wants.clear()
        entry.seen = event
        if not isinstance(event, Progress):
            return event
        report, tree = event.report, event.tree
        best, beams = report.best and [*report.best()], report.beams and [*report.beams()]
        ready = {} if best is None else {"best": lambda: best}
        ready |= {} if beams is None else {"beams": lambda: beams}
        return Progress(replace(report, **ready), tree)

    def end(self, error: CoppiceError) -> None:
        """End all requests with an error, and begin afresh."""
        entries, work = self.entries, self.driver.work
        try:
            self.close()
        finally:
            self.driver = self.engine._driver()
            self.driver.work = work
            for entry in entries:
                entry.tell(News(entry.job.started, outcome=error))


@dataclass(eq=False)
class Handle:
    """A request that `StepThread.submit` has taken; its fields belong to the stepping thread.

    Attributes:
        entry: None until the request is submitted to its service.
        gone: cancelled before that.
    """

    service: Service
    entry: Entry | None = None
    gone: bool = False


class StepThread:
    """A thread that steps services, and one that checks requests: a long prompt or a grammar delays no step.

    `call` and `cancel` are for any thread, `check` and `submit` for coroutines of any event loop. When the thread ends,
    by `stop` or by a bug, the requests under way end with an error and later ones are refused: nothing waits for ever.
    """

    def __init__(self):
        self.services: list[Service] = []  # complete before `start`
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._ended, self._lock = "", threading.RLock()  # why no call is taken any more; `call` may be a finalizer's
        self._checks = ThreadPoolExecutor(1, "check")
        self._threads = torch.get_num_threads()  # a new thread would begin with the library's number
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start the thread, unless it was started."""
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="step", daemon=True)
                self._thread.start()

    @property
    def alive(self) -> bool:
        """Whether the thread still steps."""
        return self._thread is not None and self._thread.is_alive()

    def call(self, function: Callable[[], None]) -> None:
        """Have the stepping thread call a function before its next step. Raises CoppiceError: the thread has ended."""
        with self._lock:
            self._require()
            self._calls.put(function)

    async def check(self, function: Callable[[], T]) -> T:
        """Call a function in the checking thread; returns and raises what the function does.

        Raises:
            CoppiceError: the thread has ended.
        """
        with self._lock:
            self._require()
            future = asyncio.wrap_future(self._checks.submit(self._unless_ended, function))
        try:
            return await future
        finally:
            del future  # an error's traceback refers to this frame

    async def run(self, function: Callable[[], T]) -> T:
        """Call a function in the stepping thread, between two steps; returns and raises what the function does.

        Raises:
            CoppiceError: the thread has ended.
        """
        future: Future[T] = Future()
        self.call(partial(_fulfil, future, partial(self._unless_ended, function)))
        try:
            return await asyncio.wrap_future(future)
        finally:
            del future  # an error's traceback refers to this frame

    def _unless_ended(self, function: Callable[[], T]) -> T:
        self._require()
        return function()

    def _require(self) -> None:
        """Raises CoppiceError: the thread has ended."""
        if self._ended:
            raise CoppiceError(self._ended)

    def submit(
        self,
        service: Service,
        checked: Checked,
        hear: Callable[[News], None],
        *,
        stream: bool = False,
        wants: threading.Event | None = None,
    ) -> Handle:
        """As `Service.submit`, for a coroutine: its event loop calls `hear`, also with an error of the start.

        Raises:
            CoppiceError: the thread has ended.
        """
        handle, loop = Handle(service), asyncio.get_running_loop()

        def tell(news: News) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody listens
                loop.call_soon_threadsafe(hear, news)

        def start() -> None:
            if handle.gone:
                return
            try:
                handle.entry = service.submit(checked, tell, stream=stream, wants=wants)
            except Exception as error:
                tell(News(0.0, outcome=_ours(error, "the start failed")))

        self.call(start)
        return handle

    def cancel(self, handle: Handle) -> None:
        """Abandon a request: its pages are free before the next step. Without effect on one that has ended."""

        def stop() -> None:
            handle.gone = True
            if handle.entry is not None:
                handle.service.cancel(handle.entry)

        with contextlib.suppress(CoppiceError):  # the thread has ended, and all requests with it
            self.call(stop)

    def stop(self) -> None:
        """End all requests with an error, return their pages, end the threads."""
        with self._lock:
            self._ended = self._ended or "the engine was closed"
            self._calls.put(None)
        self._checks.shutdown(wait=False)
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        torch.set_num_threads(self._threads)
        why = ""
        try:
            while self._take_calls():
                for service in self.services:
                    if service.busy:
                        service.step()
        except BaseException as error:
            why = f"the thread that steps failed: {type(error).__name__}: {error}"[:500]
            raise
        finally:
            with self._lock:  # no call comes after those that wait
                self._ended = self._ended or why
            with contextlib.ExitStack() as endings:
                for service in self.services:
                    endings.callback(service.end, CoppiceError(self._ended))
                while not self._calls.empty():
                    self._make(self._calls.get())

    def _take_calls(self) -> bool:
        """Make the calls that wait, if nothing runs at least one. Returns False at the end."""
        with contextlib.suppress(queue.Empty):
            while True:
                call = self._calls.get(block=not any(service.busy for service in self.services))
                if call is None:
                    return False
                self._make(call)
        return True

    @staticmethod
    def _make(call: Callable[[], None] | None) -> None:
        try:
            if call is not None:
                call()
        except Exception:
            traceback.print_exc(file=sys.stderr)


def _fulfil(future: "Future[T] | None", function: Callable[[], T]) -> None:
    """Make a call that somebody waits for, unless it was cancelled."""
    if future is None or not future.set_running_or_notify_cancel():
        return
    try:
        future.set_result(function())
    except BaseException as error:
        future.set_exception(error)
        future = None  # the error's traceback refers to this frame


def _ours(error: BaseException, what: str) -> CoppiceError:
    """An error for those that wait; one that is not a CoppiceError becomes its cause."""
    if isinstance(error, CoppiceError):
        return error
    ours = CoppiceError(f"{what}: {type(error).__name__}: {error}"[:500])
    ours.__cause__ = error
    return ours
