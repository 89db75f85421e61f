"""Packing: turns the pending tokens of many trees into the tensors of one forward pass."""

from array import array
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from engine.cache.drafts import DraftedNode
from engine.cache.tree import TokenTree
from engine.step.paths import PathColumns, paths_of, width_of
from kernels.layout import NULL_SLOT, TRASH_SLOT, WORD, DeltaKind, KVCache, TreeLayout


@dataclass(frozen=True)
class Chunk:
    """One tree's part of a pass: its next trunk tokens, then branch nodes, then drafted ones (parents first)."""

    tree: TokenTree
    trunk_tokens: int
    nodes: Sequence[int]
    slots: Sequence[int]  # as `TokenTree.allocate` returned them, then those of the drafts
    drafts: Sequence[DraftedNode] = field(default=(), kw_only=True)

    def __len__(self) -> int:
        """The number of tokens."""
        return self.trunk_tokens + len(self.nodes) + len(self.drafts)

    @property
    def cached(self) -> int:
        """The number of trunk tokens that are evaluated after this pass."""
        return self.tree.trunk.cached

    def columns(self) -> tuple[list[int], list[int], list[int]]:
        """Tokens, positions and ancestry bits."""
        tree, nodes, end = self.tree, self.nodes, self.cached
        first = end - self.trunk_tokens
        tokens = [*tree.trunk.tokens[first:end], *map(tree.token, nodes)]
        positions = [*range(first, end), *map(tree.position, nodes)]
        bits = [*([0] * self.trunk_tokens), *map(tree.ancestry, nodes)]
        for draft in self.drafts:
            tokens.append(draft.token)
            positions.append(draft.position)
            bits.append(tree.ancestry(draft))
        return tokens, positions, bits


@dataclass(frozen=True)
class Blank(Chunk):
    """A chunk whose tokens only the device knows. `nodes` are their branch slots, see `TokenTree.reserve`.

    The host writes zeros for the tokens, and gives each token no ancestor but itself.
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

    def arguments(self, cache: KVCache) -> tuple[Tensor, Tensor, Tensor, KVCache, TreeLayout]:
        """The arguments of a model's `forward`."""
        return self.tokens_T, self.layout.positions_T, self.spans_T, cache, self.layout


NO_TABLE = (array("q"), array("i"))


def bucket(n: int, buckets: Sequence[int] | None) -> int:
    """The smallest bucket that holds n; n itself without buckets or above the largest."""
    return next((b for b in buckets or () if b >= n), n)


class PassSizes(NamedTuple):
    """The sizes of a pass: T tokens, R trees, P pages of a trunk, pieces of trunks, C words of ancestry bits."""

    tokens: int
    trees: int
    pages: int
    runs: int
    words: int
    adapted: bool  # whether a token has an adapter


@dataclass(eq=False)
class Packer:
    """Lays out chunks one after another; their tokens already have slots.

    With `frames`, tensors are allocated once for each `PassSizes` and overwritten by the next pass of the same sizes.
    Operators must then read the layout again for each pass; those in C++ do.

    Args:
        page_size: page size of the pool that all trees share.
        device: the device of the tensors.
        ancestors: how many of each token's latest ancestors the layout lists.
        delta: the kind of recurrent layers, whose paths the layout then has, and their chains for "triton".
        token_buckets, word_buckets, tree_buckets, page_buckets: sizes to which T, the ancestry words, R and the pages
            of the longest trunk are padded, so that compiled graphs are reused. Padding tokens attend to nothing and
            write to the trash slot.
        impl: implementation of the operators, see `kernels.tree_attention`.
        rows: implementation of the operators on rows, see `kernels.rows`; None: `impl`.
        frames: number of sizes whose tensors are kept.
    """

    page_size: int
    device: torch.device | str = "cpu"
    _: KW_ONLY
    ancestors: int = 0
    delta: DeltaKind | None = None
    token_buckets: Sequence[int] | None = None
    word_buckets: Sequence[int] | None = None
    tree_buckets: Sequence[int] | None = None
    page_buckets: Sequence[int] | None = None
    impl: str = "torch"
    rows: str | None = None
    frames: int = 0
    _frames: "dict[PassSizes, _Frame]" = field(default_factory=dict, init=False)

    def pack(self, chunks: Sequence[Chunk]) -> Pass:
        """The inputs of a pass of chunks, one per tree."""
        columns = _Columns(self.ancestors, self.delta, self.impl == "triton")
        for chunk in chunks:
            columns.add(chunk)
        columns.pad(
            bucket(len(columns.tokens), self.token_buckets) - len(columns.tokens),
            bucket(len(chunks), self.tree_buckets) - len(chunks),
        )
        sizes = PassSizes(
            len(columns.tokens),
            len(columns.lengths),
            bucket(max(map(len, columns.pages)), self.page_buckets),
            len(columns.runs) // 3,
            bucket(-(-max(len(slots) for slots, _ in columns.tables) // WORD), self.word_buckets),
            any(columns.adapters),
        )
        longs, ints = columns.longs(sizes), columns.ints(sizes)
        if (frame := self._frames.get(sizes)) is None:
            frame = _Frame(sizes, self, longs, ints)
            if self.frames:
                if len(self._frames) == self.frames:
                    del self._frames[next(iter(self._frames))]
                self._frames[sizes] = frame
        return frame.filled(columns, longs, ints)


def pack(chunks: Sequence[Chunk], page_size: int, device: torch.device | str = "cpu", **options: Any) -> Pass:
    """The inputs of a pass in newly allocated memory; for arguments see `Packer`."""
    return Packer(page_size, device, **options).pack(chunks)


class _Columns:
    """The columns of a layout with a row per token, and those with a row per tree."""

    def __init__(self, reach: int, delta: DeltaKind | None, chained: bool):
        self.reach = reach
        self.paths = None if delta is None else PathColumns(delta, chained)
        self.ancestors: list[int] = []
        self.tokens: list[int] = []
        self.positions: list[int] = []
        self.spans: list[int] = []
        self.slots: list[int] = []
        self.seen: list[int] = []
        self.bits: list[int] = []
        self.adapters: list[int] = []
        self.starts = [0]
        self.lengths: list[int] = []
        self.runs: list[int] = []
        self.pages: list[Sequence[int]] = []
        self.tables: list[tuple[array[int], array[int]]] = []

    def add(self, chunk: Chunk) -> None:
        """Add the tokens of one tree."""
        tree, nodes, end = chunk.tree, [*chunk.nodes, *chunk.drafts], chunk.cached
        first = end - chunk.trunk_tokens
        tokens, positions, bits = chunk.columns()
        shortest = max(tree.prompt_length, tree.least_span)
        for slot, length in tree.trunk_runs(end):
            self.runs += len(self.lengths), slot, length
        self.tokens += tokens
        self.positions += positions
        self.bits += bits
        self.spans += [p + 1 if p >= shortest else shortest for p in positions]
        self.slots += chunk.slots
        self.adapters += [tree.trunk.adapter] * len(tokens)
        self.seen += range(first + 1, end + 1)
        self.seen += [end] * len(nodes)
        self.starts.append(len(self.tokens))
        self.lengths.append(end)
        self.pages.append(tree.trunk.pages)
        self.tables.append(tree.slots.table if nodes else NO_TABLE)
        if self.reach:
            size, reach = tree.pool.page_size, self.reach
            found = [tree.trunk.latest(place, reach, size) for place in range(first, end)]
            for latest in (*found, *(tree.latest_ancestors(node, reach) for node in nodes)):
                self.ancestors += latest
                self.ancestors += [NULL_SLOT] * (reach - len(latest))
        if self.paths is not None:
            self.paths.add(tree, chunk.trunk_tokens, nodes)

    def pad(self, tokens: int, trees: int) -> None:
        """Add padding tokens to the last tree, and trees without tokens; call it after all tokens have been added."""
        if tokens:
            self.spans += [1] * tokens
            self.slots += [TRASH_SLOT] * tokens
            self.ancestors += [NULL_SLOT] * tokens * self.reach
            for column in (self.tokens, self.positions, self.seen, self.bits, self.adapters):
                column += [0] * tokens
            self.starts[-1] += tokens
            if self.paths is not None:
                self.paths.pad(tokens)
        if trees:
            self.starts += self.starts[-1:] * trees
            self.lengths += [0] * trees
            self.pages += [()] * trees
            self.tables += [NO_TABLE] * trees
        if self.paths is not None and self.paths.chained:
            self.paths.chain()

    def longs(self, sizes: PassSizes) -> "array[int]":
        """The 64-bit columns, in the order of `_Frame`."""
        adapters = self.adapters if sizes.adapted else []
        paths = [] if self.paths is None else self.paths.numbers
        numbers = array("q", self.tokens + self.positions + self.spans + self.slots + self.ancestors + adapters + paths)
        for slots, _ in self.tables:
            _extend(numbers, slots, sizes.words * WORD)
        return numbers

    def ints(self, sizes: PassSizes) -> "array[int]":
        """The 32-bit columns, in the order of `_Frame`."""
        filled = [len(slots) for slots, _ in self.tables]
        numbers = array("i", self.starts + self.seen + self.lengths + self.runs + filled)
        for pages in self.pages:
            _extend(numbers, array("i", pages), sizes.pages)
        for _, positions in self.tables:
            _extend(numbers, positions, sizes.words * WORD)
        if sizes.words:
            numbers.frombytes(b"".join([bits.to_bytes(sizes.words * 4, "little") for bits in self.bits]))
        return numbers


def _extend(numbers: "array[int]", row: "array[int]", width: int) -> None:
    """Add a row, padded with zeros: NULL_SLOT, or no page."""
    numbers.extend(row)
    if spare := width - len(row):
        numbers.frombytes(bytes(spare * numbers.itemsize))


class _Frame:
    """The memory of passes of one size, at first the columns of one of them, and the tensors that view it."""

    def __init__(self, sizes: PassSizes, packer: Packer, longs: "array[int]", ints: "array[int]"):
        T, R, W, P, reach = sizes.tokens, sizes.trees, sizes.words * WORD, sizes.pages, packer.ancestors
        self.device, delta, self._longs, self._ints = torch.device(packer.device), packer.delta, longs, ints
        paths = 0 if delta is None else T * width_of(delta, packer.impl == "triton")
        lengths = [T, T, T, T, T * reach, T * sizes.adapted, paths, R * W]
        tokens_T, positions_T, spans_T, slots_T, ancestors, adapters_T, numbers, branch_slots = _split(longs, lengths)
        lengths = [R + 1, T, R, 3 * sizes.runs, R, R * P, R * W, T * sizes.words]
        starts, seen_T, lengths_R, runs, filled_R, pages, branch_positions, ancestry = _split(ints, lengths)
        layout = TreeLayout(
            positions_T=positions_T,
            write_slots_T=slots_T,
            token_starts=starts,
            trunk_seen_T=seen_T,
            trunk_pages_RP=pages.view(R, P),
            trunk_len_R=lengths_R,
            trunk_runs=runs.view(-1, 3),
            branch_len_R=filled_R,
            branch_slots_RW=branch_slots.view(R, W),
            branch_positions_RW=branch_positions.view(R, W),
            ancestry_TC=ancestry.view(T, sizes.words),
            page_size=packer.page_size,
            impl=packer.impl,
            rows=packer.rows,
            ancestors_TN=ancestors.view(T, reach) if reach else None,
            adapters_T=adapters_T if sizes.adapted else None,
            paths=None if delta is None else paths_of(numbers, T, delta),
        )
        self.inputs = Pass(tokens_T, spans_T, layout)

    def filled(self, columns: _Columns, longs: "array[int]", ints: "array[int]") -> Pass:
        """The pass of these columns, given also as numbers."""
        if self._longs is not longs:
            self._longs[:], self._ints[:] = longs, ints
        inputs, layout = self.inputs, self.inputs.layout
        if columns.paths is not None and columns.paths.chained:
            assert layout.paths is not None
            layout = replace(layout, paths=replace(layout.paths, levels=columns.paths.levels))
            inputs = replace(inputs, layout=layout)
        if self.device.type == "cpu":
            layout.changed()
            return inputs
        tokens_T, spans_T = (x.to(self.device, non_blocking=True) for x in (inputs.tokens_T, inputs.spans_T))
        return Pass(tokens_T, spans_T, layout.to(self.device))


def _split(numbers: "array[int]", lengths: list[int]) -> Sequence[Tensor]:
    """The columns of these lengths of an array of "q" or "i", as int64 or int32 without a copy, which is faster than
    `torch.tensor` of a list."""
    dtype = torch.int64 if numbers.typecode == "q" else torch.int32
    return (torch.frombuffer(numbers, dtype=dtype) if numbers else torch.empty(0, dtype=dtype)).split(lengths)
