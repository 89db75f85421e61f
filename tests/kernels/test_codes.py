"""Matrices of small numbers as a GPU has them: the layout against numbers by hand, products against the definition."""

import os

import pytest
import torch

from kernels.linear import codes
from kernels.linear.codes import Codes, pack_codes, takes, unpacked
from kernels.linear.panels import ABOVE, FIELDS, NIBBLES, SHARES, TABLES
from tests.marks import DEVICES, needs_triton

FORMATS = [  # kind, group, zeros, outs, width, whether columns have another order
    ("int4", 32, False, 70, 96, False),
    ("int4", 128, True, 130, 200, False),
    ("int4", 64, True, 48, 512, True),
    ("int4", 40, False, 5, 40, False),
    ("int8", 1000, False, 33, 1000, False),
    ("int8", 16, True, 20, 72, False),
    ("int8", 128, False, 20, 300, True),
    ("int4", 32, "least", 70, 96, True),
    ("int4", 40, "least", 9, 40, False),
    ("int8", 16, "least", 20, 72, False),
    ("float8", 64, False, 65, 128, False),
    ("float8", 77, False, 8, 77, False),
    ("float4", 32, False, 65, 128, False),
    *((kind, 32, False, 65, 128, False) for kind in TABLES if kind != "float4"),
    ("int1", 64, False, 65, 128, False),
    ("int1", 32, "least", 9, 96, True),
    ("int2", 32, False, 65, 128, False),
    ("int2", 64, True, 48, 512, True),
    ("int2", 32, "least", 9, 96, True),
    ("int5", 32, False, 65, 128, False),
    ("int5", 32, "least", 9, 64, True),
    ("int6", 16, False, 20, 96, False),
    ("int6", 16, "least", 20, 96, True),
]


def draw(kind, size, zeros, outs, width, ordered, seed=0):
    """Numbers, scales and zeros, and the elements that they stand for in float64, columns as those of x."""
    random = torch.Generator().manual_seed(seed)
    most = 2 ** FIELDS[kind] if kind in FIELDS else 16 if kind in NIBBLES else 16 << ABOVE.get(kind, 4)
    numbers = torch.randint(0, most, (outs, width), generator=random, dtype=torch.uint8)
    if kind == "float8":
        numbers[(numbers & 127) == 127] = 0
    groups = -(-width // size)
    scale = (torch.rand(outs, groups, generator=random) / 8 + 0.01).half().float()
    scale = scale.log2().round().exp2() if kind == "float4" else scale
    middle = {"int1": 1.0, "int2": 2.0, "int4": 8.0, "int5": 16.0, "int6": 32.0, "int8": 128.0}.get(kind, 0.0)
    own = (torch.rand(outs, groups, generator=random) * 64 * middle).round().div(32).half().float()
    zero, least = own if zeros is True else None, own / 64 - 0.1 if zeros == "least" else None
    if least is not None:
        least, middle = least.half().float(), middle if kind == "int8" else 0.0
    value = numbers.view(torch.float8_e4m3fn).double() if kind == "float8" else numbers.double()
    value = 2 * value if kind == "int1" else value
    value = (
        torch.tensor(TABLES[kind], dtype=torch.float64)[numbers.int()] * SHARES.get(kind, 1)
        if kind in TABLES
        else value
    )
    values = scale, middle + 0 * scale if zero is None else zero, 0 * scale if least is None else least
    wide = [x.double().repeat_interleave(size, 1)[:, :width] for x in values]
    exact, order = (value - wide[1]) * wide[0] + wide[2], torch.randperm(width, generator=random) if ordered else None
    if ordered:
        exact = exact[:, order.argsort()]
    return (numbers, scale, zero, least), exact, order


def packed(made, kind, size, outs, width, order):
    blocks = zip(*(x.split(7) if x is not None else [None] * -(-outs // 7) for x in made), strict=True)
    return pack_codes(blocks, kind, outs, width, size, order)


@pytest.mark.parametrize(("kind", "size", "zeros", "outs", "width", "ordered"), FORMATS)
def test_elements(kind, size, zeros, outs, width, ordered):
    made, exact, order = draw(kind, size, zeros, outs, width, ordered)
    matrix = packed(made, kind, size, outs, width, order)
    torch.testing.assert_close(unpacked(matrix).double(), exact, rtol=1e-6, atol=1e-6)
    assert matrix.scale_GO.dtype == torch.float16 and matrix.codes_OB.shape[1] == codes.row_bytes(kind, width)


def test_bytes_by_hand():
    numbers = torch.arange(64, dtype=torch.uint8).remainder(16).view(1, 64)
    scale = torch.full((1, 2), 0.1)
    matrix = pack_codes([(numbers, scale, None)], "int4", 1, 64, 32)
    assert matrix.codes_OB[0, :3].tolist() == [0, 0x11, 0x22] and matrix.codes_OB.shape == (1, 32)
    assert matrix.scale_GO.dtype == torch.float32  # a tenth is none of float16
    eight = pack_codes([(torch.tensor([[0, 128, 255]], dtype=torch.uint8), scale[:, :1], None)], "int8", 1, 3, 3)
    assert eight.codes_OB[0, :3].view(torch.int8).tolist() == [-128, 0, 127]
    assert takes("int4", 32, 64) and takes("int4", 24, 24) and not takes("int4", 48, 96) and takes("int8", 48, 96)
    with pytest.raises(ValueError, match="expected a multiple of 16, or the width 64, got 24"):
        pack_codes([], "int8", 1, 64, 24)


@needs_triton
@DEVICES
@pytest.mark.parametrize(("kind", "size", "zeros", "outs", "width", "ordered"), FORMATS)
@pytest.mark.parametrize(("dtype", "rows"), [(torch.float32, 3), (torch.bfloat16, 18), (torch.float16, 1)], ids=str)
def test_products(kind, size, zeros, outs, width, ordered, dtype, rows, device):
    """The error is at most twice that of PyTorch's product in the dtype, as weights are not rounded at all."""
    from kernels.linear import triton

    made, exact, order = draw(kind, size, zeros, outs, width, ordered)
    matrix = packed(made, kind, size, outs, width, order).to(device)
    random = torch.Generator().manual_seed(1)
    x, bias = torch.randn(rows, 2 * width, generator=random).to(dtype), torch.randn(outs, generator=random).to(dtype)
    x = x[:, width:]
    right = x.double() @ exact.T + bias.double()
    plain = (torch.nn.functional.linear(x, exact.to(dtype), bias).double() - right).abs()
    found = triton.linear(x.to(device), matrix, bias.to(device))
    assert found.dtype == dtype and found.shape == (rows, outs)
    error, step = (found.cpu().double() - right).abs(), torch.finfo(dtype).eps * right.abs().max()
    assert error.max() <= 2 * plain.max() + step / 2
    assert error.square().mean().sqrt() <= 2 * plain.square().mean().sqrt() + step / 8
    without = triton.linear(x.to(device).view(rows, 1, width), matrix)
    assert without.shape == (rows, 1, outs)
    torch.testing.assert_close(
        without.view(rows, outs).cpu().double(), right - bias.double(), rtol=0.02, atol=float(step)
    )


@needs_triton
@DEVICES
@pytest.mark.parametrize("splits", [1, 2, 5, 8])
def test_splits_do_not_show(splits, device, monkeypatch):
    """Whatever their number, and twice: counters are as they were."""
    from kernels.linear import triton

    monkeypatch.setattr(triton, "split_count", lambda *_: splits)
    made, exact, _ = draw("int4", 32, False, 150, 400, False)
    matrix, x = packed(made, "int4", 32, 150, 400, None).to(device), torch.randn(20, 400)
    for _ in range(2):
        found = triton.linear(x.to(device), matrix).cpu()
        torch.testing.assert_close(found.double(), x.double() @ exact.T, rtol=1e-5, atol=1e-3)
    assert not triton.counters(x.to(device).device).any()


@needs_triton
@DEVICES
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", ["float", "int4", "int8"])
def test_rows_beside_a_row_do_not_show(kind, dtype, device, monkeypatch, one_order):
    """A few rows by programs that share the width, and many by programs that add up all shares in turn."""
    from kernels.linear import triton

    monkeypatch.setattr(triton, "split_count", lambda _, tiles, blocks: min(5, blocks) if tiles == 2 else 1 / 0)
    size = 1000 if kind == "int8" else 40 if kind == "float" else 32
    outs, width = 150, 1000 if kind == "int8" else 992
    random = torch.Generator().manual_seed(3)
    x, bias = (torch.randn(*shape, generator=random).to(dtype).to(device) for shape in ((150, width), (outs,)))
    if kind == "float":
        exact = torch.randn(outs, width, generator=random)
        matrix = exact.to(dtype).to(device)
    else:
        made, exact, order = draw(kind, size, False, outs, width, False)
        matrix = packed(made, kind, size, outs, width, order).to(device)
    multiply = triton.floats if kind == "float" else triton.linear
    whole = multiply(x, matrix, bias)
    right = x.double().cpu() @ exact.double().T + bias.double().cpu()
    torch.testing.assert_close(whole.cpu().double(), right, rtol=2e-2, atol=float(right.abs().max()) * 5e-3)
    for first, last in ((0, 1), (149, 150), (60, 77), (3, 150)):
        assert multiply(x[first:last], matrix, bias).equal(whole[first:last])


@needs_triton
def test_how_the_width_is_split():
    from kernels.linear import triton

    assert triton.split_count(132, 64, 64) == 4 and triton.split_count(132, 500, 64) == 1
    assert triton.split_count(132, 1, 1000) == 8 and triton.split_count(132, 16, 9) == 2


@needs_triton
def test_what_is_refused():
    from kernels.linear import triton

    made, *_ = draw("int8", 16, False, 4, 32, False)
    matrix = packed(made, "int8", 16, 4, 32, None)
    device = "cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda"
    x = torch.zeros(2, 32, device=device)
    for arguments, message in (
        ((x[:, :16], matrix), "width of 32"),
        ((x.double(), matrix), "float64"),
        ((x, matrix, torch.zeros(3, device=device)), r"bias: expected torch.float32 \[4\]"),
        ((x, Codes("int8", 24, 4, 32, matrix.codes_OB, matrix.scale_GO)), "have no product"),
    ):
        x, of, *bias = arguments
        with pytest.raises(ValueError, match=message):
            triton.linear(x, of.to(device), *bias)


PTX = {
    "mov": lambda a: a,
    "shr": lambda a, n: a >> n,
    "and": lambda a, b: a & b,
    "prmt": lambda a, b, picked: sum(((b << 32 | a) >> 8 * (picked >> 4 * i & 7) & 255) << 8 * i for i in range(4)),
}


def executed(ptx, word, dtype):
    """The registers of instructions on a word of 32 bits; `fma` takes two numbers of the dtype from each."""
    found = {"$4": word}
    for line in ptx.strip("{}\n").split(";\n"):
        name, _, operands = line.strip().partition(" ")
        if name == ".reg":
            continue
        to, *given = operands.rstrip(";").split(", ")
        values = [found[x] if x in found else int(x, 0) for x in given]
        if name.startswith("fma"):
            a, b, c = (torch.tensor([x & 0xFFFF, x >> 16]).to(torch.int16).view(dtype).double() for x in values)
            found[to] = a * b + c
        else:
            found[to] = PTX[name.partition(".")[0]](*values)
    return found


@needs_triton
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("less", [0, 8])
def test_halves_of_bytes_become_numbers_exactly(dtype, less):
    """The instructions that no interpreter runs, one by one, on all bytes."""
    from kernels.linear import triton as products

    name = ("LESS_" if less else "WHOLE_") + ("BF16" if dtype == torch.bfloat16 else "F16")
    ptx = getattr(products, name).value
    assert f".{'b' if dtype == torch.bfloat16 else ''}f16x2" in ptx
    for first in range(0, 256, 4):
        numbers = range(first, first + 4)
        found = executed(ptx, int.from_bytes(bytes(numbers), "little"), dtype)
        assert [*found["$0"], *found["$1"]] == [n % 16 - less for n in numbers]
        assert [*found["$2"], *found["$3"]] == [n // 16 - less for n in numbers]
