"""README.md: its Python runs as it stands and prints what the page shows."""

import re
from pathlib import Path

import pytest

PAGE = (Path(__file__).parent.parent / "README.md").read_text(encoding="utf-8")
SNIPPETS = re.findall(r"^```python\n(.*?)^```\n\n```text\n(.*?)^```", PAGE, re.M | re.S)


def test_the_snippets_run(capsys: pytest.CaptureFixture[str]):
    assert len(SNIPPETS) == PAGE.count("```python") == 1
    for code, shown in SNIPPETS:
        exec(compile(code, "README.md", "exec"), {})
        assert capsys.readouterr().out == shown
