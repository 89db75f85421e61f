"""The spellings of a vocabulary, kept small."""

from array import array
from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import overload


class Pieces(Sequence[str | None]):
    """The spelling of each id, None for ids without a spelling: an eighth of the memory of a list of strings.

    Args:
        pieces: the spellings by id.
    """

    def __init__(self, pieces: Iterable[str | None]):
        given = [*pieces]
        self._holes = frozenset(i for i, piece in enumerate(given) if piece is None)
        joined = "\0".join("" if piece is None else piece for piece in given)
        if joined.count("\0") == len(given) - 1:  # hundreds of thousands in a few calls
            spelled = joined.encode("utf-8", "surrogatepass").split(b"\0")
        else:
            spelled = [b"" if piece is None else piece.encode("utf-8", "surrogatepass") for piece in given]
        self._text = b"".join(spelled)
        self._ends = array("Q", accumulate(map(len, spelled), initial=0))

    def __len__(self) -> int:
        return len(self._ends) - 1

    @overload
    def __getitem__(self, i: int) -> str | None: ...
    @overload
    def __getitem__(self, i: slice) -> list[str | None]: ...
    def __getitem__(self, i: int | slice) -> str | list[str | None] | None:
        if isinstance(i, slice):
            return [self[j] for j in range(*i.indices(len(self)))]
        i = range(len(self))[i]
        text = self._text[self._ends[i] : self._ends[i + 1]]
        return None if i in self._holes else text.decode("utf-8", "surrogatepass")
