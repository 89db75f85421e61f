"""Chat templates: messages to text, in which contents are distinguished from the template's control tokens."""

import io
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from engine.errors import CheckpointError, UsageError
from engine.text import sandbox, sandbox_process
from engine.text.tokenizer import Tokenizer, check_utf8
from engine.text.tokenizer_files import any_of, read_json
from models.files import open_regular

Span = tuple[str, bool]  # text, and whether special tokens spelled in it are control tokens

MAX_TEMPLATE_BYTES = 64 << 10
REMEDY = "use --chat-template none for plain completion, or --chat-template FILE for another template"
_REASONING = ("reasoning_content", "thinking", "reasoning")


class ChatTemplate:
    """A Jinja chat template, rendered as transformers 5 renders it, in a process with limits (`engine.text.sandbox`).

    All templates share one such process; the first render starts it (see `engine.text.sandbox_process`).

    Only the template may write control tokens. A special token that a message spells reaches the template as one
    private-use character, which occurs nowhere in the messages, and is returned as a span of plain text: the template
    may trim, split or search the content without finding the token's spelling. All other messages are rendered
    unchanged. Three details:

    - the start of a special token at the very end of a string (`"<|im_"`), which the text after it could complete, is
      protected like a whole token;
    - added tokens that are not special but that the template writes itself (DeepSeek's `<｜User｜>`, Gemma's turns) are
      protected too, except in assistant messages, where the model's own `<think>` must remain a token;
    - the other added tokens are ordinary text, as everywhere else.

    Args:
        source: the template.
        variables: variables of the template besides the messages (`bos_token`, ...).
        special: spellings protected in all messages.
        added: spellings of other added tokens, protected as described above.
        clock: the time that `strftime_now` shows.
        where: the file, for error messages.
    """

    def __init__(
        self,
        source: str,
        *,
        variables: Mapping[str, str] | None = None,
        special: Iterable[str] = (),
        added: Iterable[str] = (),
        clock: Callable[[], datetime] = datetime.now,
        where: str = "",
    ):
        self.source, self.variables, self.clock, self.where = source, dict(variables or {}), clock, where
        try:
            size = len(source.encode())
        except UnicodeEncodeError:
            raise self._refused("it is not valid UTF-8") from None
        if size > MAX_TEMPLATE_BYTES:
            raise self._refused(f"it has {size} bytes, at most {MAX_TEMPLATE_BYTES} are allowed")
        everywhere = {s for s in special if s}
        self._assistant = _Spellings(everywhere)
        self._others = _Spellings(everywhere | {s for s in added if s in source and not s.isspace()})

    @classmethod
    def load(cls, folder: str | Path, tokenizer: Tokenizer) -> "ChatTemplate | None":
        """Find the template of a checkpoint, as transformers 5 does; None for a base model that has none.

        `chat_template.jinja` comes before `chat_template` in tokenizer_config.json (a string, or a list of named ones
        of which "default" is taken), and that before the older `chat_template.json`.

        Raises:
            CheckpointError: the template is unreadable, too long, or none of several is the default.
        """
        folder = Path(folder)
        if (path := folder / "chat_template.jinja").exists():
            return cls.from_file(path, tokenizer)
        for path, config in (
            (folder / "tokenizer_config.json", tokenizer.config),
            (folder / "chat_template.json", read_json(folder / "chat_template.json")),
        ):
            template = config.get("chat_template")
            if isinstance(template, list):
                try:
                    template = {entry["name"]: entry["template"] for entry in template}
                except (TypeError, KeyError):
                    raise CheckpointError("chat_template is no list of names and templates", where=str(path)) from None
            if isinstance(template, dict):
                if "default" not in template:
                    names = ", ".join(sorted(map(str, template))) or "none"
                    what = f"no chat template is called default; there are: {names}"
                    raise CheckpointError(what, where=str(path), remedy=REMEDY)
                template = template["default"]
            if isinstance(template, str):
                return cls._of(template, tokenizer, path)
            if template is not None:
                raise CheckpointError("chat_template is not a string", where=str(path), remedy=REMEDY)
        return None

    @classmethod
    def from_file(cls, path: str | Path, tokenizer: Tokenizer) -> "ChatTemplate":
        """Read a template from a file of its own.

        Raises:
            CheckpointError: the file cannot be read, is not UTF-8 or too long.
        """
        try:
            with io.TextIOWrapper(open_regular(path), encoding="utf-8") as file:
                source = file.read(MAX_TEMPLATE_BYTES + 1)
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            raise CheckpointError(f"cannot read the chat template: {reason}", where=str(path), remedy=REMEDY) from None
        return cls._of(source, tokenizer, path)

    @classmethod
    def _of(cls, source: str, tokenizer: Tokenizer, path: str | Path) -> "ChatTemplate":
        return cls(
            source,
            variables=tokenizer.special_tokens,
            special=tokenizer.special_spellings,
            added=tokenizer.added_spellings,
            where=str(path),
        )

    def check(self) -> None:
        """Compile the template now.

        Raises:
            CheckpointError: it is malformed or breaks a limit.
            UsageError: templates cannot be rendered here, see `engine.text.sandbox_process.interpreter`.
        """
        self._ask({})

    def render(self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True) -> list[Span]:
        """Render messages to spans whose texts, joined, are what transformers' apply_chat_template renders.

        Args:
            messages: `{"role": ..., "content": ...}` and other keys that the template reads; JSON values only.
            add_generation_prompt: whether the text ends with the header of the assistant's next message.

        Returns:
            (text, is_control) spans for `Tokenizer.encode_rendered`; a single one if the messages spell no token.

        Raises:
            UsageError: the messages are malformed, or the template rejects them; or templates cannot be rendered here,
                see `engine.text.sandbox_process.interpreter`.
            CheckpointError: the template fails or breaks a limit.
        """
        if not messages:
            raise UsageError("a conversation needs at least one message")
        plain = [_alias_reasoning(_message(m)) for m in messages]
        marks = _Marks(self.source + "".join(_strings(plain)))
        chat = [marks.protect(m, self._assistant if m["role"] == "assistant" else self._others) for m in plain]
        variables = {
            **self.variables,
            "messages": chat,
            "tools": None,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
        }
        reply = self._ask({"variables": variables, "now": self.clock().isoformat()})
        if (objection := reply.get("raised")) is not None:
            text = "".join(text for text, _ in marks.spans(objection))
            raise UsageError(f"the chat template rejects the messages: {text}", where=self.where)
        try:
            reply["text"].encode()
        except UnicodeEncodeError:
            raise self._refused("its output is not valid UTF-8") from None
        return marks.spans(reply["text"])

    def _ask(self, request: dict[str, Any]) -> dict[str, str]:
        reply = sandbox_process.ask({"source": self.source, **request})
        if reply is None:
            raise self._refused(f"it takes more than {sandbox.CPU_SECONDS} s or too much memory")
        if (reason := reply.get("refused")) is not None:
            raise self._refused(reason)
        return reply

    def _refused(self, reason: str) -> CheckpointError:
        return CheckpointError(f"the chat template is refused: {reason}", where=self.where, remedy=REMEDY)


class _Spellings:
    """Finds protected spellings in a string, and the start of one at its end."""

    def __init__(self, spellings: set[str]):
        self.pattern = any_of(spellings)
        # Only starts such as "<" or "[": otherwise every word that begins like a token would be protected.
        self.starts = {s[:n] for s in spellings for n in range(1, len(s)) if not (s[0].isalnum() or s[0].isspace())}
        self.longest = max(map(len, self.starts), default=0)

    def replace(self, text: str, mark: Callable[[str], str]) -> str:
        """`text` with `mark(spelling)` in the place of each protected spelling."""
        body = text.rstrip()  # the template may trim
        for n in range(min(self.longest, len(body)), 0, -1):
            if body[-n:] in self.starts:
                body, end = body[:-n], mark(body[-n:]) + text[len(body) :]
                break
        else:
            body, end = text, ""
        return self.pattern.sub(lambda found: mark(found[0]), body) + end


class _Marks:
    """Private-use characters that replace protected spellings while a template renders."""

    def __init__(self, taken: str):
        used = set(taken)
        self._free = (c for c in map(chr, range(0xF0000, 0x10FFFE)) if c not in used and ord(c) & 0xFFFE != 0xFFFE)
        self._mark_of: dict[str, str] = {}

    def mark(self, spelling: str) -> str:
        if spelling not in self._mark_of:
            self._mark_of[spelling] = next(self._free)
        return self._mark_of[spelling]

    def protect(self, value: Any, spellings: _Spellings) -> Any:
        """A copy of a JSON value whose strings (not its keys) have marks for spellings."""
        if isinstance(value, str):
            return spellings.replace(value, self.mark)
        if isinstance(value, dict):
            return {key: self.protect(item, spellings) for key, item in value.items()}
        return [self.protect(item, spellings) for item in value] if isinstance(value, list) else value

    def spans(self, text: str) -> list[Span]:
        """Rendered text with the marks replaced by their spellings."""
        if not self._mark_of:
            return [(text, True)]
        spelling_of = {}
        for spelling, mark in self._mark_of.items():  # tojson(ensure_ascii=True) writes a mark as two escapes
            spelling_of[mark] = spelling_of[json.dumps(mark)[1:-1]] = spelling
        pieces = re.split("(" + "|".join(map(re.escape, spelling_of)) + ")", text)
        return [(spelling_of.get(p, p), i % 2 == 0) for i, p in enumerate(pieces) if p]


def _message(message: Any) -> dict[str, Any]:
    """A message as plain JSON, without keys whose value is None, as in transformers: templates expect them absent."""
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise UsageError('a message is an object with a "role" and a "content"')
    try:
        return {key: value for key, value in _plain(message).items() if value is not None}
    except RecursionError:
        raise UsageError("a message is nested too deep") from None


def _plain(value: Any) -> Any:
    if isinstance(value, str):
        return check_utf8(value)
    if value is None or isinstance(value, bool | int | float):
        return value
    if isinstance(value, Mapping):
        return {check_utf8(str(key)): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    raise UsageError(f"a message holds a {type(value).__name__}; only JSON values are allowed")


def _alias_reasoning(message: dict[str, Any]) -> dict[str, Any]:
    """transformers passes a message's reasoning under the old name and the new one."""
    reasoning = next((message[key] for key in _REASONING if key in message), None)
    return message if reasoning is None else {"thinking": reasoning, **message, "reasoning_content": reasoning}


def _strings(value: Any) -> Iterable[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        yield from value
        for item in value.values():
            yield from _strings(item)
    elif isinstance(value, list):
        for item in value:
            yield from _strings(item)
