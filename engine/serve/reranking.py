"""`/v1/rerank`, as in Cohere's, Jina's and vLLM's APIs: bodies to engine requests, ranks to replies."""

import math
import secrets
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from engine.contract import SearchResult
from engine.errors import UsageError, check_integer, shortened
from engine.ranking import head_of, pairs, ranked, scores_of
from engine.serve.answers import encoded
from engine.serve.limits import Limits, check_length
from engine.serve.names import flag
from engine.serve.served import Served
from engine.serve.texts import Texts, check_count, check_total, known_fields

RERANK = "rerank"
FIELDS = ("query", "documents", "top_n", "return_documents", "template")


def read_rerank(body: Mapping[str, Any], served: Served, limits: Limits, salt: str = "") -> Texts:
    """Check a body. Raises CoppiceError."""
    body, ignored = known_fields(body, limits.strict, FIELDS)
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
        checked.append(service.check_text(ids, salt, f"documents[{i}]"))

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
