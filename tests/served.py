"""Serves an application in a thread of the tests' process."""

import asyncio
import contextlib
import threading
from collections.abc import Iterator
from typing import Any

from engine.serve import command


@contextlib.contextmanager
def background(app: Any, drain: float = 10.0) -> Iterator[str]:
    """Serve an application in a thread for the time of the block, on a free port of this machine; yields its URL."""
    listener = command.listen("127.0.0.1", 0)
    server = command.http_server(app, drain)
    thread = threading.Thread(target=lambda: asyncio.run(server.serve([listener])), name="serve", daemon=True)
    thread.start()
    try:
        yield command.address(listener)
    finally:
        server.should_exit = True
        thread.join()
        listener.close()
