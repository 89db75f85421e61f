"""Slots of nodes: taken together or not at all, taken over from an earlier tree, claimed ahead, counted."""

import pytest

from engine.cache.tree import TokenTree
from engine.errors import KVMemoryError
from tests.engine.cache.test_tree import check, evaluate, expected, pool_of, visible


def test_a_failing_place_takes_nothing():
    pool = pool_of(3)
    tree = TokenTree(pool, [1] * 6)
    nodes = tree.grow([tree.root] * 9, range(9))
    with pytest.raises(KVMemoryError, match="full"):
        tree.allocate(6, nodes)
    assert pool.used_pages == 0 and tree.trunk.cached == 0 and not any(map(tree.is_evaluated, nodes))
    check(pool, tree)
    tree.allocate(6, nodes[:4])
    check(pool, tree)
    assert pool.free_pages == 0


def test_adopting_shares_the_common_prefix_but_never_the_last_prompt_token():
    pool = pool_of(10)
    tree = TokenTree(pool, [1, 2, 3, 4, 5, 6])
    evaluate(tree, [tree.root])
    trunk = tree.retire()
    tree.release()
    check(pool, extra=trunk.pages)
    same = TokenTree(pool, [1, 2, 3, 4, 5, 6], trunk=trunk)
    assert same.reused == 5 and same.pending([same.root]) == (1, [])
    evaluate(same, [same.root])
    assert visible(same, same.root) == expected(same, same.root)
    check(pool, same)
    other = TokenTree(pool, [1, 2, 3, 9], trunk=same.retire())
    assert other.reused == 3 and len(other.pages_held) == 1
    check(pool, other)
    shorter = TokenTree(pool, [1], trunk=other.retire())
    assert shorter.reused == 0 and shorter.pages_held == []
    check(pool, shorter)


def test_peaks():
    tree = TokenTree(pool_of(20), [1] * 5)
    evaluate(tree, [tree.root])
    nodes = tree.grow([tree.root] * 3, range(3))
    evaluate(tree, nodes)
    assert (tree.peak_live, tree.peak_unshared, tree.peak_pages) == (8, 18, 3)
    tree.keep(nodes[:1])
    assert tree.live_tokens == 6 and tree.peak_live == 8


def test_claims_keep_a_trunk_in_one_piece():
    pool = pool_of(30)
    trees = [TokenTree(pool, [1], expected=40) for _ in range(3)]
    for tree in trees:
        evaluate(tree, [tree.root])
    for step in range(39):
        for tree in trees:
            tree.keep(tree.grow([tree.root], [step]))
            evaluate(tree, [tree.root])
    assert [len(tree.trunk_runs()) for tree in trees] == [1, 1, 1] and pool.free_pages == 0
    check(pool, *trees)
    for tree in trees:
        tree.release()
    assert pool.claim(30) == range(1, 31)
