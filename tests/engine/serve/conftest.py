"""Servers of the demo model in this process, and the official client."""

import random
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest

from engine import Engine
from engine.serve import command, fields
from tests.invariants import check_pool
from tests.served import background


@pytest.fixture(autouse=True)
def drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """The seeds that a server draws for requests without one are the same in each run of a test."""
    monkeypatch.setattr(fields, "secrets", SimpleNamespace(randbits=random.Random(1).getrandbits))


class Server(NamedTuple):
    """A server that runs, and a client that tries once."""

    app: Any  # an `engine.serve.http.Application`
    url: str
    client: Any

    @property
    def engine(self) -> Engine:
        return next(iter(self.app.served.values())).engine

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])


@contextmanager
def serving(*flags: str, keys: tuple[str, ...] = ()) -> Iterator[Server]:
    openai = pytest.importorskip("openai", reason="needs the extra test")
    args = command.make_parser().parse_args(["--dtype", "float32", "--kv-memory", "8M", "--threads", "1", "-q", *flags])
    command.check(args)
    with command.application(args, keys) as app, background(app) as url:
        with openai.OpenAI(base_url=f"{url}/v1", api_key=keys[0] if keys else "none", max_retries=0) as client:
            yield Server(app, url, client)
        for one in app.served.values():
            check_pool(one.engine.pool)


@pytest.fixture(scope="module")  # others may replace the clock of the process, which the server needs
def server() -> Iterator[Server]:
    """A server that the tests of a file share: none of them changes it."""
    with serving("--max-body", "100K", "--max-tokens", "300", "--max-width", "16") as server:
        yield server


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Let each step of a server take a while: on any machine a long search lasts until a client has done its part."""

    def slow(server: Server, seconds: float = 0.02) -> None:
        service = server.app.served["demo"].lane.service
        step = service.step
        monkeypatch.setattr(service, "step", lambda: (time.sleep(seconds), step()))

    return slow


@pytest.fixture
def start() -> Iterator[Callable[..., Server]]:
    """Start a server with flags of its own; it ends with the test."""
    with ExitStack() as stack:
        yield lambda *flags, **options: stack.enter_context(serving(*flags, **options))
