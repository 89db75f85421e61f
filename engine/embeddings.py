"""Requests for embeddings: checks texts, and pools as the request or the checkpoint says."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from engine.contract import SearchResult
from engine.contract.embedding import TextVector
from engine.errors import UsageError, check_flag, check_integer, check_utf8, shortened
from engine.load.loading import LoadedModel
from engine.request import Request, check_ids
from engine.words import MEAN, POOLINGS


def embedding_of(
    model: LoadedModel, pooling: str | None = None, normalize: bool | None = None, dimensions: int | None = None
) -> TextVector:
    """The search that embeds texts; None takes the checkpoint's setting, and all `dimensions`. See `TextVector`.

    Raises:
        UsageError: a value out of range, or no pooling is given and the checkpoint asks for an unsupported one.
    """
    own = model.pooling
    if pooling is None and own.why_not:
        what = f"embeddings of this checkpoint: {own.why_not}"
        raise UsageError(what, where=model.name, remedy=f"name a pooling: {' or '.join(POOLINGS)}")
    if not (pooling is None or (isinstance(pooling, str) and pooling in POOLINGS)):
        raise UsageError(f"pooling: expected {' or '.join(POOLINGS)}, got {shortened(repr(pooling))}")
    if normalize is not None:
        check_flag("normalize", normalize)
    if dimensions is not None:
        check_integer("dimensions", dimensions, 1, model.shape.output_width)
    return TextVector(pooling or own.pooling, own.normalize if normalize is None else normalize, dimensions)


def embedding_requests(
    model: LoadedModel,
    texts: Iterable[Sequence[int] | str],
    search: TextVector,
    cache_salt: str | None,
    adapter: str | None,
) -> Iterator[Request]:
    """The requests that embed texts, made one by one, see `embedding_request`. Raises UsageError at once for a text."""
    if isinstance(texts, str) or not isinstance(texts, Iterable):
        raise UsageError(f"texts: expected a list of texts, got {shortened(repr(texts))}", remedy="write [text]")
    options: dict[str, Any] = {"cache_salt": cache_salt, "adapter": adapter}
    return (embedding_request(model, text, search, name=f"texts[{i}]", **options) for i, text in enumerate(texts))


def embedding_request(
    model: LoadedModel,
    text: Any,
    search: TextVector,
    *,
    cache_salt: str | None = "",
    adapter: str | None = None,
    name: str = "text",
) -> Request:
    """The request that embeds a text.

    Args:
        text: a text, encoded with the special tokens that the tokenizer adds by itself; or token ids.
        search: see `embedding_of`.
        cache_salt, adapter: see `Request`.
        name: the name of the text in errors.

    Raises:
        UsageError: it is empty, longer than the context, or neither text nor token ids.
    """
    if not isinstance(text, str) and (not isinstance(text, Sequence) or isinstance(text, bytes | bytearray)):
        raise UsageError(f"{name}: expected a text or token ids, got {shortened(repr(text))}")
    ids = model.need_tokenizer().encode(check_utf8(text, name)) if isinstance(text, str) else list(text)
    check_ids(model, ids, name, "the text")
    salt = None if search.pooling == MEAN else cache_salt
    return Request(ids, search, 1, ignore_eos=True, cache_salt=salt, adapter=adapter)


def stacked(model: LoadedModel, search: TextVector, results: Sequence[SearchResult]) -> Tensor:
    """The vectors of results, float32 [N, E]."""
    found_NE = torch.empty(len(results), search.dimensions or model.shape.output_width)
    for row_E, result in zip(found_NE, results, strict=True):  # no large operator, see `release_threads`
        assert result.embedding is not None
        row_E.copy_(result.embedding)
    return found_NE
