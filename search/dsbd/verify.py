"""Drawing and accepting the drafts of a layer: the part of DSBD that works on plain distributions.

Acceptance is exact for every q: accepted drafts and the draws that complete a layer are i.i.d. from p.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from operator import mul
from typing import Any, NamedTuple

import torch
from torch import Tensor

from search.dsbd.joint import Probabilities, pick

IID, WITHOUT = KINDS = ("iid", "without-replacement")
NOTHING = 1e-9  # drawing without replacement stops when less probability than this is left


def draw(q: Probabilities, n: int, kind: str, numbers: Iterator[float]) -> list[int]:
    """Draw the drafts of a layer, in order.

    Args:
        q: their distribution.
        n: number of drafts.
        kind: IID; WITHOUT: the first n different values of endless i.i.d. draws, which is drawing without replacement.
    """
    if kind == IID:
        return pick(q, islice(numbers, n))
    drawn: dict[int, None] = {}
    while True:
        drawn |= dict.fromkeys(pick(q, islice(numbers, n)))
        if len(drawn) >= n or total(q := without(q, drawn)) < NOTHING:
            return list(drawn)[:n]


class Drafted(NamedTuple):
    """A draft: its cell in p (None if p is 0) and its probability under q."""

    x: int | None
    q: float


class Verdict(NamedTuple):
    """The new list's cells of p; the number of accepted drafts among them; the number of drafts that were tried."""

    entries: list[int]
    accepted: int
    tried: int


class ResidualDistribution:
    """p', the residual distribution after rejections: norm(max(0, p - s q)).

    A rejection replaces p' by norm(max(0, p' - q / mass)), whichever draft was rejected: only s grows. A rejected cell
    has p' = 0, so p' does not depend on whether q can draw that cell again.

    Args:
        p, q: probabilities of the same cells.

    Attributes:
        s: the multiple of q that was subtracted.
        total: the sum of the positive elements of p - s q.
        spared: cells that q can no longer draw: accepted earlier, or rejected before that.
    """

    def __init__(self, p: Probabilities, q: Probabilities):
        self.p, self.q, self.whole = p, q, total(p)
        self.reset(())

    def reset(self, spared: Sequence[int]) -> None:
        """Start again from p."""
        self.s, self.total, self.spared = 0.0, self.whole, spared

    def at(self, x: int) -> float:
        """Return p' of a cell that is not spared, times `total`."""
        return max(0.0, float(self.p[x]) - self.s * float(self.q[x]))

    def reject(self, mass: float) -> float:
        """Update p' after a rejected draft from q, whose sum is `mass`; p' does not change if it would become zero.

        Returns:
            the sum of max(0, p' - q / mass).
        """
        s, before = self.s + self.total / mass, self.total
        left = excess(self.p, self.q, s) + sum([min(float(self.p[x]), s * float(self.q[x])) for x in self.spared])
        if left > 0:
            self.s, self.total = s, left
        return left / before

    def probabilities(self) -> Probabilities:
        """Return p' times `total`."""
        p, q, s = self.p, self.q, self.s
        left: Any
        if isinstance(p, Tensor):
            left = torch.sub(p, torch.as_tensor(q), alpha=s).clamp_(min=0)
        else:
            left = [max(0.0, a - s * b) for a, b in zip(p, q, strict=True)]
        for x in self.spared:
            left[x] = float(p[x])
        return left


def verify_layer(
    p: Probabilities,
    q: Probabilities,
    drafts: Sequence[Drafted],
    mass: float,
    width: int,
    numbers: Iterator[float],
    kind: str,
) -> Verdict:
    """Accept drafts of a layer until there are `width`, and draw the missing entries; all are i.i.d. from p.

    Args:
        p, q: probabilities of the cells that are possible under p; q is not renormalised.
        drafts: the drafts whose parents were accepted, in the order drawn.
        mass: the sum of q in the rows of these parents.
        width: the number of entries to produce.
        numbers: keyed uniform numbers; one per decision.
        kind: how the drafts were drawn.
    """
    residual, left = ResidualDistribution(p, q), mass  # left: the mass of q that can still be drawn
    spent: list[int] = []  # cells that cannot be drawn any more
    accepted: list[int] = []
    tried = 0
    for x, q_x in drafts:  # D6
        if len(accepted) == width:
            break
        tried += 1
        left = max(left, q_x)
        good = x is not None and next(numbers) * q_x * residual.total < residual.at(x) * left
        if not good:
            residual.reject(left)
        if kind == WITHOUT:
            left -= q_x
            spent = spent if x is None else [*spent, x]
        if good:
            accepted.append(x)  # type: ignore[arg-type]
            residual.reset(spent)
    entries = list(accepted)
    if len(entries) < width:  # D7
        entries += pick(residual.probabilities(), islice(numbers, 1))
        entries += pick(p, islice(numbers, width - len(entries)))
    return Verdict(entries, len(accepted), tried)


def without(q: Probabilities, cells: Iterable[int]) -> Probabilities:
    """Probabilities with some cells set to 0."""
    q = q.clone() if isinstance(q, Tensor) else list(q)
    for cell in cells:
        q[cell] = 0.0
    return q


def total(q: Probabilities) -> float:
    """The sum of probabilities, in float64."""
    return float(q.sum(dtype=torch.float64)) if isinstance(q, Tensor) else sum(q)


def excess(p: Probabilities, q: Probabilities, s: float) -> float:
    """Return the sum of the positive elements of p - s q."""
    if isinstance(p, Tensor):
        return total(torch.sub(p, torch.as_tensor(q), alpha=s).clamp_(min=0))
    return math.fsum([a - s * b for a, b in zip(p, q, strict=True) if a > s * b])


def acceptances(p: Probabilities, q: Probabilities, m: int, mass: float) -> list[float]:
    """Equation (4), for m drafts: the probability that each is accepted if all before it were rejected."""
    residual = ResidualDistribution(p, q)
    return [1 - residual.reject(mass) for _ in range(m)]


def accepted_counts(alphas: Sequence[float]) -> Iterator[float]:
    """Equations (2) and (3): the probabilities that k of the drafts are accepted, k = 0, 1, ..., computed lazily."""
    first, none = [], [1.0]  # probabilities that the m-th draft is the first accepted, and that none of m is accepted
    for alpha in alphas:
        first.append(alpha * none[-1])
        none.append(none[-1] * (1 - alpha))
    counts = none  # probabilities that k of m drafts are accepted, m = k, k + 1, ...
    yield counts[-1]
    for _ in alphas:
        counts = [sum(map(mul, first, counts[m::-1])) for m in range(len(counts) - 1)]
        yield counts[-1]


def dynamic_width(counts: Iterable[float], threshold: float) -> int:
    """Equation (7): the largest width that is reached with at least the probability `threshold`.

    Args:
        counts: probabilities that k drafts are accepted, k = 0, 1, ...
        threshold: t.
    """
    at_least, widest = 1.0, 0
    for k, probability in enumerate(counts):
        if at_least < threshold - 1e-9:
            break
        widest = k
        at_least -= probability
    return widest
