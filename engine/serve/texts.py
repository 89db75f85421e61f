"""Requests with many texts, for OpenAI's `/v1/embeddings` and for `/v1/rerank`, as in Cohere's, Jina's and vLLM's APIs:
bodies to engine requests, results to replies. Only a few texts at a time are engine requests that wait or run."""

import asyncio
import base64
import json
import math
import secrets
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import Tensor

from engine.contract import SearchResult
from engine.embeddings import embedding_of, embedding_request
from engine.errors import UsageError, check_integer, shortened
from engine.ranking import check_text, head_of, pairs, ranked, scores_of
from engine.request import Checked
from engine.serve.answers import encoded
from engine.serve.limits import Limits, check_length, check_limits
from engine.serve.names import NO_EFFECT, flag, without_unknown
from engine.serve.served import Served

EMBEDDING_FIELDS = ("input", "encoding_format", "dimensions", "pooling", "normalize")
RERANK_FIELDS = ("query", "documents", "top_n", "return_documents", "template")
MOST_TEXTS = 2048  # texts of a request, OpenAI's limit
MOST_TOKENS = 300_000  # tokens of all its texts together, OpenAI's limit
NUMBERS_PER_BYTE = 1  # numbers in a reply for each byte that a body may have
FLOAT_BYTES = 4
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


# --- embeddings ---


def read_embeddings(body: Mapping[str, Any], served: Served, limits: Limits, salt: str = "") -> Texts:
    """Check a body. Raises CoppiceError."""
    body, ignored = known_fields(body, limits.strict, EMBEDDING_FIELDS)
    model, encoding = served.engine.model, body.get("encoding_format", "float")
    if encoding not in ("float", "base64"):
        raise UsageError(f"encoding_format: expected float or base64, got {shortened(repr(encoding))}")
    pooling = body.get("pooling", None if served.args.pooling == "auto" else served.args.pooling)
    search = embedding_of(model, pooling, body.get("normalize"), body.get("dimensions"))
    texts = inputs_of(body)
    check_count("input", texts)
    width = search.dimensions or model.shape.output_width
    if (numbers := len(texts) * width) > (most := limits.body * NUMBERS_PER_BYTE):
        what = f"input: {len(texts)} vectors of {width} numbers are {numbers}, this server writes {most} in a reply"
        raise UsageError(what, remedy="ask several times")
    checked, tokens = [], 0
    for i, text in enumerate(texts):
        name = "input" if len(texts) == 1 else f"input[{i}]"
        if isinstance(text, str | list):
            check_length(name, text, model, limits)
        request = embedding_request(model, text, search, cache_salt=salt, adapter=served.adapter, name=name)
        check_limits(request, limits, served)
        tokens += len(request.prompt)
        check_total("input", tokens)
        checked.append(served.lane.service.check(request))
    write = partial(written_vectors, model=served.name, tokens=tokens, plain=encoding == "float")
    return Texts(served, checked, write, numbers * FLOAT_BYTES, ignored)


def inputs_of(body: Mapping[str, Any]) -> list[Any]:
    """The texts of a body: a text, a list of token ids, or a list of either. Raises UsageError."""
    given = body.get("input")
    if isinstance(given, str) or (isinstance(given, list) and given and type(given[0]) is int):
        return [given]
    if not isinstance(given, list):
        raise UsageError(f"input: expected a text, a list of texts, or token ids, got {shortened(repr(given))}")
    return given


def written_vectors(results: Sequence[SearchResult], *, model: str, tokens: int, plain: bool) -> Iterator[bytes]:
    """The reply, a vector at a time.

    Args:
        plain: write numbers in decimal digits; else little-endian float32 in base64.
    """
    for i, result in enumerate(results):
        assert result.embedding is not None
        vector = decimal(result.embedding) if plain else f'"{based(result.embedding)}"'
        head = "," if i else '{"object":"list","data":['
        yield f'{head}{{"object":"embedding","index":{i},"embedding":{vector}}}'.encode()
    usage = {"prompt_tokens": tokens, "total_tokens": tokens}
    yield f'],"model":{json.dumps(model)},"usage":{json.dumps(usage)}}}'.encode()


def decimal(vector_E: Tensor) -> str:
    """A float32 vector as JSON, with the fewest digits that identify its numbers."""
    return f"[{','.join([f'{x:.9g}' for x in vector_E.tolist()])}]"


def based(vector_E: Tensor) -> str:
    """A float32 vector in base64, the format that OpenAI's client reads."""
    return base64.b64encode(struct.pack(f"<{len(vector_E)}f", *vector_E.tolist())).decode()


# --- reranking ---


def read_rerank(body: Mapping[str, Any], served: Served, limits: Limits, salt: str = "") -> Texts:
    """Check a body. Raises CoppiceError."""
    body, ignored = known_fields(body, limits.strict, RERANK_FIELDS)
    service, query, documents = served.lane.service, body.get("query"), documents_of(body)
    head = head_of(service.models)
    if not isinstance(query, str):
        raise UsageError(f"query: expected a text, got {shortened(repr(query))}")
    top, returned = body.get("top_n", len(documents)), flag(body, "return_documents")
    check_integer("top_n", top, 1)
    template = body.get("template", served.args.rerank_template)
    check_length("query", query, head, limits)
    for i, document in enumerate(documents):
        check_length(f"documents[{i}]", document, head, limits)
    checked, tokens = [], 0
    for i, ids in enumerate(pairs(head, query, documents, template)):
        tokens += len(ids)
        check_total("documents", tokens)
        if limits.prompt is not None and len(ids) > limits.prompt:
            what = f"documents[{i}]: it has {len(ids)} tokens with the query, this server takes {limits.prompt}"
            raise UsageError(what, remedy="divide it")
        checked.append(check_text(service.models, ids, salt, service.share, f"documents[{i}]", served.adapter))

    def write(results: Sequence[SearchResult]) -> Iterator[bytes]:
        found = []
        for index, score in ranked(scores_of(results))[:top]:
            one: dict[str, Any] = {"index": index, "relevance_score": logistic(score)}
            found.append(one | ({"document": {"text": documents[index]}} if returned else {}))
        head = {"id": f"rerank-{secrets.token_urlsafe(16)}", "model": served.name, "results": found}
        yield encoded(head | {"usage": {"prompt_tokens": tokens, "total_tokens": tokens}})

    size = sum(map(len, documents)) if returned else 0
    return Texts(served, checked, write, size, ignored)


def documents_of(body: Mapping[str, Any]) -> list[str]:
    """The texts of the documents of a body. Raises UsageError."""
    given = body.get("documents")
    if not isinstance(given, list):
        raise UsageError(f"documents: expected a list, got {shortened(repr(given))}")
    check_count("documents", given)
    texts: list[Any] = [each.get("text") if isinstance(each, dict) else each for each in given]
    for wrong in [i for i, text in enumerate(texts) if not isinstance(text, str)][:1]:
        raise UsageError(f'documents[{wrong}]: expected a text or {{"text": ...}}, got {shortened(repr(given[wrong]))}')
    return texts


def logistic(score: float) -> float:
    """A score as a number from 0 to 1."""
    return 1 / (1 + math.exp(-score)) if score >= 0 else math.exp(score) / (1 + math.exp(score))
