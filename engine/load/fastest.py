"""Finds the fastest of several ways to multiply a matrix on this machine: measured once, and remembered.

If a processor has only one way, nothing is measured. The times are stored in the folder of the kernels
(`kernels.cpp`), keyed by kernels, processor and question, so a machine always makes the same choice.
"""

import hashlib
import json
import math
import os
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, TypeGuard

import torch
from torch import Tensor

from engine.errors import UsageError
from kernels import cpp, files, processor
from models.checkpoint.files import replacing
from models.formats.floats import FloatLinear, has_kernels, has_products
from models.formats.linear import FORMATS
from models.threads import MACHINE

ROWS = 1, 16, 256  # per product: a sequence, beams or drafts, a prompt
SIDE = 4096  # rows and columns of the matrix, which is larger than most caches
ROUNDS = 3
WORTH = 1.1  # the first way, which takes the least memory or rounds the least, unless another is that much faster
AUTO_FORMATS = "none", "int8"  # formats that --quant auto chooses from, if the machine runs them
PRETEND = "COPPICE_PRETEND"  # environment variable for tests, see `pretended`


@dataclass(frozen=True)
class FormatChoice:
    """The way that was chosen.

    Args:
        name: the name of the way.
        seconds: the time of each way, a geometric mean over `ROWS`; empty: there was nothing to choose from.
    """

    name: str
    seconds: dict[str, float] = field(default_factory=dict)

    def __str__(self) -> str:
        """The reason, relative to the best other way: "1.70x as fast as none, measured here"; "" without a choice."""
        others = {name: seconds for name, seconds in self.seconds.items() if name != self.name}
        if not others:
            return ""
        other = min(others, key=others.__getitem__)
        return f"{others[other] / self.seconds[self.name]:.2f}x as fast as {other}, measured here"


def pretended(device: torch.device) -> bool | None:
    """Whether `auto` chooses as on a CPU with fast products of bfloat16 and int8; None: as on this one.

    Tests set COPPICE_PRETEND to bf16 or no-bf16, to try both choices on every machine.

    Args:
        device: the model's device; for others than a CPU the result is None.

    Raises:
        UsageError: the variable has another value.
    """
    value = os.environ.get(PRETEND, "")
    if value not in ("", "bf16", "no-bf16"):
        raise UsageError(f"{PRETEND}: expected bf16 or no-bf16, got {value!r}", remedy="unset it: it is for tests")
    return value == "bf16" if value and device.type == "cpu" else None


def fastest_dtype(own: torch.dtype, device: torch.device) -> FormatChoice:
    """Choose the dtype to compute in: `own`, the dtype of the weights, or float32."""
    names = [str(dtype).removeprefix("torch.") for dtype in (own, torch.float32)]
    if own == torch.float32 or not has_kernels(own, device) or not has_products(own, device):
        return FormatChoice(names[0])
    ways = {name: lambda name=name: timed(FloatLinear, own, getattr(torch, name), device) for name in names}
    return choose(f"dtype {names[0]}", ways)


def fastest_format(own: torch.dtype, dtype: torch.dtype, device: torch.device) -> FormatChoice:
    """Returns the format, a key of `FORMATS`, for weights of dtype `own` in a model that computes in `dtype`."""
    if device.type != "cpu":
        return FormatChoice("none")  # the format that rounds least; others must be requested
    names = [name for name in AUTO_FORMATS if FORMATS[name].why_not(device) is None]
    if (pretence := pretended(device)) is not None:
        return FormatChoice(names[-1] if pretence else "none")
    ways = {name: lambda name=name: timed(FORMATS[name], own, dtype, device) for name in names}
    return choose(f"format {own} {dtype}", ways)


def choose(question: str, ways: dict[str, Callable[[], list[float]]]) -> FormatChoice:
    """Return the fastest way; the first one unless another is `WORTH` times as fast.

    Args:
        question: identifies the stored answer; it must differ for other ways.
        ways: functions by name that measure seconds per product, for each of `ROWS`.
    """
    if len(ways) == 1:
        return FormatChoice(next(iter(ways)))
    means = {name: math.exp(sum(map(math.log, taken)) / len(taken)) for name, taken in _asked(question, ways).items()}
    first, best = next(iter(ways)), min(means, key=means.__getitem__)
    return FormatChoice(best if means[best] * WORTH < means[first] else first, means)


def timed(format: Any, own: torch.dtype, dtype: torch.dtype, device: torch.device) -> list[float]:
    """Measure a format's products of rows of `dtype`: the shortest of several times, for each of `ROWS`."""
    layer = format([torch.ones(SIDE, SIDE, dtype=own)], dtype=dtype, device=device)
    return [_shortest(layer, torch.ones(rows, SIDE, dtype=dtype)) for rows in ROWS]


@torch.inference_mode()
def _shortest(layer: Callable[[Tensor], Tensor], x: Tensor) -> float:
    taken = []
    for _ in range(1 + ROUNDS):
        began = time.perf_counter()
        layer(x)
        taken.append(time.perf_counter() - began)
    return min(taken[1:])


def _asked(question: str, ways: dict[str, Callable[[], list[float]]]) -> dict[str, list[float]]:
    """Seconds of each way: known to this process, read from the file that keeps them, or measured now."""
    facts = question, ROWS, SIDE, cpp.sources(), cpp.built_ahead(), cpp.why_not(), processor.identity()
    name = f"fastest-{hashlib.sha256(repr(facts).encode()).hexdigest()[:32]}"
    if name in _answers:
        return _answers[name]
    folder = found = None
    with suppress(OSError, RuntimeError, cpp.BuildError):  # if nothing can be stored, each process measures
        real = files.private(cpp.cache_folder() / "kernels", make=True)
        found, folder = files.facts(real, name), real
    if not _sound(found, ways):
        with MACHINE.limited():
            found = {way: measure() for way, measure in ways.items()}
        if folder:
            with suppress(OSError), replacing(folder / f"{name}.json") as file:
                file.write(json.dumps(found).encode())
    _answers[name] = found
    return found


def _sound(found: dict[str, Any] | None, ways: dict[str, Any]) -> TypeGuard[dict[str, list[float]]]:
    """Whether the content of a file is what `_asked` writes."""
    if found is None or list(found) != list(ways):
        return False
    lists = all(isinstance(taken, list) and len(taken) == len(ROWS) for taken in found.values())
    return lists and all(isinstance(x, float) and 0 < x < math.inf for taken in found.values() for x in taken)


_answers: dict[str, dict[str, list[float]]] = {}  # by the names of their files
