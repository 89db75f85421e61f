"""Calls the C++ n-grams (ngrams.cpp): what a request has learnt, and drafts from it. Tokens are less than 2^21 - 1.

`search.aded.drafters.Backoff` is the definition; everything here is equal to it, to the last bit. Where there is no C++
(`kernels.cpp.why_not`) nothing of it can be made.
"""

import ctypes
import weakref
from array import array
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from kernels.checks import expect
from kernels.cpp import function

_HOST = torch.device("cpu")
TOKENS = (1 << 21) - 1


def _given(tokens: Sequence[int]) -> "array[int]":
    """Tokens for C++. Raises ValueError for numbers that are none."""
    if tokens and not 0 <= min(tokens) <= max(tokens) < TOKENS:
        raise ValueError(f"expected tokens from 0 to {TOKENS - 1}, got {min(tokens)} to {max(tokens)}")
    return array("q", tokens)


def _function(name: str) -> Callable[..., Any]:
    return function(f"ngrams_{name}", brief=True)


class Store:
    """Counted tri-grams, as a file has them (see `search.aded.ngrams`), and what was looked up in them.

    Args:
        keys: ascending: int64, contiguous, on the host.
        counts: int32, likewise, one for each key.
        doubt: occurrences that an order leaves to the shorter ones, for itself and for each successor it knows.

    Raises:
        ValueError: other tensors.
    """

    def __init__(self, keys: Tensor, counts: Tensor, doubt: float):
        expect("keys", keys, torch.int64, (keys.numel(),), _HOST)
        expect("counts", counts, torch.int32, (keys.numel(),), _HOST)
        self._tensors, made = (keys, counts), ctypes.c_void_p()
        where = ctypes.addressof(made), keys.data_ptr(), counts.data_ptr()
        _function("store")(*where, len(keys), doubt)
        self.address = made.value
        weakref.finalize(self, _function("close_store"), self.address)


class Text:
    """The n-grams of one text.

    Args:
        store: counts to start from.
        adapt: learn from the text.
        doubt: see `Store`.
        floor: the least chance of a drafted node.
        kept: successors that a context keeps when it has seen twice as many.
    """

    def __init__(self, store: Store | None, adapt: bool, *, doubt: float, floor: float, kept: int):
        self._store, made = store, ctypes.c_void_p()
        where = ctypes.addressof(made), store.address if store is not None else None
        _function("text")(*where, doubt, floor, kept, adapt)
        self._address = made.value
        weakref.finalize(self, _function("close_text"), self._address)
        self._reserve(64)
        self._found, self._drafted = ctypes.c_int64(), 0
        self._learn = _function("learn")
        self._observe = _function("observe")
        self._draft = _function("draft")
        self._chances = _function("chances")

    def _reserve(self, room: int) -> None:
        self._room, self._numbers, self._scores = room, array("q", bytes(16 * room)), array("d", bytes(8 * room))
        self._tokens, self._values = self._numbers.buffer_info()[0], self._scores.buffer_info()[0]

    def learn(self, tokens: Sequence[int]) -> None:
        """The text goes on with these. Raises ValueError for numbers that are no tokens."""
        given = _given(tokens)
        self._learn(self._address, given.buffer_info()[0], len(given))

    def observe(self, nodes: Sequence[int], told: Tensor) -> None:
        """Count tokens after nodes of the last draft, -1: after the text, each as often as it is probable.

        Args:
            told: of each node log-probabilities, then tokens, both NaN where there are no more: contiguous float64.

        Raises:
            IndexError: there is no such node.
            ValueError: another tensor.
        """
        if not nodes:
            return
        if min(nodes) < -1 or max(nodes) >= self._drafted:
            raise IndexError(f"the last draft has {self._drafted} nodes, got {nodes}")
        given, k = array("q", nodes), told.numel() // (2 * len(nodes))
        expect("told", told, torch.float64, (*told.shape,), _HOST)
        self._observe(self._address, given.buffer_info()[0], told.data_ptr(), len(nodes), k)

    def draft(self, nodes: int, depth: int) -> tuple[list[int], list[int], list[float]]:
        """Tokens, parents' places and chances of the likeliest nodes."""
        if nodes > self._room:
            self._reserve(nodes)
        parents = self._tokens + 8 * self._room
        self._draft(self._address, nodes, depth, self._tokens, parents, self._values, ctypes.addressof(self._found))
        n, first = self._found.value, self._room
        self._drafted = n
        return self._numbers[:n].tolist(), self._numbers[first : first + n].tolist(), self._scores[:n].tolist()

    def chances(self, ahead: Sequence[int]) -> dict[int, float]:
        """Of the tokens after the text and these."""
        given = _given(ahead)
        while True:
            self._chances(
                *(self._address, given.buffer_info()[0], len(given), self._tokens, self._values, self._room),
                ctypes.addressof(self._found),
            )
            if (n := self._found.value) <= self._room:
                return dict(zip(self._numbers[:n], self._scores[:n], strict=True))
            self._reserve(n)
