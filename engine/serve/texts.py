"""Requests with many texts, for embeddings and reranking: only a few texts at a time become engine requests."""

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from engine.contract import SearchResult
from engine.errors import UsageError
from engine.serve.names import NO_EFFECT, without_unknown
from engine.serve.served import Served
from engine.service import Checked

MOST_TEXTS = 2048  # texts of a request, OpenAI's limit
MOST_TOKENS = 300_000  # tokens of all its texts together, OpenAI's limit
AHEAD = 2  # texts under way for each running search, so that the stepping thread does not wait for them


@dataclass
class Texts:
    """A checked request of many texts.

    Attributes:
        checked: a request of the engine for each text.
        write: function of the results, in the order of the texts, that returns the parts of the reply's JSON.
        size: bytes that results and reply take, roughly.
        ignored: names of fields that mean nothing here.
    """

    served: Served
    checked: list[Checked]
    write: Callable[[Sequence[SearchResult]], Iterator[bytes]]
    size: int
    ignored: list[str] = field(default_factory=list)


def known_fields(body: Mapping[str, Any], strict: bool, own: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    """The fields of a body that have a meaning, and the names of those that are ignored. Raises UsageError."""
    return without_unknown(body, strict, frozenset([*own, "model", *NO_EFFECT]))


def check_count(name: str, texts: Sequence[Any]) -> None:
    """Raises UsageError: a list of no texts, or of too many."""
    if not 1 <= len(texts) <= MOST_TEXTS:
        remedy = "ask several times" if texts else ""
        raise UsageError(f"{name}: expected 1 to {MOST_TEXTS} texts, got {len(texts)}", remedy=remedy)


def check_total(name: str, tokens: int) -> None:
    """Raises UsageError for too many tokens of all texts together."""
    if tokens > MOST_TOKENS:
        what = f"{name}: the texts have more than {MOST_TOKENS} tokens together"
        raise UsageError(what, remedy="ask several times")


async def answered(texts: Texts, client: str) -> list[SearchResult]:
    """The results of all texts, in their order; a few of them wait or run at any time. Raises CoppiceError."""
    lane = texts.served.lane
    width = min(len(texts.checked), AHEAD * lane.service.parallel, lane.room(client))
    results: dict[int, SearchResult] = {}
    waiting = iter(enumerate(texts.checked))

    async def work() -> None:
        for i, checked in waiting:
            ticket = lane.submit(checked, False, client)
            try:
                results[i] = await ticket.result()
            finally:
                lane.cancel(ticket)

    workers: list[asyncio.Future[None]] = []
    try:
        with lane.place(client, max(1, width)):
            workers += [asyncio.ensure_future(work()) for _ in range(max(1, width))]
            await asyncio.sleep(0)  # each submits its first text
        await asyncio.gather(*workers)
    finally:
        for worker in workers:
            worker.cancel()
    return [results[i] for i in range(len(texts.checked))]
