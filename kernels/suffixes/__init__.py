"""Suffixes of texts: drafts of what followed the longest matches of a text's end. SuffixDecoding (arXiv 2411.04975)
finds them in a suffix tree; here chains of positions do, as in LZ77 compressors, in a tenth of the memory."""

from collections.abc import Collection, Sequence

from kernels import checks
from kernels.cpp import why_not
from kernels.suffixes import native, reference
from kernels.suffixes.reference import MOST_MATCHED, Nodes, Source
from kernels.suffixes.state import BOUNDARY, Suffixes, token_bits

__all__ = [
    "BOUNDARY",
    "MOST_MATCHED",
    "MOST_NODES",
    "Suffixes",
    "add",
    "best",
    "foreign",
    "known",
    "propose",
    "token_bits",
]

IMPLEMENTATIONS = {"reference": reference, "cpp": native}
MOST_NODES = 1024  # of a draft


def best() -> str:
    """The fastest implementation of this machine."""
    return "reference" if why_not() else "cpp"


def add(text: Suffixes, symbols: Sequence[int] | memoryview, mark: int = 0, *, impl: str) -> None:
    """Append symbols to a text.

    Args:
        text: the text.
        symbols: tokens, or BOUNDARY between texts; a memoryview of 32 bits is writable.
        mark: bits above those of tokens, which are set in each symbol.
        impl: "reference" (the definition) or "cpp".

    Raises:
        ValueError: a token or a mark that the text cannot have, or an unknown impl.
    """
    _check_mark(text, mark)
    if not isinstance(symbols, memoryview):  # one that is, is a file's: its reader has checked it
        _check_tokens(text, symbols)
    _chosen(impl).add(text, symbols, mark)


def known(text: Suffixes, tokens: Sequence[int], mark: int = 0, *, impl: str) -> int:
    """How many of the first tokens the text contains already, one after the other; see `add`."""
    _check_mark(text, mark)
    _check_tokens(text, tokens)
    return _chosen(impl).known(text, tokens, mark)


def foreign(symbols: memoryview, vocab_size: int, numbers: Collection[int], *, impl: str) -> int:
    """Find the first symbol that no text can have.

    Args:
        symbols: numbers of 32 bits, in writable memory.
        vocab_size: tokens are less than this.
        numbers: of marks that are expected, at least 0: a mark is its number times a power of two, see `token_bits`.
        impl: see `add`.

    Returns:
        the place of the first symbol that is neither BOUNDARY nor a token with such a mark; their number if none is.
    """
    listed = bytearray(max(numbers, default=-1) + 1)
    for number in numbers:
        listed[number] = 1
    return _chosen(impl).foreign(symbols, vocab_size, bytes(listed))


def propose(
    sources: Sequence[Source], tail: Sequence[int], nodes: int, depth: int, least: float, *, impl: str
) -> Nodes:
    """Draft what followed the longest suffixes of a tail: see `reference.propose`.

    Raises:
        ValueError: no source, a token or a mark that a text cannot have, sizes out of range, or an unknown impl.
    """
    if not sources:
        raise ValueError("sources: expected at least one text")
    if not 0 < nodes <= MOST_NODES or depth < 1 or not 0 <= least <= 1:
        raise ValueError(
            f"expected 1 to {MOST_NODES} nodes, a depth of at least 1 and a least score of 0 to 1, "
            f"got {nodes}, {depth} and {least}"
        )
    tail = tail[-MOST_MATCHED:]
    for text, mark, bonus in sources:
        _check_mark(text, mark)
        _check_tokens(text, tail)
        if not 0 <= bonus <= MOST_MATCHED:
            raise ValueError(f"bonus: expected 0 to {MOST_MATCHED} symbols, got {bonus}")
    return _chosen(impl).propose(sources, tail, nodes, depth, least)


def _chosen(impl: str):
    checks.implementation(impl, IMPLEMENTATIONS)
    return IMPLEMENTATIONS[impl]


def _check_mark(text: Suffixes, mark: int) -> None:
    """Raises ValueError for a mark that shares bits with tokens; the highest makes boundaries of tokens."""
    if mark & text.fields.token_mask or not 0 <= mark < BOUNDARY - text.fields.token_mask:
        raise ValueError(f"mark: expected a multiple of {1 << text.token_bits} below the last of 32 bits, got {mark}")


def _check_tokens(text: Suffixes, tokens: Sequence[int]) -> None:
    # A BOUNDARY is not smaller than any vocabulary, so a second look is needed only where one is there.
    if tokens and (min(tokens) < 0 or max(tokens) >= text.vocab_size):
        wrong = next((t for t in tokens if t != BOUNDARY and not 0 <= t < text.vocab_size), None)
        if wrong is not None:
            raise ValueError(f"expected tokens from 0 to {text.vocab_size - 1}, got {wrong}")
