"""Streams of server-sent events, and waiting for results while clients may disconnect."""

import asyncio
import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from engine.contract import SearchResult
from engine.errors import CoppiceError
from engine.serve.answers import Answers, HttpError
from engine.serve.names import header_of
from engine.serve.stepper import Abandoned, Ticket

PING_SECONDS = 10.0  # without text, after which a stream sends a sign of life
STALL_SECONDS = 120.0  # without reading, after which a client counts as gone
PART_BYTES = 1 << 16  # size of a part of a large reply
ENDING_SECONDS = 1.0  # for the last event of a stream, when the server ends


class Events(Response):
    """A stream of server-sent events. It ends the searches when the client leaves, and waits for no reader."""

    def __init__(
        self,
        answers: Answers,
        tickets: Sequence[Ticket],
        deadline: float,
        seconds: float,
        log: Callable[[Exception], CoppiceError],
    ):
        super().__init__()
        self.answers, self.tickets, self.log = answers, tickets, log
        self.deadline, self.seconds = deadline, seconds
        self._turn = asyncio.Lock()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = {"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-cache"}
        headers |= header_of(self.answers.asked.ignored)
        raw = [(key.encode(), value.encode()) for key, value in headers.items()]
        try:
            await send({"type": "http.response.start", "status": 200, "headers": raw})
            await self._until_left(send, receive)
        except asyncio.CancelledError:
            with contextlib.suppress(OSError, TimeoutError):
                async with asyncio.timeout(ENDING_SECONDS):
                    await send({"type": "http.response.body", "body": self.answers.failed(shutdown_error())})
        finally:
            cancel(self.tickets)

    async def _until_left(self, send: Send, receive: Receive) -> None:
        work = asyncio.ensure_future(self._run(send))
        try:
            await until(work, receive)
        finally:
            work.cancel()
            with contextlib.suppress(asyncio.CancelledError, OSError, TimeoutError):
                await work

    async def _run(self, send: Send) -> None:
        try:
            async with asyncio.timeout_at(self.deadline):
                await self._follow(send)
        except TimeoutError:
            cancel(self.tickets)  # first, because the client may delay the error
            await self._put(send, self.answers.failed(timeout_error(self.seconds)))
        except (OSError, Abandoned):
            return
        except Exception as error:
            cancel(self.tickets)
            await self._put(send, self.answers.failed(self.log(error)))
        await send({"type": "http.response.body", "body": b""})

    async def _follow(self, send: Send) -> None:
        """Send everything; text for several prompts is sent as it arrives."""
        await self._put(send, b"".join(map(self.answers.event, self.answers.opening())))
        parts = [asyncio.ensure_future(self._one(i, ticket, send)) for i, ticket in enumerate(self.tickets)]
        try:
            results = await asyncio.gather(*parts)
        finally:
            for part in parts:
                part.cancel()
        for chunk in self.answers.close(results):
            await self._put(send, self.answers.event(chunk))
        await self._put(send, self.answers.last)

    async def _one(self, i: int, ticket: Ticket, send: Send) -> SearchResult:
        while True:
            try:
                async with asyncio.timeout(PING_SECONDS):
                    text = await ticket.more()
            except TimeoutError:
                await self._put(send, b": the search runs\n\n")
                continue
            if not text:
                break
            await self._put(send, b"".join(map(self.answers.event, self.answers.text(i, text))))
        result = await ticket.result()
        ends = self.answers.end(i, result)
        await self._put(send, await in_thread_if_large(self.answers, lambda: b"".join(map(self.answers.event, ends))))
        return result

    async def _put(self, send: Send, data: bytes) -> None:
        async with self._turn:
            if data:
                part = {"type": "http.response.body", "body": data, "more_body": True}
                try:
                    async with asyncio.timeout(STALL_SECONDS):
                        await send(part)
                except TimeoutError:
                    raise ConnectionError("the client reads nothing") from None


class Parts(Response):
    """A large reply, written in parts in a thread while they are sent, so that memory never holds all of it.

    Args:
        parts: the parts of its JSON.
        headers: further headers.
        release: called at the end, whatever happens.
    """

    media_type = "application/json"

    def __init__(self, parts: Iterator[bytes], headers: Mapping[str, str], release: Callable[[], None]):
        super().__init__(headers=headers)
        del self.headers["content-length"]
        self.parts, self.release = parts, release

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            while data := await asyncio.to_thread(self._next):
                async with asyncio.timeout(STALL_SECONDS):
                    await send({"type": "http.response.body", "body": data, "more_body": True})
            await send({"type": "http.response.body", "body": b""})
        except TimeoutError:  # the client reads nothing: uvicorn closes the connection of a reply without an end
            return
        finally:
            self.release()

    def _next(self) -> bytes:
        data = bytearray()
        while len(data) < PART_BYTES and (part := next(self.parts, b"")):
            data += part
        return bytes(data)


async def until(work: "asyncio.Future[Any]", receive: Receive) -> bool:
    """Wait for a future; returns True if the client left first. Raises what the future raises."""
    watcher = asyncio.ensure_future(_gone(receive))
    try:
        await asyncio.wait({work, watcher}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        watcher.cancel()
    if not work.done():
        return True
    work.result()
    return False


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def cancel(tickets: Sequence[Ticket]) -> None:
    for ticket in tickets:
        ticket.lane.cancel(ticket)


def shutdown_error() -> HttpError:
    return HttpError(503, "the server shut down before it answered this request", code="interrupted")


def timeout_error(seconds: float) -> HttpError:
    return HttpError(504, f"the request took more than {seconds:g} s", code="timeout", remedy="fewer tokens or beams")


async def in_thread_if_large(answers: Answers, write: Callable[[], bytes]) -> bytes:
    """Return what a function returns; for a large answer it runs in a thread, so that others are answered meanwhile."""
    return await asyncio.to_thread(write) if answers.large else write()
