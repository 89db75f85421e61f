"""Set-up of the tests of command lines: random models, and the chat in this process."""

import io
import math
import sys
from collections.abc import Callable

import pytest

from engine.app import chat, dialog
from tests.engine.app.typist import SHAPE, Terminal
from tools.random_checkpoint import make


@pytest.fixture(scope="session")
def long(tmp_path_factory) -> str:
    """A model with a context that is never full."""
    return make(tmp_path_factory.mktemp("long"), max_positions=60000, **SHAPE)["path"]


@pytest.fixture(autouse=True)
def no_status(monkeypatch):
    """The screens of dialogs in this process show no status, which they would if a reply is slow; `Screen.status` has
    tests of its own."""
    monkeypatch.setattr(dialog, "STATUS_DELAY", math.inf)


@pytest.fixture
def command(monkeypatch) -> Callable[..., tuple[int, str, str]]:
    """Run the chat in this process: (exit code, stdout, stderr)."""

    def run(*argv: object, piped: bytes | None = None, typed: str = "", tty: bool = False) -> tuple[int, str, str]:
        stdin = Terminal(typed) if piped is None else io.TextIOWrapper(io.BytesIO(piped))
        out, err = (Terminal(), Terminal()) if tty else (io.StringIO(), io.StringIO())
        for name, stream in {"stdin": stdin, "stdout": out, "stderr": err}.items():
            monkeypatch.setattr(sys, name, stream)
        try:
            code = chat.main(["--kv-memory", "1M", *map(str, argv)])
        except SystemExit as end:
            code = end.code
        return code, out.getvalue(), err.getvalue()

    return run
