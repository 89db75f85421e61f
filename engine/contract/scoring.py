"""Scores of continuations: one tree below their prompt, whose shared prefixes are evaluated once."""

import math
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from engine.cache.tree import TokenTree
from engine.contract import ContinuationScore, Evaluate, Output, Search, SearchGenerator, SearchResult, Task
from engine.errors import KVMemoryError
from kernels.rows import top_k

ROWS = 64  # most rows over the vocabulary at a time, and so most nodes beside a path
ROWS_BYTES = 1 << 24  # bytes of these rows; --memory counts none of them


def rows_at_once(vocab_size: int, device: torch.device) -> int:
    """Return how many rows over the vocabulary to compute at a time to read scores from them. Memory limits them on a
    CPU; a GPU reads all weights for each pass, however few rows it has."""
    return ROWS if device.type != "cpu" else max(1, min(ROWS, ROWS_BYTES // (4 * vocab_size)))


class TextPlace:
    """A place in the tree of continuations: the tokens that follow there, and their log-probabilities.

    Args:
        above: the place before it; None at the prompt.
        token: the token between the two places.

    Attributes:
        after: token -> the place after it.
        last: the index, among all places to evaluate, of the last one directly below.
        logps, ranks: token -> its log-probability and its rank here; the rank is 0 if ranks are not requested.
        top: the most probable tokens, best first, with their log-probabilities.
        best: the token of greedy decoding.
        node: the place's node in the token tree.
    """

    __slots__ = ("above", "after", "best", "last", "logps", "node", "ranks", "token", "top")

    def __init__(self, above: "TextPlace | None" = None, token: int = -1):
        self.above, self.token, self.node, self.last, self.best = above, token, -1, -1, -1
        self.after: dict[int, TextPlace] = {}
        self.logps: dict[int, float] = {}
        self.ranks: dict[int, int] = {}
        self.top: list[tuple[int, float]] = []


@dataclass(frozen=True)
class Scoring(Search):
    """Log-probabilities of given continuations; it generates nothing.

    Args:
        continuations: token ids after the prompt.
        skipped: for each of them, how many of its first tokens belong to the prompt and get no score; () for none.
        top: how many of the most probable tokens to return at each place.
        ranked: whether to compute ranks, which compares a row of the vocabulary for each token.
    """

    continuations: tuple[tuple[int, ...], ...]
    skipped: tuple[int, ...] = ()
    top: int = 0
    ranked: bool = False

    def run(self, task: Task) -> SearchGenerator:
        """See `Search`."""
        root, first, room = TextPlace(), 0, rows_at_once(task.vocab_size, task.tree.pool.device)
        for tokens in sorted({*self.continuations}):  # their order changes no pass
            place = root
            for token in tokens:
                place = place.after.setdefault(token, TextPlace(place, token))
        root.node = task.tree.root
        todo = _to_evaluate(root)
        while first < len(todo):
            part = todo[first : first + room]
            try:
                yield from self._evaluate(task.tree, part)
            except KVMemoryError:
                if len(part) == 1:
                    raise
                room = len(part) // 2
            else:
                first += len(part)
            if 0 < first < len(todo):
                _forget(task.tree, todo[first], first)
        skipped = self.skipped or [0] * len(self.continuations)
        scores = [self._score(root, tokens, skip) for tokens, skip in zip(self.continuations, skipped, strict=True)]
        return SearchResult([Output([], None, None, "length")], scores=scores)

    def _evaluate(self, tree: TokenTree, part: Sequence[TextPlace]) -> Generator[Evaluate, Any, None]:
        """Evaluate places; each comes after the place above it."""
        for place in part:
            if place.above is not None:
                place.node = tree.child(place.above.node, place.token)
        pairs = [(row, token) for row, place in enumerate(part) for token in place.after]
        row_M, token_M = torch.tensor(pairs).T
        read = partial(_read, row_M, token_M, self.top, self.ranked)
        _, numbers = yield Evaluate(tree, [place.node for place in part], read)
        logps, ranks, best, top = numbers.split([len(pairs), len(pairs), len(part), len(part) * 2 * self.top])
        for (row, token), logp, rank in zip(pairs, logps.tolist(), ranks.tolist(), strict=True):
            part[row].logps[token], part[row].ranks[token] = logp, int(rank)
        found = zip(best.tolist(), top.view(len(part), 2, self.top).tolist(), strict=True)
        for place, (token, (values, tokens)) in zip(part, found, strict=True):
            place.best = int(token)
            place.top = [(int(token), logp) for token, logp in zip(tokens, values, strict=True) if logp > -math.inf]

    def _score(self, place: TextPlace, tokens: Sequence[int], skip: int) -> ContinuationScore:
        logps, ranks, tops, greedy = [], [], [], True
        for i, token in enumerate(tokens):
            if i >= skip:
                logps.append(place.logps[token])
                ranks.append(place.ranks[token])
                tops.append([*place.top])
                greedy = greedy and place.best == token
            place = place.after[token]
        given = tops if self.top else None, ranks if self.ranked else None
        return ContinuationScore([*tokens[skip:]], logps, sum(logps), greedy, *given)

    def slots(self, prompt_tokens: int, new_tokens: int) -> tuple[int, int]:
        return prompt_tokens + new_tokens - 1, prompt_tokens + new_tokens - 1 + ROWS


def _to_evaluate(root: TextPlace) -> list[TextPlace]:
    """The places that tokens follow, depth first: each before those below it, and those before its siblings."""
    found, stack = list[TextPlace](), [root]
    while stack:
        place = stack.pop()
        if place.after:
            if place.above is not None:
                place.above.last = len(found)
            found.append(place)
            stack += reversed(place.after.values())
    return found


def _forget(tree: TokenTree, place: TextPlace, index: int) -> None:
    """Free the nodes that `place`, the `index`-th, and later ones do not need. Needed nodes lie on the path to it."""
    deepest = highest = place.above
    above = deepest
    while above is not None:
        if above.last >= index:
            highest = above
        above = above.above
    assert deepest is not None and highest is not None  # the root was evaluated
    tree.keep([highest.node, deepest.node])


def _read(row_M: Tensor, token_M: Tensor, k: int, ranked: bool, logp_NV: Tensor, peaks_NB: Tensor | None) -> Tensor:
    """The log-probabilities and ranks of tokens in rows, the lowest of the most probable tokens of each row, and its k
    most probable tokens, packed."""
    row_M, token_M = row_M.to(logp_NV.device, non_blocking=True), token_M.to(logp_NV.device, non_blocking=True)
    logp_M = logp_NV[row_M, token_M]
    rank_M = (logp_NV[row_M] > logp_M.unsqueeze(1)).sum(1) + 1 if ranked else torch.zeros_like(logp_M)
    best_N = logp_NV.argmax(1)  # `top_k` leaves open which of several equals is the first
    return torch.cat([logp_M.double(), rank_M.double(), best_N.double(), top_k(logp_NV, k).flatten()])
