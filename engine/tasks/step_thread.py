"""The thread that steps services for many tasks, and the threads that check their requests."""

import asyncio
import contextlib
import queue
import sys
import threading
import traceback
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

import torch

from engine.errors import CoppiceError
from engine.request import Checked
from engine.service import Entry, News, Service, as_ours
from models.threads import release_threads

T = TypeVar("T")
CHECKS = 4  # requests checked at once, each of another client


class Checks:
    """Threads that check requests, those of a client one after another: no client waits for all checks of another."""

    def __init__(self, threads: int = CHECKS):
        self._threads = ThreadPoolExecutor(threads, "check")
        self._lock = threading.Lock()
        self._waiting: dict[str, deque[tuple[Future[Any], Callable[[], Any]]]] = {}  # in turn
        self._busy: set[str] = set()  # clients one of whose requests is being checked

    def submit(self, client: str, function: Callable[[], T]) -> "Future[T]":
        """Queue a call of a function for a client. Cancelling the future before the call prevents it."""
        future: Future[T] = Future()
        with self._lock:
            self._waiting.setdefault(client, deque()).append((future, function))
        self._threads.submit(self._run)
        return future

    def stop(self) -> None:
        """Accept no more functions; those that wait are still called."""
        self._threads.shutdown(wait=False)

    def _run(self) -> None:
        """In a thread: check requests, one of each client at a time, until there is none that can be checked."""
        client = None
        while True:
            with self._lock:
                if client is not None:
                    self._busy.discard(client)
                client = next((each for each in self._waiting if each not in self._busy), None)
                if client is None:
                    return
                mine = self._waiting.pop(client)
                future, function = mine.popleft()
                if mine:
                    self._waiting[client] = mine
                self._busy.add(client)
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(function())
                except Exception as error:
                    future.set_exception(error)
                except BaseException as error:  # a panic of a library, which would end the event loop
                    future.set_exception(RuntimeError(f"{type(error).__name__}: {error}"[:500]))
            del future, function


class StepThread:
    """A thread that steps services, and those that check requests: a long prompt or a grammar delays no step.

    `call` and `cancel` are for any thread, `check` and `submit` for coroutines of any event loop. When the thread ends,
    by `stop` or by a bug, the requests under way end with an error and later ones are refused: nothing waits for ever.
    """

    def __init__(self):
        self.services: list[Service] = []  # complete before `start`
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._ended, self._lock = "", threading.RLock()  # why calls are refused; finalizers may use `call`
        self._checks = Checks()
        self._threads = torch.get_num_threads()  # a new thread would begin with the library's number
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start the thread, unless it was started."""
        with self._lock:
            if self._thread is None:
                release_threads()  # started by loading: from now on another thread computes
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

    async def check(self, function: Callable[[], T], client: str = "") -> T:
        """Call a function in a checking thread, for a client; returns and raises what the function does. If
        the task is cancelled before that, the function is not called; if later, its result is dropped.

        Raises:
            CoppiceError: the thread has ended.
        """
        with self._lock:
            self._require()
            future = asyncio.wrap_future(self._checks.submit(client, partial(self._unless_ended, function)))
        try:
            return await future
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
        client: str = "",
    ) -> Entry:
        """Submit a request from a coroutine, whose event loop calls `hear`, also if the start fails.

        The entry belongs to the stepping thread. For arguments see `Entry`.

        Raises:
            CoppiceError: the thread has ended.
        """
        loop = asyncio.get_running_loop()

        def tell(news: News) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody listens
                loop.call_soon_threadsafe(hear, news)

        def start() -> None:
            try:
                service.submit(entry)
            except Exception as error:
                tell(News(0.0, outcome=as_ours(error, "the start failed")))

        entry = Entry(checked, tell, client, stream, wants)
        self.call(start)
        return entry

    def cancel(self, service: Service, entry: Entry) -> None:
        """Abandon a request: its pages are free before the next step. Without effect on one that has ended."""
        with contextlib.suppress(CoppiceError):  # the thread has ended, and all requests with it
            self.call(partial(service.cancel, entry))

    def stop(self) -> None:
        """End all requests with an error, return their pages, end the threads."""
        with self._lock:
            self._ended = self._ended or "the engine was closed"
            self._calls.put(None)
        self._checks.stop()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        torch.set_num_threads(self._threads)
        why = ""
        try:
            while self._take_calls():
                for service in self.services:
                    if service.busy:
                        self.step(service)
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

    @staticmethod
    def step(service: Service) -> None:
        """Step a service. An error of a pass, such as a machine out of memory, ends the requests under way; those that
        wait find a new driver and an empty pool."""
        try:
            service.step()
        except BaseException as error:  # libraries in other languages panic with one
            service.abandon(as_ours(error, "a forward pass failed"))
            service.report()

    def _take_calls(self) -> bool:
        """Make the waiting calls; if no request runs, wait for one. Returns False when the thread is to end."""
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
