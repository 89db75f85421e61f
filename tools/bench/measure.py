"""Measuring: interleaved rounds, medians with their spread, the memory of another process, and the machine."""

import contextlib
import os
import platform
import random
import statistics
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from engine.version import __version__
from models.later import later

with later():
    from importlib import metadata

    import torch

    from kernels.linear import Packed

MB = 1e6
K = TypeVar("K")
T = TypeVar("T")


def cores() -> int:
    """Cores that this process may use, at most OMP_NUM_THREADS."""
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    limit = os.environ.get("OMP_NUM_THREADS", "")
    return min(usable, int(limit)) if limit.isdigit() and int(limit) else usable


def progress(text: str) -> None:
    """Print a line of progress to stderr."""
    print(text, file=sys.stderr, flush=True)


def in_turn(
    works: Mapping[K, Callable[[int], T]], rounds: int, *, warm_up: bool = False, what: str = "round"
) -> dict[K, list[T]]:
    """Call several functions in interleaved rounds, so that disturbances of the machine affect all of them.

    Args:
        works: the functions, called with the number of the round, from 0. Their order rotates.
        rounds: number of calls, and of results, of each function.
        warm_up: call each function with round 0 once before, and drop its result.
        what: name of a round in the lines of progress.
    """
    keys, found = list(works), {key: [] for key in works}
    for i in range(-int(warm_up), rounds):
        first = i % len(keys)
        results = {key: works[key](max(i, 0)) for key in keys[first:] + keys[:first]}
        for key in keys if i >= 0 else ():
            found[key].append(results[key])
        progress(f"{what} {i + 1} of {rounds}")
    return found


def ratio(over: Sequence[float], under: Sequence[float]) -> float:
    """The median of ratios, round by round."""
    return statistics.median(a / b for a, b in zip(over, under, strict=True))


def standard_error(values: Sequence[float]) -> float:
    """Standard error of the mean; 0.0 for a single value."""
    return statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else 0.0


def random_tokens(vocab: int, count: int, seed: int = 0) -> list[int]:
    """Random ids, the first three of the vocabulary (special tokens, as a rule) left out."""
    draw = random.Random(seed)
    return [draw.randrange(min(3, vocab - 1), vocab) for _ in range(count)]


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median, minimum and maximum."""
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def weight_bytes(model: torch.nn.Module) -> int:
    """Bytes of the tensors that a model's modules hold, without pages mapped from the checkpoint's file."""
    total = 0
    for module in model.modules():
        for value in [*vars(module).values(), *module.parameters(recurse=False), *module.buffers(recurse=False)]:
            if isinstance(value, Packed):
                value = [value.panels, value.scale_O, *(value.groups or ())]
            for x in value if isinstance(value, list) else [value]:
                if isinstance(x, torch.Tensor):
                    packed = x.layout == torch._mkldnn  # type: ignore[attr-defined]
                    total += int(torch.ops.mkldnn._nbytes(x)) if packed else x.numel() * x.itemsize
    return total


# --- memory of a process ---


def memory(pid: int, field: str) -> int | None:
    """Bytes of a field of /proc/PID/status ("VmRSS", "VmHWM"); None where there is no such file or field."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            name, _, value = line.partition(":")
            if name == field:
                return int(value.split()[0]) * 1024
    return None


class PeakMemory:
    """The peak resident memory of a process inside the `with` block: `.bytes`, or None.

    The kernel's own high-water mark, reset at the start, where it can be reset (Linux); else samples every 2 ms, which
    may miss short peaks. `.sampled` is True then.
    """

    PERIOD = 0.002

    def __init__(self, pid: int):
        self.pid = pid
        self.bytes: int | None = None
        self.sampled = False

    def __enter__(self) -> "PeakMemory":
        self.sampled = not self._reset()
        if self.sampled:
            self._stop = threading.Event()
            self._thread = threading.Thread(target=self._sample, daemon=True)
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self.sampled:
            self._stop.set()
            self._thread.join()
        else:
            self.bytes = memory(self.pid, "VmHWM")

    def _reset(self) -> bool:
        try:
            Path(f"/proc/{self.pid}/clear_refs").write_text("5")
        except OSError:
            return False
        now, mark = memory(self.pid, "VmRSS"), memory(self.pid, "VmHWM")
        return now is not None and mark is not None and mark <= now + 4 * MB  # some sandboxes take the 5 and do nothing

    def _sample(self) -> None:
        while not self._stop.is_set():
            now = memory(self.pid, "VmRSS")
            if now is None:
                return
            self.bytes = max(self.bytes or 0, now)
            time.sleep(self.PERIOD)


# --- the machine ---


def versions() -> dict[str, str | None]:
    """Versions of this package, Python and the engines; None for packages that are not installed."""
    found: dict[str, str | None] = {"coppice": __version__, "python": platform.python_version()}
    found["torch"] = str(torch.__version__)
    for name in ("transformers", "ctranslate2"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = None
    return found


def machine() -> dict[str, Any]:
    """Processor, cores, memory, GPU."""
    cpu = platform.processor() or platform.machine()
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        cpu = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), cpu)
    try:
        total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError):
        total = None
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    vector = torch.backends.cpu.get_cpu_capability()
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else None
    return {"cpu": cpu, "vector": vector, "cores": os.cpu_count(), "memory_bytes": total, "gpu": gpu, "load": load}
