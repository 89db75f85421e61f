"""Memory sizes as text, the memory that this process takes and may take, and the work that memory must hold."""

from __future__ import annotations

import re
import resource
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from engine.contract import Search

_MAPPING = re.compile(r"^([0-9a-f]+)-([0-9a-f]+) \S+ \S+ \S+ [1-9]\d*\s+(/(?!dev/).*)", re.MULTILINE)


def read_size(text: str) -> int:
    """Bytes: a number with K, M, G or T (powers of 1024; KB and KiB mean the same). Raises ValueError."""
    found = re.fullmatch(r"(\d{1,18}(?:\.\d{1,9})?) ?([KMGT]?)(?:I?B)?", text.strip().upper(), re.ASCII)
    size = int(float(found[1]) * 1024 ** " KMGT".index(found[2] or " ")) if found else 0
    if not 0 < size < 1 << 63:
        raise ValueError(f"expected a size such as 300000, 512M or 1.5G, got {text!r}")
    return size


def size_text(count: int, rounding: Callable[[float], float] = round) -> str:
    """A number of bytes for people, to a tenth: 1.5 MB."""
    size, units = float(count), ["bytes", "KB", "MB", "GB", "TB"]
    while size >= 1024 and len(units) > 1:
        size /= 1024
        units.pop(0)
    return f"{size:.0f} bytes" if units[0] == "bytes" else f"{rounding(size * 10) / 10:.1f} {units[0]}"


def memory_of_process() -> tuple[int, int]:
    """Bytes of this process: its address space, and the part that is in memory; zeros if the system has no /proc."""
    try:
        space, resident, *_ = Path("/proc/self/statm").read_text("ascii").split()
        return int(space) * resource.getpagesize(), int(resident) * resource.getpagesize()
    except (OSError, ValueError):
        return 0, 0


def mapped_files(root: Path = Path("/")) -> int:
    """Bytes of the files, other than libraries, that this process maps: matrices, which it reads in every step.

    Args:
        root: the root of the file system.
    """
    try:
        text = (root / "proc/self/maps").read_text("utf-8", errors="replace")
    except OSError:
        return 0
    return sum(int(end, 16) - int(begin, 16) for begin, end, path in _MAPPING.findall(text) if ".so" not in path)


def cgroup_limits(root: Path = Path("/")) -> Iterator[int]:
    """The memory limits of the control groups that this process is in, versions 1 and 2.

    Args:
        root: the root of the file system.
    """
    try:
        lines = (root / "proc/self/cgroup").read_text("utf-8").splitlines()
    except (OSError, ValueError):
        return
    for line in lines:
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers and "memory" not in controllers.split(","):
            continue
        base = root / "sys/fs/cgroup" / ("memory" if controllers else "")
        file = "memory.limit_in_bytes" if controllers else "memory.max"
        inside = Path(path.lstrip("/"))
        for group in (inside, *inside.parents):  # in a container the path may be that of the host: the root counts
            try:
                text = (base / group / file).read_text("ascii").strip()
            except (OSError, ValueError):
                continue
            if re.fullmatch(r"\d{1,18}", text) and int(text):  # "max", and 2 ** 63 of version 1, are none
                yield int(text)


@dataclass(frozen=True)
class Workload:
    """The work that has to fit.

    Args:
        search: the search, whose least number of slots the cache must hold; None: one token.
        prompt, new: numbers of tokens.
        parallel: number of searches that share a pass.
        grammars: whether a request may have a grammar.
    """

    search: Search | None = None
    prompt: int = 1
    new: int = 1
    parallel: int = 1
    grammars: bool = True

    @property
    def rows(self) -> int:
        """Rows of log-probabilities that the searches request in a pass, at most. Raises SearchError."""
        from engine.contract.checks import rows_of  # here, because it needs torch

        return self.parallel * (rows_of(self.search) if self.search else 1)

    @property
    def beams(self) -> int:
        """Beams of a search; 1 if it has none."""
        beams = getattr(self.search, "beams", 1)
        return beams if type(beams) is int else 1

    @property
    def slots(self) -> tuple[int, int]:
        """Slots of the cache, at least and at most."""
        from engine.contract.checks import slots_of  # here, because it needs torch

        return slots_of(self.search, self.prompt, self.new) if self.search else (1, 1)

    def __str__(self) -> str:
        beams = f", {self.beams} beams" if self.beams > 1 else ""
        return f"{self.new} new{beams}"
