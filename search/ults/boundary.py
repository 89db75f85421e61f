"""The boundary of an ULTS tree: open nodes (not evaluated yet), their posterior samples, and the order of evaluation.

ULTS, section 3.4. The children of one evaluated node form a family. The samples of a family are drawn, compared and
dropped together, and the boundary has one row of maxima per family. When nodes are added or closed, only the rows of
their families are recomputed. Samples are keyed, so they are drawn again instead of being stored, which takes less time
than allocating memory.
"""

import heapq
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import torch
from torch import Tensor

from kernels.rows import window_max, window_wins
from search.ults.delta import Delta

NOTHING = torch.empty(0)
AT_ONCE = 64  # families whose samples are drawn together


@dataclass(eq=False)
class Family:
    """An evaluated node and its children, most probable first.

    Args:
        node: the evaluated node, in the token tree.
        level: the children's level; the root's is 0.
        key: the key of the evaluated node's path.
        parent, place: the family that has the evaluated node as a child, and the index of this child.
        tokens: the children's tokens.
        sums: log-likelihoods of the children's paths.
        excluded: the sum of the logarithms by which renormalising (without end-of-sequence) raised `sums`.
        open: indices of the children that may still be evaluated.
        sum_C: float32, `sums` of the open children; -inf for the others.
        place_C: int64, where on the tapes of `Delta` the children's samples begin.

    Attributes:
        below: index of an evaluated child -> its family.
        value_CN: samples of the children, for rules that give samples to evaluated children too.
        wins: for each child the number of samples in which it is the best.
    """

    node: int
    level: int
    key: int
    parent: "Family | None"
    place: int
    tokens: list[int]
    sums: list[float]
    excluded: float
    open: set[int]
    sum_C: Tensor = NOTHING
    place_C: Tensor = NOTHING
    below: "dict[int, Family]" = field(default_factory=dict)
    value_CN: Tensor = NOTHING
    wins: list[float] = field(default_factory=list)

    @property
    def winner(self) -> int:
        """The index of the child that is the best in most samples."""
        return self.wins.index(max(self.wins))

    @staticmethod
    def above(token: int, key: int, samples: int) -> "Family":
        """Return a family whose only child is the root."""
        return Family(-1, 0, key, None, 0, [token], [0.0], 0.0, set(), value_CN=torch.zeros(1, samples))


class Samples:
    """The posterior samples v = c * Delta of open children, in logarithms; divided by (length / depth) ** penalty.

    Args:
        delta: the distributions of Delta.
        penalty: the exponent of the length.
        depth: the length of the longest leaves, of all unless `delta` has lengths.

    Attributes:
        scale: depth ** penalty, by which these numbers exceed scores: float32 does not hold all powers of lengths.
    """

    def __init__(self, delta: Delta, penalty: float, depth: int):
        self.delta, self.penalty = delta, penalty
        self.scale = float(depth) ** penalty
        self._tape_P = delta.log_LP.view(-1)
        self._scratch = NOTHING

    def of(self, families: Sequence[Family]) -> Tensor:
        """Return the samples [F, C, N] of families, -inf for children that are not open; the next call overwrites
        them."""
        place_FC, sum_FC = _stacked(families)
        F, C = sum_FC.shape
        if len(self._scratch) < F * C:
            self._scratch = torch.empty(F * C, self.delta.samples)
        value_CN, length_CN = self.delta.draws(place_FC.view(-1), self._scratch[: F * C])
        value_CN += sum_FC.view(-1, 1)
        if length_CN is not None:
            level_C = torch.tensor([f.level for f in families]).repeat_interleave(C)
            value_CN *= ((level_C.unsqueeze(1) + length_CN).double() ** -self.penalty * self.scale).clamp_(max=3e38)
        return value_CN.view(F, C, -1)

    def best(self, families: Sequence[Family]) -> Tensor:
        """Return the largest samples [F, N] of families."""
        if self.penalty:
            return self.of(families).amax(1)
        return window_max(self._tape_P, *_stacked(families), self.delta.samples)

    def wins(self, families: Sequence[Family], best_N: Tensor) -> list[list[int]]:
        """Count the samples in which each child of the families is the best of all."""
        if self.penalty:
            return _wins(self.of(families), best_N).tolist()
        return window_wins(self._tape_P, *_stacked(families), best_N).tolist()


class Boundary(ABC):
    """All open nodes. A subclass (a rule) defines their order, and the samples of the best open node.

    Args:
        origin: the family whose only child is the root.
        ceiling: (log-likelihood of a path, its level) -> the best score of any continuation.
        samples: the posterior samples of open children.

    Attributes:
        families: families with open children, in the order in which they were added.
        shrunk: whether a family has lost its last open child since the caller last reset this.
        bar: the score to exceed.
    """

    def __init__(
        self,
        origin: Family,
        ceiling: Callable[[float, int], float],
        samples: Samples,
    ):
        self.origin, self.ceiling, self.samples = origin, ceiling, samples
        self.families: dict[Family, None] = {}
        self.shrunk = False
        self.bar = -math.inf
        self._changed: dict[Family, None] = {}
        self._most: list[tuple[float, int, int, Family]] = []  # heap: each family's most probable open child
        self._count = 0

    def add(self, families: Sequence[Family]) -> None:
        """Add the families of evaluated nodes."""
        for family in families:
            if family.parent is not None:
                family.parent.below[family.place] = family
            self._changed[family] = None
            if family.open:
                self.families[family] = None
                self._push(family)
            else:
                self.shrunk = True

    def close(self, family: Family, children: Collection[int]) -> None:
        """Close open children, which are evaluated next or abandoned."""
        if len(children) == 1:
            family.sum_C[next(iter(children))] = -math.inf
        else:
            family.sum_C.index_fill_(0, torch.tensor([*children]), -math.inf)
        family.open.difference_update(children)
        self._changed[family] = None
        if not family.open:
            del self.families[family]
            self.shrunk = True

    def close_levels(self, level: int) -> None:
        """Abandon all open nodes of this level and of the levels above it."""
        for family in [f for f in self.families if f.level <= level]:
            self.close(family, list(family.open))

    def bound(self) -> float:
        """Return an upper bound on the score of every open node (a likelihood only falls); -inf if no node is open."""
        while self._most and self._most[0][2] not in self._most[0][3].open:
            family = heapq.heappop(self._most)[3]
            if family.open:
                self._push(family)
        return -self._most[0][0] if self._most else -math.inf

    def _push(self, family: Family) -> None:
        child = min(family.open)
        self._count += 1
        heapq.heappush(self._most, (-self.ceiling(family.sums[child], family.level), self._count, child, family))

    def least_promising(self, busy: Collection[Family]) -> Family | None:
        """Return the family whose best child has the lowest mean sample, among the families that are not busy and have
        no open nodes below them; None if there is none."""
        inner = {*busy}
        for family in [*self.families, *busy]:
            above = family.parent
            while above is not None and above not in inner:
                inner.add(above)
                above = above.parent
        tips = [f for f in self.families if f not in inner]
        return min(tips, key=lambda f: float(self.samples.best([f]).mean()), default=None)

    @torch.inference_mode()
    def leaders(self, most: int) -> list[tuple[float, Family, int]]:
        """Return the most probable open node of each family as (mean of its samples, family, child), best first."""
        first = [(f, min(f.open)) for f in self.families]
        found = [(float(self.samples.of([f])[0, c].mean()) / self.samples.scale, f, c) for f, c in first]
        return sorted(found, key=lambda leader: -leader[0])[:most]

    @abstractmethod
    def winners(self, most: int) -> Iterator[tuple[Family, int]]:
        """Yield open nodes in the order of their evaluation; the caller closes each node before it takes the next.

        Args:
            most: the number of nodes that the caller may take.
        """

    @abstractmethod
    def _update(self) -> Tensor:
        """Process the changed families, and return the samples [N] of the best open node, -inf if no node is open."""

    def exceeding(self, bar: float) -> float:
        """Return the probability that an open node exceeds the bar: the share of the best node's samples above it."""
        self.bar = bar = bar if bar == -math.inf else max(bar * self.samples.scale, -3e38)
        best_N = self._update()
        return int((best_N > bar).sum()) / len(best_N)


class Flat(Boundary):
    """Equation (1) over the whole boundary: selects the node that is the maximum, finished leaves included, in most
    samples."""

    def __init__(self, origin: Family, *rest: Any):
        super().__init__(origin, *rest)
        self._rows: dict[Family, int] = {}
        self._families: list[Family] = []  # the family of each row; for a free row, its last one
        self._free: list[int] = []
        self._best_RN = torch.full((64, origin.value_CN.shape[1]), -math.inf)  # a family's maxima; -inf in free rows
        self._best_N = self._best_RN[0]

    def _update(self) -> Tensor:
        if not self._changed:
            return self._best_N
        for family in self._changed:
            if family in self.families and family not in self._rows:
                if self._free:
                    row = self._free.pop()
                    self._families[row] = family
                else:
                    row = len(self._families)
                    self._families.append(family)
                self._rows[family] = row
            elif family not in self.families and family in self._rows:
                self._free.append(self._rows.pop(family))
                self._best_RN[self._free[-1]] = -math.inf
        while len(self._families) > len(self._best_RN):
            self._best_RN = torch.cat([self._best_RN, torch.full_like(self._best_RN, -math.inf)])
        for some in _groups([f for f in self._changed if f in self.families], AT_ONCE):
            rows_F = torch.tensor([self._rows[f] for f in some])
            self._best_RN.index_copy_(0, rows_F, self.samples.best(some))
        self._changed.clear()
        self._best_N = self._best_RN[: max(1, len(self._families))].amax(0)
        return self._best_N

    def winners(self, most: int) -> Iterator[tuple[Family, int]]:
        best_N = self._update()
        best_N = best_N.masked_fill(best_N <= self.bar, math.inf)  # in these samples the best leaf wins
        rows, samples = len(self._families), len(best_N)
        start_1R = torch.arange(0, rows * samples, samples).unsqueeze(0)
        won_1R = window_wins(self._best_RN.view(-1), start_1R, torch.zeros(1, rows), best_N)
        won_R, row_R = won_1R[0].sort(descending=True, stable=True)
        ranked = [(-won, row) for won, row in zip(won_R.tolist(), row_R.tolist(), strict=True) if won]
        groups = _groups(ranked, max(2, min(most, AT_ONCE)))
        group = next(groups, None)
        queue: list[tuple[float, int, int]] = []
        while group or queue:
            # The wins of a family bound those of its children: it is expanded unless a queued node has more wins.
            if group and (not queue or group[0][0] <= queue[0][0]):
                rows = [row for _, row in group]
                wins_FC = self.samples.wins([self._families[row] for row in rows], best_N)
                for row, wins_C in zip(rows, wins_FC, strict=True):
                    for child, won in enumerate(wins_C):
                        if won:
                            heapq.heappush(queue, (-won, row, child))
                group = next(groups, None)
                continue
            _, row, child = heapq.heappop(queue)
            family = self._families[row]
            if child in family.open:  # it may have been abandoned since
                yield family, child


class Recursive(Boundary):
    """Descends from the root to the child that is the maximum in most samples; evaluated nodes have samples too."""

    def add(self, families: Sequence[Family]) -> None:
        super().add(families)
        for family, value_CN in zip(families, self.samples.of(families), strict=True):
            family.value_CN = value_CN.clone()

    def close(self, family: Family, children: Collection[int]) -> None:
        super().close(family, children)
        family.value_CN.index_fill_(0, torch.tensor([*children]), -math.inf)

    @staticmethod
    @abstractmethod
    def carried(value_CN: Tensor, best_N: Tensor, winner: int) -> Tensor:
        """Return the samples of an evaluated node, computed from those of its children."""

    def _update(self) -> Tensor:
        """Back up samples from the changed families to the root, the deepest first."""
        queue = [(-family.level, i, family) for i, family in enumerate(self._changed)]
        heapq.heapify(queue)
        for i in count(len(queue)):
            if not queue:
                break
            family = heapq.heappop(queue)[2]
            del self._changed[family]
            if family is self.origin:
                continue
            best_N = family.value_CN.amax(0)
            family.wins = _wins(family.value_CN, best_N).tolist()  # all 0 if no node below is open: the maxima are -inf
            samples_N = self.carried(family.value_CN, best_N, family.winner)
            assert family.parent
            family.parent.value_CN[family.place] = samples_N
            if family.parent not in self._changed:
                self._changed[family.parent] = None
                heapq.heappush(queue, (-family.parent.level, i, family.parent))
        return self.origin.value_CN[0]

    def winners(self, most: int) -> Iterator[tuple[Family, int]]:
        self._update()
        family = root = self.origin.below[0]
        while family.winner in family.below:
            family = family.below[family.winner]
        if family.winner in family.open:
            yield family, family.winner  # the paper's choice
        # A batch takes more nodes, ordered by their share of the wins multiplied by the shares of their ancestors.
        order, samples = count(), len(self.origin.value_CN[0])
        queue: list[tuple[float, int, Family, int | None]] = [(-1.0, next(order), root, None)]
        while queue:
            share, _, family, child = heapq.heappop(queue)
            if child is None:
                for child, won in enumerate(family.wins):
                    if won and child in family.below:
                        heapq.heappush(queue, (share * won / samples, next(order), family.below[child], None))
                    elif won:
                        heapq.heappush(queue, (share * won / samples, next(order), family, child))
            elif child in family.open:
                yield family, child


class Descendant(Recursive):
    """Equation (2): a node has the samples of its winning child's best descendant."""

    @staticmethod
    def carried(value_CN: Tensor, best_N: Tensor, winner: int) -> Tensor:
        return value_CN[winner]


class Posterior(Recursive):
    """A node has its own posterior samples: the maxima over those of its children."""

    @staticmethod
    def carried(value_CN: Tensor, best_N: Tensor, winner: int) -> Tensor:
        return best_N


def _stacked(families: Sequence[Family]) -> tuple[Tensor, Tensor]:
    """Return where on the tapes the children's samples begin, int64 [F, C], and their log-likelihoods [F, C]."""
    return torch.stack([f.place_C for f in families]), torch.stack([f.sum_C for f in families])


def _wins(value_RN: Tensor, best_N: Tensor) -> Tensor:
    """Return the number of samples in which each row is the best."""
    return (value_RN - best_N).ge_(0).sum(-1)  # in floats, which is faster than with booleans


def _groups(items: Sequence[Any], most: int) -> Iterator[Sequence[Any]]:
    return (items[i : i + most] for i in range(0, len(items), most))


RULES: dict[str, type[Boundary]] = {"flat": Flat, "descendant": Descendant, "posterior": Posterior}
