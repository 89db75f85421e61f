"""OpenAI's `/v1/responses` in its stateless form: bodies converted to those of chats, and answers back. Nothing is
stored."""

import secrets
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from engine.contract import SearchResult
from engine.errors import CoppiceError, UsageError, shortened
from engine.serve.answers import Answers, Reply, encoded, error_body, usage

RESPONSES = "responses"
MOST_ITEMS = 4096  # items of an input, the limit of messages
KEEPS_NOTHING = "this server keeps no responses: give the whole conversation as input"
REFUSED_HERE: dict[str, tuple[tuple[Any, ...], str]] = {
    "previous_response_id": ((), KEEPS_NOTHING),
    "conversation": ((), KEEPS_NOTHING),
    "prompt": ((), "the field is input"),
    "messages": ((), "the field is input"),
    "response_format": ((), "the field is text"),
    "background": ((False,), ""),
    "n": ((1,), "/v1/chat/completions has several choices"),
    "logprobs": ((False,), "/v1/chat/completions has them"),
    "top_logprobs": ((0,), "/v1/chat/completions has them"),
}
SILENT = ("include", "truncation", "reasoning")  # fields that change no token here
PARTS: dict[str, dict[str, Any]] = {
    "message": {"type": "output_text", "text": "", "annotations": [], "logprobs": []},
    "reasoning": {"type": "reasoning_text", "text": ""},
}
TEXTS = ("input_text", "output_text", "text")


def chat_body(body: Mapping[str, Any]) -> dict[str, Any]:
    """The body of a chat for a body of a response. Raises UsageError."""
    for key, (fine, remedy) in REFUSED_HERE.items():
        if key in body and not any(value == body[key] for value in fine):
            raise UsageError(f"{key}: it cannot be served, got {shortened(repr(body[key]))}", remedy=remedy)
    gone = (*REFUSED_HERE, *SILENT, "input", "instructions", "text", "tools")
    chat = {key: value for key, value in body.items() if key not in gone}
    messages = _messages(body.get("input"))
    if (instructions := body.get("instructions")) is not None:
        messages.insert(0, {"role": "system", "content": instructions})
    chat["messages"] = messages
    match body.get("text", {}):
        case {"format": {"type": "json_schema", "schema": schema}}:
            chat["response_format"] = {"type": "json_schema", "json_schema": {"schema": schema}}
        case {"format": dict() as form}:
            chat["response_format"] = form
        case dict() as text if text.get("format") is None:
            pass
        case text:
            raise UsageError(f"text: expected an object with a format, got {shortened(repr(text))}")
    match body.get("tool_choice"):
        case {"type": "allowed_tools", "tools": _} as choice if "allowed_tools" not in choice:  # flat here
            allowed = {key: value for key, value in choice.items() if key != "type"}
            chat["tool_choice"] = {"type": "allowed_tools", "allowed_tools": {"mode": "auto"} | allowed}
    if "tools" in body:
        tools = body["tools"]
        if not isinstance(tools, list) or not all(isinstance(t, dict) and t.get("type") == "function" for t in tools):
            raise UsageError(f"tools: expected a list of functions, got {shortened(repr(tools))}")
        chat["tools"] = [
            {"type": "function", "function": {key: value for key, value in tool.items() if key != "type"}}
            for tool in tools
        ]
    return chat


def _messages(given: Any) -> list[dict[str, Any]]:
    """The messages of an input. Raises UsageError."""
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    if not isinstance(given, list) or not 0 < len(given) <= MOST_ITEMS:
        got = "none" if given is None else shortened(repr(given))
        raise UsageError(f"input: expected a text, or a list of 1 to {MOST_ITEMS} items, got {got}")
    found: list[dict[str, Any]] = []
    for i, item in enumerate(given):
        match item:
            case {"type": "function_call", "name": name, "arguments": arguments, "call_id": identity}:
                call = {"id": identity, "type": "function", "function": {"name": name, "arguments": arguments}}
                if not found or found[-1]["role"] != "assistant":
                    found.append({"role": "assistant"})
                found[-1].setdefault("tool_calls", []).append(call)
            case {"type": "function_call_output", "call_id": identity, "output": output}:
                found.append({"role": "tool", "tool_call_id": identity, "content": _content(i, output)})
            case {"type": "reasoning"}:
                pass
            case {"role": role, "content": content, **rest} if rest.get("type", "message") == "message":
                found.append({"role": role, "content": _content(i, content)})
            case _:
                raise UsageError(f"input[{i}]: expected a message or a call, got {shortened(repr(item))}")
    return found


def _content(i: int, content: Any) -> Any:
    if not isinstance(content, list):
        return content
    for part in content:
        if not isinstance(part, dict) or part.get("type") not in TEXTS or not isinstance(part.get("text"), str):
            raise UsageError(f"input[{i}]: expected parts of text, got {shortened(repr(part))}")
    return "".join(part["text"] for part in content)


class ResponseItems:
    """The items of a response as they arrive, and the events that report them."""

    def __init__(self):
        self.items: list[dict[str, Any]] = []
        self._open = ""  # "message" or "reasoning", of the last item
        self._texts: list[str] = []  # texts of the last item

    def add(self, delta: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        """Events for a change of the message."""
        for call in delta.get("tool_calls", ()):
            yield from self.close()
            yield from self._call(call["id"], call["function"])
        for key, kind in (("reasoning_content", "reasoning"), ("content", "message")):
            if text := delta.get(key):
                yield from self._text(kind, text)

    def _text(self, kind: str, text: str) -> Iterator[dict[str, Any]]:
        if self._open != kind:
            yield from self.close()
            yield from self.begin(kind)
        self._texts.append(text)
        logprobs = {"logprobs": []} if kind == "message" else {}
        yield self._event(f"{PARTS[kind]['type']}.delta", True, delta=text, **logprobs)

    def begin(self, kind: str) -> Iterator[dict[str, Any]]:
        """Events for a new item of this kind, which becomes the open one."""
        self._open, self._texts = kind, []
        item: dict[str, Any] = {"id": f"{'msg' if kind == 'message' else 'rs'}_{secrets.token_hex(12)}"}
        item |= {"type": kind, "status": "in_progress", "content": []}
        item |= {"role": "assistant"} if kind == "message" else {"summary": []}
        self.items.append(item)
        yield self._event("output_item.added", item=item)
        yield self._event("content_part.added", True, part=PARTS[kind])

    def _call(self, identity: str, function: Mapping[str, str]) -> Iterator[dict[str, Any]]:
        name, arguments = function["name"], function["arguments"]
        item = {"id": f"fc_{secrets.token_hex(12)}", "type": "function_call", "status": "completed"}
        item |= {"call_id": identity, "name": name, "arguments": arguments}
        self.items.append(item)
        yield self._event("output_item.added", item=item | {"status": "in_progress", "arguments": ""})
        yield self._event("function_call_arguments.delta", delta=arguments, item_id=item["id"])
        yield self._event("function_call_arguments.done", arguments=arguments, name=name, item_id=item["id"])
        yield self._event("output_item.done", item=item)

    def close(self, status: str = "completed") -> Iterator[dict[str, Any]]:
        """Events for the end of the item that is open."""
        if not self._open:
            return
        part = PARTS[self._open] | {"text": "".join(self._texts)}
        self._open, item = "", self.items[-1]
        item |= {"status": status, "content": [part]}
        logprobs = {"logprobs": []} if item["type"] == "message" else {}
        yield self._event(f"{part['type']}.done", True, text=part["text"], **logprobs)
        yield self._event("content_part.done", True, part=part)
        yield self._event("output_item.done", item=item)

    def _event(self, kind: str, of_part: bool = False, **fields: Any) -> dict[str, Any]:
        at: dict[str, Any] = {"output_index": len(self.items) - 1}
        if of_part:
            at |= {"item_id": self.items[-1]["id"], "content_index": 0}
        return {"type": f"response.{kind}", **at, **fields}


class ResponseAnswers(Answers):
    """Writes the answers to a request of `/v1/responses`; for the arguments see `Answers`."""

    last = b""

    def __init__(self, identity: str, asked: Any, body: Mapping[str, Any]):
        super().__init__(identity, asked)
        self.body, self._output, self._number = body, ResponseItems(), 0
        self._reply = Reply(asked.thoughts, asked.tools)
        self._cut = False

    def whole(self, results: Sequence[SearchResult]) -> dict[str, Any]:
        for _ in [*self.text(0, results[0].outputs[0].text), *self.end(0, results[0])]:
            pass
        return self._response(self._status(), results)

    def opening(self) -> Iterator[dict[str, Any]]:
        for kind in ("created", "in_progress"):
            yield {"type": f"response.{kind}", "response": self._response("in_progress", ())}

    def text(self, prompt: int, text: str) -> Iterator[dict[str, Any]]:
        for delta in self._reply.push(text):
            yield from self._output.add(delta)

    def end(self, prompt: int, result: SearchResult) -> Iterator[dict[str, Any]]:
        self._cut = self._finish(result.outputs[0], False) == "length"
        for delta in self._reply.finish():
            yield from self._output.add(delta)
        if not self._output.items:
            yield from self._output.begin("message")
        yield from self._output.close(self._status())

    def close(self, results: Sequence[SearchResult]) -> Iterator[dict[str, Any]]:
        status = self._status()
        yield {"type": f"response.{status}", "response": self._response(status, results)}

    def event(self, data: dict[str, Any]) -> bytes:
        numbered = encoded(data | {"sequence_number": self._number})
        self._number += 1
        return b"event: " + data["type"].encode() + b"\ndata: " + numbered + b"\n\n"

    def failed(self, error: CoppiceError) -> bytes:
        body = error_body(error)
        return self.event(body["error"] | {"type": "error"} | body)

    def _status(self) -> str:
        return "incomplete" if self._cut else "completed"

    def _response(self, status: str, results: Sequence[SearchResult]) -> dict[str, Any]:
        """The response itself."""
        body = self.body
        given = {key: body.get(key) for key in ("instructions", "max_output_tokens", "temperature", "top_p", "user")}
        details = {"reason": "max_output_tokens"} if status == "incomplete" else None
        found = {
            "id": self.identity,
            "object": "response",
            "created_at": self.created,
            "status": status,
            "error": None,
            "incomplete_details": details,
            "model": self.asked.served.name,
            "output": self._output.items,
            **given,
            "metadata": body.get("metadata", {}),
            "parallel_tool_calls": body.get("parallel_tool_calls", True),
            "previous_response_id": None,
            "reasoning": {"effort": None, "summary": None},
            "store": False,
            "text": body.get("text", {"format": {"type": "text"}}),
            "tool_choice": body.get("tool_choice", "auto"),
            "tools": body.get("tools", []),
            "truncation": "disabled",
            "usage": None,
        }
        return found | {"usage": self._usage(results), "coppice": self._about(results)} if results else found

    def _usage(self, results: Sequence[SearchResult]) -> dict[str, Any]:
        counted = usage(results, self.asked.drawn)
        return {
            "input_tokens": counted["prompt_tokens"],
            "input_tokens_details": counted["prompt_tokens_details"] | {"cache_write_tokens": 0},
            "output_tokens": counted["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": counted["total_tokens"],
        }
