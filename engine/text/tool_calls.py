"""Tool calls: the formats of model families, and parsing them from a reply, complete or as it arrives.

| format | a call |
|---|---|
| hermes (Qwen, SmolLM) | `<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>` (SmolLM2: a list there) |
| llama3 | `{"name": "f", "parameters": {"a": 1}}`, perhaps after `<|python_tag|>`; `;` between several |
| mistral | `[TOOL_CALLS][{"name": "f", "arguments": {"a": 1}}]`; newer ones `[TOOL_CALLS]f[ARGS]{"a": 1}` |
| lfm2 | `<|tool_call_start|>[f(a=1)]<|tool_call_end|>`, or JSON as in the other lists |
| gemma4 | `<|tool_call>call:f{a:1,b:<|"|>text<|"|>}<tool_call|>` |
| granite, phi4 | `<|tool_call|>[{"name": "f", "arguments": {"a": 1}}]`, and `<|/tool_call|>` of Phi-4 |
| nemotron (Nano v2) | `<TOOLCALL>[{"name": "f", "arguments": {"a": 1}}]</TOOLCALL>` |
| apertus | `<|tools_prefix|>[{"f": {"a": 1}}]<|tools_suffix|>` |
| jamba (1.5; Hunyuan A13B) | `<tool_calls>[{"name": "f", "arguments": {"a": 1}}]</tool_calls>` |
| cohere (Command R7B, A) | `<|START_ACTION|>[{"tool_name": "f", "parameters": {"a": 1}}]<|END_ACTION|>` |
| qwen35 and others | blocks of tags, see `engine.text.call_blocks`; or JSON as hermes |
| channels (gpt-oss) | `<|call|>f{"a": 1}`, as `engine.text.channels` writes what it reads |

A reply may also begin with calls without marks, perhaps in Markdown code fences, if they name given functions, because
small models forget the marks. A call is recognised as soon as its brackets are closed. A malformed call stays text. The
work is linear in the text, however it is split into pieces.
"""

import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from engine.errors import UsageError, shortened
from engine.text import call_blocks
from engine.text.call_blocks import Blocks, Until
from engine.text.call_literals import QUOTE, Brackets, quoted_text, read_calls
from engine.text.channels import CALL, CHANNEL, FUNCTIONS, MESSAGE, start_at_end
from engine.text.sandbox import SPACES

# Tokens of calls that tokenizers list as special: decoding keeps their spellings, which a reader of calls needs.
CALL_MARKS = frozenset(
    {"[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "<|python_tag|>", "<tool_call>", "</tool_call>"}
    | {"<|tool_call_start|>", "<|tool_call_end|>", "<|tool_call>", "<tool_call|>", QUOTE}
    | {"<|tool_call|>", "<|/tool_call|>", "<|START_ACTION|>", "<|END_ACTION|>"}
    | {"<|tools_prefix|>", "<|tools_suffix|>", "<tool_calls>", "</tool_calls>"}
    | call_blocks.MARKS
)
MOST_SPACE = 64  # characters of white space before a call that are left out with it
MOST_HEAD = 200  # characters before the arguments of a call that has its name there
AT_ONCE = 256  # characters that are read at once, so that none is read again and again
# The name before the arguments, if these do not contain it, with its marks; and a possible beginning of it.
HEAD_NAME = re.compile(r"[\w.:/-]{0,127}[\w.-]")
_HEAD = re.compile(rf"\s*({HEAD_NAME.pattern})(?:\[CALL_ID\][\w-]{{0,64}})?(?:\[ARGS\])?\s*")
_PART = re.compile(r"[\w.:/\[\]\s-]*")
# The beginning of a call without an opening, as far as its first key: space, fence, space, bracket, space, key.
_BARE = re.compile(r"""(\s*)(?:(`[`json]*)(\s*))?(?:(\{)(\s*)("\w*"?)?(.*))?""", re.S)
_KEYS = ('"name"', '"type"', '"function"', '"arguments"', '"parameters"')
_FENCES = "```", "```json"


@dataclass(frozen=True)
class ToolCall:
    """A call: the name of the function, and its arguments, an object as JSON."""

    name: str
    arguments: str


@dataclass(frozen=True)
class ToolFormat:
    """How a family writes calls.

    Args:
        name: the name of the format.
        opening, closing: marks around a call or a list of calls; "" if nothing closes it.
        key: the key of the arguments; "": the name is.
        bare: calls are written without an opening. If the template shows one, a reply may still begin with a call that
            has none.
        listed: calls stand in a list.
        headed: the name may stand before the arguments.
        lead: the beginning of a reply that must be a call; it follows the template's generation prompt.
        named: the lead has a place for the name, and only the arguments follow it.
        quoted: the name stands before the arguments, whose keys are bare and whose texts stand between `QUOTE`s.
        end: a token that models write after calls; it ends a reply.
        blocks: what stands between opening and closing, if it is no JSON; None: JSON.
    """

    name: str
    opening: str
    closing: str = ""
    key: str = "arguments"
    bare: bool = False
    listed: bool = False
    headed: bool = False
    lead: str = ""
    named: bool = False
    quoted: bool = False
    end: str = ""
    blocks: Blocks | None = None

    def written(self, calls: Sequence[ToolCall]) -> str:
        """Calls as a model of this family writes them, for templates that do not write those of earlier replies."""
        if self.quoted:
            each = (f"{call.name}{quoted_text(json.loads(call.arguments))}" for call in calls)
            return "".join(f"{self.opening}{call}{self.closing}" for call in each)
        if self.blocks is call_blocks.LINES:
            values = ((call.name, json.loads(call.arguments).items()) for call in calls)
            each = (f"{name}({', '.join(f'{key}={_json(value)}' for key, value in items)})" for name, items in values)
            return f"{self.opening}{chr(10).join(each)}{self.closing}"
        each = [f"{self._head(call.name)}{call.arguments}}}" for call in calls]
        if self.bare:
            return "; ".join(each)
        if self.listed:
            return f"{self.opening}[{', '.join(each)}]{self.closing}"
        return "\n".join(f"{self.opening}\n{call}\n{self.closing}" for call in each)

    def grammar(self, functions: Mapping[str, Any], several: bool) -> str:
        """The grammar, in Lark's form, of the text after `lead` in a reply that must be a call.

        Args:
            functions: name -> JSON schema of the arguments; only one if the lead has its name.
            several: whether the reply may have several calls.
        """
        if self.named:
            [schema] = functions.values()
            return f"start: %json {json.dumps(_spaced(schema))}"
        lines = [f"call: {' | '.join(f'call{i}' for i in range(len(functions)))}"]
        for i, (name, schema) in enumerate(functions.items()):
            head, tail = (name, "") if self.quoted else (self._head(name), ' "}"')
            lines += [
                f"call{i}: {_json(head)} arguments{i}{tail}",
                f"arguments{i}: %json {json.dumps(_spaced(schema))}",
            ]
        if self.listed:
            start = 'start: "[" call (", " call)* "]"' if several else 'start: "[" call "]"'
        elif self.bare or self.quoted or not several:
            start = "start: call"
        else:
            opening, closing = (_json(text) for text in (f"\n{self.lead}", f"\n{self.closing}"))
            start = f"start: call ({closing} ({opening} call {closing})*)?"
        return "\n".join([start, *lines])

    def _head(self, name: str) -> str:
        """The JSON of a call before its arguments."""
        return f'{{"name": {_json(name)}, "{self.key}": ' if self.key else f"{{{_json(name)}: "


HERMES = ToolFormat("hermes", "<tool_call>", "</tool_call>", lead="<tool_call>\n")
LLAMA3 = ToolFormat("llama3", "<|python_tag|>", key="parameters", bare=True)
MISTRAL = ToolFormat("mistral", "[TOOL_CALLS]", listed=True, headed=True, lead="[TOOL_CALLS]")
LFM2 = ToolFormat("lfm2", "<|tool_call_start|>", "<|tool_call_end|>", listed=True, lead="<|tool_call_start|>")
GEMMA4 = ToolFormat(
    "gemma4",
    "<|tool_call>call:",
    "<tool_call|>",
    headed=True,
    lead="<|tool_call>call:",
    quoted=True,
    end="<|tool_response>",
)
CHANNELS = ToolFormat(
    "channels",
    CALL,
    headed=True,
    lead=f"{CHANNEL}commentary to={FUNCTIONS}{{}} <|constrain|>json{MESSAGE}",
    named=True,
    end=CALL,
)
GRANITE = ToolFormat("granite", "<|tool_call|>", listed=True, lead="<|tool_call|>")
PHI4 = replace(GRANITE, name="phi4", closing="<|/tool_call|>")
NEMOTRON = ToolFormat("nemotron", "<TOOLCALL>", "</TOOLCALL>", listed=True, lead="<TOOLCALL>")
JAMBA = ToolFormat("jamba", "<tool_calls>", "</tool_calls>", listed=True, lead="<tool_calls>")
_TOOLS = "<|tools_prefix|>", "<|tools_suffix|>"  # of Apertus, whose template puts results directly behind the second
APERTUS = ToolFormat("apertus", *_TOOLS, key="", listed=True, lead=_TOOLS[0], end=_TOOLS[1])
COHERE = ToolFormat("cohere", "<|START_ACTION|>", "<|END_ACTION|>", "parameters", listed=True, lead="<|START_ACTION|>")
QWEN35 = replace(HERMES, name="qwen35", blocks=call_blocks.FUNCTIONS)
KEYS = replace(HERMES, name="keys", blocks=call_blocks.KEYS)


def _tagged(name: str, opening: str, closing: str, blocks: Blocks) -> ToolFormat:
    return ToolFormat(name, opening, closing, lead=f"{opening}\n", blocks=blocks)


SEED = _tagged("seed", "<seed:tool_call>", "</seed:tool_call>", replace(call_blocks.FUNCTIONS, lines=False))
MINIMAX = _tagged("minimax", "<minimax:tool_call>", "</minimax:tool_call>", call_blocks.INVOKES)
DSML = _tagged("dsml", "<｜DSML｜function_calls>", "</｜DSML｜function_calls>", call_blocks.DSML)
MUSE = _tagged("muse", "<atem:function_calls>", "</atem:function_calls>", call_blocks.ATEM)
DEEPSEEK = _tagged("deepseek", "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", call_blocks.DEEPSEEK)
HUNYUAN = _tagged("hunyuan", "<tool_calls:opensource>", "</tool_calls:opensource>", call_blocks.HUNYUAN)
OLMO = _tagged("olmo", "<function_calls>", "</function_calls>", call_blocks.LINES)
KIMI = _tagged("kimi", "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", call_blocks.KIMI)
SOLAR = replace(_tagged("solar", "<|tool_calls|>", "<|calls|>", call_blocks.SOLAR), end="<|calls|>")
# By their openings or other texts, the first that a template has.
OPENED = {form.opening: form for form in (SEED, MINIMAX, MUSE, DEEPSEEK, KIMI, SOLAR, NEMOTRON, JAMBA, APERTUS, COHERE)}
OPENED |= {"｜DSML｜": DSML, "<tool_calls{}>": HUNYUAN}


def format_of(template: str, added: Collection[str] = ()) -> ToolFormat:
    """The format of a model, by its chat template and its added tokens; hermes if they do not tell."""
    if "[TOOL_CALLS]" in template or "[AVAILABLE_TOOLS]" in template:
        return MISTRAL
    if (CHANNEL in template and MESSAGE in template) or {CHANNEL, MESSAGE} <= {*added}:
        return CHANNELS
    if "<|tool_call>" in template or "<|tool_call>" in added:
        return GEMMA4
    if "<|tool_call_start|>" in template or "<|tool_list_start|>" in template:
        return LFM2
    if opened := next((form for opening, form in OPENED.items() if opening in template), None):
        return opened
    if "<functions>" in template and "<tool_call>" not in template:
        return OLMO
    if "<tool_call>" in template and ("<function=" in template or "<arg_key>" in template):
        return KEYS if "<arg_key>" in template else QWEN35
    if "<tool_call>" not in template and {PHI4.opening, PHI4.closing} <= {*added}:
        return PHI4
    if GRANITE.opening in template:
        return GRANITE
    if "<tool_call>" not in template and ("<|python_tag|>" in template or '"parameters": dictionary' in template):
        return LLAMA3
    return LFM2 if "<tool_call>" not in template and LFM2.opening in added else HERMES


def described(tools: Sequence[Any]) -> str:
    """The text of a system message about tools, for templates that have no place for them."""
    lines = ["You may call functions. Their signatures, as JSON:", "<tools>", *map(_json, tools), "</tools>"]
    form = '{"name": <name of the function>, "arguments": <object of arguments>}'
    return "\n".join([*lines, f"Write each call as <tool_call>\n{form}\n</tool_call>"])


def functions_of(tools: Any) -> dict[str, dict[str, Any]]:
    """The functions of `tools`: name -> JSON schema of the arguments.

    Raises:
        UsageError: this is no list of functions in the form of OpenAI or transformers, or two have the same name.
    """
    if not isinstance(tools, list):
        raise UsageError(f"tools: expected a list of functions, got {shortened(repr(tools))}")
    found: dict[str, dict[str, Any]] = {}
    for i, tool in enumerate(tools):
        function = tool.get("function", tool) if isinstance(tool, dict) else None
        name = function.get("name") if isinstance(function, dict) else None
        if not isinstance(function, dict) or not isinstance(name, str) or not 0 < len(name) <= 256:
            raise UsageError(f"tools[{i}]: expected a function with a name, got {shortened(repr(tool))}")
        if name in found:
            raise UsageError(f"tools[{i}]: there is a function {shortened(name)} before it")
        schema = function.get("parameters")
        if not isinstance(schema, dict | None):
            raise UsageError(f"tools[{i}].parameters: expected a JSON schema, got {shortened(repr(schema))}")
        schema = schema or {"type": "object", "properties": {}}
        closed = "properties" in schema and not {"additionalProperties", "patternProperties", "allOf"} & {*schema}
        found[name] = schema | {"additionalProperties": False} if closed else schema
    return found


class CallStream:
    """Separates a reply's calls from its text as it arrives.

    White space around calls is dropped. Text that may become the opening of a call is held back.

    Args:
        format: the model's format of calls.
        names: names of the functions, perhaps with the schemas of their arguments; without an opening a reply can only
            be a call of one of these.
        led: the reply begins after the format's `lead`.
        several: False leaves out everything after the first call.
    """

    def __init__(self, format: ToolFormat, names: Collection[str], *, led: bool = False, several: bool = True):
        self.format, self.names, self.several = format, names, several
        self._at = "call" if led and format.lead else "start"  # then "text", "closing", "gap", "end"
        self._closes = format.closing
        self._opened = True  # the call has an opening
        self._held = ""  # text that is not classified yet
        self._taken: list[str] = []  # text that is dropped if a call follows it
        self._body: list[str] = []
        self._name = ""  # the name before the arguments
        self._brackets: Brackets | Until | None = None
        self._shown = self._parted = False  # there was text; there was a call after it

    def push(self, text: str) -> list[str | ToolCall]:
        """Add text. Returns the text and the calls that are certain."""
        found: list[str | ToolCall] = []
        for i in range(0, len(text), AT_ONCE):
            self._held += text[i : i + AT_ONCE]
            found += self._parts(False)
        return found

    def finish(self) -> list[str | ToolCall]:
        """Return the text and the calls that were held back."""
        found = self._parts(True)
        if self._at == "call":  # the call was cut short
            found += self._reject()
            found += self._text_of(self._held)
        self._at, self._held = "end", ""
        return found

    def _parts(self, last: bool) -> list[str | ToolCall]:
        steps = {"start": self._start, "text": self._text, "call": self._call, "closing": self._closing}
        steps |= {"gap": self._gap, "end": self._end}
        found, before = list[str | ToolCall](), ("", 0)
        while before != (before := (self._at, len(self._held))):
            found += steps[self._at](last)
        return found

    def _start(self, last: bool) -> list[str | ToolCall]:
        """Read the held text where a call may begin without an opening."""
        found = _BARE.fullmatch(self._held)
        if found is None or any(len(space) > MOST_SPACE for space in found.group(1, 3, 5) if space):
            self._at = "text"
            return []
        fence, bracket, key, rest = found.group(2, 4, 6, 7)
        fits = fence in (None, *_FENCES) if bracket else _FENCES[1].startswith(fence or "")
        if key in _KEYS and fits:
            at = found.start(4)
            self._taken, self._held, self._at = [self._held[:at]], self._held[at:], "call"
            self._opened, self._closes = False, _FENCES[0] if fence else ""
        elif last or rest or not fits or not any(one.startswith(key or "") for one in _KEYS):
            self._at = "text"
        return []

    def _text(self, last: bool) -> list[str | ToolCall]:
        opening = self.format.opening
        text, opened, rest = self._held.partition(opening)
        cut = len(text)
        if not opened and not last:
            cut -= len(start_at_end(text, opening))
        if opened or not last:
            cut -= min(MOST_SPACE, cut - len(text[:cut].rstrip()))
        if opened:
            self._taken, self._held, self._at = [text[cut:] + opening], rest, "call"
            self._opened, self._closes = True, self.format.closing
        else:
            self._held = text[cut:]
        return self._text_of(text[:cut])

    def _call(self, last: bool) -> list[str | ToolCall]:
        if self._brackets is None:
            at, lead = self._begin(self._held), self._held.lstrip()
            if at is None and self._opened and self.format.blocks and len(self._held) - len(lead) <= MOST_SPACE:
                begun = self.format.blocks.begins(lead)
                at, self._brackets = (0, Until(self._closes)) if begun else (None if begun is False else -1, None)
            if at is None:
                return self._reject()
            if at < 0:
                return []
            self._name = self._held[:at]
            self._taken, self._held = [*self._taken, self._name], self._held[at:]
            self._brackets = self._brackets or Brackets(self.format.quoted)
        end = self._brackets.feed(self._held)
        self._body.append(self._held if end < 0 else self._held[:end])
        self._held = "" if end < 0 else self._held[end:]
        blocks = self.format.blocks if isinstance(self._brackets, Until) else None
        if end < 0 and not (last and blocks and blocks.call[2]):  # many leave the closing of a block of ended calls out
            return []
        head = _HEAD.fullmatch(self._name)
        if blocks is not None:
            functions = self.names if isinstance(self.names, Mapping) else {}
            calls, self._closes = blocks.read("".join(self._body), self._closes, functions), ""
        else:
            keyed = self._opened and not self.format.key
            calls = read_calls("".join(self._body), head[1] if head else "", quoted=self.format.quoted, keyed=keyed)
        if not calls or ((self.format.bare or not self._opened) and not all(name in self.names for name, _ in calls)):
            return self._reject()
        self._parted = self._shown
        self._taken, self._body, self._brackets = [], [], None
        self._at = "closing" if self.several else "end"
        return [ToolCall(*call) for call in calls[: None if self.several else 1]]

    def _begin(self, text: str) -> int | None:
        """The place where the brackets of a call begin; -1: not yet; None: this is no call."""
        lead = text.lstrip()
        space = len(text) - len(lead)
        if space > MOST_SPACE or (lead and lead[0] not in "{[" and not self.format.headed):
            return None
        if lead[:1] in ("{", "["):
            return space
        name, brace, _ = lead.partition("{")
        if len(name) > MOST_HEAD or not (_HEAD if brace else _PART).fullmatch(name):
            return None
        return space + len(name) if brace else -1

    def _reject(self) -> list[str | ToolCall]:
        """Return the text that looked like a call."""
        text = "".join([*self._taken, *self._body])
        self._taken, self._body, self._brackets, self._at = [], [], None, "text"
        return self._text_of(text)

    def _closing(self, last: bool) -> list[str | ToolCall]:
        closing, self._held = self._closes, self._held.lstrip()
        if self._held.startswith(closing):
            self._held = self._held.removeprefix(closing)
        elif closing.startswith(self._held) and not last:
            return []
        self._at = "gap"
        return []

    def _gap(self, last: bool) -> list[str | ToolCall]:
        self._held = self._held.lstrip(None if self._opened and not self.format.bare else " \t\r\n;,")
        if self._held:
            self._at = "text" if self._opened and not self.format.bare else "start"
        return []

    def _end(self, last: bool) -> list[str | ToolCall]:
        self._held = ""
        return []

    def _text_of(self, text: str) -> list[str | ToolCall]:
        if not text:
            return []
        lead = "\n" if self._parted else ""
        self._shown, self._parted = True, False
        return [lead + text]


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _spaced(schema: Mapping[str, Any]) -> dict[str, Any]:
    return {"x-guidance": {"whitespace_pattern": SPACES}, **schema}
