"""The memory of a text whose suffixes are searched: a ring buffer of symbols, and chains of positions with equal
contexts.

A symbol has 32 bits: a token, and above it a mark that identifies the owner of the text. Equal tokens with different
marks are different symbols, so the text of one mark never matches the text of another. BOUNDARY separates two texts.

Chains work as in LZ77 compressors. The context of a position is the symbols before it. All positions whose last SHORT
symbols have the same hash form one chain, newest first: a head per hash leads to the newest position, `short_back` from
each position to the previous one; likewise for the last LONG symbols. Pairs have a head but no chain, except in a fine
text, which has chains for pairs and for single symbols. A chain may lead to other contexts, because hashes collide, and
heads may be older than the ring, so every position in a chain is compared.
"""

import ctypes
import mmap
from typing import Any

from kernels.cpp import OPERATORS

BOUNDARY = (1 << 32) - 1
SINGLE, PAIR, SHORT, LONG = 1, 2, 3, 6  # symbols of a context
LEAST_CAPACITY = 64
MOST_CAPACITY = 1 << 30
ENTRIES_PER_HEAD = 3  # a table has at least one head for so many places
IN_THE_HEAP = 1 << 16  # bytes that need no mapping of their own

SuffixFields: Any = OPERATORS.structures["Suffixes"]
SuffixSource: Any = OPERATORS.structures["SuffixSource"]


def token_bits(vocab_size: int) -> int:
    """Bits of a symbol that are its token."""
    return max(1, (vocab_size - 1).bit_length())


class Suffixes:
    """A text of bounded length: when it is full, a new symbol replaces the oldest.

    Args:
        capacity: symbols that are kept; 12 bytes each, and 9 bytes for each head (`ENTRIES_PER_HEAD`). The system gives
            memory as the text grows.
        vocab_size: tokens are less than this.
        fine: drafts look shorter contexts up too, and again at each node; for texts that fit into a processor's cache.
            8 bytes more for each symbol.

    Attributes:
        fields: the structure that C++ reads: sizes, counts, addresses.
        token_bits: bits of a symbol that are its token; those above are its mark.
        symbols, and the tables `..._back` and `..._heads` of the chains: numbers of 32 bits.

    Raises:
        ValueError: a capacity that is too small or too large, or a vocabulary that leaves no bit for marks.
    """

    def __init__(self, capacity: int, vocab_size: int, fine: bool = False):
        if not LEAST_CAPACITY <= capacity <= MOST_CAPACITY:
            raise ValueError(f"capacity: expected {LEAST_CAPACITY} to {MOST_CAPACITY} symbols, got {capacity}")
        if not 0 < vocab_size < 1 << 31:
            raise ValueError(f"vocab_size: expected 1 to {(1 << 31) - 1} tokens, got {vocab_size}")
        self.fine, self.vocab_size, self.token_bits = fine, vocab_size, token_bits(vocab_size)
        heads = 1 << max(8, (capacity // ENTRIES_PER_HEAD - 1).bit_length())
        sizes = {
            "symbols": capacity, "short_back": capacity, "long_back": capacity,
            "pair_back": capacity * fine, "single_back": capacity * fine, "single_heads": heads // 4 * fine,
            "pair_heads": heads // 4, "short_heads": heads, "long_heads": heads,
        }  # fmt: skip
        total = 4 * sum(sizes.values())
        private = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS}
        self._memory = bytearray(total) if total <= IN_THE_HEAP else mmap.mmap(-1, total, **private)
        view = memoryview(self._memory).cast("I")
        self.fields = SuffixFields(capacity=capacity, heads=heads, token_mask=(1 << self.token_bits) - 1, written=1)
        self._address, at = ctypes.addressof(ctypes.c_char.from_buffer(self._memory)), 0
        for name, size in sizes.items():
            setattr(self, name, view[at : at + size])
            setattr(self.fields, name, self._address + 4 * at if size else None)
            at += size

    symbols: memoryview
    short_back: memoryview
    long_back: memoryview
    pair_back: memoryview
    single_back: memoryview
    single_heads: memoryview
    pair_heads: memoryview
    short_heads: memoryview
    long_heads: memoryview

    def __len__(self) -> int:
        """The number of symbols, boundaries included."""
        return self.fields.kept

    @property
    def nbytes(self) -> int:
        """Bytes of all tables, also of what was never written."""
        return len(self._memory)

    def forget(self, kept: int) -> None:
        """Keep at most `kept` symbols, the newest."""
        self.fields.kept = max(0, min(kept, self.fields.kept))

    def parts(self) -> list[memoryview]:
        """The symbols in order, as one or two parts of the ring."""
        capacity, kept = self.fields.capacity, self.fields.kept
        end = self.fields.written % capacity
        if kept <= end:
            return [self.symbols[end - kept : end]]
        return [self.symbols[capacity - kept + end :], self.symbols[:end]]
