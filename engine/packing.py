"""Packing: the pending tokens of many trees become the tensors of one forward pass."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.tree import TokenTree
from kernels.layout import NULL_SLOT, TRASH_SLOT, WORD, TreeLayout


@dataclass(frozen=True)
class Chunk:
    """One tree's share of a pass: its next trunk tokens, then branch nodes (parents first)."""

    tree: TokenTree
    trunk_tokens: int
    nodes: Sequence[int]
    slots: Sequence[int]  # as `TokenTree.place` gave them


@dataclass(frozen=True)
class Pass:
    """What a model's forward takes."""

    tokens_T: Tensor
    positions_T: Tensor
    spans_T: Tensor
    layout: TreeLayout


def bucket(n: int, buckets: Sequence[int] | None) -> int:
    """The smallest bucket that holds n; n itself without buckets or above the largest."""
    return next((b for b in buckets or () if b >= n), n)


def pack(
    chunks: Sequence[Chunk],
    page_size: int,
    device: torch.device | str = "cpu",
    *,
    token_buckets: Sequence[int] | None = None,
    word_buckets: Sequence[int] | None = None,
) -> Pass:
    """Lay out chunks, already placed, one after the other.

    Args:
        chunks: one per tree.
        page_size: of the pool that all trees share.
        device: where the tensors go.
        token_buckets, word_buckets: sizes that T and the ancestry words are padded to, so that compiled graphs are
            reused. Padding tokens see nothing, and write where nothing reads.
    """
    tokens, positions, spans, slots, seen, bits = [], [], [], [], [], []
    starts, runs, tables = [0], [], []
    for r, chunk in enumerate(chunks):
        tree = chunk.tree
        end = tree.trunk.cached  # this pass's trunk tokens included
        first = end - chunk.trunk_tokens
        tokens += tree.trunk.tokens[first:end]
        tokens += [tree.token(n) for n in chunk.nodes]
        places = list(range(first, end)) + [tree.position(n) for n in chunk.nodes]
        positions += places
        shortest = max(tree.prompt_length, tree.least_span)
        spans += [max(shortest, p + 1) for p in places]
        slots += chunk.slots
        seen += range(first + 1, end + 1)
        seen += [end] * len(chunk.nodes)
        bits += [0] * chunk.trunk_tokens
        bits += [tree.ancestry(n) for n in chunk.nodes]
        starts.append(len(tokens))
        runs += [(r, slot, length) for slot, length in tree.trunk_runs()]
        tables.append(tree.branch_table() if chunk.nodes else ([], []))
    padding = bucket(len(tokens), token_buckets) - len(tokens)
    if padding:
        tokens += [0] * padding
        positions += [0] * padding
        spans += [1] * padding
        slots += [TRASH_SLOT] * padding
        seen += [0] * padding
        bits += [0] * padding
        starts[-1] += padding
    C = bucket(-(-max(len(t) for t, _ in tables) // WORD), word_buckets)
    W = C * WORD
    packed = bytearray(b"".join(b.to_bytes(C * 4, "little") for b in bits))
    ancestry_TC = (
        torch.frombuffer(packed, dtype=torch.int32).view(-1, C) if C else torch.empty(len(tokens), 0, dtype=torch.int32)
    )
    trunk_pages_RP = torch.zeros(len(chunks), max(len(c.tree.trunk.pages) for c in chunks), dtype=torch.int32)
    for row_P, chunk in zip(trunk_pages_RP, chunks, strict=True):
        done = 0
        for page, count in chunk.tree.page_runs():
            row_P[done : done + count] = torch.arange(page, page + count, dtype=torch.int32)
            done += count
    layout = TreeLayout(
        positions_T=torch.tensor(positions, device=device),
        write_slots_T=torch.tensor(slots, device=device),
        token_starts=torch.tensor(starts, dtype=torch.int32),
        trunk_seen_T=torch.tensor(seen, dtype=torch.int32, device=device),
        trunk_pages_RP=trunk_pages_RP.to(device),
        trunk_len_R=torch.tensor([c.tree.trunk.cached for c in chunks], dtype=torch.int32, device=device),
        trunk_runs=torch.tensor(runs, dtype=torch.int32).view(-1, 3),
        branch_slots_RW=torch.tensor(
            [t + [NULL_SLOT] * (W - len(t)) for t, _ in tables], dtype=torch.int64, device=device
        ),
        branch_positions_RW=torch.tensor([p + [0] * (W - len(p)) for _, p in tables], dtype=torch.int32, device=device),
        ancestry_TC=ancestry_TC.to(device),
        page_size=page_size,
    )
    return Pass(torch.tensor(tokens, device=device), layout.positions_T, torch.tensor(spans, device=device), layout)
