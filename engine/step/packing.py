"""Packing: the pending tokens of many trees become the tensors of one forward pass."""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.cache.tree import TokenTree
from kernels.layout import NULL_SLOT, TRASH_SLOT, WORD, TreeLayout


@dataclass(frozen=True)
class Chunk:
    """One tree's part of a pass: its next trunk tokens, then branch nodes (parents first)."""

    tree: TokenTree
    trunk_tokens: int
    nodes: Sequence[int]
    slots: Sequence[int]  # as `TokenTree.allocate` returned them

    def __len__(self) -> int:
        """Tokens."""
        return self.trunk_tokens + len(self.nodes)

    @property
    def cached(self) -> int:
        """Tokens of the trunk that are evaluated after this pass."""
        return self.tree.trunk.cached

    def columns(self) -> tuple[list[int], list[int], list[int]]:
        """Tokens, positions and ancestry bits."""
        tree, nodes, end = self.tree, self.nodes, self.cached
        first = end - self.trunk_tokens
        tokens = tree.trunk.tokens[first:end] + [tree.token(n) for n in nodes]
        positions = [*range(first, end), *[tree.position(n) for n in nodes]]
        return tokens, positions, [0] * self.trunk_tokens + [tree.ancestry(n) for n in nodes]


@dataclass(frozen=True)
class Blank(Chunk):
    """A chunk of tokens that only the device knows. `nodes` are their branch slots, see `TokenTree.reserve`.

    The host writes zeros for the tokens, and for each token no ancestor but itself.
    """

    position: int

    @property
    def cached(self) -> int:
        return self.tree.trunk.cached + self.trunk_tokens

    def columns(self) -> tuple[list[int], list[int], list[int]]:
        bits = [0] * self.trunk_tokens + [1 << slot for slot in self.nodes]
        return [0] * len(self), [self.position] * len(self), bits


@dataclass(frozen=True)
class Pass:
    """The inputs of a model's forward pass."""

    tokens_T: Tensor
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
    ancestors: int = 0,
    token_buckets: Sequence[int] | None = None,
    word_buckets: Sequence[int] | None = None,
    tree_buckets: Sequence[int] | None = None,
    impl: str = "torch",
    rows: str | None = None,
) -> Pass:
    """Lay out chunks one after the other; their tokens have slots.

    Args:
        chunks: one per tree.
        page_size: of the pool that all trees share.
        device: where the tensors go.
        ancestors: how many of each token's latest ancestors the layout names.
        token_buckets, word_buckets, tree_buckets: sizes that T, the ancestry words and R are padded to, so that
            compiled graphs are reused. Padding tokens attend to nothing and write to the trash slot.
        impl: of the operators, see `kernels.tree_attention`.
        rows: of the operators on rows, see `kernels.rows`; None: `impl`.
    """
    columns = _Tokens(ancestors)
    for chunk in chunks:
        columns.add(chunk)
    columns.pad(bucket(len(columns.tokens), token_buckets) - len(columns.tokens))
    empty = bucket(len(chunks), tree_buckets) - len(chunks)
    tables = [chunk.tree.branch_table() if chunk.nodes else NO_TABLE for chunk in chunks] + [NO_TABLE] * empty
    runs = [(r, slot, length) for r, c in enumerate(chunks) for slot, length in c.tree.trunk_runs(c.cached)]
    C = bucket(-(-max(len(t) for t, _ in tables) // WORD), word_buckets)
    ancestry = array("i", b"".join(b.to_bytes(C * 4, "little") for b in columns.bits))
    ancestors_TN = tensor_of(array("q", columns.ancestors)).view(-1, ancestors) if ancestors else None
    layout = TreeLayout(
        positions_T=tensor_of(array("q", columns.positions)),
        write_slots_T=tensor_of(array("q", columns.slots)),
        token_starts=tensor_of(array("i", columns.starts + columns.starts[-1:] * empty)),
        trunk_seen_T=tensor_of(array("i", columns.seen)),
        trunk_pages_RP=_pages([chunk.tree.trunk.runs for chunk in chunks] + [[]] * empty),
        trunk_len_R=tensor_of(array("i", [c.cached for c in chunks] + [0] * empty)),
        trunk_runs=tensor_of(array("i", [x for run in runs for x in run])).view(-1, 3),
        branch_len_R=tensor_of(array("i", [len(slots) for slots, _ in tables])),
        branch_slots_RW=_rows([slots for slots, _ in tables], C * WORD, NULL_SLOT, torch.int64),
        branch_positions_RW=_rows([positions for _, positions in tables], C * WORD, 0, torch.int32),
        ancestry_TC=tensor_of(ancestry).view(len(columns.bits), C),
        page_size=page_size,
        impl=impl,
        rows=rows,
        ancestors_TN=ancestors_TN,
        adapters_T=tensor_of(array("q", columns.adapters)) if any(columns.adapters) else None,
    ).to(device)
    tokens_T, spans_T = (
        tensor_of(array("q", x)).to(device, non_blocking=True) for x in (columns.tokens, columns.spans)
    )
    return Pass(tokens_T, spans_T, layout)


class _Tokens:
    """The columns of a layout with a row per token, and the first row of each tree."""

    def __init__(self, reach: int):
        self.reach = reach
        self.ancestors: list[int] = []
        self.tokens: list[int] = []
        self.positions: list[int] = []
        self.spans: list[int] = []
        self.slots: list[int] = []
        self.seen: list[int] = []
        self.bits: list[int] = []
        self.adapters: list[int] = []
        self.starts = [0]

    def add(self, chunk: Chunk) -> None:
        """Add the tokens of one tree."""
        tree, nodes, end = chunk.tree, chunk.nodes, chunk.cached
        first = end - chunk.trunk_tokens
        tokens, positions, bits = chunk.columns()
        self.tokens += tokens
        self.positions += positions
        self.bits += bits
        shortest = max(tree.prompt_length, tree.least_span)
        self.spans += [max(shortest, p + 1) for p in positions]
        self.slots += chunk.slots
        self.adapters += [tree.trunk.adapter] * len(chunk)
        self.seen += range(first + 1, end + 1)
        self.seen += [end] * len(nodes)
        self.starts.append(len(self.tokens))
        if self.reach:
            size, reach = tree.pool.page_size, self.reach
            found = [tree.trunk.latest(place, reach, size) for place in range(first, end)]
            for latest in (*found, *(tree.latest_ancestors(node, reach) for node in nodes)):
                self.ancestors += latest
                self.ancestors += [NULL_SLOT] * (reach - len(latest))

    def pad(self, count: int) -> None:
        """Add padding tokens to the last tree."""
        self.spans += [1] * count
        self.slots += [TRASH_SLOT] * count
        self.ancestors += [NULL_SLOT] * count * self.reach
        for column in (self.tokens, self.positions, self.seen, self.bits, self.adapters):
            column += [0] * count
        self.starts[-1] += count


def tensor_of(numbers: array) -> Tensor:
    """An array of "q" or "i" as int64 or int32 without a copy, which is faster than `torch.tensor` of a list."""
    dtype = torch.int64 if numbers.typecode == "q" else torch.int32
    return torch.frombuffer(numbers, dtype=dtype) if numbers else torch.empty(0, dtype=dtype)


def _pages(runs: Sequence[Sequence[Sequence[int]]]) -> Tensor:
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
            row[: len(column)] = tensor_of(column)
    return rows
