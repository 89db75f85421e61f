"""Edits of rows: what the processors of one request do to the log-probabilities of nodes."""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

from torch import Tensor

from engine.cache.tree import TokenTree
from engine.rules.endings import STUCK, Endings
from engine.rules.processors import mask
from engine.rules.state import NodeState, NodeStates, ahead, ending


class Edit(NamedTuple):
    """An edit of a range of rows after the softmax.

    Attributes:
        rows: the range.
        apply: function of the rows and, if `logits`, of the excess of their logits over them [N, 1].
        logits: whether it needs the logits.
    """

    rows: slice
    apply: Callable[[Tensor, Tensor | None], None]
    logits: bool


class RowEdits:
    """The edits of the rows of one request.

    Args:
        states: the states of the nodes.
        endings: records the nodes after which no token is left.
        renormalise: whether processors edit logits, before the softmax, instead of log-probabilities.

    Attributes:
        of_logits: whether a processor needs the logits.
    """

    def __init__(self, states: NodeStates, endings: Endings, renormalise: bool):
        self.states, self.endings, self.renormalise = states, endings, renormalise
        self.of_logits = renormalise and any(p.of_logits for p in states.processors)
        self._bans = any(p.bans for p in states.processors)

    def edit(self, tree: TokenTree, nodes: Sequence[int], rows: slice) -> Edit:
        """The edit of the rows of evaluated nodes: its `apply` is called before a search sees the rows."""
        return Edit(rows, partial(self._apply, tree, nodes), self.of_logits)

    def rewrite(self, states: Sequence[NodeState], logp_NV: Tensor, logits_NV: Tensor) -> None:
        """Edit rows in place again, like the rows that the search was sent; for the log-probabilities of outputs."""
        self._rewrite(states, logp_NV, logits_NV[:, :1].float() - logp_NV[:, :1] if self.of_logits else None)

    def _apply(self, tree: TokenTree, nodes: Sequence[int], rows_NV: Tensor, excess_N1: Tensor | None) -> None:
        """Edit rows in place. Raises ConstraintError."""
        states = self.states.of_all(tree, nodes)
        self._rewrite(states, rows_NV, excess_N1)
        if self._bans:
            self._end(tree, nodes, states, rows_NV)
        if self.states.alone and not self.renormalise:
            self._note(states, rows_NV)

    def _rewrite(self, states: Sequence[NodeState], rows_NV: Tensor, excess_N1: Tensor | None) -> None:
        """Apply the processors in their order, the mask of the constraint among them."""
        if excess_N1 is not None:
            rows_NV += excess_N1
        for i, processor in enumerate(self.states.processors):
            if processor is self.states.mask:
                mask(rows_NV, self.states.allowed(states))
            else:
                processor.apply(rows_NV, [columns.by_processor[i][place] for columns, place in states])
        if self.renormalise:
            rows_NV -= rows_NV.logsumexp(1, keepdim=True).clamp_(min=-3e38)  # clamped for rows without any token

    @staticmethod
    def _note(states: Sequence[NodeState], rows_NV: Tensor) -> None:
        """Store the rows of nodes that are evaluated ahead: their only token and its log-probability."""
        if places := ahead(states):
            found = [(states[i].columns, states[i].place, states[i].forced) for i in places]
            numbers = rows_NV[places, [token for _, _, token in found]].tolist()
            for (columns, place, token), number in zip(found, numbers, strict=True):
                assert token is not None  # only forced tokens are evaluated ahead
                columns.rows[place] = token, number

    def _end(self, tree: TokenTree, nodes: Sequence[int], states: Sequence[NodeState], rows_NV: Tensor) -> None:
        """End outputs after which no token is allowed: give an end-of-sequence token the row's only log-probability."""
        if self.states.lists(states):
            stuck = ending(states)
        else:
            stuck = (rows_NV.amax(1) == -math.inf).nonzero().view(-1).tolist()
        for i in stuck:
            self.endings.note(tree, nodes[i], states[i])
            rows_NV[i, self.endings.token] = STUCK
