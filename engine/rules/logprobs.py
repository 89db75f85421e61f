"""Log-probabilities of output tokens, and the most probable tokens at their positions, for every search.

A search returns tokens, and the driver cannot know in advance which rows will be needed. So the hidden rows that passes
compute are kept, one per evaluated token of the target's tree, and the head is applied again to those on the paths
of the outputs, once these are known: no forward pass is added, and the only extra work in a pass is copying rows of the
model's width. The values are those of the rows that the search received: the model's log-softmax, before warps, edited
by the request's constraint and processors.
"""

import math
from collections.abc import Generator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from engine.cache.drafts import DraftedNode
from engine.cache.tree import TokenTree
from engine.contract import Output
from engine.contract.scoring import rows_at_once
from engine.errors import check_integer
from engine.rules.constrained import Constrained
from engine.rules.state import NodeState
from kernels.rows import log_softmax, top_k

MOST_ALTERNATIVES = 1024  # alternatives

Alternatives = list[tuple[int, float]]  # tokens and their log-probabilities, best first


class Scored(NamedTuple):
    """The numbers of a sequence of new tokens.

    Attributes:
        logprobs: the log-probability of each token; None if no row was evaluated, or if the token is forbidden.
        top: for each place the most probable tokens, without impossible ones.
    """

    logprobs: list[float | None]
    top: list[Alternatives]


class HiddenRows:
    """The hidden rows of one request, by the tokens before them.

    A place stands for a sequence of new tokens, 0 for none of them, whether or not the tree still has its node.

    Args:
        runner: the target's runner.
        k: how many alternatives are wanted.
        constrained: edits the rows; None: nothing does.
    """

    def __init__(self, runner: Any, k: int, constrained: Constrained | None):
        self.runner, self.k, self.constrained = runner, min(k, runner.vocab_size), constrained
        self.restart()

    def restart(self) -> None:
        """Forget all rows: the search starts again."""
        self._after: dict[tuple[int, int], int] = {}  # (place, token) -> place
        self._row: dict[int, Tensor] = {}
        self._nodes: dict[int, int] = {}  # branch node -> place
        self._adapter = 0
        self._trunk = [0]  # the places of the trunk's tokens, from the last of the prompt on

    def wanted(self, tree: TokenTree, trunk_tokens: int, nodes: Sequence[int]) -> tuple[int, "partial[None]"]:
        """How many of the last tokens of a chunk have rows to keep, and the function that keeps them.

        Args:
            tree: the target's, with slots allocated for the chunk.
            trunk_tokens, nodes: the tokens of the chunk.
        """
        new = max(0, min(trunk_tokens, tree.trunk.cached - tree.prompt_length + 1))
        return new + len(nodes), partial(self.keep, tree, tree.trunk.cached - new, nodes)

    def keep(self, tree: TokenTree, start: int, nodes: Sequence[int], rows_NE: Tensor) -> None:
        """Keep the rows of trunk tokens from position `start` on, and of nodes. If a place gets two, the first counts,
        because the search was sent that one."""
        self._adapter = tree.trunk.adapter
        rows_NE = rows_NE.clone()  # the next pass may write to the same memory
        trunk = len(rows_NE) - len(nodes)
        for i in range(trunk):
            self._row.setdefault(self._on_trunk(tree, start + i), rows_NE[i])
        for node, row_E in zip(nodes, rows_NE[trunk:], strict=True):
            self._nodes[node] = place = self._place(self._of(tree, tree.parent(node)), tree.token(node))
            self._row.setdefault(place, row_E)

    def keep_drafted(self, tree: TokenTree, nodes: Sequence[DraftedNode], rows_NE: Tensor) -> None:
        """Keep the rows of drafted nodes, because they may be sent to the search."""
        for node, row_E in zip(nodes, rows_NE.clone(), strict=True):
            self._row.setdefault(self._of(tree, node), row_E)

    def _of(self, tree: TokenTree, node: DraftedNode | int) -> int:
        """The place of a live node, of one in the trunk, or of a drafted one."""
        if isinstance(node, DraftedNode):
            return self._place(self._of(tree, node.parent), node.token)
        if (place := self._nodes.get(node)) is None:
            if tree.position(node) <= tree.position(tree.root):
                return self._on_trunk(tree, tree.position(node))
            self._nodes[node] = place = self._place(self._of(tree, tree.parent(node)), tree.token(node))
        return place

    def _on_trunk(self, tree: TokenTree, position: int) -> int:
        first = tree.prompt_length - 1
        while len(self._trunk) <= position - first:
            self._trunk.append(self._place(self._trunk[-1], tree.trunk.tokens[first + len(self._trunk)]))
        return self._trunk[position - first]

    def _place(self, above: int, token: int) -> int:
        return self._after.setdefault((above, token), len(self._after) + 1)

    def filling(self, outputs: Sequence[Output]) -> Generator[None, None, list[Output]]:
        """Outputs with `token_logprobs` and `top_logprobs`; yields between pieces of the work."""
        found = yield from self.scoring([output.token_ids for output in outputs])
        return [
            replace(output, token_logprobs=scored.logprobs, top_logprobs=scored.top)
            for output, scored in zip(outputs, found, strict=True)
        ]

    def scoring(self, sequences: Sequence[Sequence[int]]) -> Generator[None, None, list[Scored]]:
        """The numbers of sequences of new tokens, which the search may still extend. Waits for a GPU once.

        Yields after every `rows_at_once` rows that the head was applied to.
        """
        paths = [self._path(tokens) for tokens in sequences]
        evaluated = (one for path in paths for one in path if one[0] in self._row)
        states = {place: state for place, state in evaluated if state is None or not state.forbidden}
        row = {place: i for i, place in enumerate(states)}
        pairs = {
            (row[place], token)
            for path, tokens in zip(paths, sequences, strict=True)
            for (place, _), token in zip(path, tokens, strict=True)
            if place in row
        }
        logps, top = {}, []
        if pairs:
            logps, top = yield from self._evaluate([*states], [*states.values()], sorted(pairs))
        found = []
        for path, tokens in zip(paths, sequences, strict=True):
            scored = Scored([], [])
            for (place, state), token in zip(path, tokens, strict=True):
                # The token whose probability is 1, so that no row was evaluated.
                only = self.constrained.certain(state) if self.constrained is not None and state is not None else None
                logp = logps[row[place], token] if place in row else 0.0 if token == only else -math.inf
                scored.logprobs.append(logp if logp > -math.inf else None)
                scored.top.append(top[row[place]] if place in row else [] if only is None else [(only, 0.0)][: self.k])
            found.append(scored)
        return found

    def _path(self, tokens: Sequence[int]) -> list[tuple[int, NodeState | None]]:
        """For each token the place before it (-1 if nothing was evaluated there), and the state there."""
        states = [None] * len(tokens) if self.constrained is None else self.constrained.states.along(tokens)
        places = [0]
        for token in tokens[:-1]:
            places.append(self._after.get((places[-1], token), -1))
        return [*zip(places[: len(tokens)], states, strict=False)]

    def _evaluate(
        self, places: Sequence[int], states: Sequence[NodeState | None], pairs: Sequence[tuple[int, int]]
    ) -> Generator[None, None, tuple[dict[tuple[int, int], float], list[Alternatives]]]:
        """The log-probabilities of (row, token), in the order of rows, and the alternatives of each row."""
        parts = []
        row_M, token_M = torch.tensor(pairs).T
        count = rows_at_once(self.runner.vocab_size, self.runner.device)
        for first in range(0, len(places), count):
            some = slice(first, first + count)
            mine = (row_M >= first) & (row_M < first + count)
            parts += self._piece(places[some], states[some], row_M[mine] - first, token_M[mine])
            yield
        numbers = torch.cat(parts).cpu().split([len(part) for part in parts])
        top = []
        for numbers_n2k in numbers[1::2]:
            for logps, tokens in numbers_n2k.view(-1, 2, self.k).tolist() if self.k else []:
                ranked = sorted(zip(logps, map(int, tokens), strict=True), key=lambda pair: (-pair[0], pair[1]))
                top.append([(token, logp) for logp, token in ranked if logp > -math.inf])
        found = dict(zip(pairs, torch.cat(numbers[::2]).tolist(), strict=True))
        return found, top or [[] for _ in places]

    @torch.inference_mode()
    def _piece(
        self, places: Sequence[int], states: Sequence[NodeState | None], row_M: Tensor, token_M: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The log-probabilities of tokens in rows, and the best tokens of the rows, float64, on the device."""
        rows_NE = torch.stack([self._row[place] for place in places])
        logits_NV = self.runner.logits_of(rows_NE, self.runner.heads([self._adapter] * len(rows_NE)))
        logp_NV, finite_N, _ = log_softmax(logits_NV, self.runner.vocab_size, impl=self.runner.impl)
        if self.constrained is not None:
            edit = self.constrained.rewrite_edit([s for s in states if s], slice(0, len(rows_NE)))
            self.runner.edited(logp_NV, finite_N, [edit], logits_NV)
        place = row_M.to(self.runner.device, non_blocking=True), token_M.to(self.runner.device, non_blocking=True)
        return logp_NV[place].double(), top_k(logp_NV, self.k).flatten()


def check_logprobs(k: Any) -> None:
    """Check a request's number of alternatives, or None. Raises UsageError."""
    if k is not None:
        check_integer("logprobs", k, 0, MOST_ALTERNATIVES)
