"""Calls in blocks: a name and its arguments between tags, one or several in a block.

| blocks | a call |
|---|---|
| FUNCTIONS (Qwen 3.5, Qwen3-Coder, Nemotron 3, Seed-OSS) | `<function=f><parameter=a>1</parameter></function>` |
| INVOKES (MiniMax M2) | `<invoke name="f"><parameter name="a">1</parameter></invoke>` |
| DSML (DeepSeek V3.2) | the same with `｜DSML｜` in each tag, and `string="false"` where a value is JSON |
| ATEM (Muse) | as INVOKES, with `atem:` in each tag |
| KEYS (GLM 4.5 and later) | `f<arg_key>a</arg_key><arg_value>1</arg_value>` |
| HUNYUAN (Hy3) | `<tool_call>f<tool_sep>` and so on as in KEYS, with `:opensource` in each tag |
| DEEPSEEK (V3.1) | `<｜tool▁call▁begin｜>f<｜tool▁sep｜>{"a": 1}<｜tool▁call▁end｜>`; V3 and R1: in a code fence |
| LINES (OLMo 3) | `f(a=1)`, a call of Python in each line |
| SOLAR (Solar Open) | `<|tool_call:begin|>ID<|tool_call:name|>f<|tool_call:args|>{"a": 1}<|tool_call:end|>` |
| KIMI (Kimi K2) | `<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{"a": 1}<|tool_call_end|>` |
"""

import json
import math
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from engine.text.call_literals import Call, read_calls, read_literal

FIRST = 16  # alternatives of a schema that are looked at, because each argument of a reply is
_NAME = re.compile(r"[\w.:/-]{1,256}")
_STRING = '" string="'
_FENCED = re.compile(rf"\s*({_NAME.pattern})\s*```(?:json)?(.*)```\s*", re.S)
_SPACE = re.compile(r"\s*")
_KINDS: dict[type, set[str]] = {bool: {"boolean"}, int: {"integer", "number"}, float: {"number"}}
_KINDS |= {type(None): {"null"}, list: {"array"}, dict: {"object"}}


@dataclass(frozen=True)
class Blocks:
    """The tags of a form.

    Args:
        call: before the name, after it, after the arguments; "": nothing, so that only the block's closing ends a call,
            or calls of Python if it is "" after the name.
        item: before a key, between key and value, after the value; None: the arguments are JSON.
        value: before a value.
        named: the text before a name that is left out, and what separates it from a number.
        id: what separates a call's id from the name behind it; "": there is no id.
        lines: a value stands on lines of its own, so that the line breaks around it are no part of it.
    """

    call: tuple[str, str, str]
    item: tuple[str, str, str] | None = None
    value: str = ""
    named: tuple[str, str] = ("", "")
    id: str = ""
    lines: bool = False

    def begins(self, text: str) -> bool | None:
        """Whether a text, which is not empty, begins like a call; None: not certain yet."""
        opening = self.call[0]
        if not opening:
            return _NAME.match(text) is not None
        return True if text.startswith(opening) else None if opening.startswith(text) else False

    def read(self, text: str, closing: str, functions: Mapping[str, Any]) -> list[Call]:
        """The calls of a block; none if it is malformed.

        Args:
            text: the block after its opening, up to and including `closing`, which may be left out.
            closing: the tag that ends a block.
            functions: name -> JSON schema of the arguments; {} if they are not known.
        """
        text, found, at = text.removesuffix(closing), list[Call](), 0
        opening, middle, end = self.call
        if not middle:
            return read_calls(text)
        while (begin := _after_space(text, at)) < len(text):
            if not text.startswith(opening, begin):
                return []
            begin += len(opening)
            ends = text.find(end, begin) if end else len(text)
            split = text.find(middle, begin, ends)
            split = ends if split < 0 and not end else split  # no arguments
            name = text[begin:split].strip()
            name = name.rpartition(self.id)[2] if self.id else name
            if ends < 0 or split < 0 or not _NAME.fullmatch(name):
                return []
            call = self._call(name, text[split + len(middle) * bool(end) : ends], functions)
            if call is None:
                return []
            found.append(call)
            at = ends + len(end)
        return found

    def _call(self, name: str, body: str, functions: Mapping[str, Any]) -> Call | None:
        before, after = self.named
        if after:
            name = name.removeprefix(before)
            name = name.rpartition(after)[0] or name
        if self.item is not None:
            return self._arguments(name, body, functions)
        if fenced := _FENCED.fullmatch(body) if name == "function" else None:
            name, body = fenced[1], fenced[2]
        calls = read_calls(body.strip(), name)
        return calls[0] if len(calls) == 1 else None

    def _arguments(self, name: str, body: str, functions: Mapping[str, Any]) -> Call | None:
        assert self.item is not None
        (opening, middle, end), at, arguments = self.item, 0, dict[str, Any]()
        schemas = _object(_object(functions.get(name)).get("properties"))
        while (begin := _after_space(body, at)) < len(body):
            split = body.find(middle, begin + len(opening)) if body.startswith(opening, begin) else -1
            ends = body.find(end, split + len(middle)) if split >= 0 else -1
            if ends < 0:
                return None
            key, stated, string = body[begin + len(opening) : split].partition(_STRING)
            value = body[split + len(middle) : ends]
            if self.lines:
                value = value.removeprefix("\n").removesuffix("\n")
            if self.value:
                value = value.lstrip().removeprefix(self.value)
            schema = {"type": "string" if string == "true" else []} if stated else schemas.get(key.strip())
            arguments[key.strip()] = _value(value, _kinds(schema))
            at = ends + len(end)
        return name, json.dumps(arguments, ensure_ascii=False)


FUNCTIONS = Blocks(("<function=", ">", "</function>"), ("<parameter=", ">", "</parameter>"), lines=True)
INVOKES = Blocks(('<invoke name="', '">', "</invoke>"), ('<parameter name="', '">', "</parameter>"))
DSML = Blocks(
    ('<｜DSML｜invoke name="', '">', "</｜DSML｜invoke>"), ('<｜DSML｜parameter name="', '">', "</｜DSML｜parameter>")
)
ATEM = Blocks(('<atem:invoke name="', '">', "</atem:invoke>"), ('<atem:parameter name="', '">', "</atem:parameter>"))
KEYS = Blocks(("", "<arg_key>", ""), ("<arg_key>", "</arg_key>", "</arg_value>"), "<arg_value>")
HUNYUAN = Blocks(
    ("<tool_call:opensource>", "<tool_sep:opensource>", "</tool_call:opensource>"),
    ("<arg_key:opensource>", "</arg_key:opensource>", "</arg_value:opensource>"),
    "<arg_value:opensource>",
)
LINES = Blocks(("", "", ""))
DEEPSEEK = Blocks(("<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"))
KIMI = Blocks(("<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"), named=("functions.", ":"))
SOLAR = Blocks(("<|tool_call:begin|>", "<|tool_call:args|>", "<|tool_call:end|>"), id="<|tool_call:name|>")
MARKS = frozenset(
    {"<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "｜DSML｜", *DEEPSEEK.call, *KIMI.call}
    | {"<tool_calls:opensource>", "</tool_calls:opensource>", *HUNYUAN.call, *(HUNYUAN.item or ()), HUNYUAN.value}
    | {"<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"}
    | {"<function_calls>", "</function_calls>", "<|tool_calls|>", "<|calls|>", *SOLAR.call, SOLAR.id}
    | {"<minimax:tool_call>", "</minimax:tool_call>", "<seed:tool_call>", "</seed:tool_call>"}
)


class Until:
    """Finds the end of a block as it arrives, like `engine.text.call_literals.Brackets`.

    Args:
        closing: the tag that ends it.
    """

    def __init__(self, closing: str):
        self._closing, self._tail = closing, ""

    def feed(self, text: str) -> int:
        """Add text. Returns the place after the closing tag; -1 if it has not come yet."""
        before, whole = len(self._tail), self._tail + text
        at = whole.find(self._closing)
        self._tail = whole[len(whole) - min(len(whole), len(self._closing) - 1) :]
        return at + len(self._closing) - before if at >= 0 else -1


def _after_space(text: str, at: int) -> int:
    """The place of the next character that is no white space, or the end."""
    found = _SPACE.match(text, at)
    return at if found is None else found.end()


def _object(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _kinds(schema: Any, most: int = 1) -> set[str]:
    """The types of the values of a schema, whose parts may be alternatives `most` levels deep; none if it does not
    tell."""
    schema = _object(schema)
    if (kinds := schema.get("type")) is not None:
        return {kind for kind in (kinds if isinstance(kinds, list) else [kinds]) if isinstance(kind, str)}
    if isinstance(values := schema.get("enum"), list):
        return {"string" if isinstance(value, str) else "other" for value in values[:FIRST]}
    parts = schema.get("anyOf", schema.get("oneOf"))
    found = [_kinds(part, most - 1) for part in parts[:FIRST]] if most and isinstance(parts, list) else []
    return set().union(*found) if all(found) else set()


def _value(text: str, kinds: Collection[str]) -> Any:
    """The value that a text between tags is, if it may be of these types (none: of any): JSON, or a literal of Python
    other than a text or a number, else the text."""
    if kinds == {"string"}:
        return text
    try:
        value = json.loads(text, parse_constant=str, parse_float=_finite)
    except (ValueError, RecursionError):
        value = read_literal(text)
        value = text if value is None and text.strip() != "None" else value
    fits = "string" not in kinds or "other" in kinds or not _KINDS.get(type(value), set()).isdisjoint(kinds)
    return value if fits else text


def _finite(digits: str) -> float | str:
    """A number, if a float can hold it: JSON has no other."""
    return number if math.isfinite(number := float(digits)) else digits
