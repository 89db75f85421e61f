"""The server's connections: how many are open, how long each may take, and which are closed first.

A client is a stranger until a request on its connection has passed the `Guard`. A quarter of the connections is
reserved for strangers, the rest for other clients, so that neither can shut the other out. When there are too many,
the one that has been idle the longest is closed.
"""

import asyncio
import contextlib
import resource
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from typing import Any

import h11
from uvicorn import Config, Server
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from engine.serve.http import BODY_SECONDS, CONNECTION
from engine.serve.streams import STALL_SECONDS

REQUEST_SECONDS = BODY_SECONDS + 1  # from accept to the end of the request: the application answers before, if it can
SWEEP_SECONDS = 1.0
RETRY_SECONDS = 1.0  # to wait after an accept that the system refused
FEWER_SECONDS = 60.0  # with room for fewer connections after that, and between two lines about it
LEAST_CONNECTIONS = 8  # connections
STRANGERS_SHARE = 8  # at most 1/8 of the room for strangers is filled in a turn of the event loop


def most_connections(wanted: int) -> int:
    """How many connections to allow: as many as wanted, but at most half of the file descriptors."""
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return wanted if files == resource.RLIM_INFINITY else max(LEAST_CONNECTIONS, min(wanted, files // 2))


class Connection(H11Protocol):
    """A client's connection.

    Attributes:
        among: all connections.
        quiet: whether an answer has ended, and no byte of another request has come.
        since: when it was accepted, its latest request began or its latest answer ended; by `time.monotonic`.
    """

    def __init__(self, config: Config, state: ServerState, among: "Connections"):
        super().__init__(config, state, {CONNECTION: self})
        self.among, self.since, self.quiet = among, time.monotonic(), False
        self._unsent, self._moved = 0, self.since  # bytes of answers; when they last became fewer

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self.among.enter(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self.among.forget(self)
        self.app_state = {}
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self.quiet:
            self._touch(quiet=False)
        super().data_received(data)

    def on_response_complete(self) -> None:
        if self.conn.trailing_data[0]:  # the next request before the answer: only a client that attacks does so
            self.transport.close()
        self._touch(quiet=True)
        super().on_response_complete()

    def send_400_response(self, msg: str) -> None:
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            super().send_400_response(msg)
        else:  # the request has an answer already
            self.transport.abort()

    def admit(self) -> bool:
        """Count the client as known. Returns False if the requests of too many others are being answered."""
        return self.among.admit(self)

    @property
    def answering(self) -> bool:
        """Whether the request is complete, and its answer is not."""
        return self.cycle is not None and not self.cycle.response_complete and not self.cycle.more_body

    @property
    def busy(self) -> bool:
        """Whether it must not be closed to make room: a request is being answered, and the client reads the answer."""
        return self.answering and not self.flow.write_paused

    def overdue(self, now: float) -> bool:
        """Whether the client has taken too long to send a request, or to read an answer."""
        unsent = self.transport.get_write_buffer_size()
        if not 0 < self._unsent <= unsent:
            self._moved = now
        self._unsent = unsent
        if self.busy:
            return False
        if unsent:
            return now - self._moved > STALL_SECONDS
        return not self.answering and now - self.since > REQUEST_SECONDS

    def _touch(self, quiet: bool) -> None:
        self.since, self.quiet = time.monotonic(), quiet
        self.among.move_to_end(self)


class Connections:
    """All connections, the idlest first.

    Args:
        most: the most connections.
    """

    def __init__(self, most: int):
        self.most_strangers = self.room = most // 4
        self.most_known = most - self.most_strangers
        self._fewer = 0.0  # until when there is less room for strangers
        self.strangers: dict[Connection, None] = {}
        self.known: dict[Connection, None] = {}

    def enter(self, one: Connection) -> None:
        """Add a connection; close the idlest stranger if there are too many."""
        self.strangers[one] = None
        self._fit()

    def shrink(self) -> None:
        """Close a quarter of the strangers, and admit no more for now; without any, close an idle connection."""
        self.room, self._fewer = max(1, len(self.strangers) * 3 // 4), time.monotonic() + FEWER_SECONDS
        if not self.strangers:
            self._close_idle()
        self._fit()

    def _fit(self) -> None:
        while len(self.strangers) > self.room:
            self.close(next(iter(self.strangers)))

    def _close_idle(self) -> bool:
        """Close the idlest of the known connections, except those whose requests are being answered."""
        idle = next((one for one in self.known if not one.busy), None)
        if idle is not None:
            self.close(idle)
        return idle is not None

    def admit(self, one: Connection) -> bool:
        """Move a connection from the strangers to the others; close the idlest of these if there are too many.

        Returns:
            False: there is no room, because the requests of all of them are being answered.
        """
        if one not in self.strangers:
            return True
        if len(self.known) >= self.most_known and not self._close_idle():
            return False
        del self.strangers[one]
        self.known[one] = None
        return True

    def move_to_end(self, one: Connection) -> None:
        """Note that a connection is the least idle."""
        for some in (self.strangers, self.known):
            if one in some:
                del some[one]
                some[one] = None

    def forget(self, one: Connection) -> None:
        """Remove a connection that is closed."""
        self.strangers.pop(one, None)
        self.known.pop(one, None)

    def close(self, one: Connection) -> None:
        """Close a connection at once, without sending the rest."""
        self.forget(one)
        one.transport.abort()

    def sweep(self) -> None:
        """Close the connections whose time is up."""
        now = time.monotonic()
        if now > self._fewer:
            self.room = self.most_strangers
        for one in [*self.strangers, *self.known]:
            if one.overdue(now):
                self.close(one)


class Door:
    """Accepts the connections of a socket, in place of an `asyncio.Server`.

    asyncio's own repeats an accept that the system refuses thousands of times per second, with a traceback each.
    """

    def __init__(self, listener: socket.socket, config: Config, state: ServerState, most: int):
        self.listener, self.config, self.state = listener, config, state
        self.connections = Connections(most)
        self._told = -FEWER_SECONDS
        listener.setblocking(False)
        self._connecting: set[asyncio.Task[None]] = set()
        self._accepting = asyncio.ensure_future(self._accept())
        self._sweeping = asyncio.ensure_future(self._sweep())

    def close(self) -> None:
        """Accept no more connections; open ones stay."""
        self._accepting.cancel()

    async def wait_closed(self) -> None:
        """End the timers too."""
        self._sweeping.cancel()

    async def _accept(self) -> None:
        loop, turns = asyncio.get_running_loop(), 0.0
        while True:
            try:
                peer, _ = await loop.sock_accept(self.listener)  # suspends only if no client waits
            except ConnectionError:  # the client has left already
                continue
            except OSError as error:
                self._tell(error)
                self.connections.shrink()
                await asyncio.sleep(RETRY_SECONDS)
                continue
            connecting = loop.create_task(self._connect(peer))
            self._connecting.add(connecting)
            connecting.add_done_callback(self._connecting.discard)
            turns += STRANGERS_SHARE / self.connections.room
            while turns >= 1:  # else new ones would close each other before a request is read
                await asyncio.sleep(0)
                turns -= 1

    async def _connect(self, peer: socket.socket) -> None:
        try:
            peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # like asyncio's own servers
            await asyncio.get_running_loop().connect_accepted_socket(self._protocol, peer)
        except OSError:
            peer.close()

    def _protocol(self) -> Connection:
        return Connection(self.config, self.state, self.connections)

    def _tell(self, error: OSError) -> None:
        if (now := time.monotonic()) - self._told >= FEWER_SECONDS:
            self._told = now
            say(f"error: no connection can be accepted: {error.strerror}; more file descriptors: ulimit -n")

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(SWEEP_SECONDS)
            self.connections.sweep()


class HttpServer(Server):
    """A server of uvicorn whose connections are limited, and whose end by a signal is no error.

    Args:
        most: the most connections.
        verbose: print tracebacks with faults of connections.
    """

    def __init__(self, config: Config, most: int, verbose: bool):
        super().__init__(config)
        self.most, self.verbose = most, verbose

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await self.lifespan.startup()
        asyncio.get_running_loop().set_exception_handler(self._failed)
        self.servers: Any = [Door(one, self.config, self.server_state, self.most) for one in sockets or []]
        self.started = True

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        kept = {number: signal.signal(number, self.handle_exit) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in kept.items():
                signal.signal(number, handler)

    def _failed(self, _: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        if self.verbose and error is not None:
            with contextlib.suppress(OSError):
                traceback.print_exception(error)
        else:
            say(f"error: {context['message']}" + (f": {error!r}"[:200] if error is not None else ""))


def say(line: str) -> None:
    """A line on stderr, if anything reads it."""
    with contextlib.suppress(OSError):
        print(line, file=sys.stderr, flush=True)
