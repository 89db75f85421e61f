"""Keys and values that are written into slots, and copied to others: every bit is that of the definition."""

from functools import partial

import pytest
import torch

from kernels import kv_fp8, kv_int8
from kernels.kv_int8 import dequantise, quantise
from kernels.kv_kinds import parts
from kernels.kv_write import kv_copier, kv_write
from kernels.kv_write import torch as kv_torch
from kernels.layout import TRASH_SLOT
from tests.kernels.forests import cast, forest
from tests.kernels.test_tree_attention import DTYPES, EVERY_IMPL, run
from tests.marks import needs_cpp

FP8 = kv_fp8.DTYPE
ROWS = [(size, dtype) for size in (1, 5, 16, 33, 80) for dtype in (torch.float32, torch.bfloat16, torch.float16)]
EIGHTS = [  # (impl, device, dtype of the cache): there is no C++ of FP8
    pytest.param(*one.values, dtype, marks=one.marks, id=f"{one.id}-{name}")
    for one in EVERY_IMPL
    for name, dtype in {"int8": torch.int8, "fp8": FP8}.items()
    if (one.id, name) != ("cpp", "fp8")
]


@pytest.mark.parametrize(("impl", "device"), EVERY_IMPL)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_kv_write(impl, device, dtype):
    generator = torch.Generator().manual_seed(0)
    k, v = (torch.full((3, 40, 5), float("nan"), dtype=dtype, device=device) for _ in range(2))
    rows_k, rows_v = (torch.randn(9, 3, 7, generator=generator).to(device, dtype)[..., :5] for _ in range(2))  # strided
    slots = torch.tensor([17, 3, 39, TRASH_SLOT, 8, 30, TRASH_SLOT, 29, 2], device=device)
    kv_write(k, v, rows_k, rows_v, slots, impl=impl)
    for t, slot in enumerate(slots.tolist()):
        if slot != TRASH_SLOT:
            assert k[:, slot].equal(rows_k[t]) and v[:, slot].equal(rows_v[t])
    untouched = [s for s in range(40) if s not in slots]
    assert k[:, untouched].isnan().all() and v[:, untouched].isnan().all()


@pytest.mark.parametrize(("impl", "device", "kept"), EIGHTS)
@pytest.mark.parametrize(("size", "dtype"), ROWS, ids=str)
def test_writes_into_a_cache_of_8_bits(impl, device, kept, size, dtype):
    """Every bit is that of the definition: rows of any magnitude, of which some are 0 or not finite, ties, steps below
    the least normal number. (The interpreter reads bfloat16 below 2^-126 wrongly.)"""
    kind, least = (kv_fp8, -33) if kept == FP8 else (kv_int8, -37)
    generator = torch.Generator().manual_seed(size)
    magnitudes = torch.logspace(-6, 4, 40) if dtype == torch.float16 else torch.logspace(least, 38, 40)
    wide_k, wide_v = (torch.randn(40, 3, size + 2, generator=generator) * magnitudes.view(-1, 1, 1) for _ in range(2))
    wide_v[7], wide_v[8, 1, 0], wide_v[9, :, -3], wide_v[10, 0, 0] = 0, float("nan"), float("inf"), float("-inf")
    if kept == FP8:
        wide_k[11:14] = torch.randint(-60, 61, (3, 3, size + 2), generator=generator) * 2.0**-11
        wide_k[14:17] = torch.randint(-8, 9, (3, 3, size + 2), generator=generator) * 8.0
        wide_k[11:17, :, 0] = 448
    else:
        wide_k[11:14] = torch.randint(-254, 255, (3, 3, size + 2), generator=generator) / 2
        wide_k[11:14, :, 0] = 127
    rows_k, rows_v = (x.to(device, dtype)[..., :size] for x in (wide_k, wide_v))  # strided
    shape = 3, 52, size + (4 if kept == FP8 else 2)  # elements and a scale
    k, v = (torch.zeros(shape, dtype=kept, device=device) for _ in range(2))
    slots = torch.randperm(52, generator=generator)[:40]
    kv_write(k, v, rows_k, rows_v, slots.to(device), impl=impl)
    for cache, rows in ((k, rows_k), (v, rows_v)):
        wanted = torch.zeros(shape, dtype=kept)
        for part, x in zip(parts(wanted), kind.quantise(rows.cpu()), strict=True):
            part[:, slots] = x.transpose(0, 1)
        assert cache.cpu().view(torch.uint8).equal(wanted.view(torch.uint8))


def test_a_row_of_int8():
    x = torch.randn(1000, 64, generator=torch.Generator().manual_seed(0)) * torch.logspace(-30, 30, 1000).unsqueeze(1)
    q, scale = quantise(x)
    assert q.shape == (1000, 64) and q.abs().amax(1).eq(127).all()
    assert torch.allclose(scale.float(), x.abs().amax(1, keepdim=True) / 127, rtol=2**-8)
    assert ((dequantise(q, scale) - x).abs() <= 0.5001 * scale.float()).all()
    strange = torch.stack([torch.zeros(4), torch.tensor([1e-40, 0, 0, 0]), torch.tensor([float("nan"), 1, 2, 3])])
    strange = torch.cat([strange, torch.tensor([[float("inf"), 1, 2, 3]])])
    found = dequantise(*quantise(strange))
    assert found[:2].eq(0).all() and found[2:].isnan().all()


@pytest.mark.parametrize("impl", ["reference", "torch", pytest.param("cpp", marks=needs_cpp)])
def test_an_int8_cache_refuses_what_does_not_fit(impl):
    k, rows, slots = torch.zeros(2, 9, 18, dtype=torch.int8), torch.zeros(3, 2, 16), torch.tensor([2, 3, 4])
    f = forest(2, [(20, 0, 18, 6)])
    (q, *cache), _ = cast(f, torch.float32, torch.int8)
    for bad, match in (
        (
            lambda: kv_write(k, k.clone(), rows[..., :15], rows[..., :15], slots, impl=impl),
            r"k_TGD: expected float32 \[",
        ),
        (lambda: kv_write(k, k.clone(), rows, rows.double(), slots, impl=impl), "v_TGD: expected float32"),
        (
            lambda: kv_write(k, k.clone(), rows.char(), rows.char(), slots, impl=impl),
            "k_TGD: expected a floating-point",
        ),
        (lambda: kv_write(k[..., :2].clone(), k[..., :2].clone(), rows, rows, slots, impl=impl), "more than a scale"),
        (lambda: kv_write(k[..., :5].clone(), k[..., :5].clone(), rows, rows, slots, impl=impl), "multiple of 2 elem"),
        (lambda: run(impl, "cpu", q[..., :15], *cache, f.layout, 1.0), "q_THD: expected float32"),
        (lambda: run(impl, "cpu", q, cache[0], cache[1].float(), f.layout, 1.0), "v_GSD: expected contiguous int8"),
    ):
        with pytest.raises(ValueError, match=match):
            bad()
    if impl == "cpp":
        with pytest.raises(ValueError, match="impl 'cpp': expected float32, bfloat16 or float16 on a CPU"):
            kv_write(k, k.clone(), rows.double(), rows.double(), slots, impl=impl)


@pytest.mark.parametrize(("impl", "device"), EVERY_IMPL)
def test_kv_write_into_one_layer_of_a_cache(impl, device):
    """Layers are views of one tensor; a write must stay in its own."""
    whole = torch.zeros(2, 3, 20, 4, device=device)
    rows = torch.randn(4, 3, 4, device=device)
    slots = torch.tensor([4, 9, 6, 19], device=device)
    kv_write(whole[1], torch.zeros_like(whole[1]), rows, rows, slots, impl=impl)
    assert whole[0].eq(0).all() and whole[1].transpose(0, 1)[[4, 9, 6, 19]].equal(rows)


@pytest.mark.parametrize("make", [kv_copier, lambda k, v: partial(kv_torch.kv_copy, k, v)], ids=["cpp", "torch"])
@pytest.mark.parametrize("target", [[9, 12, 2, 4], [10, 11, 12, 13], [4, 5, 6, 7]], ids=["apart", "row", "overlap"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8], ids=str)
def test_kv_copy(make, target, dtype):
    k, v = ((torch.randn(2, 3, 16, 5) * 40).to(dtype) for _ in range(2))
    wanted = [x.clone() for x in (k, v)]
    source = [5, 4, 7, 2]
    for x in (part for cache in wanted for part in parts(cache)):
        x[:, :, target] = x[:, :, source]
    make(k, v)(source, target)
    assert k.equal(wanted[0]) and v.equal(wanted[1])


@needs_cpp
def test_kv_copy_of_much_and_of_what_cannot_be():
    k, v = torch.randn(3, 4, 40, 512), torch.randn(3, 4, 40, 512)  # enough to be cut among threads
    source, target = list(range(20)), list(range(15, 35))
    wanted = k.index_copy(2, torch.tensor(target), k[:, :, source])
    copy = kv_copier(k, v)
    copy(source, target)
    assert k.equal(wanted)
    for bad in (([1, 2], [3]), ([1], [40]), ([-1], [3])):
        with pytest.raises(ValueError, match="expected slots below 40"):
            copy(*bad)
    with pytest.raises(ValueError, match="v_LGSD: expected contiguous"):
        kv_copier(k, v.transpose(0, 1))
