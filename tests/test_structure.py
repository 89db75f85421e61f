"""The room map of docs/structure.md is complete and true; the tests that docs/checkpoints.md names exist.

Its format: the section `## Room map` holds table rows whose first cell is one path in backticks, relative to the root,
folders with a slash at the end:

    | `engine/cache/tree.py` | the token tree |
    | `kernels/tree_attention/` | attention over trunk and ancestors |

Every package, every module directly in a package (but `__init__.py`), and every folder in a package that holds modules
has a row; a row for such an inner folder stands for all that is in it, but for `OPEN_ROOMS`. Each row's path exists, as
does every path in backticks anywhere on the page.
"""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
PACKAGES = ("engine", "kernels", "models", "search", "tools")
OPEN_ROOMS = (
    "engine/text",
    "engine/app",
    "engine/cache",
    "engine/contract",
    "engine/rules",
    "engine/step",
    "engine/load",
)  # whose modules have rows of their own
CORE_ROOMS = (
    "engine/cache",
    "engine/contract",
    "engine/rules",
    "engine/step",
)  # whose modules have tests of their names
PAGE = (ROOT / "docs/structure.md").read_text(encoding="utf-8")


def room_map() -> list[str]:
    section = re.search(r"^## Room map\n(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL)
    assert section, "docs/structure.md has no section '## Room map'"
    return re.findall(r"^\| *`([^`]+)` *\|", section[1], re.MULTILINE)


def rooms() -> set[str]:
    found = set()
    for package in PACKAGES:
        found.add(f"{package}/")
        for module in (ROOT / package).rglob("*.py"):
            inner = module.relative_to(ROOT / package).parts
            if len(inner) > 1:
                found.add(f"{package}/{inner[0]}/")
            if (len(inner) == 1 or f"{package}/{inner[0]}" in OPEN_ROOMS) and module.name != "__init__.py":
                found.add(f"{package}/{module.relative_to(ROOT / package).as_posix()}")
    return found


def test_every_room_is_on_the_map() -> None:
    missing = sorted(rooms() - set(room_map()))
    assert not missing, f"no row in docs/structure.md: {missing}"


def test_nothing_is_on_the_page_twice() -> None:
    rows = re.findall(r"^\|([^|]+)\|", PAGE.partition("## Where a flag is added")[0], re.MULTILINE)
    rows = [row for row in rows if not set(row) <= set("- ") and row.strip() not in ("what", "path")]
    assert len(rows) > 100
    assert len(rows) == len(set(rows)), sorted(row for row in set(rows) if rows.count(row) > 1)


def test_every_module_of_the_core_has_a_test_file_of_its_name() -> None:
    modules = {file for room in CORE_ROOMS for file in (ROOT / room).glob("*.py") if file.name != "__init__.py"}
    homes = {file: ROOT / "tests" / file.parent.relative_to(ROOT) / f"test_{file.name}" for file in modules}
    missing = sorted(str(home.relative_to(ROOT)) for home in homes.values() if not home.is_file())
    assert len(modules) > 30 and not missing, missing


def test_every_module_says_what_it_is() -> None:
    """Rooms whose modules have no rows of their own rely on this."""
    modules = [module for package in PACKAGES for module in (ROOT / package).rglob("*.py")]
    silent = [module for module in modules if not ast.get_docstring(ast.parse(module.read_text(encoding="utf-8")))]
    assert len(modules) > 400 and not silent, silent


def test_everything_on_the_page_exists() -> None:
    paths = {*room_map(), *re.findall(r"`((?:[\w.-]+/)+[\w.-]*)`", PAGE)}
    absent = sorted(p for p in paths if not ((ROOT / p).is_dir() if p.endswith("/") else (ROOT / p).is_file()))
    assert not absent, f"docs/structure.md names what does not exist: {absent}"


def test_everything_happens_where_the_page_says() -> None:
    section = re.search(r"^## Where things happen\n(.*?)(?=^## )", PAGE, re.MULTILINE | re.DOTALL)
    assert section
    places = re.findall(r"`([\w.]+)` in `([\w/]+\.py)`", section[1])
    assert len(places) >= 20
    for name, file in places:
        outer, _, inner = name.rpartition(".")
        nodes = ast.parse((ROOT / file).read_text(encoding="utf-8")).body
        if outer:
            [kind] = (node for node in nodes if isinstance(node, ast.ClassDef) and node.name == outer)
            nodes = kind.body
        assert inner in {getattr(node, "name", "") for node in nodes}, f"{file} has no {name}"


def test_every_guard_of_the_checkpoint_tables_exists() -> None:
    """Node ids in backticks; a parameter of a golden test is the folder of its model."""
    page = (ROOT / "docs/checkpoints.md").read_text(encoding="utf-8")
    traps, faults = re.findall(r"^\|[ |-]+\|\n((?:\|.+\n)+)", page, re.MULTILINE)
    for row in (traps + faults).splitlines():
        assert "::test_" in row or "no test yet" in row, row
    assert len(traps.splitlines()) >= 33 and re.findall(r"^\| (\d+) ", faults, re.M) == [str(n) for n in range(1, 21)]
    for file, name, model in re.findall(r"`(tests/[\w/.]+)::(\w+)(?:\[([\w/]+)\])?`", page):
        source = (ROOT / file).read_text(encoding="utf-8")
        assert re.search(rf"^def {name}\(", source, re.MULTILINE), f"{file} has no {name}"
        assert not model or (ROOT / "tests/golden" / model / "config.json").is_file(), f"no golden model {model}"
    assert "::" not in re.sub(r"`tests/[\w/.]+::\w+(?:\[[\w/]+\])?`", "", page), "a node id of another form"
