"""The constraint and the processors of one request at work: which nodes need an evaluation, and edits of their rows.

If a row is known without the model, because the constraint allows only one token and scores are renormalised, or
because the node itself is forbidden (a draft that the constraint excludes), nothing is evaluated: a chain of forced
tokens is evaluated together with the next unknown row. With the model's scores the log-probabilities of forced tokens
are needed: the pass that evaluates a node also evaluates the chain of forced tokens below it, and their rows, one
number each, are known from then on.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

from torch import Tensor

from engine.cache.tree import TokenTree
from engine.rules.endings import STUCK, Endings
from engine.rules.few import Few, normalised
from engine.rules.processors import Processor, mask
from engine.rules.state import NodeState, NodeStates, ahead, ending, have_rows
from kernels.rows import log_softmax
from kernels.rows.front import best

LOGPS, LOGITS, EITHER = "log-probabilities", "logits", "either"
BANNED = -3e38  # a finite logit without probability


class RowPlan(NamedTuple):
    """An `Evaluate` of a constrained tree: the nodes that the model must evaluate, and the known rows of the others.

    Attributes:
        asked: nodes to evaluate.
        known: other nodes -> their only token, and its log-probability.
        ahead: nodes to evaluate too, which the constraint forces.
    """

    asked: list[int]
    known: dict[int, tuple[int, float]]
    ahead: list[int]


class Edit(NamedTuple):
    """An edit of a range of rows.

    Attributes:
        rows: the range.
        apply: changes the rows in place, and makes log-probabilities of logits.
        of: what the rows are before: LOGPS, LOGITS, or EITHER. EITHER is logits on a CPU, so that the last bits do not
            depend on tokens that are not allowed, and log-probabilities on a GPU, whose graphs keep nothing else.
    """

    rows: slice
    apply: Callable[[Tensor], None]
    of: str


class Constrained:
    """The constraint and the processors of one request.

    Args:
        processors: the processors, in the order in which they edit rows; at most one is a constraint.
        renormalise: whether they edit logits, before the softmax, instead of log-probabilities.
        vocab: tokens that can be generated.
        prompt: token ids.
        eos: tokens that end an output and that the model can generate; the lowest of them ends an output after which
            no token is allowed.
        limit: most new tokens.

    Attributes:
        states: the states of the nodes.
        endings: the nodes after which no token is left.
        raises: whether log-probabilities may become positive.
        edited: what its edits change, see `Edit`.
        bans: whether there may be nodes after which no token is allowed.
    """

    def __init__(
        self,
        processors: Sequence[Processor],
        renormalise: bool,
        vocab: int,
        prompt: Sequence[int],
        eos: Sequence[int],
        limit: int,
    ):
        self.renormalise, self.vocab, self.limit = renormalise, vocab, limit
        self.states = NodeStates(processors, prompt)
        self.endings = Endings(self.states, eos)
        self.states.forbidden.columns.rows[0] = self.endings.token, STUCK
        self.raises = not renormalise and any(p.raises for p in processors)
        # Without a mask, logits of tokens that cannot be generated count, which log-probabilities lack.
        either = self.states.mask is not None and not any(p.of_logits for p in processors)
        self.edited = LOGPS if not renormalise else EITHER if either else LOGITS
        self.bans = any(p.bans for p in processors)

    def restart(self) -> None:
        """Forget all trees: the search starts again."""
        self.states.restart()
        self.endings.restart()

    def plan(self, tree: TokenTree, nodes: Sequence[int]) -> RowPlan:
        """Decide which nodes of a request the model evaluates. Raises ConstraintError."""
        states = self.states.asked(tree, nodes)
        if self.states.mask is None:
            return RowPlan([*nodes], {}, [])
        plan = RowPlan([], {}, [])
        if plain := not self.renormalise and not have_rows(states):
            plan.asked.extend(nodes)
        for node, state in zip(nodes, states, strict=True) if not plain else ():
            columns, place = state
            row = columns.rows.get(place)
            if row is None and self.renormalise and (token := self.certain(state)) is not None:
                row = columns.rows[place] = token, 0.0
            if row is not None:
                plan.known[node] = row
            else:
                plan.asked.append(node)
        if self.states.alone and not self.renormalise and tree.switch_length is None:
            plan.ahead.extend(self.states.grow_forced(tree, plan.asked, self.endings.eos, self.limit))
        return plan

    def certain(self, state: NodeState) -> int | None:
        """The token whose probability is 1 in a state, so that no row is evaluated; None without one."""
        return state.forced if self.renormalise and self.states.alone else None

    # --- edits of rows ---

    def edit(self, tree: TokenTree, nodes: Sequence[int], rows: slice) -> Edit:
        """The edit of the rows of evaluated nodes: its `apply` is called before a search sees the rows."""
        return Edit(rows, partial(self._apply, tree, nodes), self.edited)

    def draft_edit(self, rows: slice) -> Edit:
        """The edit of the rows of drafted nodes, which `edit` edits once the search has asked for them."""
        return Edit(rows, lambda rows_NV: None, self.edited)

    def rewrite_edit(self, states: Sequence[NodeState], rows: slice) -> Edit:
        """The same edit as that of the rows that the search was sent; for the log-probabilities of outputs."""
        return Edit(rows, partial(self._rewrite, states), self.edited)

    def _apply(self, tree: TokenTree, nodes: Sequence[int], rows_NV: Tensor) -> None:
        """Edit rows in place. Raises ConstraintError."""
        states = self.states.of_all(tree, nodes)
        self._rewrite(states, rows_NV)
        if self.bans:
            self._end(tree, nodes, states, rows_NV)
        if self.states.alone and not self.renormalise:
            self._note(states, rows_NV)

    def _rewrite(self, states: Sequence[NodeState], rows_NV: Tensor) -> None:
        """Apply the processors in their order, the mask of the constraint among them."""
        for i, processor in enumerate(self.states.processors):
            if processor is self.states.mask:
                mask(rows_NV, self.states.allowed(states))
            else:
                processor.apply(rows_NV, [columns.by_processor[i][place] for columns, place in states])
        if self.renormalise:
            self._normalise(rows_NV, states)

    def _normalise(self, rows_NV: Tensor, states: Sequence[NodeState]) -> None:
        """Make edited logits log-probabilities, in place. Those of listed tokens are those of `Head.logps`, bit by
        bit."""
        listed = self.states.allowed(states) if self.states.alone and rows_NV.device.type == "cpu" else None
        if listed is not None:
            place = listed.row_M, listed.token_M
            value_M = normalised(rows_NV[place], listed.row_M, len(listed))
        if listed is None or listed.masks:
            banned_NV = rows_NV == -math.inf  # of which Triton's operator would make its whole row NaN
            rows_NV.masked_fill_(banned_NV, BANNED)
            logp_NV = log_softmax(rows_NV, self.vocab, impl=best(rows_NV))[0]
            rows_NV.copy_(logp_NV.masked_fill_(banned_NV, -math.inf))
        if listed is not None:
            rows_NV[place] = value_M

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

    # --- log-probabilities of few tokens, for rows that the constraint alone edits ---

    def lists_tokens(self, tree: TokenTree, nodes: Sequence[int]) -> bool:
        """Whether `few_tokens` finds the tokens of all these nodes, so that their top sums need no whole rows."""
        return self.states.lists(self.states.of_all(tree, nodes))

    def few_tokens(self, tree: TokenTree, nodes: Sequence[int]) -> Few | None:
        """The allowed tokens of evaluated nodes; None if other processors edit rows, or if a state has no ids.

        If no token is allowed, the output ends: an end-of-sequence token stands for that.
        """
        states = self.states.of_all(tree, nodes)
        if not self.states.lists(states):
            return None
        allowed = self.states.allowed(states)
        return Few(allowed.or_end(self.endings.token) if allowed.nothing else allowed, self.renormalise)

    def note_few(self, tree: TokenTree, nodes: Sequence[int], few: Few, logp_M: Tensor) -> None:
        """Store known rows, and set the log-probability of ends in place, like an edit. Raises ConstraintError."""
        states, token_M = self.states.of_all(tree, nodes), few.allowed.token_M
        last_N = few.allowed.count_N.cumsum(0) - 1
        for i in ahead(states):
            states[i].columns.rows[states[i].place] = int(token_M[last_N[i]]), float(logp_M[last_N[i]])
        for i in ending(states):
            self.endings.note(tree, nodes[i], states[i])
            logp_M[last_N[i]] = STUCK
