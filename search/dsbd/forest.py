"""Draft forests: beam sampling by a draft model or by n-grams, below the target's beams. DSBD verifies them."""

import math
from collections import Counter
from collections.abc import Generator, Sequence
from typing import NamedTuple

from engine.cache.pool import PagePool
from engine.cache.tree import TokenTree
from engine.contract.sampling import uniforms
from search.aded.drafters import TextDrafter
from search.base import Answer, Evaluate, Task
from search.dsbd.beams import extend
from search.dsbd.joint import Beam, Joint, Reader, Row, Rows
from search.dsbd.verify import draw

DRAFTING = 1  # stream of keyed numbers for the first layer of a round; layer i of the round uses DRAFTING + i


class ForestLevel(NamedTuple):
    """A layer of a forest: the beams above it, their joint distribution, and the draws in order."""

    beams: list[Beam]
    q: Joint
    drawn: list[int]


class Forester:
    """Base class of drafters of forests.

    Args:
        task: the target's task.
        reader: makes joint distributions.
        width: drafts per layer.
        gamma: the most layers.
        kind: how drafts are drawn, see `search.dsbd.verify.draw`.
        seed: the seed of the keyed draws.
    """

    def __init__(self, task: Task, reader: Reader, width: int, gamma: int, kind: str, seed: int):
        self.task, self.reader, self.width, self.gamma, self.kind, self.seed = task, reader, width, gamma, kind, seed

    def forest(self, beams: Sequence[Beam]) -> Generator[Evaluate, Answer, tuple[list[ForestLevel], list[Beam]]]:
        """Beam-sample below the target's beams, which keep the target's log-probabilities.

        Returns:
            the layers, and the beams after the last one.
        """
        heads, start = list(beams), self.task.tree.position(beams[0].node) + 1
        layers: list[ForestLevel] = []
        most = self.layers(beams)
        while heads and len(layers) < most:
            q = yield from self.joint(heads)
            if q is None:
                break
            numbers = uniforms(self.seed, DRAFTING + len(layers), start)
            layers.append(ForestLevel(heads, q, draw(q.probs, self.width, self.kind, numbers)))
            heads, _ = extend(self.task, heads, q, layers[-1].drawn)
        return layers, heads

    def layers(self, beams: Sequence[Beam]) -> int:
        """Return the number of layers to draft below the beams: at most gamma, and no more than fit if all drafts
        differ.

        The number must not depend on the draws. The room that a forest needs does (equal drafts share a node, drafts
        that end need none), so dropping a forest that turns out too large would make some tokens more likely than
        others.
        """
        target, nodes = self.task.tree, [beam.node for beam in beams]
        left = self.task.max_new_tokens - (target.position(nodes[0]) + 1 - target.prompt_length)
        return next((n for n in range(min(self.gamma, left - 1), 0, -1) if self._fits(nodes, n)), 0)

    def _fits(self, nodes: Sequence[int], layers: int) -> bool:
        wanted: Counter[PagePool] = Counter()
        for tree, there, more in self.needs(nodes, layers):
            wanted[tree.pool] += tree.pages_wanted(there, more)
        return all(pages <= self.task.spare(pool) for pool, pages in wanted.items())

    def needs(self, nodes: Sequence[int], layers: int) -> list[tuple[TokenTree, Sequence[int], int]]:
        """Return what a round below the target's `nodes` evaluates: (tree, nodes in it, most nodes below them)."""
        return [(self.task.tree, nodes, layers * self.width)]

    def joint(self, heads: Sequence[Beam]) -> Generator[Evaluate, Answer, Joint | None]:
        """Return the distribution of the next layer; None if the drafter has none."""
        raise NotImplementedError

    def follow(self, beams: Sequence[Beam]) -> None:
        """Continue from the target's new beams."""
        raise NotImplementedError


class ModelForester(Forester):
    """Drafts by a draft model, whose tree grows with the target's."""

    def __init__(self, tree: TokenTree, task: Task, *options):
        super().__init__(task, *options)
        self.tree = tree
        self.twins = {task.tree.root: tree.root}  # node of the target's tree -> node of the draft's tree
        self.rows: Rows = {}

    def needs(self, nodes: Sequence[int], layers: int) -> list[tuple[TokenTree, Sequence[int], int]]:
        drafts = (layers - 1) * self.width  # the draft model does not evaluate the last layer
        return [*super().needs(nodes, layers), (self.tree, self._twins(nodes), drafts)]

    def joint(self, heads: Sequence[Beam]) -> Generator[Evaluate, Answer, Joint]:
        nodes = [beam.node for beam in heads]
        twins = self._twins(nodes)
        yield from self.reader.fetch(self.tree, twins, self.rows)
        return self.reader.p_beam({n: self.rows[twin] for n, twin in zip(nodes, twins, strict=True)}, heads)

    def follow(self, beams: Sequence[Beam]) -> None:
        nodes = [beam.node for beam in beams]
        self.twins = dict(zip(nodes, self._twins(nodes), strict=True))
        if beams:
            self.tree.keep(self.twins.values())
        self.rows = {node: self.rows[node] for node in self.twins.values() if node in self.rows}

    def _twins(self, nodes: Sequence[int]) -> list[int]:
        """Return the draft tree's nodes with the paths of the target's nodes; missing ones are grown."""
        target, twins = self.task.tree, self.twins
        for node in nodes:
            new = []
            while node not in twins:
                new.append(node)
                node = target.parent(node)
            for below in reversed(new):
                twins[below] = node = self.tree.child(twins[target.parent(below)], target.token(below))
        return [twins[node] for node in nodes]


class NGramForester(Forester):
    """Drafts by counted n-grams, which learn from the settled text."""

    def __init__(self, drafter: TextDrafter, task: Task, *options):
        super().__init__(task, *options)
        self.drafter = drafter
        self.learnt = 0  # number of tokens after the prompt
        drafter.learn(task.tree.trunk.tokens)

    def joint(self, heads: Sequence[Beam]) -> Generator[Evaluate, Answer, Joint | None]:
        yield from ()  # nothing to evaluate
        rows: Rows = {}
        vocab = self.reader.vocab  # a prompt may hold ids that cannot be generated
        for beam in heads:
            chances = self.drafter.distribution(self.task.tree.path(beam.node)[self.learnt :])
            possible = ((chance, token) for token, chance in chances.items() if chance > 0 and token < vocab)
            if ranked := sorted(possible, reverse=True):
                logps, tokens = [math.log(chance) for chance, _ in ranked], [token for _, token in ranked]
                rows[beam.node] = Row(logps, tokens, complete=True)
        heads = [beam for beam in heads if beam.node in rows]
        return self.reader.p_beam(rows, heads) if heads else None

    def follow(self, beams: Sequence[Beam]) -> None:
        fresh = self.task.tree.settled_from(self.learnt) if beams else []
        self.drafter.learn(fresh)
        self.learnt += len(fresh)
