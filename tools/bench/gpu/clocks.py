"""The clocks of a GPU while a stage runs, by nvidia-smi: a figure that was measured on a slowed GPU is recognisable."""

import contextlib
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

import torch

from tools.bench.measure import progress

PROGRAM = "nvidia-smi"
FIELDS = ("clocks.sm", "clocks.max.sm", "clocks.mem", "power.draw", "power.limit", "temperature.gpu")
REASONS = ("clocks_event_reasons.active", "clocks_throttle_reasons.active")  # drivers from 535 on, and earlier ones
PERIOD = 1000  # milliseconds between samples
PATIENCE = 20  # seconds of the first answer
IDLE = 1 << 0
SLOWED = {  # bits of the reasons, nvml.h
    1 << 1: "clocks set by somebody", 1 << 2: "power cap", 1 << 3: "hardware slowdown", 1 << 4: "sync boost",
    1 << 5: "heat, software", 1 << 6: "heat, hardware", 1 << 7: "power brake", 1 << 8: "display clocks",
}  # fmt: skip
Sample = tuple[float | None, ...]  # the fields in their order, the last one bits of reasons


@contextlib.contextmanager
def watching_clocks() -> Iterator[dict[str, Any]]:
    """Yields what is known after the block, see `summed_up`; {"why_not": ...} where nothing is."""
    found: dict[str, Any] = {}
    command = command_line()
    if isinstance(command, str):
        yield found
        found["why_not"] = command
        return
    with tempfile.TemporaryFile("w+") as samples:
        process = subprocess.Popen([*command, f"--loop-ms={PERIOD}"], stdout=samples, stderr=subprocess.DEVNULL)
        try:
            yield found
        finally:
            process.kill()
            process.wait()
        samples.seek(0)
        found |= summed_up([sample for line in samples if (sample := parsed(line)) is not None])


@cache
def command_line() -> list[str] | str:
    """The command that writes a sample of the GPU of this process; or why there is none."""
    uuid, why = getattr(torch.cuda.get_device_properties(0), "uuid", None), ""
    of = [] if uuid is None else [f"--id=GPU-{uuid}"]
    for reasons in REASONS:
        command = [PROGRAM, *of, f"--query-gpu={','.join([*FIELDS, reasons])}", "--format=csv,noheader,nounits"]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)
        except (OSError, subprocess.TimeoutExpired) as error:
            return f"{PROGRAM}: {getattr(error, 'strerror', None) or 'no answer'}"
        if done.returncode == 0 and parsed(done.stdout.partition("\n")[0]) is not None:
            return command
        why = (done.stdout.strip() or done.stderr.strip()).partition("\n")[0]
    return f"{PROGRAM}: {why}"


def parsed(line: str) -> Sample | None:
    """A sample; None for a line that is none, as the last one may be."""
    cells = [cell.strip() for cell in line.split(",")]
    if len(cells) != len(FIELDS) + 1 or not line.endswith("\n"):
        return None
    return *(number(cell) for cell in cells[:-1]), number(cells[-1])


def number(cell: str) -> float | None:
    """A number, hexadecimal or not; None for "[N/A]" and the like."""
    try:
        return int(cell, 16) if cell.startswith("0x") else float(cell)
    except ValueError:
        return None


def summed_up(samples: Sequence[Sample]) -> dict[str, Any]:
    """The least and the most clocks in MHz of the samples that are not idle (all, if every one is), the most power in
    watts and heat in degrees Celsius, and in which share of these samples the GPU was slowed, by reasons."""
    busy = [sample for sample in samples if not int(sample[-1] or 0) & IDLE] or samples
    if not busy:
        return {"why_not": "the stage was over before the first sample"}

    def column(index: int) -> list[float]:
        return [x for sample in busy if (x := sample[index]) is not None] or [float("nan")]

    sm, most_sm, memory, watts, limit, heat, _ = (column(i) for i in range(len(FIELDS) + 1))
    shares = {
        name: sum(bool(int(sample[-1] or 0) & bit) for sample in busy) / len(busy) for bit, name in SLOWED.items()
    }
    return {
        "samples": len(busy), "sm_mhz": [min(sm), max(sm)], "sm_most_mhz": max(most_sm),
        "memory_mhz": [min(memory), max(memory)], "watts": max(watts), "watts_limit": max(limit), "celsius": max(heat),
        "slowed": {name: share for name, share in shares.items() if share},
    }  # fmt: skip
