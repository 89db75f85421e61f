"""An FP8 cache: the row that is defined, and what every implementation reads and refuses of it."""

import pytest
import torch

from kernels import checks
from kernels.kv_fp8 import DTYPE, dequantise, quantise
from kernels.kv_kinds import parts
from kernels.kv_write import kv_copier, kv_write
from tests.kernels.forests import cached, cast, forest
from tests.kernels.test_tree_attention import naive, run
from tests.marks import TRITON, needs_cpp

IMPLS = [
    pytest.param("reference", "cpu", id="reference"),
    pytest.param("torch", "cpu", id="torch"),
    *(pytest.param("triton", *device.values, marks=device.marks, id=device.id or "cuda") for device in TRITON),
]


@pytest.mark.parametrize(("dtype", "scales"), [(DTYPE, torch.float32), (torch.int8, torch.bfloat16)], ids=str)
def test_scales_lie_behind_the_elements_of_a_head(dtype, scales):
    cache = torch.zeros(2, 3, 8, 16 + scales.itemsize, dtype=dtype)
    e, scale = parts(cache)
    assert e.shape == (2, 3, 8, 16) and scale.shape == (2, 3, 8, 1)
    e.fill_(1), scale.fill_(1.5)
    assert cache.view(torch.uint8).flatten(-2)[..., : 8 * 16].eq(1).all()
    assert cache.view(torch.uint8).flatten(-2)[..., 8 * 16 :].view(scales).eq(1.5).all()


def test_a_row():
    x = torch.randn(1000, 64, generator=torch.Generator().manual_seed(0)) * torch.logspace(-30, 30, 1000).unsqueeze(1)
    e, scale = quantise(x)
    assert e.view(DTYPE).float().abs().amax(1).eq(448).all()
    assert torch.allclose(scale, x.abs().amax(1, keepdim=True) / 448, rtol=1e-6)
    error = (dequantise(e, scale) - x).abs()
    assert (error <= torch.maximum(x.abs() * 2**-4, scale * 2**-10) * 1.001).all()
    nan, inf = float("nan"), float("inf")
    zeros = torch.tensor([[0.0, 0, 0, 0], [1e-40, 0, 0, 0], [-1e-40, 1e-37, 0, 0]])
    assert dequantise(*quantise(zeros)).eq(0).all()
    strange = torch.tensor([[nan, 1, 2, 3], [inf, 1, 2, 3], [1, 2, 3, -inf]])
    assert dequantise(*quantise(strange)).isnan().all()
    assert quantise(torch.full((1, 4), torch.finfo(torch.float32).max))[1].isfinite().all()


def test_a_row_with_one_large_element_keeps_what_int8_loses():
    from kernels.kv_int8 import dequantise as from_int8
    from kernels.kv_int8 import quantise as to_int8

    x = torch.randn(200, 64, generator=torch.Generator().manual_seed(1))
    errors = lambda x: [(y - x)[:, 1:].square().mean() for y in (dequantise(*quantise(x)), from_int8(*to_int8(x)))]  # noqa: E731
    fp8, int8 = errors(x)
    assert fp8 > 4 * int8
    x[:, 0] = 200
    fp8, int8 = errors(x)
    assert int8 > 4 * fp8


@pytest.mark.parametrize(("impl", "device"), IMPLS)
@pytest.mark.parametrize(
    ("dtype", "magnitude"),
    [
        (torch.float32, 1.0),
        (torch.bfloat16, 1.0),
        (torch.bfloat16, 1e-30),
        (torch.float16, 1e-3),
        (torch.float16, 100.0),
    ],
    ids=str,
)
def test_attention_is_off_by_what_it_computes_in_only(impl, device, dtype, magnitude):
    f = forest(3, [(40, 25, 0, 0), (70, 0, 60, 12)], head_dim=32)
    f.cache.v_LGSD.mul_(magnitude)
    (q, k, v), wide = cast(f, dtype, DTYPE)
    exact = naive(*wide, f.layout, 0.2, None)
    found = run(impl, device, q, k, v, f.layout, 0.2).double()
    tolerance = max(4 * torch.finfo(dtype).eps, 1e-5)
    torch.testing.assert_close(found / magnitude, exact / magnitude, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(("impl", "device"), IMPLS)
def test_every_number_of_e4m3_is_read(impl, device):
    """Each as an element of the only value that a token sees."""
    numbers = torch.arange(256, dtype=torch.uint8).view(4, 64)
    numbers = numbers.where(numbers & 0x7F != 0x7F, 0)  # NaN
    f = forest(1, [(1, 1, 0, 0)] * 4, heads=1, kv_heads=1, head_dim=64)
    k, v = (cached(torch.zeros_like(f.cache.k_LGSD[0]).float(), DTYPE) for _ in "kv")
    e, scale = parts(v)
    e[0, f.layout.write_slots_T], scale[0, f.layout.write_slots_T] = numbers, 0.5
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        found = run(impl, device, torch.zeros(4, 1, 64, dtype=dtype), k, v, f.layout, 1.0)
        wanted = numbers.view(DTYPE).float() / 2
        torch.testing.assert_close(found.squeeze(1).float(), wanted, rtol=0, atol=1e-37)  # the interpreter's bfloat16 0


@pytest.mark.filterwarnings("ignore:All-NaN:RuntimeWarning")  # by the interpreter
@pytest.mark.parametrize(
    ("impl", "device", "dtype"),
    [
        *(pytest.param(*one.values, DTYPE, marks=one.marks, id=one.id) for one in IMPLS),
        pytest.param("cpp", "cpu", torch.int8, marks=needs_cpp, id="int8, cpp"),
    ],
)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_comes_out(impl, device, dtype, bad):
    f = forest(6, [(70, 0, 33, 4)])
    (q, k, v), _ = cast(f, torch.float32)
    for x in (k, v):
        kept = x.clone()
        x[..., 3] = bad
        assert run(impl, device, q, cached(k, dtype), cached(v, dtype), f.layout, 0.25).isnan().all()
        x.copy_(kept)


@pytest.mark.parametrize("target", [[9, 12, 2, 4], [10, 11, 12, 13], [4, 5, 6, 7]], ids=["apart", "row", "overlap"])
def test_slots_are_copied_with_their_scales(target):
    k, v = (cached(torch.randn(2, 3, 16, 8), DTYPE) for _ in range(2))
    source, wanted = [5, 4, 7, 2], [x.clone() for x in (k, v)]
    for x in (part for cache in wanted for part in parts(cache)):
        x[:, :, target] = x[:, :, source]
    kv_copier(k, v)(source, target)
    assert all(x.view(torch.uint8).equal(y.view(torch.uint8)) for x, y in zip((k, v), wanted, strict=True))


@needs_cpp
def test_cpp_refuses_it():
    f = forest(2, [(20, 0, 18, 6)])
    (q, k, v), _ = cast(f, torch.float32, DTYPE)
    rows = torch.zeros(6, 2, 16)
    with pytest.raises(ValueError, match="impl 'cpp': expected a cache on a CPU, and none of FP8"):
        run("cpp", "cpu", q, k, v, f.layout, 1.0)
    with pytest.raises(ValueError, match="impl 'cpp': expected a cache on a CPU, and none of FP8"):
        kv_write(k, v, rows, rows, f.layout.write_slots_T, impl="cpp")


@pytest.mark.parametrize("impl", ["reference", "torch"])
def test_what_does_not_fit_is_refused(impl):
    k, rows, slots = torch.zeros(2, 8, 20, dtype=DTYPE), torch.zeros(3, 2, 16), torch.tensor([2, 3, 4])
    for shape, message in (((2, 8, 4), "more than a scale's 4 bytes"), ((2, 3, 9), "multiple of 4 elements")):
        with pytest.raises(ValueError, match=message):
            checks.kv_write(torch.zeros(shape, dtype=DTYPE), torch.zeros(shape, dtype=DTYPE), rows, rows, slots)
    for new, message in ((rows[..., :15], "k_TGD: expected float32"), (rows.char(), "a floating-point dtype")):
        with pytest.raises(ValueError, match=message):
            kv_write(k, k.clone(), new, new, slots, impl=impl)
    with pytest.raises(ValueError, match="v_GSD: expected contiguous float8_e4m3fn"):
        kv_write(k, k.char(), rows, rows, slots, impl=impl)
