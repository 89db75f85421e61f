"""Channels: splits a reply of gpt-oss (OpenAI's Harmony format) or Muse as it arrives.

A reply is one message or several; the prompt ends with the `<|start|>assistant` of the first:

    <|channel|>analysis<|message|>a thought<|end|><|start|>assistant<|channel|>final<|message|>the answer<|return|>

A message to a function, `<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": 1}<|call|>`, is a call;
its recipient may also stand before the channel. Other commentary belongs to the answer. Muse has recipients only:

    to=self<|message|>a thought<|eom|><|start|>assistant to=user<|message|>the answer<|eot|>
"""

import re
from abc import ABC, abstractmethod

CHANNEL, MESSAGE, START, END, CALL = "<|channel|>", "<|message|>", "<|start|>", "<|end|>", "<|call|>"
# Special tokens that a reader of channels needs, so that decoding keeps their spellings.
CHANNEL_MARKS = frozenset({CHANNEL, MESSAGE, START, END, CALL, "<|constrain|>", "<|eom|>"})
THOUGHT = f"{CHANNEL}analysis{MESSAGE}"
ANSWER = f"{CHANNEL}final{MESSAGE}"
TURN = f"{START}assistant"
TO_SELF, TO_USER = (f" to={name}{MESSAGE}" for name in ("self", "user"))
FUNCTIONS = "functions."

_RECIPIENT = re.compile(r"\bto=([^\s<]+)")
_CHANNEL = re.compile(re.escape(CHANNEL) + r"\s*(\w+)")
# Marks that end a message, without channels and with them; a start ends it if its end was left out.
_CLOSES = {False: ("<|eom|>", "<|eot|>", START), True: (END, CALL, START, "<|return|>")}
_CLOSE = {kind: re.compile("|".join(map(re.escape, marks))) for kind, marks in _CLOSES.items()}
_BEGINS = (CHANNEL, START, " to=")  # beginnings of replies with channels


def start_at_end(text: str, tag: str) -> str:
    """The longest start of a tag at the end of a text."""
    return next((tag[:n] for n in range(min(len(tag) - 1, len(text)), 0, -1) if text.endswith(tag[:n])), "")


class ReplyStream(ABC):
    """Splits a reply into thought and answer as it arrives.

    Args:
        begun: the beginning of the reply, which the prompt has.

    Attributes:
        thought: whether the reply has a thought.
    """

    def __init__(self, begun: str = "", *, thought: bool = False):
        self._held, self.thought = begun, thought

    def push(self, text: str) -> list[tuple[str, bool]]:
        """Add text. Returns (text, whether it is thought) for what is certain."""
        self._held += text
        return self._parts(False)

    def finish(self) -> list[tuple[str, bool]]:
        """Return the parts that were held back."""
        return self._parts(True)

    @abstractmethod
    def _parts(self, last: bool) -> list[tuple[str, bool]]:
        """The certain parts of the held text, or all of it if `last`; keeps the rest."""


class ChannelStream(ReplyStream):
    """Splits a reply in channels.

    The parts, joined, lack all headers and marks. Messages of one kind are a blank line apart. A call is part of the
    answer: the mark `<|call|>`, the name of the function, the arguments. A reply without any channel is an answer.

    Args:
        begun: the beginning of the reply, which the prompt has after `<|start|>assistant`.
        channels: False if messages have recipients only; then their calls stay as they are.
    """

    def __init__(self, begun: str = "", channels: bool = True):
        super().__init__(begun)
        self._channels = channels
        self._at = "begin"  # then "header", "thought", "answer" and "call", message by message
        self._fresh = True  # the message has no text yet
        self._written = set[bool]()  # has True after text of a thought, False after text of the answer

    def _parts(self, last: bool) -> list[tuple[str, bool]]:
        found: list[tuple[str, bool]] = []
        if self._at == "begin":
            if not last and any(mark.startswith(self._held) for mark in _BEGINS):
                return []
            self._at = "header" if self._held.startswith(_BEGINS) else "answer"
        while self._held:
            if self._at == "header":
                header, ended, rest = self._held.partition(MESSAGE)
                if not ended and not last:
                    break
                self._held = rest
                if ended:
                    found += self._open(header)
                elif not header.startswith(_BEGINS):
                    found.append((header, False))
                if not rest:
                    break
            close = _CLOSE[self._channels].search(self._held)
            held = (
                ""
                if close or last
                else max((start_at_end(self._held, mark) for mark in _CLOSES[self._channels]), key=len)
            )
            body = self._held[: close.start()] if close else self._held.removesuffix(held)
            found += self._body(body)
            if close is None:
                self._held = held
                break
            self._held, self._at = self._held[close.end() :], "header"
        return found

    def _open(self, header: str) -> list[tuple[str, bool]]:
        recipient, channel = _RECIPIENT.search(header), _CHANNEL.search(header)
        self._fresh = True
        if recipient and self._channels:
            self._at = "call"
            return [(CALL + recipient[1].removeprefix(FUNCTIONS), False)]
        kind = channel if self._channels else recipient
        self._at = "thought" if kind and kind[1] in ("analysis", "self") else "answer"
        self.thought = self.thought or self._at == "thought"
        return []

    def _body(self, text: str) -> list[tuple[str, bool]]:
        inside = self._at == "thought"
        apart = "\n\n" if self._fresh and self._at != "call" and inside in self._written else ""
        if not text:
            return []
        self._fresh = False
        self._written.add(inside)
        return [(apart + text, inside)]
