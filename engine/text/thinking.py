"""Thoughts: the part of a reply between `<think>` and `</think>` or similar tags, separated from the answer as it
arrives.

Gemma 4 writes `<|channel>thought`, a line break, the thought and `<channel|>`; Cohere's models `<|START_THINKING|>`,
the thought and `<|END_THINKING|>`; Apertus `<|inner_prefix|>`, the thought and `<|inner_suffix|>`; Solar Open
`<|think|>`, the thought and `<|end|><|begin|>assistant`, of which decoding skips the second token.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace

from engine.text.channels import (
    ANSWER,
    CHANNEL,
    END,
    MESSAGE,
    THOUGHT,
    TO_SELF,
    TO_USER,
    TURN,
    ChannelStream,
    ReplyStream,
    start_at_end,
)

# An opening tag, alone or in the source of a template; the closing one has a slash behind its bracket.
_OPENING = re.compile(r"[<\[](?:\w+:)?(?:think|thinking|thought)(?::\w+)?[>\]]", re.IGNORECASE)
_GEMMA4, _WORD = ("<|channel>", "<channel|>"), "thought"  # a thought of Gemma 4 begins with a token and a word
_SOLAR, _ROLE = ("<|think|>", "<|end|>assistant"), "assistant"
_PAIRS = ("<|START_THINKING|>", "<|END_THINKING|>"), ("<|inner_prefix|>", "<|inner_suffix|>")


@dataclass(frozen=True)
class Thoughts:
    """The form in which replies to a prompt write their thoughts.

    Args:
        opening, closing: the tags; "" if the model has none.
        opened: the prompt ends with the opening tag, so that replies begin with a thought.
        begun: the beginning of a reply that the prompt has, if replies have channels instead of tags; None: tags.
        gap: the text between the closing tag and the answer.
    """

    opening: str = ""
    closing: str = ""
    opened: bool = False
    begun: str | None = None
    gap: str = "\n\n"

    @staticmethod
    def find(added: Iterable[str], source: str) -> "Thoughts":
        """The tags of a model: a pair that its template spells, else a pair of its added tokens; or channels.

        A template that only opens thoughts, in the prompt, leaves the closing tag to the model (OLMo 3).
        """
        added = sorted(added)
        if THOUGHT in source or {CHANNEL, MESSAGE} <= {*added}:
            return Thoughts(THOUGHT, f"{END}{TURN}{ANSWER}", begun="")
        if f"to=self{MESSAGE}" in source or {MESSAGE, "<|eom|>"} <= {*added}:
            return Thoughts(TO_SELF, f"<|eom|>{TURN}{TO_USER}", begun="")
        if f"assistant{_SOLAR[0]}" in source or {"<|think|>", "<|end|>", "<|calls|>"} <= {*added}:
            return Thoughts(*_SOLAR, gap="")
        tokens = Thoughts(_GEMMA4[0] + _WORD, _GEMMA4[1], gap=""), *(Thoughts(*pair, gap="") for pair in _PAIRS)
        if form := next((form for form in tokens if form.opening in source), None):
            return form
        in_source = [_tags(opening) for opening in _OPENING.findall(source)]
        pairs = in_source + [_tags(token) for token in added if _OPENING.fullmatch(token)]
        for pair in pairs:
            if pair.closing in source or pair.closing in added:
                return pair
        return next((form for form in tokens if form.tokens <= {*added}), next(iter(in_source), Thoughts()))

    def after(self, prompt: str) -> "Thoughts":
        """The form of replies to a rendered prompt."""
        if self.begun is not None:
            _, found, behind = prompt.rpartition(TURN)
            return replace(self, begun=behind if found else "")
        return replace(self, opened=bool(self.opening) and prompt.rstrip().endswith(self.opening))

    @property
    def tokens(self) -> frozenset[str]:
        """The spellings of the tokens in the tags; with "" if there are none."""
        return frozenset({self.opening.removesuffix(_WORD), self.closing.removesuffix(_ROLE)})

    @property
    def closing_tokens(self) -> str:
        """The closing tag with the token that decoding skips."""
        return self.closing.replace(_SOLAR[1], f"{END}<|begin|>{_ROLE}")

    def split(self, text: str) -> tuple[str | None, str]:
        """A reply's thought, None without one, and its answer. A thought that was cut short has no answer."""
        stream = self.stream()
        parts = [*stream.push(text), *stream.finish()]
        thought, answer = ("".join(text for text, inside in parts if inside is kind) for kind in (True, False))
        return thought if stream.thought else None, answer

    def stream(self) -> ReplyStream:
        """A reader of a reply."""
        return ThoughtStream(self) if self.begun is None else ChannelStream(self.begun, self.opening == THOUGHT)

    def join(self, thought: str, answer: str) -> str:
        """The text that `split` splits into these."""
        return f"{self.opening}\n{thought}\n{self.closing}{self.gap}{answer}"


def _tags(opening: str) -> Thoughts:
    return Thoughts(opening, f"{opening[0]}/{opening[1:]}")


class ThoughtStream(ReplyStream):
    """Splits a reply with tags. The parts, joined, lack the tags and the white space around the thought."""

    def __init__(self, thoughts: Thoughts):
        super().__init__(thought=thoughts.opened)
        self.tags = thoughts
        self._at = "start" if thoughts.opening else "answer"  # then "thought", "gap" and "answer"
        self._empty = True  # no text of the thought was returned yet

    def _parts(self, last: bool) -> list[tuple[str, bool]]:
        opening, closing, found = self.tags.opening, self.tags.closing, []
        if self._at == "start":
            lead = self._held.lstrip()
            if not last and any(tag.startswith(lead) and lead != tag for tag in (opening, closing)):
                return []
            if lead.startswith(opening):
                self.thought, self._held = True, lead.removeprefix(opening)
            self._at = "thought" if self.thought else "answer"
            if not self.thought and lead.startswith(closing):  # how MiniMax M3 begins an answer without a thought
                self._held, self._at = lead.removeprefix(closing), "gap"
        if self._at == "thought":
            body, closed, rest = self._held.partition(closing)
            held = "" if closed or last else start_at_end(body, closing)
            kept = body.removesuffix(held).rstrip()
            shown = kept.lstrip() if self._empty else kept
            self._held = rest if closed else body[len(kept) :]
            self._empty = self._empty and not shown
            found.append((shown, True))
            if closed:
                self._at = "gap"
            elif last:
                self._held = ""
        if self._at == "gap":
            self._held = self._held.lstrip()
            if self._held:
                self._at = "answer"
        if self._at == "answer":
            found.append((self._held, False))
            self._held = ""
        return [part for part in found if part[0]]
