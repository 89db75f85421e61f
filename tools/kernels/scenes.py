"""Inputs of the lab: trees of many shapes to measure, and traps for wrong kernels."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.cache.pool import PagePool
from engine.cache.tree import TokenTree
from engine.step.packing import Chunk, pack
from kernels.layout import NULL_SLOT, TreeLayout
from models.shape import ModelShape


@dataclass
class Scene:
    """Queries of the last level of a tree with a trunk and levels of branches."""

    layout: TreeLayout
    slots_S: Tensor  # live slots, in order
    visible_QS: Tensor
    kv_heads: int


def level_sizes(queries: int, branching: int, depth: int) -> list[int]:
    """Nodes of each level of branches: `queries` at the bottom, one parent for every `branching` nodes."""
    return [-(-queries // branching ** (depth - 1 - level)) for level in range(depth)]


def scene(
    pool: PagePool,
    prefix: int,
    queries: int,
    *,
    branching: int = 1,
    depth: int = 2,
    impl: str = "triton",
    word_buckets: Sequence[int] | None = None,
) -> Scene:
    """A tree in the pool, never released."""
    tree = TokenTree(pool, [1] * prefix)
    tree.allocate(prefix, [])
    chunk = branches(tree, level_sizes(queries, branching, depth))
    device = pool.cache.k_LGSD.device
    layout = pack([chunk], pool.page_size, device, word_buckets=word_buckets, impl=impl).layout
    live = layout.branch_slots_RW[0] > 0
    place = torch.arange(prefix, device=device)
    trunk = layout.trunk_pages_RP[0, place // pool.page_size].long() * pool.page_size + place % pool.page_size
    visible_QW = layout.branch_mask_TW()[:, live]
    return Scene(
        layout,
        torch.cat([trunk, layout.branch_slots_RW[0, live]]),
        torch.cat([visible_QW.new_ones(queries, prefix), visible_QW], 1),
        pool.cache.k_LGSD.shape[1],
    )


Thin = Callable[[list[int]], list[int]]  # the share of a level's nodes that stay


def branches(tree: TokenTree, sizes: Sequence[int], thin: Thin | None = None) -> Chunk:
    """Grow and allocate levels of nodes below the root; the chunk evaluates the last level."""
    nodes, slots = [tree.root], []
    for level, size in enumerate(sizes):
        if level and thin:
            nodes = thin(nodes)
            tree.keep(nodes)
        nodes = tree.grow([nodes[i * len(nodes) // size] for i in range(size)], range(size))
        slots = tree.allocate(0, nodes)
    return Chunk(tree, 0, nodes, slots)


# --- traps ---


@dataclass
class Trap:
    """One pass over a cache with NaN in its dead slots."""

    name: str
    layout: TreeLayout
    q_THD: Tensor
    k_GSD: Tensor
    v_GSD: Tensor
    window: int | None
    rows: int  # rows before the padding


def prompt(pool: PagePool, length: int, new: int) -> Chunk:
    """A chunk with the last `new` tokens of a prompt."""
    tree = TokenTree(pool, [1] * length)
    tree.allocate(length - new, [])
    return Chunk(tree, new, [], tree.allocate(new, []))


def beams(pool: PagePool, length: int, sizes: Sequence[int], thin: Thin | None = None) -> Chunk:
    """Branches below a prompt that is in the cache."""
    tree = TokenTree(pool, [1] * length)
    tree.allocate(length, [])
    return branches(tree, sizes, thin)


def crowded(pool: PagePool) -> PagePool:
    """Take every third page, so that no tree gets contiguous memory."""
    for page in range(pool.reserved, pool.pages, 3):
        pool.take(page)
    return pool


PLANS: dict[str, tuple[Callable[[PagePool], list[Chunk]], dict[str, int]]] = {
    "a prompt from its start": (lambda pool: [prompt(pool, 40, 40)], {}),
    "the end of a prompt": (lambda pool: [prompt(pool, 130, 33)], {}),
    "one query, no branches": (lambda pool: [prompt(pool, 17, 1)], {}),
    "beams": (lambda pool: [beams(pool, 50, [15, 15, 15])], {}),
    "beams that left holes": (lambda pool: [beams(pool, 31, [12, 12, 9], lambda nodes: nodes[1::2])], {}),
    "three trees and two prompts": (
        lambda pool: [prompt(pool, 48, 48), beams(pool, 1, [3]), prompt(pool, 33, 5), beams(pool, 64, [2, 4, 8, 16]),
                      beams(pool, 20, [1, 1, 1, 40])], {}),
    "a trunk in pieces": (lambda pool: [beams(crowded(pool), 90, [5, 7]), prompt(pool, 45, 11)], {"page": 4}),
    "a window": (lambda pool: [beams(pool, 50, [6, 6, 6]), prompt(pool, 40, 25), beams(pool, 3, [2, 2])],
                 {"window": 7}),
    "padding": (lambda pool: [prompt(pool, 30, 9), beams(pool, 45, [4, 6])], {"tokens": 20, "words": 4}),
    "grouped heads of an odd size": (lambda pool: [beams(pool, 45, [4, 9]), prompt(pool, 30, 30)],
                                     {"heads": 6, "kv_heads": 2, "head": 24}),
    "one key/value head": (lambda pool: [beams(pool, 100, [3, 9]), prompt(pool, 20, 20)],
                           {"heads": 8, "kv_heads": 1, "page": 16}),
}  # fmt: skip


def traps(dtype: torch.dtype, device: torch.device) -> Iterator[Trap]:
    """A trap for every plan."""
    for number, (name, (plan, options)) in enumerate(PLANS.items()):
        heads, kv_heads, head = options.get("heads", 4), options.get("kv_heads", 4), options.get("head", 32)
        page = options.get("page", 16 if device.type == "cuda" else 1)
        pool = PagePool(ModelShape(1, kv_heads, head, 1, None), 1024 // page, page, dtype)
        chunks = plan(pool)
        tokens, words = options.get("tokens", 0), options.get("words", 0)  # sizes to pad to, at least
        layout = pack(chunks, page, token_buckets=[tokens], word_buckets=[words], impl="torch").layout
        rows, T = sum(c.trunk_tokens + len(c.nodes) for c in chunks), len(layout.positions_T)
        live = {s for c in chunks for first, n in c.tree.trunk_runs() for s in range(first, first + n)}
        live |= {s for c in chunks for s in c.tree.slots.table[0] if s}
        draw = torch.Generator().manual_seed(number)
        k_GSD, v_GSD = (x[0].fill_(float("nan")) for x in (pool.cache.k_LGSD, pool.cache.v_LGSD))
        for x in (k_GSD, v_GSD):
            x[:, NULL_SLOT] = 0
            x[:, sorted(live)] = torch.randn(kv_heads, len(live), head, generator=draw).to(dtype)
        q_THD = torch.randn(T, heads, head, generator=draw).to(dtype)
        q_THD[rows:] = float("nan")
        q_THD, k_GSD, v_GSD = (x.to(device) for x in (q_THD, k_GSD, v_GSD))
        yield Trap(name, layout.to(device), q_THD, k_GSD, v_GSD, options.get("window"), rows)
