"""Multi-head latent attention, absorbed: against expanded keys and values, implementations, what is refused."""

from functools import partial

import pytest
import torch
from torch.nn import functional as F

from kernels.kv_fp8 import DTYPE as FP8
from kernels.kv_kinds import floats, parts, row_width
from kernels.latent import LatentHeads, absorb, absorb_and_write, expand
from kernels.layout import LatentSizes
from kernels.linear import Packed, pack
from kernels.stack import Matrix
from tests.marks import DEVICES, needs_cpp, needs_interpreter

KINDS = [LatentSizes(4, 10, 8, 16, 12, 1e-6, True), LatentSizes(3, 5, 2, 33, 7, 1e-3, False)]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def weights_of(sizes, dtype=torch.float64):
    """The matrices [H, N, C] of keys, [H, V, C] of values, and the norm."""
    draw = torch.Generator().manual_seed(1)
    shapes = (sizes.heads, sizes.plain, sizes.rank), (sizes.heads, sizes.value, sizes.rank), (sizes.rank,)
    return [torch.randn(shape, generator=draw, dtype=torch.float64).to(dtype) / shape[-1] ** 0.5 for shape in shapes]


def heads_of(sizes, dtype):
    keys, values, norm = weights_of(sizes, torch.float32)
    matrices = [pick.T.contiguous() for pick in keys] + [*values]

    def packed(x):
        return Matrix(Packed(pack([x], torch.float32, *x.shape), *x.shape))

    products = [partial(F.linear, weight=y.to(dtype)) for y in matrices]
    chain = None if dtype == torch.float64 else [packed(x) for x in matrices]
    return LatentHeads(sizes, norm.to(dtype), products[: sizes.heads], products[sizes.heads :], chain)


def rows_of(sizes, tokens=9, seed=2):
    widths = sizes.heads * (sizes.plain + sizes.rotated), sizes.rank + sizes.rotated
    draw = torch.Generator().manual_seed(seed)
    return [torch.randn(tokens, width, generator=draw) for width in widths]


@pytest.mark.parametrize("sizes", KINDS, ids=str)
def test_attention_is_that_of_expanded_keys_and_values(sizes):
    """Without a rotation, in float64: a token with all tokens before it."""
    H, N, R, C = sizes.heads, sizes.plain, sizes.rotated, sizes.rank
    keys_HNC, values_HVC, norm_C = (x.float().double() for x in weights_of(sizes))
    queries_TF, latent_TF = (x.double() for x in rows_of(sizes))
    heads = heads_of(sizes, torch.float64)
    made_TGD = absorb(queries_TF, latent_TF, heads, impl="reference").unflatten(1, (H + 1, R + C))
    mask_TS = torch.ones(9, 9).tril().log().double()

    def attend(scores_HTS, values_SC):
        return ((scores_HTS + mask_TS).softmax(-1) @ values_SC).transpose(0, 1).flatten(1)

    row_SD = made_TGD[:, H]
    found_TF = expand(attend(made_TGD[:, :H].transpose(0, 1) @ row_SD.T, row_SD), heads, impl="reference")
    c_TC, key_TR = latent_TF.split([C, R], -1)
    c_TC = c_TC / (c_TC.square().mean(-1, True) + sizes.eps).sqrt() * norm_C
    q_HTN, turned_HTR = queries_TF.unflatten(1, (H, -1)).transpose(0, 1).split([N, R], -1)
    scores_HTS = q_HTN @ (c_TC @ keys_HNC.transpose(1, 2)).transpose(1, 2) + turned_HTR @ key_TR.T
    expected_TF = attend(scores_HTS, c_TC @ values_HVC.transpose(1, 2))
    assert torch.allclose(found_TF, expected_TF, atol=1e-6)


@pytest.mark.parametrize("interleaved", [True, False])
def test_halves_of_what_is_rotated_lie_one_after_the_other(interleaved):
    sizes = LatentSizes(1, 1, 6, 1, 1, 1e-6, interleaved)
    heads = heads_of(sizes, torch.float64)
    queries, latent = torch.arange(7.0).double()[None], torch.arange(7.0).double()[None] + 10
    found = absorb(queries, latent, heads, impl="reference")[0]
    order = [0, 2, 4, 1, 3, 5] if interleaved else [*range(6)]
    assert found[:6].tolist() == [1 + i for i in order] and found[7:13].tolist() == [11 + i for i in order]


@needs_cpp
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("sizes", KINDS, ids=str)
def test_as_near_to_float64_as_pytorch(sizes, dtype):
    exact, heads = heads_of(sizes, torch.float64), heads_of(sizes, dtype)
    queries, latent = (x.to(dtype) for x in rows_of(sizes, 40))
    mixed = torch.randn(40, sizes.heads * sizes.width, generator=torch.Generator().manual_seed(5)).to(dtype)
    for operator, rows in ((absorb, (queries, latent)), (expand, (mixed,))):
        wanted = operator(*(x.double() for x in rows), exact, impl="reference")
        errors = [
            (operator(*rows, heads, impl=impl).double() - wanted).square().mean().sqrt()
            for impl in ("reference", "cpp")
        ]
        assert errors[1] <= 2 * errors[0]


@needs_cpp
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_do_not_feel_each_other(dtype):
    sizes = LatentSizes(6, 64, 16, 96, 32, 1e-6, True)
    heads = heads_of(sizes, dtype)
    queries, latent = (x.to(dtype) for x in rows_of(sizes, 70))
    mixed = absorb(queries, latent, heads)[:, : sizes.heads * sizes.width].contiguous()
    together = absorb(queries, latent, heads), expand(mixed, heads)
    for t in (0, 33, 69):
        one = slice(t, t + 1)
        alone = absorb(queries[one], latent[one], heads), expand(mixed[one], heads)
        assert all(x.equal(y[one]) for x, y in zip(alone, together, strict=True))


def stacked(sizes, dtype, device="cpu"):
    keys, values, norm = (x.to(device) for x in weights_of(sizes, torch.float32))
    return LatentHeads.of_stacked(sizes, norm.to(dtype), keys.to(dtype), values.to(dtype))


@pytest.mark.parametrize("sizes", KINDS, ids=str)
def test_matrices_of_all_heads_as_one_are_those_of_each(sizes):
    one, other = heads_of(sizes, torch.float64), stacked(sizes, torch.float64)
    mixed = torch.randn(9, sizes.heads * sizes.width, dtype=torch.float64)
    for operator, rows in ((absorb, [x.double() for x in rows_of(sizes)]), (expand, [mixed])):
        torch.testing.assert_close(operator(*rows, other, impl="reference"), operator(*rows, one, impl="reference"))
    with pytest.raises(ValueError, match="keys_HNC"):
        LatentHeads.of_stacked(sizes, one.norm_C, *other.stacked[::-1])


WRITES = [  # sizes, dtype, cache, tables of angles
    (KINDS[0], torch.float32, None, 2),
    (KINDS[1], torch.float32, None, 4),
    (LatentSizes(40, 3, 64, 96, 5, 1e-6, True), torch.bfloat16, None, 2),
    (KINDS[0], torch.float16, torch.int8, 4),
    (KINDS[0], torch.bfloat16, FP8, 2),
    *((sizes, torch.float32, None, 0) for sizes in KINDS),
]


@DEVICES
@pytest.mark.parametrize(("sizes", "dtype", "kept", "tables"), WRITES, ids=str)
def test_absorb_and_write_on_a_gpu(sizes, dtype, kept, tables, device):
    """Queries and rows as near to float64 as the definition's; nothing else of the cache is touched."""
    heads = stacked(sizes, dtype, device)
    queries, latent = (x.to(device, dtype) for x in rows_of(sizes))
    draw = torch.Generator().manual_seed(1)
    halves = [torch.rand(9, sizes.rotated // 2, generator=draw).to(device, dtype) for _ in range(tables)]
    angles = [torch.cat([x, x], -1) for x in halves]
    slots_T = torch.tensor([5, 3, 7, 39, 12, 30, 8, 17, 2], device=device)

    def run(impl, wide):
        width = row_width(sizes.width, kept) if kept else sizes.width
        cache = torch.zeros(1, 40, width, dtype=kept or (queries if wide is None else wide).dtype, device=device)
        given = [x if wide is None else x.double() for x in (queries, latent, *angles)]
        weights = heads if wide is None else stacked(sizes, torch.float64, device)
        q_THD = absorb_and_write(cache, *given[:2], weights, given[2:], slots_T, impl=impl)
        rows_SD = floats(parts(cache), torch.float64)[0]
        untouched = [slot for slot in range(40) if slot not in slots_T.tolist()]
        assert not rows_SD[untouched].any()
        return q_THD.double(), rows_SD

    exact, plain, found = run("reference", queries.double()), run("reference", None), run("triton", None)
    for x, y, z in zip(exact, plain, found, strict=True):
        assert (z - x).abs().max() <= 2 * (y - x).abs().max() + 1e-6


@needs_interpreter
@pytest.mark.parametrize("alike", [None, 1.0, -1.0])
def test_a_gpus_fast_root_and_quotient_do_not_show(alike, monkeypatch):
    """All elements of a latent have one factor, and would share its error: here one element, the definition's bits."""
    from tests.interpreter import err_as_gpus

    err_as_gpus(monkeypatch, alike)
    sizes = LatentSizes(1, 1, 2, 1, 1, 1e-6, True)
    heads, (queries, latent) = stacked(sizes, torch.float32, "cpu"), rows_of(sizes, 99)
    caches = torch.zeros(2, 1, 101, sizes.width)
    for cache, impl in zip(caches, ("reference", "triton"), strict=True):
        absorb_and_write(cache, queries, latent, heads, (), torch.arange(2, 101), impl=impl)
    assert caches[0].any() and caches[0].equal(caches[1])


@needs_cpp
def test_what_does_not_fit_is_refused():
    sizes = KINDS[0]
    heads, (queries, latent) = heads_of(sizes, torch.float32), rows_of(sizes)
    with pytest.raises(ValueError, match="queries_TF"):
        absorb(queries[:, 1:], latent, heads)
    with pytest.raises(ValueError, match="latent_TF"):
        absorb(queries, latent[1:], heads)
    with pytest.raises(ValueError, match="mixed_TF"):
        expand(queries, heads)
    slots_T, angles = torch.arange(len(latent)), [torch.ones(len(latent), sizes.rotated)] * 2
    cache = torch.zeros(1, 9, sizes.width)
    for bad, what in (
        ((cache[..., 1:].contiguous(), angles, slots_T), "k_TGD"),
        ((cache, angles[:1], slots_T), "angles: expected 0, 2 or 4, got 1"),
        ((cache, [x[:, 1:] for x in angles], slots_T), "angles: expected"),
        ((cache, angles, slots_T + 1), "slots_T: expected slots from 0 to 8, got 9"),
    ):
        with pytest.raises(ValueError, match=what):
            absorb_and_write(bad[0], queries, latent, heads, *bad[1:])
    with pytest.raises(ValueError, match="impl: expected one of reference, triton"):
        absorb_and_write(cache, queries, latent, heads, angles, slots_T, impl="cpp")
    with pytest.raises(ValueError, match="impl: expected one of reference, cpp"):
        expand(queries, heads, impl="triton")
    with pytest.raises(ValueError, match="4 matrices of keys and of values"):
        LatentHeads(sizes, heads.norm_C, heads.keys[1:], heads.values)
    with pytest.raises(ValueError, match="norm_C"):
        LatentHeads(sizes, heads.norm_C[1:], heads.keys, heads.values)
    with pytest.raises(ValueError, match=r"expected a matrix \[16, 10\], got \[12, 16\]"):
        LatentHeads(sizes, heads.norm_C, heads.keys, heads.values, heads.matrices[::-1])
    with pytest.raises(ValueError, match="expected packed matrices"):
        LatentHeads(sizes, heads.norm_C, heads.keys, heads.values).described()
