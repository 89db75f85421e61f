"""`tools.bench keyboard`: what it types and counts, and that docs/completion.md shows what it measures."""

import inspect
import json
from pathlib import Path

import pytest

from tools.bench import __main__ as bench
from tools.bench import keyboard

PAGE = Path(__file__).parents[2] / "docs/completion.md"


def test_the_page_shows_the_class_that_is_measured():
    assert inspect.getsource(keyboard.Keyboard) in PAGE.read_text(encoding="utf-8")


def test_the_command(capsys: pytest.CaptureFixture[str]):
    assert bench.main(["keyboard", "--keys", "9", "--interval", "2", "--threads", "1", "--tokens", "3"]) == 0
    [row] = json.loads(capsys.readouterr().out.splitlines()[-1])["results"]
    assert (row["lists"], row["bursts"], row["texts"], row["evaluated"]) == (9, 1, 3, 1)
    assert 3 <= row["passes"] <= 5 and 0 < row["median"] <= row["p90"] and row["cpu"] > 0
