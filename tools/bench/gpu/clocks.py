"""The clocks of a GPU while a stage runs, by nvidia-smi: a figure of a GPU that was slowed is recognisable."""

import contextlib
import os
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import Any

import torch

PROGRAM = "nvidia-smi"
FIELDS = ("clocks.sm", "clocks.max.sm", "clocks.mem", "power.draw", "power.limit", "temperature.gpu")
REASONS = ("clocks_event_reasons.active", "clocks_throttle_reasons.active")  # of newer drivers, and of older ones
PATIENCE = 20  # seconds of the first answer
# A sample a second. Each has a process of its own, as what one writes in a loop may be lost when it is ended.
LOOP = 'while sleep 1 && kill -0 "$0" 2>/dev/null; do "$@" || exit; done'
IDLE = 1 << 0
SLOWED = {  # bits of the reasons, nvml.h
    1 << 1: "application clocks", 1 << 2: "power cap", 1 << 3: "hardware slowdown", 1 << 4: "sync boost",
    1 << 5: "heat (software)", 1 << 6: "heat (hardware)", 1 << 7: "power brake", 1 << 8: "display clocks",
}  # fmt: skip
Sample = Sequence[float | None]  # the fields in their order, then the bits of the reasons


@contextlib.contextmanager
def watching_clocks(device: torch.device) -> Iterator[dict[str, Any]]:
    """Context that yields a dict, which holds `summed_up` after the block, or {"why_not": ...}."""
    found: dict[str, Any] = {}
    command = query() if device.type == "cuda" else f"{PROGRAM} knows no {device.type}"
    if isinstance(command, str):
        found["why_not"] = command
        yield found
        return
    with tempfile.TemporaryFile("w+") as samples:
        loop = ["sh", "-c", LOOP, str(os.getpid()), *command]
        process = subprocess.Popen(loop, stdout=samples, stderr=subprocess.DEVNULL)
        try:
            yield found
        finally:
            process.kill()
            process.wait()
            samples.seek(0)
            found |= summed_up([sample for line in samples if (sample := parsed(line)) is not None])


@cache
def query() -> list[str] | str:
    """The command that prints a sample of the GPU of this process; or why there is none."""
    uuid, why = getattr(torch.cuda.get_device_properties(torch.cuda.current_device()), "uuid", None), ""
    for reasons in REASONS:
        fields = f"--query-gpu={','.join([*FIELDS, reasons])}"
        command = [PROGRAM, fields, "--format=csv,noheader,nounits", *([] if uuid is None else [f"--id=GPU-{uuid}"])]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)
        except (OSError, subprocess.TimeoutExpired) as error:
            return f"{PROGRAM}: {getattr(error, 'strerror', None) or f'no answer in {PATIENCE} s'}"
        if done.returncode == 0 and parsed(done.stdout) is not None:
            return command
        why = (done.stdout or done.stderr).strip().partition("\n")[0]
    return f"{PROGRAM}: {why}"


def parsed(line: str) -> Sample | None:
    """Parse a line of samples; None for other lines, such as half a line."""
    cells = [cell.strip() for cell in line.split(",")]
    return [number(cell) for cell in cells] if len(cells) == len(FIELDS) + 1 and line.endswith("\n") else None


def number(cell: str) -> float | None:
    """Parse a number (reasons are hexadecimal); None for "[N/A]" and the like."""
    try:
        return int(cell, 16) if cell.startswith("0x") else float(cell)
    except ValueError:
        return None


def summed_up(samples: Sequence[Sample]) -> dict[str, Any]:
    """The least and the most of each field in the samples in which the GPU was not idle (in all, if it always was), and
    the share of these in which it was slowed, by reasons."""
    reasons = [int(sample[-1] or 0) for sample in samples]
    busy = [i for i, bits in enumerate(reasons) if not bits & IDLE] or range(len(samples))
    if not samples:
        return {"why_not": "the stage ended before the first sample"}
    found: dict[str, Any] = {"samples": len(busy)}
    for name, column in zip(FIELDS, zip(*(samples[i] for i in busy), strict=True), strict=False):
        known = [x for x in column if x is not None]
        found[name] = [min(known), max(known)] if known else None
    shares = {name: sum(bool(reasons[i] & bit) for i in busy) / len(busy) for bit, name in SLOWED.items()}
    return found | {"slowed": {name: share for name, share in shares.items() if share}}


def text_of(found: Mapping[str, Any]) -> str:
    """A line for people."""
    if "why_not" in found:
        return f"Clocks of the GPU are not known: {found['why_not']}."

    def most(name: str) -> str:
        return "?" if found[name] is None else f"{found[name][1]:.0f}"

    least = "?" if found["clocks.sm"] is None else f"{found['clocks.sm'][0]:.0f}"
    slowed = ", ".join(f"{name} in {share:.0%}" for name, share in found["slowed"].items()) or "never"
    return (f"The GPU meanwhile, in {found['samples']} samples: {least} to {most('clocks.sm')} MHz of "
            f"{most('clocks.max.sm')}, memory {most('clocks.mem')} MHz; at most {most('power.draw')} of "
            f"{most('power.limit')} W, {most('temperature.gpu')} degrees Celsius. Slowed: {slowed}.")  # fmt: skip
