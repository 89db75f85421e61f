"""Validated reading of configuration fields."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from models.checkpoint.fields import Fields
from models.errors import CheckpointError


def fields(**config) -> Fields:
    return Fields(config, "config.json")


def test_values_pass():
    read = fields(n=3, x=2, flag=False, name="silu", none=None, nested={"y": 0.5}, empty={}, ids=[2, 1], id=0)
    assert read.int("n") == 3 and read.int("none", 7) == 7 and read.int("absent", None) is None
    assert read.float("x") == 2.0 and isinstance(read.float("x"), float)
    assert read.bool("flag", True) is False and read.str("name") == "silu"
    assert read.choice("name", {"silu", "gelu"}) == "silu"
    nested = read.sub("nested")
    assert nested is not None and nested.float("y") == 0.5
    assert read.sub("empty") is None and read.sub("absent") is None
    assert read.within("nested").float("y") == 0.5
    with pytest.raises(CheckpointError, match=r"^absent\.y: expected a value, got nothing"):
        read.within("absent").float("y")
    assert read.ids("ids") == {1, 2} and read.ids("id") == {0} and read.ids("none") == frozenset()


@pytest.mark.parametrize(
    ("reader", "value"),
    [
        *(("int", value) for value in (None, 0, -1, 10**18, 10**5000, 1.0, True, "3", [3], float("nan"))),
        *(("float", value) for value in (None, float("nan"), float("inf"), 10**400, True, "1", {})),
        *(("bool", value) for value in (None, 0, 1, "true")),
        *(("str", value) for value in (None, 3, ["a"])),
        *(("ids", value) for value in (-1, True, 1.5, "2", [2, -1], [[2]], 2**40, {})),
        *(("sub", value) for value in ("linear", [1], True)),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_bad_values_are_named(reader, value):
    with pytest.raises(CheckpointError) as caught:
        getattr(fields(width=value), reader)("width")
    error = caught.value
    assert "width: expected" in error.what and "got" in error.what and len(error.what) < 200
    assert (error.where, error.exit_code) == ("config.json", 3)


def test_choice_lists_what_is_possible():
    with pytest.raises(CheckpointError, match="expected one of gelu, silu, got 'tanh'"):
        fields(act="tanh").choice("act", {"silu", "gelu"})


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)


@given(JSON, st.sampled_from(["int", "float", "bool", "str", "sub", "ids"]))
def test_any_json_is_read_or_refused(value, reader):
    try:
        result = getattr(fields(f=value), reader)("f")
    except CheckpointError:
        return
    if reader in ("int", "float"):
        assert result == value and abs(result) <= 1e30
