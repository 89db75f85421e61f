"""How many drafted nodes to evaluate: the number that gains the most tokens, or saves the most passes, per second."""

import math
from collections.abc import Callable, Sequence

from engine.drafts import Draft
from engine.step.timing import PassTime

MAX_NODES = 64  # most nodes of the drafts of a pass
FIRST_NODES = 15  # nodes to draft before anything is measured
ROWS_BYTES = 1 << 25  # bytes of the whole rows that a request keeps for drafted nodes


def most_drafted(vocab_size: int) -> int:
    """Return the most drafted nodes that a request adds to a pass."""
    return min(MAX_NODES, ROWS_BYTES // (4 * vocab_size))


class DraftSize:
    """Chooses how many nodes of each draft to evaluate, from the outcomes of earlier drafts and the cost of passes.

    n nodes bring 1 + (the sum of their probabilities) tokens, and take seconds(1 + n) plus the host's time, which is
    measured by the number of nodes for steps with drafts, and separately for steps without. Drafters overestimate their
    probabilities, so these are corrected by the outcomes of earlier guesses of about the same probability. A credit
    limits the time that drafts may lose: a small share of all time, more at first, and a part of the time that they
    saved. While the credit is used up, nothing is drafted.

    Args:
        seconds: time of a pass by its number of tokens, see `Task.seconds`; None evaluates every drafted node.
        most: most nodes of a draft.
    """

    SIZES = (1, 2, 3, 5, 7, 11, 15, 23, 31, 47, 63)  # with the text's last token, sizes that `PassTime` measures
    LEAST = (0.5, 0.2, 0.05)  # least probabilities of drafted nodes that are compared if there are several drafts
    MOST_TOGETHER = 2.0  # largest ratio of saved to hoped passes that is assumed
    AHEAD = 16  # tokens by which a sequence that has drafts may be ahead of the last one
    KINDS = 8  # classes of guesses, by their probability
    HALF = 0.5  # probability that the drafts of a level are all that is asked for there, before anything is known
    PRIOR = 2.0  # guesses that a class starts with, as true as their probability
    INHERITED = 6.0  # most guesses that a class starts with after an earlier request
    MEMORY = 0.98  # weight of an outcome after the next one
    RATE = 0.1  # weight of a step in the moving average
    LOSS = 0.01  # share of the time that drafts may lose
    LEAST_FIRST = 0.3  # steps that drafts may lose at the beginning of a request, whatever the outcome of earlier ones
    FIRST, MOST_SAVED, MOST_LOST = 1.0, 32.0, 1.27  # the credit: at first, at most, and (negative) at least; in steps

    def __init__(self, seconds: Callable[[int], float] | None, most: int = MAX_NODES):
        self.seconds, self.most = seconds, most
        self.wish = most if seconds is None else min(most, FIRST_NODES)  # nodes to draft
        self.true = [self.PRIOR * (kind + 0.5) / self.KINDS for kind in range(self.KINDS)]
        self.tried = [self.PRIOR] * self.KINDS
        self.host = PassTime()  # the search's own seconds in a step with a draft
        self.alone = 0.0  # and in a step without
        self.credit = self.FIRST  # time that drafts may lose, in steps
        self.hoped = 0.0  # passes that the drafts chosen last were expected to save, for several live nodes
        self.saved = self.hopes = self.PRIOR  # passes that such drafts have saved, and were expected to
        self.levels = 0  # levels that `choose_levels` chose last
        self.reached, self.whole = list[float](), list[float]()  # levels that were asked for; nothing else was asked

    def inherit(self, other: "DraftSize") -> None:
        """Begin with the figures that an earlier request has learnt."""
        weights = [min(1.0, self.INHERITED / tried) for tried in other.tried]
        self.tried = [w * tried for w, tried in zip(weights, other.tried, strict=True)]
        self.true = [w * true for w, true in zip(weights, other.true, strict=True)]
        weight = min(1.0, self.INHERITED / other.hopes)
        self.hopes, self.saved, self.host = weight * other.hopes, weight * other.saved, other.host
        self.credit = min(self.FIRST, max(self.LEAST_FIRST, other.credit))
        for reached, whole in zip(other.reached, other.whole, strict=True):
            weight = min(1.0, self.INHERITED / reached)
            self.reached.append(weight * reached)
            self.whole.append(weight * whole)

    def wanted(self) -> int:
        """How many nodes to draft now."""
        return self.wish if self.credit > 0 else 0

    def choose(self, draft: Draft) -> int:
        """How many nodes of a draft to evaluate."""
        if not self.cost(1) or not draft.tokens:
            return min(self.most, len(draft.tokens))
        best = self._worthwhile(self._chances(draft), 1)
        self.wish = min(self.most, 2 * best + 7)
        return best

    def _worthwhile(self, chances: Sequence[float], rows: int) -> int:
        """How many nodes of these probabilities, in order, bring the most tokens per second in a pass of `rows`
        others."""
        best, rate, gain, before = 0, rows / (self.cost(rows) + self.host.seconds(1)), float(rows), 0
        for size in self.SIZES:
            gain, before = gain + math.fsum(chances[before:size]), size
            cost = self.cost(rows + size) + self.host.seconds(1 + size)
            if size <= min(len(chances), self.most) and gain / cost > rate:
                best, rate = size, gain / cost
        return best

    def choose_together(self, drafts: Sequence[Draft], rows: int) -> Sequence[Sequence[int]]:
        """Which nodes of each draft to evaluate, if a pass is saved only if all of its nodes were drafted.

        A search extends all of its live nodes at once: the pass d levels ahead is saved if the drafts have what it asks
        for below every live node. Its probability is the product, over the live nodes, of the sums of the
        probabilities at that level, corrected by how often such passes were saved. A pass that is
        not saved has fewer tokens, because the correctly drafted ones are known.

        Args:
            drafts: one for each live node, at least one.
            rows: tokens of the pass without drafts.
        """
        if len(drafts) == 1:
            return [range(self.choose(drafts[0]))]
        every = [range(len(draft.tokens)) for draft in drafts]
        none: Sequence[Sequence[int]] = [()] * len(drafts)
        self.hoped = 0.0
        if self.seconds is None:
            return every
        if not (plain := self.seconds(rows)) or not all(draft.tokens for draft in drafts):
            return none
        chances, levels = [self._chances(draft) for draft in drafts], [levels_of(draft) for draft in drafts]
        together, count = self.saved / self.hopes, len(drafts)
        whole = self.seconds(count)  # a pass that may be saved
        token = max(0.0, whole - self.seconds(1)) / (count - 1) / whole  # the cost of one of its tokens, relative to it
        best, rate, size, deepest = none, 1 / (plain + self.host.seconds(1)), 0, max(map(max, levels))
        for least in self.LEAST:
            hoped, spared, nodes = 0.0, 0.0, 0
            for depth in range(1, deepest + 1):
                chance, came = 1.0, 0.0
                for given, at in zip(chances, levels, strict=True):
                    found = [p for p, level in zip(given, at, strict=True) if level == depth and p >= least]
                    nodes += len(found)
                    came += min(1.0, total := math.fsum(found))
                    chance *= min(1.0, total)
                if nodes > self.most or not chance:
                    break
                hoped += chance
                saved = min(1.0, together * chance)
                spared += saved + max(0.0, came - count * saved) * token
                cost = self.seconds(rows + nodes) + self.host.seconds(1 + nodes)
                if (1 + spared) / cost > rate:
                    rate, size, self.hoped = (1 + spared) / cost, nodes, hoped
                    best = [
                        [i for i, p in enumerate(given) if p >= least and at[i] <= depth]
                        for given, at in zip(chances, levels, strict=True)
                    ]
        self.wish = min(self.most, 2 * size + 2 * len(drafts))
        return best

    def choose_apart(self, drafts: Sequence[Draft], rows: int, places: Sequence[int]) -> Sequence[Sequence[int]]:
        """Which nodes of each draft to evaluate, if the search continues below each live node independently: the
        likeliest of all drafts.

        n live nodes and drafted ones bring n + (the sum of their probabilities) tokens. The last sequence determines
        the number of passes, so sequences that are far ahead get no drafts.

        Args:
            drafts: one for each live node.
            rows: tokens of the pass without drafts.
            places: positions of the live nodes in their sequences.
        """
        most = min(places) + self.AHEAD
        chances = [self._chances(draft) if at <= most else [] for draft, at in zip(drafts, places, strict=True)]
        ranked = sorted([(-p, i, at) for i, given in enumerate(chances) for at, p in enumerate(given)])
        best = len(ranked)
        if self.cost(rows):
            best = self._worthwhile([-p for p, _, _ in ranked], rows)
            self.wish = min(self.most, 2 * best + 2 * len(drafts))
        chosen: list[list[int]] = [[] for _ in drafts]
        for _, i, at in ranked[:best]:
            chosen[i].append(at)
        return [sorted(nodes) for nodes in chosen]

    def cost(self, rows: int) -> float:
        """Seconds of a pass of `rows` tokens without drafts; 0 if none was measured, or if time does not count."""
        return 0.0 if self.seconds is None else self.seconds(rows)

    def odds(self, level: int) -> float:
        """The probability that a search asks for nothing but the drafted nodes at this level and those above it, from
        earlier drafts of `choose_levels`."""
        return math.prod([w / r for w, r in zip(self.whole[:level], self.reached[:level], strict=True)])

    def choose_levels(self, drafts: Sequence[Draft], rows: int) -> Sequence[Sequence[int]]:
        """Which nodes of each draft to evaluate: whole levels, by how often a search asked for nothing else at a level.

        Args:
            drafts: one for each live node; some may be empty.
            rows: tokens of the pass without drafts.
        """
        at = [levels_of(draft) for draft in drafts]
        deepest = max([0, *(max(levels, default=0) for levels in at)])
        while len(self.whole) < deepest:
            self.whole.append(self.HALF * self.PRIOR)
            self.reached.append(self.PRIOR)
        best = deepest
        if self.seconds is not None and (plain := self.seconds(rows)):
            best, rate, gain, nodes = 0, 1 / (plain + self.host.seconds(1)), 1.0, 0
            for level in range(1, deepest + 1):
                nodes += sum(levels.count(level) for levels in at)
                gain += self.odds(level)
                cost = self.seconds(rows + nodes) + self.host.seconds(1 + nodes)
                if nodes <= self.most and gain / cost > rate:
                    best, rate = level, gain / cost
            self.wish = min(self.most, len(drafts) * (best + 2))
        self.levels = best
        return [[i for i, level in enumerate(levels) if level <= best] for levels in at]

    def _chances(self, draft: Draft) -> list[float]:
        """The probabilities of a draft's nodes, corrected by the outcomes of earlier guesses."""
        chances: list[float] = []
        came = [true / tried for true, tried in zip(self.true, self.tried, strict=True)]
        worth = [c / ((kind + 0.5) / self.KINDS) for kind, c in enumerate(came)]  # relative to the drafter's estimate
        for parent, score in zip(draft.parents, draft.scores, strict=True):
            given, chance = (chances[parent], score / draft.scores[parent]) if parent >= 0 else (1.0, score)
            chances.append(given * min(1.0, chance * worth[self._kind(chance)]))
        return chances

    def learn(self, draft: Draft, tokens: Sequence[int]) -> None:
        """Compare a draft with the tokens that came; guesses that were not evaluated count as well."""
        if self.seconds is None:
            return
        depth = {-1: 0}  # of the nodes that came true
        for node, (token, parent, score) in enumerate(zip(draft.tokens, draft.parents, draft.scores, strict=True)):
            level = depth.get(parent, len(tokens))
            if level < len(tokens):
                self.note(score / draft.scores[parent] if parent >= 0 else score, token == tokens[level])
                if token == tokens[level]:
                    depth[node] = level + 1

    def note(self, chance: float, came: bool) -> None:
        """Note whether a guess came true to which the drafter gave this probability, given its parent."""
        kind = self._kind(chance)
        self.tried[kind] = self.MEMORY * self.tried[kind] + 1
        self.true[kind] = self.MEMORY * self.true[kind] + came

    def note_together(self, saved: float) -> None:
        """Note how many passes were saved by the drafts chosen last for several live nodes."""
        for level in range(self.levels):
            if saved >= level:
                self.reached[level] = self.MEMORY * self.reached[level] + 1
                self.whole[level] = self.MEMORY * self.whole[level] + (saved > level)
        self.levels = 0
        if self.hoped:
            self.hopes = self.MEMORY * self.hopes + self.hoped
            self.saved = min(self.hopes * self.MOST_TOGETHER, self.MEMORY * self.saved + saved)
            self.hoped = 0.0

    def settle(self, host: float, nodes: int, tokens: float, rows: int = 1, known: int = 0) -> None:
        """Account for a step with a draft: seconds of the host, nodes evaluated, tokens gained.

        Args:
            rows: tokens of the pass without the drafted nodes; `tokens` counts the passes that the step replaced.
            known: further tokens that the pass would have had if they had not been drafted before.
        """
        saved = 0.0
        self.host.note(1 + nodes, host)
        if self.seconds is not None and (plain := self.seconds(rows + known)):
            saved = tokens - (self.seconds(rows + nodes) + host) / (plain + self.alone)
        self.credit = max(-self.MOST_LOST, min(self.MOST_SAVED, self.credit + saved + self.LOSS * tokens))

    def plain(self, host: float) -> None:
        """Account for a step without a draft, by its seconds of the host."""
        self.alone += self.RATE * (min(host, 2 * self.alone or host) - self.alone)
        self.credit += self.LOSS

    def _kind(self, chance: float) -> int:
        return min(self.KINDS - 1, int(chance * self.KINDS))


def levels_of(draft: Draft) -> list[int]:
    """The level of each node of a draft; 1 for the children of its context."""
    levels: list[int] = []
    for parent in draft.parents:
        levels.append(1 if parent < 0 else levels[parent] + 1)
    return levels
