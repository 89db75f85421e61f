"""The HTTP side: routes, authorisation, bodies and their limits, streams, clients that disconnect."""

import asyncio
import contextlib
import hashlib
import hmac
import ipaddress
import re
import secrets
import sys
import time
import traceback
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from engine.app import trace_page
from engine.app.records import parse_record
from engine.contract.checks import brief
from engine.contract.trace import Trace
from engine.errors import CoppiceError, UsageError
from engine.serve.answers import Answers, HttpError, encoded, error_body, error_headers, status_of
from engine.serve.fields import Asked, places_of, read
from engine.serve.limits import Limits
from engine.serve.names import CHAT, COMPLETIONS, header_of
from engine.serve.responses import RESPONSES, ResponseAnswers, chat_body
from engine.serve.served import Served
from engine.serve.stepper import Stepper, Ticket, share
from engine.serve.streams import Events, Parts, cancel, in_thread_if_large, shutdown_error, timeout_error, until
from engine.serve.texts import Texts, answered, read_embeddings, read_rerank
from models.trim import trim_memory

SALT = "coppice.salt"  # key of the salt of cached prefixes in the scope of a request
CONNECTION = "coppice.connection"  # in the state of a request's scope: has `admit`, and `since` when it began to come
OPEN = ("/", "/health")  # paths that need no key, because they reveal nothing
LOCAL = ("localhost", "127.0.0.1", "::1")
BODY_SECONDS = 30.0  # limit from the first byte of a request to the last of its body
BODIES = 16  # bodies of the largest size that are held at once
BODIES_DROPPED = 4  # a refused body is read and dropped up to so many times the largest size,
DROP_SECONDS = 1.0  # and for so long
LARGE = 1 << 18  # bytes of a body whose memory goes back to the system, when it has been answered
TRIM_SECONDS = 0.1
MOST_BRACKETS = 1 << 17  # brackets in a body: the parser makes an object of each without letting other threads run
LARGE_REPLY = 1 << 16  # bytes from which a thread writes a reply in parts
PREFIXES = {CHAT: "chatcmpl-", COMPLETIONS: "cmpl-", RESPONSES: "resp_"}  # prefixes of ids
CLOSED = 499  # status of a response that nobody reads
PAGE = Path(__file__).parent / "page.html"
T = TypeVar("T")


class Application:
    """The ASGI application.

    Args:
        served: the models by name; a request may leave the name out if there is only one.
        stepper: runs their requests.
        limits: limits of every request.
        keys: bearer keys; a client needs one of them; none: no key is needed.
        hosts: accepted names in the header Host, so that no other site's name leads here; empty: any.
        traces: number of traces that are kept.
        verbose: print tracebacks on stderr.
    """

    def __init__(
        self,
        served: Sequence[Served],
        stepper: Stepper,
        limits: Limits,
        *,
        keys: Sequence[str] = (),
        hosts: Sequence[str] = LOCAL,
        traces: int = 32,
        verbose: bool = False,
    ):
        self.served = {one.name: one for one in served}
        self.named = {name: each for one in served for name, each in one.adapted().items()} | self.served
        self.stepper, self.limits, self.kept, self.verbose = stepper, limits, traces, verbose
        self.traces: OrderedDict[str, Trace] = OrderedDict()
        self._bytes: Counter[str] = Counter()  # bytes of the bodies that are held, by client
        # Without keys, clients differ only by address, and only if other machines can reach the server.
        self.alone = len(keys) == 1 or not (keys or not hosts)
        for one in served:
            one.lane.service.alone = self.alone
        self._page = PAGE.read_text(encoding="utf-8")
        if not limits.traces:  # the page must not ask for one
            self._page = self._page.replace("<body>", '<body class="untraced">')
        self._policy = _policy(self._page)
        get = {
            "/": self.page,
            "/health": self.health,
            "/metrics": self.metrics,
            "/v1/models": self.models,
            "/v1/models/{name:path}": self.model,
            "/trace/{name}": self.trace,
        }
        completions = {"/v1/completions": COMPLETIONS, "/v1/chat/completions": CHAT, "/v1/responses": RESPONSES}
        many = {"/v1/embeddings": read_embeddings, "/v1/rerank": read_rerank, "/v2/rerank": read_rerank}
        post = {path: partial(self.complete, kind) for path, kind in completions.items()}
        post |= {path: partial(self.many, read_texts) for path, read_texts in many.items()}
        methods = (("GET", get), ("POST", post))
        routes = [Route(path, self._handled(f), methods=[name]) for name, each in methods for path, f in each.items()]
        inner = Starlette(routes=routes, exception_handlers={HTTPException: _http_error})
        self._app = Guard(inner, keys, hosts)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and _closes(scope):
            receive, send = _read_on(receive, send, BODIES_DROPPED * self.limits.body)
        await self._app(scope, receive, send)

    # --- small answers ---

    async def page(self, _: Request) -> Response:
        return HTMLResponse(self._page, headers={"content-security-policy": self._policy})

    async def health(self, _: Request) -> Response:
        alive = self.stepper.alive
        return JSONResponse({"status": "ok" if alive else "failed"}, 200 if alive else 503)

    async def metrics(self, _: Request) -> Response:
        known = {name: one.lane.figures() for name, one in self.served.items()}
        return PlainTextResponse(self.stepper.metrics.text(known), media_type="text/plain; version=0.0.4")

    async def models(self, _: Request) -> Response:
        return JSONResponse({"object": "list", "data": [_model(one) for one in self.named.values()]})

    async def model(self, request: Request) -> Response:
        return JSONResponse(_model(self._find(request.path_params["name"])))

    async def trace(self, request: Request) -> Response:
        trace = self.traces.get(name := request.path_params["name"])
        if trace is None or trace.record is None:
            what = "there is no such trace" if trace is None else "the search is still running"
            raise HttpError(404, what, code="not_found", remedy=f'ask with "trace": true; {self.kept} are kept')
        if request.query_params.get("format") == "json":
            return JSONResponse(trace.record)
        return HTMLResponse(await asyncio.to_thread(trace_page.page, [trace.record]), headers={"x-trace": name})

    # --- completions ---

    async def complete(self, kind: str, request: Request) -> Response:
        """Answer a request for completions, as a whole or as a stream."""
        data, client = await self._body(request), client_of(request.scope)
        deadline = asyncio.get_running_loop().time() + self.limits.seconds
        with self._held(client, len(data)):
            work = self._submitted(kind, data, client, request.scope.get(SALT, ""))
            del data
            answers, tickets = await self._awaited(request, work, deadline)
        if answers.asked.stream:
            return Events(answers, tickets, deadline, self.limits.seconds, self._log)
        try:
            results = await self._awaited(request, asyncio.gather(*(ticket.result() for ticket in tickets)), deadline)
        finally:
            cancel(tickets)
        data = await in_thread_if_large(answers, lambda: encoded(answers.whole(results)))
        return Response(data, headers=header_of(answers.asked.ignored), media_type="application/json")

    async def _submitted(self, kind: str, data: bytes, client: str, salt: str) -> tuple[Answers, list[Ticket]]:
        """Check the body of a request, and queue its engine requests. Raises CoppiceError."""
        body = await self._parsed(data, client)
        served = self._find(body.get("model"))
        identity = PREFIXES[kind] + secrets.token_urlsafe(16)
        write: Callable[[str, Asked], Answers] = Answers
        if kind == RESPONSES:
            write = partial(ResponseAnswers, body=body)
            kind, body = CHAT, chat_body(body)
        if (count := places_of(body, kind)) > served.lane.most:
            raise UsageError(f"prompt: this server takes {served.lane.most} prompts of a client at once, got {count}")
        with served.lane.place(client, count):
            work = partial(read, body, kind, served, self.limits, identity, salt)
            asked = await self.stepper.check(work, client)
            tickets = [served.lane.submit(checked, asked.stream, client) for checked in asked.checked]
        self._keep(asked.traces)
        return write(identity, asked), tickets

    async def many(self, read_texts: Callable[..., Texts], request: Request) -> Response:
        """Answer a request of many texts."""
        data, client = await self._body(request), client_of(request.scope)
        deadline = asyncio.get_running_loop().time() + self.limits.seconds
        with self._held(client, len(data)):
            work = self._read(read_texts, data, client, request.scope.get(SALT, ""))
            del data
            texts = await self._awaited(request, work, deadline)
        with contextlib.ExitStack() as stack:
            if texts.size > LARGE:
                self._require_room(client, texts.size)
                stack.enter_context(self._held(client, texts.size))
            results = await self._awaited(request, answered(texts, client), deadline)
            parts, headers = texts.write(results), header_of(texts.ignored)
            if texts.size <= LARGE_REPLY:
                return Response(b"".join(parts), headers=headers, media_type="application/json")
            return Parts(parts, headers, stack.pop_all().close)

    async def _read(self, read_texts: Callable[..., Texts], data: bytes, client: str, salt: str) -> Texts:
        """Check the body of a request of many texts. Raises CoppiceError."""
        body = await self._parsed(data, client)
        served = self._find(body.get("model"))
        return await self.stepper.check(partial(read_texts, body, served, self.limits, salt), client)

    async def _awaited(self, request: Request, work: "Awaitable[T]", deadline: float) -> T:
        """The result of work that a request waits for. Raises HttpError at the deadline, and ClientDisconnect."""
        future = asyncio.ensure_future(work)
        future.add_done_callback(lambda done: done.cancelled() or done.exception())  # or it would be reported
        try:
            async with asyncio.timeout_at(deadline):
                left = await until(future, request.receive)
        except TimeoutError:
            raise timeout_error(self.limits.seconds) from None
        finally:
            future.cancel()
        if left:
            raise ClientDisconnect
        return future.result()

    @contextlib.contextmanager
    def _held(self, client: str, size: int) -> Iterator[None]:
        """Count the bytes of a body that a client has sent, while they are held."""
        self._bytes[client] += size
        try:
            yield
        finally:
            self._bytes[client] -= size
            self._bytes += Counter()  # drops the clients that hold none
            if size > LARGE:
                loop = asyncio.get_running_loop()
                loop.call_later(TRIM_SECONDS, loop.run_in_executor, None, trim_memory)

    def _require_room(self, client: str, size: int) -> None:
        """Raises HttpError if `size` more bytes exceed a client's share of the bytes that are held."""
        others = self._bytes.total() - self._bytes[client]
        if self._bytes[client] + size > share(BODIES * self.limits.body, others, self.alone):
            raise HttpError(503, "too many large bodies at once", code="overloaded")

    def _find(self, name: Any) -> Served:
        """The model of a name. Raises HttpError."""
        if name is None and len(self.served) == 1:
            return next(iter(self.served.values()))
        if not isinstance(name, str) or name not in self.named:
            got = "none" if name is None else brief(name)
            what = f"model: expected {' or '.join(self.named)}, got {got}"
            raise HttpError(404, what, code="model_not_found")
        return self.named[name]

    async def _body(self, request: Request) -> bytes:
        """The body, within limits of size and time. Raises HttpError."""
        if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
            # A page of another site can send no such request without asking, which is refused.
            remedy = "send the header Content-Type: application/json"
            raise HttpError(415, "the request's Content-Type is not application/json", code="usage", remedy=remedy)
        if (encoding := request.headers.get("content-encoding", "identity")[:20]).lower() != "identity":
            raise HttpError(
                415, f"Content-Encoding {encoding} is not served", code="usage", remedy="send the body as it is"
            )
        large = HttpError(413, f"the body has more than {self.limits.body} bytes", code="body_too_large")
        if int(request.headers.get("content-length", 0)) > self.limits.body:
            raise large
        data, client = bytearray(), client_of(request.scope)
        try:
            connection = request.scope.get("state", {}).get(CONNECTION)
            spent = 0.0 if connection is None else time.monotonic() - connection.since
            async with asyncio.timeout(BODY_SECONDS - spent):
                async for part in request.stream():
                    data += part
                    self._bytes[client] += len(part)
                    if len(data) > self.limits.body:
                        raise large
                    self._require_room(client, 0)
        except TimeoutError:
            raise HttpError(408, f"the request took more than {BODY_SECONDS:g} s to arrive", code="timeout") from None
        finally:
            self._bytes[client] -= len(data)
            self._bytes += Counter()
        return bytes(data)

    async def _parsed(self, data: bytes, client: str) -> dict[str, Any]:
        """The object that a body holds, without keys whose value is null. Raises UsageError."""
        if (count := data.count(b"[") + data.count(b"{")) > MOST_BRACKETS:
            raise UsageError(f"the body has {count} opening brackets, this server takes {MOST_BRACKETS}")
        parse = partial(parse_record, data)
        body = parse() if len(data) < 1 << 16 else await self.stepper.check(parse, client)
        return {key: value for key, value in body.items() if value is not None}

    def _keep(self, traces: Sequence[Trace]) -> None:
        self.traces.update((str(trace.name), trace) for trace in traces)
        while len(self.traces) > self.kept:
            self.traces.popitem(last=False)

    # --- errors ---

    def _handled(self, work: Callable[[Request], Awaitable[Response]]) -> Callable[[Request], Awaitable[Response]]:
        """Wrap an endpoint so that its errors are OpenAI's JSON."""

        async def handle(request: Request) -> Response:
            try:
                return await work(request)
            except ClientDisconnect:
                return Response(status_code=CLOSED)
            except asyncio.CancelledError:
                return _error(shutdown_error())
            except Exception as error:
                try:
                    return _error(self._log(error))
                finally:  # its frames hold the body, and refer to the error
                    error.__traceback__ = error.__context__ = error.__cause__ = None

        return handle

    def _log(self, error: Exception) -> CoppiceError:
        """The error that the client gets. Errors of the server are also reported on stderr."""
        ours = error if isinstance(error, CoppiceError) else CoppiceError(f"the server failed: {type(error).__name__}")
        if status_of(ours) >= 500 and not isinstance(error, HttpError):
            with contextlib.suppress(OSError):
                if self.verbose or ours is not error:
                    traceback.print_exception(error)
                else:
                    print("error:", "; ".join(str(error).splitlines()), file=sys.stderr)
        return ours


def client_of(scope: Scope) -> str:
    """The client for sharing queues: the key of a bearer; without keys an address, for IPv6 a network."""
    address = (scope.get("client") or ("", 0))[0]
    network = address if ":" not in address else ":".join(ipaddress.ip_address(address).exploded.split(":")[:4])
    return scope.get(SALT) or network


def salt_of(key: bytes) -> str:
    """The salt that keeps the cached prefixes of a key's bearer apart from those of others."""
    return hashlib.sha256(key).hexdigest()


class Guard:
    """Refuses requests with a foreign Host or without a key; stores the salt of those with a key."""

    def __init__(self, app: ASGIApp, keys: Sequence[str], hosts: Sequence[str]):
        self.app, self.hosts = app, frozenset(hosts)
        self.keys = [hashlib.sha256(key.encode()).digest() for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        headers = {key: value.decode("latin-1") for key, value in scope["headers"]}
        connection, error = scope.get("state", {}).get(CONNECTION), None
        if self.hosts and _host(headers.get(b"host", "")) not in self.hosts:
            error = HttpError(403, "the header Host names another server", code="wrong_host")
        elif self.keys and scope["path"] not in OPEN and not self._is_known(headers.get(b"authorization", "")):
            error = HttpError(401, "the bearer key is missing or wrong", code="invalid_api_key")
        elif scope["path"] not in OPEN and connection is not None and not connection.admit():
            error = HttpError(503, "too many connections", code="overloaded")
        elif self.keys:
            scope = {
                **scope,
                SALT: salt_of(headers.get(b"authorization", "").partition(" ")[2].strip().encode("latin-1")),
            }
        await (_error(error) if error is not None else self.app)(scope, receive, send)

    def _is_known(self, value: str) -> bool:
        """Whether the header has one of the keys; takes as long for every value."""
        kind, _, key = value.partition(" ")
        given, known = hashlib.sha256(key.strip().encode("latin-1")).digest(), False
        for digest in self.keys:
            known |= hmac.compare_digest(given, digest)
        return known and kind.lower() == "bearer"


def _closes(scope: Scope) -> bool:
    """Whether the connection closes after the answer to a client that does not wait for 100 Continue with its body."""
    options = b",".join(value for name, value in scope["headers"] if name == b"connection").lower().split(b",")
    closes = b"close" in map(bytes.strip, options) or scope["http_version"] == "1.0"
    return closes and all(name != b"expect" for name, _ in scope["headers"])


def _read_on(receive: Receive, send: Send, most: int) -> tuple[Receive, Send]:
    """Read and drop what the client still sends of a refused request, up to `most` bytes and for `DROP_SECONDS`, before
    the answer: if a connection closes with bytes unread, the system resets it, and the client loses the answer."""
    more = True

    async def received() -> Message:
        nonlocal more
        message = await receive()
        more = message.get("more_body", False)
        return message

    async def sent(message: Message) -> None:
        if message["type"] == "http.response.start" and more and message["status"] != 408:
            left = most
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(DROP_SECONDS):
                    while more and left > 0:
                        left -= len((await received()).get("body", b""))
        await send(message)

    return received, sent


def _host(value: str) -> str:
    """The name in a header Host, without the port."""
    if value.startswith("["):
        return value[1:].partition("]")[0]
    return value.partition(":")[0].lower()


def _error(error: CoppiceError) -> Response:
    return Response(
        encoded(error_body(error)), status_of(error), headers=error_headers(error), media_type="application/json"
    )


async def _http_error(request: Request, error: Any) -> Response:
    """Answer an HTTPException of the router: no such path or method."""
    path, allowed = request.url.path[:200], (error.headers or {}).get("Allow", "")
    if error.status_code != 405:
        return _error(HttpError(error.status_code, f"{error.detail}: {path}", code="not_found"))
    what = f"{path} does not take the method {request.method[:20]}"
    refused = _error(HttpError(405, what, code="method_not_allowed", remedy=f"it takes {allowed}"))
    refused.headers["allow"] = allowed
    return refused


def _model(one: Served) -> dict[str, Any]:
    shape = one.engine.shape
    about = {"id": one.name, "object": "model", "created": one.created, "owned_by": "coppice"}
    about |= {"chat_template": one.engine.template is not None}
    return about if shape.max_positions is None else about | {"max_model_len": shape.max_positions}


def _policy(page: str) -> str:
    """The policy of a page: a browser may use only its own script and style, and those of the trace that it shows."""
    found = [re.findall(rf"<{tag}>(.*?)</{tag}>", page, re.S) for tag in ("style", "script")]
    styles, scripts = (
        " ".join(f"'{trace_page.digest(text)}'" for text in [*own, other])
        for own, other in zip(found, trace_page.parts(), strict=True)
    )
    return (
        f"default-src 'none'; connect-src 'self'; script-src {scripts}; style-src {styles}; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
