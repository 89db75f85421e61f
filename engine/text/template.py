"""Chat templates: messages to text, keeping message contents distinct from the template's control tokens."""

import io
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from engine.errors import CheckpointError, UsageError, check_utf8, reason_of, shortened
from engine.text import sandbox, sandbox_process
from engine.text.thinking import Thoughts
from engine.text.tokenizer import Tokenizer
from engine.text.tokenizer_files import any_of, read_json
from engine.text.tool_calls import CALL_MARKS, ToolFormat, format_of
from engine.words import THINK
from models.checkpoint.files import open_regular

Span = tuple[str, bool]  # text, and whether special tokens spelled in it are control tokens

MAX_TEMPLATE_BYTES = 64 << 10
REMEDY = "use --chat-template none for plain completion, or --chat-template FILE for another template"
_REASONING = ("reasoning_content", "thinking", "reasoning")
THINKING = ("enable_thinking", "thinking")  # the variables that switch thoughts on and off
TOOL_USE = "tool_use"  # the name of the template for conversations with tools
# How a template reads the thoughts of earlier replies: as a field of the message, or as a block of its content.
_READS_FIELD = re.compile(r"reasoning_content|message\.thinking\b|message\[.thinking.\]")
_READS_BLOCK = re.compile(r"""==\s*['"]thinking['"]""")
_ESCAPED = re.compile(r'(["\\\x00-\x1f]+)')  # what JSON escapes
_RESERVED = ("messages", "tools", "add_generation_prompt")
_ALWAYS = ("user", "assistant", "system")  # roles that every template is given
_OPTIONAL = ("developer", "tool", "function")  # those of OpenAI's API that a template may lack


@dataclass(frozen=True)
class TemplateOptions:
    """The variables that a chat template gets besides the messages.

    Args:
        tools: functions that the model may call, as JSON schemas; None: none.
        variables: further variables of the template, JSON values.
        think: "on" or "off" sets the variable of the template that switches thoughts; "auto" leaves it out.
        lead: the beginning of the reply, control tokens included; it belongs to the prompt, and a thought that the
            template has opened is closed before it.

    Raises:
        UsageError: another value of `think`.
    """

    tools: Sequence[Mapping[str, Any]] | None = None
    variables: Mapping[str, Any] = field(default_factory=dict)
    think: str = "auto"
    lead: str = ""

    def __post_init__(self):
        if self.think not in THINK:
            raise UsageError(f"think: expected {', '.join(THINK)}, got {self.think!r}")

    @property
    def given(self) -> bool:
        """Whether any option differs from the default."""
        return self != TemplateOptions()


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
      protected too, except in assistant messages, where the model's own `<think>` must remain a token, as must the
      marks of its tool calls;
    - the other added tokens are ordinary text, as everywhere else.

    Args:
        source: the template.
        variables: variables of the template besides the messages (`bos_token`, ...).
        special: spellings protected in all messages.
        added: spellings of other added tokens, protected as described above.
        clock: the time that `strftime_now` shows.
        where: the file, for error messages.
        tool_use: the template of conversations with tools; None: the same.

    Attributes:
        thoughts: the tags between which this model writes thoughts.
        calls: how it writes tool calls.
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
        tool_use: str | None = None,
    ):
        self.source, self.variables, self.clock, self.where = source, dict(variables or {}), clock, where
        self._tool_use = source if tool_use is None else tool_use
        for text in (source, self._tool_use):
            self._check_size(text)
        everywhere, added, both = {s for s in special if s}, {*added}, source + self._tool_use
        self.thoughts = Thoughts.find(everywhere | added, source)
        self._assistant = _Spellings(everywhere - CALL_MARKS - self.thoughts.tokens)
        self._others = _Spellings(everywhere | {s for s in added if s in both and not s.isspace()})
        self._special, self._names, self._turn_end = everywhere, {}, None
        self._writes: dict[tuple[str, str], bool] = {}
        self.calls: ToolFormat = format_of(self._tool_use, everywhere | added)

    def _check_size(self, source: str) -> None:
        try:
            size = len(source.encode())
        except UnicodeEncodeError:
            raise self._refused("it is not valid UTF-8") from None
        if size > MAX_TEMPLATE_BYTES:
            raise self._refused(f"it has {size} bytes, at most {MAX_TEMPLATE_BYTES} are allowed")

    @classmethod
    def load(cls, folder: str | Path, tokenizer: Tokenizer) -> "ChatTemplate | None":
        """Find the template of a checkpoint, as transformers 5 does; None for a base model that has none.

        `chat_template.jinja` comes before `chat_template` in tokenizer_config.json (a string, or a list of named ones),
        and that before the older `chat_template.json`. Of named ones "default" is used, and "tool_use" if there are
        tools; next to `chat_template.jinja`, others are in `additional_chat_templates/`.

        Raises:
            CheckpointError: the template is unreadable, too long, or none of several is the default.
        """
        folder = Path(folder)
        if (path := folder / "chat_template.jinja").exists():
            other = folder / "additional_chat_templates" / f"{TOOL_USE}.jinja"
            return cls._of(_read(path), tokenizer, path, _read(other) if other.exists() else None)
        for path, config in (
            (folder / "tokenizer_config.json" if folder.is_dir() else folder, tokenizer.config),  # a GGUF file
            (folder / "chat_template.json", read_json(folder / "chat_template.json")),
        ):
            template, tool_use = config.get("chat_template"), None
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
                template, tool_use = template["default"], template.get(TOOL_USE)
            if isinstance(template, str) and isinstance(tool_use, str | None):
                return cls._of(template, tokenizer, path, tool_use)
            if template is not None:
                raise CheckpointError("chat_template is not a string", where=str(path), remedy=REMEDY)
        return None

    @classmethod
    def from_file(cls, path: str | Path, tokenizer: Tokenizer) -> "ChatTemplate":
        """Read a template from a file of its own.

        Raises:
            CheckpointError: the file cannot be read, is not UTF-8 or too long.
        """
        return cls._of(_read(path), tokenizer, path)

    @classmethod
    def _of(cls, source: str, tokenizer: Tokenizer, path: str | Path, tool_use: str | None = None) -> "ChatTemplate":
        return cls(
            source,
            variables=tokenizer.special_tokens,
            special=tokenizer.special_spellings,
            added=tokenizer.added_spellings,
            where=str(path),
            tool_use=tool_use,
        )

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        options: TemplateOptions | None = None,
        *,
        add_generation_prompt: bool = True,
    ) -> list[Span]:
        """Render messages to spans whose texts, joined, are what transformers' apply_chat_template renders.

        Args:
            messages: `{"role": ..., "content": ...}` and other keys that the template reads; JSON values only.
            options: the other variables of the template; their lead is not rendered.
            add_generation_prompt: whether the text ends with the header of the assistant's next message.

        Returns:
            (text, is_control) spans for `Tokenizer.encode_rendered`; a single one if the messages spell no token.

        Raises:
            UsageError: the messages are malformed, or the template rejects them or leaves out those of a role; it has
                no such variable; or templates cannot be rendered here, see `engine.text.sandbox_process.interpreter`.
            CheckpointError: the template fails or breaks a limit.
        """
        if not messages:
            raise UsageError("a conversation needs at least one message")
        options = options or TemplateOptions()
        source = self.source if options.tools is None else self._tool_use
        given = self._options(source, options)
        plain = [_alias_reasoning(_message(m)) for m in messages]
        self._check_roles(source, plain)
        marks = _Marks(source + json.dumps([*plain, given], ensure_ascii=False))
        chat = [marks.protect(m, self._assistant if m["role"] == "assistant" else self._others) for m in plain]
        values = {"tools": None, "documents": None} | marks.protect(given, self._others)
        values |= self.variables | {"messages": chat, "add_generation_prompt": add_generation_prompt}
        reply = self._ask({"variables": values, "now": self.clock().isoformat()}, source)
        if (objection := reply.get("raised")) is not None:
            text = "".join(text for text, _ in marks.spans(objection))
            raise UsageError(f"the chat template rejects the messages: {text}", where=self.where)
        try:
            reply["text"].encode()
        except UnicodeEncodeError:
            raise self._refused("its output is not valid UTF-8") from None
        return marks.spans(reply["text"])

    def _options(self, source: str, options: TemplateOptions) -> dict[str, Any]:
        """The checked variables of a render, except the messages. Raises UsageError."""
        tools, variables, think = options.tools, options.variables, options.think
        if not isinstance(variables, Mapping):
            raise UsageError("template variables: expected an object of names and values")
        if tools is None and not variables and think == "auto":
            return {}
        given = _plain(variables, "template")
        names = self._variables(source)
        if think != "auto":
            switch = next((name for name in THINKING if name in names), None)
            if switch is None:
                wanted = " or ".join(THINKING)
                raise UsageError(f"the chat template cannot switch thoughts {think}: it has no variable {wanted}")
            given = {switch: think == "on"} | given
        for name in given:
            if name in _RESERVED or name in self.variables:
                raise UsageError(f"template variable {name}: its value is given by the conversation or the tokenizer")
            if name not in names:
                known = sorted(names - {*_RESERVED, *self.variables}) or ["none"]
                what = f"the chat template has no variable {name}"
                raise UsageError(what, where=self.where, remedy=f"its variables: {', '.join(known)}")
        if tools is None:
            return given
        if not isinstance(tools, Sequence) or not all(isinstance(tool, Mapping) for tool in tools):
            raise UsageError("tools: expected a list of objects, a function's JSON schema each")
        if "tools" not in names:
            raise UsageError("the chat template takes no tools: it has no variable tools", where=self.where)
        return given | {"tools": _plain(tools, "tools")}

    def _check_roles(self, source: str, messages: Sequence[Mapping[str, Any]]) -> None:
        """Check that the template does not leave out messages of some role. Raises UsageError."""
        for i, role in enumerate(message["role"] for message in messages):
            if role not in _ALWAYS and not _names_role(source, role) and not self._writes_role(source, role):
                known = ", ".join([*_ALWAYS[:2], *(r for r in (_ALWAYS[2], *_OPTIONAL) if _names_role(source, r))])
                what = f"messages[{i}].role: the chat template knows no role {shortened(repr(role))}"
                raise UsageError(what, where=self.where, remedy=f"its roles: {known}")

    def _writes_role(self, source: str, role: str) -> bool:
        """Whether a template that does not name a role writes its messages; if the role is not one of OpenAI's, with
        its name. True if the template rejects a trial: it will reject the messages."""
        key = source, role if role in _OPTIONAL else ""
        if key not in self._writes:
            mark = "role"
            while mark in source.lower():
                mark += "x"
            trial = [{"role": "user", "content": "Hello"}, {"role": key[1] or mark, "content": mark}]
            values = self.variables | {"messages": trial, "tools": None, "documents": None}
            request = {"variables": values | {"add_generation_prompt": False}, "now": self.clock().isoformat()}
            try:
                text = self._ask(request, source).get("text")
            except CheckpointError:  # it needs other messages
                text = None
            self._writes[key] = text is None or text.lower().count(mark) >= (1 if key[1] else 2)
        return self._writes[key]

    def _variables(self, source: str) -> set[str]:
        """The variables that a template reads. Raises as `check`."""
        if source not in self._names:
            self._names[source] = {*self._ask({}, source)["names"]}
        return self._names[source]

    def takes(self, variable: str) -> bool:
        """Whether the template of conversations with tools reads a variable. Raises as `render`."""
        return variable in self._variables(self._tool_use)

    @property
    def writes_calls(self) -> bool:
        """Whether the template writes the `tool_calls` of earlier messages."""
        return "tool_calls" in self._tool_use

    def reply(self, answer: str, thought: str | None) -> dict[str, Any]:
        """The assistant's message of an earlier turn, with its thought in the place where this template reads it.

        The template decides which thoughts the model sees again. Most drop those of earlier turns.
        """
        message = {"role": "assistant", "content": answer}
        if thought is None:
            return message
        if self.thoughts.begun is not None or _READS_FIELD.search(self.source):
            return message | {"reasoning_content": thought}
        if re.search(r"message\.reasoning\b", self.source):  # Solar Open
            return message | {"reasoning": thought}
        if _READS_BLOCK.search(self.source):
            blocks = [{"type": "thinking", "thinking": thought}, {"type": "text", "text": answer}]
            return message | {"content": blocks}
        return message | {"content": self.thoughts.join(thought, answer)}

    def around_reply(self, messages: Sequence[Mapping[str, Any]]) -> tuple[list[Span], Span, list[Span]]:
        """Render messages and a reply: the spans before the reply, the reply itself, a mark, and the spans after it.

        Raises:
            UsageError, CheckpointError: see `render`; or the template leaves the reply out.
        """
        mark = "REPLY"
        while mark in self.source + json.dumps(messages):
            mark += "X"
        spans = self.render([*messages, {"role": "assistant", "content": mark}], add_generation_prompt=False)
        place = next((i for i, (text, _) in enumerate(spans) if mark in text), None)
        if place is None:
            raise CheckpointError("the chat template leaves the assistant's message out", where=self.where)
        text, control = spans[place]
        before, after = text.split(mark, 1)
        return [*spans[:place], (before, control)], (mark, False), [(after, control), *spans[place + 1 :]]

    def turn_end(self) -> str:
        """The special token that this template writes after an assistant's message; "" if it writes none there, or if
        it writes the same one between thought and answer."""
        if self._turn_end is None:
            mark = "ANSWER"
            while mark in self.source:
                mark += "X"
            reply = {"role": "assistant", "content": mark, "reasoning": f"THOUGHT {mark}"}
            messages = [{"role": "user", "content": "Hello"}, reply]
            try:
                text = "".join(text for text, _ in self.render(messages, add_generation_prompt=False))
            except (UsageError, CheckpointError):  # rendering the conversation reports the fault
                text = ""
            between, _, rest = text.partition(f"THOUGHT {mark}")[2].rpartition(mark)
            rest = (rest if between else text.rpartition(mark)[2]).lstrip() if mark in text else ""
            ends = (s for s in self._special if rest.startswith(s) and s not in between)
            self._turn_end = max(ends, key=len, default="")
        return self._turn_end

    def _ask(self, request: dict[str, Any], source: str) -> dict[str, Any]:
        reply = sandbox_process.TEMPLATES.ask({"source": source, **request})
        if reply is None:
            raise self._refused(f"it takes more than {sandbox.CPU_SECONDS} s or too much memory")
        if (reason := reply.get("refused")) is not None:
            raise self._refused(reason)
        return reply

    def _refused(self, reason: str) -> CheckpointError:
        return CheckpointError(f"the chat template is refused: {reason}", where=self.where, remedy=REMEDY)


def _read(path: str | Path) -> str:
    """The text of a template's file. Raises CheckpointError: it cannot be read, or is not UTF-8."""
    try:
        with io.TextIOWrapper(open_regular(path), encoding="utf-8") as file:
            return file.read(MAX_TEMPLATE_BYTES + 1)
    except (OSError, UnicodeDecodeError) as error:
        what = f"cannot read the chat template: {reason_of(error)}"
        raise CheckpointError(what, where=str(path), remedy=REMEDY) from None


class _Spellings:
    """Finds protected spellings in a string, and the start of one at its end."""

    def __init__(self, spellings: set[str]):
        self.pattern = any_of(spellings)
        # Only starts such as "<" or "[": otherwise every word that begins like a token would be protected.
        self.starts = {s[:n] for s in spellings for n in range(1, len(s)) if not (s[0].isalnum() or s[0].isspace())}
        self.longest = max(map(len, self.starts), default=0)

    def replace(self, text: str, mark: Callable[[str], str]) -> str:
        """`text` with `mark(spelling)` instead of each protected spelling."""
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
        """The characters that replace a spelling, except those that JSON escapes, so that tojson escapes them."""
        pieces = _ESCAPED.split(spelling)
        if not any(pieces[::2]):
            pieces = [spelling]
        return "".join(self._mark(piece) if i % 2 == 0 and piece else piece for i, piece in enumerate(pieces))

    def _mark(self, piece: str) -> str:
        if piece not in self._mark_of:
            self._mark_of[piece] = next(self._free)
        return self._mark_of[piece]

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
        for spelling, mark in self._mark_of.items():
            # tojson(ensure_ascii=True) writes a mark as two escapes, the text of a list or an object as one
            spelling_of |= {mark: spelling, json.dumps(mark)[1:-1]: json.dumps(spelling)[1:-1]}
            spelling_of[repr(mark)[1:-1]] = spelling
        pieces = re.split("(" + "|".join(map(re.escape, spelling_of)) + ")", text)
        return [(spelling_of.get(p, p), i % 2 == 0) for i, p in enumerate(pieces) if p]


def _names_role(source: str, role: str) -> bool:
    """Whether a template has a role's name as a string."""
    return any(quote + role + quote in source for quote in "'\"")


def _message(message: Any) -> dict[str, Any]:
    """A message as plain JSON, without keys whose value is None, as in transformers: templates expect them absent."""
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise UsageError('a message is an object with a "role" and a "content"')
    try:
        return {key: value for key, value in _plain(message, "messages").items() if value is not None}
    except RecursionError:
        raise UsageError("a message is nested too deep") from None


def _plain(value: Any, name: str) -> Any:
    """Return a value of a request as plain JSON; `name` is its name in errors."""
    if isinstance(value, str):
        return check_utf8(value, name)
    if value is None or isinstance(value, bool | int | float):
        return value
    if isinstance(value, Mapping):
        return {check_utf8(str(key), name): _plain(item, name) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item, name) for item in value]
    raise UsageError(f"a value for a chat template is a {type(value).__name__}; only JSON values are allowed")


def _alias_reasoning(message: dict[str, Any]) -> dict[str, Any]:
    """transformers passes a message's reasoning under the old name and the new one."""
    reasoning = next((message[key] for key in _REASONING if key in message), None)
    return message if reasoning is None else {"thinking": reasoning, **message, "reasoning_content": reasoning}
