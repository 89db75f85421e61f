"""Low-rank products beside those of a matrix, against the definition in float64."""

from itertools import product

import pytest
import torch

from kernels import cpp
from kernels.low_rank import Adapters, Factors, LowRank, low_rank
from tests.marks import needs_cpp

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
WIDTH, OUTS = 301, 85


def factors(first: int, outs: int, rank: int, dtype: torch.dtype, scale: float = 0.5) -> Factors:
    g = torch.Generator().manual_seed(outs * 100 + rank)
    a, b = (torch.randn(*shape, generator=g, dtype=torch.float64) for shape in ((rank, WIDTH), (outs, rank)))
    return Factors(first, (a / WIDTH**0.5).to(dtype), b.to(dtype), scale)


def adapters(dtype: torch.dtype, *, packed: bool) -> Adapters:
    one = LowRank([factors(0, 40, 8, dtype), factors(50, 35, 16, dtype, 2.0)], packed=packed)
    return Adapters(OUTS, WIDTH, [one, None, LowRank([factors(7, 64, 33, dtype)], packed=packed)])


def rows(count: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(count)
    x, y = (torch.randn(count, n, generator=g).to(dtype) for n in (WIDTH, OUTS))
    return x, y, (torch.arange(count) + 1) % 4


@pytest.mark.parametrize(("dtype", "kept", "count"), [*product(FLOATS, FLOATS, (1, 3, 41))], ids=str)
@pytest.mark.parametrize("impl", ["torch", pytest.param("cpp", marks=needs_cpp)])
def test_sums_are_those_of_the_definition(impl: str, dtype: torch.dtype, kept: torch.dtype, count: int):
    x, y, numbers = rows(count, dtype)
    want = y.double()
    low_rank(want, x.double(), adapters(kept, packed=False), numbers, impl="reference")
    got, budget = y.clone(), y.clone()
    low_rank(got, x, adapters(kept, packed=impl == "cpp"), numbers, impl=impl)
    low_rank(budget, x, adapters(kept, packed=False), numbers, impl="reference")
    assert not got.equal(y)
    assert (got - want).abs().max() <= 2 * (budget - want).abs().max() + 1e-6
    assert got[numbers % 2 == 0].equal(y[numbers % 2 == 0])  # 0 is none, and 2 has nothing for this matrix


@needs_cpp
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_a_row_does_not_depend_on_the_rows_beside_it(dtype: torch.dtype):
    table = adapters(torch.float32, packed=True)
    x, y, numbers = rows(41, dtype)
    together, threads = y.clone(), torch.get_num_threads()
    low_rank(together, x, table, numbers, impl="cpp")
    try:
        torch.set_num_threads(1)
        for t in range(len(x)):
            alone = y[t : t + 1].clone()
            low_rank(alone, x[t : t + 1], table, numbers[t : t + 1], impl="cpp")
            assert alone.equal(together[t : t + 1]), t
    finally:
        torch.set_num_threads(threads)


@needs_cpp
def test_ranks_of_any_size():
    for rank in (1, 7, 16, 255, 300, 513):
        x, y, _ = rows(5, torch.float32)
        parts, numbers = [factors(3, 70, rank, torch.float32)], torch.tensor([1, 0, 1, 1, 0])
        packed, plain = (Adapters(OUTS, WIDTH, [LowRank(parts, packed=packed)]) for packed in (True, False))
        got, want = y.clone(), y.double()
        low_rank(got, x, packed, numbers, impl="cpp")
        low_rank(want, x.double(), plain, numbers, impl="reference")
        assert (got - want).abs().max() <= 2e-6 * want.abs().max(), rank


def test_packed_factors_are_the_same():
    plains, packeds = (adapters(torch.float16, packed=packed).adapters for packed in (False, True))
    for plain, packed in zip(plains, packeds, strict=True):
        assert (plain is None) == (packed is None)
        for one, other in zip(plain.unpacked() if plain else (), packed.unpacked() if packed else (), strict=True):
            assert one.a_RI.equal(other.a_RI) and one.b_OR.equal(other.b_OR) and one[::3] == other[::3]


def test_what_does_not_fit_is_refused():
    x, y, numbers = rows(3, torch.float32)
    table = adapters(torch.float32, packed=False)
    with pytest.raises(ValueError, match="adapters_T: expected numbers from 0 to 3, got 4"):
        low_rank(y, x, table, torch.tensor([0, 4, 1]))
    with pytest.raises(ValueError, match="y: expected"):
        low_rank(y[:, 1:], x, table, numbers)
    with pytest.raises(ValueError, match="impl: expected one of"):
        low_rank(y, x, table, numbers, impl="cuda")
    with pytest.raises(ValueError, match=r"expected factors of a matrix \[85, 301\]"):
        Adapters(OUTS, WIDTH, [LowRank([factors(60, 26, 4, torch.float32)], packed=False)])
    if cpp.why_not() is None:
        with pytest.raises(ValueError, match="expected adapters in panels"):
            low_rank(y, x, table, numbers, impl="cpp")
