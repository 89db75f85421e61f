"""A guess chooses on the device what it picks on the host."""

import torch

from engine.cache.pool import PagePool
from engine.cache.tree import TokenTree
from engine.contract.top_sums import Next
from engine.step.ahead import Guess, choose
from engine.step.packing import Blank
from models.shape import ModelShape

SHAPE = ModelShape(layers=1, kv_heads=1, head_dim=1, vocab_size=10, max_positions=None)


def test_choices_are_the_same_on_host_and_device():
    tree = TokenTree(PagePool(SHAPE, 4), [1])
    slots, branches = tree.reserve(2, 1)
    guess = Guess(Next(2, frozenset([3, 8])), 5, [4, 6], Blank(tree, 0, branches, slots, 1))
    values, places = [-1.0, -1.5, -1.5, -2.0, -float("inf")], [3, 12, 8, 5, 0]
    numbers = torch.tensor([*values, *places, 0.0], dtype=torch.float64)
    words_TC = torch.arange(7, dtype=torch.int32).unsqueeze(1)
    sums_n, token_n, inherited_nC = choose([guess], [numbers], words_TC, 10, "torch")
    sums, chosen = guess.picked(numbers, 10)
    assert (sums_n.tolist(), token_n.tolist()) == (sums, [token for _, token in chosen])
    live = sum(1 << slot for slot, node in enumerate(tree.slots.owner) if node >= 0)
    assert inherited_nC.tolist() == [[guess.asked[row] & live] for row, _ in chosen]
    tree.release()
