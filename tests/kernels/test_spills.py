"""No AVX-512 code stores the bits of a mask to the stack and reads more bits back, as g++ 12.2 does.

It spills a __mmask16 that was widened to 32 bits by `kmovw`, 16 bits, and reloads 32, of which the upper ones are what
lay there before (RenderKit/embree#574).
"""

import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from kernels import cpp, processor
from kernels.processor import TARGETS

KERNELS = Path(cpp.__file__).parent
BITS = {"b": 8, "w": 16, "d": 32, "l": 32, "q": 64}
SLOT = re.compile(r"(?<![\w,(])-?(?:0x[0-9a-f]+)?\(%r[sb]p\)")
NAMED = re.compile(r"kmov|movs|movz|vmov(?=[dq]$)|vpbroadcast|vpinsr")  # the next letter says how much they move
REGISTERS = {
    64: r"%r(\d+|[a-d]x|[sd]i|[sb]p)",
    32: r"%(e\w\w|r\d+d)",
    16: r"%([a-d]x|[sd]i|[sb]p|r\d+w)",
    8: r"%([a-d][lh]|[sd]il|[sb]pl|r\d+b)",
    512: r"%[xyz]mm\d+",
}
# The bits are live across an instruction that leaves no register for them.
SPILLED = """
#include "vectors.h"
void spilled(const float* from, float least, int* to) {
    uint32_t bits = bits_of(*(const Floats*)from >= least);
    asm volatile("" ::: "rax", "rbx", "rcx", "rdx", "rsi", "rdi", "r8", "r9", "r10", "r11", "r12", "r13", "r14", "r15");
    for (; bits; bits &= bits - 1) *to++ = __builtin_ctz(bits);
}
"""
needs_objdump = pytest.mark.skipif(shutil.which("objdump") is None, reason="no objdump (binutils)")
needs_compiler = pytest.mark.skipif(
    cpp.compiler() is None or processor.machine() != "x86_64", reason="no C++ compiler for x86-64"
)


def bits(name: str, operands: list[str]) -> int:
    """How many bits an instruction, in objdump's AT&T syntax, moves between its registers and memory."""
    if NAMED.match(name):
        letters = NAMED.sub("", name)
        return BITS.get(letters[:1], 512)
    widths = [width for width, names in REGISTERS.items() for one in operands if re.fullmatch(names, one)]
    return widths[0] if widths else BITS.get(name[-1], 64)


def instructions(listing: str) -> Iterator[tuple[str, str, list[str]]]:
    """(function, name, operands) of what objdump prints."""
    function = ""
    for line in listing.splitlines():
        if found := re.match(r"[0-9a-f]+ <(.*)>:$", line):
            function = found[1]
        elif found := re.match(r"\s*[0-9a-f]+:\s+(?:(?:lock|rep\w*|notrack)\s+)?(\w+)\s*([^#<]*)", line):
            yield function, found[1], [part.strip() for part in re.split(r",(?![^(]*\))", found[2])]


def torn(listing: str) -> list[str]:
    """Where more bits of a stack slot are read than the last store before it, which was of a mask, has written."""
    found, stored = [], dict[tuple[str, str], int]()
    for function, name, operands in instructions(listing):
        slots = [operand for operand in operands if SLOT.fullmatch(operand.lstrip("*"))]
        if not slots or name == "lea":
            continue
        slot = function, slots[0].lstrip("*")
        writes = operands[-1] == slots[0] and re.match(r"k?mov|v\w*mov|set|pop", name) is not None
        if writes:
            stored.pop(slot, None)
            if name.startswith("kmov"):
                stored[slot] = bits(name, operands)
        elif bits(name, operands) > stored.get(slot, 512):
            found.append(f"{function}: {name} {','.join(operands)}")
    return found


def listing(path: Path) -> str:
    command = ["objdump", "-d", "--no-show-raw-insn", path]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize(
    ("store", "read", "expected"),
    [
        ("kmovw  %k1,-0x4(%rsp)", "mov    -0x4(%rsp),%eax", True),
        ("kmovw  %k1,-0x4(%rsp)", "mov    -0x4(%rsp),%r11", True),
        ("kmovw  %k1,-0x4(%rsp)", "tzcnt  -0x4(%rsp),%r10d", True),
        ("kmovw  %k1,-0x4(%rsp)", "cmpl   $0x0,-0x4(%rsp)", True),
        ("kmovw  %k1,-0x4(%rsp)", "kmovd  -0x4(%rsp),%k2", True),
        ("kmovb  %k1,-0x4(%rsp)", "movzwl -0x4(%rsp),%eax", True),
        ("kmovw  %k1,-0x4(%rsp)", "vpbroadcastd -0x4(%rsp),%zmm1", True),
        ("kmovw  %k1,-0x4(%rsp)", "movzwl -0x4(%rsp),%eax", False),
        ("kmovw  %k1,-0x4(%rsp)", "kmovw  -0x4(%rsp),%k2", False),
        ("kmovw  %k1,-0x4(%rsp)", "mov    -0x4(%rsp),%r11w", False),
        ("kmovw  %k1,-0x4(%rsp)", "lea    -0x4(%rsp),%rax", False),
        ("kmovw  %k1,-0x4(%rsp)", "mov    -0x8(%rsp),%eax", False),
        ("kmovw  %k1,-0x4(%rsp)", "mov    -0x4(%rbp),%eax", False),
        ("kmovd  %k1,-0x4(%rsp)", "mov    -0x4(%rsp),%eax", False),
        ("kmovd  %k1,-0x4(%rsp)", "vmovd  -0x4(%rsp),%xmm0", False),  # g++ 16
        ("kmovw  %k1,-0x4(%rsp)", "vmovd  -0x4(%rsp),%xmm0", True),
        ("kmovw  %k1,(%rax,%rsp,4)", "mov    (%rsp),%eax", False),
        ("mov    %ax,-0x4(%rsp)", "mov    -0x4(%rsp),%eax", False),  # not of a mask
    ],
)
def test_the_scanner_finds_torn_masks(store, read, expected):
    text = "0000000000000010 <one>:\n  10:\t{}\n  17:\t{}\n  1c:\tret\n"
    assert bool(torn(text.format(store, read))) == expected
    again = text.replace("{}\n  17", "{}\n  14:\tmov    %eax,-0x4(%rsp)\n  17")
    assert not torn(again.format(store, read)), "the slot has another value"
    other = text.replace("  17", "0000000000000017 <two>:\n  17")
    assert not torn(other.format(store, read)), "a slot is a function's own"


@needs_objdump
@needs_compiler
@pytest.mark.parametrize("level", ["-O1", "-O2", "-O3"])
def test_a_spilled_mask_keeps_its_bits(tmp_path, level):
    source, made = tmp_path / "spilled.cpp", tmp_path / "spilled.o"
    source.write_text(SPILLED)
    flags = ["-std=c++17", level, "-march=x86-64-v4", f"-I{KERNELS}"]
    subprocess.run([cpp.compiler(), *flags, "-c", source, "-o", made], check=True, capture_output=True)
    text = listing(made)
    assert "vcmp" in text and not torn(text)


@needs_objdump
@needs_compiler
@pytest.mark.skipif("COPPICE_KERNELS" in os.environ, reason="a run with kernels that were named builds no others")
@pytest.mark.parametrize("target", [name for name in TARGETS if name.startswith("x86-64-v4")])
def test_no_source_reads_more_of_a_mask_than_it_stored(tmp_path, target):
    """Only `bits_of` widens a mask; the sources that call it are compiled as for a library."""
    files = [file for file in (*cpp.SOURCES, *cpp.HEADERS) if file.parent.name != "processors"]
    callers = [file for file in files if re.search(r"^(?!\s*//).*\bbits_of\(", file.read_text("utf-8"), re.MULTILINE)]
    assert callers and not {*callers} & {*cpp.HEADERS}, "whatever includes such a header calls it too"
    for source in callers:
        made = tmp_path / "compiled.o"
        subprocess.run([cpp.compiler(), *cpp.FLAGS, *TARGETS[target].flags, "-c", source, "-o", made], check=True)
        text = listing(made)
        assert "kmov" in text and "vcmp" in text and not torn(text), source
