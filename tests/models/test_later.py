"""Imports under `later` wait for `import_now` in a command, and nowhere else."""

import sys
from types import ModuleType
from typing import Any

import pytest

from models import later

SOURCE = """
from models.later import later
with later():
    import decimal
    import xml.dom.minidom as dom
    from fractions import Fraction
    from xml import sax
def half(whole: Fraction | None, other: decimal.Decimal = None) -> None | Fraction:
    return Fraction(whole, 2)
"""


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "argv", ["-m", "x"])
    monkeypatch.setattr(sys, "orig_argv", ["python", "-m", "ours.tool"])
    monkeypatch.setattr(later, "_modules", None)


def run(package: str = "ours") -> dict[str, Any]:
    later.let_wait(package)
    names: dict[str, Any] = {"__name__": "example"}
    exec(SOURCE, names)
    return names


def test_they_wait_for_the_call(command: None):
    names = run()
    assert all(isinstance(names[name], later.Later) for name in ("decimal", "dom", "Fraction", "sax"))
    with pytest.raises(TypeError, match="'Later' object is not callable"):
        names["half"](1)
    later.import_now()
    assert names["half"](1) == 0.5
    assert isinstance(names["decimal"], ModuleType)
    assert [names["dom"].__name__, names["sax"].__name__] == ["xml.dom.minidom", "xml.sax"]
    assert run("another")["half"](1) == 0.5  # from now on none waits


@pytest.mark.parametrize(
    ("argv", "orig_argv"),
    [(["/ours/tool.py"], ["python", "-m", "ours.tool"]), (["-m"], ["python", "-m", "theirs", "--x", "ours"])],
)
def test_other_programs_import_at_once(command: None, monkeypatch: pytest.MonkeyPatch, argv: list, orig_argv: list):
    monkeypatch.setattr(sys, "argv", argv)
    monkeypatch.setattr(sys, "orig_argv", orig_argv)
    assert run()["half"](1) == 0.5


def test_a_missing_module_is_an_import_error(command: None):
    later.let_wait("ours")
    exec("with later():\n    from no_such_module import name", {"later": later.later, "__name__": "example"})
    with pytest.raises(ModuleNotFoundError, match="no_such_module"):
        later.import_now()
