"""Nodes by themselves: growth, paths, the deepest live node of a path."""

import pytest

from engine.cache.nodes import Nodes
from tests.invariants import check_nodes


def test_growing_is_idempotent():
    nodes = Nodes([1, 2, 3])
    a, b, again = nodes.grow([nodes.root] * 3, [5, 6, 5])
    assert a == again != b and nodes.grow([a], [7]) == [nodes.child(a, 7)] == nodes.grow([a], [7])
    assert nodes.grown == 4 and check_nodes(nodes) == [1, 2, 3, nodes.root]


def test_paths():
    nodes = Nodes([1, 2, 3])
    chain = nodes.grow_path(nodes.root, [4, 5, 6])
    assert [nodes.path(n) for n in chain] == [[4], [4, 5], [4, 5, 6]] and nodes.path(nodes.root) == []
    assert [nodes.position(n) for n in chain] == [3, 4, 5] and nodes.parent(chain[0]) == nodes.root
    assert nodes.grow_path(nodes.root, []) == []
    assert nodes.descend([4, 5, 9]) == chain[1] and nodes.descend([9]) == nodes.root


def test_an_empty_prompt_is_refused():
    with pytest.raises(ValueError, match="at least one token"):
        Nodes([])
