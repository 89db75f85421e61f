"""How much of a draft to evaluate: as many nodes as bring the most tokens per second."""

import math
from collections.abc import Callable, Sequence

from search.drafters import Draft

MOST = 64  # nodes of a draft


class DraftSize:
    """Chooses how many nodes of each draft to evaluate, from what drafts have been worth and what evaluating costs.

    n nodes bring 1 + (the chances of all of them) tokens, and take seconds(1 + n) and the host's work on them. Drafters
    are too sure of themselves, so their chances are corrected by how often guesses of that kind came true. While
    drafting has been losing time, no drafts are made, but for one now and then, ever less often.

    Args:
        seconds: of a pass by its tokens, see `Task.seconds`; None evaluates everything that is drafted.
        most: nodes.
    """

    SIZES = (1, 2, 3, 5, 7, 11, 15, 23, 31, 47, 63)  # with the text's last token, sizes that passes come in anyway
    KINDS = 8  # of guesses, by their chance
    PRIOR = 2.0  # guesses that a kind starts with, as true as they claim to be
    MEMORY = 0.98  # what an outcome still weighs after the next one
    RATE = 0.1  # how far a step moves what is expected of the next
    RARELY = 64  # steps without a draft while drafting does not pay, at most

    def __init__(self, seconds: Callable[[int], float] | None, most: int = MOST):
        self.seconds, self.most = seconds, most
        self.wish = most if seconds is None else 15  # nodes to draft
        self.true = [self.PRIOR * (kind + 0.5) / self.KINDS for kind in range(self.KINDS)]
        self.tried = [self.PRIOR] * self.KINDS
        self.host = 0.0  # the search's own seconds per node
        self.saved = 0.0  # seconds by a draft, of late
        self.pause = self.paused = 0

    def wanted(self) -> int:
        """How many nodes to draft now."""
        if self.paused:
            self.paused -= 1
            return 0
        return self.wish

    def choose(self, draft: Draft) -> int:
        """How many nodes of a draft to evaluate."""
        if self.seconds is None or not (plain := self.seconds(1)) or not draft.tokens:
            return len(draft.tokens)
        chances: list[float] = []
        for parent, chance in zip(draft.parents, _given_parent(draft), strict=True):
            chances.append(self._correct(chance) * (chances[parent] if parent >= 0 else 1.0))
        best, rate, gain, before = 0, 1 / plain, 1.0, 0
        for n in self.SIZES:
            gain, before = gain + math.fsum(chances[before:n]), n
            if n <= len(chances) and gain / (self.seconds(1 + n) + self.host * n) > rate:
                best, rate = n, gain / (self.seconds(1 + n) + self.host * n)
        self.wish = min(self.most, 2 * best + 7)
        return best

    def learn(self, draft: Draft, tokens: Sequence[int]) -> None:
        """What came instead of a draft, or as it said; guesses count also if they were not evaluated."""
        if self.seconds is None:
            return
        depth = {-1: 0}  # of what came true
        for node, (token, parent, chance) in enumerate(
            zip(draft.tokens, draft.parents, _given_parent(draft), strict=True)
        ):
            level = depth.get(parent, len(tokens))
            if level < len(tokens):
                kind = self._kind(chance)
                self.tried[kind] = self.MEMORY * self.tried[kind] + 1
                self.true[kind] = self.MEMORY * self.true[kind] + (token == tokens[level])
                if token == tokens[level]:
                    depth[node] = level + 1

    def settle(self, host: float, nodes: int, tokens: int) -> None:
        """A draft of so many evaluated nodes has brought so many tokens, and took the host so many seconds."""
        if nodes:
            self.host += self.RATE * (host / nodes - self.host)
        if self.seconds is not None and (plain := self.seconds(1)):
            saved = tokens * plain - self.seconds(1 + nodes) - host
            self.saved += self.RATE * (saved - self.saved)
            self.pause = min(self.RARELY, 2 * self.pause + 1) if self.saved < 0 else 0
            self.paused = self.pause

    def _kind(self, chance: float) -> int:
        return min(self.KINDS - 1, int(chance * self.KINDS))

    def _correct(self, chance: float) -> float:
        kind = self._kind(chance)
        claimed = (kind + 0.5) / self.KINDS
        return min(1.0, chance / claimed * self.true[kind] / self.tried[kind])


def _given_parent(draft: Draft) -> list[float]:
    """Each node's chance if its parent comes true."""
    return [
        score / draft.scores[parent] if parent >= 0 else score
        for score, parent in zip(draft.scores, draft.parents, strict=True)
    ]
