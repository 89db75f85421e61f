"""Drafted nodes: hidden until the search grows them, then nodes like others; no slot of them is lost."""

import random

import pytest

from engine.cache.drafts import DraftedNode
from engine.cache.pool import PagePool
from engine.cache.tree import TokenTree
from engine.errors import KVMemoryError
from models.shape import ModelShape
from tests.invariants import check_tree

SHAPE = ModelShape(layers=1, kv_heads=1, head_dim=4, vocab_size=50, max_positions=None)


def pool_of(pages, page_size):
    return PagePool(SHAPE, pages, page_size)


def grown(pages=60, page_size=1):
    """A tree with a prompt of three tokens and two children of its root, all evaluated."""
    tree = TokenTree(pool_of(pages, page_size), [1, 2, 3])
    tree.allocate(3, [])
    nodes = tree.grow([tree.root] * 2, [7, 8])
    tree.allocate(0, nodes)
    return tree, nodes


def chain(tree, node, tokens):
    found = []
    for token in tokens:
        node, new = tree.draft(node, token)
        assert new
        node.row = token
        found.append(node)
    check_tree(tree)
    return found


def test_a_search_does_not_see_drafted_nodes():
    tree, nodes = grown()
    before = tree.grown, tree.live_tokens, tree.live_branches, tree.peak_live
    chain(tree, nodes[0], [4, 5, 6])
    assert before == (tree.grown, tree.live_tokens, tree.live_branches, tree.peak_live)
    assert tree.children(nodes[0]) == {} and tree.descend([7, 4]) == nodes[0]
    assert tree.page_count == 3 + 2 + 3
    assert tree.draft(nodes[0], 4)[1] is False  # it is there


def test_growing_adopts_a_drafted_node_with_its_slot_and_row():
    tree, nodes = grown()
    first, second = chain(tree, nodes[0], [4, 5])
    places = [tree.slots.table[0][node.slot] for node in (first, second)]
    below = tree.latest_ancestors(second, 9)
    node = tree.child(nodes[0], 4)
    assert node == tree.grown - 1 and tree.is_evaluated(node) and tree.drafts.rows == {node: 4}
    assert tree.pending([node])[1] == []
    assert tree.ancestry(second) == tree.ancestry(node) | 1 << second.slot
    assert [tree.slots.table[0][tree._slot[node]]] == places[:1]
    assert tree.latest_ancestors(second, 9) == below
    check_tree(tree)
    last = tree.child(node, 5)
    assert tree.latest_ancestors(last, 9) == below and tree.drafts.rows == {node: 4, last: 5} and not tree.drafts
    check_tree(tree)


def test_keep_frees_what_the_choice_left_and_keeps_what_hangs_below_it():
    tree, nodes = grown()
    chain(tree, nodes[0], [4, 5])
    chain(tree, nodes[1], [6])
    chain(tree, tree.root, [9])
    tree.keep([nodes[0]])
    check_tree(tree)
    assert [node.token for node in tree.drafts] == [4, 5] and tree.page_count == 4 + 2
    node = tree.child(tree.root, 4)
    tree.keep([node])
    check_tree(tree)
    assert tree.trunk.tokens == [1, 2, 3, 7, 4] and tree.trunk.cached == 5 and tree.drafts.rows == {node: 4}
    tree.keep([tree.child(tree.root, 8)])
    assert not tree.drafts and tree.drafts.rows == {} and tree.page_count == 5
    tree.release()
    assert tree.pool.used_pages == 0


@pytest.mark.parametrize("first", [False, True], ids=["after branches", "in the first slot"])
def test_a_row_that_does_not_suffice_is_evaluated_again_with_all_below(first):
    tree, [above, _] = grown()
    if first:
        tree.keep([above])
        above = tree.root
    chain(tree, above, [4, 5, 6])
    node = tree.child(above, 4)
    below = tree.child(node, 5)
    tree.forget_row(node)
    check_tree(tree)
    assert tree.pending([below])[1] == [node, below] and not tree.drafts and tree.drafts.rows == {}
    assert tree.page_count == (4 if first else 5)


def test_the_same_holds_in_the_trunk():
    tree, nodes = grown()
    chain(tree, nodes[0], [4, 5])
    node = tree.child(nodes[0], 4)
    tree.keep([node])
    tree.forget_row(node)
    check_tree(tree)
    assert tree.pending([node]) == (1, []) and not tree.drafts


def test_a_full_pool_takes_no_drafts_and_drops_them():
    tree, nodes = grown(pages=7)
    chain(tree, nodes[0], [4, 5])
    with pytest.raises(KVMemoryError):
        tree.draft(nodes[1], 4)
    check_tree(tree)
    node = tree.child(nodes[0], 4)
    assert tree.drop_drafts() == 2 and tree.drop_drafts() == 0
    assert tree.page_count == 5 and not tree.is_evaluated(node)
    check_tree(tree)


@pytest.mark.parametrize("page_size", [1, 4])
def test_random_work_loses_no_slot(page_size):
    rng = random.Random(page_size)
    for _ in range(60):
        tree, live = grown(rng.choice((12, 40)), page_size)
        for _ in range(30):
            try:
                match rng.randrange(5):
                    case 0:
                        spots = [n for n in (*live, *tree.drafts) if isinstance(n, DraftedNode) or tree.is_evaluated(n)]
                        parent, token = rng.choice(spots or [None]), rng.randrange(5)
                        if parent is None:
                            continue
                        if isinstance(parent, DraftedNode) or token not in tree.children(parent):
                            tree.draft(parent, token)
                    case 1:
                        live = [*live, tree.child(rng.choice(live), rng.randrange(5))]
                    case 2:
                        node = rng.choice(live)
                        trunk, nodes = tree.pending([node])
                        tree.allocate(trunk, nodes)
                        tree.drafts.rows.pop(node, None)
                    case 3:
                        kept = rng.sample(live, rng.randrange(1, len(live) + 1))
                        tree.keep(kept)
                        live = [node for node in live if tree.is_live(node)]
                    case 4 if rng.random() < 0.1:
                        tree.drop_drafts()
            except KVMemoryError:
                tree.drop_drafts()
            check_tree(tree)
        tree.release()
        assert tree.pool.used_pages == 0
