"""Requests that a server refuses, clients that it lets go, and an empty cache afterwards."""

import asyncio
import contextlib
import gzip
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from engine.errors import CheckpointError, CoppiceError, KVMemoryError, UsageError
from engine.rules.constraint import ConstraintError
from engine.serve import command, http
from engine.serve.answers import HttpError, error_body
from engine.serve.streams import Events
from tests.invariants import check_pool
from tests.served import background

pytest.importorskip("starlette", reason="needs the extra serve")
pytest.importorskip("uvicorn", reason="needs the extra serve")
openai = pytest.importorskip("openai", reason="needs the extra test")
httpx2 = pytest.importorskip("httpx2", reason="needs the extra test")

FOX = [{"role": "user", "content": "Tell me a story about a fox."}]
KEY = "a-key-of-some-length"
HTTP = httpx2.Client(timeout=60, verify=False)


def post(url: str, body, path="/v1/chat/completions", **options):
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    headers = {"content-type": "application/json"} | options.pop("headers", {})
    return HTTP.post(url + path, content=content, headers=headers, **options)


def raw(port: int, body: dict | None, path="/v1/chat/completions", key="") -> socket.socket:
    """A connection that has sent a request, if any, and reads nothing."""
    data = json.dumps(body).encode()
    peer = socket.create_connection(("127.0.0.1", port), timeout=60)
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(data)}"
    head += f"\r\nAuthorization: Bearer {key}" * bool(key)
    if body is not None:
        peer.sendall(head.encode() + b"\r\n\r\n" + data)
    return peer


def until(reached, seconds=60.0) -> None:
    """Wait for a condition."""
    end = time.monotonic() + seconds
    while not reached():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.005)


def long(**fields) -> dict:
    """A request that takes a while."""
    return {"messages": FOX, "max_tokens": 300, "ignore_eos": True, "seed": 1} | fields


@pytest.fixture(scope="module", autouse=True)
def closed():
    """The connections end before the servers that tests share."""
    yield
    HTTP.close()


# --- bodies ---


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"", "malformed JSON"),
        (b"{", "malformed JSON"),
        (b"[]", "expected a JSON object"),
        (b'{"messages": NaN}', "NaN is not a JSON number"),
        (b'{"n": 1, "n": 2}', "occurs twice"),
        (b'{"model": "\xff"}', "not valid UTF-8"),
        (b"[" * 100_000, "nested too deep"),
        (b'{"seed": ' + b"9" * 4000 + b"}", "out of range"),
        (b'{"prompt": "\\ud800"}', "lone surrogate"),
    ],
)
def test_broken_bodies(server, body, message):
    reply = post(server.url, body, "/v1/completions")
    assert reply.status_code == 400, reply.text
    assert message in reply.json()["error"]["message"]


@pytest.mark.skipif(find_spec("llguidance") is None, reason="llguidance is not installed (extra grammar)")
def test_grammars_that_overflow_the_stack(server):
    """Each is an error of its request; the server goes on."""
    definitions = {f"d{i}": {"type": "array", "items": {"$ref": f"#/$defs/d{i + 1}"}} for i in range(1000)}
    schema = {"$ref": "#/$defs/d0", "$defs": definitions | {"d1000": {}}}
    chain = "start: r0\n" + "".join(f"r{i}: r{i + 1}\n" for i in range(3000)) + 'r3000: "x"'
    bad = [
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}},
        {"grammar": chain},
        {"grammar": "root ::= bar"},
        {"choices": []},
    ]
    for fields in bad:
        reply = post(server.url, {"prompt": "x", "max_tokens": 2} | fields, "/v1/completions")
        assert reply.status_code == 400, reply.text
    assert post(server.url, {"prompt": "x", "max_tokens": 2, "regex": "ab"}, "/v1/completions").status_code == 200


def test_bodies_of_the_wrong_size_or_kind(server):
    large = json.dumps({"prompt": "x" * 200_000}).encode()
    assert post(server.url, large).status_code == 413
    reply = HTTP.post(
        server.url + "/v1/completions",
        content=iter([large[:60_000], large[60_000:]]),
        headers={"content-type": "application/json"},
    )
    assert reply.status_code == 413 and reply.json()["error"]["code"] == "body_too_large"
    plain = post(server.url, {"prompt": "x"}, headers={"content-type": "text/plain"})
    assert plain.status_code == 415, "another site's page may send this without asking"
    assert "Content-Type is not application/json" in plain.json()["error"]["message"]
    assert post(server.url, {"messages": FOX, "max_tokens": 1}, headers={"content-encoding": "Identity"}).is_success
    squeezed = post(server.url, gzip.compress(b'{"prompt": "x"}'), headers={"content-encoding": "gzip"})
    assert squeezed.status_code == 415 and "gzip" in squeezed.json()["error"]["message"]
    refused = HTTP.get(server.url + "/v1/completions")
    assert (refused.status_code, refused.headers["allow"]) == (405, "POST")
    assert refused.json()["error"]["code"] == "method_not_allowed"
    missing = HTTP.get(server.url + "/v1/nothing")
    assert missing.status_code == 404 and "/v1/nothing" in missing.json()["error"]["message"]
    assert HTTP.get(server.url + "/../../etc/passwd").status_code == 404


@pytest.mark.parametrize(
    ("key", "type", "size", "status"),
    [("key", "json", 3 << 20, 413), ("wrong", "json", 1 << 20, 401), ("key", "xml", 1 << 20, 415)],
)
def test_who_sends_on_reads_the_answer_although_the_connection_closes(start, monkeypatch, key, type, size, status):
    """urllib has Connection: close; bytes that are not read reset a connection that closes."""
    monkeypatch.setattr(http, "DROP_SECONDS", 60)
    url = start("--max-body", "1M", keys=("key",)).url
    headers = {"content-type": f"application/{type}", "authorization": f"Bearer {key}"}
    asked = urllib.request.Request(f"{url}/v1/completions", b" " * size, headers)
    for _ in range(5):
        with pytest.raises(urllib.error.HTTPError) as error:
            urllib.request.urlopen(asked, timeout=60)
        with error.value as reply:
            assert reply.code == status and json.load(reply)["error"]


def test_a_connection_may_close_by_one_of_several_options(start, monkeypatch):
    monkeypatch.setattr(http, "DROP_SECONDS", 60)
    server = start("--max-body", "1M")
    head = (
        "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\nconnection: TE, close\r\ncontent-type: application/xml\r\n"
    )
    for _ in range(3):
        with socket.create_connection(("127.0.0.1", server.port), timeout=60) as client:
            client.sendall(f"{head}content-length: {3 << 20}\r\n\r\n".encode() + b" " * (3 << 20))
            assert client.recv(1 << 16).startswith(b"HTTP/1.1 41")


def test_what_is_read_of_a_refused_body_is_bounded(start, monkeypatch):
    monkeypatch.setattr(http, "DROP_SECONDS", 0.2)
    server = start("--max-body", "64K")
    head = "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\ncontent-type: application/json\r\n"
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as client:  # sends no body
        client.sendall(f"{head}content-length: 99999\r\n\r\n".encode())
        assert client.recv(1 << 16).startswith(b"HTTP/1.1 413 ")
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as client:  # sends without an end
        client.sendall(f"{head}content-length: 999999999\r\n\r\n".encode())
        with pytest.raises(ConnectionError):
            for _ in range(1000):
                client.sendall(b" " * 65536)


def test_a_body_that_does_not_come(start, monkeypatch):
    from engine.serve import http

    monkeypatch.setattr(http, "BODY_SECONDS", 0.1)
    server = start()
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as peer:
        peer.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n")
        peer.sendall(b"Content-Length: 100\r\n\r\n{")
        assert peer.recv(4096).startswith(b"HTTP/1.1 408 ")


# --- who may ask ---


def test_keys(start):
    server = start(keys=(KEY, "another-key-of-mine"))
    assert server.client.models.list().data
    wrong = ["none", KEY[:-1], KEY + "x", "Ä" * 20]
    for headers in ({}, *({"authorization": f"Bearer {key}".encode()} for key in wrong), {"authorization": KEY}):
        for path in ("/v1/models", "/metrics", "/trace/x", "/nope"):
            reply = HTTP.get(server.url + path, headers=headers)
            assert reply.status_code == 401 and reply.headers["www-authenticate"] == "Bearer"
    with pytest.raises(openai.AuthenticationError):
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="wrong", max_retries=0).models.list()
    assert HTTP.get(server.url + "/health").json() == {"status": "ok"}
    assert "script" in HTTP.get(server.url + "/").text


def test_keys_share_no_cached_prefixes(start, tmp_path):
    keys, prompt, file = (KEY, "another-key-of-mine"), "Once upon a time there was a little girl", tmp_path / "prefix"
    server = start(keys=keys)
    server.engine.save_prefix(file, "The dog and the cat went to the park to play")

    def cached(server, key, text=prompt):
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0) as client:
            reply = client.completions.create(model="demo", prompt=text, max_tokens=3, extra_body={"search": "greedy"})
        return reply.usage.prompt_tokens_details.cached_tokens

    assert [cached(server, key) > 0 for key in (KEY, KEY, keys[1], keys[1])] == [False, True, False, True]
    assert cached(start(), "none") == 0 and cached(start("--prefix-cache", "off"), "none") == 0
    server = start("--load-prefix", str(file), keys=keys)
    assert all(cached(server, key, "The dog and the cat went to the park to play ball") > 5 for key in keys)


def test_another_sites_name_does_not_lead_here(server):
    """A page of that site could read the answers."""
    for host in ("evil.example", "evil.example:8000", "localhost.evil.example", ""):
        assert HTTP.get(server.url + "/health", headers={"host": host}).status_code == 403
    for host in ("localhost", "127.0.0.1:1", "[::1]:8000"):
        assert HTTP.get(server.url + "/health", headers={"host": host}).status_code == 200


def test_keys_come_from_a_file_or_the_environment(tmp_path, monkeypatch):
    (file := tmp_path / "keys").write_text(f"{KEY}\n\n  {KEY}2 \n")
    assert command.read_keys(str(file)) == [KEY, f"{KEY}2"]
    monkeypatch.setenv(command.KEY, KEY)
    assert command.read_keys(None) == [KEY]
    for text in ("short", "", "ä" * 20):
        file.write_text(text)
        with pytest.raises(UsageError):
            command.read_keys(str(file))
    with pytest.raises(UsageError, match="cannot read the keys"):
        command.read_keys(str(tmp_path / "nope"))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--host", "0.0.0.0"], "other machines need a key"),
        (["--port", "70000"], "--port: expected an integer"),
        (["--timeout", "0"], "--timeout: expected seconds"),
        (["--catalogue", "x"], "--catalogue: expected NAME=FILE"),
        (["--model", "a=x", "--model", "a=y", "--port", "0"], "two models have the name 'a'"),
        (["--model", "x", "--model", "y", "--memory", "1G", "--port", "0"], "--memory is for one model"),
        (["--search", "sample", "--beams", "3"], "the search 'sample' has no such parameter"),
        (["--search", "bon"], "or start the server with --max-width 100"),
        (["--search", "dsbd", "--dsbd-width", "65"], "dsbd_width, dsbd_draft_beams), or start"),
        (["--search", "ults", "--ults-k-max", "65"], "ults_k_max, "),
    ],
)
def test_wrong_command_lines(capsys, monkeypatch, flags, message):
    monkeypatch.delenv(command.KEY, raising=False)
    assert command.main(["--port", "0", *flags]) == 2
    assert message in capsys.readouterr().err


def test_a_taken_port_and_a_missing_package(capsys):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert command.main(["--port", str(taken.getsockname()[1])]) == 2
    assert "cannot listen on 127.0.0.1" in (told := capsys.readouterr().err) and "in use\n--port" in told
    with pytest.raises(UsageError, match="needs the package no_such_package"):
        command.library("no_such_package")


# --- clients that leave, clients that read nothing ---


@pytest.mark.parametrize("stream", [False, True])
def test_who_leaves_frees_the_pages_within_a_step(start, slow, monkeypatch, stream):
    slow(server := start())
    pool, driver = server.engine.pool, server.app.served["demo"].lane.service.driver
    steps: list[int] = []
    peer = raw(server.port, long(stream=stream, beams=8))
    until(lambda: pool.used_pages > 20)
    cancel = driver.cancel
    monkeypatch.setattr(driver, "cancel", lambda job: (steps.append(driver.work["target"].passes), cancel(job)))
    peer.close()
    until(lambda: pool.used_pages == 0)
    assert len(steps) == 1 and driver.work["target"].passes == steps[0], "it went on"
    until(lambda: "requests_cancelled_total{" in (text := HTTP.get(server.url + "/metrics").text) and " 1" in text)
    assert server.client.completions.create(model="demo", prompt="Once", max_tokens=2).choices[0].text


def test_who_leaves_the_queue_never_runs(start, slow):
    slow(server := start("--parallel", "1"))
    lane = server.app.served["demo"].lane
    first = raw(server.port, long())
    until(lambda: lane.running == 1)
    second = raw(server.port, long())
    until(lambda: len(lane.open) == 2)
    second.close()
    until(lambda: len(lane.open) == 1)
    first.close()
    until(lambda: not lane.open and server.engine.pool.used_pages == 0)
    assert lane.figures()["forward_passes"] < 300


def test_a_slow_reader_holds_no_pages(start):
    server = start()
    peer = raw(server.port, long(stream=True, beams=4, n=4, max_tokens=150))
    lane = server.app.served["demo"].lane
    until(lambda: lane._seconds)  # it has ended
    assert not lane.open and server.engine.pool.used_pages == 0
    data = b""
    while b"[DONE]" not in data:
        part = peer.recv(1 << 16)
        assert part
        data += part
    peer.close()


def test_sixty_clients_that_leave_at_any_moment(start):
    server = start("--parallel", "8", "--queue", "100")

    def visit(i: int) -> None:
        peer = raw(server.port, long(stream=i % 2 == 0, **({"beams": 1 + i % 7} if i % 3 else {})))
        time.sleep(i % 13 / 40)
        peer.close()

    with ThreadPoolExecutor(16) as pool:
        [*pool.map(visit, range(60))]
    lane = server.app.served["demo"].lane
    until(lambda: not lane.open and not lane.held and not server.engine.pool.used_pages and not lane.service.entries)
    assert not lane.service.driver.busy
    check_pool(server.engine.pool, [])


# --- queues, memory, time ---


def test_a_full_queue_is_429_with_a_time(start, slow):
    slow(server := start("--parallel", "1", "--queue", "1"))
    lane = server.app.served["demo"].lane
    peers = [raw(server.port, long())]
    until(lambda: lane.running == 1)
    peers.append(raw(server.port, long(max_tokens=5)))
    until(lambda: len(lane.open) == 2)
    with pytest.raises(openai.RateLimitError) as caught:
        server.client.completions.create(model="demo", prompt="x", max_tokens=2)
    assert caught.value.body["code"] == "rate_limit_exceeded" and lane.waiting == 1
    assert 1 <= int(caught.value.response.headers["retry-after"]) <= 60
    patient = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=8)
    peers[0].close()
    assert patient.completions.create(model="demo", prompt="Once", max_tokens=2).choices[0].text
    peers[1].close()
    many = post(server.url, {"prompt": ["x"] * 3}, "/v1/completions")
    assert many.status_code == 400 and "2 prompts of a client at once" in many.text


def test_a_full_cache_means_waiting(start):
    server = start("--kv-memory", "600K", "--parallel", "6")
    with ThreadPoolExecutor(6) as pool:
        replies = [*pool.map(lambda _: post(server.url, long(max_tokens=40, beams=3)), range(6))]
    assert [reply.status_code for reply in replies] == [200] * 6
    assert len({reply.json()["choices"][0]["message"]["content"] for reply in replies}) == 1
    large = post(server.url, long(beams=60))
    assert large.status_code == 400 and large.json()["error"]["code"] == "memory"
    assert server.engine.pool.used_pages == 0


def test_a_request_without_a_number_stays_below_the_limit(start):
    server = start("--max-tokens", "3")
    reply = post(server.url, {"messages": FOX})
    assert reply.status_code == 200 and reply.json()["usage"]["completion_tokens"] == 3


def test_time_is_limited(start, slow):
    slow(server := start("--timeout", "0.2"))
    reply = post(server.url, long(beams=40))
    assert reply.status_code == 504 and reply.headers["x-should-retry"] == "false"
    with pytest.raises(openai.APIError, match=r"more than 0\.2 s"):
        [*server.client.chat.completions.create(model="demo", messages=FOX, max_tokens=300, stream=True,
                                                extra_body={"beams": 40, "ignore_eos": True})]  # fmt: skip
    until(lambda: server.engine.pool.used_pages == 0)


def test_a_search_ends_with_its_time_although_nobody_reads():
    """The error waits for the client, and the search for nobody."""
    cancelled, over = [], asyncio.Event()

    def cancel(ticket):
        cancelled.append(ticket)
        over.set()

    async def never(*_):
        await asyncio.Event().wait()

    async def send(part):
        await asyncio.sleep(0) if part["type"] == "http.response.start" else await never()

    async def run():
        ticket: Any = SimpleNamespace(lane=SimpleNamespace(cancel=cancel), more=never)
        answers: Any = SimpleNamespace(asked=SimpleNamespace(ignored=()), opening=tuple)
        deadline = asyncio.get_running_loop().time() + 0.05
        work = asyncio.ensure_future(Events(answers, [ticket], deadline, 0.05, CoppiceError)({}, never, send))
        async with asyncio.timeout(60):
            await over.wait()
        assert cancelled == [ticket] and not work.done()
        work.cancel()
        await asyncio.wait({work})

    asyncio.run(run())


def test_a_pass_that_fails_ends_what_ran_and_not_the_server(start, monkeypatch, capsys):
    server = start()
    whole = server.engine.runner.pack

    def broken(chunks):
        monkeypatch.setattr(server.engine.runner, "pack", whole)
        raise RuntimeError("the device is lost, in /some/file.cpp")

    monkeypatch.setattr(server.engine.runner, "pack", broken)
    reply = post(server.url, long())
    assert reply.status_code == 500 and reply.json()["error"]["type"] == "server_error"
    assert "the device is lost" in capsys.readouterr().err
    assert post(server.url, long(max_tokens=3)).status_code == 200
    assert server.engine.pool.used_pages == 0 and server.app.stepper.alive


@pytest.mark.parametrize(
    "error",
    [
        CheckpointError("the chat template fails", where="/secret/template.jinja: line 3"),
        CoppiceError("a forward pass failed: RuntimeError: the device is lost, in /secret/file.cpp"),
        UsageError("the chat template rejects the messages: no", where="secret.jinja"),
        UsageError("the chat template takes no tools", where="models/secret/tokenizer_config.json"),
        UsageError("the catalogue is of another tokenizer", where="secret.cat", remedy="make it again"),
        UsageError("prior: /srv/secret.safetensors: No such file or directory"),
        UsageError("prior: ~/secret: No such file or directory"),
        UsageError("prior: runs/secret: No such file or directory"),
        UsageError(r"prior: C:\runs\secret.safetensors: No such file or directory"),
        UsageError("the n-gram store cannot be read: [Errno 24] Too many open files: '/srv/secret'"),
        ConstraintError("the constraint X failed: no", where="/srv/secret.py:12, in X.allowed"),
    ],
)
def test_errors_name_no_paths(error):
    assert "secret" in str(error) and "secret" not in json.dumps(error_body(error))


def test_errors_say_what_clients_need():
    told = {
        "prompt: expected token ids from 0 to 9, got 10; token 3": UsageError(
            "prompt: expected token ids from 0 to 9, got 10", where="token 3"
        ),
        "full; (prompt 3 + new tokens 15 - 1) x 2.5 bytes per token = 4 KB; fewer": KVMemoryError(
            "full", where="(prompt 3 + new tokens 15 - 1) x 2.5 bytes per token = 4 KB", remedy="fewer"
        ),
        "messages: it belongs to /v1/chat/completions": UsageError("messages: it belongs to /v1/chat/completions"),
        "drafts: no; docs/drafts.md says which": UsageError("drafts: no", remedy="docs/drafts.md says which"),
        "json_schema: http://127.0.0.1:1/x is not there": UsageError("json_schema: http://127.0.0.1:1/x is not there"),
        "json_schema: no such definition: #/definitions/x": UsageError(
            "json_schema: no such definition: #/definitions/x"
        ),
        "the request took more than 2 s; fewer tokens": HttpError(
            504, "the request took more than 2 s", code="timeout", remedy="fewer tokens"
        ),
    }
    assert [error_body(error)["error"]["message"] for error in told.values()] == [*told]


def test_a_file_of_the_server_that_is_gone(start, tmp_path):
    """The error of a whole request, by a file that the command line named."""
    server = start("--search", "ults", "--ults-prior", str(make_prior(tmp_path / "prior.safetensors")))
    (tmp_path / "prior.safetensors").unlink()
    reply = post(server.url, {"prompt": "Once", "max_tokens": 2}, "/v1/completions")
    assert reply.status_code >= 400 and "prior" in reply.text and str(tmp_path) not in reply.text


def make_prior(path: Path) -> Path:
    from search.ults.prior import Vectors

    logp = torch.full((2, 3), 0.25).log()
    Vectors(logp, torch.zeros(2, 3, dtype=torch.int64)).save(path)
    return path


def test_large_answers_are_written_beside_the_loop(start, monkeypatch):
    """The spellings of thousands of alternatives take seconds, in which nobody else was answered."""
    server, threads = start(), set()
    served = server.app.served["demo"]
    spelling = served.spelling

    def watched(token: int):
        threads.add(threading.current_thread().name)
        return spelling(token)

    monkeypatch.setattr(served, "spelling", watched)
    for stream in (False, True):
        body = {"prompt": "Once", "max_tokens": 3, "logprobs": 5, "stream": stream}
        assert post(server.url, body, "/v1/completions").text.count("top_logprobs")
    assert threads and "serve" not in threads


# --- the end ---


def test_a_stream_that_the_end_interrupts_says_so(monkeypatch):
    args = command.make_parser().parse_args(["--kv-memory", "8M", "--threads", "1", "-q", "--max-tokens", "100000"])
    with command.application(args) as app:
        with background(app, drain=1) as url:
            port = int(url.rpartition(":")[2])
            lane = app.served["demo"].lane
            step = lane.service.step
            monkeypatch.setattr(lane.service, "step", lambda: (time.sleep(0.1), step()))
            peers = [raw(port, long(stream=stream, max_tokens=400, beams=30)) for stream in (True, False)]
            until(lambda: lane.running == 2)
        answers = [b"".join(iter(partial(peer.recv, 1 << 16), b"")) for peer in peers]
        for peer in peers:
            peer.close()
    last = answers[0].rpartition(b"data: ")[2].partition(b"\n\n")[0]
    assert json.loads(last)["error"]["code"] == "interrupted"
    assert answers[0].endswith(b"0\r\n\r\n"), "the stream is whole"
    assert answers[1].startswith(b"HTTP/1.1 503 ") and b'"interrupted"' in answers[1]


@pytest.mark.skipif(not hasattr(signal, "SIGTERM") or sys.platform == "win32", reason="needs POSIX signals")
def test_sigterm_drains():
    """A process of its own: the request under way is answered to its end, no new one is taken, the exit code is 0."""
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[3])}
    process = subprocess.Popen(
        [sys.executable, "-m", "engine.serve", "--port", "0", "--kv-memory", "8M"],
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    )
    assert process.stderr is not None
    try:
        lines = iter(process.stderr.readline, "")
        port = int(next(found[1] for line in lines if (found := re.search(r"serving on .*:(\d+)$", line))))
        peer = raw(port, long(stream=True, beams=6))
        assert peer.recv(1 << 16).startswith(b"HTTP/1.1 200")
        process.send_signal(signal.SIGTERM)
        data = b""
        while part := peer.recv(1 << 16):
            data += part
        peer.close()
        assert b"[DONE]" in data
        assert process.wait(120) == 0
        with pytest.raises(OSError):
            raw(port, long())
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        process.wait()
        process.stderr.close()


# --- traces, figures, models ---


def test_traces(start):
    server = start("--traces", "2")
    body = {"prompt": ["Once", "The"], "max_tokens": 4, "beams": 2, "trace": True}
    first = post(server.url, body, "/v1/completions").json()["coppice"]["traces"]
    assert len(first) == 2
    page = HTTP.get(server.url + first[0])
    assert page.text.startswith("<!doctype html><!-- coppice trace") and "script-src 'sha256-" in page.text
    assert HTTP.get(server.url + first[1] + "?format=json").json()["search"] == "Trie"
    [second] = post(server.url, body | {"prompt": "A"}, "/v1/completions").json()["coppice"]["traces"]
    assert [HTTP.get(server.url + path).status_code for path in (*first, second)] == [404, 200, 200]
    reply = post(server.url, {"prompt": "A", "max_tokens": 2}, "/v1/completions").json()
    assert "traces" not in reply["coppice"]
    assert HTTP.get(f"{server.url}/trace/{reply['id']}").status_code == 404


BROWSER = """
const values = {model: "demo", search: "trie", beams: "2", tokens: "4"}, elements = {}, lines = [];
const made = (id) => ({value: values[id] ?? "", textContent: "", addEventListener() {}, replaceChildren() {},
  remove() {}, scrollIntoView() {}, append: (line) => lines.push(line)});
const document = {
  body: {classList: {contains: (name) => CLASSES.includes(name)}},
  createElement: made, getElementById: (id) => (elements[id] ??= made(id)),
};
const fetch = (path, options) =>
  options.method ? globalThis.fetch(SERVER + path, options) : {ok: path !== "/v1/models", text: () => path};
"""


@pytest.mark.skipif(shutil.which("node") is None, reason="needs Node.js, which runs the page's script")
@pytest.mark.parametrize("kept", [0, 2])
def test_the_page_answers_with_a_tree_if_traces_are_kept(start, kept):
    server = start("--traces", str(kept))
    page = HTTP.get(server.url + "/").text
    classes = (re.search('<body(?: class="([^"]*)")?>', page)[1] or "").split()
    script = re.search("<script>(.*?)</script>", page, re.S)[1]
    run = f"const CLASSES = {json.dumps(classes)}, SERVER = {json.dumps(server.url)};{BROWSER}{script}"
    run += 'ask("Once upon").then(() => console.log(JSON.stringify([lines, elements.tree.srcdoc])));'
    done = subprocess.run(["node", "-"], input=run, text=True, capture_output=True, check=True, timeout=60)
    shown, tree = json.loads(done.stdout)
    assert [line["className"] for line in shown] == ["user", "assistant"] and shown[1]["textContent"]
    assert tree.startswith("/trace/") if kept else tree == ""


def test_metrics(start):
    server = start()
    post(server.url, {"prompt": "Once", "max_tokens": 4}, "/v1/completions")
    text = HTTP.get(server.url + "/metrics").text
    lines = text.splitlines()
    sample = re.compile(r'coppice_\w+(\{\w+="[^"]*"(,\w+="[^"]*")*\})? [0-9.e+-]+')
    assert "all keys together" in lines[0]
    assert all(line.startswith("# ") or sample.fullmatch(line) for line in lines)
    assert 'coppice_requests_completed_total{model="demo"} 1' in lines
    assert 'coppice_new_tokens_total{model="demo"} 4' in lines
    assert 'coppice_request_seconds_bucket{model="demo",le="+Inf"} 1' in lines
    assert 'coppice_cache_pages_used{model="demo"} 0' in lines
    kinds = [line.split()[2] for line in lines if line.startswith("# TYPE")]
    assert len(kinds) == len(set(kinds)) > 12


def test_several_models(start):
    from engine.demo import demo_folder

    server = start("--model", f"big={demo_folder()}", "--model", f"small={demo_folder('draft')}")
    assert [model.id for model in server.client.models.list()] == ["big", "small"]
    found = [post(server.url, {"model": name, "prompt": "Once upon", "temperature": 0, "max_tokens": 20},
                  "/v1/completions").json() for name in ("big", "small")]  # fmt: skip
    assert found[0]["choices"][0]["text"] != found[1]["choices"][0]["text"]
    assert [reply["model"] for reply in found] == ["big", "small"]
    missing = post(server.url, {"prompt": "Once"}, "/v1/completions")
    assert missing.status_code == 404 and "big or small" in missing.text
    assert sum(one.engine.pool.pages * one.engine.pool.page_bytes for one in server.app.served.values()) <= 8 << 20


def test_catalogues_have_names(start, tmp_path):
    from tools import catalogue

    (items := tmp_path / "items.jsonl").write_text('{"id": 7, "text": "red"}\n{"id": 9, "text": "green"}\n')
    assert catalogue.main(["--input", str(items), "--output", str(tmp_path / "items.cat"), "-q"]) == 0
    server = start("--catalogue", f"colours={tmp_path / 'items.cat'}")
    body = {"messages": FOX, "beams": 2, "n": 2, "catalogue": "colours"}
    choices = post(server.url, body).json()["choices"]
    assert {choice["coppice"]["item"] for choice in choices} == {7, 9}
    wrong = post(server.url, body | {"catalogue": str(tmp_path / "items.cat")})
    assert wrong.status_code == 400 and "expected one of colours" in wrong.text


def test_thoughts_come_apart_from_the_answer(server):
    from engine.contract import Output, SearchResult
    from engine.serve.answers import Answers
    from engine.serve.fields import Asked
    from engine.serve.names import CHAT
    from engine.text.thinking import Thoughts

    asked = Asked(
        server.app.served["demo"], CHAT, [], Thoughts("<think>", "</think>"), 1, 1, True, False, "greedy", None
    )
    answers = Answers("x", asked)
    text = "<think>2 and 2</think>\n\nIt is 4."
    chunks = [chunk for i in range(0, len(text), 3) for chunk in answers.text(0, text[i : i + 3])]
    result = SearchResult([Output([1], -1.0, -1.0, "eos", text)], {"prompt_tokens": 1, "reused_tokens": 0})
    chunks += answers.end(0, result)
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert "".join(delta.get("reasoning_content", "") for delta in deltas) == "2 and 2"
    assert "".join(delta.get("content", "") for delta in deltas) == "It is 4."
    message = answers.whole([result])["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("2 and 2", "It is 4.")
