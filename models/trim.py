"""Returns memory that the process no longer needs to the system."""

import ctypes
import math
import mmap
import re
from collections.abc import Sequence

import torch
from torch import Tensor

WORTHWHILE = 1 << 20  # the least bytes of a mapping, or of a matrix in one, that are worth a system call
# Matches the system's list of mappings: the ends of each library mapping that is read-only and has no private page.
_LIBRARIES = re.compile(
    r"^([0-9a-f]+)-([0-9a-f]+) r-[-x]p \S+ \S+ \d+ .*\.so[.\d]*\n(?:[A-Z].*\n)*?Anonymous: +0 kB$", re.MULTILINE
)
_MALLOC_TRIM = getattr(ctypes.CDLL(None), "malloc_trim", None)
_MALLOPT = getattr(ctypes.CDLL(None), "mallopt", None)
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8  # malloc.h
LARGE = 8 << 20  # bytes of a block that has pages of its own
_MADVISE = getattr(ctypes.CDLL(None), "madvise", None)


def trim_memory() -> None:
    """Return freed memory to the system, if the C library would keep it (glibc)."""
    if _MALLOC_TRIM is not None:
        _MALLOC_TRIM(0)


def share_heap() -> None:
    """Let threads that start from now on allocate from one heap (glibc), which otherwise gives a thread its own.

    Small blocks that outlive a large request keep the pages around them: a server whose requests move between threads
    would pay for that in each of their heaps.
    """
    if _MALLOPT is not None:
        _MALLOPT(_M_ARENA_MAX, 1)


def return_large_blocks() -> None:
    """Let blocks of `LARGE` bytes or more have pages of their own, which return to the system when they are freed
    (glibc).

    By default that size grows with the blocks that are freed, to 32 MiB. Smaller blocks then leave holes in the heap:
    log-probabilities of lists that grow take the sum of their sizes.
    """
    if _MALLOPT is not None:
        _MALLOPT(_M_MMAP_THRESHOLD, LARGE)
        _MALLOPT(_M_TRIM_THRESHOLD, 2 * LARGE)  # otherwise the heap would shrink and grow again all the time


def own_pages(size: Sequence[int], dtype: torch.dtype) -> Tensor:
    """A tensor of zeros in pages of its own: the system commits them one by one as they are first written, and gets
    them back when the tensor is freed."""
    area = mmap.mmap(-1, math.prod(size) * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_NOHUGEPAGE"):  # a huge page would commit 2 MB for the first byte
        area.madvise(mmap.MADV_NOHUGEPAGE)
    return torch.frombuffer(area, dtype=dtype).view(size)


def release_libraries() -> None:
    """Release code and constants of libraries that the start of the process has touched: 60 MB of torch's.

    Pages that are used again, 20 MB, are read again from the system's file cache. Pages that the process has written
    to, such as addresses that the loader filled in, stay. On Linux only.
    """
    try:
        with open("/proc/self/smaps", encoding="utf-8", errors="replace") as maps:
            found = _LIBRARIES.findall(maps.read())
    except OSError:
        return
    for low, high in found:
        start, size = int(low, 16), int(high, 16) - int(low, 16)
        if size >= WORTHWHILE:
            _forget(start, size)


def is_mapped(weight: Tensor) -> bool:
    """Whether a matrix lies in a mapped file and is large enough to matter."""
    if weight.nbytes < WORTHWHILE or not weight.is_contiguous():
        return False
    start = weight.data_ptr()
    try:
        with open("/proc/self/maps", encoding="utf-8", errors="replace") as maps:
            for line in maps:
                low, high = (int(end, 16) for end in line.partition(" ")[0].split("-"))
                if low <= start < high:
                    return start + weight.nbytes <= high and line.split(maxsplit=5)[4] != "0"  # its inode
    except (OSError, ValueError, IndexError):  # the list exists on Linux only
        pass
    return False


def let_go(rows: Tensor) -> None:
    """Give back the memory of rows of a matrix that `is_mapped`; in any other memory their content would be lost.

    A later access reads them from the file again.
    """
    first = -(-rows.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    _forget(first, (rows.data_ptr() + rows.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE - first)


def _forget(start: int, size: int) -> None:
    """Give back whole pages of mapped files."""
    if size > 0 and _MADVISE is not None:
        _MADVISE(ctypes.c_void_p(start), ctypes.c_size_t(size), mmap.MADV_DONTNEED)
