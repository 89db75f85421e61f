"""Finished hypotheses: the ended sequences of a search, ranked by score.

Hypotheses that ended because a constraint allowed no token rank after all others: their sums include `STUCK`.
"""

import math
from collections.abc import Iterable

from engine.cache.prefixes import shared_length
from engine.cache.tree import TokenTree
from engine.rules.endings import STUCK, is_stuck
from search.base import Output

LAST = 1e200  # scales a sum with STUCK below every other score, whatever the length and the penalty
Candidate = tuple[float | None, list[int]]  # score and tokens, as `Report.beams` returns them


class Finished:
    """The best finished hypotheses, best first; among equal scores the older comes first. They hold no slots.

    Args:
        length_penalty: a hypothesis scores logprob / length ** length_penalty.
        most: the most hypotheses that are kept; None keeps all.

    Attributes:
        outputs: the hypotheses.
        settled: the number of tokens that were reported as certain.
    """

    def __init__(self, length_penalty: float, most: int | None = None):
        self.length_penalty, self.most = length_penalty, most
        self.outputs: list[Output] = []
        self.settled = 0

    def add(self, tokens: list[int], logprob: float, reason: str, unscored: float = 0.0) -> None:
        """Keep a hypothesis if it is among the best; `unscored` adds to the log-probability, but not to the score."""
        self.add_all([(tokens, logprob, reason, unscored)])

    def add_all(self, ended: Iterable[tuple[list[int], float, str, float]]) -> None:
        """Add several hypotheses, each given as the arguments of `add`."""
        self.outputs += [
            Output(tokens, logprob + unscored, self.score(logprob, len(tokens)), reason)
            for tokens, logprob, reason, unscored in ended
        ]
        self.outputs.sort(key=_score, reverse=True)  # stable: among equals the older stays first
        if self.most is not None:
            del self.outputs[self.most :]

    def score(self, logprob: float, length: int) -> float:
        """The score of a hypothesis of `length` tokens."""
        return logprob * LAST if is_stuck(logprob) else logprob / length**self.length_penalty

    def bound(self, logprob: float, shortest: int, longest: int) -> float:
        """The best score that a live hypothesis can still reach: its sum only falls, its length ends in this range."""
        return max(self.score(logprob, shortest), self.score(logprob, longest))

    def score_at(self, rank: int) -> float:
        """Return the score at a rank, which another hypothesis must exceed to take its place; -inf if the rank is
        free."""
        return _score(self.outputs[rank]) if rank < len(self.outputs) else -math.inf

    def has_ended(self, count: int) -> bool:
        """Whether `count` hypotheses have ended, not counting those after which no token was allowed."""
        return self.score_at(count - 1) > STUCK / 2 * LAST

    def settle(self, tree: TokenTree) -> list[int]:
        """Return the newly certain tokens, those that all live nodes and the best hypothesis share."""
        certain = tree.settled_from(self.settled)
        if self.outputs:
            certain = certain[: shared_length(certain, self.outputs[0].token_ids[self.settled :])]
        self.settled += len(certain)
        return certain

    def remainder(self) -> list[int]:
        """Return the tokens of the best hypothesis that were not reported as certain."""
        return self.outputs[0].token_ids[self.settled :]

    def ranked(self, live: Iterable[tuple[float, list[int]]] = ()) -> list[Candidate]:
        """Return finished and live hypotheses together, best first; `live` are log-probabilities and tokens."""
        candidates = [(_score(output), output.token_ids) for output in self.outputs]
        candidates += [(self.score(logprob, len(tokens)), tokens) for logprob, tokens in live]
        return [*sorted(candidates, key=lambda candidate: candidate[0], reverse=True)]


def _score(output: Output) -> float:
    assert output.score is not None
    return output.score
