"""A small server that speaks the hub's HTTP, as far as `huggingface_hub` asks for it."""

import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit


def digest(data: bytes) -> str:
    return hashlib.sha1(data).hexdigest()


def commit_of(files: dict[str, bytes]) -> str:
    """A commit as the hub has them: 40 hexadecimal digits."""
    return digest(repr(sorted((name, digest(data)) for name, data in files.items())).encode())


def files_of(folder: Path) -> dict[str, bytes]:
    """The files of a folder by their paths in it."""
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@dataclass
class Hub:
    """The files that the server has, and the requests that it got.

    Args:
        repos: files by repository and revision.
        gated: repositories whose files need the token.
        breaks: how often a file's content breaks off in its middle, by its path.
        stalls: files whose content stops in its middle, by their paths; the hub sets the event then.
        faults: the status that a file's content gets instead, by its path.
        answer: the content of every response instead, if it is not empty.
        status: that all requests get, if it is not 0.
    """

    url: str = ""
    repos: dict[str, dict[str, dict[str, bytes]]] = field(default_factory=dict)
    gated: dict[str, str] = field(default_factory=dict)
    breaks: dict[str, int] = field(default_factory=dict)
    stalls: dict[str, threading.Event] = field(default_factory=dict)
    faults: dict[str, int] = field(default_factory=dict)
    answer: bytes = b""
    status: int = 0
    asked: list[tuple[str, str, str]] = field(default_factory=list)  # method, path, Range

    def add(self, repo: str, files: dict[str, bytes], revision: str = "main") -> str:
        """Add a revision; returns its commit."""
        commit = commit_of(files)
        self.repos.setdefault(repo, {}).update({revision: files, commit: files})
        return commit

    def fetched(self) -> list[str]:
        """The files whose contents were asked for."""
        paths = [path for method, path, _ in self.asked if method == "GET" and "/resolve/" in path]
        return [path.partition("/resolve/")[2].partition("/")[2] for path in paths]


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub

    def log_message(self, *_: Any) -> None:
        pass

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path)
        self.hub.asked.append((self.command, path, self.headers.get("Range", "")))
        if self.hub.status:
            return self.send(self.hub.status)
        if self.hub.answer:
            return self.send(200, self.hub.answer)
        if found := re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/(revision|tree)/([^/]+))?", path):
            repo, kind, revision = found[1], found[2], found[3] or "main"
        elif found := re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path):
            repo, kind, revision = found[1], "file", found[2]
        else:
            return self.send(404)
        if repo not in self.hub.repos:
            return self.send(401, error="RepoNotFound")
        if revision not in self.hub.repos[repo]:
            return self.send(404, error="RevisionNotFound")
        files = self.hub.repos[repo][revision]
        if kind == "file":
            return self.file(repo, found[3], files)
        if kind == "tree":
            rows = [{"type": "file", "path": name, "size": len(files[name]), "oid": "0"} for name in files]
            return self.send(200, json.dumps(rows).encode())
        told = {"id": repo, "sha": commit_of(files), "siblings": [{"rfilename": name} for name in files]}
        return self.send(200, json.dumps(told).encode())

    def file(self, repo: str, name: str, files: dict[str, bytes]) -> None:
        if repo in self.hub.gated and self.headers.get("Authorization") != f"Bearer {self.hub.gated[repo]}":
            return self.send(403, error="GatedRepo")
        if name not in files:
            return self.send(404, error="EntryNotFound")
        if self.command == "GET" and name in self.hub.faults:
            return self.send(self.hub.faults[name])
        data = files[name]
        headers = {"ETag": f'"{digest(data)}"', "X-Repo-Commit": commit_of(files), "Accept-Ranges": "bytes"}
        status = 200
        if wanted := re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", "")):
            status, start, end = 206, int(wanted[1]), min(int(wanted[2] or len(data)) + 1, len(data))
            headers["Content-Range"] = f"bytes {start}-{end - 1}/{len(data)}"
            data = data[start:end]
        breaks = self.command == "GET" and self.hub.breaks.get(name, 0) > 0
        if breaks:
            self.hub.breaks[name] -= 1
        stalled = self.hub.stalls.get(name) if self.command == "GET" else None
        self.send(status, data, headers=headers, sent=len(data) // 2 if breaks or stalled else None)
        if stalled:
            stalled.set()
            self.connection.settimeout(60)
            with suppress(OSError):
                self.connection.recv(1)  # until the client closes the connection

    def send(self, status: int, data: bytes = b"", *, error: str = "", headers: Any = None, sent: Any = None) -> None:
        """Send a response; `sent`: only so many bytes of it, and then close the connection."""
        self.send_response(status)
        for name, value in {**({"X-Error-Code": error} if error else {}), **(headers or {})}.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data[:sent])
        if sent is not None:
            self.wfile.flush()
            self.close_connection = True


@contextmanager
def serving() -> Iterator[Hub]:
    """A hub, while the block runs."""
    hub = Hub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": hub}))
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
