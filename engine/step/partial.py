"""An `Evaluate` while passes complete it: its remaining tokens, and its answer as rows, or as top sums only."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from engine.contract import Answer, Evaluate, Read
from engine.contract.top_sums import FoundSums, TopSums, found_in_entries, found_in_rows, merged
from engine.rules.constrained import Constrained
from engine.rules.constraint import longs

KnownRows = Mapping[int, tuple[int, float]]  # node -> its only token, and the token's log-probability


class PartialRows:
    """An answer as rows, collected from passes.

    Args:
        request: the request for the rows.
        width: length of a row.
    """

    def __init__(self, request: Evaluate, width: int):
        self.request, self.width = request, width
        self.nodes: list[int] = []  # nodes that have a row
        self.rows: list[Tensor] = []
        self.known_KV: Tensor | None = None  # rows that needed no evaluation; they come last
        self.known: list[int] = []
        self.numbers: Tensor | None = None  # the result of the request's `read`

    def top_sums(self, nodes: Sequence[int]) -> TopSums | None:
        """Return None, because the rows themselves are wanted."""
        return None

    def wants(self, nodes: Sequence[int]) -> Read | TopSums | None:
        """Return the reader of the rows of some nodes: the request's `read`, if they are all that it asks for."""
        return self.request.read if list(nodes) == list(self.request.nodes) else None

    def take(self, nodes: Sequence[int], rows_NV: Tensor, numbers: Tensor) -> None:
        """Take the values that the reader of `wants` found in the rows of nodes."""
        self.numbers = numbers

    def add(self, nodes: Sequence[int], rows_NV: Tensor) -> None:
        """Add the rows of nodes."""
        self.nodes += nodes
        self.rows.append(rows_NV)

    def add_known(self, known: KnownRows, device: torch.device) -> None:
        """Add nodes whose rows need no evaluation."""
        self.known, self.known_KV = [*known], known_rows(known, self.width, device)

    def answer(self) -> Answer:
        """One row per node, in the order of the request."""
        if self.request.hidden is not None:
            return Answer(torch.empty(0, self.width), None)
        if self.known_KV is not None:
            self.add(self.known, self.known_KV)
        rows_NV = self.rows[0] if len(self.rows) == 1 else torch.cat(self.rows)
        nodes = list(self.request.nodes)
        if nodes == self.nodes:
            return self.request.answer(rows_NV) if self.numbers is None else Answer(rows_NV, self.numbers)
        row = {node: i for i, node in enumerate(self.nodes)}
        return self.request.answer(rows_NV[torch.tensor([row[n] for n in nodes], device=rows_NV.device)])


class PartialSums:
    """The top sums of an answer, merged from those of each pass; no rows are kept.

    Args:
        request: the request for the sums, with nodes in ascending order.
        wanted: the sums that it asks for.
        width: length of a row.
    """

    def __init__(self, request: Evaluate, wanted: TopSums, width: int):
        self.request, self.wanted, self.width = request, wanted, width
        self.parts: list[FoundSums] = []
        self._place = {node: i for i, node in enumerate(request.nodes)}

    def top_sums(self, nodes: Sequence[int]) -> TopSums:
        """The request for the top sums, restricted to some nodes; nodes outside the request get -inf."""
        if list(nodes) == list(self.request.nodes):
            return self.wanted
        sums, k = self.wanted
        return TopSums([float(sums[self._place[node]]) if node in self._place else -math.inf for node in nodes], k)

    def wants(self, nodes: Sequence[int]) -> TopSums | None:
        """Return the reader of the rows of some nodes: a request for their top sums."""
        return self.top_sums(nodes) if nodes else None

    def take(self, nodes: Sequence[int], rows_NV: Tensor, numbers: Tensor) -> None:
        """Take the top sums of the rows of nodes."""
        self.found(found_in_rows(numbers, rows_NV, self.top_sums(nodes)), nodes)

    def add(self, nodes: Sequence[int], rows_NV: Tensor) -> None:
        """Do nothing, because `take` got all that is needed from the rows."""

    def add_known(self, known: KnownRows, device: torch.device) -> None:
        """Add the top sums of nodes whose rows need no evaluation."""
        tokens, numbers = zip(*known.values(), strict=True)
        values_K, token_K, nodes = torch.tensor(numbers, dtype=torch.float32), longs(tokens), [*known]
        wanted, row_K = self.top_sums(nodes), torch.arange(len(tokens))
        self.found(found_in_entries(values_K, row_K, token_K, wanted, self.width), nodes)

    def found(self, part: FoundSums, nodes: Sequence[int]) -> None:
        """Add the top sums of the rows of some nodes, at places in these rows."""
        if list(nodes) != list(self.request.nodes):
            first_N = longs([self._place.get(node, 0) for node in nodes]) * self.width
            place = part[1].long()
            row = place // self.width
            part = torch.stack([part[0], (place - row * self.width + first_N[row]).double()])
        self.parts.append(part)

    def answer(self) -> Answer:
        """The top sums, and no rows."""
        return Answer(torch.empty(0, self.width), merged(self.parts, self.wanted.k).flatten())


@dataclass
class Pending:
    """An unfinished Evaluate: its remaining tokens, and its answer so far.

    Args:
        by_rope: groups of nodes, see `TokenTree.by_rope`: one, except for models that switch.
        constrained: the tree's constraint and processors; None: none.
        known: drafted node -> its row, which is already in the answer.
    """

    request: Evaluate
    by_rope: list[tuple[bool, list[int]]]
    partial: PartialRows | PartialSums
    constrained: Constrained | None = None
    known: Mapping[int, Any] = field(default_factory=dict)
    trunk_left: int = 0
    nodes_left: list[int] = field(default_factory=list)
    asked: set[int] = field(default_factory=set)  # nodes of the present group whose rows are wanted
    trunk_allocated: int = 0  # trunk tokens in earlier passes of this group
    nodes_allocated: list[int] = field(default_factory=list)
    waited: int = 0  # passes since it was asked

    def begin(self) -> None:
        """Start with the next group of nodes."""
        long, nodes = self.by_rope.pop(0)
        self.request.tree.use_rope(long)
        self.trunk_left, self.nodes_left = self.request.tree.pending(nodes)
        self.asked = set() if self.request.hidden is not None else set(nodes)
        self.trunk_allocated, self.nodes_allocated = 0, []

    def allocated(self, trunk_tokens: int, nodes: Sequence[int]) -> None:
        """The next tokens have slots now."""
        self.trunk_left -= trunk_tokens
        self.trunk_allocated += trunk_tokens
        self.nodes_allocated += nodes
        self.nodes_left = self.nodes_left[len(nodes) :]

    @property
    def left(self) -> int:
        return self.trunk_left + len(self.nodes_left)


def partial_answer(request: Evaluate, width: int) -> PartialRows | PartialSums:
    """The empty answer to a request.

    Sums are merged by the order of nodes; a request whose nodes are not in ascending order is answered from its rows.
    """
    nodes = list(request.nodes)
    if request.top_sums is not None and nodes == sorted({*nodes}):
        return PartialSums(request, request.top_sums, width)
    return PartialRows(request, width)


def known_rows(known: KnownRows, width: int, device: torch.device) -> Tensor:
    """The rows of nodes after which one token is possible, float32 [K, width]."""
    tokens, numbers = zip(*known.values(), strict=True)
    rows_KV = torch.full((len(tokens), width), -math.inf, device=device)
    token_K1, number_K1 = (torch.tensor(x, device=device).unsqueeze(1) for x in (tokens, numbers))
    return rows_KV.scatter_(1, token_K1, number_K1)
