"""Values that the annotation of a field accepts, as text and as JSON."""

from collections.abc import Callable
from dataclasses import MISSING, dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, Optional, Union

import pytest

from engine.values import default_of, kind_of, kinds, plain, written

FAILS = object()


@pytest.mark.parametrize(
    ("annotation", "text", "value"),
    [
        (int, "5", 5),
        (int, "-5", -5),
        (int, "5.0", FAILS),
        (int, "x", FAILS),
        (float, "5", 5.0),
        (float, "1e-3", 1e-3),
        (float, "nan", FAILS),
        (float, "inf", FAILS),
        (bool, "true", True),
        (bool, "false", False),
        (bool, "1", FAILS),
        (str, "5", "5"),
        (str, "true", "true"),
        (str, "", ""),
        (Path, "a/b", Path("a/b")),
        (Path, "", FAILS),
        (Path | None, "none", None),
        (str | Path | None, "a", "a"),
        (int | None, "none", None),
        (int | None, "", FAILS),
        (Optional[int], "3", 3),  # noqa: UP045
        (Union[int, str], "x", "x"),  # noqa: UP007
        (int | str, "3", 3),
        (float | bool, "true", True),
        (Literal["fast", "slow"], "slow", "slow"),
        (Literal["fast", "slow"], "slower", FAILS),
        (Literal[1, 2, True] | None, "2", 2),
        (Annotated[int, "anything"], "7", 7),
        (Annotated[Literal["a"], 1] | float, "a", "a"),
        (str | Callable[[], int], "x", "x"),
        (Any, "5", 5),
        (Any, "x", "x"),
    ],
)
def test_text(annotation: Any, text: str, value: Any):
    kind = kind_of(annotation)
    assert kind.is_flag and kind.metavar
    if value is FAILS:
        with pytest.raises(ValueError, match=f"expected {kind}, got"):
            kind.parse(text)
    else:
        found = kind.parse(text)
        assert found == value and type(found) is type(value)


@pytest.mark.parametrize(
    ("annotation", "given", "value"),
    [
        (int, 5, 5),
        (int, True, FAILS),
        (int, 5.0, FAILS),
        (int, "5", FAILS),
        (int, None, FAILS),
        (float, 5, 5.0),
        (float, True, FAILS),
        (bool, True, True),
        (bool, 1, FAILS),
        (str, "x", "x"),
        (str, 5, FAILS),
        (Path, "x", Path("x")),
        (Path, Path("x"), Path("x")),
        (str | Path | None, "x", "x"),
        (int | None, None, None),
        (Literal["a", 2], "a", "a"),
        (Literal["a", 2], 2, 2),
        (Literal[1], True, FAILS),
        (Literal["a"], "b", FAILS),
        (list[int], [1], [1]),
        (list[int] | None, "x", "x"),
        (Any, [1], [1]),
    ],
)
def test_json(annotation: Any, given: Any, value: Any):
    kind = kind_of(annotation)
    if value is FAILS:
        with pytest.raises(ValueError, match=f"expected {kind}, got"):
            kind.convert(given)
    else:
        found = kind.convert(given)
        assert found == value and type(found) is type(value)


def test_what_a_command_line_cannot_write_is_no_flag():
    for annotation in (list[int], Callable[[], int], dict, None, list[int] | None):
        assert not kind_of(annotation).is_flag


@pytest.mark.parametrize(
    ("annotation", "metavar", "says"),
    [
        (int, "N", "an integer"),
        (int | float, "X", "a number"),
        (str | Path | None, "FILE", "none or a file"),
        (Literal["a", "b"] | None, "a|b", "a or b or none"),
        (Literal["auto"] | int, "auto|N", "auto or an integer"),
        (bool, "true|false", "true or false"),
        (Any, "VALUE", None),
    ],
)
def test_help(annotation: Any, metavar: str, says: str | None):
    assert kind_of(annotation).metavar == metavar and says in (None, str(kind_of(annotation)))


def test_fields():
    @dataclass
    class Config:
        needed: "int"
        unknown: "Absent" = 1  # type: ignore[name-defined]  # noqa: F821
        several: list[int] = field(default_factory=lambda: [1])
        made: int = field(default=3, init=False)

    assert kinds(Config)["unknown"].convert("x") == "x"  # a name that cannot be resolved: anything goes
    assert list(kinds(Config)) == ["needed", "unknown", "several"]
    assert default_of(Config, "needed") is MISSING and written(MISSING) == "must be given"
    assert default_of(Config, "several") == [1] and default_of(Config, "unknown") == 1
    assert plain({"a": 1}) == "{'a': 1}" and plain((1, Path("x"), None)) == [1, "x", None]
