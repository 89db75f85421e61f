"""The reader of machine code; `compile_kernels.py` reads what the compiler makes with it."""

import ast
from pathlib import Path
from types import SimpleNamespace

from tests.kernels import sass

LISTING = """
        /*0000*/                   MOV R1, c[0x0][0x28] ;                     /* 0x00000a0000017a02 */
        /*0010*/                   LDG.E.128.SYS R4, desc[UR4][R2.64] ;       /* 0x0000 */
        /*0020*/             @!P0  LDGSTS.E.BYPASS.128 [R9], [R2.64] ;        /* 0x0000 */
        /*0030*/                   HMMA.16816.F32.BF16 R8, R4, R6, R8 ;       /* 0x0000 */
        /*0040*/             @P1   BRA 0x60 ;                                 /* 0x0000 */
        /*0050*/                   BAR.SYNC.DEFER_BLOCKING 0x0 ;              /* 0x0000 */
        /*0060*/             @!UP0 BRA `(.L_x_1) 0x20 ;                       /* 0x0000 */
        /*0070*/                   FADD R1, R1, R2 ;                          /* 0x0000 */
        /*0080*/              @P2  BRA 0x70 ;                                 /* 0x0000 */
        /*0090*/                   EXIT ;                                     /* 0x0000 */
        /*00a0*/                   BRA 0xa0;                                  /* 0x0000 */
"""


def test_loops_are_jumps_backwards():
    assert sass.loops(LISTING) == [
        {"LDGSTS": 1, "HMMA": 1, "BRA": 2, "BAR": 1},
        {"FADD": 1, "BRA": 1},
    ]


def test_main_loops_multiply_matrices(monkeypatch):
    monkeypatch.setattr(sass, "printed", lambda compiled, flag: LISTING)
    assert [loop["HMMA"] for loop in sass.main_loops(None)] == [1]


def test_registers_and_spills_are_read(monkeypatch):
    line = " Function _attend:\n  REG:158 STACK:8 SHARED:0 LOCAL:0 CONSTANT[0]:720 TEXTURE:0\n"
    monkeypatch.setattr(sass, "printed", lambda compiled, flag: line)
    assert sass.usage(SimpleNamespace()) == (158, 8)


def test_what_comes_before_the_wait():
    """On all ways: a jump past the wait counts, a call that comes back does not."""
    assert sass.before_the_wait(LISTING) is None
    assert sass.before_the_wait(LISTING.replace("MOV R1, c[0x0][0x28]", "ACQBULK")) == []
    later = LISTING.replace("FADD R1, R1, R2", "ACQBULK")
    assert sass.before_the_wait(later) == ["LDG", "LDGSTS"]
    jumped = LISTING.replace("MOV R1, c[0x0][0x28]", "@P0 BRA 0x80").replace(
        "LDG.E.128.SYS R4, desc[UR4][R2.64]", "ACQBULK"
    )
    assert sass.before_the_wait(jumped) == ["EXIT"]
    called = LISTING.replace("MOV R1, c[0x0][0x28]", "CALL.REL.NOINC 0x70")
    called = called.replace("@P2  BRA 0x70", "RET.REL.NODEC R2 0x0").replace("LDG.E.128.SYS R4", "ACQBULK R4")
    assert sass.before_the_wait(called) == []


def test_roots_are_rounded_to_nearest():
    """A GPU's fast root, and a quotient by it, would put one error on all elements of a row: `inverse_root`."""
    kernels, calls = Path(__file__).parents[2] / "kernels", set()
    for file in kernels.rglob("*.py"):
        nodes = ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        calls |= {ast.unparse(node.func) for node in nodes if isinstance(node, ast.Call)}
    assert "tl.sqrt_rn" in calls and not calls & {"tl.sqrt", "tl.rsqrt", "tl.math.sqrt", "tl.math.rsqrt"}


def test_kernels_that_may_be_launched_early_begin_by_waiting():
    """Nothing stands before it in the source; `compile_kernels.py` reads what the compiler makes of that."""
    kernels, found = Path(__file__).parents[2] / "kernels", []
    for file in kernels.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef) and "EARLY" in {each.arg for each in node.args.args}:
                body = node.body[ast.get_docstring(node) is not None :]
                found.append((node.name, ast.unparse(body[0])))
    assert found.pop(found.index(("after_the_last", "if EARLY:\n    gdc_wait()\n    gdc_launch_dependents()")))
    assert len(found) >= 16 and {first for _, first in found} == {"after_the_last(EARLY)"}
