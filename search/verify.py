"""Drafts drawn and accepted, layer by layer: the pure part of DSBD, on plain distributions.

Everything here is exact whatever q is: what is accepted, and what is drawn to complete it, is i.i.d. from p.
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import NamedTuple

import torch
from torch import Tensor

from search.joint import Probabilities, pick

IID, WITHOUT, DISTINCT = KINDS = ("iid", "without-replacement", "distinct")
MOST = 4  # draws of DISTINCT per draft
NOTHING = 1e-9  # probability left at which drawing without replacement stops


def draw(q: Probabilities, n: int, kind: str, numbers: Iterator[float]) -> list[int]:
    """Drafts of a layer, in order.

    Args:
        q: what to draw from.
        n: drafts; different ones unless they are IID.
        kind: IID; WITHOUT: the first n different ones of endless i.i.d. draws, which is drawing without replacement;
            DISTINCT: those draws themselves, up to the n-th different one or 4 n.
    """
    if kind == IID:
        return pick(q, islice(numbers, n))
    drawn: list[int] = []
    while True:
        for x in pick(q, islice(numbers, n)):
            drawn.append(x)
            if len(set(drawn)) == n:
                return drawn if kind == DISTINCT else list(dict.fromkeys(drawn))
        if kind == DISTINCT:
            if len(drawn) >= MOST * n:
                return drawn
        elif total(q := without(q, drawn)) < NOTHING:
            return list(dict.fromkeys(drawn))


class Drafted(NamedTuple):
    """A draft: its cell in q, its cell in p (None where p is 0), its probability under q."""

    j: int
    x: int | None
    q: float


class Verdict(NamedTuple):
    """Cells of p that the list consists of now; how many of them are accepted drafts; how many drafts were tried."""

    entries: list[int]
    accepted: int
    tried: int


def verify(
    p: Probabilities,
    q: Probabilities,
    drafts: Sequence[Drafted],
    mass: float,
    width: int,
    numbers: Iterator[float],
    kind: str,
) -> Verdict:
    """One layer: drafts are accepted until there are `width`; what is missing is drawn. All i.i.d. from p.

    Args:
        p, q: of the cells that p gives any probability; q not renormalised.
        drafts: in the order drawn, those whose parents are there.
        mass: of q in the rows of these parents.
        width: entries wanted.
        numbers: keyed; one per decision.
        kind: how the drafts were drawn.
    """
    rest, left_q, left = p, q, mass  # p'; q and its mass without what cannot be drawn any more
    gone: dict[int, None] = {}
    accepted: list[int] = []
    tried = 0
    for j, x, q_x in drafts:  # lines 15 to 25
        if len(accepted) == width:
            break
        if j in gone:
            continue
        tried += 1
        left = max(left, q_x)
        good = x is not None and next(numbers) * q_x < float(rest[x]) * left
        if good:
            accepted.append(x)  # type: ignore[arg-type]
            rest = p
        else:
            rest, _ = residual(rest, left_q, left)
        if kind == DISTINCT and good:  # everything can be drawn again
            left_q, left, gone = q, mass, {}
        elif kind != IID:
            left -= q_x
            gone[j] = None
            if x is not None:
                left_q = without(left_q, [x])
    entries = list(accepted)
    if len(entries) < width:  # lines 26 to 29
        entries += pick(rest, islice(numbers, 1))
        entries += pick(p, islice(numbers, width - len(entries)))
    return Verdict(entries, len(accepted), tried)


def residual(p: Probabilities, q: Probabilities, mass: float) -> tuple[Probabilities, float]:
    """norm(max(0, p - q / mass)) and its sum before; p itself where that is nothing."""
    if isinstance(p, Tensor):
        over = torch.sub(p, torch.as_tensor(q), alpha=1 / mass).clamp_(min=0)
        left = total(over)
        return (over.div_(left), left) if left > 0 else (p, 0.0)
    short = [max(0.0, a - float(b) / mass) for a, b in zip(p, q, strict=True)]
    left = sum(short)
    return ([a / left for a in short], left) if left > 0 else (p, 0.0)


def without(q: Probabilities, cells: Iterable[int]) -> Probabilities:
    """Probabilities with some cells emptied."""
    q = q.clone() if isinstance(q, Tensor) else list(q)
    for cell in cells:
        q[cell] = 0.0
    return q


def total(q: Probabilities) -> float:
    """The sum."""
    return float(q.sum()) if isinstance(q, Tensor) else sum(q)


def acceptances(p: Probabilities, q: Probabilities, m: int, mass: float) -> list[float]:
    """Equation (4): the probability that a draft is accepted after all before it were rejected, for m drafts."""
    alphas = []
    for _ in range(m):
        p, over = residual(p, q, mass)
        alphas.append(1 - over)
    return alphas


def accepted_counts(alphas: Sequence[float]) -> list[float]:
    """Equations (2) and (3): the probabilities that k of the drafts are accepted, k = 0, 1, ..."""
    first, none = [], [1.0]
    for alpha in alphas:
        first.append(alpha * none[-1])
        none.append(none[-1] * (1 - alpha))
    P = [[none[m]] for m in range(len(none))]  # P[m][k]
    for m in range(1, len(P)):
        for k in range(1, m + 1):
            P[m].append(sum(first[i - 1] * P[m - i][k - 1] for i in range(1, m - k + 2)))
    return P[-1]


def distinct_counts(p: Probabilities, q: Probabilities, m: int) -> list[float]:
    """What `accepted_counts` tells, about drafts drawn without replacement: as if the most probable were drawn first.

    An estimate: no sum tells it exactly. What matters is that a draft that was accepted cannot be drawn again.
    """
    left, masses = [q], [1.0]
    for cell in torch.as_tensor(q).topk(min(m, len(q))).indices.tolist():
        masses.append(masses[-1] - float(q[cell]))
        left.append(without(left[-1], [cell]))
    alphas = {}
    for start in range(m):  # the draft after the latest that was accepted
        rest = p
        for draft in range(start, m):
            over = 1.0
            if draft < len(left) and masses[draft] > NOTHING:
                rest, over = residual(rest, left[draft], masses[draft])
            alphas[start, draft] = 1 - over
    chances = {(0, 0): 1.0}  # of (accepted, start)
    for draft in range(m):
        before, chances = chances, {}
        for (accepted, start), chance in before.items():
            good = chance * alphas[start, draft]
            for state, share in (((accepted + 1, draft + 1), good), ((accepted, start), chance - good)):
                chances[state] = chances.get(state, 0.0) + share
    return [sum(chance for (k, _), chance in chances.items() if k == accepted) for accepted in range(m + 1)]


def dynamic_width(counts: Sequence[float], threshold: float) -> int:
    """Equation (7): the largest width that is reached at least with this probability.

    Args:
        counts: probabilities that k drafts are accepted, k = 0, 1, ...
        threshold: t.
    """
    at_least, widest = 1.0, 0
    for k, probability in enumerate(counts):
        if at_least >= threshold - 1e-9:
            widest = k
        at_least -= probability
    return widest
