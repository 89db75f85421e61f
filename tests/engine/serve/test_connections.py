"""How many connections there are, how long each may take, and which are closed first."""

import json
import socket
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("starlette", reason="needs the extra serve")
pytest.importorskip("uvicorn", reason="needs the extra serve")
from engine.serve import command, connections

KEY = "a-key-of-some-length"
LARGE = {
    "prompt": ["Once"] * 4,
    "max_tokens": 250,
    "ignore_eos": True,
    "logprobs": 20,
    "seed": 1,
}  # answers of megabytes


def request(path: str, body: dict[str, Any] | None = None, key: str = KEY, length: int | None = None) -> bytes:
    """A request, which says that its body has `length` bytes."""
    data = b"" if body is None else json.dumps(body).encode()
    lines = [f"{'GET' if body is None else 'POST'} {path} HTTP/1.1", "Host: localhost", f"Authorization: Bearer {key}"]
    lines += ["Content-Type: application/json", f"Content-Length: {len(data) if length is None else length}"]
    return "\r\n".join([*lines, "", ""]).encode() + data


def ended(peer: socket.socket) -> bool:
    """Whether the server has closed a connection; what it sent before is dropped."""
    peer.settimeout(0.02)
    try:
        while peer.recv(1 << 16):
            pass
    except TimeoutError:
        return False
    except ConnectionError:
        pass
    return True


def answer(peer: socket.socket, each: Callable[[], None] = lambda: None) -> tuple[int, bool]:
    """The status of an answer, and whether it came as a whole; `each` is called after each read."""
    data, length = b"", 1
    while len(data) < length and (part := peer.recv(1 << 16)):
        data += part
        head, end, _ = data.partition(b"\r\n\r\n")
        length = len(head + end) + int(head.lower().partition(b"content-length: ")[2].split()[0]) if end else 1 << 30
        each()
    return int(data.split()[1]) if data else 0, len(data) == length


def until(reached: Callable[[], object], seconds: float = 60.0) -> None:
    """Wait for a condition."""
    end = time.monotonic() + seconds
    while not reached():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.01)


@pytest.fixture
def connect():
    """Connections that have sent something; they end with the test."""
    with ExitStack() as stack:

        def make(server, data: bytes = b"") -> socket.socket:
            peer = stack.enter_context(socket.socket())
            peer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            peer.settimeout(60)
            peer.connect(("127.0.0.1", server.port))
            peer.sendall(data)
            return peer

        yield make


def test_a_request_that_does_not_come_is_closed(start, slow, connect, monkeypatch):
    """Also one that comes a byte at a time, and one that goes on after its answer."""
    slow(server := start(keys=(KEY,)), 0.1)
    monkeypatch.setattr(connections, "SWEEP_SECONDS", 0.05)
    body = {"prompt": "Once", "stream": True, "max_tokens": 400, "ignore_eos": True}
    stream = connect(server, request("/v1/completions", body))
    assert stream.recv(1 << 12).startswith(b"HTTP/1.1 200")
    monkeypatch.setattr(connections, "REQUEST_SECONDS", 0.4)
    datas = [b"", b"GET /health HTTP/1.1\r\nX: ", request("/v1/completions", {}, KEY, 9999)]
    peers = [connect(server, data) for data in [*datas, request("/v1/completions", {}, "wrong", 9999)]]

    def all_ended() -> bool:
        for peer in peers[1:]:
            with suppress(OSError):
                peer.send(b" ")
        return all(map(ended, peers))

    until(all_ended)
    assert not ended(stream), "a stream may last"


def test_a_client_that_reads_nothing_is_closed(start, connect, monkeypatch):
    """One that reads slowly is not. By a clock that goes on by 15 ms for each read of that client."""
    listen, close, closed, now = command.listen, connections.Connections.close, [], 0.0

    def read() -> None:
        nonlocal now
        now += 0.015

    monkeypatch.setattr(connections, "time", SimpleNamespace(monotonic=lambda: now))
    monkeypatch.setattr(connections.Connections, "close", lambda self, one: (closed.append(one), close(self, one)))
    monkeypatch.setattr(connections, "SWEEP_SECONDS", 0.01)
    monkeypatch.setattr(connections, "STALL_SECONDS", 0.6)

    def listen_with_a_small_buffer(host: str, port: int) -> socket.socket:
        listener = listen(host, port)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        return listener

    monkeypatch.setattr(command, "listen", listen_with_a_small_buffer)
    server = start()
    idle, slow = (connect(server, request("/v1/completions", LARGE)) for _ in range(2))

    assert answer(slow, read) == (200, True)
    assert now > 1.5, "it was not slow enough"
    until(lambda: read() or closed)
    assert answer(idle) == (200, False)


def test_nothing_that_is_sent_waits_for_an_acknowledgement(start, connect, monkeypatch):
    """A body waited 40 ms for that of its head, each event of a stream for that of the one before."""
    enter, options = connections.Connections.enter, []

    def watched(self, one) -> None:
        options.append(one.transport.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
        enter(self, one)

    monkeypatch.setattr(connections.Connections, "enter", watched)
    assert answer(connect(start(), request("/health"))) == (200, True)
    assert options and all(options)


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Servers of four connections: one of a stranger, and three others."""
    monkeypatch.setattr(connections, "most_connections", lambda wanted: 4)


def test_the_idlest_is_closed_first(start, connect, few):
    server, ask = start(keys=(KEY,)), request("/v1/models")
    known = []
    for _ in range(3):
        known.append(connect(server, ask))
        assert answer(known[-1]) == (200, True)
    for _ in range(5):  # of strangers the latest stays, and no other client is closed for them
        stranger = connect(server)
    known[0].sendall(ask)
    assert answer(known[0]) == (200, True)
    stranger.sendall(ask)
    assert answer(stranger) == (200, True)
    assert [ended(peer) for peer in known] == [False, True, False]


def test_of_clients_that_all_come_at_once_the_one_that_asks_is_answered(start, few, monkeypatch):
    """A hundred wait for the one place of a stranger when the server begins to accept."""
    listen, peers = command.listen, []

    def listen_late(host: str, port: int) -> socket.socket:
        listener = listen(host, port)
        for i in range(100):
            peers.append(socket.create_connection(listener.getsockname(), timeout=60))
            if i == 50:
                peers[i].sendall(request("/v1/models"))
        return listener

    monkeypatch.setattr(command, "listen", listen_late)
    start(keys=(KEY,))
    try:
        assert answer(peers[50]) == (200, True)
    finally:
        for peer in peers:
            peer.close()


def test_answers_under_way_are_never_closed_for_others(start, slow, connect, few):
    """With as many as there may be, another request with a key is refused, and `/health` is answered."""
    slow(server := start(keys=(KEY,)))
    body = {"prompt": "Once", "stream": True, "max_tokens": 2000, "ignore_eos": True}
    streams = []
    for _ in range(3):
        streams.append(connect(server, request("/v1/completions", body)))
        assert streams[-1].recv(1 << 12).startswith(b"HTTP/1.1 200")
    assert answer(connect(server, request("/v1/models"))) == (503, True)
    assert answer(connect(server, request("/health", key=""))) == (200, True)
    assert not any(map(ended, streams))
    streams[0].close()
    until(lambda: answer(connect(server, request("/v1/models"))) == (200, True))


def test_requests_before_the_answer_to_another_are_not_answered(start, connect):
    server = start()
    peer = connect(server, request("/health") * 50)
    assert answer(peer) == (200, True)
    until(lambda: ended(peer))
