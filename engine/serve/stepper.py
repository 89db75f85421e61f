"""One thread steps all models; the event loop sends it requests and receives their results."""

import asyncio
import contextlib
import gc
import math
import sys
import time
from collections import Counter, deque
from collections.abc import Iterator

from engine.contract import SearchResult
from engine.errors import CoppiceError
from engine.request import Checked
from engine.serve.metrics import Metrics
from engine.service import Entry, News, Outcome, Service
from engine.tasks.step_thread import StepThread

SWITCH_SECONDS = 1e-3  # after which Python switches from a checking thread to the stepping thread


class Busy(CoppiceError):
    """The queue is full; `seconds` is when to ask again."""

    code = "rate_limit_exceeded"

    def __init__(self, seconds: int):
        super().__init__("the queue is full", remedy=f"try again in {seconds} s")
        self.seconds = seconds


class Abandoned(CoppiceError):
    """The client left, or the time was up."""


class Ticket:
    """The event loop's part of a request that waits or runs.

    Attributes:
        outcome: the result or the error; None while it runs.
    """

    def __init__(self, lane: "Lane", client: str):
        self.lane, self.client = lane, client
        self.outcome: Outcome | None = None
        self.entry: Entry  # set when it is submitted
        self.asked, self.began, self.spoke = time.perf_counter(), 0.0, 0.0
        self._text = ""
        self._changed = asyncio.Event()

    def hear(self, news: News) -> None:
        """Take the results of a step. Text that is not fetched yet is joined, so a slow reader costs nothing more."""
        now = time.perf_counter()
        if not self.began:
            self.began = news.began or now
            self.lane.started(self)
        if news.text and not self.spoke:
            self.spoke = now
        self._text += news.text
        if news.outcome is not None and self.outcome is None:
            self.outcome = news.outcome
            self.lane.ended(self)
        self._changed.set()

    def abandon(self) -> None:
        """Give the request up: its client has left. A task that still waits gets the error."""
        self.outcome = Abandoned("the request was abandoned")
        self._changed.set()

    async def more(self) -> str:
        """The text since the last call, as soon as there is any; "" at the end, when there is an outcome."""
        while not self._text and self.outcome is None:
            self._changed.clear()
            await self._changed.wait()
        text, self._text = self._text, ""
        return text

    async def result(self) -> SearchResult:
        """The result, at the end. Raises the error that ended the request."""
        while self.outcome is None:
            self._changed.clear()
            await self._changed.wait()
        if isinstance(self.outcome, CoppiceError):
            raise self.outcome
        return self.outcome


def share(places: int, others: int, alone: bool) -> int:
    """How many of `places` a client may have: half of what others leave, so that there is room for the next client.

    Args:
        others: places that other clients have.
        alone: whether there can be no other client.
    """
    left = places - others
    return left if alone else min(left, max(1, left // 2))


class Lane:
    """The requests of one model, counted by the event loop; they run in its `Service`.

    Args:
        name: the model's name, for metrics.
        service: used only by the stepping thread, except `check`.
        queue: most requests that wait, not counting those that run.
    """

    def __init__(self, name: str, service: Service, queue: int, stepper: "Stepper"):
        self.name, self.service, self.queue, self.stepper = name, service, queue, stepper
        self.open: set[Ticket] = set()
        self.held: Counter[str] = Counter()  # places of requests that are still being checked, by client
        self._seconds: deque[float] = deque(maxlen=32)  # running times of the latest requests

    @property
    def places(self) -> int:
        """Most requests that run or wait."""
        return self.queue + self.service.parallel

    @property
    def most(self) -> int:
        """Most requests of one client."""
        return share(self.places, 0, self.service.alone)

    @property
    def running(self) -> int:
        return sum(1 for ticket in self.open if ticket.began)

    @property
    def waiting(self) -> int:
        return len(self.open) - self.running + self.held.total()

    def room(self, client: str) -> int:
        """Number of places for further requests of a client."""
        taken = Counter(ticket.client for ticket in self.open) + self.held
        return share(self.places, taken.total() - taken[client], self.service.alone) - taken[client]

    @contextlib.contextmanager
    def place(self, client: str, count: int) -> Iterator[None]:
        """Hold places for requests of a client while they are checked. Raises Busy."""
        if seconds := self.wait(client, count):
            self.stepper.metrics.add("requests_refused", self.name)
            raise Busy(seconds)
        self.held[client] += count
        try:
            yield
        finally:
            self.held[client] -= count
            self.held += Counter()  # drops the clients that hold none

    def wait(self, client: str, count: int) -> int:
        """Seconds until there should be room for further requests of a client; 0: there is.

        Estimated from the running times of the latest requests, or of the present ones: `parallel` searches run at
        once, and clients take the places of those that end in turn.
        """
        if (over := count - self.room(client)) <= 0:
            return 0
        now, taken = time.perf_counter(), Counter(ticket.client for ticket in self.open) + self.held
        each = [*self._seconds] or [now - ticket.began for ticket in self.open if ticket.began] or [0.0]
        ends = taken.total() + count - self.places  # requests that must end, of any client
        if over > ends:  # as many of its own must end, which are a part of those that end
            ends = over * len({*taken, client})
        return max(1, math.ceil(ends * sum(each) / len(each) / self.service.parallel))

    def figures(self) -> dict[str, float]:
        """Counters and gauges of the model; read while another thread changes them."""
        driver, pool = self.service.driver, self.service.models.target.runner.pool
        work = driver.work["target"]
        return {
            "requests_running": self.running,
            "requests_waiting": self.waiting,
            "cache_pages": pool.pages,
            "cache_pages_used": pool.used_pages,
            "forward_passes": work.passes,
            "evaluated_tokens": work.tokens,
            "forward_seconds": work.seconds,
        }

    def submit(self, checked: Checked, stream: bool, client: str) -> Ticket:
        """Queue a request of a client."""
        ticket = Ticket(self, client)
        ticket.entry = self.stepper.submit(self.service, checked, ticket.hear, stream=stream, client=client)
        self.open.add(ticket)
        return ticket

    def cancel(self, ticket: Ticket) -> None:
        """Abandon a request: its pages are free before the next step."""
        if ticket.outcome is not None or ticket not in self.open:
            return
        self.open.discard(ticket)
        ticket.abandon()
        self.stepper.metrics.add("requests_cancelled", self.name)
        self.stepper.cancel(self.service, ticket.entry)

    def started(self, ticket: Ticket) -> None:
        """Note that a search has begun."""
        self.stepper.metrics.observe("queue_seconds", self.name, ticket.began - ticket.asked)

    def ended(self, ticket: Ticket) -> None:
        """Note that a request has an outcome."""
        if ticket not in self.open:  # it was cancelled in the meantime
            return
        self.open.discard(ticket)
        now, metrics = time.perf_counter(), self.stepper.metrics
        self._seconds.append(now - ticket.began)
        metrics.observe("request_seconds", self.name, now - ticket.asked)
        if ticket.spoke:
            metrics.observe("first_text_seconds", self.name, ticket.spoke - ticket.asked)
        if isinstance(ticket.outcome, SearchResult):
            metrics.add("requests_completed", self.name)
            metrics.add("prompt_tokens", self.name, ticket.outcome.stats["prompt_tokens"])
            metrics.add("reused_tokens", self.name, ticket.outcome.stats["reused_tokens"])
            for name in ("drafted_nodes", "drafted_accepted", "passes_saved"):
                metrics.add(name, self.name, ticket.outcome.stats.get(name, 0))
            metrics.add("new_tokens", self.name, sum(len(o.token_ids) for o in ticket.outcome.outputs))
        else:
            metrics.add("requests_failed", self.name)


class Stepper(StepThread):
    """The thread that steps the models of a server.

    Args:
        metrics: the metrics that count requests.
    """

    def __init__(self, metrics: Metrics):
        super().__init__()
        self.metrics = metrics
        self._interval = sys.getswitchinterval()

    def add(self, name: str, service: Service, queue: int) -> Lane:
        """Add a model, before `start`. Its searches keep no files, whose names clients could choose by parameters."""
        service.keeps_files = False
        self.services.append(service)
        return Lane(name, service, queue, self)

    def start(self) -> None:
        gc.collect()
        gc.freeze()  # the collections that a large body causes need not go through all that was loaded
        self._interval = sys.getswitchinterval()
        sys.setswitchinterval(SWITCH_SECONDS)
        super().start()

    def stop(self) -> None:
        super().stop()
        sys.setswitchinterval(self._interval)
        gc.unfreeze()
