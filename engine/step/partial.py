"""The answer of an `Evaluate` while passes bring its parts: as rows, or as the best sums alone."""

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from engine.contract import Answer, Evaluate, Read
from engine.contract.best import Best, Found, merged, of_entries, of_rows
from kernels.rows.checks import Wanted

Known = Mapping[int, tuple[int, float]]  # node -> its only token, and the token's log-probability


class PartialRows:
    """An answer whose rows are put together.

    Args:
        request: asks for them.
        width: of a row.
    """

    def __init__(self, request: Evaluate, width: int):
        self.request, self.width = request, width
        self.nodes: list[int] = []  # that have a row
        self.rows: list[Tensor] = []
        self.known_KV: Tensor | None = None  # rows that needed no evaluation; they come last
        self.known: list[int] = []
        self.numbers: Tensor | None = None  # the result of the request's `read`

    def best_of(self, nodes: Sequence[int]) -> Best | None:
        """None: the rows themselves are wanted."""
        return None

    def wants(self, nodes: Sequence[int], rows: slice) -> Read | Wanted | None:
        """Return what reads the rows of some nodes: the request's `read`, if they are all that it asks for."""
        return self.request.read if list(nodes) == list(self.request.nodes) else None

    def take(self, nodes: Sequence[int], rows_NV: Tensor, numbers: Tensor) -> None:
        """Take what `wants` read of the rows of nodes."""
        self.numbers = numbers

    def add(self, nodes: Sequence[int], rows_NV: Tensor) -> None:
        """Add the rows of nodes."""
        self.nodes += nodes
        self.rows.append(rows_NV)

    def know(self, known: Known, device: torch.device) -> None:
        """Add nodes whose rows need no evaluation."""
        self.known, self.known_KV = [*known], known_rows(known, self.width, device)

    def answer(self) -> Answer:
        """One row per node, in the order of the request."""
        if self.known_KV is not None:
            self.add(self.known, self.known_KV)
        rows_NV = self.rows[0] if len(self.rows) == 1 else torch.cat(self.rows)
        nodes = list(self.request.nodes)
        if nodes == self.nodes:
            return self.request.answer(rows_NV) if self.numbers is None else Answer(rows_NV, self.numbers)
        row = {node: i for i, node in enumerate(self.nodes)}
        return self.request.answer(rows_NV[torch.tensor([row[n] for n in nodes], device=rows_NV.device)])


class PartialSums:
    """The best sums of an answer, merged from those of each pass; no rows are kept.

    Args:
        request: asks for them, with nodes in ascending order.
        best: what it asks for.
        width: of a row.
    """

    def __init__(self, request: Evaluate, best: Best, width: int):
        self.request, self.best, self.width = request, best, width
        self.parts: list[Found] = []
        self._place = {node: i for i, node in enumerate(request.nodes)}

    def best_of(self, nodes: Sequence[int]) -> Best:
        """The request for the best sums, restricted to some nodes; nodes outside the request get -inf."""
        if list(nodes) == list(self.request.nodes):
            return self.best
        sums, k = self.best
        return Best([sums[self._place[node]] if node in self._place else -math.inf for node in nodes], k)

    def wants(self, nodes: Sequence[int], rows: slice) -> Wanted | None:
        """As `PartialRows.wants`: the best sums of the rows."""
        return Wanted(rows, *self.best_of(nodes)) if nodes else None

    def take(self, nodes: Sequence[int], rows_NV: Tensor, numbers: Tensor) -> None:
        """As `PartialRows.take`."""
        self.found(of_rows(numbers, rows_NV, self.best_of(nodes)), nodes)

    def add(self, nodes: Sequence[int], rows_NV: Tensor) -> None:
        """As `PartialRows.add`: the rows are not needed."""

    def know(self, known: Known, device: torch.device) -> None:
        """As `PartialRows.know`."""
        tokens, numbers = zip(*known.values(), strict=True)
        values_K, token_K, nodes = torch.tensor(numbers, dtype=torch.float32), torch.tensor(tokens), [*known]
        self.found(of_entries(values_K, torch.arange(len(tokens)), token_K, self.best_of(nodes), self.width), nodes)

    def found(self, part: Found, nodes: Sequence[int]) -> None:
        """Add the best sums of the rows of some nodes, at places in these rows."""
        first_N = torch.tensor([self._place.get(node, 0) for node in nodes]) * self.width
        row = part.places // self.width
        self.parts.append(Found(part.values, part.places - row * self.width + first_N[row]))

    def answer(self) -> Answer:
        """The best sums, and no rows."""
        return Answer(torch.empty(0, self.width), merged(self.parts, self.best.k).numbers())


def partial_answer(request: Evaluate, width: int) -> PartialRows | PartialSums:
    """The empty answer to a request.

    Sums are merged by the order of nodes; a request whose nodes are not in ascending order is answered from its rows.
    """
    nodes = list(request.nodes)
    if request.best is not None and nodes == sorted({*nodes}):
        return PartialSums(request, request.best, width)
    return PartialRows(request, width)


def known_rows(known: Known, width: int, device: torch.device) -> Tensor:
    """The rows of nodes after which one token is possible, float32 [K, width]."""
    tokens, numbers = zip(*known.values(), strict=True)
    rows_KV = torch.full((len(tokens), width), -math.inf, device=device)
    token_K1, number_K1 = (torch.tensor(x, device=device).unsqueeze(1) for x in (tokens, numbers))
    return rows_KV.scatter_(1, token_K1, number_K1)
