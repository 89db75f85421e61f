"""Figures: matplotlib, from the extra `viz`, loaded when one is drawn."""

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

from engine.errors import UsageError
from tools.bench.measure import progress


def need_figures() -> None:
    """Raise UsageError where matplotlib is missing; call it before a long measurement."""
    if importlib.util.find_spec("matplotlib") is None:
        raise UsageError("figures need matplotlib", remedy="pip install 'coppice[viz]'")


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
    progress(f"saved: {path.name}")
