"""DRY ("don't repeat yourself"), a penalty for tokens that would continue a repetition.

Defined by text-generation-webui's pull request 5677 and by llama.cpp's sampler of this name. If the last n tokens of
a sequence also occur earlier, the token that follows there is penalised:

    tokens      a b c d x a b c       the last three, "a b c", stand at the beginning too
                      ^               d loses multiplier * base ** (3 - allowed_length)

No repetition extends across a sequence breaker, such as the end of a line, and a token that contains a breaker is not
penalised. A breaker here is a text, however it is tokenised; llama.cpp recognises a breaker of several tokens only in
one tokenisation.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from engine.rules.constraint import State
from engine.rules.processors import ID, Processor, pack

BREAKERS = ("\n", ":", '"', "*")
MOST_PENALTY = 1e6  # no token with it is ever drawn


class Unbroken(NamedTuple):
    """A state: the tokens that a repetition may contain.

    Attributes:
        tokens: the new tokens, packed.
        free: tokens since the last breaker.
        tail: the last bytes of the text, in which a breaker may have begun.
    """

    tokens: bytes
    free: int
    tail: bytes


class DryPenalty(Processor):
    """Subtracts multiplier * base ** (length - allowed_length) from tokens that would make a repetition longer.

    Args:
        multiplier: 0 subtracts nothing.
        base: at least 1.
        allowed_length: repetitions of fewer tokens are free; at least 1.
        reach: how many tokens at the end of the sequence count, its prompt included; None: all.
        breakers: texts that are not empty.
        data: bytes of each token id.
    """

    def __init__(
        self,
        multiplier: float,
        base: float,
        allowed_length: int,
        reach: int | None,
        breakers: Sequence[bytes],
        data: Sequence[bytes],
    ):
        self.multiplier, self.base, self.allowed_length, self.reach = multiplier, base, allowed_length, reach
        self.breakers, self.data = breakers, data
        self._longest = max(map(len, breakers), default=1)
        self._prompt = b""

    def start(self, prompt: Sequence[int]) -> State:
        self._prompt = pack(prompt)
        free, tail = 0, b""
        for token in prompt:
            free, tail = self._read(free, tail, token)
        return Unbroken(b"", free, tail)

    def advance(self, state: Unbroken, token: int) -> State:
        return Unbroken(state.tokens + pack([token]), *self._read(state.free, state.tail, token))

    def apply(self, rows_NV: Tensor, states: Sequence[Unbroken]) -> None:
        rows, tokens, penalties = [], [], []
        for row, state in enumerate(states):
            for token, length in self._repetitions(state).items():
                if token < rows_NV.shape[1] and not any(breaker in self._text(token) for breaker in self.breakers):
                    rows.append(row)
                    tokens.append(token)
                    penalties.append(self._penalty(length))
        if rows:
            place = torch.tensor(rows).to(rows_NV.device), torch.tensor(tokens).to(rows_NV.device)
            rows_NV[place] -= torch.tensor(penalties).to(rows_NV)

    def _penalty(self, length: int) -> float:
        try:
            return min(self.multiplier * self.base ** (length - self.allowed_length), MOST_PENALTY)
        except OverflowError:
            return MOST_PENALTY

    def _repetitions(self, state: Unbroken) -> dict[int, int]:
        """Tokens that would continue a repetition -> the length of the longest one, at least the allowed length."""
        least, packed = self.allowed_length, self._prompt + state.tokens
        if self.reach is not None:
            packed = packed[max(0, len(packed) - self.reach * ID) :]
        tokens, found, follows = memoryview(packed).cast("i"), list[int](), dict[int, int]()
        if state.free < least or len(tokens) <= least:
            return {}
        wanted, at = packed[-least * ID :], -1
        while (at := packed.find(wanted, at + 1)) >= 0:
            if at % ID == 0:
                found.append(at // ID + least - 1)  # the last token of an earlier place, or of this one
        for end, length in zip(found[:-1], _lengths(tokens, found[:-1], least, state.free), strict=True):
            token = tokens[end + 1]
            follows[token] = max(length, follows.get(token, 0))
        return follows

    def _text(self, token: int) -> bytes:
        return self.data[token] if token < len(self.data) else b""

    def _read(self, free: int, tail: bytes, token: int) -> tuple[int, bytes]:
        """The number of tokens since the last breaker, and the tail, after a token."""
        if not self.breakers:
            return free + 1, b""
        text = tail + self._text(token)
        breaks = any(breaker in text[max(0, len(tail) - len(breaker) + 1) :] for breaker in self.breakers)
        return 0 if breaks else free + 1, text[max(0, len(text) - self._longest + 1) :]


def _lengths(tokens: Sequence[int], ends: Sequence[int], least: int, most: int) -> list[int]:
    """For each place, how many tokens up to it equal the last ones: `least`, which are known to, up to `most`."""
    lengths, last, steps = [], len(tokens) - 1, len(tokens)
    for end in ends:
        length = least
        while length < most and length <= end and tokens[end - length] == tokens[last - length]:
            length += 1
        lengths.append(length)
        steps -= length - least
        if steps < 0:  # one token over and over: this takes linear time
            common = common_beginnings(tokens[::-1])
            return [min(common[last - end], most) for end in ends]
    return lengths


def common_beginnings(tokens: Sequence[int]) -> list[int]:
    """For each place how many tokens from there on equal the first ones (the Z function), in linear time."""
    lengths, left, right = [len(tokens)] * bool(tokens), 0, 0  # tokens[left:right] equal the first ones
    for i in range(1, len(tokens)):
        length = min(lengths[i - left], right - i) if i < right else 0
        while i + length < len(tokens) and tokens[length] == tokens[i + length]:
            length += 1
        lengths.append(length)
        if i + length > right:
            left, right = i, i + length
    return lengths
