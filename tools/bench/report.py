"""Reporting: a table for people, a JSON line for programs, and the section of docs/results/ that each command owns."""

import argparse
import json
import re
import shlex
import string
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from engine.app.cli import output_file
from engine.errors import reason_of
from tools.bench import measure

RESULTS = Path(__file__).parents[2] / "docs" / "results"


def add_save_flag(parser: argparse._ActionsContainer, page: str = "benchmarks") -> None:
    """--save: a Path or None, see `finish`. `page` is the name of a page in docs/results."""
    text = f"write the command's section of docs/results/{page}.md, or of FILE, and pictures into the same folder"
    parser.add_argument("--save", nargs="?", type=_page, const=RESULTS / f"{page}.md", metavar="FILE", help=text)


def _page(path: str) -> Path:
    """A page that a section can be written to. An argparse type."""
    page = output_file(path)
    try:
        page.read_text(encoding="utf-8") if page.exists() else ""
    except (OSError, ValueError) as error:
        raise argparse.ArgumentTypeError(f"cannot be read: {reason_of(error)}") from None
    return page


def table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A Markdown table that also reads well as plain text: first column to the left, the others to the right."""
    cells = [[str(cell) for cell in row] for row in [head, *rows]]
    widths = [max(2, *(len(row[i]) for row in cells)) for i in range(len(head))]  # room for "-:"

    def line(row: Sequence[str]) -> str:
        padded = [c.ljust(w) if i == 0 else c.rjust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True))]
        return f"| {' | '.join(padded)} |"

    rule = [("-" * w if i == 0 else "-" * (w - 1) + ":") for i, w in enumerate(widths)]
    return "\n".join([line(cells[0]), line(rule), *map(line, cells[1:])])


def slug(*words: str) -> str:
    """Words as the name of a section."""
    return re.sub(r"\W+", "-", " ".join(words).lower()).strip("-")


UNITS = {"us": 1e6, "ms": 1e3, "kB": 1e-3, "G": 1e-9, "M": 1e-6}


class Cells(string.Formatter):
    """`str.format` for cells: "{seconds:ms.2f}" scales by a unit, "MB" and "yes" are formats, None gives a blank."""

    def get_field(self, field_name: str, args: Any, kwargs: Any) -> Any:
        try:
            return super().get_field(field_name, args, kwargs)
        except (KeyError, TypeError):  # a missing field, or a field of None
            return None, field_name

    def format_field(self, value: Any, format_spec: str) -> str:
        if value is None:
            return ""
        if format_spec == "MB":
            return megabytes(value)
        if format_spec == "yes":
            return "yes" if value else "no"
        unit = next((unit for unit in UNITS if format_spec.startswith(unit)), "")
        return format(value * UNITS[unit] if unit else value, format_spec.removeprefix(unit))


def rows_table(rows: Sequence[Mapping[str, Any]], columns: Mapping[str, str]) -> str:
    """A table of records: a column per heading, its cells by a format of the record's fields (see `Cells`)."""
    cells = Cells()
    return table(list(columns), [[cells.vformat(form, (), row) for form in columns.values()] for row in rows])


def comparison(name: str, value: float | None, target: float, at_most: bool = False, unit: str = "") -> dict[str, Any]:
    """A row of a table of targets; `value` is None where it was not measured."""
    shown = [None if x is None else f"{x * (1e3 if unit == 'ms' else 1):.2f} {unit}".strip() for x in (value, target)]
    met = None if value is None else value <= target if at_most else value >= target
    return {"name": name, "value": value, "target": target, "met": met, "measured": shown[0] or "not measured",
            "sign": "at most" if at_most else "at least", "wanted": shown[1]}  # fmt: skip


def comparison_table(compared: Sequence[Mapping[str, Any]]) -> str:
    """The table of the targets."""
    return rows_table(compared, {"quantity": "{name}", "measured": "{measured}", "target": "{sign} {wanted}",
                                 "met": "{met:yes}"})  # fmt: skip


def megabytes(count: float | None) -> str:
    """Bytes as MB (10^6)."""
    return "?" if count is None else f"{count / measure.MB:.{1 if abs(count) < 100 * measure.MB else 0}f}"


def command_line(argv: Sequence[str], module: str = "tools.bench") -> str:
    """The command as typed, with folders and files of this machine by their names only."""

    def short(word: str) -> str:
        flag, equals, value = word.rpartition("=") if word.startswith("--") else ("", "", word)
        path = "/" in value and (value[0] in "/.~" or Path(value).exists())
        return f"{flag}{equals}{Path(value).name}" if path else word

    return shlex.join(["python", "-m", module, *map(short, argv)])


def stamp(argv: Sequence[str], module: str = "tools.bench") -> dict[str, Any]:
    """The date, the machine, the versions and the command of a measurement."""
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "machine": measure.machine(),
        "versions": measure.versions(),
        "command": command_line(argv, module),
    }


def stamp_text(made: dict[str, Any]) -> str:
    """The stamp, for the page."""
    m = made["machine"]
    memory = f", {m['memory_bytes'] / 2**30:.0f} GiB" if m["memory_bytes"] else ""
    gpu = f", {m['gpu']}" if m["gpu"] else ""
    load = f" (load when started {m['load']:.1f})" if m["load"] is not None else ""
    versions = ", ".join(f"{name} {version}" for name, version in made["versions"].items() if version)
    return (
        f"{made['date']}; {m['cpu']} ({m['vector']}), {m['cores']} cores{memory}{gpu}{load}; {versions}.\n\n"
        f"    {made['command']}"
    )


def finish(name: str, made: dict[str, Any], body: str, result: dict[str, Any], save: Path | None) -> None:
    """Print the tables and, unless a person reads them on a terminal, the JSON line, of tens of kilobytes; with `save`
    replace the command's section of that page."""
    if save is not None:
        write_section(save, name, f"{stamp_text(made)}\n\n{body}")
    print(body, flush=True)
    if not sys.stdout.isatty():
        print(json.dumps({"bench": name, **made, **result}), flush=True)


def write_section(page: Path, name: str, text: str, title: str = "") -> None:
    """Replace the text between the section's markers; a page without them gets the section, with a title, at its
    end."""
    begin, end = f"<!-- bench:{name} -->", f"<!-- /bench:{name} -->"
    block = f"{begin}\n{text}\n{end}"
    old = page.read_text(encoding="utf-8") if page.exists() else ""
    pattern = re.compile(re.escape(begin) + ".*?" + re.escape(end), re.DOTALL)
    if pattern.search(old):
        new = pattern.sub(lambda _: block, old)
    else:
        new = f"{old.rstrip()}\n\n## {title or name}\n\n{block}\n".lstrip()
    page.write_text(new, encoding="utf-8")
    measure.progress(f"saved: section {name} of {page.name}")
