"""Suffixes of texts: C++ makes the state and the drafts of the definition, and these are what a search of all finds."""

import random

import pytest

from kernels.cpp import why_not
from kernels.suffixes import BOUNDARY, IMPLEMENTATIONS, Suffixes, add, foreign, known, propose

TABLES = (
    *("symbols", "short_back", "long_back", "pair_back", "single_back"),
    *("single_heads", "pair_heads", "short_heads", "long_heads"),
)
COUNTS = "written", "kept", "since"
needs_cpp = pytest.mark.skipif(why_not() is not None, reason=f"no C++ kernels: {why_not()}")
each_impl = pytest.mark.parametrize("impl", ["reference", pytest.param("cpp", marks=needs_cpp)])


def drawn(r: random.Random, vocab: int) -> list[int]:
    """A random text, which repeats itself in half of the cases; a boundary may come first."""
    length = r.randrange(200)
    text = [r.randrange(vocab) for _ in range(length)]
    if r.random() < 0.5:
        text = (text[: r.randrange(1, 9)] * length)[:length]
    return [BOUNDARY, *text] if r.random() < 0.5 else text


def tail_of(r: random.Random, text: Suffixes, vocab: int) -> list[int]:
    """Random tokens, after which part of the text may follow."""
    tail = [r.randrange(vocab) for _ in range(r.randrange(40))]
    tokens = [s & text.fields.token_mask for part in text.parts() for s in part if s != BOUNDARY]
    if tokens and r.random() < 0.8:
        start = r.randrange(len(tokens))
        tail += tokens[start : start + r.randrange(40)]
    return [min(token, vocab - 1) for token in tail]


@needs_cpp
@pytest.mark.parametrize("seed", range(40))
def test_cpp_equals_the_definition(seed: int):
    r = random.Random(seed)
    vocab, capacity = r.choice([2, 3, 5, 50, 1000]), r.choice([64, 100, 1000])
    ours, exact, fine = Suffixes(capacity, vocab), Suffixes(capacity, vocab), Suffixes(1000, vocab, fine=True)
    if r.random() < 0.5:
        ours, exact = (Suffixes(capacity, vocab, fine=True) for _ in range(2))
    for _ in range(r.randrange(1, 10)):
        text, mark = drawn(r, vocab), r.randrange(3) << exact.token_bits
        add(ours, text, mark, impl="cpp")
        add(exact, text, mark, impl="reference")
        add(fine, drawn(r, vocab), impl="cpp")
        if r.random() < 0.1:
            kept = r.randrange(capacity)
            ours.forget(kept)
            exact.forget(kept)
        assert all(getattr(ours, name) == getattr(exact, name) for name in TABLES)
        assert all(getattr(ours.fields, name) == getattr(exact.fields, name) for name in COUNTS)
        for _ in range(4):
            tail = tail_of(r, exact, vocab)
            sizes = r.randrange(1, 64), r.randrange(1, 40), r.choice([0.0, 0.01, 0.2])
            found, wanted = (
                propose([(fine, 0, 2), (x, mark, 0), (x, 0, 2)], tail, *sizes, impl=impl)
                for x, impl in ((ours, "cpp"), (exact, "reference"))
            )
            assert found == wanted
            assert known(ours, tail, mark, impl="cpp") == known(exact, tail, mark, impl="reference")


@each_impl
def test_a_draft_is_what_followed_the_longest_suffix(impl: str):
    text = Suffixes(1000, 100)
    add(text, [9, 1, 2, 3, 4, 50, 51, BOUNDARY, 8, 2, 3, 4, 60, 61], impl=impl)
    tokens, parents, scores = propose([(text, 0, 0)], [9, 1, 2, 3, 4], 4, 8, 0.0, impl=impl)
    assert tokens[:2] == [50, 51] and parents[:2] == [-1, 0] and 60 in tokens
    assert scores == sorted(scores, reverse=True) and all(0 < score < 1 for score in scores)
    assert all(scores[i] <= scores[parent] for i, parent in enumerate(parents) if parent >= 0)
    assert propose([(text, 0, 0)], [8, 2, 3, 4], 1, 8, 0.0, impl=impl)[0] == [60]


@each_impl
def test_what_followed_most_often_comes_first(impl: str):
    text = Suffixes(1000, 100)
    for token in (7, 8, 7, 7, 8):
        add(text, [BOUNDARY, 1, 2, 3, token], impl=impl)
    tokens, parents, scores = propose([(text, 0, 0)], [1, 2, 3], 8, 1, 0.0, impl=impl)
    assert (tokens, parents) == ([7, 8], [-1, -1]) and scores[0] / scores[1] == pytest.approx(1.5)


@each_impl
def test_pairs_are_found_where_nothing_longer_is(impl: str):
    text = Suffixes(1000, 100)
    add(text, [5, 1, 2, 30, 31], impl=impl)
    assert propose([(text, 0, 0)], [6, 1, 2], 9, 9, 0.0, impl=impl)[0] == [30, 31]
    add(text, [BOUNDARY, 1, 2, 40], impl=impl)
    assert propose([(text, 0, 0)], [6, 1, 2], 1, 9, 0.0, impl=impl)[0] == [40]  # the newest


@each_impl
def test_a_fine_text_is_looked_up_again_at_each_node(impl: str):
    fine, coarse = Suffixes(1000, 100, fine=True), Suffixes(1000, 100)
    for text in (fine, coarse):
        add(text, [1, 2, 3, 4, BOUNDARY, 20, 4, 30, 31], impl=impl)
    tokens, parents, _ = propose([(fine, 0, 0)], [9, 2], 9, 9, 0.0, impl=impl)  # a single symbol is enough
    assert (tokens, parents) == ([3, 4, 30, 31], [-1, 0, 1, 2])
    assert propose([(coarse, 0, 0)], [9, 2], 9, 9, 0.0, impl=impl)[0] == []
    assert propose([(coarse, 0, 0)], [1, 2], 9, 9, 0.0, impl=impl)[0] == [3, 4]


@each_impl
def test_depth_nodes_and_least_score_are_limits(impl: str):
    text = Suffixes(1000, 100)
    add(text, list(range(40)), impl=impl)
    tail = list(range(8))
    assert len(propose([(text, 0, 0)], tail, 100, 5, 0.0, impl=impl)[0]) == 5
    assert len(propose([(text, 0, 0)], tail, 3, 50, 0.0, impl=impl)[0]) == 3
    tokens, _, scores = propose([(text, 0, 0)], tail, 100, 50, 0.5, impl=impl)
    assert 0 < len(tokens) < 32 and min(scores) >= 0.5


@each_impl
def test_the_oldest_leaves(impl: str):
    text = Suffixes(64, 100)
    add(text, [BOUNDARY, 1, 2, 3, 4, 5], impl=impl)
    add(text, [BOUNDARY, *[90] * 60], impl=impl)
    assert len(text) == 64 and sum(map(len, text.parts())) == 64
    assert propose([(text, 0, 0)], [1, 2, 3], 4, 4, 0.0, impl=impl)[0] == []
    assert [s for part in text.parts() for s in part] == [3, 4, 5, BOUNDARY, *[90] * 60]


@each_impl
def test_marks_keep_texts_apart(impl: str):
    text = Suffixes(1000, 100)
    one = 1 << text.token_bits
    add(text, [BOUNDARY, 1, 2, 3, 4, 5, 6, 7, 8], one, impl=impl)
    add(text, [9, 9, 9], 2 * one, impl=impl)  # without a boundary: what follows is another's all the same
    tail = [1, 2, 3, 4, 5, 6, 7]
    assert propose([(text, one, 0)], tail, 9, 9, 0.0, impl=impl)[0] == [8]
    assert propose([(text, 2 * one, 0)], tail, 9, 9, 0.0, impl=impl)[0] == []
    assert known(text, [1, 2, 3, 4, 5, 6, 7, 8, 9], one, impl=impl) == 8
    assert known(text, [1, 2, 3, 4, 5, 6, 7, 8], 2 * one, impl=impl) == 0


@each_impl
def test_text_that_is_there_is_known(impl: str):
    text = Suffixes(1000, 100)
    add(text, [BOUNDARY, *range(1, 20)], impl=impl)
    assert known(text, [*range(1, 15), 99, 16], impl=impl) == 14
    assert known(text, [1, 2, 3], impl=impl) == 0


@each_impl
@pytest.mark.parametrize("wrong", [100, 127, 3 << 7 | 5, 1 << 7 | 5, 1 << 31, BOUNDARY - 1])
def test_what_no_text_has_is_found(impl: str, wrong: int):
    symbols = memoryview(bytearray(4 * 40)).cast("I")
    for place, symbol in enumerate((0, 99, BOUNDARY, 2 << 7, 2 << 7 | 99)):
        symbols[place] = symbol
    assert foreign(symbols, 100, [0, 2], impl=impl) == len(symbols)
    symbols[33] = wrong
    assert foreign(symbols, 100, [0, 2], impl=impl) == 33
    assert foreign(symbols[:0], 100, [], impl=impl) == 0 == foreign(symbols, 100, [], impl=impl)


@each_impl
def test_wrong_arguments_are_refused(impl: str):
    text = Suffixes(64, 100)
    for tokens in ([100], [-1], [1 << 33]):
        with pytest.raises(ValueError, match="expected tokens from 0 to 99, got"):
            add(text, tokens, impl=impl)
        with pytest.raises(ValueError, match="expected tokens from 0 to 99, got"):
            propose([(text, 0, 0)], tokens, 1, 1, 0.0, impl=impl)
    for mark in (1, 1 << 32, -128, BOUNDARY - 127):
        with pytest.raises(ValueError, match="mark: expected"):
            add(text, [1], mark, impl=impl)
    for nodes, depth, least in ((0, 1, 0.0), (1 << 20, 1, 0.0), (1, 0, 0.0), (1, 1, 2.0)):
        with pytest.raises(ValueError, match="nodes, a depth"):
            propose([(text, 0, 0)], [1], nodes, depth, least, impl=impl)
    with pytest.raises(ValueError, match="at least one text"):
        propose([], [1], 1, 1, 0.0, impl=impl)
    with pytest.raises(ValueError, match="bonus"):
        propose([(text, 0, 99)], [1], 1, 1, 0.0, impl=impl)


def test_sizes_and_names_are_checked():
    for capacity, vocab, message in ((1, 10, "capacity"), (1 << 40, 10, "capacity"), (64, 0, "vocab_size")):
        with pytest.raises(ValueError, match=message):
            Suffixes(capacity, vocab)
    with pytest.raises(ValueError, match=f"expected one of {', '.join(IMPLEMENTATIONS)}"):
        add(Suffixes(64, 10), [1], impl="triton")
