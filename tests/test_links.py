"""Links lead to files and headings that exist; paragraphs are as wide as code; commands have lines of their own."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.M)
    return {re.sub(r"[^\w -]", "", heading.strip().lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links(page: Path):
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.S)
    for link in re.findall(r"\]\((?!https?:)([^)\s]+)\)", text):
        name, _, anchor = link.partition("#")
        target = page.parent / name if name else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


@pytest.mark.parametrize("page", [page for page in PAGES if page.parent.name != "results"], ids=lambda page: page.name)
def test_paragraphs_are_at_most_120_columns_wide(page: Path):
    text = re.sub(r"^ *```.*?^ *```$", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
    wide = [line for line in text.splitlines() if len(line) > 120 and not re.match(r"\s*\||    ", line)]
    assert not wide


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_a_line_of_a_block_of_commands_begins_with_a_command(page: Path):
    text = re.sub(r"^ *```.*?^ *```$", "", page.read_text(encoding="utf-8"), flags=re.M | re.S).replace("\\\n", "")
    command = re.compile(r"    (\w+=\S+ )*(export|make|compute-sanitizer|(env/bin/)?(python3?|coppice)) ")
    for block in re.findall(r"(?<=\n\n)(?:    .*\n)+", text):
        lines = block.splitlines()
        assert not command.match(lines[0]) or all(map(command.match, lines)), block
