"""Outputs that begin with given bytes, and prompts whose last tokens are generated again (token healing).

A prompt that ends inside a word is tokenised differently at its end than the whole word would be: after "http:" a model
does not expect "//", because "://" is one token. Healing removes those tokens and requires an output that begins with
their bytes, in any tokenisation.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from functools import lru_cache
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from engine.rules.constraint import Constraint, State, Tokens
from engine.text.tokenizer import Tokenizer

PAST = 0xFF  # the largest byte: enough of them after a beginning sort behind every spelling with this beginning
BEGINNINGS = 32  # beginnings whose tokens are kept: while a text is typed, every key asks for the same ones


class Spellings:
    """The bytes that tokens stand for; special tokens stand for none.

    Args:
        data: the bytes of each id.

    Attributes:
        allowed: `towards` as a tensor, int64; it keeps results.
        beyond: a byte -> the tokens that have it before their last byte; it keeps results.
    """

    def __init__(self, data: Sequence[bytes]):
        self.data = data
        self.longest = max(map(len, data), default=0)
        self._sorted = sorted((spelling, token) for token, spelling in enumerate(data) if spelling)
        self._keys = [spelling for spelling, _ in self._sorted]
        self._ids: dict[bytes, list[int]] = {}
        for spelling, token in self._sorted:
            self._ids.setdefault(spelling, []).append(token)
        self.allowed = lru_cache(BEGINNINGS)(lambda wanted: torch.tensor(self.towards(wanted), dtype=torch.int64))
        self.beyond = lru_cache(BEGINNINGS)(lambda byte: [t for t, spelled in enumerate(data) if byte in spelled[:-1]])

    def towards(self, wanted: bytes) -> list[int]:
        """The possible first tokens of a text that begins with `wanted` (at least one byte), ascending."""
        found = [t for end in range(1, min(len(wanted), self.longest + 1)) for t in self._ids.get(wanted[:end], ())]
        return sorted(found + self.beginning(wanted))

    def beginning(self, start: bytes) -> list[int]:
        """The tokens whose bytes begin with `start` or equal it."""
        after = start + bytes([PAST]) * (self.longest + 1)
        found = self._sorted[bisect_left(self._keys, start) : bisect_left(self._keys, after)]
        return [token for _, token in found]

    def continues(self, start: bytes) -> bool:
        """Whether some token's bytes begin with `start` and are longer."""
        place = bisect_right(self._keys, start)
        return place < len(self._keys) and self._keys[place].startswith(start)


_known: "WeakKeyDictionary[Tokenizer, Spellings]" = WeakKeyDictionary()


def spellings(tokenizer: Tokenizer, vocab: int) -> Spellings:
    """The spellings of a model's vocabulary. Raises UsageError if its tokens have no bytes of their own."""
    if tokenizer not in _known:
        _known[tokenizer] = Spellings(tokenizer.data()[:vocab])
    return _known[tokenizer]


class Begin(Constraint):
    """The output begins with given bytes, in any tokens. The last of these tokens may extend beyond the bytes.

    A state is the number of bytes that the output has.

    Args:
        data: the bytes.
        known: the spellings of the vocabulary.
        eos: tokens that end an output; those that have text do not end it before it has all the bytes.
    """

    def __init__(self, data: bytes, known: Spellings, eos: Sequence[int] = ()):
        self.wanted, self.known = data, known
        self._ends = [token for token in eos if token < len(known.data) and known.data[token]]

    def start(self, prompt: Sequence[int]) -> State:
        return 0

    def advance(self, state: State, token: int) -> State:
        return state if state >= len(self.wanted) else state + len(self.known.data[token])

    def allowed(self, states: Sequence[State]) -> Sequence[Tokens]:
        rest = [self.wanted[state:] for state in states]
        return [self._towards(wanted) if wanted else None for wanted in rest]

    def _towards(self, wanted: bytes) -> Tensor:
        ids = self.known.allowed(wanted)
        early = [token for token in self._ends if len(self.known.data[token]) < len(wanted)]
        return ids[~torch.isin(ids, torch.tensor(early))] if early else ids


def heal(ids: Sequence[int], known: Spellings) -> tuple[list[int], bytes]:
    """Remove the last tokens of a prompt that a longer token could replace; returns the rest and the removed bytes.

    As many are removed as one longer token can begin with; at least one token is left, and no character is cut in two.
    """
    cut, kept, data = b"", len(ids), b""
    for count in range(1, len(ids)):
        spelling = known.data[token] if (token := ids[-count]) < len(known.data) else b""
        data = spelling + data
        if not spelling or len(data) >= known.longest:
            break
        whole = data.decode(errors="ignore").encode() == data  # no character is cut in two
        if whole and known.continues(data):
            cut, kept = data, len(ids) - count
    return list(ids[:kept]), cut
