"""Packing: the pending tokens of many trees become the tensors of one forward pass."""

from array import array
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


NO_TABLE = (array("q"), array("i"))


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
    tree_buckets: Sequence[int] | None = None,
    impl: str = "torch",
) -> Pass:
    """Lay out chunks, already placed, one after the other.

    Args:
        chunks: one per tree.
        page_size: of the pool that all trees share.
        device: where the tensors go.
        token_buckets, word_buckets, tree_buckets: sizes that T, the ancestry words and R are padded to, so that
            compiled graphs are reused. Padding tokens see nothing, and write where nothing reads.
        impl: of the operators, see `kernels.tree_attention`.
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
        tables.append(tree.branch_table() if chunk.nodes else NO_TABLE)
    padding = bucket(len(tokens), token_buckets) - len(tokens)
    if padding:
        tokens += [0] * padding
        positions += [0] * padding
        spans += [1] * padding
        slots += [TRASH_SLOT] * padding
        seen += [0] * padding
        bits += [0] * padding
        starts[-1] += padding
    lengths = [c.tree.trunk.cached for c in chunks]
    empty = bucket(len(chunks), tree_buckets) - len(chunks)
    starts += starts[-1:] * empty
    tables += [NO_TABLE] * empty
    lengths += [0] * empty
    C = bucket(-(-max(len(t) for t, _ in tables) // WORD), word_buckets)
    W = C * WORD
    ancestry = array("i", b"".join(b.to_bytes(C * 4, "little") for b in bits))
    layout = TreeLayout(
        positions_T=_tensor(array("q", positions)),
        write_slots_T=_tensor(array("q", slots)),
        token_starts=_tensor(array("i", starts)),
        trunk_seen_T=_tensor(array("i", seen)),
        trunk_pages_RP=_pages([chunk.tree.page_runs() for chunk in chunks] + [[]] * empty),
        trunk_len_R=_tensor(array("i", lengths)),
        trunk_runs=_tensor(array("i", [x for run in runs for x in run])).view(-1, 3),
        branch_slots_RW=_rows([slots for slots, _ in tables], W, NULL_SLOT, torch.int64),
        branch_positions_RW=_rows([positions for _, positions in tables], W, 0, torch.int32),
        ancestry_TC=_tensor(ancestry).view(len(tokens), C),
        page_size=page_size,
        impl=impl,
    ).to(device)
    tokens_T, spans_T = (_tensor(array("q", x)).to(device, non_blocking=True) for x in (tokens, spans))
    return Pass(tokens_T, layout.positions_T, spans_T, layout)


def _tensor(numbers: array) -> Tensor:
    """An array of "q" or "i" as int64 or int32, without a copy: a fraction of what `torch.tensor` takes for a list."""
    dtype = torch.int64 if numbers.typecode == "q" else torch.int32
    return torch.frombuffer(numbers, dtype=dtype) if numbers else torch.empty(0, dtype=dtype)


def _pages(runs: Sequence[Sequence[tuple[int, int]]]) -> Tensor:
    """Page numbers of each trunk, filled up with 0."""
    rows = [
        torch.cat([torch.arange(page, page + count, dtype=torch.int32) for page, count in pieces])
        if pieces
        else torch.empty(0, dtype=torch.int32)
        for pieces in runs
    ]
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True) if len(rows) > 1 else rows[0].unsqueeze(0)


def _rows(columns: Sequence[array], width: int, filler: int, dtype: torch.dtype) -> Tensor:
    """Arrays of integers as the rows of a tensor."""
    rows = torch.full((len(columns), width), filler, dtype=dtype)
    for row, column in zip(rows if width else (), columns, strict=False):
        if column:
            row[: len(column)] = _tensor(column)
    return rows
