"""The slash commands. A command gets the dialog and the rest of the line; its docstring is its help."""

import contextlib
import io
import json
import os
import re
import shlex
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from engine.app import trace_page, transcript
from engine.app.dialog import QUOTES, Dialog, candidate, plural
from engine.conversation import figures, mib
from engine.errors import UsageError, check_utf8, reason_of, shortened
from engine.load.capabilities import dtype_name
from engine.load.sizes import memory_of_process
from engine.request import Request
from models.checkpoint.files import open_regular
from search.base import REGISTRY

MAX_PROMPT_FILE = 16 << 20


def show_help(dialog: Dialog, _: str) -> None:
    """this list"""
    lines = []
    for name, command in COMMANDS.items():
        also = ", ".join(alias for alias, real in ALIASES.items() if real == name)
        lines.append(f"{name + USAGE.get(name, ''):18}{command.__doc__}{also and f' (also {also})'}")
    lines += [f"{'//text':18}send /text", f"{QUOTES:18}begin and end a message of several lines"]
    lines.append("Ctrl-C stops a reply, and leaves if that does not stop; Ctrl-D leaves")
    dialog.screen.note("\n".join(lines), fold=True)


def leave(dialog: Dialog, _: str) -> bool:
    """leave"""
    return True


def reset(dialog: Dialog, _: str) -> None:
    """forget the conversation and free its cache"""
    dialog.conversation.reset()
    dialog.screen.hint(f"[a new conversation{_replaces(dialog)}]")


def undo(dialog: Dialog, rest: str) -> None:
    """take the last turn back"""
    if rest:
        raise UsageError(f"/undo takes back one turn, got {rest!r}", remedy="/undo again takes back the one before")
    turn, left = dialog.conversation.undo(), len(dialog.conversation.turns)
    dialog.screen.hint(f"[taken back: {shortened(' '.join(turn.user.split()), 40)}; {plural(left, 'turn')} left]")
    dialog.keep()


def regen(dialog: Dialog, rest: str) -> None:
    """answer the last turn again; settings hold for this answer only, a sample's seed is one more unless given"""
    turns, changes = dialog.conversation.turns, assignments(rest)
    settings = dialog.settings.changed(changes)
    shown = settings.shown()
    before = dialog.made[1].shown() if dialog.made and turns and dialog.made[0] is turns[-1] else {}
    if shown.get("temperature") and "seed" in shown:
        if "seed" not in changes:
            settings = settings.changed({"seed": ((before.get("seed", shown["seed"]) or 0) + 1) % 2**63})
        dialog.screen.hint(f"[seed {settings.shown()['seed']}]")
    elif shown == before and turns[-1].finish_reason != "interrupted":
        dialog.screen.hint(
            f"[{shown['search']} draws nothing: with the same settings it gives the same answer; "
            "/regen search=sample draws another]"
        )
    dialog.again(settings)


def system(dialog: Dialog, rest: str) -> None:
    """set the system message; alone, show it; "" takes it away"""
    conversation = dialog.conversation
    if not rest:
        conversation.set_system(conversation.system)
        dialog.screen.note("there is no system message" if conversation.system is None else conversation.system)
        return
    conversation.set_system(None if rest in ('""', "''") else check_utf8(rest))
    dialog.made = None
    dialog.screen.hint("[from the next turn on, which reads the whole conversation again]")


def think(dialog: Dialog, rest: str) -> None:
    """switch thoughts on or off, or leave them to the template (auto); alone, show which"""
    conversation = dialog.conversation
    if not rest:
        dialog.screen.note(conversation.options.think)
        return
    conversation.set_options(replace(conversation.options, think=rest))
    dialog.made = None


def change(dialog: Dialog, rest: str) -> None:
    """change the search, its parameters or the limits; alone, show them"""
    if not rest:
        lines = [f"{key:22}{literal(value)}" for key, value in dialog.settings.shown().items()]
        dialog.screen.note("\n".join(lines))
        dialog.screen.note(f"searches: {', '.join(REGISTRY)}", fold=True)
        return
    engine, settings = dialog.engine, dialog.settings.changed(assignments(rest))
    engine.service().check(Request([engine.start_token], settings.configuration(), **settings.limits()))
    if settings.search != dialog.settings.search:
        dialog.screen.hint(f"[search {settings.search}]")
    dialog.settings = settings


def show(dialog: Dialog, rest: str) -> None:
    """show config (the model's), mem (the memory), template (the chat's) or settings"""
    if rest == "settings":
        change(dialog, "")
    elif rest == "config":
        dialog.screen.note(_config(dialog))
    elif rest == "mem":
        dialog.screen.note(_memory(dialog))
    elif rest == "template":
        template = dialog.engine.template
        dialog.screen.note(template.source if template else "no chat template: plain completion")
    else:
        raise UsageError(f"/show: expected config, mem, template or settings, got {rest!r}")


def beams(dialog: Dialog, rest: str) -> None:
    """the outputs of the last reply; the candidates, if it was interrupted"""
    if rest:
        raise UsageError(f"/beams shows the last reply, got {rest!r}", remedy="/set beams=N changes their number")
    if dialog.last is None:
        raise UsageError("there is no reply yet")
    if dialog.candidates:
        decode = dialog.engine.tokenizer.decode
        lines = [f"{plural(len(dialog.candidates), 'candidate')} when the search was interrupted, score and text:"]
        lines += [candidate(score, decode(tokens)) for score, tokens in dialog.candidates]
    else:
        outputs = dialog.last.outputs
        lines = [f"{plural(len(outputs), 'output')} returned, score and text:"]
        lines += [candidate(o.score, f"{o.text} ({o.finish_reason})") for o in outputs]
    dialog.screen.note("\n".join(lines))


def tree(dialog: Dialog, rest: str) -> None:
    """write a page that shows the search of the last reply step by step (tree.html unless a FILE is named)"""
    records = dialog.traces.records()[-1:] if dialog.traces else []
    if not records:
        raise UsageError("there is no search to show")
    path = Path(rest or "tree.html").expanduser()
    trace_page.check_target(path, dialog.file)
    trace_page.write(path, records)
    dialog.screen.note(f"{path.resolve().as_uri()}\n[open it in a browser]")


def stats(dialog: Dialog, _: str) -> None:
    """figures of the last reply, the context and the cache"""
    lines = [figures(dialog.last, dialog.engine.capabilities)] if dialog.last else []
    dialog.screen.note("\n".join([*lines, *_cache(dialog)]), fold=True)


def save(dialog: Dialog, rest: str) -> None:
    """save the conversation"""
    if not rest and dialog.file is None:
        raise UsageError("/save: expected a file name")
    if rest:
        transcript.save(rest, dialog.conversation, dialog.settings.shown())
        dialog.mark_saved(rest)
    else:
        dialog.keep()
    path = Path(rest or str(dialog.file)).expanduser().resolve()
    dialog.screen.hint(f"[{plural(len(dialog.conversation.turns), 'turn')} saved: {path}]")


def load(dialog: Dialog, rest: str) -> None:
    """continue a saved conversation, in place of this one"""
    if not rest:
        raise UsageError("/load: expected a file name")
    saved = transcript.load(rest)
    dialog.conversation.restore(saved.turns, saved.system)
    dialog.mark_saved(rest)
    tell_loaded(dialog, saved, _replaces(dialog))


def read(dialog: Dialog, rest: str) -> None:
    """send what is in a file"""
    if not rest:
        raise UsageError("/read: expected a file name")
    text = read_prompt(rest)
    dialog.screen.hint(f"[{plural(len(text), 'character')}]")
    dialog.answer(text)


COMMANDS: dict[str, Callable[[Dialog, str], bool | None]] = {
    "/help": show_help,
    "/set": change,
    "/show": show,
    "/stats": stats,
    "/beams": beams,
    "/tree": tree,
    "/regen": regen,
    "/undo": undo,
    "/reset": reset,
    "/system": system,
    "/think": think,
    "/read": read,
    "/save": save,
    "/load": load,
    "/exit": leave,
}
ALIASES = {"/?": "/help", "/clear": "/reset", "/quit": "/exit", "/bye": "/exit"}
USAGE = {
    "/set": " k=v ...",
    "/show": " WHAT",
    "/tree": " [FILE]",
    "/regen": " [k=v ...]",
    "/system": " TEXT",
    "/think": " WHAT",
    "/read": " FILE",
    "/save": " FILE",
    "/load": " FILE",
}


# --- shared by commands ---


def assignments(text: str) -> dict[str, Any]:
    """`beams=15 early-stopping=never` -> {"beams": 15, "early_stopping": "never"}. A value is JSON, or a word as in a
    shell, which may be JSON too. Raises UsageError."""
    found, rest = {}, text.lstrip()
    while rest:
        name = re.match(r"[\w-]+=", rest)
        try:
            value, end = json.JSONDecoder().raw_decode(rest, name.end() if name else 0)
        except (ValueError, RecursionError):
            name = None
        if name and (rest[end:] == "" or rest[end].isspace()):
            key, rest = name[0][:-1], rest[end:].lstrip()
        else:
            key, value, rest = _word(rest)
        found[key.lstrip("-").replace("-", "_")] = value
    return found


def _word(text: str) -> tuple[str, Any, str]:
    """Split the first word, `name=value`, off a text. Returns the name, the value, and the rest. Raises UsageError."""
    source = io.StringIO(text)
    words = shlex.shlex(source, posix=True)
    words.whitespace_split, words.commenters = True, ""
    try:
        word = words.get_token() or ""
    except ValueError as error:
        raise UsageError(f"settings: {error}") from None
    key, equals, value = word.partition("=")
    if not equals or not key:
        raise UsageError(f"settings: expected name=value, got {word!r}", remedy="/set alone shows the names")
    with contextlib.suppress(ValueError, RecursionError):
        value = json.loads(value)
    return key, value, source.read().lstrip()


def literal(value: Any) -> str:
    """A setting's value as users write it."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def read_prompt(path: str, pipes: bool = False) -> str:
    """A file's text without the end of its last line; `pipes` allows files that are not regular. Raises UsageError."""
    try:
        name = os.path.expanduser(path)
        with open(name, "rb") if pipes else open_regular(name) as file:
            data = file.read(MAX_PROMPT_FILE + 1)
    except (OSError, ValueError) as error:
        raise UsageError(f"cannot read the file: {reason_of(error)}", where=path) from None
    if len(data) > MAX_PROMPT_FILE:
        raise UsageError(f"the file is larger than {MAX_PROMPT_FILE >> 20} MB", where=path)
    text = decode_prompt(data, path)
    if not text.strip():
        raise UsageError("the file is empty", where=path)
    return text


def decode_prompt(data: bytes, where: str) -> str:
    """A prompt as text, without the end of its last line, which editors and shells add. Raises UsageError."""
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        place = f"{where}, byte {error.start}: 0x{data[error.start]:02x}"
        raise UsageError("the input is not valid UTF-8", where=place, remedy="give the input as UTF-8") from None
    return text.removeprefix("\ufeff").removesuffix("\n").removesuffix("\r")


def tell_loaded(dialog: Dialog, saved: transcript.Transcript, remark: str = "") -> None:
    """Print the number of loaded turns, and the model and settings of the file that differ from the present ones."""
    dialog.screen.hint(f"[{plural(len(saved.turns), 'turn')} loaded{remark}]")
    if saved.turns and saved.model != dialog.engine.name:
        dialog.screen.hint(f"[these turns are from {saved.model}; {dialog.engine.name} continues]")
    now = json.loads(json.dumps(dialog.settings.shown()))
    if other := [f"{key}={literal(value)}" for key, value in saved.settings.items() if now.get(key) != value]:
        dialog.screen.hint(f"[saved with other settings; to restore them: /set {' '.join(map(shlex.quote, other))}]")


def _replaces(dialog: Dialog) -> str:
    return f"; its first new turn replaces what {dialog.file} holds" if dialog.file else ""


def _cache(dialog: Dialog) -> list[str]:
    pool, trunk, turns = dialog.engine.pool, dialog.conversation.session.trunk, len(dialog.conversation.turns)
    held, context, first = trunk.cached if trunk else 0, dialog.engine.shape.max_positions, dialog.conversation.first
    unseen = f", the model sees the last {turns - first}" if first else ""
    return [
        f"context  {held}{f' of {context}' if context else ''} tokens cached, {plural(turns, 'turn')}{unseen}",
        f"pool     {pool.used_pages} of {pool.pages} pages in use, {mib(pool.used_pages * pool.page_bytes)}",
    ]


def _memory(dialog: Dialog) -> str:
    pool = dialog.engine.pool
    lines = [
        *_cache(dialog),
        f"page     {plural(pool.page_size, 'token')} of {pool.bytes_per_token} bytes; the pool may take "
        f"{mib(pool.pages * pool.page_bytes)}: {pool.pages * pool.page_size} tokens",
    ]
    if dialog.last:
        lines.append(f"peak     {mib(dialog.last.stats['kv_bytes_peak'])} of cache during the last reply")
    if resident := memory_of_process()[1]:
        lines.append(f"process  {mib(resident)} resident, weights and libraries included")
    return "\n".join(lines)


def _config(dialog: Dialog) -> str:
    engine = dialog.engine
    shown = {
        "model": engine.name,
        "dtype": dtype_name(engine.runner.dtype),
        "kv_dtype": dtype_name(engine.pool.cache.k_LGSD.dtype),
        "device": str(engine.runner.device),
        **{field.name: getattr(engine.shape, field.name) for field in fields(engine.shape)},
        "usable_tokens": engine.runner.vocab_size,
        "eos_token_ids": sorted(engine.eos_token_ids),
        "chat_template": engine.template is not None,
        "on_overflow": dialog.conversation.on_overflow,
    }
    return "\n".join(f"{key:22}{literal(value)}" for key, value in shown.items())
