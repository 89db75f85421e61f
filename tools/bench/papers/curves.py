"""Curves of log-likelihood over nodes or time: points on them, the rows that they are made of, and their drawing."""

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

from tools.bench.figures import log_axis


def plot_curves(axis: Any, rows: Sequence[dict[str, Any]], title: str, *, log: bool) -> None:
    """A curve of log-likelihood over evaluated nodes for each search of the rows, beam search's in black."""
    for (search,), group in grouped(rows, "search"):
        points = sorted((r["nodes"], r["value"]) for r in group)
        style = {"color": "black", "marker": "o"} if search == "beam" else {"marker": "s"}
        axis.plot(*zip(*points, strict=True), ms=4, lw=1.2, label=search, **style)
    axis.set(title=title, xlabel="nodes evaluated")
    if log:
        log_axis(axis, [r["nodes"] for r in rows])


def abscissa(curve: Sequence[tuple[float, float]], value: float) -> float | None:
    """Where a curve, through points (x, value), first reaches a value; None where it does not or begins above it."""
    curve = sorted(curve)
    for (x0, v0), (x1, v1) in itertools.pairwise(curve):
        if v0 <= value <= v1:
            return x0 + (x1 - x0) * (value - v0) / (v1 - v0) if v1 > v0 else x0
    return None


def ordinate(curve: Sequence[tuple[float, float]], x: float) -> float:
    """The height of a curve, through points (x, value), where it is defined."""
    curve = sorted(curve)
    (x0, v0), (x1, v1) = next(((p, q) for p, q in itertools.pairwise(curve) if p[0] <= x <= q[0]))
    return v0 + (v1 - v0) * (x - x0) / (x1 - x0)


def grouped(rows: Iterable[dict[str, Any]], *keys: str) -> list[tuple[tuple, list[dict[str, Any]]]]:
    """Rows by the values of keys, in order of appearance."""
    groups: dict[tuple, list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault(tuple(row[key] for key in keys), []).append(row)
    return list(groups.items())


def share(ratio: float | None) -> str:
    return "-" if ratio is None else f"{ratio:.0%}"
