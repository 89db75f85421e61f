"""Drafters guess the continuation of a text from n-grams: a tree of tokens with probabilities.

`MCTS` is the drafter of the ADED paper (tri-gram matrix, PUCT search); `Backoff` expands the likeliest path first. Both
start from a store of counts, which they never change. Each drafter learns from one request and keeps that to itself, so
no request depends on those before it.
"""

import functools
import math
import random
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Protocol

from engine.drafts import Draft
from search.aded.ngrams import BITS, NONE, NGramStore

MAX_PAPER_NODES = 64  # of a draft of `MCTS`
KEPT_SUCCESSORS = 16  # successors that remain of a context that has more than twice as many


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
        """Probabilities of the token after the text and the tokens `ahead`, adding up to 1; {} if none are known."""
        ...


class Backoff:
    """Best-first expansion of a back-off n-gram model: 4-grams of this text, then tri-grams and bi-grams, of each the
    text's before the store's.

    The probability of a token is a mixture of all orders: each order passes the probability that it reserves for
    unseen successors on to the next. Every n-gram of the text counts as one occurrence; a token that the model gave the
    probability p after an evaluated node counts as p occurrences.

    Args:
        store: counts to start from.
        adapt: whether the drafter learns from this text; otherwise it uses the store alone.
    """

    ORDERS = tuple((1 << BITS * n) - 1 for n in (3, 2, 1))  # masks of a context's last n tokens
    DOUBT = 0.5  # occurrences that an order leaves to the shorter ones, for itself and for each successor it knows
    FLOOR = 1 / 256  # the least probability of a node
    LEAST = 0.1  # the least probability, by the model, of a token that is learnt

    def __init__(self, store: NGramStore | None = None, adapt: bool = True):
        self.store, self.adapt = store, adapt
        self.curiosity = self.LEAST if adapt else 1.0
        self.context = 0  # the last three tokens, each plus one, as digits: a shorter context is a smaller number
        self.seen: dict[int, dict[int, float]] = {}  # context of 1 to 3 tokens -> successor -> how often
        self.contexts: list[int] = []  # of the last draft's nodes

    def learn(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            if self.adapt:
                self._count(self.context, {token: 1.0})
            self.context = (self.context << BITS | token + 1) & self.ORDERS[0]

    def observe(self, nodes: Sequence[int], likely: Sequence[Mapping[int, float]]) -> None:
        for node, logps in zip(nodes, likely, strict=True) if self.adapt else ():
            if logps:
                context = self.contexts[node] if node >= 0 else self.context
                self._count(context, {token: math.exp(logp) for token, logp in logps.items()})

    def _count(self, context: int, weights: dict[int, float]) -> None:
        last, known = 0, self.seen
        for mask in self.ORDERS:
            if (part := context & mask) != last:  # a text's first tokens have no long contexts
                last = part
                if (seen := known.get(part)) is None:
                    known[part] = weights.copy()
                    continue
                for token, weight in weights.items():
                    seen[token] = seen.pop(token, 0.0) + weight  # the latest last
                if len(seen) > 2 * KEPT_SUCCESSORS:
                    latest = sorted(reversed(seen.items()), key=lambda entry: -entry[1])[:KEPT_SUCCESSORS]
                    known[part] = dict(reversed(latest))

    def draft(self, nodes: int, depth: int) -> Draft:
        draft, self.contexts = Draft(), []
        heap: list[tuple[float, int, int, int, int]] = []  # likeliest first, then the older parent, the lower token
        parent, context, chance, level = -1, self.context, 1.0, 0
        while True:
            for token, p in self._mix(context).items() if level < depth else ():
                if chance * p >= self.FLOOR:
                    heappush(heap, (-chance * p, parent, token, context, level + 1))
            parent += 1
            if not heap or parent == nodes:
                return draft
            chance, above, token, context, level = heappop(heap)
            chance, context = -chance, (context << BITS | token + 1) & self.ORDERS[0]
            draft.tokens.append(token)
            draft.parents.append(above)
            draft.scores.append(chance)
            self.contexts.append(context)

    def _mix(self, context: int) -> dict[int, float]:
        """Probabilities of the tokens after a context."""
        chances: dict[int, float] = {}
        left, last = 1.0, 0
        for mask in self.ORDERS:
            if (part := context & mask) == last:  # a text's first tokens have no long contexts
                continue
            last = part
            if counts := self.seen.get(part):
                doubt, total = self.DOUBT + self.DOUBT * len(counts), 0.0
                for n in counts.values():  # rounded after each, as Python's `sum` did before 3.12
                    total += n
                share = left / (total + doubt)
                for token, n in counts.items():
                    chances[token] = chances.get(token, 0.0) + share * n
                left = share * doubt
            if self.store is not None and part <= self.ORDERS[1]:
                known, unknown = counted(part, self.store)
                for token, p in known.items():
                    chances[token] = chances.get(token, 0.0) + left * p
                left *= unknown
        return chances

    def distribution(self, ahead: Sequence[int] = ()) -> dict[int, float]:
        context = self.context
        for token in ahead:
            context = (context << BITS | token + 1) & self.ORDERS[0]
        return normalized(self._mix(context).items())


def normalized(chances: Collection[tuple[int, float]]) -> dict[int, float]:
    """Tokens -> probabilities that add up to 1, from (token, weight)."""
    total = math.fsum(chance for _, chance in chances)
    return {token: chance / total for token, chance in chances}


@functools.lru_cache(maxsize=1 << 16)
def counted(context: int, store: NGramStore) -> tuple[dict[int, float], float]:
    """A store's probabilities of the token after one or two others, likeliest first, and the probability left over."""
    before, last = context >> BITS, context & Backoff.ORDERS[2]
    after = store.after_pair(before - 1, last - 1) if before else store.after(last - 1)
    share = 1 / (after.total + Backoff.DOUBT * (1 + len(after.tokens)))
    found = sorted(zip(after.tokens, after.counts, strict=True), key=lambda entry: (-entry[1], entry[0]))
    return {token: share * n for token, n in found}, 1 - share * after.total


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
        """(c, P(c | a, b)): the likeliest first, of equals the lower token."""
        if (row := self.matrix.get((a, b))) is not None:
            return sorted(row.items(), key=lambda entry: (-entry[1], entry[0]))
        after = self.store.after_pair(a, b) if self.store is not None else NONE
        return [(t, n / after.total) for t, n in zip(after.tokens, after.counts, strict=True)][: self.successors]

    def draft(self, nodes: int, depth: int) -> Draft:
        if len(self.text) < 2:
            return Draft()
        rng = random.Random(len(self.text))  # of the roll-outs: the same for the same text
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
        """The child of the highest PUCT score (eq. 2); a child without visits comes before all others."""
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
        """Sum of P along a path drawn by P."""
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
        """The most visited nodes, each with its likeliest successor; those visited least are cut first."""
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
