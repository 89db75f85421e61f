"""Figures: matplotlib, from the extra `viz`, loaded when one is drawn."""

import importlib.util
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from engine.errors import UsageError
from tools.bench.measure import progress


def need_figures() -> None:
    """Raise UsageError where matplotlib is missing; call it before a long measurement."""
    if importlib.util.find_spec("matplotlib") is None:
        raise UsageError("figures need matplotlib", remedy="pip install matplotlib")


def draw(path: str | Path, size: tuple[float, float], paint: Callable[[Any], None]) -> None:
    """Paint a figure (inches) into a file, its kind by the suffix; the same figure gives the same bytes."""
    need_figures()
    import matplotlib
    from matplotlib.figure import Figure

    path = Path(path)
    with matplotlib.rc_context({"svg.hashsalt": "coppice", "svg.fonttype": "none"}):  # text stays text: small files
        figure = Figure(figsize=size, layout="constrained")
        paint(figure)
        figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
    progress(f"saved: {path}")


def log_axis(axis: Any, values: Sequence[float]) -> None:
    """Make the x axis logarithmic, with ticks at 1, 2 and 5 times powers of ten: matplotlib's own labels overlap."""
    low, high = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)))
    near = [m * 10.0**power for power in range(low, high + 1) for m in (1, 2, 5)]
    ticks = [x for x in near if min(values) / 1.2 <= x <= 1.2 * max(values)]
    axis.set_xscale("log")
    axis.set_xticks(ticks, [f"{x:g}" for x in ticks])
    axis.set_xticks([], minor=True)
