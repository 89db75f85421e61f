"""The most that one client can take from others: places, checks, bytes; refusals before any work."""

import contextlib
import json
import threading
from types import SimpleNamespace

import pytest

from engine.app.records import _unique
from engine.errors import UsageError
from engine.serve import stepper
from engine.serve.metrics import Metrics
from engine.serve.stepper import Lane, Stepper, Ticket, share
from engine.tasks.step_thread import Checks

pytest.importorskip("starlette", reason="needs the extra serve")
pytest.importorskip("uvicorn", reason="needs the extra serve")
httpx2 = pytest.importorskip("httpx2", reason="needs the extra test")

from engine.serve import fields, http, limits  # noqa: E402
from tests.engine.serve.test_limits import FOX, long, raw, until  # noqa: E402

A, B, C = "the-key-of-client-a", "the-key-of-client-b", "the-key-of-client-c"


def post(url: str, body: dict, path="/v1/chat/completions", key=""):
    headers = {"content-type": "application/json"} | ({"authorization": f"Bearer {key}"} if key else {})
    return httpx2.post(url + path, content=json.dumps(body).encode(), headers=headers, timeout=60)


# --- places ---


@pytest.mark.parametrize(
    ("places", "others", "alone", "expected"),
    [
        (80, 0, True, 80),
        (80, 0, False, 40),
        (80, 40, False, 20),
        (80, 79, False, 1),
        (80, 80, False, 0),
        (1, 0, False, 1),
    ],
)
def test_a_share_is_half_of_what_the_others_leave(places, others, alone, expected):
    assert share(places, others, alone) == expected


@pytest.fixture
def lane():
    steps = Stepper(Metrics())
    yield Lane("demo", SimpleNamespace(parallel=2, alone=True), 8, steps)  # type: ignore[arg-type]
    steps.stop()


def test_retry_after_is_the_time_of_what_is_in_front(lane):
    """Ten places, two at a time, five seconds each."""
    lane._seconds.append(5.0)
    lane.open = {Ticket(lane, A) for _ in range(10)}
    assert lane.wait(A, 1) == 3 and lane.wait(A, 4) == 10 and lane.wait(B, 4) == 10
    lane.service.alone = False
    assert lane.wait(A, 1) == 15, "it has six more than its share, and half of it has to end first"
    lane.open |= {Ticket(lane, B)}
    assert lane.wait(A, 1) > 15, "the two take turns"
    lane.open = {Ticket(lane, A) for _ in range(5)}
    assert lane.wait(A, 1) == 3 and lane.wait(B, 2) == 0 and lane.wait(B, 3) == 5


def test_retry_after_before_anything_has_ended(lane, monkeypatch):
    lane.open = {Ticket(lane, A) for _ in range(10)}
    monkeypatch.setattr(stepper, "time", SimpleNamespace(perf_counter=lambda: 1000.0))
    for ticket in lane.open:
        ticket.began = 990.4
    assert lane.wait(A, 4) == 20


def test_a_key_cannot_fill_the_queue(start, slow):
    """One key has its half of the places; another one is admitted, and is the next that runs."""
    slow(server := start("--parallel", "1", "--queue", "7", keys=(A, B)))
    lane = server.app.served["demo"].lane
    many = {"prompt": ["x"] * 5, "max_tokens": 300}
    reply = post(server.url, many, "/v1/completions", key=A)
    assert reply.status_code == 400 and "4 prompts of a client at once, got 5" in reply.text
    with contextlib.ExitStack() as stack:
        first = stack.enter_context(contextlib.closing(raw(server.port, long(), key=A)))
        until(lambda: lane.running == 1)
        for _ in range(3):
            stack.enter_context(contextlib.closing(raw(server.port, long(), key=A)))
        until(lambda: len(lane.open) == 4)
        reply = post(server.url, {"prompt": "x"}, "/v1/completions", key=A)
        assert reply.status_code == 429 and int(reply.headers["retry-after"]) >= 1
        two = {"prompt": ["x"] * 3, "max_tokens": 2}
        assert post(server.url, two, "/v1/completions", key=B).status_code == 429, "each prompt counts"
        stack.enter_context(contextlib.closing(raw(server.port, long(), key=B)))
        until(lambda: len(lane.open) == 5)
        first.close()
        until(lambda: len(lane.open) == 4 and lane.running == 1)
        [running] = [ticket for ticket in lane.open if ticket.began]
        assert running.client == http.salt_of(B.encode())
    until(lambda: not lane.open and not lane.held)


def test_clients_without_keys_are_addresses():
    def client(address, **scope):
        return http.client_of({"client": (address, 1), **scope})

    assert client("10.0.0.1") != client("10.0.0.2") and client("10.0.0.1", **{http.SALT: "s"}) == "s"
    assert client("2001:db8::1") == client("2001:db8::2") != client("2001:db9::1") and http.client_of({}) == ""


def test_a_client_is_alone_where_there_can_be_no_other(start):
    assert start().app.alone and start(keys=(A,)).app.alone
    server = start(keys=(A, B))
    assert not server.app.alone and not server.app.served["demo"].lane.service.alone
    assert not start("--host", "0.0.0.0").app.alone


def test_large_bodies_of_a_client_leave_room_for_those_of_others(start):
    """Half of the bytes for the one, although it sends no end."""
    server = start("--max-body", "64K", keys=(A, B))
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    head += f"Content-Length: 65536\r\nAuthorization: Bearer {A}\r\n\r\n"
    with contextlib.ExitStack() as stack:
        for _ in range(http.BODIES):
            peer = stack.enter_context(contextlib.closing(raw(server.port, None)))
            peer.sendall(head.encode() + b" " * 60_000)
        until(lambda: server.app._bytes.total() == 8 * 60_000)  # the others were refused
        small = {"prompt": "Once", "max_tokens": 1, "user": "x" * 30_000}
        assert post(server.url, small, "/v1/completions", key=B).status_code == 200
    until(lambda: not server.app._bytes)


# --- checks ---


def test_checks_of_clients_take_turns():
    """Those of one client are called one after another, in their order; those of others meanwhile."""
    checks, go, called = Checks(2), threading.Event(), []

    def slow(i):
        called.append(("A", i))
        assert go.wait(60)
        return i

    try:
        mine = [checks.submit("A", lambda i=i: slow(i)) for i in range(4)]
        until(lambda: called)
        assert [checks.submit("B", lambda i=i: i).result(60) for i in range(3)] == [0, 1, 2]
        assert called == [("A", 0)] and mine[2].cancel()
        go.set()
        assert [future.result(60) for future in (mine[0], mine[1], mine[3])] == [0, 1, 3]
        assert called == [("A", 0), ("A", 1), ("A", 3)]
        until(lambda: not checks._busy and not checks._waiting)
    finally:
        checks.stop()


def test_a_check_that_panics_is_an_exception():
    def panic():
        raise BaseException("a library panicked")

    checks = Checks(1)
    with pytest.raises(RuntimeError, match="a library panicked"):
        checks.submit("A", panic).result(60)
    checks.stop()


@pytest.fixture
def held(monkeypatch):
    """Checks that wait for the event; and the prompts that were checked."""
    go, seen, real = threading.Event(), [], http.read

    def read(body, *rest):
        seen.append(body.get("prompt"))
        assert go.wait(60)
        return real(body, *rest)

    monkeypatch.setattr(http, "read", read)
    yield go, seen
    go.set()


def test_who_has_left_is_not_checked(start, held):
    go, seen = held
    server = start(keys=(A, B))
    lane = server.app.served["demo"].lane
    peers = [raw(server.port, {"prompt": name}, "/v1/completions", key=A) for name in "abc"]
    until(lambda: lane.held.total() == 3)
    peers[1].close()
    peers[0].close()
    until(lambda: lane.held.total() == 1)  # also of the one that is being checked
    go.set()
    until(lambda: not lane.held)
    until(lambda: not lane.open)
    assert seen == ["a", "c"]
    peers[2].close()


def test_a_check_takes_the_time_of_its_request(start, held):
    _, seen = held
    server = start("--timeout", "0.2")
    reply = post(server.url, {"prompt": "a"}, "/v1/completions")
    assert reply.status_code == 504 and "more than 0.2 s" in reply.text and seen == ["a"]
    until(lambda: not server.app.served["demo"].lane.held)  # it is let go behind the reply


# --- sizes, before anything is done ---


LARGE = {
    "characters": (
        {"prompt": "a" * 60_000},
        "60000 characters, this model's maximum context length is 512 tokens of at most 13",
    ),
    "tokens": ({"prompt": [5] * 5000}, "5000 tokens, this model's maximum context length is 512"),
    "one of several": ({"prompt": ["a", "a" * 60_000]}, "60000 characters"),
    "messages": ({"messages": [{"role": "user", "content": "a"}] * 5000}, "messages: expected at most 4096 entries"),
    "their values": ({"messages": [{"role": "user", "content": "a", "x": [1] * 40_000}] * 2}, "at most 65536 values"),
    "their characters": (
        {"messages": [{"role": "user", "content": "a" * 9000}]},
        "messages: the text has 9015 characters",
    ),
    "choices": ({"messages": FOX, "choices": ["a"] * 5000}, "choices: expected at most 4096 entries"),
    "their text": ({"messages": FOX, "choices": ["a" * 700] * 100}, "at most 65536 characters in all, got 70000"),
    "words": ({"messages": FOX, "bad_words": ["a" * 10_000] * 2}, "bad_words: expected at most 16384 characters"),
    "ids of words": ({"messages": FOX, "bad_words": [[5] * 4097]}, "bad_words: expected at most 4096 values"),
    "sequences": ({"messages": FOX, "sequence_bias": [[[5] * 4097, 1.0]]}, "sequence_bias: expected at most 4096 val"),
    "stops": ({"messages": FOX, "stop": "a" * 5000}, "stop: expected at most 4096 characters"),
    "ends": ({"messages": FOX, "eos_token_ids": [5] * 65}, "eos_token_ids: expected at most 64"),
    "biases": ({"messages": FOX, "logit_bias": {str(i): 1 for i in range(4097)}}, "logit_bias: expected at most 4096"),
    "tools": ({"messages": FOX, "tools": [{}] * 1025}, "tools: expected at most 1024"),
    "regex": ({"messages": FOX, "regex": "a" * 70_000}, "regex: expected at most 65536 characters"),
    "a scalar": ({"messages": FOX, "temperature": [[1] * 200] * 50}, "temperature: expected at most 256 values"),
    "fields": ({"messages": FOX} | {f"f{i}": 1 for i in range(300)}, "301 fields, this server takes 256"),
    "brackets": ({"messages": FOX, "x": [[]] * 140_000}, "opening brackets, this server takes 131072"),
}


@pytest.mark.parametrize("case", LARGE)
def test_what_is_too_large_is_refused_before_any_work(large, monkeypatch, case):
    body, message = LARGE[case]
    monkeypatch.setattr(fields, "make_request", None)
    monkeypatch.setattr(large.app.served["demo"].lane.service, "check", None)
    reply = post(large.url, body, "/v1/completions" if "prompt" in body else "/v1/chat/completions")
    assert reply.status_code == 400 and message in reply.json()["error"]["message"], reply.text


@pytest.fixture(scope="module")
def large():
    from tests.engine.serve.conftest import serving

    with serving("--max-width", "16") as server:
        yield server


WORK = {
    "samples": ({"search": "ults", "ults_samples": 65536, "ults_batch": 1024}, "numbers in a step"),
    "kept": ({"search": "ults", "ults_select": "posterior", "ults_samples": 20_000, "ults_batch": 1}, "numbers in all"),
    "tapes": ({"search": "ults", "max_tokens": 1, "ults_samples": 65536, "ults_children": 4096}, "numbers in a step"),
    "simulations": ({"search": "aded", "aded_drafter": "mcts", "aded_iterations": 65536}, "numbers in a step"),
    "window": ({"search": "aded", "aded_drafter": "mcts", "aded_window": 65536}, "numbers in a step"),
    "drafts": ({"search": "dsbd", "dsbd_draft_beams": 8, "dsbd_gamma": 64}, "numbers in a step"),
    "gamma": ({"search": "speculative", "speculative_gamma": 10_000}, "speculative_gamma"),
    "n-grams": ({"no_repeat_ngram_size": 65}, "no_repeat_ngram_size: expected an integer from 0 to 64"),
    "alternatives": ({"n": 16, "logprobs": True, "top_logprobs": 20, "max_tokens": 4000}, "log-probabilities, this"),
}


@pytest.mark.parametrize("case", WORK)
def test_work_is_bounded(large, case):
    """A step of a request, and what it keeps, by the width that the server allows."""
    body, message = WORK[case]
    reply = post(large.url, {"messages": FOX} | body)
    assert reply.status_code == 400, reply.text
    assert message in reply.text or message == "speculative_gamma", reply.text


def test_what_dry_compares_is_bounded(large, monkeypatch):
    """By the sequences of the search and the tokens that it looks at."""
    monkeypatch.setattr(limits, "MOST_COMPARED", 32)
    body = {"messages": FOX, "dry_multiplier": 1, "beams": 4, "max_tokens": 4}
    replies = [post(large.url, body | {"dry_penalty_last_n": last}) for last in (9, 8)]
    assert [reply.status_code for reply in replies] == [400, 200], replies[0].text
    assert "give dry_penalty_last_n, at most 8" in replies[0].text
    assert post(large.url, body | {"messages": [{"role": "user", "content": "Once " * 70}]}).status_code == 400
    assert post(large.url, body | {"dry_penalty_last_n": 9, "dry_multiplier": 0}).status_code == 200


@pytest.mark.parametrize("search", ["ults", "aded"])
def test_the_defaults_of_searches_are_within_the_limits(large, search):
    reply = post(large.url, {"messages": FOX, "search": search, "max_tokens": 6})
    assert reply.status_code == 200, reply.text


def test_repeated_keys_are_found_at_once():
    """Comparing each key with all others takes minutes for a body of 4 MB."""
    compared = 0

    class Key(str):
        def __hash__(self):
            return str.__hash__(self)

        def __eq__(self, other):
            nonlocal compared
            compared += 1
            return str.__eq__(self, other)

    pairs = [(Key(i), 1) for i in range(2000)] + [(Key(1999), 1)]
    with pytest.raises(UsageError, match="the key '1999' occurs twice"):
        _unique(pairs)  # type: ignore[arg-type]
    assert compared < 4000


def test_a_long_text_is_encoded_while_other_threads_run(server):
    """Ids are those of the function that holds the interpreter's lock."""
    tokenizer, text = server.engine.tokenizer, "Once upon a time, there was a fox. Élan 😀 " * 400
    library = tokenizer._encoder._library
    assert tokenizer.encode(text, add_special=False) == library.encode(text, add_special_tokens=False).ids


def test_spellings_are_computed_once(server):
    served = server.app.served["demo"]
    served.spelling(300)
    hits = served.spelling.cache_info().hits
    assert served.spelling(300) == served.spelling(300) and served.spelling.cache_info().hits == hits + 2
