"""Traces as one HTML file without external parts, or as JSON for `python -m tools.tree`."""

import base64
import hashlib
import html
import json
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from engine.app.cli.exits import written_after
from engine.contract.trace import Traces
from engine.errors import UsageError, reason_of
from engine.version import __version__
from models.checkpoint.files import obstacle, open_regular, replacing

FORMAT = "coppice trace 1"
MARKS = (f'{{"format": "{FORMAT[:-1]}'.encode(), b"<!doctype html><!-- coppice trace ")  # how files begin
PARTS = Path(__file__).parent  # trace_page.html, trace_page.css, and scripts
SCRIPTS = "trace_tree.js", "trace_panel.js", "trace_page.js"  # the record, the window of a tree, the rest; one text


def page(requests: Sequence[dict[str, Any]], left_out: int = 0) -> str:
    """The HTML page of requests, given as `Trace.record`; `left_out` is the number of earlier ones without a record."""
    style, script = parts()
    names = [f"{len(requests)} requests"] if len(requests) != 1 else [requests[0]["search"], str(requests[0]["name"])]
    title = " · ".join(["coppice", *filter(None, names)])
    # The text of a model is data: escaped as JSON, in an element that no browser executes. The policy allows the page's
    # own script and style alone, and no connections.
    policy = f"default-src 'none'; script-src '{digest(script)}'; style-src '{digest(style)}'"
    policy += "; base-uri 'none'; form-action 'none'"
    values = {
        "mark": FORMAT,
        "policy": policy,
        "title": html.escape(title),
        "style": style,
        "script": script,
        "data": _json(requests, left_out).translate({ord(c): f"\\u{ord(c):04x}" for c in "<>&"}),
    }
    pieces = (PARTS / "trace_page.html").read_text(encoding="utf-8").split("@@")
    return "".join(piece if i % 2 == 0 else values[piece] for i, piece in enumerate(pieces))


def parts() -> tuple[str, str]:
    """The style and the script of the page."""
    style, *scripts = ((PARTS / name).read_text(encoding="utf-8") for name in ("trace_page.css", *SCRIPTS))
    return style, "".join(scripts)


def digest(text: str) -> str:
    """The hash by which a content security policy allows an inline style or script."""
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _json(requests: Sequence[dict[str, Any]], left_out: int) -> str:
    whole = {"format": FORMAT, "coppice": __version__, "left_out": left_out, "requests": requests}
    return json.dumps(whole, separators=(",", ":")).replace('{"format":', '{"format": ', 1)


# --- files ---


def check_target(path: str | Path, *others: str | Path | None) -> None:
    """Check, before anything is loaded, the file that a trace will be written to.

    Raises:
        UsageError: it cannot be written, is one of the other files, or exists and is not a trace.
    """
    target = Path(path)
    try:
        real = target.resolve()
        if any(other not in (None, "-") and Path(other or "").resolve() == real for other in others):
            raise UsageError("the trace needs a file of its own", where=str(path))
        if found := obstacle(target):
            raise UsageError(f"cannot write the trace: {found[0]}", where=found[1])
        if target.is_file() and target.stat().st_size:
            with open_regular(target) as file:
                ours = file.read(64).startswith(MARKS)
            if not ours:
                remedy = "give another name, or delete it"
                raise UsageError("the file exists and is not a trace", where=str(path), remedy=remedy)
    except (OSError, ValueError) as error:
        raise UsageError(f"cannot write the trace: {reason_of(error)}", where=str(path)) from None


def write(path: str | Path, requests: Sequence[dict[str, Any]], left_out: int = 0) -> None:
    """Write JSON if the name ends in .json, else a page. Raises UsageError."""
    text = _json(requests, left_out) + "\n" if Path(path).suffix == ".json" else page(requests, left_out)
    try:
        target = Path(path)
        if target.exists() and not target.is_file():  # a device or a pipe cannot be replaced
            target.write_text(text, encoding="utf-8")
            return
        with replacing(target, 0o666) as file:
            file.write(text.encode())
    except (OSError, ValueError, RuntimeError) as error:
        raise UsageError(f"cannot write the trace: {reason_of(error)}", where=str(path)) from None


def saving(traces: Traces | None, path: str | Path | None) -> AbstractContextManager[None]:
    """Write the traces at the end of the block, see `written_after`; without a path, do nothing."""
    if traces is None or path is None:
        return nullcontext()
    return written_after(lambda: write(path, traces.records(), traces.left_out))
