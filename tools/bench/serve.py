"""A server under load: concurrent clients with mixed searches and widths, and clients that disconnect."""

import argparse
import itertools
import json
import os
import re
import signal
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

from engine.demo import is_demo
from models.later import later
from tools.bench.flags import add_numbers, add_run_flags
from tools.bench.measure import progress
from tools.bench.report import comparison, comparison_table, finish, rows_table, stamp

with later():
    import http.client

ROOT = Path(__file__).parents[2]
HEADERS = {"Content-Type": "application/json"}
PROMPTS = (
    "Once upon a time there was a", "The opposite of hot is", "My name is Anna and I live in",
    "One day the dog and the cat", "In the morning the sun", "The little house by the sea",
    "She looked at the sky and", "It was raining when the",
)  # fmt: skip
COLUMNS = {
    "clients": "{clients}", "requests": "{requests}", "tokens": "{tokens}", "seconds": "{seconds:.1f}",
    "tokens/s": "{rate:.1f}", "first text / whole, median": "{first:.2f}", "errors": "{errors}",
    "other tokens": "{wrong}",
}  # fmt: skip
LEGEND = """*First text / whole* is the time to the first settled text as a share of the time of the whole stream.
*Other tokens* counts the requests whose tokens differ from those of the same request alone. *Memory growth* compares
the median resident memory in the last fifth of the load with that in the first."""


@dataclass
class Reply:
    """The tokens and the times of a stream."""

    tokens: list[int]
    seconds: float
    first: float | None  # seconds until the first text


@dataclass
class Load:
    """The replies that some clients saw."""

    clients: int
    replies: list[tuple[int, Reply]] = field(default_factory=list)  # by the number of the request
    errors: list[str] = field(default_factory=list)
    seconds: float = 0.0
    memory: list[float] = field(default_factory=list)

    def row(self, alone: dict[int, list[int]]) -> dict[str, Any]:
        tokens = sum(len(reply.tokens) for _, reply in self.replies)
        firsts = [reply.first / reply.seconds for _, reply in self.replies if reply.first is not None]
        return {
            "clients": self.clients, "requests": len(self.replies), "tokens": tokens, "seconds": self.seconds,
            "rate": tokens / self.seconds, "first": statistics.median(firsts) if firsts else None,
            "errors": len(self.errors), "wrong": sum(reply.tokens != alone[i] for i, reply in self.replies),
        }  # fmt: skip


def add_parser(commands: Any) -> None:
    parser = commands.add_parser("serve", help="an HTTP server under load", description=__doc__)
    parser.add_argument("--model", metavar="DIR", help="checkpoint folder (the demo)")
    add_numbers(
        parser,
        clients=(16, "clients that send requests at the same time"),
        requests=(32, "different requests; each is first sent alone"),
        seconds=(30.0, "duration of the load"),
        new_tokens=(64, "tokens of each answer"),
        leavers=(200, "clients that disconnect at random moments"),
        kv_memory=(256, "megabytes of the KV cache"),
        seed=0,
    )
    add_run_flags(parser, "serving", run=run)


def run(args: argparse.Namespace, argv: Sequence[str]) -> dict[str, Any]:
    """Measure and report."""
    made = stamp(argv)
    bodies = [*itertools.islice(requests(args), args.requests)]
    with serving(args) as port:
        ask(port, bodies[0])  # compilations and first touches of memory
        single = one_by_one(port, bodies)
        alone = {i: reply.tokens for i, reply in single.replies}
        many = together(port, bodies, args.clients, args.seconds)
        progress(f"{args.leavers} clients that leave")
        left = leaving(port, bodies, args.leavers, Random(args.seed))
        again = ask(port, bodies[0])
    rows = [single.row(alone), many.row(alone)]
    fifth = max(1, len(many.memory) // 5)
    growth = statistics.median(many.memory[-fifth:]) / statistics.median(many.memory[:fifth]) - 1
    bad = rows[1]["errors"] + rows[1]["wrong"] + left + (again.tokens != alone[0])
    targets = [
        comparison("throughput, clients together over one after another", rows[1]["rate"] / rows[0]["rate"], 2.0),
        comparison("first text / whole, median", rows[1]["first"], 0.2, at_most=True),
        comparison("memory growth", growth, 0.02, at_most=True),
        comparison("errors, other tokens, and pages left behind", bad, 0, at_most=True),
    ]
    result = {"results": rows, "targets": targets, "errors": many.errors[:8], "memory": many.memory[:: fifth or 1]}
    body = f"{rows_table(rows, COLUMNS)}\n\n{comparison_table(targets)}\n\n{LEGEND}"
    name = "demo" if args.model is None or is_demo(args.model) else Path(args.model).resolve().name
    finish(f"serve-{name}", made, body, result, args.save)
    return result


def requests(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Bodies of different searches, of widths 1 to 15."""
    draw = Random(args.seed)
    for i in itertools.count():
        width = draw.randint(1, 15)
        kinds: list[dict[str, Any]] = [
            {"search": "trie", "beams": width},
            {"search": "sample", "seed": i, "temperature": 0.9},
            {"search": "trie", "beams": width, "n": max(1, width // 2)},
            {"search": "greedy"},
            {"search": "beam-sample", "beams": width, "seed": i},
            {"search": "ults", "ults_k_max": width, "seed": i},
        ]
        fields = kinds[i % len(kinds)] | {"max_tokens": draw.randint(args.new_tokens // 2, args.new_tokens)}
        yield {
            "prompt": PROMPTS[i % len(PROMPTS)],
            "stream": True,
            "ignore_eos": True,
            "return_token_ids": True,
        } | fields


@contextmanager
def serving(args: argparse.Namespace) -> Iterator[int]:
    """Context with a server in a process of its own; yields its port. SIGTERM ends it, with exit code 0."""
    command = [sys.executable, "-m", "engine.serve", "--port", "0", "--kv-memory", f"{args.kv_memory}M"]
    command += ["--prefix-cache", "off"]  # prompts repeat
    command += ["--model", args.model] if args.model else []
    command += ["--threads", str(args.threads)] if args.threads else []
    command += ["--dtype", args.dtype, "--queue", str(max(64, args.leavers + args.clients)), "--timeout", "3600"]
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=os.environ | {"PYTHONPATH": path})
    assert process.stderr is not None
    found, seen = None, []
    for line in process.stderr:
        seen.append(line)
        if found := re.search(r"serving on .*:(\d+)$", line):
            break
    if found is None:
        raise RuntimeError(f"the server did not start: {''.join(seen)}")
    threading.Thread(target=lambda: [sys.stderr.write(line) for line in process.stderr or ()], daemon=True).start()
    try:
        yield int(found[1])
    finally:
        process.send_signal(signal.SIGTERM)
        if process.wait() != 0:
            progress(f"the server ended with {process.returncode}")


def ask(port: int, body: dict[str, Any]) -> Reply:
    """A completion, read as a stream. Raises OSError or ValueError."""
    began, first, tokens = time.perf_counter(), None, []
    with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=3600)) as connection:
        connection.request("POST", "/v1/completions", json.dumps(body), HEADERS)
        reply = connection.getresponse()
        if reply.status != 200:
            raise ValueError(f"HTTP {reply.status}: {reply.read(300).decode()}")
        for line in reply:
            if line.startswith(b"data: {"):
                chunk = json.loads(line[6:])
                if "error" in chunk:
                    raise ValueError(chunk["error"]["message"])
                [choice] = chunk["choices"]
                if first is None and choice["text"]:
                    first = time.perf_counter() - began
                if not choice["index"] and "coppice" in choice:
                    tokens = choice["coppice"]["token_ids"]
    return Reply(tokens, time.perf_counter() - began, first)


def figures(port: int) -> dict[str, float]:
    """The server's figures of its only model."""
    with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=60)) as connection:
        connection.request("GET", "/metrics")
        text = connection.getresponse().read().decode()
    return {name: float(value) for name, value in re.findall(r"^coppice_(\w+)(?:\{[^,}]*\})? (\S+)$", text, re.M)}


def one_by_one(port: int, bodies: Sequence[dict[str, Any]]) -> Load:
    """Send every request alone."""
    load, began = Load(1), time.perf_counter()
    for i, body in enumerate(bodies):
        load.replies.append((i, ask(port, body)))
        progress(f"alone: {i + 1} of {len(bodies)}")
    load.seconds = time.perf_counter() - began
    return load


def together(port: int, bodies: Sequence[dict[str, Any]], clients: int, seconds: float) -> Load:
    """Run clients that each send one request after another."""
    load, numbers, began = Load(clients), itertools.count(), time.perf_counter()

    def client() -> None:
        while time.perf_counter() - began < seconds:
            i = next(numbers) % len(bodies)
            try:
                load.replies.append((i, ask(port, bodies[i])))
            except (OSError, ValueError, http.client.HTTPException) as error:
                load.errors.append(f"{type(error).__name__}: {error}")

    threads = [threading.Thread(target=client) for _ in range(clients)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        load.memory.append(figures(port)["resident_bytes"])
        threads[0].join(max(0.2, seconds / 50))
    load.seconds = time.perf_counter() - began
    return load


def leaving(port: int, bodies: Sequence[dict[str, Any]], clients: int, draw: Random) -> int:
    """Clients that close their connection at random moments; returns the pages in use when all have left."""
    moments = [(draw.choice(bodies), draw.random() < 0.5, draw.uniform(0, 2)) for _ in range(clients)]

    def visit(moment: tuple[dict[str, Any], bool, float]) -> None:
        body, stream, seconds = moment
        data = json.dumps(body | {"stream": stream}).encode()
        head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        with socket.create_connection(("127.0.0.1", port), timeout=60) as peer:
            peer.sendall(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
            time.sleep(seconds)

    with ThreadPoolExecutor(64) as pool:
        deque(pool.map(visit, moments), 0)  # raises what a visit raised
    end = time.monotonic() + 60
    while time.monotonic() < end:
        found = figures(port)
        if not found["requests_running"] + found["requests_waiting"] + found["cache_pages_used"]:
            return 0
        time.sleep(0.05)
    return int(figures(port)["cache_pages_used"])
