"""Stop strings, and the part of an unfinished output's text that can already be shown."""

from collections.abc import Sequence
from typing import Any

from engine.errors import UsageError, check_utf8, shortened
from engine.text.channels import start_at_end
from engine.text.tokenizer import Tokenizer

CONTEXT = 8  # tokens decoded before a text, so that the decoder knows whether the text begins with a space


def check_stop(strings: Any) -> None:
    """Check that a value is a list of non-empty strings in valid UTF-8. Raises UsageError."""
    listed = isinstance(strings, Sequence) and not isinstance(strings, str | bytes)
    for s in strings if listed else [None]:
        if not isinstance(s, str) or not s:
            raise UsageError(f"stop: expected a list of non-empty strings, got {shortened(repr(strings))}")
        check_utf8(s, "stop")


class StopStrings:
    """Finds whether new tokens contain a stop string, across token borders.

    Special tokens have no text: a string that is the spelling of one stands for the token.

    Args:
        tokenizer: the model's.
        strings: stop strings, none of them empty.
        healed: the beginning of the tokens' text, which belongs to the prompt.
        prompt: the prompt's tokens before `healed`.
    """

    def __init__(self, tokenizer: Tokenizer, strings: Sequence[str], healed: str = "", prompt: Sequence[int] = ()):
        self.tokenizer, self.strings = tokenizer, tuple(strings)
        self.healed, self.prompt = healed, prompt[-CONTEXT:]
        # A new match ends in the last token; a character may take four byte pieces, special tokens have no text.
        self.window = 4 * max(map(len, strings)) + 16
        special = tokenizer.special_spellings.intersection(strings)
        self.special_ids = frozenset(tokenizer.encode_rendered((spelling, True) for spelling in special))

    def __call__(self, tokens: Sequence[int]) -> bool:
        if not self.special_ids.isdisjoint(tokens[-1:]):
            return True
        if len(tokens) <= self.window + 4 * len(self.healed):  # the window may reach into the prompt's characters
            text = self.text(tokens)
        else:
            text = self.tokenizer.decode(tokens[-self.window :])
        return any(s in text for s in self.strings)

    def text(self, tokens: Sequence[int]) -> str:
        """The text of an output's tokens, stop strings included."""
        return text_after(self.tokenizer, tokens, self.healed, self.prompt)

    def cut(self, text: str) -> str:
        """The text up to the first stop string."""
        return text[: min((i for s in self.strings if (i := text.find(s)) >= 0), default=len(text))]


def text_after(tokenizer: Tokenizer, tokens: Sequence[int], healed: str, prompt: Sequence[int]) -> str:
    """The text of an output's tokens.

    Args:
        tokenizer: the model's.
        tokens: the output.
        healed: the beginning of their text, which belongs to the prompt and is left out.
        prompt: the prompt's tokens before `healed`.
    """
    if not healed:
        return tokenizer.decode(tokens)
    whole = tokenizer.decode_continuation(prompt[-CONTEXT:], tokens)
    return whole.removeprefix(healed) if len(whole) >= len(healed) else ""


class TextStream:
    """Turns settled tokens into text that never changes: no incomplete characters, no part of a stop string.

    Args:
        tokenizer: None streams nothing.
        stop: strings whose first occurrence ends the text.
        healed: the beginning of the tokens' text, which belongs to the prompt.
        prompt: the prompt's tokens before `healed`.
    """

    def __init__(
        self, tokenizer: Tokenizer | None, stop: Sequence[str] = (), healed: str = "", prompt: Sequence[int] = ()
    ):
        self.detokenizer = tokenizer.stream(prompt[-CONTEXT:] if healed else ()) if tokenizer else None
        self.healed = healed
        self.stop = tuple(stop)
        self.tokens = 0
        self.shown = 0
        self.text = ""

    def push(self, settled: Sequence[int]) -> str:
        """The new text, given all settled tokens so far."""
        if self.detokenizer is None or len(settled) <= self.tokens:
            return ""
        self.text += self.detokenizer.push(settled[self.tokens :])
        self.tokens = len(settled)
        if self.healed:
            if len(self.text) < len(self.healed):
                return ""
            self.text, self.healed = self.text.removeprefix(self.healed), ""
        return self._show(self._safe())

    def finish(self, text: str) -> str:
        """The rest of the text, given all of it."""
        self.text = text
        return self._show(len(text))

    def _show(self, end: int) -> str:
        new, self.shown = self.text[self.shown : end], max(self.shown, end)
        return new

    def _safe(self) -> int:
        """How much of the text can neither be nor become part of a stop string."""
        end = len(self.text)
        for s in self.stop:
            if (i := self.text.find(s)) >= 0:
                end = min(end, i)
            end = min(end, len(self.text) - len(start_at_end(self.text, s)))
        return end
