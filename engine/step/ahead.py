"""Look-ahead: a GPU starts the next pass of a search before the host has read the answer of the last one.

`Evaluate.next` predicts the nodes that a search will ask for after its top sums. The device itself determines their
tokens and the branch slots that they see. Meanwhile the host reads the answer, resumes the search, and compares its
next request with the guess::

    device   | pass 1      | pass 2, guessed              | pass 3, guessed
    host     launch 1, 2   | read 1, search, compare with 2, launch 3   | read 2, search, compare with 3

A wrong guess, for example when a sequence ends, costs the device a pass but changes no answer: its slots return to the
tree.

Shapes: n nodes of the guessed pass, C words of ancestry bits, k sums.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from engine.cache.tree import TokenTree
from engine.contract.top_sums import Next
from engine.step.packing import Blank, Pass
from kernels.layout import WORD
from kernels.rows import next_nodes
from kernels.rows.checks import NextNodes


@dataclass
class Guess:
    """The predicted next request of one search.

    Args:
        next: the search's hint.
        k: number of top sums.
        asked: the tokens of the running pass whose rows have the top sums.
        chunk: the nodes, with their slots.
    """

    next: Next
    k: int
    asked: Sequence[int]
    chunk: Blank

    def picked(self, numbers: Tensor, vocab_size: int) -> tuple[list[float], list[tuple[int, int]]]:
        """The choices of `choose`, on the host: sums, and (row, token) of each node."""
        k = len(numbers) // 2
        places = [divmod(int(place), vocab_size) for place in numbers[k : 2 * k].tolist()]
        chosen = [i for i, (_, token) in enumerate(places) if token not in self.next.ends][: self.next.width]
        return numbers[chosen].tolist(), [places[i] for i in chosen]


class GuessedNodes(NamedTuple):
    """The nodes of guesses, on the device: their sums, float32; their tokens; the ancestry words of their parents,
    without slots that no node has any more. A parent may have seen slots that the trunk has taken over since."""

    sums_n: Tensor
    token_n: Tensor
    inherited_nC: Tensor

    def fill(self, first: int, inputs: Pass) -> None:
        """Write tokens and ancestry into the inputs of a pass, where `first` is the first guessed node."""
        own, words_TC = slice(first, first + len(self.token_n)), inputs.layout.ancestry_TC
        C = min(words_TC.shape[1], self.inherited_nC.shape[1])
        inputs.tokens_T[own] = self.token_n
        words_TC[own, :C].bitwise_or_(self.inherited_nC[:, :C])


def choose(
    guesses: Sequence[Guess], numbers: Sequence[Tensor], ancestry_TC: Tensor, vocab_size: int, impl: str
) -> GuessedNodes:
    """Choose the nodes of guesses on the device; `Guess.picked` finds the same ones on the host.

    Args:
        numbers: for each guess the result of `top_sums`.
        ancestry_TC: the ancestry of the running pass. It is read here, because later the next inputs may overwrite it.
        impl: see `kernels.rows.next_nodes`.
    """
    words = ancestry_TC.shape[1]
    wanted = [NextNodes(g.next.width, g.next.ends, g.asked, _live(g.chunk.tree, words)) for g in guesses]
    return GuessedNodes(*next_nodes(numbers, wanted, ancestry_TC, vocab_size, impl=impl))


def _live(tree: TokenTree, words: int) -> array:
    """Words of the branch slots that nodes have."""
    bits = sum(1 << slot for slot, node in enumerate(tree.slots.owner[: words * WORD]) if node >= 0)
    return array("i", bits.to_bytes(words * 4, "little"))
