"""Draft forests: beam sampling by something cheaper than the target, below the target's beams. What DSBD verifies."""

import math
from collections.abc import Generator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from engine.errors import KVMemoryError
from engine.sampling import Warp, uniforms
from engine.tree import TokenTree
from search.base import Evaluate, Task
from search.beam_sample import Beam, extend
from search.drafters import Drafter
from search.joint import Joint, Rows, p_beam
from search.verify import draw

DRAFTING = 0  # stream of keyed numbers
Known = dict[int, tuple[Rows, int]]  # by node: where its row is


class Layer(NamedTuple):
    """A layer of a forest: the beams it was drawn from, their joint distribution, the draws in their order."""

    beams: list[Beam]
    q: Joint
    drawn: list[int]


class Forester:
    """Drafts forests.

    Args:
        task: the target's.
        warp: of joint distributions.
        width: drafts per layer.
        gamma: layers, at most.
        kind: how drafts are drawn, see `search.verify.draw`.
        seed: of the keyed draws.
    """

    def __init__(self, task: Task, warp: Warp, width: int, gamma: int, kind: str, seed: int):
        self.task, self.warp, self.width, self.gamma, self.kind, self.seed = task, warp, width, gamma, kind, seed

    def forest(self, beams: Sequence[Beam]) -> Generator[Evaluate, Tensor, tuple[list[Layer], list[Beam]]]:
        """Beam sampling below the target's beams, whose weights are the target's.

        Returns:
            layers, and the beams after the last.
        """
        target, heads = self.task.tree, list(beams)
        start = target.position(heads[0].node) + 1
        left = self.task.max_new_tokens - (start - target.prompt_length)
        layers: list[Layer] = []
        while heads and len(layers) < min(self.gamma, left - 1):
            q = yield from self.joint(heads)
            if q is None:
                break
            numbers = uniforms(self.seed, DRAFTING, start + len(layers))
            layers.append(Layer(heads, q, draw(q.probs, self.width, self.kind, numbers)))
            heads, _ = extend(self.task, heads, q, layers[-1].drawn)
        return layers, heads

    def joint(self, heads: Sequence[Beam]) -> Generator[Evaluate, Tensor, Joint | None]:
        """What the next layer is drawn from; None if that cannot be told."""
        raise NotImplementedError

    def follow(self, beams: Sequence[Beam]) -> None:
        """The target's beams are these now."""
        raise NotImplementedError


class ModelForester(Forester):
    """The draft model: its tree grows like the target's, and evaluates what it is asked about."""

    def __init__(self, tree: TokenTree, task: Task, *options):
        super().__init__(task, *options)
        self.tree = tree
        self.twins = {task.tree.root: tree.root}  # node of the target's tree -> node of this one
        self.known: Known = {}

    def joint(self, heads: Sequence[Beam]) -> Generator[Evaluate, Tensor, Joint | None]:
        try:
            rows, which = yield from know(self.tree, [self._twin(beam.node) for beam in heads], self.known)
        except KVMemoryError:
            return None
        return p_beam(rows, which, [beam.weight for beam in heads], self.warp, self.task.vocab_size)

    def follow(self, beams: Sequence[Beam]) -> None:
        self.twins = {beam.node: self._twin(beam.node) for beam in beams}
        if beams:
            self.tree.keep(self.twins.values())
        self.known = {node: self.known[node] for node in self.twins.values() if node in self.known}

    def _twin(self, node: int) -> int:
        if node not in self.twins:
            target = self.task.tree
            [self.twins[node]] = self.tree.grow([self._twin(target.parent(node))], [target.token(node)])
        return self.twins[node]


class NGramForester(Forester):
    """Counted n-grams with known probabilities; they learn from what is settled of the text."""

    def __init__(self, drafter: Drafter, task: Task, *options):
        super().__init__(task, *options)
        self.drafter = drafter
        self.learnt = 0  # tokens after the prompt
        drafter.learn(task.tree.trunk.tokens)

    def joint(self, heads: Sequence[Beam]) -> Generator[Evaluate, Tensor, Joint | None]:
        yield from ()  # nothing to evaluate
        told = [self.drafter.distribution(self.task.tree.path(beam.node)[self.learnt :]) for beam in heads]
        tokens = sorted({token for row in told for token, chance in row.items() if chance > 0})
        if not tokens:
            return None
        column = {token: i for i, token in enumerate(tokens)}
        table = [[-math.inf] * len(tokens) for _ in told]
        for line, row in zip(table, told, strict=True):
            for token, chance in row.items():
                if chance > 0:
                    line[column[token]] = math.log(chance)
        q = p_beam(Rows(torch.tensor(table)), range(len(told)), [b.weight for b in heads], self.warp, len(tokens))
        probs, logps = (x.tolist() if isinstance(x, Tensor) else x for x in (q.probs, q.logps))
        cells = [(i if q.cells is None else q.cells[i], p, logps[i]) for i, p in enumerate(probs) if p > 0]
        places = [cell // q.vocab * self.task.vocab_size + tokens[cell % q.vocab] for cell, _, _ in cells]
        return Joint(self.task.vocab_size, [p for _, p, _ in cells], [logp for _, _, logp in cells], places)

    def follow(self, beams: Sequence[Beam]) -> None:
        fresh = self.task.tree.settled_from(self.learnt) if beams else []
        self.drafter.learn(fresh)
        self.learnt += len(fresh)


def know(tree: TokenTree, nodes: Sequence[int], known: Known) -> Generator[Evaluate, Tensor, tuple[Rows, list[int]]]:
    """Evaluate what is not known yet; returns rows that hold those of all `nodes`, and which they are."""
    if new := [node for node in dict.fromkeys(nodes) if node not in known]:
        fresh = Rows((yield Evaluate(tree, new)))
        known.update((node, (fresh, i)) for i, node in enumerate(new))
    return rows_of(nodes, known)


def rows_of(nodes: Sequence[int], known: Known) -> tuple[Rows, list[int]]:
    """Rows that hold those of all `nodes`, and which they are."""
    found = [known[node] for node in nodes]
    if all(rows is found[0][0] for rows, _ in found):
        return found[0][0], [i for _, i in found]
    return Rows(torch.stack([rows.logp_NV[i] for rows, i in found])), list(range(len(nodes)))
