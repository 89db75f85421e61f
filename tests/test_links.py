"""Links between the pages lead to files and headings that exist; paragraphs are as wide as code."""

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
def test_commands_can_be_copied(page: Path):
    """A command is one line, and a line is one command: a shell would take the rest of a wrapped one for another."""
    lines = re.findall(r"^    (\S.*)", page.read_text(encoding="utf-8"), flags=re.M)
    assert not [line for line in lines if re.match(r"tests/|-\w |to ", line) or line.count(" # ") > 1]
