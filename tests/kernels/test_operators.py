"""operators.h is the one place that declares what crosses the border between Python and C++."""

import ctypes
import os
import re
import subprocess
from pathlib import Path

import pytest

from kernels import cpp, operators
from tests.marks import needs_compiler, needs_cpp

KERNELS = Path(__file__).parents[2] / "kernels"
HEADER = """
#include <cstdint>
extern "C" {
// A comment; with void and (brackets).
struct Pair {
    int64_t first, second;  // two of them
    const float* scale;
    float eps;
};
struct Both {
    Pair one;
    const Pair* others;
};
void coppice_run(const Both* both, int64_t n, double x,
                 float eps, void** made);
int64_t coppice_count(const Pair* of);
}
"""


def test_a_header_is_read():
    found = operators.parse(HEADER)
    address, number = ctypes.c_void_p, ctypes.c_int64
    assert found.functions == {
        "run": (None, [address, number, ctypes.c_double, ctypes.c_float, address]),
        "count": (number, [address]),
    }
    pair, both = found.structures["Pair"], found.structures["Both"]
    fields = [("first", number), ("second", number), ("scale", address), ("eps", ctypes.c_float)]
    assert pair._fields_ == fields and both._fields_ == [("one", pair), ("others", address)]
    assert found.layout == [32, 0, 8, 16, 24, 40, 0, 32]


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("int64_t first, second", "int first, second"),
        ("int64_t first, second", "int64_t first[2]"),
        ("int64_t first, second", "int64_t *first, second"),
        ("Pair one", "Other one"),
        ("int64_t n", "int64_t"),
        ("int64_t n", "int32_t n"),
        ("int64_t n", "Pair n"),
        ("void coppice_run", "inline void coppice_run"),
        ("struct Pair", "/* strict? */ struct Pair"),
        ("void coppice_run", "void other_run"),
        ("struct Both {", "struct Both : Pair {"),
    ],
)
def test_another_form_is_refused(old, new):
    assert old in HEADER
    with pytest.raises(ValueError, match=r"operators.h: expected"):
        operators.parse(HEADER.replace(old, new))


def library(tmp_path, declared, functions=("run", "count")):
    """The library that a compiler makes of the header, and of functions with these names."""
    sources = [tmp_path / "table.cpp", tmp_path / "functions.cpp"]
    sources[0].write_text(declared.table())
    sources[1].write_text("".join(f'extern "C" void coppice_{name}() {{}}\n' for name in functions))
    made = tmp_path / f"{os.urandom(8).hex()}.so"
    subprocess.run([cpp.compiler(), "-fPIC", "-shared", "-o", made, *sources], check=True)
    return ctypes.CDLL(str(made))


@needs_compiler
def test_the_compiler_and_ctypes_are_compared(tmp_path):
    declared = operators.parse(HEADER)
    assert declared.differences(library(tmp_path, declared)) is None
    assert declared.differences(library(tmp_path, declared, ["run"])) == "lacks count"
    assert declared.differences(library(tmp_path, operators.parse('extern "C" {}'))).endswith("got []")
    for old, new in (("float eps;", "double eps, more;"), ("int64_t first, second", "int64_t second, third, first")):
        other = operators.parse(HEADER.replace(old, new, 1))
        reason = other.differences(library(tmp_path, declared))
        assert reason.startswith("lays out its structures (Pair, Both) otherwise than Python: expected sizes and")


@needs_compiler
@pytest.mark.parametrize(
    "change", [("int64_t threads, char", "int32_t threads, char"), ("coppice_kv_copy", "coppice_x")]
)
def test_the_compiler_refuses_functions_that_the_header_does_not_declare(change, tmp_path):
    for header in cpp.HEADERS:
        copy = tmp_path / header.relative_to(KERNELS)
        copy.parent.mkdir(exist_ok=True)
        copy.write_text(header.read_text("utf-8"))
    (tmp_path / "kv_write").mkdir()
    [path] = (KERNELS / "kv_write").glob("*.cpp")
    source, text = tmp_path / "kv_write" / path.name, path.read_text("utf-8")
    assert change[0] in text
    command = [cpp.compiler(), *cpp.FLAGS, "-fsyntax-only", source]
    source.write_text(text)
    assert subprocess.run(command, capture_output=True).returncode == 0
    source.write_text(text.replace(*change))
    refused = subprocess.run(command, capture_output=True, text=True)
    if "clang" not in cpp.compiler() or change[0] != "coppice_kv_copy":  # clang has no such warning
        assert refused.returncode and "coppice_" in refused.stderr


def test_every_source_includes_the_header():
    for source in cpp.SOURCES:
        texts = [source.read_text("utf-8")]
        texts += [source.with_name(name).read_text("utf-8") for name in re.findall(r'#include "(\w+\.h)"', texts[0])]
        assert any('#include "../operators.h"' in text for text in texts), source


def test_every_declared_function_is_called():
    called = {name for name in cpp.OPERATORS.functions if calls_in_cpp(name)}
    for path in KERNELS.rglob("*.py"):
        called |= set(re.findall(r'\b_?(?:function|run)\("(\w+)"', path.read_text("utf-8")))
    assert called == set(cpp.OPERATORS.functions)


def calls_in_cpp(name):
    return sum(source.read_text("utf-8").count(f"coppice_{name}(") for source in cpp.SOURCES) > 1


@needs_cpp
def test_the_library_in_use_agrees():
    assert cpp.OPERATORS.differences(cpp.library()) is None
    assert len(cpp.OPERATORS.layout) > 40
