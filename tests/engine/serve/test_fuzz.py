"""Values of the wrong type, in every field of both endpoints: an error of the client, and nothing on stderr."""

import json
import random

import pytest

from engine.errors import CoppiceError
from engine.rules import PLAIN_RULES
from search.base import REGISTRY, parameters

pytest.importorskip("starlette", reason="needs the extra serve")
pytest.importorskip("uvicorn", reason="needs the extra serve")
httpx2 = pytest.importorskip("httpx2", reason="needs the extra test")

from engine.serve.answers import error_body, status_of  # noqa: E402
from engine.serve.fields import read  # noqa: E402
from engine.serve.names import (  # noqa: E402
    CHAT,
    COMPLETIONS,
    NO_EFFECT,
    OF_PROMPTS,
    OF_TOOLS,
    OWN,
    RECORD,
    REFUSED,
    RENAMED,
)
from engine.serve.responses import chat_body  # noqa: E402
from engine.serve.texts import EMBEDDING_FIELDS, RERANK_FIELDS, read_embeddings, read_rerank  # noqa: E402

PLAIN = [True, False, -1, 0, 1, 3, 10**18, -(10**18), 1e300, -0.5, 0.5, "", "x", "1", "\0", "😀" * 3]
NESTED = [[], {}, [[]], [[[]]], [None], [1], [0.5], [1e300], ["x"], [1, "x"], [True], [[1, 2]], [[1], [2]], [{}]]
SHAPED = [
    [[[1], 1.0]],
    {"a": 1},
    {"1": "x"},
    {"1": {}},
    {"type": "x"},
    {"type": "json_schema", "json_schema": []},
    [{"a": []}],
    [{"role": "user"}],
    [{"role": [], "content": {}}],
    [{"role": "user", "content": [[]]}],
    [{"role": "user", "content": [None]}],
    [{"role": "user", "content": [{"type": "text", "text": 1}]}],
]
CHOICES = ["required", {"type": "function", "function": {"name": "f"}}, {"type": "allowed_tools", "allowed_tools": {}}]
VALUES = PLAIN + NESTED + SHAPED
BASE = {CHAT: {"messages": [{"role": "user", "content": "Hi"}]}, COMPLETIONS: {"prompt": "Once"}}
PATH = {CHAT: "/v1/chat/completions", COMPLETIONS: "/v1/completions"}
OTHERS = ("prompt", "prompt_ids", "chat_template_kwargs", "logprobs", "top_logprobs")
OTHERS += ("stop", "ignore_eos", "eos_token_ids", "max_new_tokens")
NAMES = sorted({*OWN, *NO_EFFECT, *OF_TOOLS, *OF_PROMPTS, *REFUSED, *RENAMED, *RECORD[CHAT], *OTHERS, *PLAIN_RULES})
CASES = [(name, None) for name in NAMES] + [(key, search) for search in REGISTRY for key in parameters(search)]


def bodies(kind: str, name: str, search: str | None):
    """The bodies that differ from a good one in one field."""
    tools = {"tools": [{"type": "function", "function": {"name": "f"}}]} if name in OF_TOOLS and kind == CHAT else {}
    for value in VALUES + CHOICES * (name == "tool_choice"):
        yield BASE[kind] | ({"search": search} if search else {}) | tools | {"max_tokens": 2, name: value}


@pytest.mark.parametrize("kind", [CHAT, COMPLETIONS])
def test_every_field_with_every_value_is_checked(server, kind):
    """Without the interface, as it takes a hundredth of the time."""
    served, limits = server.app.served["demo"], server.app.limits
    fine = wrong = 0
    for name, search in CASES:
        for body in bodies(kind, name, search):
            try:
                read(body, kind, served, limits, "id")
                fine += 1
            except CoppiceError as error:
                assert status_of(error) == 400, (body, error)
                assert len(json.dumps(error_body(error))) < 4000, (body, error)
                wrong += 1
    assert fine > 200 and wrong > 2000


@pytest.mark.parametrize("seed", range(4))
def test_answers_are_never_faults(server, seed, capfd):
    """Several wrong fields at once, through the interface, and what was not wrong runs."""
    drawn = random.Random(seed)
    with httpx2.Client(timeout=60) as client:
        for _ in range(100):
            kind = drawn.choice([CHAT, COMPLETIONS])
            body = BASE[kind] | {"max_tokens": 2, "stream": drawn.random() < 0.3}
            for name, search in drawn.sample(CASES, drawn.choice([1, 1, 2, 3])):
                body |= ({"search": search} if search else {}) | {name: drawn.choice([*VALUES, None])}
            reply = client.post(
                server.url + PATH[kind],
                content=json.dumps(body).encode(),
                headers={"content-type": "application/json"},
            )
            assert reply.status_code in (200, 400, 404), (body, reply.text)
            if reply.status_code != 200:
                assert reply.json()["error"]["message"], body
            elif "text/event-stream" in reply.headers["content-type"]:
                assert '"error"' not in reply.text and reply.text.endswith("data: [DONE]\n\n"), (body, reply.text)
            else:
                assert reply.json()["choices"], body
    assert capfd.readouterr().err == ""
    assert server.engine.pool.used_pages == 0


RESPONSE_FIELDS = ("input", "instructions", "text", "tools", "tool_choice", "previous_response_id", "include", "n")
ITEMS = [
    [{"role": "user", "content": value}] for value in VALUES
] + [
    [{"type": "function_call", "name": value, "arguments": value, "call_id": value}] for value in VALUES
] + [
    [{"type": "function_call_output", "call_id": value, "output": value}] for value in VALUES
]  # fmt: skip


def test_every_field_of_a_response_is_checked(server):
    served, limits, fine = server.app.served["demo"], server.app.limits, 0
    for name in RESPONSE_FIELDS:
        for value in VALUES + ITEMS:
            body = {"input": "Hi", "max_output_tokens": 2, name: value}
            try:
                read(chat_body(body), CHAT, served, limits, "id")
                fine += 1
            except CoppiceError as error:
                assert status_of(error) == 400, (body, error)
    assert fine > 100


@pytest.mark.parametrize(
    ("read_texts", "base", "names"),
    [
        (read_embeddings, {"input": ["Hi", "You"]}, EMBEDDING_FIELDS),
        (read_rerank, {"query": "Who?", "documents": ["Me", {"text": "You"}]}, RERANK_FIELDS),
    ],
    ids=["embeddings", "rerank"],
)
def test_every_field_of_many_texts_is_checked(server, read_texts, base, names):
    served, limits, fine = server.app.served["demo"], server.app.limits, 0
    for name in names:
        for value in [*VALUES, [{"text": "x"}], [{"text": 1}], [[1], "x", [2]], "{query}{document}", [""], ["\ud800"]]:
            try:
                read_texts(base | {name: value}, served, limits)
                fine += 1
            except CoppiceError as error:
                assert status_of(error) == 400, (name, value, error)
                assert len(json.dumps(error_body(error))) < 4000
    assert fine > 10


@pytest.mark.parametrize("depth", [400, 900])
def test_deep_values_are_errors_of_the_client(server, depth):
    deep = {"type": "object", "properties": {}}
    for _ in range(depth):
        deep = {"type": "array", "items": deep}
    call = {"function": {"name": "f", "arguments": json.dumps({"a": 1})}}
    for kind, body in (
        (CHAT, {"tools": [{"function": {"name": "f", "parameters": deep}}], "tool_choice": "required"}),
        (CHAT, {"tools": [{"function": {"name": "f", "parameters": deep}}]}),
        (CHAT, {"messages": [{"role": "assistant", "tool_calls": [call | {"x": deep}]}]}),
    ):
        try:
            read(BASE[kind] | {"max_tokens": 2} | body, kind, server.app.served["demo"], server.app.limits, "id")
        except CoppiceError as error:
            assert status_of(error) == 400, error
