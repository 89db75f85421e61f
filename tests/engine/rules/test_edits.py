"""Edits of rows by themselves: masks, renormalised rows, rows without any token."""

import math

import pytest
import torch

from engine import Choices
from engine.cache.tree import TokenTree
from engine.rules.constrained import Constrained
from engine.rules.endings import STUCK
from engine.rules.processors import Masked, RepetitionPenalty
from tests.engine.cache.test_tree import pool_of
from tests.engine.rules.automata import EOS, Automaton

VOCAB = 10


def grown(constraint, renormalise, *others):
    """A constrained tree with two nodes below its root, whose states are asked for."""
    constrained = Constrained([*others, Masked(constraint, VOCAB)], renormalise, [1, 4], [EOS], 9)
    tree = TokenTree(pool_of(4), [1, 4])
    constrained.states.watch(tree)
    nodes = tree.grow([tree.root] * 2, [5, 6])
    constrained.plan(tree, nodes)
    return constrained, tree, nodes


@pytest.mark.parametrize("renormalise", [False, True])
def test_rows_are_masked_and_renormalised(renormalise):
    constrained, tree, nodes = grown(Choices([[5, 7], [5, 8], [6, 9, 3], [6, 3, 3]], [EOS]), renormalise)
    rows_NV = torch.randn(2, VOCAB, generator=torch.Generator().manual_seed(1)).log_softmax(1)
    before = rows_NV.clone()
    edit = constrained.edits.edit(tree, nodes, slice(0, 2))
    edit.apply(rows_NV, None)
    for row, plain, allowed in zip(rows_NV, before, ([7, 8], [3, 9]), strict=True):
        assert [i for i, x in enumerate(row.tolist()) if x > -math.inf] == allowed
        expected = plain[allowed] - (plain[allowed].logsumexp(0) if renormalise else 0)
        torch.testing.assert_close(row[allowed], expected)


def test_rows_of_a_path_are_edited_once_more():
    """The second edit gives the rows that the search was sent."""
    penalty = RepetitionPenalty(2.0)
    constrained, tree, nodes = grown(Choices([[5, 7], [5, 8], [6, 9], [6, 3]], [EOS]), True, penalty)
    logits_NV = torch.randn(2, VOCAB, generator=torch.Generator().manual_seed(2)) * 3
    logp_NV = logits_NV.log_softmax(1)
    sent_NV, again_NV = logp_NV.clone(), logp_NV.clone()
    edit = constrained.edits.edit(tree, nodes, slice(0, 2))
    assert edit.logits
    edit.apply(sent_NV, logits_NV[:, :1] - logp_NV[:, :1])
    states = [constrained.states.along([token, 0])[1] for token in (5, 6)]
    constrained.edits.rewrite(states, again_NV, logits_NV)
    torch.testing.assert_close(sent_NV, again_NV)


@pytest.mark.parametrize("kind", ["list", "mask"])
def test_a_row_without_any_token_has_the_end_alone(kind):
    dead = Automaton([[[5, 1], [6, 2]], [], [[7, 1], [8, 1]]], kind, VOCAB)
    constrained, tree, nodes = grown(dead, False)
    rows_NV = torch.zeros(2, VOCAB)
    constrained.edits.edit(tree, nodes, slice(0, 2)).apply(rows_NV, None)
    assert rows_NV[0, EOS] == STUCK and rows_NV[0].isfinite().sum() == 1
    assert rows_NV[1, [7, 8]].tolist() == [0, 0] and rows_NV[1].isfinite().sum() == 2
