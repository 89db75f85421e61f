"""Attacks on a server that runs as a process of its own, while another client goes on asking.

The server has two keys. The victim has the second: throughout, it sends a small request and asks for `/health`, over a
new connection each time. The attackers have the first key, or none. An attack is a context manager in a list: it lasts
for the block. What is bounded, during every attack and after it:

- the victim's requests are answered, with 200, each of them within `PATIENCE` seconds;
- from the moment when a request of the victim is checked, at most `STEPS` passes go by until it has been in one, as the
  stepping thread counts them;
- the resident memory of the process has grown by at most `GROWTH` bytes after attacks by connections, and by no more
  while attacks by requests are repeated: the first rounds load code and start processes;
- it has no more files and connections open than before;
- stderr has nothing but the lines that the attack names, one per fault.
"""

import contextlib
import json
import os
import re
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path

import pytest

from tests import draws

resource = pytest.importorskip("resource", reason="needs limits of POSIX")
pytest.importorskip("starlette", reason="needs the extra serve")
pytest.importorskip("uvicorn", reason="needs the extra serve")
pytestmark = pytest.mark.skipif(
    not Path("/proc/self/statm").exists(), reason="reads /proc, and lowers limits by ulimit"
)

ATTACKER, VICTIM = "the-key-of-an-attacker", "the-key-of-the-victim"
PATIENCE = 60.0  # seconds until a request of the victim has failed
PROMPT = 0.01  # seconds from connecting, after which a client that has sent nothing may be closed for others
STEPS = 2  # passes until a request of the victim runs
GROWTH = 32 << 20  # bytes
ROUNDS = 10  # requests of the victim that an attack must last for
# The server, with a record of how many passes each request waited for: its salt and the number, a line each.
WATCHED = """
import sys
from engine.serve import command
from engine.service import Service

log, queue = open(sys.argv.pop(1), "a", buffering=1), Service.submit

def watched(self, entry):
    before, tell, told = self.driver.work["target"].passes, entry.tell, []

    def hear(news):
        if not told:
            told.append(True)
            print(entry.checked.request.cache_salt, self.driver.work["target"].passes - before, file=log)
        tell(news)

    entry.tell = hear
    queue(self, entry)

Service.submit = watched
sys.exit(command.main())
"""


class Late(Exception):
    """The client itself had no time to send its request at once, on a machine that is busy."""


class Live:
    """A server in a process of its own.

    Args:
        folder: for its files.
        files: file descriptors that the process may have.
    """

    def __init__(self, folder: Path, *flags: str, files: int = 512):
        from engine.serve.http import salt_of

        (keys := folder / "keys").write_text(f"{ATTACKER}\n{VICTIM}\n")
        self.waits, self.err = folder / "waits", folder / "stderr"
        limited = ["sh", "-c", 'ulimit -n "$0" && exec "$@"', str(files)]
        command = [sys.executable, "-c", WATCHED, str(self.waits), "--port", "0", "--threads", "1"]
        command += ["--dtype", "float32", "--kv-memory", "4M"]  # as many tokens wherever it runs
        with self.err.open("wb") as err:
            self.process = subprocess.Popen(
                [*limited, *command, "--api-key-file", str(keys), "--drain", "5", *flags],
                stderr=err,
                env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[3])},
            )
        self.salt, self.resident_first, self.descriptors_first = salt_of(VICTIM.encode()), 0, 0
        found = None
        while not found:
            assert self.process.poll() is None, self.err.read_text()
            time.sleep(0.05)
            found = re.search(r"serving on .*:(\d+)\n", self.err.read_text())
        self.port, self._read = int(found[1]), len(self.err.read_bytes())

    def stderr(self) -> str:
        """The lines that the server has written since the last call."""
        data = self.err.read_bytes()[self._read :]
        self._read += len(data)
        return data.decode()

    def resident(self) -> int:
        """Bytes of the process in memory."""
        pages = int(Path(f"/proc/{self.process.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")

    def descriptors(self) -> int:
        """Files and connections that the process has open."""
        return len(os.listdir(f"/proc/{self.process.pid}/fd"))

    def waited(self) -> list[int]:
        """The passes that requests of the victim waited for."""
        lines = self.waits.read_text().splitlines()
        return [int(line.split()[1]) for line in lines if line.startswith(self.salt)]

    def connect(self, data: bytes = b"", seconds: float = 60.0) -> socket.socket:
        """A connection that has sent so much. The server may have closed it by then."""
        peer = socket.socket()
        peer.settimeout(seconds)
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)  # what is not read is soon in the server's way
        try:
            peer.connect(("127.0.0.1", self.port))
        except OSError:
            peer.close()
            raise
        with contextlib.suppress(ConnectionError):
            peer.sendall(data)
        return peer

    def ask(self, path: str, body: dict | None = None, key: str = VICTIM) -> tuple[int, bytes]:
        """The status and the body of an answer, over a connection of its own. Raises Late."""
        data, began = b"", time.monotonic()
        with self.connect(request(path, body, key), PATIENCE) as peer:
            late = time.monotonic() - began > PROMPT
            try:
                while part := peer.recv(1 << 16):
                    data += part
            except ConnectionResetError:
                if late:
                    raise Late from None
                raise
        return int(data.split()[1]) if data else 0, data.partition(b"\r\n\r\n")[2]

    def end(self) -> None:
        """Ends as a signal ends it."""
        self.process.send_signal(signal.SIGTERM)
        try:
            assert self.process.wait(60) == 0
        finally:
            self.process.kill()
            self.process.wait()


class Victim:
    """A client that asks for a little, again and again, in a thread.

    Attributes:
        answers: statuses, and seconds until the answer was there.
    """

    def __init__(self, live: Live):
        self.live, self.answers = live, []
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        small = {"prompt": "Once upon", "max_tokens": 2, "temperature": 0}
        while not self._end.wait(0.05):
            for path, body in (("/v1/completions", small), ("/health", None)):
                began = time.monotonic()
                try:
                    status = self.live.ask(path, body)[0]
                except Late:
                    continue
                except OSError as error:
                    status = str(error)
                self.answers.append((path, status, time.monotonic() - began))

    def more(self, count: int = ROUNDS) -> None:
        """Wait for further answers; each must be there in time."""
        start, wanted = len(self.answers), 2 * count + 1
        while len(found := self.answers[start:]) < wanted:
            wrong = [answer for answer in found if answer[1] != 200 or answer[2] > PATIENCE]
            assert not wrong, wrong
            assert self._thread.is_alive()
            time.sleep(0.02)

    def end(self) -> None:
        self._end.set()
        self._thread.join()


def until(reached: Callable[[], bool]) -> None:
    """Wait for a condition."""
    end = time.monotonic() + PATIENCE
    while not reached():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.02)


def request(
    path: str, body: dict | None = None, key: str = ATTACKER, *, close: bool = True, length: int | None = None
) -> bytes:
    """A request, which says that it has a body of `length` bytes."""
    data = b"" if body is None else json.dumps(body).encode()
    lines = [f"{'GET' if body is None else 'POST'} {path} HTTP/1.1", "Host: localhost"]
    lines += [f"Authorization: Bearer {key}"] * bool(key) + ["Connection: close"] * close
    if body is not None:
        lines += ["Content-Type: application/json", f"Content-Length: {len(data) if length is None else length}"]
    return "\r\n".join([*lines, "", ""]).encode() + data


# --- attacks: each is a context manager that lasts for the block, and takes the server ---

Attack = AbstractContextManager[object]
LONG = {"prompt": "Once", "max_tokens": 200, "ignore_eos": True}


@contextmanager
def many(live: Live, *datas: bytes, each: int) -> Iterator[list[socket.socket]]:
    """Connections that send so much, and then nothing."""
    with ExitStack() as stack:
        yield [stack.enter_context(live.connect(data)) for _ in range(each) for data in datas]


@contextmanager
def repeated(work: Callable[[], None]) -> Iterator[None]:
    """Do something again and again in a thread."""
    end = threading.Event()

    def run() -> None:
        while not end.wait(0.02):
            work()

    (thread := threading.Thread(target=run)).start()
    try:
        yield
    finally:
        end.set()
        thread.join()


def nothing(live: Live) -> Attack:
    """Connections that never send anything."""
    return many(live, b"", each=400)


def half_a_head(live: Live) -> Attack:
    """Requests whose head does not end, with a key and without."""
    return many(live, request("/v1/completions", LONG)[:150], b"GET /health HTTP/1.1\r\nHost: loc", b"G", each=130)


def half_a_body(live: Live) -> Attack:
    """Requests whose body does not come, with a key and without."""
    return many(live, *(request("/v1/completions", LONG, key, length=500) for key in (ATTACKER, "")), each=200)


def idle_keys(live: Live) -> Attack:
    """Connections that stay open after an answer, with a key."""
    return many(live, request("/v1/models", close=False), each=400)


@contextmanager
def a_byte_at_a_time(live: Live) -> Iterator[None]:
    """Heads and bodies that come a byte at a time."""
    datas = [request("/v1/completions", LONG, length=10**6), request("/v1/completions", LONG, "", length=10**6)]
    with many(live, *datas, b"GET /health HTTP/1.1\r\nX: ", each=40) as peers:

        def send() -> None:
            for peer in peers:
                with contextlib.suppress(OSError):
                    peer.send(b" ")

        with repeated(send):
            yield


def unread_streams(live: Live) -> Attack:
    """Streams that nobody reads."""
    return many(live, request("/v1/completions", LONG | {"stream": True}), each=12)


def requests_at_once(live: Live) -> Attack:
    """Two hundred requests before the first answer, which nobody reads, with a key and without."""
    return many(live, *(request(path, close=False) * 200 for path in ("/", "/metrics")), each=100)


def leaving(live: Live) -> Attack:
    """Clients that leave at any moment, some of them with a reset."""
    whole = request("/v1/completions", LONG | {"stream": True})
    datas = [whole, whole[:60], whole[:-5], request("/v1/completions", LONG), request("/v1/models")]

    def visit() -> None:
        with ExitStack() as stack:
            for i, data in enumerate(datas):
                peer = stack.enter_context(live.connect(data))
                if i % 2:
                    peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))

    return repeated(visit)


def nonsense(live: Live) -> Attack:
    """Bytes that are no HTTP, or make no sense: before an answer, during one, and after one."""
    chunked = b"POST %s HTTP/1.1\r\nHost: localhost\r\n%sTransfer-Encoding: chunked\r\n\r\n"
    key = f"Authorization: Bearer {ATTACKER}\r\nContent-Type: application/json\r\n".encode()
    late = [chunked % (b"/v1/completions", head) for head in (key, b"")] + [chunked % (b"/health", b"")]
    datas = [b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" * 20, b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"\0" * 1000]
    datas += [b"GET /" + b"x" * 200_000, b"GET / HTTP/1.1\r\n" + b"X: y\r\n" * 20_000, b"OPTIONS * HTTP/1.1\r\n\r\n"]
    datas += [
        b"GET //%ff%00/../x?%zz HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"CONNECT a:1 HTTP/1.1\r\nHost: localhost\r\n\r\n",
    ]
    datas += [b"GET / HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n"]
    datas += [b"GET /health HTTP/1.1\r\nHost: localhost\r\nExpect: 100-continue\r\nContent-Length: 9\r\n\r\n"]

    def send() -> None:
        with many(live, *datas, *late, each=1) as peers:
            for peer in peers[-len(late) :]:
                peer.settimeout(0.1)
                for _ in range(2):
                    with contextlib.suppress(OSError):
                        peer.recv(1000)
                        peer.sendall(b"ZZZ no chunk\r\n")

    return repeated(send)


@contextmanager
def few_descriptors(live: Live) -> Iterator[None]:
    """The process may open eight files more than it has, and hundreds of clients want a connection."""
    before = resource.prlimit(live.process.pid, resource.RLIMIT_NOFILE)
    resource.prlimit(live.process.pid, resource.RLIMIT_NOFILE, (live.descriptors() + 8, before[1]))
    try:
        with many(live, b"", each=300):
            yield
    finally:
        resource.prlimit(live.process.pid, resource.RLIMIT_NOFILE, before)


# --- attacks by requests that are whole ---


FOX = [{"role": "user", "content": "Tell me a story about a fox."}]


def chats(*bodies: dict) -> list[bytes]:
    """Chats, of the attacker."""
    return [request("/v1/chat/completions", {"messages": FOX, "max_tokens": 24} | body) for body in bodies]


@contextmanager
def asked(live: Live, *datas: bytes, statuses: tuple[int, ...] = (200,)) -> Iterator[None]:
    """Requests at once, again and again; those that are answered have one of the statuses."""
    found: set[int] = set()

    def ask() -> None:
        with many(live, *datas, each=1) as peers:
            for peer in peers:
                with contextlib.suppress(ConnectionError):
                    found.update(map(int, peer.recv(12).split()[1:]))
                    while peer.recv(1 << 16):
                        pass

    with repeated(ask):
        yield
    assert found == {*statuses}


def large_bodies(live: Live) -> Attack:
    """Bodies of four megabytes, most of which would be long work."""
    large = [{"messages": [{"role": "user", "content": "a"}] * 80_000}, {"choices": [f"a{i}" for i in range(300_000)]}]
    large += [{"bad_words": [f"{i} " + "word " * 2000 for i in range(256)]}, {"x": [[]] * 900_000}]
    texts = [request("/v1/completions", {"prompt": text}) for text in ("a" * 4_000_000, "once upon " * 400_000)]
    return asked(live, *chats(*large), *texts, statuses=(400,))


def long_checks(live: Live) -> Attack:
    """Fields of the largest sizes that are allowed."""
    choices = [f"{i} is" for i in range(4096)]
    bodies = [{"choices": choices}, {"bad_words": [f"{i} " + "word " * 9 for i in range(256)]}]
    bodies += [{"stop": ["x" * (15 + i % 2) for i in range(250)]}, {"logit_bias": {str(i): 1 for i in range(1500)}}]
    return asked(live, *chats(*bodies, *bodies))


def long_steps(live: Live) -> Attack:
    """Searches that compute much besides the model."""
    bodies = [{"search": "ults", "ults_samples": 20_000, "ults_batch": 9}, {"search": "aded", "aded_drafter": "mcts"}]
    bodies += [{"no_repeat_ngram_size": 1, "repetition_penalty": 1.1, "beams": 32}, {"n": 32, "logprobs": True}]
    return asked(live, *chats(*bodies))


def many_prompts(live: Live) -> Attack:
    """Bodies that fill the queue, as far as one key may."""
    many_at_once = request("/v1/completions", {"prompt": ["Once"] * 20, "max_tokens": 100, "ignore_eos": True})
    return many(live, many_at_once, each=8)


def many_texts(live: Live) -> Attack:
    """Bodies of as many texts as are taken, for vectors and for ranks, whose replies are as large as they may be."""
    texts = ["Once upon a time there was a little dog."] * 1024
    bodies = [
        request("/v1/embeddings", {"input": texts, "encoding_format": "float"}),
        request("/v1/embeddings", {"input": ["A"] * 2048, "pooling": "last"}),
        request("/v1/rerank", {"query": "Who?", "documents": texts, "return_documents": True}),
    ]
    return many(live, *bodies, each=2)


def full_cache(live: Live) -> Attack:
    """Searches that fill the KV cache."""
    body = {"prompt": "Once", "max_tokens": 400, "ignore_eos": True, "beams": 32, "length_penalty": 2}
    return many(live, *(request("/v1/completions", body | {"prompt": "Once " * i}) for i in range(1, 13)), each=1)


CONNECTIONS = [nothing, half_a_head, half_a_body, idle_keys, a_byte_at_a_time, unread_streams, requests_at_once]
CONNECTIONS += [leaving, nonsense]
REQUESTS = [large_bodies, long_checks, long_steps, many_prompts, many_texts, full_cache]
ATTACKS = [*CONNECTIONS, *REQUESTS, few_descriptors]  # after the last there are fewer connections for a minute
LINES = {
    "few_descriptors": "error: no connection can be accepted: Too many open files; more file descriptors: ulimit -n\n"
}


@contextmanager
def attacked(folder: Path) -> Iterator[tuple[Live, Victim]]:
    """A server, and its victim at work."""
    live = Live(folder)
    victim = Victim(live)
    try:
        victim.more()
        live.resident_first, live.descriptors_first = live.resident(), live.descriptors()
        yield live, victim
    finally:
        victim.end()
        live.end()


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Live, Victim]]:
    with attacked(tmp_path_factory.mktemp("live")) as found:
        yield found


@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: attack.__name__)
def test_nobody_else_notices(live: tuple[Live, Victim], attack: Callable[[Live], Attack]):
    server, victim = live
    server.stderr()
    waited = len(server.waited())
    with attack(server):
        victim.more()
    victim.more(1)
    steps = server.waited()[waited:]
    assert len(steps) >= ROUNDS and max(steps) <= STEPS
    if attack in CONNECTIONS:
        assert server.resident() - server.resident_first < GROWTH
    until(lambda: server.descriptors() <= server.descriptors_first + 2)  # of the victim, and of one that is closing
    assert server.stderr() == LINES.get(attack.__name__, "")


def test_requests_repeated_leave_nothing_behind(tmp_path: Path):
    with attacked(tmp_path) as (server, victim):

        def peak(rounds: int) -> int:
            """The most that was resident after an attack."""
            found = 0
            for attack in REQUESTS * rounds:
                with attack(server):
                    victim.more()
                victim.more(1)
                found = max(found, server.resident())
            return found

        rounds = 4 if draws.FULL else 2
        first = peak(rounds)
        assert peak(rounds) < first + GROWTH


def test_the_page_lists_every_attack():
    page = (Path(__file__).parents[3] / "docs/serving-limits.md").read_text(encoding="utf-8")
    table = page.partition("## What a client can do to others\n")[2].partition("\n## ")[0]
    rows = [line.split(" | ")[-1] for line in table.splitlines() if line.startswith("| ")]
    assert {name for row in rows for name in re.findall(r"`(\w+)`", row)} == {attack.__name__ for attack in ATTACKS}
