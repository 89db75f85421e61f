"""The tools of a request: which may or must be called, and how they are passed to the chat template."""

import hashlib
import json
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from engine.errors import UsageError, check_flag, shortened
from engine.serve.served import Served
from engine.text.template import ChatTemplate
from engine.text.tool_calls import HEAD_NAME, MISTRAL, CallStream, ToolCall, ToolFormat, described, functions_of

PLAIN_NAME = re.compile(r"[\w.-]{1,64}", re.ASCII)
MISTRAL_ID = 9  # letters and digits of a call's id in Mistral's templates


@dataclass(frozen=True)
class ToolUse:
    """How the replies to a request may call functions.

    Args:
        format: the model's format of calls.
        functions: name -> JSON schema of the arguments.
        forced: a reply must be a call of one of them.
        several: a reply may have more than one call.
    """

    format: ToolFormat
    functions: Mapping[str, Any] = field(default_factory=dict)
    forced: bool = False
    several: bool = True

    @property
    def lead(self) -> str:
        """The text that replies begin with, which belongs to the prompt."""
        return self.format.lead.format(*self.functions) if self.forced else ""

    def stream(self) -> CallStream:
        """A reader of a reply."""
        led = self.forced and bool(self.format.lead) and not self.format.named
        return CallStream(self.format, self.functions, led=led, several=self.several)

    def written(self, call: ToolCall) -> dict[str, Any]:
        """A call of a reply in OpenAI's format, with a new id."""
        identity = secrets.token_hex(12)
        identity = identity[:MISTRAL_ID] if self.format is MISTRAL else f"call_{identity}"
        return {"id": identity, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def tool_use(body: Mapping[str, Any], served: Served) -> tuple[ToolUse | None, list[Any] | None]:
    """How the replies to a body may call functions (None: not at all), and the tools for the template.

    Raises:
        UsageError: malformed tools or `tool_choice`, or a choice of a function that is not among them.
    """
    tools = body.get("tools", served.template.tools)
    choice = body.get("tool_choice", "auto")
    check_flag("parallel_tool_calls", several := body.get("parallel_tool_calls", True))
    if not tools or choice == "none":
        if tools or choice in ("none", "auto"):
            return None, None
        raise UsageError("tool_choice: it needs tools")
    if served.engine.template is None:
        raise UsageError("tools: the model has no chat template")
    tools = [*tools] if isinstance(tools, tuple) else tools
    functions, mode = functions_of(tools), choice
    match choice:
        case "auto" | "required":
            pass
        case {"type": "function", "function": {"name": str() as name}} | {"type": "function", "name": str() as name}:
            functions, mode, several = _chosen(functions, [name]), "required", False
        case {"type": "allowed_tools", "allowed_tools": {"mode": "auto" | "required" as mode, "tools": list() as some}}:
            functions = _chosen(functions, [*functions_of(some)])
            tools = [tool for tool in tools if tool.get("function", tool)["name"] in functions]
        case _:
            what = "expected none, auto, required or an object of type function"
            raise UsageError(f"tool_choice: {what}, got {shortened(repr(choice))}")
    format, forced = served.engine.template.calls, mode == "required"
    if forced and format.named and (len(functions) > 1 or not all(PLAIN_NAME.fullmatch(name) for name in functions)):
        what = "this model writes the function before its call: name the one that is to be called"
        raise UsageError(f"tool_choice: {what}", remedy="a name of letters, digits, _ and -; or auto")
    if forced and format.quoted and (odd := next((n for n in functions if not HEAD_NAME.fullmatch(n)), None)):
        what = f"this model writes names without quotes, so that a call of {shortened(repr(odd))} could not be read"
        raise UsageError(f"tool_choice: {what}", remedy="a name of letters, digits, _ and -; or auto")
    return ToolUse(format, functions, forced, several), tools


def _chosen(functions: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    for name in names:
        if name not in functions:
            raise UsageError(f"tool_choice: there is no function {shortened(name)} among tools")
    return {name: functions[name] for name in names}


def template_messages(
    messages: list[dict[str, Any]], tools: Sequence[Any] | None, template: ChatTemplate
) -> tuple[list[dict[str, Any]], bool]:
    """Messages for the template: arguments become objects, and parts that it cannot write become text.

    Args:
        messages: messages whose contents are texts.
        tools: the tools for the template.

    Returns:
        the messages, and whether a system message describes the tools because the template does not take any.

    Raises:
        UsageError: malformed calls.
        CheckpointError: the template is malformed.
    """
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        return messages, False
    used = any("tool_calls" in message or message.get("role") == "tool" for message in messages)
    if not used and not tools:
        return messages, False
    takes = template.takes("tools")
    found = [_message(i, message, template, takes) for i, message in enumerate(messages)]
    if not tools or takes:
        return found, False
    text = described(tools)
    if found and found[0].get("role") == "system" and isinstance(found[0].get("content"), str):
        first, found = found[0], found[1:]
        text = f"{first['content']}\n\n{text}"
    return [{"role": "system", "content": text}, *found], True


def _message(i: int, message: dict[str, Any], template: ChatTemplate, takes: bool) -> dict[str, Any]:
    format, where = template.calls, f"messages[{i}]"
    if message.get("role") == "tool":
        if not takes and isinstance(message.get("content"), str):
            return {"role": "user", "content": f"<tool_response>\n{message['content']}\n</tool_response>"}
        if "tool_call_id" in message:
            return message | {"tool_call_id": _identity(message["tool_call_id"], format, f"{where}.tool_call_id")}
        return message
    if "tool_calls" not in message:
        return message
    calls = message["tool_calls"]
    if not isinstance(calls, list) or message.get("role") != "assistant":
        raise UsageError(f"{where}.tool_calls: expected a list, in a message of the assistant")
    calls = [_read_call(call, format, f"{where}.tool_calls[{j}]") for j, call in enumerate(calls)]
    if template.writes_calls:
        return message | {"tool_calls": calls}
    functions = [call["function"] for call in calls]
    text = format.written([ToolCall(f["name"], json.dumps(f["arguments"], ensure_ascii=False)) for f in functions])
    before = f"{message['content']}\n" if message.get("content") and isinstance(message["content"], str) else ""
    rest = {key: value for key, value in message.items() if key != "tool_calls"}
    return rest | {"content": before + text if calls else message.get("content", "")}


def _read_call(call: Any, format: ToolFormat, where: str) -> dict[str, Any]:
    """A call of an earlier message, with arguments as an object, which transformers' templates expect."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise UsageError(f"{where}: expected a function with a name, got {shortened(repr(call))}")
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments) if arguments.strip() else {}
        except (ValueError, RecursionError):
            arguments = None
    if not isinstance(arguments, dict):
        raise UsageError(f"{where}.arguments: expected an object as JSON")
    read = {"type": "function"} | call | {"function": function | {"arguments": arguments}}
    return read | {"id": _identity(call["id"], format, f"{where}.id")} if "id" in call else read


def _identity(value: Any, format: ToolFormat, where: str) -> str:
    """The id of a call; Mistral's templates take nine letters and digits only."""
    if not isinstance(value, str):
        raise UsageError(f"{where}: expected a text, got {shortened(repr(value))}")
    if format is not MISTRAL or (len(value) == MISTRAL_ID and value.isascii() and value.isalnum()):
        return value
    return hashlib.sha256(value.encode(errors="replace")).hexdigest()[:MISTRAL_ID]
