"""Tree attention and KV writes: the fast versions against the definition, over random forests.

Every slot that is not live, and the trash slot, holds NaN: whoever reads one is found out. Triton kernels run in the
interpreter where there is no GPU, and compiled by `make gpu`.
"""

import dataclasses
import itertools
import os
import random
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from kernels import same_bits
from kernels.kv_kinds import floats, parts
from kernels.kv_write import kv_write
from kernels.layout import unpack_bits
from kernels.tree_attention import reference, tree_attention
from kernels.tree_attention import torch as plain
from kernels.whole_graph import traceable
from tests import gpu_errors
from tests.kernels.forests import FORESTS, cast, forest, hash_of
from tests.marks import TRITON, interpreted, needs_cpp, needs_interpreter, needs_triton, on_gpu

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
KERNEL_DTYPES = DTYPES[1:]  # what the C++ and the Triton kernels take
EVERY_IMPL = [  # (impl, device)
    pytest.param("reference", "cpu", id="reference"),
    pytest.param("torch", "cpu", id="torch"),
    pytest.param("cpp", "cpu", marks=needs_cpp, id="cpp"),
    pytest.param("triton", "cpu", marks=(needs_triton, interpreted), id="interpreted"),
    pytest.param("triton", "cuda", marks=on_gpu, id="cuda"),
]
CACHES = pytest.mark.parametrize("kept", [None, torch.int8], ids=["as queries", "int8"])  # dtype of keys and values
FAST = EVERY_IMPL[1:]
KERNELS = EVERY_IMPL[2:]


def quick(impl, device, kept=None, name="", seed=0, prefix=0, **_):
    """Whether `make test` has a test of an implementation: the interpreter is slow."""
    rare = (kept is not None and name not in ("", "branches")) or seed > 1 or prefix > 255 or name == "in order"
    return (impl, device) != ("triton", "cpu") or not rare


slow_in_part = pytest.mark.full(unless=quick)


def naive(q_THD, k_GSD, v_GSD, layout, scale, window, cap=None, sinks=None, slopes=None, chunk=None, rows=1):
    """Plain PyTorch in the dtype of its inputs: gather what a token sees, softmax(scale q k) v. Our own reading.

    With `rows` a token's row is multiplied so many times, side by side, and the first result taken.
    """
    k_GSD, v_GSD = (floats(parts(x), q_THD.dtype) for x in (k_GSD, v_GSD))
    group = q_THD.shape[1] // k_GSD.shape[0]
    mask_TW = unpack_bits(layout.ancestry_TC)
    out = torch.zeros_like(q_THD)
    starts, page = layout.token_starts.tolist(), layout.page_size
    for r, (first, last) in enumerate(itertools.pairwise(starts)):
        table = layout.trunk_pages_RP[r].tolist()
        for t in range(first, last):
            at = [(table[i // page] * page + i % page, i) for i in range(int(layout.trunk_seen_T[t]))]
            columns = zip(layout.branch_slots_RW[r].tolist(), layout.branch_positions_RW[r].tolist(), strict=True)
            at += [pair for pair, sees in zip(columns, mask_TW[t].tolist(), strict=True) if sees]
            if window is not None:
                at = [(s, p) for s, p in at if p > int(layout.positions_T[t]) - window]
            if chunk is not None:
                at = [(s, p) for s, p in at if p >= int(layout.positions_T[t]) // chunk * chunk]
            slots, places = [s for s, _ in at], torch.tensor([p for _, p in at])
            if slots:
                k, v = (x[:, slots].repeat_interleave(group, 0) for x in (k_GSD, v_GSD))
                scores = (q_THD[t].unsqueeze(1).expand(-1, rows, -1) @ k.transpose(1, 2)) * scale
                if slopes is not None:  # the softmax does not see what all of a row's scores have in common
                    lines = slopes.unsqueeze(1) * torch.cat([places, layout.positions_T[t : t + 1]]).to(slopes.dtype)
                    lines = lines.to(torch.float64)
                    scores = scores + (lines[:, :-1] - lines[:, -1:]).to(scores.dtype).unsqueeze(1) * scale
                if cap is not None:
                    scores = torch.tanh(scores / cap) * cap
                if sinks is not None:
                    scores = torch.cat([scores, sinks.to(scores.dtype).view(-1, 1, 1).expand(-1, rows, -1)], -1)
                p = torch.softmax(scores, -1)[..., : len(slots)]
                out[t] = (p @ v)[:, 0]
    return out


def run(impl, device, q, k, v, layout, scale, window=None, cap=None, sinks=None, slopes=None):
    """An implementation on a device; the result on the host."""
    moved = [x.to(device) for x in (q, k, v)]
    sinks_H, slopes_H = (None if x is None else x.to(device) for x in (sinks, slopes))
    options = {"scale": scale, "window": window, "cap": cap, "sinks_H": sinks_H, "slopes_H": slopes_H}
    return tree_attention(*moved, layout.to(device), **options, impl=impl).cpu()


@CACHES
@pytest.mark.parametrize("window", [None, 1, 7, 64], ids=lambda w: f"window{w}")
@pytest.mark.parametrize("name", FORESTS)
def test_fast_equals_definition_in_float64(name, window, kept):
    trees, shape = FORESTS[name]
    f = forest(hash_of(name), trees, **shape)
    (q, k, v), _ = cast(f, torch.float64, kept)
    out = tree_attention(q, k, v, f.layout, scale=0.3, window=window)
    expected = naive(q, k, v, f.layout, 0.3, window)
    own = slice(0, len(q) - shape.get("padding", 0))
    torch.testing.assert_close(out[own], expected[own], rtol=1e-11, atol=1e-12)
    torch.testing.assert_close(
        tree_attention(q, k, v, f.layout, scale=0.3, window=window, impl="reference")[own], expected[own],
        rtol=1e-11, atol=1e-12,
    )  # fmt: skip


@slow_in_part
@pytest.mark.parametrize(("impl", "device"), EVERY_IMPL)
@pytest.mark.parametrize("name", FORESTS)
def test_chunks(name, impl, device):
    trees, shape = FORESTS[name]
    f = forest(hash_of(name), trees, **shape)
    own = slice(0, len(f.q_THD) - shape.get("padding", 0))
    for chunk in (1, 7, 64):
        (q, k, v), wide = cast(f, torch.float32, None)
        exact = naive(*wide, f.layout, 0.3, None, chunk=chunk)
        out = run(impl, device, q, k, v, f.layout.in_chunks(chunk), 0.3, chunk)
        torch.testing.assert_close(out[own].double(), exact[own], rtol=1e-5, atol=1e-5)


def random_trees(rng):
    trees = []
    for _ in range(rng.randint(1, 5)):
        trunk = rng.choice([rng.randint(1, 40), rng.randint(1, 600), 16 * rng.randint(1, 20)])
        kind = rng.random()
        if kind < 0.4:
            trees.append((trunk, rng.randint(1, min(trunk, 60)), 0, 0))
        else:
            width, prefill = rng.randint(1, 100), rng.randint(1, min(trunk, 9)) if kind > 0.8 else 0
            trees.append((trunk, prefill, width, rng.randint(1, min(width, 16))))
    return trees


@slow_in_part
@CACHES
@pytest.mark.parametrize(("impl", "device"), KERNELS)
@pytest.mark.parametrize("name", FORESTS)
def test_kernels_equal_definition(name, impl, device, kept):
    trees, shape = FORESTS[name]
    f = forest(hash_of(name), trees, **shape)
    own = slice(0, len(f.q_THD) - shape.get("padding", 0))
    for window, dtype in zip((None, 7, 64), KERNEL_DTYPES, strict=True):
        (q, k, v), wide = cast(f, dtype, kept)
        exact = naive(*wide, f.layout, 0.3, window)
        out = run(impl, device, q, k, v, f.layout, 0.3, window)
        tolerance = max(4 * torch.finfo(dtype).eps, 1e-5)
        torch.testing.assert_close(out[own].double(), exact[own], rtol=tolerance, atol=tolerance)


@slow_in_part
@CACHES
@pytest.mark.parametrize(("impl", "device"), KERNELS)
@pytest.mark.parametrize(
    ("prefix", "queries"),
    [(0, 1), (0, 15), (1, 128), (15, 1), (16, 15), (17, 64), (63, 3), (255, 33), (1000, 15), (4096, 1), (4096, 128)],
)
def test_kernels_over_prefix_lengths(prefix, queries, impl, device, kept):
    f = forest(prefix + queries, [(prefix, 0, queries + 20, queries)], head_dim=32)
    (q, k, v), wide = cast(f, torch.bfloat16, kept)
    exact = reference.tree_attention(*wide, f.layout, 0.2, None)
    plain = (naive(q, k, v, f.layout, 0.2, None).double() - exact).abs()
    ours = (run(impl, device, q, k, v, f.layout, 0.2).double() - exact).abs()
    assert ours.max() <= 2 * plain.max() and ours.pow(2).mean() <= 4 * plain.pow(2).mean()


def check_error(f, dtype, kept, impl, device, *options, fast=None):
    """The error against float64 is at most twice that of plain PyTorch; options: scale, window and cap. Weights may be
    off by `fast` besides, relative to them: an output, their mean of values, by twice that of the largest value. None:
    by a GPU's exponential on a GPU, else by nothing.

    Our PyTorch multiplies the rows of a tree together, which MKL sums in another order than single rows: on Intel's
    AVX-512 with up to four times the error in float32. Its yardstick has many rows as well.
    """
    fast = gpu_errors.FAST * (device == "cuda") if fast is None else fast
    (q, k, v), wide = cast(f, dtype, kept)
    q, wide[0] = (x.nan_to_num(0) for x in (q, wide[0]))
    exact = reference.tree_attention(*wide, f.layout, *options)
    rows = 32 if impl == "torch" and dtype == torch.float32 else 1
    plain = (naive(q, k, v, f.layout, *options, rows=rows).double() - exact).abs()
    ours = (run(impl, device, q, k, v, f.layout, *options).double() - exact).abs()
    tiny = torch.finfo(dtype).eps * (8 if dtype == torch.float64 else 0.01)  # float64 is its own yardstick
    assert ours.max() <= 2 * plain.max() + tiny + 2 * fast * wide[2].nan_to_num(0).abs().max()
    assert ours.pow(2).mean().sqrt() <= 2 * plain.pow(2).mean().sqrt() + tiny


FAST_DTYPES = [
    pytest.param(*fast.values, dtype, marks=fast.marks, id=f"{fast.id}-{str(dtype).removeprefix('torch.')}")
    for fast in FAST
    for dtype in (DTYPES if fast.id == "torch" else KERNEL_DTYPES)
]


@slow_in_part
@CACHES
@pytest.mark.parametrize(("impl", "device", "dtype"), FAST_DTYPES)
@pytest.mark.parametrize("seed", range(6))
def test_error_is_at_most_twice_that_of_plain_pytorch(seed, dtype, impl, device, kept):
    rng = random.Random(seed)
    heads, kv_heads = rng.choice([(4, 4), (4, 2), (6, 1), (8, 2)])
    f = forest(seed, random_trees(rng), heads=heads, kv_heads=kv_heads, head_dim=rng.choice([8, 16, 24, 33, 64]),
               padding=rng.choice([0, 0, 5]))  # fmt: skip
    window = rng.choice([None, None, 1, 5, 100])
    check_error(f, dtype, kept, impl, device, f.q_THD.shape[-1] ** -0.5, window)


@CACHES
@pytest.mark.parametrize(("impl", "device"), FAST)
@pytest.mark.parametrize(("dtype", "window"), [(torch.bfloat16, None), (torch.float16, 7)], ids=str)
def test_error_of_wide_heads_is_at_most_twice_that_of_plain_pytorch(dtype, window, impl, device, kept):
    f = forest(5, [(90, 0, 33, 4), (20, 20, 0, 0)], heads=4, kv_heads=1, head_dim=512)
    check_error(f, dtype, kept, impl, device, 512**-0.5, window)


@CACHES
@pytest.mark.parametrize("name", FORESTS)
def test_capped_scores_equal_the_definition_in_float64(name, kept):
    """On all shapes of trees: the cap comes before the mask."""
    trees, shape = FORESTS[name]
    f = forest(hash_of(name), trees, **shape)
    (q, k, v), _ = cast(f, torch.float64, kept)
    own = slice(0, len(q) - shape.get("padding", 0))
    for window in (None, 7):
        expected = naive(q, k, v, f.layout, 0.3, window, 0.7)[own]
        for impl in ("reference", "torch"):
            out = run(impl, "cpu", q, k, v, f.layout, 0.3, window, 0.7)[own]
            torch.testing.assert_close(out, expected, rtol=1e-11, atol=1e-12)


@slow_in_part
@CACHES
@pytest.mark.parametrize(("impl", "device", "dtype"), FAST_DTYPES)
@pytest.mark.parametrize(("seed", "cap", "scale"), [(0, 50.0, 0.25), (1, 2.0, 0.25), (2, 5.0, 1.0)])
def test_error_of_capped_scores_is_at_most_twice_that_of_plain_pytorch(seed, cap, scale, dtype, impl, device, kept):
    """Scores far below the cap, and beyond it."""
    check_error(capped(seed), dtype, kept, impl, device, scale, None, cap, fast=of_caps(cap) * (device == "cuda"))


def capped(seed):
    return forest(
        seed, random_trees(random.Random(seed)), heads=4, head_dim=(16, 33, 64)[seed], padding=5 * (seed == 1)
    )


def of_caps(cap):
    """Return what fast operations of a GPU add to weights: an exponential and a quotient give what a hyperbolic tangent
    lacks to 1, 0.24 at most; its product with the cap goes through another exponential."""
    return (0.24 * 2 * cap + 1) * gpu_errors.FAST


@needs_interpreter
def test_fast_operations_add_to_capped_scores_what_they_may(monkeypatch):
    """More than twice the error of plain PyTorch, in one output; the root mean square is within it."""
    from tests.interpreter import err_as_gpus

    err_as_gpus(monkeypatch)
    given = capped(2), torch.float32, None, "triton", "cpu", 1.0, None, 5.0
    check_error(*given, fast=of_caps(5.0))
    with pytest.raises(AssertionError):
        check_error(*given)


@pytest.mark.parametrize(("impl", "device"), FAST)
@pytest.mark.parametrize("dtype", KERNEL_DTYPES, ids=str)
def test_a_trunk_in_many_pieces_loses_no_precision(dtype, impl, device):
    """Adding up 75 pieces in low precision would."""
    f = forest(5, [(600, 20, 0, 0), (600, 0, 33, 15)], page=8, head_dim=64)
    (q, k, v), wide = cast(f, dtype)
    k[...], wide[1] = k * 0.05, (k * 0.05).double()  # flat distributions: every piece counts
    exact = reference.tree_attention(*wide, f.layout, 0.125, None)
    plain = (naive(q, k, v, f.layout, 0.125, None).double() - exact).abs()
    ours = (run(impl, device, q, k, v, f.layout, 0.125).double() - exact).abs()
    assert ours.max() <= 2 * plain.max() + 0.01 * torch.finfo(dtype).eps
    assert ours.mean() <= 2 * plain.mean() + 0.01 * torch.finfo(dtype).eps


def test_tiles_do_not_show(monkeypatch):
    trees = [(130, 130, 0, 0), (200, 77, 0, 0), (90, 0, 64, 40)]
    f = forest(3, trees, padding=4)
    (q, k, v), _ = cast(f, torch.float64)
    whole = tree_attention(q, k, v, f.layout, scale=0.25, window=50)
    monkeypatch.setattr(plain, "TILE_SCORES", 1)
    tiled = tree_attention(q, k, v, f.layout, scale=0.25, window=50)
    torch.testing.assert_close(tiled[:-4], whole[:-4], rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("device", TRITON)
@pytest.mark.parametrize("gaps", [[], [(5, 9)], [(0, 1), (7, 8)]], ids=str)
@pytest.mark.parametrize("cap", [None, 2.0])
def test_consecutive_pages_are_copied_by_blocks(device, gaps, cap, monkeypatch):
    """The same numbers, bit by bit, as of pages that are looked up one by one."""
    from kernels import gpu
    from kernels.tree_attention import triton

    f = forest(8, [(200, 70, 0, 0), (150, 64, 40, 9)], fragmented=False)
    pages_P, size = f.layout.trunk_pages_RP[0], f.layout.page_size
    for one, other in gaps:  # what two pages of the first tree hold changes places
        slots = [range(int(pages_P[i]) * size, (int(pages_P[i]) + 1) * size) for i in (one, other)]
        both = torch.tensor([*slots[0], *slots[1]])
        for cache in (f.cache.k_LGSD, f.cache.v_LGSD):
            cache[:, :, both] = cache[:, :, both.roll(size)]
        pages_P[[one, other]] = pages_P[[other, one]]
    (q, k, v), wide = cast(f, torch.bfloat16)
    exact = naive(*wide, f.layout, 0.25, None, cap)
    outs = []
    for bulk in (True, False):
        monkeypatch.setattr(triton, "properties", lambda _, bulk=bulk: gpu.Properties(2, True, bulk=bulk))
        outs.append(run("triton", device, q, k, v, f.layout, 0.25, None, cap))
    assert outs[0].equal(outs[1])
    torch.testing.assert_close(outs[0].double(), exact, rtol=2e-2, atol=2e-2)


LATER = pytest.mark.parametrize("later", [False, True], ids=["merged by the last", "merged later"])


def check_shares(device, later, monkeypatch, sinks=None, slopes=None):
    """Shares of the keys of trees that differ in length do not show."""
    from kernels import gpu
    from kernels.tree_attention import triton

    f = forest(6, [(150, 0, 70, 9), (40, 3, 0, 0), (0, 0, 33, 4)], heads=2, kv_heads=1, padding=3)
    (q, k, v), wide = cast(f, torch.float32)
    if later:
        monkeypatch.setattr(triton, "ALONE", -1)
    monkeypatch.setattr(triton, "properties", lambda _: gpu.Properties(12, False))
    for window in (None, 40):
        exact = naive(*wide, f.layout, 0.25, window, None, sinks, None if slopes is None else slopes.double())
        exact[-3:] = 0
        out = run("triton", device, q, k, v, f.layout, 0.25, window, None, sinks, slopes)
        torch.testing.assert_close(out.double(), exact, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("later", "turn"), [(False, 1), (True, 1), (False, 4)])
@pytest.mark.parametrize("device", TRITON)
def test_shares_of_the_keys_do_not_show(device, later, turn, monkeypatch):
    """One tree is longer than the others, which have few rows, nothing but branches, or no tokens; shares are merged
    one or four at a time."""
    from kernels import gpu
    from kernels.tree_attention import triton

    f = forest(6, [(150, 0, 70, 9), (40, 3, 0, 0), (10, 0, 3, 0), (0, 0, 33, 4)], heads=2, kv_heads=1, padding=3)
    (q, k, v), wide = cast(f, torch.float32)
    sizes = triton._sizes
    monkeypatch.setattr(triton, "_sizes", lambda *asked, **options: sizes(*asked, **options) | {"TURN": turn})
    if later:
        monkeypatch.setattr(triton, "ALONE", -1)
    for window, processors in ((None, 1), (None, 12), (40, 12)):
        exact = naive(*wide, f.layout, 0.25, window)
        exact[-3:] = 0
        monkeypatch.setattr(triton, "properties", lambda _, n=processors: gpu.Properties(n, False))
        out = run("triton", device, q, k, v, f.layout, 0.25, window)
        torch.testing.assert_close(out.double(), exact, rtol=1e-5, atol=1e-6)
    assert not gpu.counters(torch.empty(0, device=device).device).any()


@pytest.mark.parametrize("device", TRITON[:1])
def test_the_order_of_arrival_does_not_show(device, monkeypatch):
    """The interpreter takes the programs backwards, so that the first share is the last."""
    from triton.runtime.interpreter import interpreter_builder as builder

    from kernels import gpu
    from kernels.tree_attention import triton

    f = forest(6, [(150, 0, 40, 9), (40, 3, 0, 0)], heads=2, kv_heads=1)
    (q, k, v), _ = cast(f, torch.float32)
    monkeypatch.setattr(triton, "properties", lambda _: gpu.Properties(10, False))
    expected = run("triton", device, q, k, v, f.layout, 0.25)
    turned, turn = [], builder.set_grid_idx

    def backwards(x, y, z):
        turned.append(x)
        turn(builder.grid_dim[0] - 1 - x, y, z)

    monkeypatch.setattr(builder, "set_grid_idx", backwards)
    assert run("triton", device, q, k, v, f.layout, 0.25).equal(expected) and max(turned) >= 19
    assert not gpu.counters(q.device).any()


class Launches:
    """A kernel that remembers its launches."""

    def __init__(self, kernel):
        self.kernel, self.found = kernel, []

    def __getitem__(self, grid):
        def launch(*arguments, **constants):
            self.found.append((grid, arguments, constants))
            self.kernel[grid](*arguments, **constants)

        return launch

    def __getattr__(self, name):
        return getattr(self.kernel, name)


@LATER
@pytest.mark.parametrize("device", TRITON)
def test_a_launch_serves_other_lengths(device, later, monkeypatch):
    """A CUDA graph launches the same arguments again, with other numbers in the tensors."""
    from kernels import gpu
    from kernels.tree_attention import triton, triton_shares

    shapes = [(150, 0, 40, 9), (20, 0, 1, 1), (40, 0, 33, 4)]
    recorded, replayed = (forest(2, trees, heads=2, kv_heads=1) for trees in (shapes, shapes[::-1]))
    inputs, (later_inputs, wide) = cast(recorded, torch.float32)[0], cast(replayed, torch.float32)
    tensors = [x.to(device) for x in inputs]
    layout = recorded.layout.to(device)
    monkeypatch.setattr(triton, "properties", lambda _: gpu.Properties(20, False))
    monkeypatch.setattr(triton, "ALONE", -1 if later else triton.ALONE)
    kernels = []
    for module, name in ((triton_shares, "list_tasks"), (triton, "_attend"), (triton, "merge")):
        kernels.append(Launches(getattr(module, name)))
        monkeypatch.setattr(module, name, kernels[-1])
    out = tree_attention(*tensors, layout, scale=0.25, impl="triton")
    for x, other in zip(tensors, later_inputs, strict=True):
        x.copy_(other)
    for name, x in vars(layout).items():
        if isinstance(x, torch.Tensor) and name != "trunk_runs":
            x.copy_(getattr(replayed.layout, name))
    for kernel in kernels[: 2 + later]:
        [(grid, arguments, constants)] = kernel.found
        kernel.kernel[grid](*arguments, **constants)
    torch.testing.assert_close(out.cpu().double(), naive(*wide, replayed.layout, 0.25, None), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("device", TRITON)
def test_layers_that_are_alike_share_their_tasks(device, monkeypatch):
    """Until the layout has other numbers."""
    from kernels.tree_attention import triton_shares

    f = forest(2, [(150, 0, 40, 9), (20, 0, 1, 1)])
    (q, k, v), _ = cast(f, torch.float32)
    q, k, v, layout = q.to(device), k.to(device), v.to(device), f.layout.to(device)
    monkeypatch.setattr(triton_shares, "list_tasks", kernel := Launches(triton_shares.list_tasks))
    for window, listed in ((None, 1), (None, 1), (9, 2), (None, 2), (9, 2)):
        tree_attention(q, k, v, layout, scale=0.25, window=window, impl="triton")
        assert len(kernel.found) == listed
    layout.changed()
    tree_attention(q, k, v, layout, scale=0.25, impl="triton")
    assert len(kernel.found) == 3


UNEVEN = [(8192, 15, 70), (256, 15, 0), (256, 3, 40), (256, 1, 9)]
STRANGE = [(700, 0, 0), (64, 2, 0), (0, 20, 90), (0, 0, 0)]


@pytest.mark.parametrize("device", TRITON)
@pytest.mark.parametrize(
    ("trees", "split", "window"),
    [(UNEVEN, "LAST", None), (UNEVEN, "LATER", None), (UNEVEN, "LATER", 300), (STRANGE, "LATER", 100),
     ([(3000, 15, 70)], "LATER", None), ([(500, 4, 33)] * 8, "LAST", None), (UNEVEN, "WHOLE", None)],
)  # fmt: skip
def test_every_block_has_a_program_and_none_has_many(trees, split, window, device):
    """Trees of a trunk's length, tokens, and branch slots; whatever they are, no more programs than there are."""
    from kernels.tree_attention import triton
    from tests.kernels.tasks import tasks

    M, N, G, group, R = 16, 64, 1, 4, len(trees)
    programs, _ = triton._grid(15, lambda _: 3, sum(n for _, n, _ in trees) * group, R, G, M, 128)
    found, of_tokens = tasks(trees, programs, window, getattr(triton, split).value, G, group, M, N, device)
    blocks, tiles, wanted, got = [], [], [], []
    for r, (trunk, tokens, branches) in enumerate(trees):
        lo = max(trunk - tokens - window + 1, 0) // N if window else 0
        every = [(0, i) for i in range(lo, -(-trunk // N))] + [(1, w) for w in range(-(-branches // 32))]
        blocks.append(max(len(every), 1))
        tiles.append(-(-tokens * group // M))
        wanted += [(r, tile, g, *each) for tile in range(tiles[r]) for g in range(G) for each in every]
    longest = 0
    for r, tile, g, share, shares, block, last_block, word, last_word in found:
        mine = [(0, i) for i in range(block, last_block)] + [(1, w) for w in range(word, last_word)]
        got += [(r, tile, g, *each) for each in mine]
        longest = max(longest, len(mine))
        assert {other[3] for other in found if other[:3] == (r, tile, g)} == set(range(shares)) and share < shares
    assert sorted(got) == wanted
    most = -(-sum(map(int.__mul__, tiles, blocks)) * G // (programs - sum(tiles) * G))
    if split == "LAST":
        most = max(most, -(-max(blocks) // 32))  # shares of 8 KiB make 256 KiB
    assert longest == max(blocks) if split == "WHOLE" else longest <= max(most, 2) < max(blocks)
    if split == "LATER":  # where the shares of each tree begin, and how many a tile has
        starts, first = [], 0
        for r, (_, tokens, _) in enumerate(trees):
            mine = [task for task in found if task[0] == r]
            starts += [[sum(n for _, n, _ in trees[:r]), first, tiles[r], mine[0][4]] for _ in range(tokens)]
            first += len(mine)
        assert of_tokens == starts


@needs_triton
def test_how_many_programs_run_at_once(monkeypatch):
    """An H100 and an A10, by what a compiled kernel takes; what is cut into shares, and who merges them."""
    from kernels import gpu
    from kernels.tree_attention import triton

    WHOLE, LAST, LATER = (x.value for x in (triton.WHOLE, triton.LAST, triton.LATER))
    h100, a10 = gpu.Properties(132, True, 65_536, 233_472, 2_048), gpu.Properties(72, False)
    assert [h100.programs(138, 72_192, 4), h100.programs(200, 78_336, 4), h100.programs(189, 131_584, 8)] == [3, 2, 1]
    assert [a10.programs(255, 33_000, 4), a10.programs(64, 90_000, 4), a10.programs(255, 200_000, 8)] == [2, 1, 1]

    class Kernel:
        n_regs, metadata = 200, SimpleNamespace(shared=78_336)
        _init_handles = lambda self: None  # noqa: E731
        warmup = lambda self, *arguments, grid, SPLIT, **constants: self  # noqa: E731

    monkeypatch.setattr(triton, "_attend", Kernel())
    room = lambda split: triton._room(h100, (), split, {"num_warps": 4})  # noqa: E731
    assert room(LAST) == 2
    assert triton._grid(132, room, 15 * 4, 1, 8, 64, 128) == (264, LATER)  # a tile for each of 8 heads
    assert triton._grid(132, room, 32 * 60, 32, 8, 64, 128) == (488, LAST)  # at most 61 tiles of each of 8 heads
    assert triton._grid(132, room, 60, 1, 32, 16, 128) == (264, LAST)
    assert triton._grid(132, lambda _: 2, 15, 1, 32, 16, 128) == (264, LAST)  # 8 shares of 8 KiB to merge
    assert triton._grid(132, lambda _: 3, 15, 1, 32, 16, 128) == (396, LATER)  # 12
    asked = []
    assert triton._grid(132, asked.append, 8192, 1, 8, 128, 128) == (512, WHOLE) and not asked  # a long prompt
    assert triton._grid(132, lambda _: 1, 2048, 1, 8, 128, 128) == (132, LAST)  # 128 tiles
    assert triton._grid(132, lambda _: 1, 2048 + 128, 1, 8, 128, 128) == (136, WHOLE)


@pytest.mark.parametrize("device", TRITON)
@pytest.mark.parametrize("window", [None, 9])
def test_words_that_no_row_sees_are_not_read(device, window):
    """The padding of a graph's tables, and gaps: their slots hold NaN here."""
    f = forest(6, [(90, 0, 70, 20), (30, 30, 0, 0), (1, 0, 33, 4)], heads=8, padding=3)
    (q, k, v), _ = cast(f, torch.float32)
    narrow, (T, C), R = f.layout, f.layout.ancestry_TC.shape, len(f.layout.trunk_len_R)
    unused = next(s for s in range(k.shape[1]) if s not in f.live and k[:, s].isnan().all())

    def spread(x, filler, unit):
        """Words 40 apart, which makes more of them than a tile reads at once."""
        wide = torch.full((len(x), C, 40, unit), filler, dtype=x.dtype)
        wide[:, :, -1] = x.view(len(x), C, unit)
        return wide.view(len(x), -1)

    wide = dataclasses.replace(
        narrow,
        branch_len_R=torch.full_like(narrow.branch_len_R, C * 40 * 32),
        ancestry_TC=spread(narrow.ancestry_TC, 0, 1),
        branch_slots_RW=spread(narrow.branch_slots_RW, unused, 32),
        branch_positions_RW=spread(narrow.branch_positions_RW, 0, 32),
    )
    assert wide.branch_slots_RW.shape == (R, C * 40 * 32) and k[:, unused].isnan().all()
    out, expected = (run("triton", device, q, k, v, layout, 0.25, window)[: T - 3] for layout in (wide, narrow))
    torch.testing.assert_close(out, expected, rtol=1e-6, atol=1e-7)


@needs_cpp
@pytest.mark.parametrize("threads", [1, 2, 7, 32])
def test_threads_and_cuts_of_the_trunk_do_not_show(threads):
    f = forest(6, [(2100, 0, 70, 20), (700, 30, 0, 0), (1, 0, 33, 4)], heads=8, padding=3)
    (q, k, v), wide = cast(f, torch.float32)
    own, before = slice(0, -3), torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for window in (None, 300):
            out = run("cpp", "cpu", q, k, v, f.layout, 0.25, window)
            exact = naive(*wide, f.layout, 0.25, window)
            torch.testing.assert_close(out[own].double(), exact[own], rtol=1e-5, atol=1e-6)
    finally:
        torch.set_num_threads(before)


@needs_cpp
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_comes_out(bad):
    """Or nobody would be told of a layer that breaks down."""
    f = forest(6, [(70, 0, 33, 4)])
    (q, k, v), _ = cast(f, torch.float32)
    q[..., 3] = q[..., 3].abs()
    for x, wrong in ((q, bad), (k, bad), (k, -bad), (v, bad)):  # -inf: no score is left
        kept = x.clone()
        x[..., 3] = wrong
        assert not run("cpp", "cpu", q, k, v, f.layout, 0.25).isfinite().all(-1).any()
        x.copy_(kept)


@needs_cpp
def test_more_heads_to_a_group_than_a_tile_has_rows():
    f = forest(6, [(90, 0, 33, 4), (20, 20, 0, 0)], heads=142, kv_heads=2, head_dim=8)
    (q, k, v), wide = cast(f, torch.float32)
    exact = naive(*wide, f.layout, 0.25, None)
    torch.testing.assert_close(run("cpp", "cpu", q, k, v, f.layout, 0.25).double(), exact, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("device", TRITON)
def test_a_page_table_may_lie_by_columns(device):
    f = forest(6, [(700, 0, 70, 20), (90, 30, 0, 0)])
    (q, k, v), _ = cast(f, torch.float32)
    columns = dataclasses.replace(f.layout, trunk_pages_RP=f.layout.trunk_pages_RP.T.contiguous().T)
    assert run("triton", device, q, k, v, columns, 0.25).equal(run("triton", device, q, k, v, f.layout, 0.25))


@CACHES
@pytest.mark.parametrize(("impl", "device"), KERNELS)
def test_a_reused_slot_is_its_new_token(impl, device, kept):
    f = forest(9, [(50, 0, 40, 20)], head_dim=24)
    (q, k, v), _ = cast(f, torch.float32, kept)
    generator = torch.Generator().manual_seed(1)
    rows = [torch.randn(20, 2, 24, generator=generator).to(device) for _ in range(2)]
    k, v, layout = k.to(device), v.to(device), f.layout.to(device)
    before = tree_attention(q.to(device), k, v, layout, scale=0.25, impl=impl)
    kv_write(k, v, *rows, layout.write_slots_T, impl=impl)
    after = tree_attention(q.to(device), k, v, layout, scale=0.25, impl=impl)
    expected = naive(q, k.cpu(), v.cpu(), f.layout, 0.25, None)
    torch.testing.assert_close(after.cpu(), expected)
    assert not torch.isclose(before, after).all(-1).any()


@CACHES
@pytest.mark.parametrize(("impl", "device"), EVERY_IMPL)
@pytest.mark.parametrize("trees", [[(45, 0, 18, 6)], [(45, 9, 0, 0)], [(3, 3, 0, 0)]], ids=str)
def test_a_token_that_sees_nothing_gets_zeros(impl, device, trees, kept):
    f = forest(1, trees, padding=3)
    (q, k, v), _ = cast(f, torch.float32, kept)
    if impl != "triton":  # whose padding may be NaN
        q = q.nan_to_num(0.5)
    out = run(impl, device, q, k, v, f.layout, 0.25)
    assert out[-3:].eq(0).all() and out.isfinite().all()


@pytest.mark.parametrize(("impl", "device"), EVERY_IMPL)
def test_a_token_outside_its_own_window_gets_zeros(impl, device):
    """Window 0 hides even the token itself; nothing of the masked softmax may come through as NaN."""
    f = forest(1, [(45, 4, 0, 0), (20, 0, 12, 5)])
    (q, k, v), _ = cast(f, torch.float32)
    layout = dataclasses.replace(f.layout, branch_positions_RW=torch.zeros_like(f.layout.branch_positions_RW))
    assert run(impl, device, q, k, v, layout, 0.25, 0).eq(0).all()


@pytest.mark.parametrize(("impl", "device"), FAST)
def test_queries_are_not_changed_and_may_be_strided(impl, device):
    f = forest(2, [(45, 0, 18, 6), (30, 30, 0, 0)])
    q, k, v = (x.to(device) for x in cast(f, torch.float32)[0])
    layout = dataclasses.replace(f.layout.to(device), impl=impl)
    wide = torch.randn(len(q), q.shape[1] + 3, q.shape[2], device=device)
    wide[:, 1 : 1 + q.shape[1]] = q
    view = wide[:, 1 : 1 + q.shape[1]]
    kept = wide.clone()
    out = tree_attention(view, k, v, layout, scale=1.0)  # scale 1: the product with it must not alias q
    assert wide.equal(kept) and out.equal(tree_attention(q, k, v, layout, scale=1.0))
    transposed = q.transpose(0, 1).contiguous().transpose(0, 1)
    torch.testing.assert_close(tree_attention(transposed, k, v, layout, scale=1.0), out)
    every_second = q.repeat_interleave(2, 2)[..., ::2]
    torch.testing.assert_close(tree_attention(every_second, k, v, layout, scale=1.0), out)


@pytest.mark.parametrize(("impl", "device"), FAST)
def test_large_scores_do_not_overflow_float16(impl, device):
    f = forest(2, [(45, 0, 18, 6)], head_dim=64)
    (q, k, v), _ = cast(f, torch.float16)
    assert run(impl, device, q * 60, k * 60, v, f.layout, 0.125).isfinite().all()


def test_front_checks_its_arguments():
    f = forest(2, [(20, 0, 18, 6)])
    (q, k, v), _ = cast(f, torch.float32)

    def refused(match, *tensors, **options):
        with pytest.raises(ValueError, match=match):
            tree_attention(*tensors, f.layout, **{"scale": 1.0} | options)

    for cap in (0.0, -1.0, float("nan"), float("inf")):
        refused("cap: expected None or more than 0", q, k, v, cap=cap)
    for sinks in (torch.zeros(3), torch.zeros(4).double(), torch.zeros(8)[::2], torch.zeros(1, 4)):
        refused("sinks_H: expected contiguous float32", q, k, v, sinks_H=sinks)
    for slopes in (torch.zeros(3), torch.zeros(4).half(), torch.zeros(8)[::2], torch.zeros(1, 4)):
        refused("slopes_H: expected contiguous float32", q, k, v, slopes_H=slopes)
    refused("slopes_H: expected contiguous bfloat16", q, k, v, slopes_H=torch.zeros(3).bfloat16())
    refused("slopes_H: expected None with a cap", q, k, v, slopes_H=torch.zeros(4), cap=1.0)
    refused("k_GSD: expected contiguous float32", q, k[..., :8], v[..., :8])
    refused("v_GSD: expected contiguous float32", q, k, v[:, :-1])
    refused("a multiple of the cache's 2 heads, got 3", q[:, :3], k, v)
    refused("q_THD: expected float32", q.double(), k, v)
    refused("v_GSD: expected contiguous float32", q, k, v.double())
    refused("layout of 5 tokens", q[:5], k, v)
    refused("impl: expected one of", q, k, v, impl="fast")
    rows = torch.zeros(6, 2, 16)
    for bad in ((rows[:5], rows[:5]), (rows, rows[:, :1]), (rows[..., :8], rows[..., :8])):
        with pytest.raises(ValueError, match=r"[kv]_TGD: expected float32 \[6, 2, 16\]"):
            kv_write(k, v, *bad, f.layout.write_slots_T)
    with pytest.raises(ValueError, match="impl"):
        kv_write(k, v, rows, rows, f.layout.write_slots_T, impl="fast")


@needs_cpp
def test_cpp_refuses_what_it_cannot_do():
    f = forest(2, [(20, 0, 18, 6)])
    (q, k, v), _ = cast(f, torch.float32)
    layout, rows = dataclasses.replace(f.layout, impl="cpp"), torch.zeros(6, 2, 16)
    with pytest.raises(ValueError, match="expected float32, bfloat16 or float16 on a CPU"):
        tree_attention(q.double(), k.double(), v.double(), layout, scale=1.0)
    with pytest.raises(ValueError, match="k_GSD: expected contiguous"):
        tree_attention(q, k.repeat(1, 1, 2)[..., :16], v, layout, scale=1.0)
    with pytest.raises(ValueError, match="k_GSD: expected contiguous"):
        kv_write(k.repeat(1, 1, 2)[..., :16], v, rows, rows, layout.write_slots_T, impl="cpp")
    with pytest.raises(ValueError, match="v_TGD: expected float32"):
        kv_write(k, v, rows, rows.double(), layout.write_slots_T, impl="cpp")


@pytest.mark.parametrize("device", TRITON)
def test_triton_refuses_what_it_cannot_do(device):
    f = forest(2, [(20, 0, 18, 6)])
    (q, k, v), _ = cast(f, torch.float32)
    layout = dataclasses.replace(f.layout.to(device), impl="triton")
    q, k, v = q.to(device), k.to(device), v.to(device)
    with pytest.raises(ValueError, match="expected float16, bfloat16 or float32"):
        tree_attention(q.double(), k.double(), v.double(), layout, scale=1.0)
    with pytest.raises(ValueError, match="heads of at most 256 elements in float32, got 272"):
        tree_attention(*(x.repeat(1, 1, 17) for x in (q, k, v)), layout, scale=1.0)
    for many, same, message in (
        (33, "off", "at most 512 elements in bfloat16, got 528"),
        (17, "on", "at most 256 .* got 272"),
    ):
        with same_bits.asking(same), pytest.raises(ValueError, match=message):
            tree_attention(*(x.bfloat16().repeat(1, 1, many) for x in (q, k, v)), layout, scale=1.0)
    with pytest.raises(ValueError, match="v_GSD: expected contiguous"):
        tree_attention(q, k, v.repeat(1, 1, 2)[..., :16], layout, scale=1.0)
    with pytest.raises(ValueError, match="k_GSD: expected contiguous"):
        kv_write(k.repeat(1, 1, 2)[..., :16], v, k[:, :6].transpose(0, 1), v[:, :6].transpose(0, 1),
                 layout.write_slots_T, impl="triton")  # fmt: skip
    with pytest.raises(ValueError, match="positions_T: expected contiguous int64"):  # on the device of the queries
        tree_attention(*(x.to("meta") for x in (q, k, v)), layout, scale=1.0)
    with pytest.raises(ValueError, match=r"expected C.* tensors.*got"):
        tree_attention(*(x.to("meta") for x in (q, k, v)), layout.to("meta"), scale=1.0)


@pytest.mark.full(unless=lambda name, **_: name == "branches")
@CACHES
@pytest.mark.parametrize("impl", ["torch", pytest.param("cpp", marks=needs_cpp)])
@pytest.mark.parametrize("name", ["branches", "prefill without and with a prefix", "padding rows after branches"])
def test_custom_ops(name, impl, kept):
    trees, shape = FORESTS[name]
    f = forest(4, trees, **shape)
    f.cache.k_LGSD.nan_to_num_(0), f.cache.v_LGSD.nan_to_num_(0)
    (q, k, v), _ = cast(f, torch.float32, kept)
    q, layout = q.nan_to_num(0), f.layout
    arguments = q, k, v, list(layout.seen)
    attention, write = (getattr(torch.ops.coppice, f"{name}_{impl}").default for name in ("tree_attention", "kv_write"))
    for options in ((None,), (9,), (9, 2.0), (9, None, torch.randn(q.shape[1]))):
        torch.library.opcheck(attention, (*arguments, 0.25, *options))
    rows = torch.randn(len(q), k.shape[0], q.shape[2])
    slots = torch.arange(2, 2 + len(q))
    torch.library.opcheck(write, (arguments[1], arguments[2], rows, rows, slots))


@pytest.mark.parametrize("device", TRITON)
def test_triton_custom_ops(device):
    import kernels.kv_write.triton  # noqa: F401 (registers the operator)
    from kernels.tree_attention import triton

    f = forest(4, [(45, 0, 18, 6), (30, 30, 0, 0)])
    q, k, v = (x.nan_to_num(0).to(device) for x in cast(f, torch.float32)[0])
    arguments = triton.operands(q, k, v, f.layout.to(device))
    for options in ((None,), (9,), (9, 2.0), (9, None, torch.randn(q.shape[1], device=device))):
        torch.library.opcheck(torch.ops.coppice.tree_attention_triton.default, (*arguments, 0.25, *options))
    rows = torch.randn(len(q), k.shape[0], k.shape[2], device=device)
    slots = torch.arange(2, 2 + len(q), device=device)
    torch.library.opcheck(torch.ops.coppice.kv_write_triton.default, (k, v, rows, rows, slots))


@CACHES
@pytest.mark.parametrize(("impl", "device"), FAST)
def test_they_are_opaque_to_the_compiler(impl, device, kept):
    f = forest(4, [(45, 0, 18, 6), (30, 30, 0, 0)])
    q, k, v = (x.to(device) for x in cast(f, torch.float32, kept)[0])
    layout = dataclasses.replace(f.layout.to(device), impl=impl)

    def layer(q, k, v, layout):
        kv_write(k, v, q[:, :2] * 2, q[:, 2:] * 2, layout.write_slots_T, impl=layout.impl)
        return tree_attention(q + 1, k, v, layout, scale=0.25) * 2

    expected = layer(q, k.clone(), v.clone(), layout)
    traceable()
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(q, k.clone(), v.clone(), layout), expected)


@pytest.mark.full  # two minutes of the compiler, once per machine
@needs_triton
def test_triton_kernels_compile_without_a_gpu():
    """To machine code of three generations of GPU, within their registers and shared memory."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    script = Path(__file__).with_name("compile_kernels.py")
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, script], env=environment | {"PYTHONPATH": os.pathsep.join([str(root), *sys.path])},
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr


def test_unpack_bits_goes_through_the_sign_bit():
    words = torch.tensor([[1, 0], [-(2**31), 1], [-1, 6]], dtype=torch.int32)
    expected = [{0}, {31, 32}, {*range(32), 33, 34}]
    assert [set(row.nonzero().view(-1).tolist()) for row in unpack_bits(words)] == expected
