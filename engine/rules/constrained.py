"""The constraint and the processors of one request at work.

If a row is known without the model, because the constraint allows only one token and scores are renormalised, or
because the node itself is forbidden (a draft that the constraint excludes), nothing is evaluated: a chain of forced
tokens is evaluated together with the next unknown row. With the model's scores the log-probabilities of forced tokens
are needed: the pass that evaluates a node also evaluates the chain of forced tokens below it, and their rows, one
number each, are known from then on.
"""

from collections.abc import Sequence
from typing import NamedTuple

from engine.cache.tree import TokenTree
from engine.rules.edits import RowEdits
from engine.rules.endings import STUCK, Endings
from engine.rules.few import FewAnswers
from engine.rules.processors import Processor
from engine.rules.state import NodeState, NodeStates


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


class Constrained:
    """The constraint and the processors of one request.

    Args:
        processors: the processors, in the order in which they edit rows; at most one is a constraint.
        renormalise: whether they edit logits, before the softmax, instead of log-probabilities.
        prompt: token ids.
        eos: tokens that end an output and that the model can generate; the lowest of them ends an output after which
            no token is allowed.
        limit: most new tokens.

    Attributes:
        states, endings, edits, few: its parts.
        raises: whether log-probabilities may become positive.
    """

    def __init__(
        self, processors: Sequence[Processor], renormalise: bool, prompt: Sequence[int], eos: Sequence[int], limit: int
    ):
        self.renormalise, self.limit = renormalise, limit
        self.states = NodeStates(processors, prompt)
        self.endings = Endings(self.states, eos)
        self.states.forbidden.columns.rows[0] = self.endings.token, STUCK
        self.edits = RowEdits(self.states, self.endings, renormalise)
        self.few = FewAnswers(self.states, self.endings, renormalise)
        self.raises = not renormalise and any(p.raises for p in processors)

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
        for node, state in zip(nodes, states, strict=True):
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
