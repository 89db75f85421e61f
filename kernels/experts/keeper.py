"""Experts in mapped files, of which only a limited number of bytes stay in memory: the least recently used are released
(native.cpp).

Released experts are read from the file again when a token chooses them: the limit changes no bit of a result.
"""

import ctypes
import mmap
import re
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from kernels.cpp import OPERATORS
from kernels.experts.packed import Expert, PackedExperts
from kernels.linear import Packed, PackedParts

AROUND = 1 << 16  # bytes: a page that is missing brings those beside it that the system has, within such a window
MOST_PLACES = 4  # of an expert: panels, and what goes with them, of two matrices
READ_ONLY = 1  # PROT_READ of sys/mman.h
MAPPINGS = Path("/proc/self/smaps")  # the system's list of mappings
# In the system's list of mappings: ends and rights of each of a file, and its bytes that the file does not have: they
# were written to, and are in memory or swapped out.
_FILE = re.compile(
    r"^([0-9a-f]+)-([0-9a-f]+) (\S+) \S+ \S+ [1-9]\d* +/.*\n"
    r"(?:[A-Z].*\n)*?Anonymous: +(\d+) kB\n(?:[A-Z].*\n)*?Swap: +(\d+) kB$",
    re.MULTILINE,
)


class Keeper:
    """Keeps the experts of a model within a limit of memory, from now on; at first none of them is in memory.

    The mappings that hold experts are made read-only, whole: pages that go must be those of the file.

    Args:
        mixtures: of one model; their matrices lie in mapped files.
        limit: bytes, at least those of the largest mixture; see `least_limit`.

    Raises:
        ValueError: a matrix that lies elsewhere, or where something was written to, or a limit that is too small.
    """

    def __init__(self, mixtures: Sequence[PackedExperts], limit: int):
        self._experts = [expert for mixture in mixtures for expert in mixture.experts]  # places are theirs
        files = _Files()
        of_experts = [files.places(expert) for expert in self._experts]
        self._first = torch.tensor([0, *map(len, of_experts)]).cumsum(0)
        self._places = torch.tensor([place for places in of_experts for place in places])
        self._sizes = torch.tensor([sum(size for _, size in places) for places in of_experts])
        self._used = torch.zeros_like(self._sizes)
        self.bytes = int(self._sizes.sum())
        most = max(int(sizes.sum()) for sizes in self._sizes.split([len(mixture.experts) for mixture in mixtures]))
        if limit < most:
            raise ValueError(f"limit: expected the {most} bytes of the experts of a layer at least, got {limit}")
        files.protect()
        for start, size in self._places.tolist():
            _call("madvise", start, size, mmap.MADV_DONTNEED)
        tensors = (self._first, self._places, self._sizes, self._used)
        numbers = limit, 0, 0, len(of_experts)
        self.described = OPERATORS.structures["Keeper"](*numbers, *(x.data_ptr() for x in tensors))
        first = 0
        for mixture in mixtures:
            mixture.keep(self, first)
            first += len(mixture.experts)

    @property
    def held(self) -> int:
        """Bytes of experts that are in memory, whole windows of `AROUND`."""
        return self.described.held


def least_limit(matrices: int, experts: int) -> int:
    """The most bytes that a keeper needs for a layer with `matrices` bytes of experts' matrices."""
    return matrices + experts * MOST_PLACES * 2 * AROUND


class _Files:
    """The mapped files of this process."""

    def __init__(self) -> None:
        self.ends = {low: high for low, high, *_ in _mapped()}
        self.starts, self.used = sorted(self.ends), set[int]()

    def places(self, expert: Expert) -> list[tuple[int, int]]:
        """The windows of an expert as addresses and sizes; adjacent ones are merged. Raises ValueError."""
        found = list[tuple[int, int]]()
        spans = ((x.data_ptr(), x.data_ptr() + x.nbytes) for part in expert for x in _tensors(part.packed))
        for first, last in sorted(spans):
            start = self.starts[i - 1] if (i := bisect_right(self.starts, first)) else 0
            if last > (end := self.ends.get(start, 0)):
                raise ValueError("a matrix of an expert lies in no mapped file")
            self.used.add(start)
            low, high = max(first // AROUND * AROUND, start), min(-(-last // AROUND) * AROUND, end)
            if found and low <= sum(found[-1]):
                low, high = found[-1][0], max(high, sum(found.pop()))
            found.append((low, high - low))
        return found

    def protect(self) -> None:
        """Make the mappings of experts read-only. Raises ValueError where one has pages that its file does not have."""
        for start in self.used:
            _call("mprotect", start, self.ends[start] - start, READ_ONLY)
        safe = [(low, high) for low, high, rights, own in _mapped() if rights[1] == "-" and own == 0]
        for start in self.used:  # the system may join neighbours
            if not any(low <= start and self.ends[start] <= high for low, high in safe):
                raise ValueError("a mapped file that has experts was written to in memory")


def _mapped() -> Iterator[tuple[int, int, str, int]]:
    """The mappings of files: ends, rights, and how much of each differs from the file. Raises ValueError."""
    try:
        text = MAPPINGS.read_text("utf-8", "replace")
    except OSError:
        raise ValueError("the system does not say which files are mapped: Linux does") from None
    for low, high, rights, written, swapped in _FILE.findall(text):
        yield int(low, 16), int(high, 16), rights, int(written) + int(swapped)


def _call(name: str, start: int, size: int, what: int) -> None:
    """Call a function of sys/mman.h. Raises ValueError where the system refuses."""
    if getattr(ctypes.CDLL(None), name)(ctypes.c_void_p(start), ctypes.c_size_t(size), what):
        raise ValueError(f"the system refuses {name} of a mapped file, as where memory is locked")


def _tensors(matrix: Packed | PackedParts) -> Iterator[Tensor]:
    """All tensors of a matrix that products read, except its bias."""
    for part in matrix.parts if isinstance(matrix, PackedParts) else [matrix]:
        values = part.groups[2:] if part.groups else (part.scale_O,)
        yield from (x for x in (part.panels, *values, part.order_I) if x is not None)
