"""The values in tool calls: JSON, Python call syntax, or Gemma 4's objects with bare keys; parsed without an
interpreter."""

import json
import re
from typing import Any

from engine.text.channels import start_at_end

Call = tuple[str, str]  # name, arguments as JSON
MOST_DEPTH = 64  # levels of nested brackets
QUOTE = '<|"|>'  # a token of Gemma 4, on both sides of a text; nothing in it is escaped
_OUTSIDE = re.compile(r"[\"'{}\[\]()]")
_OUTSIDE_QUOTES = re.compile(rf'{re.escape(QUOTE)}|["{{}}\[\]]')
_INSIDE = {'"': re.compile(r'[\\"]'), "'": re.compile(r"[\\']"), QUOTE: re.compile(re.escape(QUOTE))}
_TOKEN = re.compile(
    r"""\s*(?:(?P<string>"(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*')|(?P<number>[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?)"""
    r"|(?P<name>[A-Za-z_][\w.-]*)|(?P<mark>[\[\](){},:=]))",
    re.S,
)
_QUOTED_TOKEN = re.compile(
    rf"""\s*(?:(?P<string>{re.escape(QUOTE)}.*?{re.escape(QUOTE)}|"(?:[^"\\]|\\.)*")|(?P<mark>[\[\]{{}},:])"""
    r"""|(?P<number>-?\d+(?:\.\d+)?(?:[eE][-+]?\d+)?)(?=\s*[\]},:])|(?P<name>[^\s\[\]{},:"<][^\[\]{},:"<]*))""",
    re.S,
)
_WORDS = {"True": True, "true": True, "False": False, "false": False, "None": None, "null": None}
_ESCAPE = re.compile(r"\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U(000[0-9a-fA-F]{5}|0010[0-9a-fA-F]{4})|(.))", re.S)
_ESCAPED = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "0": "\0", "\n": ""}


class Brackets:
    """Finds the end of a bracketed value as it arrives. Brackets in strings do not count.

    Args:
        quoted: strings may stand between `QUOTE`s, but not between apostrophes.
    """

    def __init__(self, quoted: bool = False):
        self._depth, self._quote, self._escaped = 0, "", False
        self._quoted, self._cut = quoted, ""  # what may be the start of a QUOTE

    def feed(self, text: str) -> int:
        """Add text. Returns the place after the last bracket; -1 if it has not come yet."""
        before, text = len(self._cut), self._cut + text
        self._cut = start_at_end(text, QUOTE) if self._quoted else ""
        at = self._feed(text.removesuffix(self._cut))
        return at if at < 0 else at - before

    def _feed(self, text: str) -> int:
        i = 0
        while i < len(text):
            if self._escaped:
                self._escaped, i = False, i + 1
                continue
            outside = _OUTSIDE_QUOTES if self._quoted else _OUTSIDE
            found = (_INSIDE[self._quote] if self._quote else outside).search(text, i)
            if found is None:
                return -1
            i, mark = found.end(), found[0]
            if self._quote:
                self._escaped = mark == "\\"
                self._quote = self._quote if self._escaped else ""
            elif mark in _INSIDE:
                self._quote = mark
            else:
                self._depth += 1 if mark in "{[(" else -1
                if self._depth <= 0:
                    return i
        return -1


def read_calls(text: str, name: str = "", *, quoted: bool = False, keyed: bool = False) -> list[Call]:
    """The calls of a bracketed text; none if it is anything else.

    Args:
        text: an object of JSON with a name and arguments, or a list of those; or `[f(a=1), g()]`, or lines `f(a=1)`.
        name: the function's name, if the text is its arguments.
        quoted: the arguments may be an object in Gemma 4's form.
        keyed: an object may have the name as its only key.
    """
    try:
        value = json.loads(text, strict=False)
    except (ValueError, RecursionError):
        value = _without_json(text, quoted)
    if name:
        value = {"name": name, "arguments": value}
    calls = value if isinstance(value, list) else [value]
    if keyed:
        calls = [_with_name(one) for one in calls]
    found = [_call(one) for one in calls]
    return [call for call in found if call is not None] if None not in found else []


def _with_name(value: Any) -> Any:
    if not isinstance(value, dict) or len(value) != 1:
        return value
    [(name, arguments)] = value.items()
    return {"name": name, "arguments": arguments}


def _call(value: Any) -> Call | None:
    """The call that an object of JSON describes."""
    if isinstance(value, dict) and isinstance(value.get("function"), dict):
        value = value["function"]
    if (
        not isinstance(value, dict)
        or not isinstance(name := value.get("name", value.get("tool_name")), str)
        or not name
    ):
        return None
    arguments = next((value[key] for key in ("arguments", "parameters") if key in value), {})
    try:
        if isinstance(arguments, str):  # an object that is written as a text
            arguments = json.loads(arguments, strict=False)
        if isinstance(arguments, dict):
            return name, json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    except (ValueError, RecursionError):
        pass
    return None


def _without_json(text: str, quoted: bool) -> Any:
    """`[f(a=1)]`, or lines, as the objects that JSON would have or, if `quoted`, `{a:<|"|>b<|"|>,c:[1,true]}` as the
    object that it would have; None for anything else."""
    try:
        reader = (_QuotedReader if quoted else _Reader)(text)
        found = reader.value() if quoted else reader.calls()
        return found if reader.kind == "end" else None
    except (_Malformed, ValueError):
        return None


def read_literal(text: str) -> Any:
    """The list, object or word that a text is in Python's syntax; None if it is anything else, or if JSON has no such
    value."""
    try:
        reader = _Reader(text)
        value = reader.value()
        json.dumps(value, allow_nan=False)
    except (_Malformed, ValueError):
        return None
    return value if reader.kind == "end" and isinstance(value, list | dict | bool) else None


def quoted_text(value: Any) -> str:
    """A value of JSON as Gemma 4 writes it."""
    if isinstance(value, str):
        return f"{QUOTE}{value}{QUOTE}"
    if isinstance(value, dict):
        return f"{{{','.join(f'{key}:{quoted_text(item)}' for key, item in sorted(value.items()))}}}"
    return f"[{','.join(map(quoted_text, value))}]" if isinstance(value, list) else json.dumps(value)


class _Malformed(Exception):
    pass


class _Reader:
    """Reads literals and calls from left to right."""

    tokens = _TOKEN

    def __init__(self, text: str):
        self.text, self.at, self.depth = text, 0, 0
        self.kind, self.word = "", ""
        self.step()

    def step(self) -> None:
        """Go to the next token."""
        if found := self.tokens.match(self.text, self.at):
            self.at, self.kind, self.word = found.end(), str(found.lastgroup), found[str(found.lastgroup)]
        elif not self.text[self.at :].strip():
            self.kind, self.word = "end", ""
        else:
            raise _Malformed

    def take(self, mark: str) -> None:
        """Skip a mark that must be there."""
        if (self.kind, self.word) != ("mark", mark):
            raise _Malformed
        self.step()

    def items(self, closing: str, item: Any) -> list[Any]:
        """The values between commas, up to a closing bracket."""
        found = []
        self.depth += 1
        if self.depth > MOST_DEPTH:
            raise _Malformed
        while self.word != closing or self.kind != "mark":
            found.append(item())
            if self.word != closing or self.kind != "mark":
                self.take(",")
        self.depth -= 1
        self.step()
        return found

    def calls(self) -> list[dict[str, Any]]:
        if self.word == "[":
            self.step()
            return self.items("]", self.call)
        found = []
        while self.kind != "end":
            found.append(self.call())
        return found

    def call(self) -> dict[str, Any]:
        name, arguments = self.name(), {}
        self.take("(")
        for key, value in self.items(")", self.argument):
            arguments[key] = value
        return {"name": name, "arguments": arguments}

    def name(self) -> str:
        if self.kind != "name":
            raise _Malformed
        name = self.word
        self.step()
        return name

    def argument(self) -> tuple[str, Any]:
        key = self.name()
        self.take("=")
        return key, self.value()

    def pair(self) -> tuple[str, Any]:
        if self.kind != "string":
            raise _Malformed
        key = self.value()
        self.take(":")
        return key, self.value()

    def value(self) -> Any:
        """A literal."""
        kind, word = self.kind, self.word
        if kind == "mark" and word in ("[", "{"):
            self.step()
            return self.items("]", self.value) if word == "[" else dict(self.items("}", self.pair))
        if kind == "string":
            self.step()
            return _ESCAPE.sub(_unescaped, word[1:-1])
        if kind == "number":
            self.step()
            return float(word) if re.search(r"[.eE]", word) else int(word)
        if kind == "name" and word in _WORDS:
            self.step()
            return _WORDS[word]
        raise _Malformed


class _QuotedReader(_Reader):
    """Reads Gemma 4's literals: keys without quotes, texts between two `QUOTE`s."""

    tokens = _QUOTED_TOKEN

    def pair(self) -> tuple[str, Any]:
        if self.kind not in ("string", "name", "number"):
            raise _Malformed
        key = self.text_of(self.word)
        self.step()
        self.take(":")
        return key, self.value()

    def value(self) -> Any:
        if self.kind != "string":
            self.word = self.word.rstrip()
            return super().value()
        word = self.word
        self.step()
        return self.text_of(word)

    @staticmethod
    def text_of(word: str) -> str:
        if word.startswith(QUOTE):
            return word[len(QUOTE) : -len(QUOTE)]
        return _ESCAPE.sub(_unescaped, word[1:-1]) if word.startswith('"') else word.rstrip()


def _unescaped(found: re.Match[str]) -> str:
    code = found[1] or found[2] or found[3]
    return chr(int(code, 16)) if code else _ESCAPED.get(found[4], found[4])
