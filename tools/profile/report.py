"""Tables of a profile, and its timeline."""

import math
from collections import defaultdict
from statistics import median
from typing import Any

from tools.bench.report import rows_table
from tools.profile.clock import MODEL_PARTS, SEARCH, TEXT, Step
from tools.profile.trace import Operator

ABOVE = {"loc": "lower right", "bbox_to_anchor": (1, 1), "frameon": False}  # places legends outside the panel
GROUPS = ("model", "search", "engine", "text")
LEGEND = """*ms* is the time per step without the profiler; a part excludes the parts inside it. *MB* is the least that
must be moved per step, *MFLOP* the operations of matrix products. *of roofline* is (the larger of MB / bandwidth and
MFLOP / rate) / ms; it exceeds 100% where caches are faster than memory. A question mark stands for numbers that do not
follow from the shapes. *model* is everything inside `forward` and `logits`; *search* is the algorithm and its
`Evaluate.read`; *engine* is packing, the driver with its trees, and log-softmax; *text and events* is the time between
two steps. On a GPU these are times of the host, which waits for the device only in *answers to the host*."""
CALLS = """Operators of the layers in C++, timed by their own clocks in decoding steps without the stop watch. *share*
is relative to the whole step."""
OPERATORS = """Operators by torch.profiler, which slows short ones down: compare shares, not times. *self ms*, *MB* and
*MFLOP* are per step; the MB come from the shapes of the arguments, where there is a formula for them."""


def paint(figure: Any, bare: list[Step], timed: list[Step]) -> None:
    """Three panels over the steps: time by group, nodes evaluated by model, live nodes and KV bytes."""
    times, nodes, live = figure.subplots(3, 1, sharex=True)
    steps = range(len(bare))
    stacked = [[sum(s for part, s in step.parts.items() if group_of(part) == g) * 1e3 for step in timed]
               for g in GROUPS]  # fmt: skip
    times.stackplot(range(len(timed)), stacked, labels=GROUPS, step="mid")
    times.plot(steps, [step.seconds * 1e3 for step in bare], color="black", lw=0.8, label="without the stop watch")
    usual = max(median(step.seconds for step in run) for run in (bare, timed))  # a prompt's step may tower above it
    times.set(ylabel="ms per step", ylim=(0, 1.5e3 * usual))
    times.legend(fontsize=7, ncols=5, **ABOVE)
    base = [0] * len(bare)
    for role in dict.fromkeys(role for step in bare for role in step.nodes):
        count = [step.nodes.get(role, 0) for step in bare]
        nodes.bar(steps, count, 0.9, base, label=role)
        base = [a + b for a, b in zip(base, count, strict=True)]
    nodes.set(ylabel="nodes evaluated", yscale="symlog" if max(base) > 8 * median(base) else "linear")
    nodes.legend(fontsize=7, ncols=3, **ABOVE)
    held = live.twinx()  # an area below the line, as both have one shape where a page holds one token
    held.fill_between(steps, [step.kv_bytes / 1e6 for step in bare], color="tab:orange", alpha=0.3, lw=0)
    held.set(ylim=(0, None))
    held.set_ylabel("KV pages held, MB (area)", color="tab:orange")
    live.plot(steps, [step.live for step in bare], color="tab:blue")
    live.set(xlabel="step", ylim=(0, None), zorder=held.get_zorder() + 1, facecolor="none")
    live.set_ylabel("live nodes (line)", color="tab:blue")


def group_of(part: str) -> str:
    """model, search, engine or text."""
    if part.partition(": ")[2] in MODEL_PARTS.values():
        return "model"
    return {SEARCH: "search", TEXT: "text"}.get(part, "engine")


def shares(rows: list[dict[str, Any]]) -> str:
    """The share of each group, of each model where there are several."""
    names = {"search": "the search", "engine": "the engine's host work", "text": TEXT}
    found: dict[str, float] = defaultdict(float)
    for row in sorted(rows, key=lambda row: GROUPS.index(row["group"])):
        found[names.get(row["group"]) or row["part"].partition(":")[0]] += row["share"]
    if {"draft", "reward"}.isdisjoint(found) and "target" in found:
        found = {"the model": found.pop("target"), **found}
    return ", ".join(f"{share:.0%} {name}" for name, share in found.items() if share > 0.0005)


def amount(value: float | None) -> str:
    if value is None:
        return "?"
    return (f"{value / 1e6:,.0f}" if value >= 1e9 else f"{value / 1e6:.3g}") if value else ""


def part_table(rows: list[dict[str, Any]]) -> str:
    for row in rows:
        model = row["group"] == "model"
        row["mb"], row["mflop"] = (amount(row[key]) if model else "" for key in ("bytes", "operations"))
        row["roofline"] = f"{row['of_roofline']:.0%}" if row["of_roofline"] else ""
    return rows_table(rows, {"part": "{part}", "group": "{group}", "ms": "{seconds:ms.3f}", "share": "{share:.1%}",
                             "MB": "{mb}", "MFLOP": "{mflop}", "of roofline": "{roofline}"})  # fmt: skip


def call_rows(steps: list[Step]) -> list[dict[str, Any]]:
    """Mean seconds per step of the operators that C++ called, the longest first, and their shares of the steps."""
    whole = sum(step.seconds for step in steps)
    sums: dict[str, float] = defaultdict(float)
    for step in steps:
        for name, seconds in step.calls.items():
            sums[name] += seconds
    found = sorted(((seconds, name) for name, seconds in sums.items() if seconds), reverse=True)
    return [{"operator": name, "seconds": s / len(steps), "share": s / whole} for s, name in found]


def call_table(rows: list[dict[str, Any]]) -> str:
    return rows_table(rows, {"operator": "{operator}", "ms": "{seconds:ms.3f}", "share": "{share:.1%}"})


def operator_table(
    found: list[Operator], top: int, steps: int, wall: float, bandwidth: float = math.inf, rate: float = math.inf
) -> str:
    """The operators that took longest, and the rest of the steps' time.

    Args:
        top: operators to list.
        steps, wall: number of steps, and their seconds.
        bandwidth, rate: bytes and operations per second of the machine.
    """
    rows: list[dict[str, Any]] = []
    for op in found[:top]:
        spent, least = op.device_seconds or op.seconds, max((op.bytes or 0) / bandwidth, op.operations / rate)
        roofline = f"{least / spent:.0%}" if op.bytes and spent and least else ""
        rows.append(vars(op) | {"mb": amount(op.bytes / steps) if op.bytes else "", "roofline": roofline})
    rest = found[top:]
    others = {"calls": sum(op.calls for op in rest), "seconds": sum(op.seconds for op in rest)}
    rows.append({"name": f"{len(rest)} others", **others})
    rows.append({"name": "Python, and the profiler itself", "seconds": wall - sum(op.seconds for op in found)})
    for row in rows:
        row |= {"share": row["seconds"] / wall, "mflop": amount((row.get("operations") or 0) / steps)}
        row |= {key: row[key] / steps for key in ("calls", "seconds", "device_seconds") if key in row}
    device = {"device ms": "{device_seconds:ms.3f}"} if any(op.device_seconds for op in found) else {}
    columns = {"operator": "{name}", "calls": "{calls:.1f}", "self ms": "{seconds:ms.3f}", "share": "{share:.1%}"}
    return rows_table(rows, columns | device | {"MB": "{mb}", "MFLOP": "{mflop}", "of roofline": "{roofline}"})
