"""docs/constraints.md: its snippets run in their order and print what the page shows."""

import re
from pathlib import Path

import pytest

PAGE = (Path(__file__).parent.parent / "docs/constraints.md").read_text(encoding="utf-8")
SNIPPETS = re.findall(r"^```python\n(.*?)^```\n(?:\n```text\n(.*?)^```)?", PAGE, re.M | re.S)


def test_the_snippets_run(capsys: pytest.CaptureFixture[str]):
    names: dict = {}
    for code, shown in SNIPPETS:
        line = PAGE[: PAGE.index(code)].count("\n")
        exec(compile("\n" * line + code, "docs/constraints.md", "exec"), names)
        assert capsys.readouterr().out == shown, f"line {line}"
    assert len(SNIPPETS) == 4 and sum(bool(shown) for _, shown in SNIPPETS) == PAGE.count("```text") == 2
