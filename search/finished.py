"""Finished hypotheses: what a search keeps of the sequences that have ended."""

import math
from collections.abc import Sequence

from engine.tree import TokenTree, shared_length
from search.base import Output

Candidate = tuple[float | None, list[int]]  # score and tokens, as `Report.beams` returns them


class Finished:
    """The best finished hypotheses, best first; of equal scores the older comes first. They hold no slots.

    Args:
        most: how many are kept; None keeps all.

    Attributes:
        outputs: the hypotheses.
        settled: how many tokens were reported as certain.
    """

    def __init__(self, most: int | None = None):
        self.most = most
        self.outputs: list[Output] = []
        self.settled = 0

    def add(self, tokens: list[int], logprob: float, score: float, reason: str) -> None:
        """Keep a hypothesis if it is among the best."""
        self.outputs.append(Output(tokens, logprob, score, reason))
        self.outputs.sort(key=_score, reverse=True)
        if self.most is not None:
            del self.outputs[self.most :]

    def score(self, rank: int) -> float:
        """The score of the hypothesis of a rank, which another must exceed to take its place; -inf without one."""
        return _score(self.outputs[rank]) if rank < len(self.outputs) else -math.inf

    def settle(self, tree: TokenTree) -> list[int]:
        """The tokens that have become certain: all live nodes share them, and the best hypothesis has them too."""
        certain = tree.settled_from(self.settled)
        if self.outputs:
            certain = certain[: shared_length(certain, self.outputs[0].token_ids[self.settled :])]
        self.settled += len(certain)
        return certain

    def remainder(self) -> list[int]:
        """The tokens of the best hypothesis that were not reported as certain yet."""
        return self.outputs[0].token_ids[self.settled :]

    def ranked(self, live: Sequence[tuple[float, list[int]]]) -> list[Candidate]:
        """The hypotheses and the live ones together, best first."""
        finished = [(_score(output), output.token_ids) for output in self.outputs]
        return [*sorted([*finished, *live], key=lambda candidate: candidate[0], reverse=True)]


def _score(output: Output) -> float:
    assert output.score is not None
    return output.score
