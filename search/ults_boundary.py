"""The boundary of an ULTS tree: nodes that are known but not evaluated, their posterior samples, and who is next.

ULTS, section 3.4. Nodes are kept by family, the children of one evaluated node: a family's samples are made, compared
and dropped together, and a whole boundary is compared through one row per family. When nodes leave or come, only the
families that they belong to are looked through again.
"""

import heapq
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from itertools import count

import torch
from torch import Tensor


@dataclass(eq=False)
class Family:
    """An evaluated node and its children, most probable first.

    Args:
        node: the evaluated one, in the token tree.
        level: of the children; the root's is 0.
        key: of the evaluated node's path.
        parent, place: the family that it was a child of, and which one.
        tokens: of the children.
        sums: log-likelihoods of the paths to them.
        excluded: sum of the logs by which renormalising (without end-of-sequence) raised those.
        open: children that may be evaluated yet.
        value_CN: their posterior samples; -inf for others, unless a rule lets evaluated children carry samples.
    """

    node: int
    level: int
    key: int
    parent: "Family | None"
    place: int
    tokens: list[int]
    sums: list[float]
    excluded: float
    open: set[int] = field(default_factory=set)
    value_CN: Tensor = field(default_factory=lambda: torch.empty(0, 0))
    below: "dict[int, Family]" = field(default_factory=dict)  # children that were evaluated
    wins: list[float] = field(default_factory=list)  # of the children, by a recursive rule

    @property
    def winner(self) -> int:
        """The child that is the best in most samples."""
        return self.wins.index(max(self.wins))

    @staticmethod
    def above(token: int, key: int, samples: int) -> "Family":
        """A family whose only child is the root."""
        return Family(-1, 0, key, None, 0, [token], [0.0], 0.0, value_CN=torch.zeros(1, samples))


class Boundary(ABC):
    """All open nodes. A rule says which wins, and which samples stand for the best that may be found.

    Args:
        origin: the family whose only child is the root.
        ceiling: of a path's log-likelihood and level, the best score that any way on can have.
    """

    def __init__(self, origin: Family, ceiling: Callable[[float, int], float]):
        self.origin, self.ceiling = origin, ceiling
        self.families: dict[Family, None] = {}  # those with open children, in the order they came
        self.shrunk = False  # a family has left since this was last set
        self._changed: dict[Family, None] = {}
        self._most: list[tuple[float, int, int, Family]] = []  # heap: each family's most probable open child
        self._count = 0

    def add(self, family: Family) -> None:
        """A node was evaluated."""
        if family.parent is not None:
            family.parent.below[family.place] = family
        self._changed[family] = None
        if family.open:
            self.families[family] = None
            self._push(family)
        else:
            self.shrunk = True

    def close(self, family: Family, children: Collection[int]) -> None:
        """Open nodes leave: they are evaluated next, or given up."""
        if len(children) == 1:
            family.value_CN[next(iter(children))] = -math.inf
        else:
            family.value_CN.index_fill_(0, torch.tensor([*children]), -math.inf)
        family.open.difference_update(children)
        self._changed[family] = None
        if not family.open:
            del self.families[family]
            self.shrunk = True

    def close_levels(self, level: int) -> None:
        """Give up all nodes of this level and of those above."""
        for family in [f for f in self.families if f.level <= level]:
            self.close(family, list(family.open))

    def bound(self) -> float:
        """The score that nothing open can exceed, as a likelihood only falls; -inf if nothing is open."""
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
        """Of the families with nothing open below them, none of them busy: the one whose best child promises least."""
        inner = {*busy}
        for family in [*self.families, *busy]:
            above = family.parent
            while above is not None and above not in inner:
                inner.add(above)
                above = above.parent
        tips = [f for f in self.families if f not in inner]
        return min(tips, key=lambda f: float(f.value_CN.amax(0).mean()), default=None)

    def leaders(self, most: int) -> list[tuple[float, Family, int]]:
        """Families' most probable open nodes by the mean of their samples, best first: (mean, family, child)."""
        found = [(float(f.value_CN[min(f.open)].mean()), f, min(f.open)) for f in self.families]
        return sorted(found, key=lambda leader: -leader[0])[:most]

    @abstractmethod
    def winners(self) -> Iterator[tuple[Family, int]]:
        """Open nodes in the order in which they are to be evaluated; each is closed before the next is asked for."""

    @abstractmethod
    def _update(self) -> Tensor:
        """Take account of what has changed; the samples [N] of the best that is open, -inf if nothing is."""

    def exceeding(self, bar: float) -> float:
        """The probability that something open is better: the share of samples of the best above the bar."""
        best_N = self._update()
        return int((best_N > bar).sum()) / len(best_N)


class Flat(Boundary):
    """Equation (1) over the whole boundary: the node that is the maximum in most samples."""

    def __init__(self, origin: Family, ceiling: Callable[[float, int], float]):
        super().__init__(origin, ceiling)
        self._rows: dict[Family, int] = {}
        self._free: list[int] = []
        self._best_FN = torch.full((64, origin.value_CN.shape[1]), -math.inf)  # a family's maxima; -inf in free rows
        self._best_N = self._best_FN[0]

    def _update(self) -> Tensor:
        if not self._changed:
            return self._best_N
        for family in self._changed:
            if family not in self.families:
                if family in self._rows:
                    self._free.append(self._rows.pop(family))
                    self._best_FN[self._free[-1]] = -math.inf
                continue
            if family not in self._rows:
                self._rows[family] = self._free.pop() if self._free else len(self._rows)
                if self._rows[family] == len(self._best_FN):
                    self._best_FN = torch.cat([self._best_FN, torch.full_like(self._best_FN, -math.inf)])
            torch.amax(family.value_CN, 0, out=self._best_FN[self._rows[family]])
        self._changed.clear()
        self._best_N = self._best_FN.amax(0)
        return self._best_N

    def winners(self) -> Iterator[tuple[Family, int]]:
        best_N = self._update()
        wins_F = wins(self._best_FN, best_N)
        # A family has its children's wins together: it is looked into when no single node is known to have as many.
        queue = [(-wins_F[row], i, -1, family) for i, (family, row) in enumerate(self._rows.items()) if wins_F[row]]
        heapq.heapify(queue)
        while queue:
            _, i, child, family = heapq.heappop(queue)
            if child < 0:
                for child, won in enumerate(wins(family.value_CN, best_N)):
                    if won:
                        heapq.heappush(queue, (-won, i, child, family))
            elif child in family.open:  # not given up meanwhile
                yield family, child


class Recursive(Boundary):
    """From the root down, to the child that is the maximum in most samples; evaluated nodes carry samples too."""

    @staticmethod
    @abstractmethod
    def carried(value_CN: Tensor, best_N: Tensor, winner: int) -> Tensor:
        """The samples that an evaluated node carries, of those of its children."""

    def _update(self) -> Tensor:
        """Backup, from the changed families to the root, the deepest first."""
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
            family.wins = wins(family.value_CN, best_N)  # all 0 if nothing is open below: the maxima are -inf
            samples_N = self.carried(family.value_CN, best_N, family.winner)
            assert family.parent
            family.parent.value_CN[family.place] = samples_N
            if family.parent not in self._changed:
                self._changed[family.parent] = None
                heapq.heappush(queue, (-family.parent.level, i, family.parent))
        return self.origin.value_CN[0]

    def winners(self) -> Iterator[tuple[Family, int]]:
        self._update()
        family = root = self.origin.below[0]
        while family.winner in family.below:
            family = family.below[family.winner]
        if family.winner in family.open:
            yield family, family.winner  # the paper's
        # More, for a batch: by their share of the wins, multiplied with the shares of those above them.
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
    """Equation (2): a node carries the samples of its winning child's best descendant."""

    @staticmethod
    def carried(value_CN: Tensor, best_N: Tensor, winner: int) -> Tensor:
        return value_CN[winner]


class Posterior(Recursive):
    """A node carries its own posterior samples: the maxima over its children's."""

    @staticmethod
    def carried(value_CN: Tensor, best_N: Tensor, winner: int) -> Tensor:
        return best_N


def wins(value_RN: Tensor, best_N: Tensor) -> list[float]:
    """In how many samples each row is the best."""
    return (value_RN - best_N).ge_(0).sum(1).tolist()  # float arithmetic throughout: making booleans is slower


RULES: dict[str, type[Boundary]] = {"flat": Flat, "descendant": Descendant, "posterior": Posterior}
