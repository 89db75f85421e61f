"""Toy search trees: every node has a softmax vector drawn from a symmetric Dirichlet, with a computable optimum.

A tree has `branching` children per node and `depth` levels below the root; a leaf's value is the sum of the log
probabilities on its way. Trees are the same on every machine: numpy's frozen RandomState, seeded per tree, draws
standard gammas level by level, and each node's are divided by their sum. The node at tokens t_1..t_l has the number
sum_j t_j * branching**(l - j) on its level. The unit of cost is an evaluated node, the root included.
"""

import hashlib
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch

from engine.cache.pool import PagePool
from engine.cache.tree import TokenTree
from engine.contract import Evaluate, Search, SearchResult, Task
from models.shape import ModelShape
from tools.bench.searches import run_alone

SHAPE = ModelShape(layers=1, kv_heads=1, head_dim=1, vocab_size=1, max_positions=None)


class ToyTree:
    """One tree.

    Args:
        seed: seed of the draw.
        alpha: concentration of the Dirichlet.
        branching, depth: its size.
    """

    def __init__(self, seed: int, alpha: float, branching: int = 8, depth: int = 5):
        draw = np.random.RandomState(seed)
        self.branching, self.depth = branching, depth
        self.levels: list[np.ndarray] = []  # level l: float64 log-probabilities [branching ** l, branching]
        for level in range(depth):
            gammas = np.maximum(draw.standard_gamma(alpha, size=(branching**level, branching)), 1e-300)
            self.levels.append(np.log(gammas) - np.log(gammas.sum(axis=1, keepdims=True)))

    def logp(self, path: Sequence[int]) -> np.ndarray:
        """The children's log-probabilities of the node at a path."""
        node = 0
        for token in path:
            node = node * self.branching + token
        return self.levels[len(path)][node]

    def optimum(self) -> float:
        """The best leaf's value."""
        sums = np.zeros(1)
        for logp in self.levels:
            sums = (sums[:, None] + logp).reshape(-1)
        return float(sums.max())

    def beam_search(self, beams: int) -> tuple[float, int]:
        """(value, cost) of plain beam search."""
        nodes, sums, cost = np.zeros(1, dtype=np.int64), np.zeros(1), 0
        for logp in self.levels:
            cost += len(nodes)
            candidates = (sums[:, None] + logp[nodes]).reshape(-1)
            children = (nodes[:, None] * self.branching + np.arange(self.branching)).reshape(-1)
            order = np.argsort(-candidates, kind="stable")[:beams]
            nodes, sums = children[order], candidates[order]
        return float(sums[0]), cost

    def search(self, search: Search, slots: int = 4096, **task: Any) -> SearchResult:
        """Run a search of the engine with this tree instead of a model."""
        tree = TokenTree(PagePool(SHAPE, slots, 1), [0])
        options = {"max_new_tokens": self.depth, "eos_token_ids": frozenset(), "vocab_size": self.branching}

        def rows_of(request: Evaluate) -> tuple[torch.Tensor, None]:
            rows = np.stack([self.logp(tree.path(node)) for node in request.nodes])
            return torch.from_numpy(rows).float(), None

        try:
            return run_alone(search, Task(tree, **options | task), rows_of)[1]
        finally:
            tree.release()


def checksum(trees: Iterable[ToyTree]) -> str:
    """A checksum of the drawn vectors, rounded to nine decimals."""
    digest = hashlib.sha256()
    for tree in trees:
        for logp in tree.levels:
            digest.update(np.round(logp, 9).astype("<f8").tobytes())
    return digest.hexdigest()[:16]
