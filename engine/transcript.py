"""A conversation in a file: what was said, by which model and settings; written whole or not at all."""

import contextlib
import json
import os
import stat
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from engine.conversation import REASONS, Conversation, Turn
from engine.errors import UsageError
from engine.tokenizer import check_utf8
from engine.version import __version__

FORMAT, VERSION = "coppice-chat", 1
MAX_FILE = 64 << 20
MARK = f'{{\n  "format": "{FORMAT}"'.encode()  # how every file begins


@dataclass(frozen=True)
class Transcript:
    """What a file holds.

    Args:
        turns: of the conversation, oldest first.
        system: the system message.
        model: name of the folder of the model that answered last.
        settings: those in force when it was saved, for information.
    """

    turns: Sequence[Turn]
    system: str | None
    model: str
    settings: Mapping[str, Any]


def save(path: str | Path, conversation: Conversation, settings: Mapping[str, Any]) -> Path:
    """Write a conversation; if that fails, an older file is as it was.

    Returns:
        where it is now.

    Raises:
        UsageError: the file cannot be written, or is something else than a saved conversation.
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
        "turns": [{"user": t.user, "reply": t.reply, "finish_reason": t.finish_reason} for t in turns],
    }
    data = json.dumps(record, ensure_ascii=False, indent=2).encode(errors="backslashreplace") + b"\n"
    try:
        with _replacing(target) as number, open(number, "wb", closefd=False) as file:
            file.write(data)
    except OSError as error:
        remedy = "a file that was there is as it was; the conversation goes on"
        raise UsageError(f"cannot save the conversation: {error.strerror}", where=str(path), remedy=remedy) from None
    return target


def check_target(path: str | Path) -> None:
    """Refuse, before anything is said, a file that cannot be saved to. Raises UsageError."""
    target = _writable(path)
    if not target.parent.is_dir():
        raise UsageError("cannot save the conversation: there is no such folder", where=str(target.parent))
    if not os.access(target.parent, os.W_OK | os.X_OK):
        raise UsageError("cannot save the conversation: the folder cannot be written to", where=str(target.parent))


def load(path: str | Path) -> Transcript:
    """Read a conversation, checked throughout. Raises UsageError."""
    try:
        with open(Path(path).expanduser(), "rb") as file:
            data = file.read(MAX_FILE + 1)
    except (OSError, ValueError, RuntimeError) as error:
        raise UsageError(f"cannot read the conversation: {_reason(error)}", where=str(path)) from None

    def refuse(why: str) -> NoReturn:
        raise UsageError(f"this is no saved conversation: {why}", where=str(path), remedy="/save writes one")

    if len(data) > MAX_FILE:
        refuse(f"it has more than {MAX_FILE >> 20} MB")
    try:
        record = json.loads(data)
    except RecursionError:
        refuse("nested too deep")
    except UnicodeDecodeError as error:
        refuse(f"not valid UTF-8 at byte {error.start}")
    except json.JSONDecodeError as error:
        refuse(f"malformed JSON, line {error.lineno}: {error.msg}")
    except ValueError:
        refuse("a number is out of range")
    if not isinstance(record, dict) or record.get("format") != FORMAT:
        refuse(f'expected an object with "format": "{FORMAT}"')
    if type(record.get("version")) is not int or record["version"] < 1:
        refuse(f"version: expected an integer >= 1, got {_show(record.get('version'))}")
    if record["version"] > VERSION:
        what = f"the conversation was saved in format {record['version']}, this program knows up to {VERSION}"
        raise UsageError(what, where=str(path), remedy="use the coppice that saved it, or a later one")

    def text(of: Mapping[str, Any], key: str, where: str = "") -> str:
        if not isinstance(of.get(key), str):
            refuse(f"{where}{key}: expected a string, got {_show(of.get(key))}")
        try:
            return check_utf8(of[key])
        except UsageError as error:
            refuse(f"{where}{key}: {error.what}")

    entries, first = record.get("turns"), record.get("forgotten", 0)
    if not isinstance(entries, list):
        refuse(f"turns: expected a list, got {_show(entries)}")
    if type(first) is not int or not 0 <= first <= max(0, len(entries) - 1):
        refuse(f"forgotten: expected an integer below the number of turns, got {_show(first)}")
    if not isinstance(record.get("settings", {}), dict):
        refuse(f"settings: expected an object, got {_show(record['settings'])}")
    turns = []
    for i, entry in enumerate(entries):
        where = f"turn {i + 1}: "
        if not isinstance(entry, dict):
            refuse(f"{where}expected an object, got {_show(entry)}")
        reason = text(entry, "finish_reason", where)
        if reason not in REASONS:
            refuse(f"{where}finish_reason: expected one of {', '.join(REASONS)}, got {_show(reason)}")
        turns.append(Turn(text(entry, "user", where), text(entry, "reply", where), reason, first=min(first, i)))
    system = None if record.get("system") is None else text(record, "system")
    return Transcript(turns, system, text(record, "model"), record.get("settings", {}))


def _writable(path: str | Path) -> Path:
    """The file that a save replaces, behind links. Raises UsageError if it holds something else."""
    try:
        target = Path(path).expanduser().resolve()
        if not target.exists():
            return target
        if not target.is_file():
            raise UsageError("cannot save the conversation: this is no ordinary file", where=str(path))
        with open(target, "rb") as file:
            ours = file.read(len(MARK)) in (MARK, b"")
    except (OSError, ValueError, RuntimeError) as error:
        raise UsageError(f"cannot save the conversation: {_reason(error)}", where=str(path)) from None
    if not ours:
        what = "the file exists and is no saved conversation: it is left alone"
        raise UsageError(what, where=str(path), remedy="give another name, or delete it")
    return target


@contextlib.contextmanager
def _replacing(target: Path) -> Iterator[int]:
    """A descriptor to write to; the target becomes what was written, on the disk, if all goes well."""
    number, temporary = tempfile.mkstemp(prefix=f".{target.name[:100]}.", dir=target.parent)  # private: mode 0600
    try:
        try:
            if target.exists():
                os.fchmod(number, stat.S_IMODE(target.stat().st_mode))
            yield number
            os.fsync(number)
        finally:
            os.close(number)
        os.replace(temporary, target)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error)


def _show(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 40 else text[:39] + "…"
