"""A chat reply in its parts: thought, answer, and function calls."""

from typing import Any

from engine.serve.calls import ToolUse
from engine.text.thinking import Thoughts


class Reply:
    """Reads a reply as it arrives.

    Args:
        thoughts: how it writes thoughts; None without a chat template.
        tools: how it may call functions; None: not at all.

    Attributes:
        calls: number of calls so far.
    """

    def __init__(self, thoughts: Thoughts | None, tools: ToolUse | None):
        self._thoughts, self._tools = (thoughts or Thoughts()).stream(), tools
        self._calls = tools.stream() if tools is not None else None
        self.calls = 0

    @property
    def thought(self) -> bool:
        """Whether the reply has a thought."""
        return self._thoughts.thought

    def push(self, text: str) -> list[dict[str, Any]]:
        """Add text. Returns the changes of the message that are certain, in the form of OpenAI's streams."""
        return [delta for part in self._thoughts.push(text) for delta in self._deltas(*part)]

    def finish(self) -> list[dict[str, Any]]:
        """Return the changes that were held back."""
        found = [delta for part in self._thoughts.finish() for delta in self._deltas(*part)]
        return found + (self._written(self._calls.finish()) if self._calls is not None else [])

    def _deltas(self, text: str, inside: bool) -> list[dict[str, Any]]:
        if inside:
            return [{"reasoning_content": text}]
        return self._written([text] if self._calls is None else self._calls.push(text))

    def _written(self, parts: list[Any]) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        for part in parts:
            if isinstance(part, str):
                found.append({"content": part})
            elif self._tools is not None:
                found.append({"tool_calls": [{"index": self.calls, **self._tools.written(part)}]})
                self.calls += 1
        return found


def message_of(text: str, thoughts: Thoughts | None, tools: ToolUse | None) -> dict[str, Any]:
    """The message of a whole reply."""
    reply = Reply(thoughts, tools)
    deltas = [*reply.push(text), *reply.finish()]
    content = "".join(delta.get("content", "") for delta in deltas)
    calls = [{k: v for k, v in call.items() if k != "index"} for d in deltas for call in d.get("tool_calls", ())]
    message: dict[str, Any] = {"role": "assistant", "content": content if content or not calls else None}
    message["refusal"] = None
    if reply.thought:
        message["reasoning_content"] = "".join(delta.get("reasoning_content", "") for delta in deltas)
    return message | {"tool_calls": calls} if calls else message
