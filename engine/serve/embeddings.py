"""OpenAI's `/v1/embeddings`: bodies to engine requests, vectors to replies."""

import base64
import json
import sys
from array import array
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from torch import Tensor

from engine.contract import SearchResult
from engine.embeddings import embedding_of, embedding_request
from engine.errors import UsageError, shortened
from engine.serve.limits import Limits, check_length, check_limits
from engine.serve.served import Served
from engine.serve.texts import Texts, check_count, check_total, known_fields

EMBEDDINGS = "embeddings"
FIELDS = ("input", "encoding_format", "dimensions", "pooling", "normalize")
NUMBERS_PER_BYTE = 1  # numbers in a reply for each byte that a body may have
FLOAT_BYTES = 4


def read_embeddings(body: Mapping[str, Any], served: Served, limits: Limits, salt: str = "") -> Texts:
    """Check a body. Raises CoppiceError."""
    body, ignored = known_fields(body, limits.strict, FIELDS)
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
    options: dict[str, Any] = {"cache_salt": salt, "adapter": served.adapter}
    checked, tokens = [], 0
    for i, text in enumerate(texts):
        name = "input" if len(texts) == 1 else f"input[{i}]"
        if isinstance(text, str | list):
            check_length(name, text, model, limits)
        request = embedding_request(model, text, search, name=name, **options)
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
    numbers = array("f", vector_E.tolist())
    if sys.byteorder == "big":
        numbers.byteswap()
    return base64.b64encode(numbers.tobytes()).decode()
