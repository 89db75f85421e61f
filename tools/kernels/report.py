"""The lab's report: tables, a verdict on each contender, a picture."""

import math
import statistics
from collections.abc import Sequence
from itertools import product
from typing import Any

import torch

from tools.bench.report import rows_table, table
from tools.kernels.lab import ALLOWED, Lab, Row, Shape, verdicts

RIGHT = f"""*error* is the difference from the definition in float64 on the same rounded numbers, over all shapes. *x
plain* divides it by the error of the definition in the dtype itself (on small shapes the largest of several draws), for
the largest and the root mean square error, and takes the worst shape; at most {ALLOWED:.0f} is right. *traps* counts
the traps passed, of those that the implementation took. kv_write has nothing to round: it is right if every bit is."""
FAST = """Cells give the median time of one layer in microseconds, and the *floor* as a share of it. The floor is the
larger of bytes / bandwidth (each key and value that any query sees once, queries and output) and operations / rate.
sdpa and flex get contiguous keys and a ready mask, which an engine would have to make. Work that is done once per pass,
not per layer, is left out."""
CUT = 4.0  # larger ratios of errors are drawn at this value
SHAPE = {"heads": "{setting}", "prefix": "{prefix}", "queries": "{queries}", "branching": "{branching}"}


def report(lab: Lab, absent: dict[str, dict[str, str]], candidate: str | None) -> str:
    """All tables."""
    rates = ", ".join(f"{rate / 1e9:.0f} GFLOP/s ({kind})" for kind, rate in lab.rates.items())
    threads = f", {torch.get_num_threads()} threads" if lab.device.type == "cpu" else ""
    parts = [f"{lab.device.type}{threads}. Memory moves {lab.bandwidth / 1e9:.1f} GB/s; large products run at {rates}."]
    for operator, reasons in absent.items():
        rows = [row for row in lab.rows if row.operator == operator]
        names = list(dict.fromkeys(row.impl for row in rows))
        parts.append(f"**{operator}**: {'; '.join(verdict(lab, rows, operator, name) for name in names)}.")
        if reasons:
            parts.append("Not measured: " + "; ".join(f"{name} ({why})" for name, why in reasons.items()) + ".")
        parts += [right_table(lab, rows, operator, names), RIGHT]
        caught = [trap for trap in lab.traps if trap.operator == operator]
        faults = [f"- {t.impl}, {t.dtype}, {t.name}: {t.wrong}" for t in caught if t.wrong]
        refusals = sorted({f"- {r.impl} refuses: {r.refused}" for r in [*rows, *caught] if r.refused})
        parts += ["\n".join(lines) for lines in (faults, refusals) if lines]
        parts += [fast_table(rows, names), FAST]
        focus = candidate if candidate in names else "torch" if "torch" in names else names[0]
        parts += [f"{focus} in detail:", detail_table([row for row in rows if row.impl == focus])]
    return "\n\n".join(part for part in parts if part)


def verdict(lab: Lab, rows: Sequence[Row], operator: str, name: str) -> str:
    """A sentence on a contender: right or wrong, and its time relative to the fastest other one."""
    right = "right" if verdicts(lab)[operator][name] else "WRONG"
    others: dict[Shape, float] = {}
    for row in rows:
        if row.impl != name and row.seconds:
            others[row.shape] = min(others.get(row.shape, math.inf), row.seconds["median"])
    mine = [(row.seconds["median"], others[row.shape]) for row in rows
            if row.impl == name and row.seconds and row.shape in others]  # fmt: skip
    if not mine:
        return f"{name} is {right}"
    times = statistics.geometric_mean(a / b for a, b in mine)
    quickest = sum(a < b for a, b in mine)
    fastest = f"is the fastest on {quickest} of {len(mine)}"
    return f"{name} is {right}, takes {times:.2f}x the time of the fastest other, and {fastest}"


def right_table(lab: Lab, rows: Sequence[Row], operator: str, names: Sequence[str]) -> str:
    lines = []
    for name, dtype in product(names, dict.fromkeys(row.shape.dtype for row in rows)):
        mine = [r for r in rows if r.impl == name and r.shape.dtype == dtype and not r.refused]
        took = [t for t in lab.traps if (t.operator, t.impl, t.dtype) == (operator, name, dtype) and not t.refused]
        trapped = f"{sum(not t.wrong for t in took)} of {len(took)}" if took else "not for it"
        figures = [
            len(mine), f"{max(r.error_max or 0.0 for r in mine):.1e}",
            f"{statistics.fmean(r.error_mean or 0.0 for r in mine):.1e}", f"{max(r.x_plain or 0.0 for r in mine):.2f}",
            sum(r.nan for r in mine), trapped,
        ] if mine else ["refused"] * 6  # fmt: skip
        lines.append([name, dtype, *figures])
    return table(["implementation", "dtype", "shapes", "error, max", "mean", "x plain", "NaN", "traps"], lines)


def fast_table(rows: Sequence[Row], names: Sequence[str]) -> str:
    by_shape = {shape: {row.impl: row for row in rows if row.shape == shape} for shape in (row.shape for row in rows)}
    records = [record(mine[names[0]]) | {name: time_cell(mine[name]) for name in names} for mine in by_shape.values()]
    return rows_table(records, SHAPE | {"floor us": "{floor_seconds:us.1f}"} | {name: f"{{{name}}}" for name in names})


def detail_table(rows: Sequence[Row]) -> str:
    columns = SHAPE | {
        "us": "{seconds[median]:us.1f}", "min-max": "{seconds[min]:us.1f}-{seconds[max]:us.1f}",
        "GB/s": "{bytes_per_second:G.1f}", "of floor": "{of_floor:.0%}", "bound by": "{bound}",
        "error, max": "{error_max:.1e}", "mean": "{error_mean:.1e}", "x plain": "{x_plain:.2f}",
    }  # fmt: skip
    timed = [record(row) for row in rows if row.seconds is not None]
    return rows_table(timed, columns) if timed else ""


def record(row: Row) -> dict[str, Any]:
    return row.record() | {"setting": f"{row.shape.dtype} {row.shape.heads}:{row.shape.kv_heads}x{row.shape.head}"}


def time_cell(row: Row) -> str:
    if row.refused or row.seconds is None:
        return "refused" if row.refused else "interpreted"
    return f"{row.seconds['median'] * 1e6:.{0 if row.seconds['median'] > 1e-4 else 1}f}, {row.of_floor:.0%}"


def paint(figure: Any, rows: Sequence[Row]) -> None:
    """Times above, errors below, shapes side by side; a column for each operator, which may lack implementations."""
    operators = list(dict.fromkeys(row.operator for row in rows))
    widths = [len({row.shape for row in rows if row.operator == operator}) for operator in operators]
    colours = {name: f"C{i}" for i, name in enumerate(dict.fromkeys(row.impl for row in rows))}
    legend: dict[str, Any] = {}
    panels = figure.subplots(2, len(operators), sharex="col", squeeze=False, height_ratios=[3, 1], width_ratios=widths)
    for operator, (times, errors) in zip(operators, zip(*panels, strict=True), strict=True):
        mine = [row for row in rows if row.operator == operator]
        shapes = list(dict.fromkeys(row.shape for row in mine))
        floor = {row.shape: row.floor_seconds * 1e6 for row in mine}
        xs, floors = range(len(shapes)), [floor[s] for s in shapes]
        [legend["floor"]] = times.step(xs, floors, where="mid", color="black", lw=1)
        for name in dict.fromkeys(row.impl for row in mine):
            found = [(shapes.index(row.shape), row) for row in mine if row.impl == name and not row.refused]
            timed = [(x, row.seconds["median"] * 1e6) for x, row in found if row.seconds]
            how: dict[str, Any] = {"marker": "o", "ls": "", "color": colours[name]}
            [legend[name]] = times.plot([x for x, _ in timed], [t for _, t in timed], ms=4, **how)
            errors.plot([x for x, _ in found], [min(row.x_plain or 0.0, CUT) for _, row in found], ms=3, **how)
        times.set(yscale="log", title=operator, ylabel="us per layer")
        times.grid(axis="y", alpha=0.3)
        errors.axhline(ALLOWED, color="red", lw=0.8)
        errors.set(ylim=(0, CUT * 1.05), ylabel=f"error / plain (to {CUT:.0f})")
        labels = [f"{s.dtype} {s.heads}:{s.kv_heads} p{s.prefix} q{s.queries} b{s.branching}" for s in shapes]
        errors.set_xticks(range(len(shapes)), labels, rotation=90, fontsize=6)
    figure.legend(legend.values(), legend.keys(), loc="outside upper center", ncols=len(legend), fontsize=8)
