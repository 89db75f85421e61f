"""Drafters guess the continuation of a text from n-grams: a tree of tokens with probabilities.

`MCTS` is the drafter of the ADED paper (tri-gram matrix, PUCT search); `engine.drafts.backoff.Backoff` expands the
likeliest path first. Both start from a store of counts, which they never change. Each drafter learns from one request
only, so no request depends on earlier ones.
"""

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from engine.drafts import Draft
from engine.drafts.backoff import normalized
from search.aded.ngrams import NONE, NGramStore

MAX_PAPER_NODES = 64  # the most nodes of a draft of `MCTS`


class TextDrafter(Protocol):
    """Guesses the continuation of a text. The guesses depend only on the calls of its methods and on their order.

    `distribution` makes a drafter a draft model of known probabilities, for searches that need them (DSBD's q):
    between two calls of `learn` or `observe` it depends on the context alone.

    Attributes:
        curiosity: the least probability of a token that `observe` receives; with 1, `observe` need not be called.
    """

    curiosity: float

    def learn(self, tokens: Sequence[int]) -> None:
        """Append tokens to the text: the prompt, then the generated tokens."""
        ...

    def draft(self, nodes: int, depth: int) -> Draft:
        """Draft up to `nodes` nodes, at most `depth` (>= 1) tokens ahead."""
        ...

    def observe(self, nodes: Sequence[int], likely: Sequence[Mapping[int, float]]) -> None:
        """Observe the model's likely tokens after nodes of the last draft; called before `learn`.

        Args:
            nodes: the likeliest evaluated nodes, also those that the text does not pass through; -1 is the text's end.
            likely: for each node, tokens -> their log-probabilities.
        """
        ...

    def distribution(self, ahead: Sequence[int] = ()) -> dict[int, float]:
        """Return probabilities of the token after the text and `ahead`, which sum to 1; {} if none are known."""
        ...


@dataclass(eq=False)
class MCTS:
    """The paper's draft maker: a Monte Carlo tree search over a tri-gram matrix.

    Args:
        store: counts that the matrix starts from, as probabilities (eq. 1).
        adapt: whether the last tokens' tri-grams gain weight at every step.
        iterations, candidates, depth, successors, c1, c2, window, increment, cap: see `search.aded.ADED`.
    """

    curiosity = 1.0

    store: NGramStore | None = None
    adapt: bool = True
    iterations: int = 150
    candidates: int = 24
    depth: int = 4
    successors: int = 12
    c1: float = 32.0
    c2: float = 8.0
    window: int = 16
    increment: float = 0.04
    cap: float = 3.0

    def __post_init__(self):
        self.text: list[int] = []
        self.matrix: dict[tuple[int, int], dict[int, float]] = {}  # the rows that differ from the store's

    def learn(self, tokens: Sequence[int]) -> None:
        self.text += tokens
        if not self.adapt:
            return
        last = self.text[-self.window :] if self.window else []
        for a, b, c in zip(last, last[1:], last[2:], strict=False):
            if (row := self.matrix.get((a, b))) is None:
                row = self.matrix[a, b] = dict(self._row(a, b))  # copied on the first write
            row[c] = min(self.cap, row.get(c, 0.0) + self.increment)

    def observe(self, nodes: Sequence[int], likely: Sequence[Mapping[int, float]]) -> None:
        pass

    def _row(self, a: int, b: int) -> list[tuple[int, float]]:
        """Return pairs (c, P(c | a, b)): the likeliest first, among equals the lower token."""
        if (row := self.matrix.get((a, b))) is not None:
            return sorted(((c, p) for c, p in row.items() if p), key=lambda entry: (-entry[1], entry[0]))
        after = self.store.after_pair(a, b) if self.store is not None else NONE
        return [(t, n / after.total) for t, n in zip(after.tokens, after.counts, strict=True)][: self.successors]

    def draft(self, nodes: int, depth: int) -> Draft:
        if len(self.text) < 2:
            return Draft()
        rng = random.Random(len(self.text))  # for roll-outs: equal texts give equal drafts
        limit = min(self.depth, depth)
        # The search tree: a list for each property of its nodes; node 0 is the text.
        pair, prior, parent = [(self.text[-2], self.text[-1])], [0.0], [-1]
        children: list[range | None] = [None]
        visits, value = [0], [0.0]
        for _ in range(self.iterations):
            node, path = 0, [0]
            while len(path) <= limit and children[node]:  # select
                node = self._select(node, children, prior, visits, value)
                path.append(node)
            if len(path) <= limit and children[node] is None:  # expand
                row = self._row(*pair[node])
                children[node] = range(len(pair), len(pair) + len(row))
                for token, p in row:
                    pair.append((pair[node][1], token))
                    prior.append(p)
                    parent.append(node)
                    children.append(None)
                    visits.append(0)
                    value.append(0.0)
                if row:
                    node = len(pair) - len(row)
                    path.append(node)
            score = 1 + sum(prior[n] for n in path) + self._roll_out(pair[node], limit + 1 - len(path), rng)
            for n in path:  # back up
                visits[n] += 1
                value[n] += score
        return self._best(pair, parent, children, visits, min(nodes, MAX_PAPER_NODES), depth)

    def _select(self, node: int, children: list, prior: list[float], visits: list[int], value: list[float]) -> int:
        """Return the child with the highest PUCT score (eq. 2); a child without visits comes before all others."""
        total = visits[node]
        weight = (self.c1 + math.log((total + self.c2 + 1) / self.c2)) * math.sqrt(total)  # eq. 3
        best, highest = -1, -math.inf
        for child in children[node]:
            n = visits[child]
            if not n:
                return child
            score = value[child] / n + weight * prior[child] / (1 + n)
            if score > highest:
                best, highest = child, score
        return best

    def _roll_out(self, pair: tuple[int, int], steps: int, rng: random.Random) -> float:
        """Return the sum of P along a path drawn from P."""
        total = 0.0
        for _ in range(steps):
            row = self._row(*pair)
            if not row:
                break
            [(token, p)] = rng.choices(row, [p for _, p in row])
            total += p
            pair = (pair[1], token)
        return total

    def _best(self, pair: list, parent: list[int], children: list, visits: list[int], most: int, depth: int) -> Draft:
        """Return the most visited nodes, each with its likeliest successor; those visited least are cut first."""
        order = sorted(range(1, len(pair)), key=lambda n: (-visits[n], n))[: self.candidates]
        level, score = {0: 0}, {0: 1.0}
        found: list[tuple[float, int, int, int]] = []  # -score, its parent's place in the tree, token, place
        for n in order:
            if not visits[n]:
                continue
            level[n], score[n] = level[parent[n]] + 1, visits[n] / visits[0]
            found.append((-score[n], parent[n], pair[n][1], n))
        chosen = {n for *_, n in found}
        for n in list(chosen):
            row = self._row(*pair[n]) if level[n] < depth else []
            if row and not any(pair[c][1] == row[0][0] for c in children[n] or () if c in chosen):
                found.append((-score[n] * min(1.0, row[0][1]), n, row[0][0], len(pair) + n))
        place, draft = {0: -1}, Draft()
        for chance, above, token, n in sorted(found, key=lambda entry: (entry[0], entry[3]))[:most]:
            place[n] = len(draft.tokens)
            draft.tokens.append(token)
            draft.parents.append(place[above])
            draft.scores.append(-chance)
        return draft

    def distribution(self, ahead: Sequence[int] = ()) -> dict[int, float]:
        last = [*self.text[-2:], *ahead][-2:]
        return normalized(self._row(*last) if len(last) == 2 else [])
