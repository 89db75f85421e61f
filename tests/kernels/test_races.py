"""Programs of Triton kernels that work together have no races: the "last program" merges of attention, of products, of
experts and of top sums; chains of recurrent layers. `docs/gpu.md` records which mutants of the kernels the detector
finds."""

import functools
from types import SimpleNamespace

import pytest
import torch

from kernels.experts import Routing, Stacked, routed
from kernels.latent import LatentHeads, absorb_and_write
from kernels.layout import ChannelKind, DeltaKind, LatentSizes, ScanKind
from kernels.rows import log_softmax, top_sums_of
from kernels.rows.checks import TopSums
from kernels.same_bits import asking
from tests.kernels.forests import cast, forest
from tests.kernels.test_channel_scan import ByChannels
from tests.kernels.test_delta_net import Growing
from tests.kernels.test_same_bits import Sequences
from tests.kernels.test_scan import Scanned
from tests.marks import INTERPRETED, needs_interpreter

if INTERPRETED:  # which needs NumPy, absent on some machines with a GPU
    import triton
    import triton.language as tl

    from kernels import gpu
    from kernels.linear import triton as products
    from kernels.linear.codes import pack_codes
    from kernels.tree_attention import tree_attention
    from kernels.tree_attention import triton as attention
    from kernels.tree_attention import triton_fixed as fixed
    from tests.kernels import races

    @triton.jit
    def _toy(
        x_ptr, count_ptr, out_ptr,
        PEEK: tl.constexpr, SHARED: tl.constexpr, MOST: tl.constexpr, FIRST: tl.constexpr, SEM: tl.constexpr,
        CACHE: tl.constexpr, THEN: tl.constexpr, LAST: tl.constexpr,
    ):  # fmt: skip
        """Four programs store a quarter of x each; the last one stores x in the opposite order, and turns it again."""
        i = tl.arange(0, 16)
        if PEEK:
            tl.load(x_ptr + i)
        tl.store(x_ptr + i, i, mask=SHARED or i // 4 == tl.program_id(0))
        if FIRST:
            tl.debug_barrier()
        if tl.atomic_add(count_ptr, 1, sem=SEM, scope="gpu") == MOST - 1:
            tl.store(count_ptr, 0)
            tl.store(out_ptr + i, tl.load(x_ptr + 15 - i, cache_modifier=CACHE))
            if THEN:
                tl.debug_barrier()
            x = tl.load(out_ptr + 15 - i)
            if LAST:
                tl.debug_barrier()
            tl.store(out_ptr + i, x)


pytestmark = needs_interpreter


RIGHT = {"PEEK": False, "SHARED": False, "MOST": 4, "FIRST": True, "SEM": "acq_rel", "CACHE": ".cg",
         "THEN": True, "LAST": True}  # fmt: skip


@pytest.mark.parametrize(("changed", "names"), [
    ({}, set()),
    ({"SEM": "relaxed"}, {"UNORDERED", "STOLEN"}),
    ({"SEM": "acquire"}, {"UNORDERED", "STOLEN"}),
    ({"SEM": "release"}, {"UNORDERED", "STOLEN"}),
    ({"FIRST": False}, {"UNRELEASED"}),
    ({"CACHE": ""}, {"CACHED"}),
    ({"THEN": False}, {"EXCHANGED"}),
    ({"LAST": False}, {"UNREAD"}),
    ({"SHARED": True}, {"OVERWRITTEN"}),
    ({"PEEK": True}, {"UNORDERED", "STOLEN"}),
    ({"MOST": 3}, {"UNCOUNTED", "STOLEN"}),
])  # fmt: skip
def test_the_detector_finds_races(changed, names):
    x, count, out = (torch.zeros(n, dtype=torch.int32) for n in (16, 1, 16))
    with races.watching(0) as watch:
        _toy[(4,)](x, count, out, **RIGHT | changed)
    assert set(watch.found) == {f"_toy {getattr(races, name)}" for name in names}
    assert watch.launches == 1 and watch.accesses >= 16


def attend(later, monkeypatch):
    """Trees of all kinds, in shares that the last program of a tile merges, or a second kernel."""
    monkeypatch.setattr(attention, "ALONE", -1 if later else 1 << 16)
    monkeypatch.setattr(attention, "properties", lambda _: gpu.Properties(12, roomy=False))
    f = forest(0, [(150, 0, 70, 9), (40, 3, 0, 0), (10, 0, 3, 0), (0, 0, 33, 4)], heads=2, kv_heads=1, padding=3)
    (q, k, v), _ = cast(f, torch.float32)
    tree_attention(q, k, v, f.layout, scale=0.25, impl="triton")


def attend_latents(later, monkeypatch):
    """Keys that are the values, in parts of 128 elements."""
    monkeypatch.setattr(attention, "ALONE", -1 if later else 1 << 30)
    monkeypatch.setattr(attention, "properties", lambda _: gpu.Properties(12, roomy=False))
    f = forest(0, [(150, 0, 70, 9), (40, 3, 0, 0), (0, 0, 33, 4)], heads=4, kv_heads=1, head_dim=168, padding=3)
    (q, row, _), _ = cast(f, torch.bfloat16)
    tree_attention(q, row, row, f.layout, scale=0.1, unread=8, impl="triton")


def absorb(monkeypatch):
    """Heads in several programs of a token, and its row in another."""
    sizes = LatentSizes(40, 3, 64, 96, 5, 1e-6, True)
    heads = LatentHeads.of_stacked(sizes, torch.randn(96), torch.randn(40, 3, 96), torch.randn(40, 5, 96))
    angles, cache = [torch.rand(9, 64)] * 2, torch.zeros(1, 16, 160)
    absorb_and_write(
        cache, torch.randn(9, 40 * 67), torch.randn(9, 160), heads, angles, torch.arange(2, 11), impl="triton"
    )


def attend_fixed(monkeypatch):
    """Branches of a trunk by blocks of fixed positions, in shares that a second kernel joins."""
    monkeypatch.setattr(fixed, "properties", lambda _: gpu.Properties(8, roomy=False))
    sequences = Sequences(590, 590, 390, 4, (1, 2, 32))
    with asking("on"):
        sequences.attend([2, 0, 3], 295, torch.float32, None, tokens=3, impl="triton")


def multiply(monkeypatch):
    """The width in splits."""
    monkeypatch.setattr(products, "properties", lambda _: gpu.Properties(8, roomy=False))
    codes, scale = torch.randint(16, (130, 512), dtype=torch.uint8), torch.rand(130, 4)
    products.linear(torch.randn(5, 512), pack_codes([(codes, scale, None)], "int4", 130, 512, 128))


def route(monkeypatch):
    """Experts of few rows, the width in splits, and of many, in several tiles."""
    monkeypatch.setattr(products, "split_count", lambda *_: 2)
    up, down = Stacked(5, torch.randn(5 * 64, 130)), Stacked(5, torch.randn(5 * 130, 32))
    for rows in (3, 40):
        routed(torch.randn(rows, 130), torch.randn(rows, 5), up, down, Routing(2), "silu")


def recur(monkeypatch):
    """Chains that begin with one state, and a level that reads what another leaves."""
    kinds = [(Growing, DeltaKind(1, 2, 4, 20, 4)), (Scanned, ScanKind(1, 2, 4, 20, 4))]
    kinds.append((ByChannels, ChannelKind(1, 1, 4, 20, 4)))
    for growing, kind in kinds:
        forest = growing(kind, 3, roots=1)
        forest.rng = SimpleNamespace(randrange=lambda nodes: nodes - 3)
        forest.run("triton", 40, 36)
        assert len(forest.levels) == 2
        forest.run("triton", 4, 1)


def rank(monkeypatch):
    """Two searches of one tile and of many, and rows whose blocks are in groups."""
    logp, _, peaks = log_softmax(torch.randn(6, 9000), 8990, impl="triton")
    two = [(slice(0, 2), TopSums([0.0, -1.0], 7)), (slice(2, 6), TopSums([0.0, -1.0, 1.0, 0.5], 40))]
    top_sums_of(logp, two, peaks, impl="triton")
    top_sums_of(torch.randn(70, 9000), [(slice(0, 70), TopSums([0.0] * 70, 30))], impl="triton")


WORK = {
    "attention, merged by the last": functools.partial(attend, False),
    "attention, merged later": functools.partial(attend, True),
    "attention, in one order": attend_fixed,
    "latents, merged by the last": functools.partial(attend_latents, False),
    "latents, merged later": functools.partial(attend_latents, True),
    "latents before attention": absorb,
    "product": multiply,
    "experts": route,
    "states": recur,
    "top sums": rank,
}


@pytest.mark.parametrize("work", WORK)
def test_kernels_have_no_races(work, monkeypatch):
    torch.manual_seed(0)
    with races.watching(1) as watch:
        WORK[work](monkeypatch)
    assert not watch.found and watch.accesses > 10_000
    assert not gpu.counters(torch.device("cpu")).any()
