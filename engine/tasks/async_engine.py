"""AsyncEngine: an engine for asyncio. The requests of all tasks share forward passes, which run in a thread."""

import asyncio
import functools
import threading
import weakref
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Sequence
from functools import partial
from typing import Any, ParamSpec, Self, Unpack, overload

from torch import Tensor

from engine.contract import Search, SearchResult
from engine.embeddings import embedding_of, embedding_requests, stacked
from engine.engine import Engine
from engine.errors import CoppiceError, UsageError
from engine.ranking import score_requests, scores_of
from engine.request import Checked, Done, Event, Request, RequestOptions, Text, requests_of
from engine.service import Entry, News, Outcome
from engine.tasks.step_thread import StepThread
from models.threads import release_threads

P = ParamSpec("P")


def _in_a_thread(load: Callable[P, Engine]) -> Callable[P, Coroutine[Any, Any, "AsyncEngine"]]:
    """Turn a function that loads an engine into a coroutine function with the same arguments."""

    @functools.wraps(load)
    async def loaded(*args: P.args, **options: P.kwargs) -> "AsyncEngine":
        return await asyncio.to_thread(lambda: AsyncEngine(load(*args, **options)))

    return loaded


class AsyncEngine:
    """Answers the requests of coroutines, which may run in several event loops.

    One thread checks requests, another one evaluates them. A request lives as long as the task that waits for it: when
    the task is cancelled or its time is up, the search has ended before the next forward pass, and its pages are free.
    The functions of a request, such as a reward or a logits processor, run in the thread that evaluates.

    Use it by `async with`, or `close` it. Until then the engine and its companions belong to it: only their tokenizers
    and templates may be used directly.

    Args:
        engine: an engine that no other AsyncEngine uses.

    Raises:
        UsageError: several processes share the model.
    """

    load = staticmethod(_in_a_thread(Engine.load))

    def __init__(self, engine: Engine):
        if engine.shard.size > 1:
            what = "AsyncEngine: processes that share a model need the same requests in the same order"
            raise UsageError(what, remedy="use Engine.serve, or one process")
        self.engine = engine
        self._service, self._thread = engine.service(), StepThread()
        release_threads()  # started by loading, in this thread; `StepThread.start` does so in the event loop's
        self._thread.services.append(self._service)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    @overload
    async def generate(self, prompts: Request) -> SearchResult: ...

    @overload
    async def generate(
        self, prompts: Iterable[Sequence[int] | str], search: Search, **options: Unpack[RequestOptions]
    ) -> list[SearchResult]: ...

    async def generate(
        self,
        prompts: Request | Iterable[Sequence[int] | str],
        search: Search | None = None,
        **options: Unpack[RequestOptions],
    ) -> SearchResult | list[SearchResult]:
        """Answer one `Request`, or several prompts by one search, like `Engine.generate`.

        Raises:
            CoppiceError: the first error of any request, which ends the others; or the engine was closed.
        """
        results = await self._answers(_requests(prompts, search, options))
        return results[0] if isinstance(prompts, Request) else results

    def stream(
        self,
        prompt: Request | Sequence[int] | str,
        search: Search | None = None,
        **options: Unpack[RequestOptions],
    ) -> "Stream":
        """Answer one prompt or `Request`, with the events of `Engine.stream`; see `Stream`.

        Raises:
            CoppiceError: like `generate`; the iterator raises it.
        """
        [request] = _requests(prompt if isinstance(prompt, Request) else [prompt], search, options)
        return Stream(self, request)

    async def embed(
        self,
        texts: Iterable[Sequence[int] | str],
        *,
        pooling: str | None = None,
        normalize: bool | None = None,
        dimensions: int | None = None,
        cache_salt: str | None = "",
        adapter: str | None = None,
    ) -> Tensor:
        """The vectors of texts, float32 [N, E]: `Engine.embed`, with its arguments and errors."""
        model = self.engine.model
        search = embedding_of(model, pooling, normalize, dimensions)
        self._thread.start()
        make = partial(list, embedding_requests(model, texts, search, cache_salt, adapter))
        return stacked(model, search, await self._answers(await self._thread.check(make)))

    async def scores(self, texts: Iterable[Sequence[int]], *, adapter: str | None = None) -> list[float]:
        """The scores of token sequences: `Engine.scores`, with its errors."""
        self._thread.start()
        checked = await self._thread.check(lambda: [*score_requests(self._service.models, texts, adapter)])
        return scores_of(await self._answers(checked))

    async def close(self) -> None:
        """End the threads. Running requests end with an error, and all pages return to the pool; from then on the
        engine may be used directly."""
        await asyncio.to_thread(self._thread.stop)

    async def _answers(self, requests: Sequence[Request | Checked]) -> list[SearchResult]:
        ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        results: dict[int, SearchResult] = {}
        errors: list[CoppiceError] = []
        entries: list[Entry] = []

        def hear(i: int, news: News) -> None:
            if ended.done() or news.outcome is None:
                return
            if isinstance(news.outcome, CoppiceError):
                errors.append(news.outcome)
            else:
                results[i] = news.outcome
            if errors or len(results) == len(requests):
                ended.set_result(None)

        try:
            for i, request in enumerate(requests):
                entries.append(await self._submit(request, partial(hear, i)))
                if ended.done():
                    break
            if requests:
                await ended
        finally:
            while entries:
                self._thread.cancel(self._service, entries.pop())
        if errors:
            raise errors.pop()
        return [results[i] for i in range(len(requests))]

    async def _submit(self, request: Request | Checked, hear: Callable[[News], None], **how: Any) -> Entry:
        """Check a request, unless it was checked, and queue it; `how`: see `StepThread.submit`. Raises CoppiceError."""
        self._thread.start()
        if isinstance(request, Request):
            request = await self._thread.check(partial(self._service.check, request))
        return self._thread.submit(self._service, request, hear, **how)


class Stream(AsyncIterator[Event]):
    """The events of a request, for one task; the request begins with the first one.

    It ends when an `await` of an event is cancelled, by `aclose`, or when nothing refers to the iterator any more, for
    example after a `break` out of `async for`. A slow reader delays nobody: waiting texts are joined, and it misses the
    `Prefill` and `Progress` events that came meanwhile. `Progress.report` stays valid. `Progress.tree` is the live
    tree, which may be ahead of the report and changes in another thread.
    """

    def __init__(self, engine: AsyncEngine, request: Request):
        self._engine, self._request = engine, request
        self._entry: Entry | None = None
        self._events: list[Event] = []
        self._outcome: Outcome | None = None
        self._over = False
        self._wants = threading.Event()
        self._wants.set()
        self._changed = asyncio.Event()

    async def __anext__(self) -> Event:
        if self._over:
            raise StopAsyncIteration
        try:
            if self._entry is None:
                await self._begin()
            while not self._events and self._outcome is None:
                self._changed.clear()
                await self._changed.wait()
            if not self._events:
                return self._done()
            event = self._events.pop(0)
            if not isinstance(event, Text):
                self._wants.set()
            return event
        except BaseException:
            self._end()
            raise

    async def _begin(self) -> None:
        weak = weakref.ref(self)  # so that a running request does not keep the iterator alive

        def hear(news: News) -> None:
            if (stream := weak()) is not None:
                stream._hear(news)

        self._entry = await self._engine._submit(self._request, hear, stream=True, wants=self._wants)

    def _done(self) -> Done:
        self._over, self._entry = True, None
        outcome, self._outcome = self._outcome, None
        if isinstance(outcome, SearchResult):
            return Done(outcome)
        assert outcome is not None
        try:
            raise outcome
        finally:
            del outcome  # its traceback refers to this frame

    async def aclose(self) -> None:
        """End the search, if it runs."""
        self._end()

    def __del__(self) -> None:
        self._end()

    def _end(self) -> None:
        entry, self._over, self._entry = self._entry, True, None
        if entry is not None:
            self._engine._thread.cancel(self._engine._service, entry)

    def _hear(self, news: News) -> None:
        if news.text:
            last = self._events[-1] if self._events else None
            if isinstance(last, Text):
                self._events[-1] = Text(last.text + news.text)
            else:
                self._events.append(Text(news.text))
        if news.event is not None:
            self._events.append(news.event)
        if news.outcome is not None:
            self._outcome = news.outcome
        self._changed.set()


def _requests(prompts: Any, search: Any, options: RequestOptions) -> list[Request]:
    """The requests of a call. Raises UsageError."""
    if not isinstance(prompts, Request):
        return [*requests_of(prompts, search, options)]
    if search is not None or options:
        raise UsageError("a Request has its search and its options already", remedy="give them to Request")
    return [prompts]
