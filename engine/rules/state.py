"""The states of a request's nodes: a state per processor, the tokens that the constraint allows, known rows.

A node gets its state when its row is asked for, once per node, from that of its parent.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from engine.cache.tree import TokenTree
from engine.rules.constraint import EVERYTHING, Allowed, State
from engine.rules.processors import Masked, Processor

MOST_AHEAD = 8  # nodes of a pass that are evaluated ahead: a pass of few rows takes hardly longer than one of one
KEPT_PER_LIVE = 4  # states are dropped when there are this many times as many as live nodes


@dataclass
class NodeState:
    """The states that the engine keeps beside a node.

    Attributes:
        by_processor: the state of each processor; None for a forbidden node.
        allowed: the tokens that the constraint allows next; None if it was not asked yet, or if there is none.
        row: the row, where it is known: its only token, and the token's log-probability.
        forced: the state after the only token that is allowed, if a pass was to evaluate it ahead.
    """

    by_processor: tuple[State, ...] | None
    allowed: Allowed | None = None
    row: tuple[int, float] | None = None
    forced: "NodeState | None" = None


class NodeStates:
    """The states of the nodes of all trees of a request that begin with its prompt.

    Args:
        processors: in the order in which they edit rows; at most one is a constraint.
        prompt: token ids.

    Attributes:
        mask: the constraint, if there is one.
        alone: whether the constraint is all that edits rows.
    """

    def __init__(self, processors: Sequence[Processor], prompt: Sequence[int]):
        self.processors, self.prompt = [*processors], [*prompt]
        self.mask = next((p for p in processors if isinstance(p, Masked)), None)
        self.alone = self.mask is not None and len(self.processors) == 1
        # With a long prompt this takes longer than a step; a constraint may have been written by somebody else.
        self._begun = [None if p is self.mask else p.start(self.prompt) for p in self.processors]
        self._start: tuple[State, ...] | None = None
        self._trees: dict[TokenTree, dict[int, NodeState]] = {}

    def restart(self) -> None:
        """Forget all trees: the search starts again."""
        self._trees = {}

    def watch(self, tree: TokenTree) -> None:
        """Constrain a tree, if it begins with the request's prompt."""
        if tree.trunk.tokens[: len(self.prompt)] == self.prompt:
            self._trees[tree] = {}

    def watches(self, tree: TokenTree) -> bool:
        """Whether the tree is constrained."""
        return tree in self._trees

    def has_row(self, tree: TokenTree, node: int) -> bool:
        """Whether the row of a node is known without an evaluation, or from an earlier one."""
        return tree in self._trees and self.of(tree, node).row is not None

    def of(self, tree: TokenTree, node: int) -> NodeState:
        """The state of a node, computed from that of its nearest ancestor that has one."""
        states, path = self._trees[tree], []
        while node not in states and (parent := tree.parent(node)) >= 0:
            path.append(node)
            node = parent
        if node not in states:
            states[node] = self._first(tree)
        state = states[node]
        for below in reversed(path):
            state = states[below] = self.after(state, tree.token(below))
        return state

    def asked(self, tree: TokenTree, nodes: Sequence[int]) -> list[NodeState]:
        """The states of nodes whose rows are asked for, with the allowed tokens; drops states of nodes that have gone.

        Raises ConstraintError.
        """
        found = [self.of(tree, node) for node in nodes]
        if len(self._trees[tree]) > KEPT_PER_LIVE * (len(nodes) + tree.live_branches) + 64:
            self._forget(tree)
        self.allow(found)
        return found

    def after(self, state: NodeState, token: int) -> NodeState:
        """The state after a token."""
        if state.by_processor is None:
            return state
        if self.mask is not None:
            self.allow([state])
            if token not in (state.allowed or EVERYTHING):
                return NodeState(None)
            if state.forced is not None:
                return state.forced
        parts = zip(self.processors, state.by_processor, strict=True)
        return NodeState(tuple([processor.advance(part, token) for processor, part in parts]))

    def allow(self, states: Sequence[NodeState]) -> None:
        """Ask the constraint, if there is one, for the allowed tokens of all states that lack them at once."""
        asked = [state for state in states if state.by_processor is not None and state.allowed is None]
        if asked and self.mask is not None:
            place = self.processors.index(self.mask)
            parts = [state.by_processor[place] for state in asked if state.by_processor is not None]
            for state, allowed in zip(asked, self.mask.allowed(parts), strict=True):
                state.allowed = allowed

    def along(self, tokens: Sequence[int]) -> list[NodeState]:
        """The state before each of the new tokens, without a tree."""
        states = [NodeState(self._starts() if self._start is None else self._start)]
        for token in tokens[:-1]:
            states.append(self.after(states[-1], token))
        self.allow(states)
        return states

    def grow_forced(self, tree: TokenTree, nodes: Sequence[int], ends: Sequence[int], limit: int) -> list[int]:
        """Grow the chains of forced tokens below nodes, as far as it is sure to cost little. Returns the new nodes.

        Args:
            ends: tokens that end an output.
            limit: most new tokens.
        """
        states, grown = self._trees[tree], []
        room = min(MOST_AHEAD, tree.pool.free_pages // 2 - tree.pages_wanted(nodes, 0))
        last = tree.prompt_length + limit - 1
        for node in nodes:
            state = states[node]
            while state.allowed is not None and (token := state.allowed.forced) is not None and token not in ends:
                if state.forced is None:
                    state.forced = self.after(state, token)
                state = state.forced
                self.allow([state])
                if len(grown) >= room or tree.position(node) + 1 >= last or state.allowed is None:
                    break
                if state.allowed.forced is None or (child := tree.child(node, token)) in nodes:
                    break
                states[child] = state
                grown.append(node := child)
        return grown

    def _first(self, tree: TokenTree) -> NodeState:
        """The state of a tree's first root: after its prompt, which may hold new tokens of the request."""
        if self._start is None:
            self._start = self._starts()
        state = NodeState(self._start)
        for token in tree.trunk.tokens[len(self.prompt) : tree.prompt_length]:
            state = self.after(state, token)
        return state

    def _starts(self) -> tuple[State, ...]:
        """The processors' states after the prompt."""
        mask = self.mask
        return tuple(
            mask.start(self.prompt) if processor is mask and mask is not None else part
            for processor, part in zip(self.processors, self._begun, strict=True)
        )

    def _forget(self, tree: TokenTree) -> None:
        """Drop the states of nodes that are not live."""
        self.of(tree, tree.root)
        self._trees[tree] = {node: state for node, state in self._trees[tree].items() if tree.is_live(node)}
