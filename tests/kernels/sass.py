"""Machine code of compiled Triton kernels: registers, spills, and the instructions of loops. No GPU is needed."""

import re
import subprocess
import tempfile
from collections import Counter
from pathlib import Path

PRODUCTS = ("HMMA", "HGMMA")  # of matrix units
WAIT = "ACQBULK"  # for the end of the kernel before, griddepcontrol.wait in PTX
# What touches the device's memory, ends a program, or jumps nobody knows where.
UNSAFE = re.compile(r"(LD|ST|LDG|STG|LDGSTS|ATOM|ATOMG|RED|REDG|UTMA\w+|UBLK\w+|CCTL|EXIT|BRX\w*|JMP\w*)$")
ENDS = ("RET", "EXIT")


def usage(compiled):
    """Registers of a thread, and bytes of its stack, into which registers are spilled."""
    found = re.search(r"REG:(\d+) STACK:(\d+)", printed(compiled, "-res-usage"))
    return int(found[1]), int(found[2])


def main_loops(compiled):
    """The loops that multiply matrices, in the order of their ends, as `loops` counts them."""
    return [loop for loop in loops(printed(compiled, "-sass")) if any(loop[name] for name in PRODUCTS)]


def before_the_wait(listing):
    """Instructions that touch the device's memory, or end the program, on any way on which a kernel has not waited yet
    for the end of the one before it; None if there is no wait."""
    instructions = instructions_of(listing)
    at = {address: i for i, (address, *_) in enumerate(instructions)}
    found, ways, seen = [], [0], set()
    while ways:
        i = ways.pop()
        if i in seen or i >= len(instructions):
            continue
        seen.add(i)
        _, predicate, name, operands = instructions[i]
        if name == WAIT:
            continue
        if UNSAFE.match(name):
            found.append(name)
        target = target_of(operands) if name in ("BRA", "CALL") else None
        ways += [] if target is None else [at[target]]
        if predicate or (name not in ENDS and (name != "BRA" or "," in operands)):
            ways.append(i + 1)
    return sorted(found) if any(name == WAIT for _, _, name, _ in instructions) else None


def instructions_of(listing):
    """(address, predicate, name without what follows the first point, operands) of what cuobjdump prints."""
    pattern = r"^\s+/\*([0-9a-f]{4,5})\*/\s+(@!?U?P\w+\s+)?(\S+?)(?:\.\S+)?(?: ([^;]*))?\s*;"
    return [(int(address, 16), *rest) for address, *rest in re.findall(pattern, listing, re.M)]


def target_of(operands):
    """The address that a jump names; None: it names none."""
    found = re.search(r"0x[0-9a-f]+", operands)
    return None if found is None else int(found[0], 16)


def loops(listing):
    """Instructions by name for each jump backwards in what cuobjdump prints."""
    instructions = instructions_of(listing)
    at = {address: i for i, (address, *_) in enumerate(instructions)}
    found = []
    for i, (_, _, name, operands) in enumerate(instructions):
        first = at.get(target_of(operands) if name == "BRA" else None, i)
        if first < i:
            found.append(Counter(name for _, _, name, _ in instructions[first : i + 1]))
    return found


def printed(compiled, flag):
    import triton

    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        return subprocess.run([tool, flag, file.name], capture_output=True, text=True, check=True).stdout
