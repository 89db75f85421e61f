"""A guess chooses on the device what it picks on the host."""

import torch

from engine.cache.pool import PagePool
from engine.cache.tree import TokenTree
from engine.contract.top_sums import Next
from engine.step.ahead import Guess, choose
from engine.step.packing import Blank
from models.config import ModelShape

SHAPE = ModelShape(layers=1, kv_heads=1, head_dim=1, vocab_size=10, max_positions=None)


def test_choices_are_the_same_on_host_and_device():
    tree = TokenTree(PagePool(SHAPE, 4), [1])
    slots, branches = tree.reserve(2, 1)
    guess = Guess(Next(2, frozenset([3, 8])), 5, [4, 6], Blank(tree, 0, branches, slots, 1))
    values, places = [-1.0, -1.5, -1.5, -2.0, -float("inf")], [3, 12, 8, 5, 0]
    numbers = torch.tensor([*values, *places, 0.0], dtype=torch.float64)
    sums_n, row_n, token_n = choose(numbers, guess, 10)
    assert (sums_n.tolist(), [*zip(row_n.tolist(), token_n.tolist(), strict=True)]) == guess.picked(numbers, 10)
    tree.release()
