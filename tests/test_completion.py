"""docs/completion.md: its snippet runs and prints what the page shows, and is what the benchmark measures."""

import inspect
import json
import re
from pathlib import Path

import pytest

from tools.bench import __main__ as bench
from tools.bench import keyboard

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs/completion.md").read_text(encoding="utf-8")


def test_the_snippet_runs(capsys: pytest.CaptureFixture[str]):
    [(code, shown)] = re.findall(r"^```python\n(.*?)^```\n\n```text\n(.*?)^```", PAGE, re.M | re.S)
    exec(compile("\n" * PAGE[: PAGE.index(code)].count("\n") + code, "docs/completion.md", "exec"), {})
    assert capsys.readouterr().out == shown


def test_the_page_shows_the_class_that_is_measured():
    assert inspect.getsource(keyboard.Keyboard) in PAGE


def test_the_benchmark(capsys: pytest.CaptureFixture[str]):
    assert bench.main(["keyboard", "--keys", "9", "--interval", "2", "--threads", "1", "--tokens", "3"]) == 0
    [row] = json.loads(capsys.readouterr().out.splitlines()[-1])["results"]
    assert (row["lists"], row["bursts"], row["texts"], row["evaluated"]) == (9, 1, 3, 1)
    assert 3 <= row["passes"] <= 5 and 0 < row["median"] <= row["p90"] and row["cpu"] > 0
