"""Layouts of random trees with their caches, for tests of tree attention."""

import dataclasses
import random

import torch

from kernels.kv_kinds import floats, parts, row_width, stored
from kernels.layout import NULL_SLOT, TRASH_SLOT, WORD, KVCache, TreeLayout


@dataclasses.dataclass
class Forest:
    """A layout with its cache and queries, made from a plain description."""

    layout: TreeLayout
    cache: KVCache
    q_THD: torch.Tensor
    live: list[int]


def forest(seed, trees, *, heads=4, kv_heads=2, head_dim=16, page=16, words=None, padding=0, fragmented=True):
    """Trees given as (trunk length, prefill tokens of this pass, table width, branch nodes of this pass).

    Branch tables of 0 are pure prefill. Nodes sit in random slots of the table and have random ancestors among the
    others: any subset with the node itself, which is more than a tree can do.
    """
    rng = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    pages_of = [-(-trunk // page) for trunk, *_ in trees]
    total_pages = 1 + sum(pages_of) + sum(-(-width // page) for _, _, width, _ in trees) + 2
    numbers = list(range(1, total_pages))
    if fragmented:
        rng.shuffle(numbers)
    widest = max(width for _, _, width, _ in trees)
    C = words if words is not None else -(-widest // WORD)
    W = C * WORD
    positions, slots, starts, seen, bits, runs, live = [], [], [0], [], [], [], []
    trunk_pages, lengths, tables, places = [], [], [], []
    for r, (trunk, prefill, width, nodes) in enumerate(trees):
        pages = [numbers.pop(0) for _ in range(pages_of[r])]
        in_trunk = [pages[i // page] * page + i % page for i in range(trunk)]
        live += in_trunk
        for p in range(trunk - prefill, trunk):
            positions.append(p)
            slots.append(in_trunk[p])
            seen.append(p + 1)
            bits.append(0)
        for i, number in enumerate(pages):
            n = min(page, trunk - i * page)
            if runs and runs[-1][0] == r and runs[-1][1] + runs[-1][2] == number * page:
                runs[-1] = (r, runs[-1][1], runs[-1][2] + n)
            else:
                runs.append((r, number * page, n))
        own = [numbers.pop(0) for _ in range(-(-width // page))]
        held = sorted(rng.sample(range(width), rng.randint(min(nodes, width), width))) if width else []
        table, place = [NULL_SLOT] * W, [0] * W
        for slot in held:
            table[slot] = own[slot // page] * page + slot % page
            place[slot] = trunk + rng.randrange(6)
            live.append(table[slot])
        for slot in rng.sample(held, nodes):
            ancestors = {slot, *rng.sample(held, rng.randint(0, len(held)))}
            positions.append(place[slot])
            slots.append(table[slot])
            seen.append(trunk)
            bits.append(sum(1 << s for s in ancestors))
        tables.append(table)
        places.append(place)
        trunk_pages.append(pages)
        lengths.append(trunk)
        starts.append(len(positions))
    for _ in range(padding):
        positions.append(0)
        slots.append(TRASH_SLOT)
        seen.append(0)
        bits.append(0)
    starts[-1] += padding
    T, S, P = len(positions), total_pages * page, max(map(len, trunk_pages))
    packed = bytearray(b"".join(b.to_bytes(C * 4, "little") for b in bits))
    layout = TreeLayout(
        positions_T=torch.tensor(positions),
        write_slots_T=torch.tensor(slots),
        token_starts=torch.tensor(starts, dtype=torch.int32),
        trunk_seen_T=torch.tensor(seen, dtype=torch.int32),
        trunk_pages_RP=torch.tensor([p + [0] * (P - len(p)) for p in trunk_pages], dtype=torch.int32),
        trunk_len_R=torch.tensor(lengths, dtype=torch.int32),
        trunk_runs=torch.tensor(runs, dtype=torch.int32).view(-1, 3),
        branch_len_R=torch.tensor([width for _, _, width, _ in trees], dtype=torch.int32),
        branch_slots_RW=torch.tensor(tables, dtype=torch.int64).view(len(trees), W),
        branch_positions_RW=torch.tensor(places, dtype=torch.int32).view(len(trees), W),
        ancestry_TC=torch.frombuffer(packed or bytearray(4), dtype=torch.int32)[: T * C].view(T, C),
        page_size=page,
    )
    k, v = (torch.full((1, kv_heads, S, head_dim), float("nan"), dtype=torch.float64) for _ in range(2))
    for tensor in (k, v):
        tensor[:, :, NULL_SLOT] = 0
        tensor[:, :, live] = torch.randn(1, kv_heads, len(live), head_dim, generator=generator, dtype=torch.float64)
    q = torch.randn(T, heads, head_dim, generator=generator, dtype=torch.float64)
    if padding:
        q[-padding:] = float("nan")
    return Forest(layout, KVCache(k, v), q, live)


def cast(f, dtype, kept=None):
    """Inputs of one layer in a dtype, the cache in `kept` if it is another, and the same rounded numbers in float64."""
    q, *cache = (x.to(dtype) for x in (f.q_THD, f.cache.k_LGSD[0], f.cache.v_LGSD[0]))
    if kept is not None:
        cache = [cached(x, kept) for x in cache]
    return [q, *cache], [q.double(), *(floats(parts(x), torch.float64) for x in cache)]


def cached(x, dtype):
    """Floats [..., S, D] as a cache of a dtype."""
    cache = torch.zeros(*x.shape[:-1], row_width(x.shape[-1], dtype), dtype=dtype, device=x.device)
    for part, rows in zip(parts(cache), stored(x, dtype), strict=True):
        part.copy_(rows)
    return cache


FORESTS = {
    "one token, nothing before it": ([(1, 1, 0, 0)], {}),
    "a page border": ([(15, 15, 0, 0), (16, 16, 0, 0), (17, 17, 0, 0), (16, 1, 0, 0), (17, 1, 0, 0)], {}),
    "prefill without and with a prefix": ([(40, 40, 0, 0), (100, 33, 0, 0), (64, 16, 0, 0)], {}),
    "branches": ([(50, 0, 20, 7)], {}),
    "branches at borders": ([(16, 0, 32, 9), (32, 0, 33, 4), (1, 0, 31, 3)], {}),
    "long trunks": ([(600, 0, 40, 15), (577, 0, 70, 15)], {}),
    "in order": ([(600, 0, 40, 15), (333, 50, 0, 0)], {"fragmented": False}),
    "prefill beside branches": ([(90, 25, 0, 0), (70, 0, 90, 12), (48, 48, 0, 0), (33, 0, 5, 5)], {}),
    "the prompt's end and drafts in one pass": ([(37, 9, 24, 6), (16, 16, 16, 16)], {}),
    "every slot asked": ([(10, 0, 64, 64)], {}),
    "a tree with no token in the pass": ([(10, 0, 3, 2), (20, 0, 7, 0), (12, 2, 0, 0)], {}),
    "multi-query": ([(45, 0, 18, 6), (30, 30, 0, 0)], {"heads": 6, "kv_heads": 1}),
    "one head per group": ([(45, 0, 18, 6), (30, 30, 0, 0)], {"heads": 3, "kv_heads": 3}),
    "odd head size": ([(45, 0, 18, 6), (30, 30, 0, 0)], {"heads": 3, "kv_heads": 1, "head_dim": 7}),
    "head size 1": ([(45, 0, 18, 6), (30, 30, 0, 0)], {"head_dim": 1}),
    "head size 80": ([(45, 0, 18, 6)], {"head_dim": 80}),
    "small pages": ([(45, 0, 18, 6), (30, 30, 0, 0)], {"page": 2}),
    "an odd page size": ([(45, 0, 18, 6), (30, 30, 0, 0)], {"page": 5}),
    "padding rows": ([(45, 0, 18, 6), (30, 30, 0, 0)], {"padding": 5}),
    "padding rows after branches": ([(30, 30, 0, 0), (45, 0, 18, 6)], {"padding": 3}),
    "padding without branches": ([(45, 10, 0, 0), (30, 30, 0, 0)], {"padding": 7}),
    "padded words": ([(45, 0, 18, 6), (30, 30, 0, 0)], {"words": 4, "padding": 2}),
    "words without any branch": ([(45, 5, 0, 0)], {"words": 1}),
}  # fmt: skip


def hash_of(name):
    return sum(ord(c) * 31**i for i, c in enumerate(name)) % 2**31
