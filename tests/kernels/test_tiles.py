"""Products and attention by tiles (AMX), in C++ (tiles.h beside this file) and by this processor if it has tiles."""

import ctypes
import subprocess
from pathlib import Path

import pytest
import torch

from kernels import cpp
from kernels.linear import linear, native, reference, tiles
from kernels.processor import TARGETS
from kernels.tree_attention import native as attention
from kernels.tree_attention import tree_attention
from tests.kernels import test_same_bits as same_bits
from tests.kernels.forests import FORESTS, cast, forest, hash_of
from tests.kernels.test_linear import draw, matrix
from tests.kernels.test_tree_attention import naive

BF16 = TARGETS["x86-64-v4-bf16"]
KERNELS = Path(cpp.__file__).parent
OTHERS = """
#include "linear/products.h"
const Products& of_groups(const Matrix& m) { return of_tables(m); }
const Products& of_tables(const Matrix&) { __builtin_trap(); }
"""
IN_USE = """
extern "C" int in_use() {
    unsigned low, high;
    asm volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(1));  // the parts of the state that differ from their first one
    return low >> 18 & 1;
}
"""
SIZES = [(64, 16), (1, 32), (100, 72), (130, 5), (257, 1001), (65, 2048)]
COUNTS = (1, 2, 15, 16, 17, 33, 64, 65, 130)
pytestmark = pytest.mark.skipif(bool(cpp.why_not()), reason=f"no C++ kernels: {cpp.why_not()}")
needs_tiles = pytest.mark.skipif(not cpp.why_not() and not tiles(), reason="this processor has no tiles")


@pytest.fixture(scope="module")
def emulated(tmp_path_factory) -> ctypes.CDLL:
    """The products of whole matrices and tree attention, with tiles in C++."""
    if cpp.compiler() is None:
        pytest.skip("no C++ compiler")
    if reason := BF16.why_not():
        pytest.skip(f"{BF16.name}: {reason}")
    folder = tmp_path_factory.mktemp("tiles")
    others, made = folder / "others.cpp", folder / "tiles.so"
    others.write_text(OTHERS)
    # With -O1 g++ does not fuse multiplications and additions, which the compiled kernels do.
    options = [*cpp.FLAGS, *BF16.flags, "-O2", f"-I{KERNELS}", f'-DTILES_FROM="{Path(__file__).with_name("tiles.h")}"']
    sources = KERNELS / "linear" / "native.cpp", KERNELS / "tree_attention" / "native.cpp", others
    subprocess.run([cpp.compiler(), *options, "-shared", *sources, "-o", made], check=True)
    return ctypes.CDLL(str(made))


@pytest.fixture
def emulate(monkeypatch, emulated):
    """Has `linear` and `tree_attention` call `emulated`."""

    def function(name: str):
        found = getattr(emulated, f"coppice_{name}")
        found.restype, found.argtypes = cpp.OPERATORS.functions[name]
        return found

    for module in (native, attention):
        monkeypatch.setattr(module, "function", function)


def rows(count: int, width: int) -> torch.Tensor:
    return draw(count, width, seed=count).bfloat16()


@pytest.mark.parametrize(("outs", "width"), SIZES)
def test_bfloat16_is_multiplied_to_rounding(emulate, outs, width):
    packed, weight_OI = matrix(outs, width, torch.bfloat16)
    for count in COUNTS:
        x = rows(count, width)
        found, exact = linear(x, packed), reference.linear(x.double(), packed, None)
        sizes = x.double().abs() @ weight_OI.double().abs().T
        allowed = torch.finfo(torch.float32).eps * 16 * sizes + torch.finfo(x.dtype).eps * exact.abs()
        assert ((found.double() - exact).abs() <= allowed).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int8], ids=str)
@pytest.mark.parametrize("width", [1001, 40, 5])
def test_a_row_has_its_bits_beside_any_others(emulate, width, dtype):
    packed, _ = matrix(130, width, dtype)
    x = rows(130, width)
    alone = torch.cat([linear(row[None], packed) for row in x])
    for count in COUNTS:
        assert linear(x[:count], packed).equal(alone[:count])


def test_a_row_that_is_not_finite_changes_no_other(emulate):
    packed, _ = matrix(70, 40, torch.bfloat16)
    x = rows(20, 40)
    x[1, 3], x[17, 39] = float("nan"), float("inf")
    assert linear(x, packed).isfinite().all(-1).nonzero().flatten().tolist() == [*{*range(20)} - {1, 17}]


@pytest.mark.parametrize(("outs", "width"), SIZES)
def test_int8_has_the_bits_of_the_vector_code(request, outs, width):
    """On a processor with tiles those of `emulate`; else of the vector code, with which other tests compare."""
    packed, _ = matrix(outs, width, torch.int8)
    xs = [draw(count, width, seed=count) for count in COUNTS]
    expected = [linear(x, packed) for x in xs]
    request.getfixturevalue("emulate")
    assert all(linear(x, packed).equal(found) for x, found in zip(xs, expected, strict=True))


@needs_tiles
@pytest.mark.parametrize(("outs", "width"), SIZES)
def test_tiles_of_this_processor_have_the_bits_of_the_emulated(request, outs, width):
    packed, _ = matrix(outs, width, torch.bfloat16)
    xs = [rows(count, width) for count in COUNTS]
    expected = [linear(x, packed) for x in xs]
    request.getfixturevalue("emulate")
    assert all(linear(x, packed).equal(found) for x, found in zip(xs, expected, strict=True))


def attend(f, q, k, v):
    return tree_attention(q, k, v, f.layout, scale=0.3, window=64, impl="cpp")


@same_bits.CACHES
@pytest.mark.parametrize("name", FORESTS)
def test_attention_equals_its_definition(emulate, name, kept):
    trees, shape = FORESTS[name]
    f = forest(hash_of(name), trees, **shape)
    own = slice(0, len(f.q_THD) - shape.get("padding", 0))
    inputs, wide = cast(f, torch.bfloat16, kept)
    exact = naive(*wide, f.layout, 0.3, 64)
    tolerance = 4 * torch.finfo(torch.bfloat16).eps
    torch.testing.assert_close(attend(f, *inputs)[own].double(), exact[own], rtol=tolerance, atol=tolerance)


@same_bits.CACHES
@pytest.mark.parametrize("heads", same_bits.HEADS, ids=str)
def test_attention_of_a_row_has_its_bits_beside_any_others(emulate, heads, kept):
    same_bits.test_neighbours_and_where_keys_lie_do_not_show(heads, torch.bfloat16, kept)


@same_bits.CACHES
def test_attention_has_its_bits_in_chunks_of_a_prompt(emulate, kept):
    same_bits.test_chunks_of_a_prompt(torch.bfloat16, kept)


@needs_tiles
@same_bits.CACHES
@pytest.mark.parametrize("name", FORESTS)
def test_attention_by_tiles_of_this_processor_has_the_bits_of_the_emulated(request, name, kept):
    trees, shape = FORESTS[name]
    f = forest(hash_of(name), trees, **shape)
    inputs, _ = cast(f, torch.bfloat16, kept)
    expected = attend(f, *inputs)
    request.getfixturevalue("emulate")
    assert torch.equal(attend(f, *inputs).nan_to_num(7), expected.nan_to_num(7))


@needs_tiles
def test_denormal_numbers_are_zeros_in_tiles_and_in_a_row_alone():
    """Products of about 1e-39, some elements of x below 1e-38, and sums beyond."""
    packed, _ = matrix(70, 1001, torch.bfloat16)
    x = (rows(17, 1001) * draw(1, 1001, seed=5).exp() * 1e-38).bfloat16()
    found = linear(x, packed)
    assert (x.abs() < torch.finfo(torch.float32).tiny).any() and found.count_nonzero() > 0
    assert all(linear(row[None], packed).equal(one[None]) for row, one in zip(x, found, strict=True))
    assert torch.tensor(1e-39) * 0.5 > 0  # the mode is as it was


@needs_tiles
def test_threads_give_their_tiles_back(tmp_path):
    """A thread without tiles saves and restores 8 KB less whenever another takes its place."""
    source, made = tmp_path / "state.cpp", tmp_path / "state.so"
    source.write_text(IN_USE)
    subprocess.run([cpp.compiler(), "-shared", "-fPIC", source, "-o", made], check=True)
    packed, _ = matrix(257, 1001, torch.bfloat16)
    linear(rows(17, 1001), packed)
    assert not ctypes.CDLL(str(made)).in_use()
