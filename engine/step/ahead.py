"""Look-ahead: a GPU begins with the next pass of a search before the host has read the answer of the last one.

`Evaluate.next` predicts the nodes that a search will ask for after its top sums. The device finds their tokens, and the
branch slots that they see, by itself. Meanwhile the host reads the answer, resumes the search, and compares its next
request with the guess::

    device   | pass 1      | pass 2, guessed              | pass 3, guessed
    host     launch 1, 2   | read 1, search, compare with 2, launch 3   | read 2, search, compare with 3

A wrong guess, as where a sequence ends, costs the device a pass and changes no answer: its slots return to the tree.

Shapes: n nodes of the guessed pass, C words of ancestry bits, k sums.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from engine.cache.tree import TokenTree
from engine.contract.top_sums import Next
from engine.step.packing import Blank, Pass, tensor_of
from kernels.layout import WORD


@dataclass
class Guess:
    """The prediction of what one search will ask for.

    Args:
        next: what the search said.
        k: how many top sums.
        asked: the tokens of the pass under way that have the rows whose top sums choose.
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
    """The nodes of a guess, on the device: their sums, float32, the rows of their parents and their tokens."""

    sums_n: Tensor
    row_n: Tensor
    token_n: Tensor


def choose(numbers: Tensor, guess: Guess, vocab_size: int) -> GuessedNodes:
    """Choose the nodes of a guess on the device; `Guess.picked` finds the same ones on the host.

    Args:
        numbers: returned by `top_sums`. Numbers that are not finite choose tokens that exist, as all others.
    """
    k = len(numbers) // 2
    place_k = numbers[k : 2 * k].long().clamp(0, len(guess.asked) * vocab_size - 1)
    token_k, order = place_k % vocab_size, slice(guess.next.width)
    if guess.next.ends:
        ended_k = (token_k.unsqueeze(1) == _tokens(guess.next.ends, numbers.device)).any(1)
        order = ended_k.byte().sort(stable=True).indices[order]
    return GuessedNodes(numbers[:k][order].float(), place_k[order] // vocab_size, token_k[order])


@lru_cache(maxsize=16)
def _tokens(ends: frozenset[int], device: torch.device) -> Tensor:
    return torch.tensor(sorted(ends)).to(device, non_blocking=True)


class Fill:
    """Writes the tokens and the ancestry of a guessed pass into its inputs, on the device.

    Args:
        guesses, choices: in the order of the pass.
        ancestry_TC: of the pass under way. It is read here and not later, as the inputs may take its place.
    """

    def __init__(self, guesses: Sequence[Guess], choices: Sequence[GuessedNodes], ancestry_TC: Tensor):
        C, device = ancestry_TC.shape[1], ancestry_TC.device
        asked = [torch.tensor(guess.asked).to(device, non_blocking=True) for guess in guesses]
        parent_n = torch.cat([at[choice.row_n] for at, choice in zip(asked, choices, strict=True)])
        live = array("i", b"".join(_live(guess.chunk.tree, C) * len(guess.chunk) for guess in guesses))
        live_nC = tensor_of(live).view(len(parent_n), C).to(device, non_blocking=True)
        self.token_n = torch.cat([choice.token_n for choice in choices])
        self.inherited_nC = ancestry_TC[parent_n] & live_nC

    def __call__(self, inputs: Pass) -> None:
        n, words_TC = len(self.token_n), inputs.layout.ancestry_TC
        C = min(words_TC.shape[1], self.inherited_nC.shape[1])
        inputs.tokens_T[:n] = self.token_n
        words_TC[:n, :C] |= self.inherited_nC[:, :C]


def _live(tree: TokenTree, words: int) -> bytes:
    """Bits of the branch slots that nodes have; a parent may have seen others, which the trunk has taken over since."""
    bits = sum(1 << slot for slot, node in enumerate(tree.slots.owner[: words * WORD]) if node >= 0)
    return bits.to_bytes(words * 4, "little")
