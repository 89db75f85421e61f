"""How many nodes of a draft to evaluate: the number that brings the most tokens per second."""

import math
from collections.abc import Callable, Sequence

from engine.drafts import Draft
from engine.step.timing import PassTime

MAX_NODES = 64  # of a draft


class DraftSize:
    """Chooses how many nodes of each draft to evaluate, from the outcomes of earlier drafts and the cost of passes.

    n nodes bring 1 + (the sum of their probabilities) tokens, and take seconds(1 + n) plus the host's time, which is
    measured by the number of nodes for steps with drafts, and apart for steps without. Drafters overestimate their
    probabilities, so these are corrected by the outcomes of earlier guesses of about the same probability. A credit
    limits the time that drafts may lose: a small share of all time, more at first, and a part of the time that they
    saved. While the credit is used up, nothing is drafted.

    Args:
        seconds: time of a pass by its number of tokens, see `Task.seconds`; None evaluates every drafted node.
        most: most nodes of a draft.
    """

    SIZES = (1, 2, 3, 5, 7, 11, 15, 23, 31, 47, 63)  # with the text's last token, sizes that `PassTime` measures
    KINDS = 8  # classes of guesses, by their probability
    PRIOR = 2.0  # guesses that a class starts with, as true as their probability
    MEMORY = 0.98  # weight of an outcome after the next one
    RATE = 0.1  # weight of a step in the moving average
    LOSS = 0.01  # share of the time that drafts may lose
    FIRST, MOST_SAVED, MOST_LOST = 1.0, 32.0, 1.27  # the credit: at first, at most, and (negative) at least; in steps

    def __init__(self, seconds: Callable[[int], float] | None, most: int = MAX_NODES):
        self.seconds, self.most = seconds, most
        self.wish = most if seconds is None else 15  # nodes to draft
        self.true = [self.PRIOR * (kind + 0.5) / self.KINDS for kind in range(self.KINDS)]
        self.tried = [self.PRIOR] * self.KINDS
        self.host = PassTime()  # the search's own seconds in a step with a draft
        self.alone = 0.0  # and in a step without
        self.credit = self.FIRST  # time that drafts may lose, in steps

    def wanted(self) -> int:
        """How many nodes to draft now."""
        return self.wish if self.credit > 0 else 0

    def choose(self, draft: Draft) -> int:
        """How many nodes of a draft to evaluate."""
        if self.seconds is None or not (plain := self.seconds(1)) or not draft.tokens:
            return len(draft.tokens)
        chances: list[float] = []
        came = [true / tried for true, tried in zip(self.true, self.tried, strict=True)]
        worth = [c / ((kind + 0.5) / self.KINDS) for kind, c in enumerate(came)]  # relative to the drafter's estimate
        for parent, score in zip(draft.parents, draft.scores, strict=True):
            given, chance = (chances[parent], score / draft.scores[parent]) if parent >= 0 else (1.0, score)
            chances.append(given * min(1.0, chance * worth[self._kind(chance)]))
        best, rate, gain, before = 0, 1 / (plain + self.host.seconds(1)), 1.0, 0
        for n in self.SIZES:
            gain, before = gain + math.fsum(chances[before:n]), n
            cost = self.seconds(1 + n) + self.host.seconds(1 + n)
            if n <= len(chances) and gain / cost > rate:
                best, rate = n, gain / cost
        self.wish = min(self.most, 2 * best + 7)
        return best

    def learn(self, draft: Draft, tokens: Sequence[int]) -> None:
        """Compare a draft with the tokens that came; guesses that were not evaluated count as well."""
        if self.seconds is None:
            return
        depth = {-1: 0}  # of what came true
        for node, (token, parent, score) in enumerate(zip(draft.tokens, draft.parents, draft.scores, strict=True)):
            level = depth.get(parent, len(tokens))
            if level < len(tokens):
                kind = self._kind(score / draft.scores[parent] if parent >= 0 else score)
                self.tried[kind] = self.MEMORY * self.tried[kind] + 1
                self.true[kind] = self.MEMORY * self.true[kind] + (token == tokens[level])
                if token == tokens[level]:
                    depth[node] = level + 1

    def settle(self, host: float, nodes: int, tokens: int) -> None:
        """Account for a step with a draft: seconds of the host, nodes evaluated, tokens gained."""
        saved = 0.0
        self.host.note(1 + nodes, host)
        if self.seconds is not None and (plain := self.seconds(1)):
            saved = tokens - (self.seconds(1 + nodes) + host) / (plain + self.alone)
        self.credit = max(-self.MOST_LOST, min(self.MOST_SAVED, self.credit + saved + self.LOSS * tokens))

    def plain(self, host: float) -> None:
        """Account for a step without a draft, by its seconds of the host."""
        self.alone += self.RATE * (min(host, 2 * self.alone or host) - self.alone)
        self.credit += self.LOSS

    def _kind(self, chance: float) -> int:
        return min(self.KINDS - 1, int(chance * self.KINDS))
