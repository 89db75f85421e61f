"""Machine code of compiled Triton kernels: registers, spills, and the instructions of loops. No GPU is needed."""

import re
import subprocess
import tempfile
from collections import Counter
from pathlib import Path

PRODUCTS = ("HMMA", "HGMMA")  # of matrix units


def usage(compiled):
    """Registers of a thread, and bytes of its stack, into which registers are spilled."""
    found = re.search(r"REG:(\d+) STACK:(\d+)", printed(compiled, "-res-usage"))
    return int(found[1]), int(found[2])


def main_loops(compiled):
    """The loops that multiply matrices, in the order of their ends, as `loops` counts them."""
    return [loop for loop in loops(printed(compiled, "-sass")) if any(loop[name] for name in PRODUCTS)]


def loops(listing):
    """Instructions by name, without what follows the first point, for each jump backwards in what cuobjdump prints."""
    instructions = re.findall(
        r"^\s+/\*([0-9a-f]{4,5})\*/\s+(?:@!?U?P\w+\s+)?(\S+?)(?:\.\S+)?(?: ([^;]*))?\s*;", listing, re.M
    )
    at = {int(address, 16): i for i, (address, _, _) in enumerate(instructions)}
    found = []
    for i, (_, name, operands) in enumerate(instructions):
        target = re.search(r"0x[0-9a-f]+", operands) if name == "BRA" else None
        first = at.get(int(target[0], 16), i) if target else i
        if first < i:
            found.append(Counter(name for _, name, _ in instructions[first : i + 1]))
    return found


def printed(compiled, flag):
    import triton

    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        return subprocess.run([tool, flag, file.name], capture_output=True, text=True, check=True).stdout
