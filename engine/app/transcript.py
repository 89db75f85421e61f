"""A conversation in a file: its turns, the model and the settings. A failed write leaves the old file unchanged."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import EllipsisType
from typing import Any

from engine.app.cli import parse_object
from engine.contract import FINISH_REASONS
from engine.conversation import Conversation, Turn
from engine.errors import UsageError, check_utf8, reason_of, shortened
from engine.version import __version__
from models.checkpoint.files import locked, obstacle, open_regular, read_regular, replacing

FORMAT, VERSION = "coppice-chat", 1
MAX_FILE = 64 << 20
WAIT = 10.0  # seconds to wait while another chat saves
State = tuple[int, int, int, int] | None
MARK = f'{{\n  "format": "{FORMAT}"'.encode()  # the beginning of every file


@dataclass(frozen=True)
class Transcript:
    """The contents of a file.

    Args:
        turns: the turns of the conversation, oldest first.
        system: the system message.
        model: name of the folder of the model that answered last.
        settings: the settings when it was saved, for information.
    """

    turns: Sequence[Turn]
    system: str | None
    model: str
    settings: Mapping[str, Any]


def state(path: str | Path) -> State:
    """Identifies a version of the file, to detect changes by other programs; None if it is absent or empty."""
    try:
        found = Path(path).expanduser().stat()
    except (OSError, ValueError, RuntimeError):
        return None
    return (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns) if found.st_size else None


def save(
    path: str | Path, conversation: Conversation, settings: Mapping[str, Any], *, expected: State | EllipsisType = ...
) -> Path:
    """Write a conversation; if that fails, an older file is unchanged.

    Args:
        path: the file.
        conversation: the conversation to write.
        settings: the current settings.
        expected: the `state` in which the file must be; by default it may be in any.

    Returns:
        the absolute path of the file.

    Raises:
        UsageError: the file cannot be written, is no saved conversation, or is not in the expected state.
    """
    target = _writable(path)
    turns = conversation.turns
    record = {
        "format": FORMAT,
        "version": VERSION,
        "coppice": __version__,
        "model": conversation.engine.name,
        "settings": dict(settings),
        "system": conversation.system,
        "forgotten": turns[-1].first if turns else 0,
        "turns": [
            {"user": t.user, "reply": t.reply, "finish_reason": t.finish_reason}
            | ({} if t.reasoning is None else {"reasoning": t.reasoning})
            for t in turns
        ],
    }
    data = json.dumps(record, ensure_ascii=False, indent=2).encode(errors="backslashreplace") + b"\n"
    try:
        with locked(target.parent, WAIT):
            if expected is not ... and state(target) != expected:
                what = "cannot save the conversation: another program has changed the file in the meantime"
                remedy = "/save FILE saves this conversation under another name; /load FILE continues the other one"
                raise UsageError(what, where=str(path), remedy=remedy)
            with replacing(target) as file:
                file.write(data)
    except OSError as error:
        remedy = "an existing file is unchanged; the conversation continues"
        raise UsageError(f"cannot save the conversation: {error.strerror}", where=str(path), remedy=remedy) from None
    return target


def check_target(path: str | Path) -> None:
    """Check, before the first turn, that a conversation can be saved to a file. Raises UsageError."""
    target = _writable(path)
    if found := obstacle(target):
        raise UsageError(f"cannot save the conversation: {found[0]}", where=found[1])


def load(path: str | Path) -> Transcript:
    """Read and check a conversation. Raises UsageError."""
    try:
        data = read_regular(Path(path).expanduser(), MAX_FILE)
    except (OSError, ValueError, RuntimeError) as error:
        raise UsageError(f"cannot read the conversation: {reason_of(error)}", where=str(path)) from None
    try:
        record = _record(data)
        if record["version"] > VERSION:
            what = f"the conversation was saved in format {record['version']}, this program knows up to {VERSION}"
            raise UsageError(what, where=str(path), remedy="use the coppice that saved it, or a later one")
        return _transcript(record)
    except ValueError as wrong:
        what = f"this is no saved conversation: {wrong}"
        raise UsageError(what, where=str(path), remedy="/save writes one") from None


def _record(data: bytes) -> dict[str, Any]:
    """The JSON object of a file, its format and version checked."""
    if len(data) > MAX_FILE:
        raise ValueError(f"it has more than {MAX_FILE >> 20} MB")
    record = parse_object(data)
    if record.get("format") != FORMAT:
        raise ValueError(f'expected an object with "format": "{FORMAT}"')
    version = record.get("version")
    _expect(type(version) is int and version >= 1, "version: expected an integer >= 1", version)
    return record


def _transcript(record: Mapping[str, Any]) -> Transcript:
    entries: Any = record.get("turns")
    first = record.get("forgotten", 0)
    _expect(isinstance(entries, list), "turns: expected a list", entries)
    fits = type(first) is int and 0 <= first <= max(0, len(entries) - 1)
    _expect(fits, "forgotten: expected an integer below the number of turns", first)
    settings = record.get("settings", {})
    _expect(isinstance(settings, dict), "settings: expected an object", settings)
    turns = []
    for i, entry in enumerate(entries):
        where = f"turn {i + 1}: "
        _expect(isinstance(entry, dict), f"{where}expected an object", entry)
        reason = _text(entry, "finish_reason", where)
        expected = f"{where}finish_reason: expected one of {', '.join(FINISH_REASONS)}"
        _expect(reason in FINISH_REASONS, expected, reason)
        thought = None if entry.get("reasoning") is None else _text(entry, "reasoning", where)
        user, reply = _text(entry, "user", where), _text(entry, "reply", where)
        turns.append(Turn(user, reply, reason, first=min(first, i), reasoning=thought))
    system = None if record.get("system") is None else _text(record, "system")
    return Transcript(turns, system, _text(record, "model"), settings)


def _text(of: Mapping[str, Any], key: str, where: str = "") -> str:
    _expect(isinstance(of.get(key), str), f"{where}{key}: expected a string", of.get(key))
    try:
        return check_utf8(of[key])
    except UsageError as error:
        raise ValueError(f"{where}{key}: {error.what}") from None


def _writable(path: str | Path) -> Path:
    """The file that a save replaces, links resolved. Raises UsageError if it is no saved conversation."""
    try:
        target = Path(path).expanduser().resolve()
        if not target.exists():
            return target
        if not target.is_file():
            raise UsageError("cannot save the conversation: this is no ordinary file", where=str(path))
        with open_regular(target) as file:
            ours = file.read(len(MARK)) in (MARK, b"")
    except (OSError, ValueError, RuntimeError) as error:
        raise UsageError(f"cannot save the conversation: {reason_of(error)}", where=str(path)) from None
    if not ours:
        what = "the file exists and is no saved conversation: it was not changed"
        raise UsageError(what, where=str(path), remedy="give another name, or delete it")
    return target


def _expect(holds: bool, expected: str, got: Any) -> None:
    """Raises ValueError for a value that is not as expected."""
    if not holds:
        raise ValueError(f"{expected}, got {shortened(json.dumps(got, ensure_ascii=False), 40)}")
