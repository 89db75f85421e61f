"""The Python of the README and of five pages runs in its order and prints what the page shows."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize(
    ("page", "snippets", "shown"),
    [
        ("README.md", 1, 1),
        ("docs/completion.md", 1, 1),
        ("docs/constraints.md", 5, 2),
        ("docs/drafts.md", 1, 0),
        ("docs/embedding.md", 14, 9),
        ("docs/vectors.md", 3, 3),
    ],
)
def test_the_snippets_run(page: str, snippets: int, shown: int, capsys: pytest.CaptureFixture[str]):
    text, names = (ROOT / page).read_text(encoding="utf-8"), {}
    found = re.findall(r"^```python\n(.*?)^```\n(?:\n```text\n(.*?)^```)?", text, re.M | re.S)
    for code, expected in found:
        line = text[: text.index(code)].count("\n")
        exec(compile("\n" * line + code, page, "exec"), names)
        printed = capsys.readouterr().out
        assert printed == expected or (not expected and "engine.capabilities" in code), f"line {line}"
    assert (len(found), sum(bool(expected) for _, expected in found)) == (snippets, shown)
    assert shown == text.count("```text")  # each is compared
