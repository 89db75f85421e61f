"""States are computed once per token; those of nodes that have gone are dropped."""

import pytest

from engine import Choices
from engine.cache.tree import TokenTree
from engine.rules.processors import Masked
from engine.rules.state import NodeStates
from search import Greedy, Trie
from tests.engine.cache.test_tree import pool_of
from tests.engine.rules.automata import EOS, Automaton, ask

pytestmark = pytest.mark.usefixtures("exact_pool")


def test_states_are_computed_once_per_token(engine):
    constraint = Automaton([[[token, 0] for token in range(40, 60)]])
    ask(engine, Greedy(), new=30, constraint=constraint)
    assert constraint.advanced == 29  # the last token has no row
    constraint.advanced = 0
    result = ask(engine, Trie(beams=4), new=12, constraint=constraint)
    assert constraint.advanced == result.stats["nodes_evaluated"] - 1


def states_of(constraint, prompt=(1, 4)):
    states, tree = NodeStates([Masked(constraint, 104)], prompt), TokenTree(pool_of(400), prompt)
    states.watch(tree)
    return states, tree


def test_a_forbidden_node_has_no_state_and_nor_has_what_is_below():
    states, tree = states_of(Choices([[5, 7]], [EOS]))
    allowed, forbidden, below = tree.grow_path(tree.root, [5])[0], *tree.grow_path(tree.root, [6, 7])
    found = states.asked(tree, [allowed, forbidden, below])
    assert [state.forbidden for state in found] == [False, True, True]
    assert found[0].forced == 7 and not states.has_row(tree, allowed)


def test_states_of_nodes_that_have_gone_are_dropped():
    states, tree = states_of(Automaton([[[token, 0] for token in range(40, 60)]]))
    for _ in range(12):
        nodes = tree.grow([tree.root] * 20, range(40, 60))
        states.asked(tree, nodes)
        tree.keep(nodes[:1])
    assert len(states._trees[tree]) < 120
    assert not states.of(tree, tree.root).forbidden
    assert len({state.columns for state in states._trees[tree].values()}) < 10


def test_only_trees_of_the_prompt_are_watched():
    states, tree = states_of(Choices([[5]], [EOS]))
    other = TokenTree(pool_of(4), [1, 5])
    states.watch(other)
    assert states.watches(tree) and not states.watches(other) and not states.has_row(other, other.root)
    states.restart()
    assert not states.watches(tree)


def test_states_of_many_nodes_are_asked_for_together():
    """Those of a chain and of siblings; a candidate's state is the one that its node gets."""
    constraint = Automaton([[[token, token % 2] for token in range(40, 60)]] * 2)
    asked, allowed = [], constraint.allowed
    constraint.allowed = lambda states: asked.append(len(states)) or allowed(states)
    states, tree = states_of(constraint)
    root = states.of(tree, tree.root)
    ahead = states.after_all([root, root, root], [41, 42, 99])
    assert asked == [1] and constraint.advanced == 2 and ahead[2].forbidden
    chain, others = tree.grow_path(tree.root, [41, 43, 44]), tree.grow([tree.root] * 3, [42, 45, 99])
    found = states.asked(tree, [*chain, *others])
    assert found[0] == ahead[0] and found[3] == ahead[1] and constraint.advanced == 5
    of_constraint = [None if state.forbidden else state.columns.by_processor[0][state.place] for state in found]
    assert of_constraint == [1, 1, 0, 0, 1, None]
    assert asked == [1, 2, 1, 2]  # each state once, with all that were computed together
