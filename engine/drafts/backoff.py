"""A back-off n-gram model as a drafter, with counts from the request's own text and from a store."""

import functools
import math
from collections.abc import Collection, Mapping, Sequence
from heapq import heappop, heappush
from typing import Any

from engine.drafts import Draft

BITS = 21  # bits of a token, in contexts and in stores
KEPT_SUCCESSORS = 16  # successors that remain of a context that has more than twice as many


class Backoff:
    """Best-first expansion of a back-off n-gram model: 4-grams of this text, then tri-grams, then bi-grams, those
    of the text before those of the store.

    The probability of a token is a mixture of all orders: each order passes the probability that it reserves for
    unseen successors on to the next. Every n-gram of the text counts as one occurrence; a token that the model gave the
    probability p after an evaluated node counts as p occurrences.

    Args:
        store: counts to start from, a `search.aded.ngrams.NGramStore`; None: none.
        adapt: whether the drafter learns from this text; otherwise it uses the store alone.
    """

    ORDERS = tuple((1 << BITS * n) - 1 for n in (3, 2, 1))  # masks of a context's last n tokens
    DOUBT = 0.5  # occurrences that an order leaves to the shorter ones, for itself and for each successor it knows
    FLOOR = 1 / 256  # the least probability of a node
    LEAST = 0.1  # the least probability, by the model, of a token that is learnt

    def __init__(self, store: Any = None, adapt: bool = True):
        self.store, self.adapt = store, adapt
        self.curiosity = self.LEAST if adapt else 1.0
        self.context = 0  # the last three tokens, each plus one, as digits: a shorter context is a smaller number
        self.seen: dict[int, dict[int, float]] = {}  # context of 1 to 3 tokens -> successor -> how often
        self.contexts: list[int] = []  # the contexts of the last draft's nodes

    def learn(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            if self.adapt:
                self._count(self.context, {token: 1.0})
            self.context = (self.context << BITS | token + 1) & self.ORDERS[0]

    def observe(self, nodes: Sequence[int], likely: Sequence[Mapping[int, float]]) -> None:
        for node, logps in zip(nodes, likely, strict=True) if self.adapt else ():
            if logps:
                context = self.contexts[node] if node >= 0 else self.context
                self._count(context, {token: math.exp(min(logp, 0.0)) for token, logp in logps.items()})

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

    def draft(self, nodes: int, depth: int, ahead: Sequence[int] = ()) -> Draft:
        """Draft what follows the text and the tokens `ahead`, see `TextDrafter.draft`."""
        draft, self.contexts = Draft(), []
        heap: list[tuple[float, int, int, int, int]] = []  # likeliest first, then the older parent, the lower token
        parent, context, chance, level = -1, self._ahead(ahead), 1.0, 0
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
        return normalized(self._mix(self._ahead(ahead)).items())

    def _ahead(self, tokens: Sequence[int]) -> int:
        """The context after the text and more tokens."""
        context = self.context
        for token in tokens[-3:]:
            context = (context << BITS | token + 1) & self.ORDERS[0]
        return context


def normalized(chances: Collection[tuple[int, float]]) -> dict[int, float]:
    """Tokens -> probabilities that add up to 1, from (token, weight)."""
    total = math.fsum(chance for _, chance in chances)
    return {token: chance / total for token, chance in chances}


@functools.lru_cache(maxsize=1 << 16)
def counted(context: int, store: Any) -> tuple[dict[int, float], float]:
    """A store's probabilities of the token after one or two others, likeliest first, and the probability left over."""
    before, last = context >> BITS, context & Backoff.ORDERS[2]
    after = store.after_pair(before - 1, last - 1) if before else store.after(last - 1)
    share = 1 / (after.total + Backoff.DOUBT * (1 + len(after.tokens)))
    found = sorted(zip(after.tokens, after.counts, strict=True), key=lambda entry: (-entry[1], entry[0]))
    return {token: share * n for token, n in found}, 1 - share * after.total


class NGramDrafts:
    """A `RequestDrafter` by the n-grams of its text."""

    def __init__(self, prompt: Sequence[int]):
        self.model = Backoff()
        self.model.learn(prompt)

    def learn(self, tokens: Sequence[int]) -> None:
        self.model.learn(tokens)

    def draft(self, ahead: Sequence[int], nodes: int, depth: int) -> Draft:
        return self.model.draft(nodes, depth, ahead)

    def close(self, tokens: Sequence[int]) -> None:
        pass


class NGramDrafter:
    """A `Drafter` by the n-grams of each request's own prompt and output; it keeps nothing of a request."""

    def open(self, salt: str | None, prompt: Sequence[int]) -> NGramDrafts:
        return NGramDrafts(prompt)
