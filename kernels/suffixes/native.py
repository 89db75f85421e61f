"""Calls the C++ implementation with the addresses of the same state."""

import ctypes
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from kernels.cpp import function
from kernels.suffixes.state import Suffixes, SuffixSource, token_bits

KEPT_SIZES = 128  # of arrays whose types are kept
Source = tuple[Suffixes, int, int]
Nodes = tuple[list[int], list[int], list[float]]


@lru_cache(maxsize=256)
def _array(kind: Any, size: int) -> type[ctypes.Array]:
    return kind * size


def _symbols(symbols: Sequence[int] | memoryview) -> ctypes.Array:
    if isinstance(symbols, memoryview):
        return (ctypes.c_uint32 * len(symbols)).from_buffer(symbols)
    kind = _array if len(symbols) <= KEPT_SIZES else _array.__wrapped__
    return kind(ctypes.c_uint32, len(symbols))(*symbols)


def add(text: Suffixes, symbols: Sequence[int] | memoryview, mark: int) -> None:
    taken = _symbols(symbols)
    function("suffixes_add", brief=True)(ctypes.addressof(text.fields), ctypes.addressof(taken), len(taken), mark)


def known(text: Suffixes, symbols: Sequence[int], mark: int) -> int:
    taken = _symbols(symbols)
    run = function("suffixes_known", brief=True)
    return run(ctypes.addressof(text.fields), ctypes.addressof(taken), len(taken), mark)


def foreign(symbols: memoryview, vocab_size: int, listed: bytes) -> int:
    taken, run = _symbols(symbols), function("suffixes_foreign", brief=True)
    return run(ctypes.addressof(taken), len(taken), vocab_size, token_bits(vocab_size), listed, len(listed))


def propose(sources: Sequence[Source], tail: Sequence[int], nodes: int, depth: int, least: float) -> Nodes:
    wanted, asked = _symbols(tail), _array(SuffixSource, len(sources))()
    for place, (text, mark, bonus) in zip(asked, sources, strict=True):
        place.text, place.mark, place.bonus = ctypes.addressof(text.fields), mark, bonus
    tokens, parents, scores = (_array(kind, nodes)() for kind in (ctypes.c_int64, ctypes.c_int64, ctypes.c_double))
    found = (ctypes.addressof(array) for array in (tokens, parents, scores))
    given = ctypes.addressof(asked), len(asked), ctypes.addressof(wanted), len(wanted)
    count = function("suffixes_propose", brief=True)(*given, nodes, depth, least, *found)
    return tokens[:count], parents[:count], scores[:count]
