"""Packed matrices and their products: against the definition, whatever the sizes, whatever rows are beside a row."""

import pytest
import torch

from kernels import cpp
from kernels.linear import Packed, PackedParts, Steps, dot_products, linear, pack, reference
from kernels.linear.panels import MAX_INT8_WIDTH, PIECE, ROUNDED_UNGROUPED
from kernels.whole_graph import traceable

pytestmark = pytest.mark.skipif(bool(cpp.why_not()), reason=f"no C++ kernels: {cpp.why_not()}")

SIZES = [(64, 16), (1, 32), (100, 72), (130, 5), (768, 256), (257, 1001), (65, 2048), (300, 512)]
COUNTS = (1, 2, 3, 4, 5, 6, 7, 8, 14, 15, 16, 17, 29, 61, 130)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def draw(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def matrix(outs, width, dtype):
    """A packed matrix of rows that came in two blocks, and the rows."""
    scale_O = None
    weight_OI = draw(outs, width, seed=1)
    if dtype == torch.int8:
        weight_OI, scale_O = (weight_OI * 40).clamp(-127, 127), draw(outs, seed=3).abs() / 5000
    weight_OI = weight_OI.to(dtype)
    panels = pack([weight_OI[: outs // 3], weight_OI[outs // 3 :]], dtype, outs, width)
    return Packed(panels, outs, width, scale_O), weight_OI


@pytest.mark.parametrize("dtype", [*DTYPES, torch.int8], ids=str)
@pytest.mark.parametrize(("outs", "width"), SIZES)
def test_packing_keeps_every_element(dtype, outs, width):
    packed, weight_OI = matrix(outs, width, dtype)
    assert reference.unpack(packed).equal(weight_OI)
    assert packed.panels.shape[0] % (PIECE // 16) == 0
    padding = packed.panels.transpose(1, 2).flatten(2).flatten(0, 1)[outs:]
    assert (padding == (128 if dtype == torch.int8 else 0)).all()


@pytest.mark.parametrize("dtype", [*DTYPES, torch.int8], ids=str)
@pytest.mark.parametrize(("outs", "width"), SIZES)
def test_some_outputs_of_a_matrix_are_those_of_the_whole(dtype, outs, width):
    packed, weight_OI = matrix(outs, width, dtype)
    x = draw(5, width)
    for count in {1, min(outs, 70)}:
        ids = torch.randperm(outs, generator=torch.Generator().manual_seed(count))[:count]
        some = packed.rows(ids)
        assert reference.unpack(some).equal(weight_OI[ids]) and some.outs == count
        assert linear(x, some).equal(linear(x, packed)[:, ids])


@pytest.mark.parametrize("of_x", DTYPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("outs", "width"), SIZES)
def test_floats_are_multiplied_to_rounding(of_x, dtype, bias, outs, width):
    packed, weight_OI = matrix(outs, width, dtype)
    bias_O = draw(outs, seed=2).to(of_x) if bias else None
    for count in COUNTS:
        x = draw(count, width, seed=10 + count).to(of_x)
        found, exact = linear(x, packed, bias_O), reference.linear(x.double(), packed, bias_O)
        sizes = x.double().abs() @ weight_OI.double().abs().T + 4  # of what is added up
        allowed = torch.finfo(torch.float32).eps * 16 * sizes + torch.finfo(of_x).eps * exact.abs()
        assert found.dtype == of_x and ((found.double() - exact).abs() <= allowed).all()


@pytest.mark.parametrize("of_x", DTYPES, ids=str)
@pytest.mark.parametrize(("outs", "width"), SIZES)
def test_int8_is_exact_but_for_the_last_rounding(of_x, outs, width):
    """Rows whose steps are whole numbers, which all ways to round agree on."""
    packed, _ = matrix(outs, width, torch.int8)
    weight_OI, bias_O = reference.unpacked(packed), draw(outs, seed=2).to(of_x)
    for count in COUNTS:
        x = (draw(count, width, seed=10 + count) * 30).round().clamp(-127, 127)
        x[:, ::64] = 127
        found, exact = linear(x.to(of_x), packed, bias_O), reference.linear(x.double(), packed, bias_O)
        assert found.dtype == of_x
        allowed = 2 * torch.finfo(of_x).eps * (exact.abs() + bias_O.double().abs())
        if width > ROUNDED_UNGROUPED:  # sums are floats from there on
            allowed += torch.finfo(torch.float32).eps * (x.double().abs() @ weight_OI.double().abs().T + 4)
        assert ((found.double() - exact).abs() <= allowed).all()


def test_int8_rounds_rows_to_the_nearest_step():
    """By a matrix that gives the steps back."""
    width = 200
    identity = Packed(
        pack([torch.eye(width, dtype=torch.int8)], torch.int8, width, width), width, width, torch.ones(width)
    )
    for of_x in DTYPES:
        x = draw(9, width).to(of_x)
        for first in range(0, width, 64):
            part = slice(first, first + 64)
            steps, top = reference.quantize(x[:, part])
            assert (linear(x.float(), identity)[:, part] / top).round().equal(steps)


@pytest.mark.parametrize("of_x", DTYPES, ids=str)
def test_a_large_element_coarsens_only_those_beside_it(of_x):
    """Some elements of real models are a hundred times as large as the rest."""
    width = 512
    packed, _ = matrix(100, width, torch.int8)
    x = draw(5, width).to(of_x).float()
    x[:, 70] = 500
    exact = x.double() @ reference.unpacked(packed).double().T
    found = linear(x, packed).double() - exact
    apart = torch.ones(width).index_fill_(0, torch.arange(64, 128), 0)
    others = linear(x * apart, packed).double() - (x * apart).double() @ reference.unpacked(packed).double().T
    steps = 500 / 127 / 12**0.5 * 8 * reference.unpacked(packed).double().square().mean().sqrt()  # of 64 elements
    assert found.square().mean().sqrt() < 1.5 * steps and others.square().mean().sqrt() < 0.05 * steps


def test_the_largest_int8_products_do_not_overflow():
    for width in (1024, MAX_INT8_WIDTH):
        ones = torch.full((2, width), 127, dtype=torch.int8)
        packed = Packed(
            pack([ones * torch.tensor([[1], [-1]], dtype=torch.int8)], torch.int8, 2, width), 2, width, torch.ones(2)
        )
        assert (linear(torch.ones(1, width), packed) / (127 * 127 * width)).tolist() == [[1, -1]]
    with pytest.raises(ValueError, match="at most 65536"):
        pack([], torch.int8, 1, MAX_INT8_WIDTH + 1)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.int8], ids=str)
@pytest.mark.parametrize("of_x", DTYPES, ids=str)
def test_rows_do_not_depend_on_those_beside_them(dtype, of_x):
    """Or a draft's tokens would not be those of plain decoding, to the bit."""
    packed, _ = matrix(96, 520, dtype)
    x = draw(130, 520, seed=1).to(of_x)
    whole = linear(x, packed)
    for count in COUNTS:
        assert linear(x[:count], packed).equal(whole[:count])
    assert linear(x.view(2, -1, 520), packed).equal(whole.view(2, -1, 96))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_that_is_widened_gives_the_bits_of_float32(dtype):
    """A model that computes in float32 may keep the weights of its checkpoint."""
    packed, weight_OI = matrix(200, 333, dtype)
    full = Packed(pack([weight_OI], torch.float32, 200, 333), 200, 333)
    for count in COUNTS:
        x = draw(count, 333, seed=count)
        assert linear(x, packed).equal(linear(x, full))


def test_what_is_not_finite_stays_in_its_row():
    for dtype in (*DTYPES, torch.int8):
        packed, _ = matrix(70, 40, dtype)
        x = draw(6, 40)
        x[1, 3], x[4, 39] = float("nan"), float("inf")
        assert linear(x, packed).isfinite().all(-1).tolist() == [True, False, True, True, False, True]


def test_other_numbers_of_threads_give_the_same():
    packed, _ = matrix(500, 300, torch.float32)
    x, threads = draw(33, 300), torch.get_num_threads()
    found = linear(x, packed)
    try:
        for count in (1, 3):
            torch.set_num_threads(count)
            assert linear(x, packed).equal(found)
    finally:
        torch.set_num_threads(threads)


def test_compilers_see_an_operator():
    plain, _ = matrix(64, 32, torch.float32)
    x, stepped = draw(3, 32), Packed(plain.panels, 64, 32, steps=Steps(0.1, 0.2))
    traceable()
    for packed in (plain, stepped):
        run = torch.compile(lambda x, packed=packed: linear(x, packed) * 2, backend="eager", fullgraph=True)
        assert run(x).equal(linear(x, packed) * 2)
    assert not linear(x, plain).equal(linear(x, stepped))


def test_dot_products_are_those_of_the_processor():
    assert {torch.float32, torch.int8} <= dot_products() <= {torch.float32, torch.bfloat16, torch.int8}


@pytest.mark.parametrize("of_x", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("rows", [1, 5, 70])
def test_parts_are_their_matrices_side_by_side(rows, of_x):
    """Parts of several formats, with any numbers of outputs."""
    width, outs = 96, (40, 16, 3, 130)
    dtypes = torch.float32, torch.bfloat16, torch.float16, torch.float32
    parts = [matrix(n, width, dtype)[0] for n, dtype in zip(outs, dtypes, strict=True)]
    whole, bias, x = PackedParts(parts), draw(sum(outs), seed=2).to(of_x), draw(rows, width).to(of_x)
    assert (whole.outs, whole.width) == (189, width)
    for b in (None, bias):
        alone = [linear(x, part, own) for part, own in zip(parts, whole.biases(b), strict=True)]
        assert linear(x, whole, b).equal(torch.cat(alone, -1))
    with pytest.raises(ValueError, match="one width"):
        PackedParts([parts[0], matrix(40, 64, torch.float32)[0]])


@pytest.mark.parametrize("of_x", DTYPES, ids=str)
@pytest.mark.parametrize("rows", [1, 5, 70])
def test_static_steps_round_what_goes_in_and_what_comes_out(rows, of_x):
    """Each part by its own; a part without steps has neither."""
    width, outs, steps = 100, (40, 3, 130, 64), (Steps(0.03, 0.11), Steps(0.05), Steps(), Steps(after=0.2))
    plain = [matrix(n, width, torch.float32)[0] for n in outs]
    parts = [Packed(part.panels, part.outs, width, steps=own) for part, own in zip(plain, steps, strict=True)]
    whole, bias, x = PackedParts(parts), draw(sum(outs), seed=2).to(of_x), 2 * draw(rows, width).to(of_x)
    x[0, :3] = torch.tensor([float("nan"), 50.0, -50.0])
    for b in (None, bias):
        expected = [
            reference.round_to(linear(reference.round_to(x, before), part, own), after)
            for part, own, (before, after) in zip(plain, whole.biases(b), steps, strict=True)
        ]
        found = linear(x, whole, b)
        assert found.nan_to_num(7).equal(torch.cat(expected, -1).nan_to_num(7)) and found[0].isnan().all()
        assert rows == 1 or found[1:, : outs[0]].ne(linear(x[1:], plain[0], whole.biases(b)[0])).any()


def test_static_steps_are_few():
    """256 of them, ties to even."""
    x = torch.tensor([[-1e9, -128.5, -2.5, -1.5, -0.4, 0.5, 1.5, 127.4, 1e9]]).expand(16, -1)
    eye = Packed(pack([torch.eye(9)], torch.float32, 9, 9), 9, 9, steps=Steps(before=1.0))
    assert linear(x, eye)[5].tolist() == [-128, -128, -2, -2, 0, 0, 2, 127, 127]
    assert reference.linear(x, eye).equal(linear(x, eye))


@pytest.mark.parametrize("steps", [(-1.0, 0.0), (0.0, float("inf")), (float("nan"), 0.0)])
def test_static_steps_that_are_none(steps):
    with pytest.raises(ValueError, match="steps: expected two that are finite and not negative"):
        Packed(matrix(4, 8, torch.float32)[0].panels, 4, 8, steps=Steps(*steps))
