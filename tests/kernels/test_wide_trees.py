"""Trees of many long branches: fast attention against the definition, whichever way it takes, over trees that grew."""

import random

import pytest
import torch

from engine.cache.pool import PagePool
from engine.cache.tree import TokenTree
from engine.step.packing import Chunk, pack
from kernels import cpp
from kernels.tree_attention import torch as plain
from kernels.tree_attention import tree_attention
from models.shape import ModelShape
from tests.invariants import check_tree

SHAPE = ModelShape(layers=1, kv_heads=2, head_dim=8, vocab_size=1, max_positions=None)


def grown(seed, chains, depth, *, fork=0.0, drop=0, page=1):
    """A tree of chains that grew step by step side by side; some forked on the way, some dropped half-way."""
    rng = random.Random(seed)
    tree = TokenTree(PagePool(SHAPE, chains * depth * 2 // page + 40, page), [1, 2, 3, 4, 5])
    tree.allocate(*tree.pending([tree.root]))
    ends = [tree.root] * chains
    for step in range(depth):
        for i in range(1, len(ends)):
            if step and rng.random() < fork:
                ends[i] = ends[rng.randrange(i)]
        ends = tree.grow(ends, [step * chains + i for i in range(len(ends))])
        tree.keep(ends)
        if step == depth // 2:
            ends = ends[drop:]
            tree.keep(ends)
        if step < depth - 1:
            tree.allocate(*tree.pending(ends))
    check_tree(tree)
    return tree, ends


def attend(impl, chunks, window, dtype=torch.float64, heads=6):
    pool = chunks[0].tree.pool
    p = pack(chunks, pool.page_size)
    generator = torch.Generator().manual_seed(0)
    live = [c.tree.trunk.slot(n, pool.page_size) for c in chunks for n in range(c.tree.trunk.cached)]
    live += [s for c in chunks for s in p.layout.branch_slots_RW.flatten().tolist()]
    k, v = (torch.full(pool.cache.k_LGSD.shape[1:], float("nan"), dtype=dtype) for _ in range(2))
    for x in (k, v):
        x[:, live] = torch.randn(2, len(live), SHAPE.head_dim, generator=generator, dtype=torch.float64).to(dtype)
        x[:, 0] = 0
    q = torch.randn(len(p.tokens_T), heads, SHAPE.head_dim, generator=generator, dtype=torch.float64).to(dtype)
    return tree_attention(q, k, v, p.layout, scale=0.4, window=window, impl=impl), p.layout


def kernel_equals_definition(chunks, window):
    if cpp.why_not() is None:
        fast, _ = attend("cpp", chunks, window, torch.float32)
        slow, _ = attend("reference", chunks, window, torch.float32)
        torch.testing.assert_close(fast, slow, rtol=1e-5, atol=1e-6)


def next_chunk(tree, nodes):
    trunk, pending = tree.pending(nodes)
    return Chunk(tree, trunk, pending, tree.allocate(trunk, pending))


@pytest.mark.parametrize("window", [None, 3, 40])
@pytest.mark.parametrize(
    ("options", "own"),
    [
        ({"chains": 60, "depth": 30}, True),
        ({"chains": 60, "depth": 30, "page": 4}, True),
        ({"chains": 40, "depth": 30, "fork": 0.05}, True),
        ({"chains": 40, "depth": 20, "drop": 30}, False),  # a few branches are left over in a wide table
        ({"chains": 200, "depth": 4, "fork": 0.3}, True),
        ({"chains": 5, "depth": 12}, False),
    ],
    ids=str,
)
def test_decoding(options, own, window):
    tree, ends = grown(3, **options)
    chunk = next_chunk(tree, ends)
    fast, layout = attend("torch", [chunk], window)
    assert (plain._columns(layout.ancestry_TC)[0].dim() == 2) == own
    slow, _ = attend("reference", [chunk], window)
    torch.testing.assert_close(fast, slow, rtol=1e-11, atol=1e-12)
    kernel_equals_definition([chunk], window)


def test_many_tiles_and_a_narrow_neighbour(monkeypatch):
    wide, ends = grown(1, 50, 25)
    narrow = TokenTree(wide.pool, [1, 2])
    narrow.allocate(*narrow.pending([narrow.root]))
    chunks = [next_chunk(narrow, narrow.grow([narrow.root] * 3, [7, 8, 9])), next_chunk(wide, ends)]
    whole, _ = attend("torch", chunks, None)
    slow, _ = attend("reference", chunks, None)
    torch.testing.assert_close(whole, slow, rtol=1e-11, atol=1e-12)
    kernel_equals_definition(chunks, None)
    for slots in (1, 70, 300):
        monkeypatch.setattr(plain, "TILE_SLOTS", slots)
        plain._tiles.cache_clear()
        tiled, _ = attend("torch", chunks, None)
        torch.testing.assert_close(tiled, whole, rtol=1e-12, atol=1e-13)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        low, _ = attend("torch", chunks, None, dtype)
        exact, _ = attend("reference", chunks, None, dtype)
        torch.testing.assert_close(low.double(), exact.double(), rtol=0, atol=8 * torch.finfo(dtype).eps)


def test_reading_whole_texts_at_once():
    """A reward model reads chains that were not evaluated yet, many in a pass, beside others that were."""
    tree, ends = grown(4, 30, 20)
    more = []
    for end in ends[:6]:
        more += tree.grow_path(end, range(10_000, 10_032))
    chunk = next_chunk(tree, [more[32 * i + 31] for i in range(6)])
    fast, layout = attend("torch", [chunk], None)
    slow, _ = attend("reference", [chunk], None)
    torch.testing.assert_close(fast, slow, rtol=1e-11, atol=1e-12)
    kernel_equals_definition([chunk], None)
    columns, visible = plain._columns(layout.ancestry_TC)
    assert columns.dim() == 1 and len(columns) == len(chunk.nodes) + 6 * 19 < layout.branch_slots_RW.shape[1]
    assert visible.any(0).all()
    check_tree(tree)


def test_bits_are_kept_for_the_latest_nodes_only():
    tree, ends = grown(5, 30, 40)
    assert tree.live_branches > 1000 and len(tree._bits) <= 60
    middle = tree.parent(tree.parent(ends[3]))
    [sibling] = tree.grow([middle], [999_999])
    tree.allocate(*tree.pending([sibling]))
    chain = {n for n in range(len(tree._token)) if tree.is_live(n) and tree._slot[n] >= 0}
    path, node = set(), sibling
    while node in chain:
        path.add(tree._slot[node])
        node = tree.parent(node)
    assert tree.ancestry(sibling) == sum(1 << s for s in path)
    check_tree(tree)
