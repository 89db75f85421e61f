"""Spellings of a vocabulary."""

import pytest

from engine.text.tokenizer import Pieces

SPELLED = ["a", None, "", "\u0120the", "\U0001f600", "\ud800", None]


def test_as_the_list_that_it_is_made_of():
    pieces = Pieces(SPELLED)
    assert [*pieces] == SPELLED and len(pieces) == 7
    assert pieces[-2] == "\ud800" and pieces.index("\u0120the") == 3 and not [*Pieces([])]
    with pytest.raises(IndexError):
        pieces[7]
