"""The states of a request's nodes: a state per processor, the tokens that the constraint allows, known rows.

A node's state is computed from its parent's, once per node, when its row is requested.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from engine.cache.tree import TokenTree
from engine.rules.constraint import EVERYTHING, Allowed, State
from engine.rules.processors import Masked, Processor

MOST_AHEAD = 8  # most nodes of a pass evaluated ahead: a pass of few rows takes hardly longer than one of one row
KEPT_PER_LIVE = 4  # states are dropped when there are this many times as many as live nodes


@dataclass(slots=True)
class NodeState:
    """The states that the engine keeps for a node.

    Attributes:
        by_processor: the state of each processor; None for a forbidden node.
        allowed: the tokens that the constraint allows next; None if it was not asked yet, or if there is none.
        row: the row, if it is known: its only token, and the token's log-probability.
        after: the states after tokens that were requested.
    """

    by_processor: tuple[State, ...] | None
    allowed: Allowed | None = None
    row: tuple[int, float] | None = None
    after: "dict[int, NodeState]" = field(default_factory=dict)


class NodeStates:
    """The states of the nodes of all trees of a request that begin with its prompt.

    Args:
        processors: the processors, in the order in which they edit rows; at most one is a constraint.
        prompt: token ids.

    Attributes:
        mask: the constraint, if there is one.
        alone: whether only the constraint edits rows.
    """

    def __init__(self, processors: Sequence[Processor], prompt: Sequence[int]):
        self.processors, self.prompt = [*processors], [*prompt]
        self.mask = next((p for p in processors if isinstance(p, Masked)), None)
        self.alone = self.mask is not None and len(self.processors) == 1
        # Done here, because a long prompt takes longer than a step. Not for a constraint, whose code may be foreign.
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
        return self._trees[tree].get(node) or self.of_all(tree, [node])[0]

    def of_all(self, tree: TokenTree, nodes: Sequence[int]) -> list[NodeState]:
        """The states of nodes, computed from those of their nearest ancestors that have one."""
        states, levels, above = self._trees[tree], list[list[int]](), nodes
        while new := [node for node in dict.fromkeys(above) if node not in states]:
            levels.append(new)
            above = [parent for node in new if (parent := tree.parent(node)) >= 0]
        for level in reversed(levels):
            states.update({node: self._first(tree) for node in level if tree.parent(node) < 0})
            new = [node for node in level if node not in states]
            before, tokens = [states[tree.parent(node)] for node in new], [tree.token(node) for node in new]
            states.update(zip(new, self.after_all(before, tokens), strict=True))
            for state, token in zip(before, tokens, strict=True):
                state.after.pop(token, None)  # the node has it now
        return [states[node] for node in nodes]

    def asked(self, tree: TokenTree, nodes: Sequence[int]) -> list[NodeState]:
        """The states of nodes whose rows are asked for, with the allowed tokens; drops states of dead nodes.

        Raises ConstraintError.
        """
        found = self.of_all(tree, nodes)
        if len(self._trees[tree]) > KEPT_PER_LIVE * (len(nodes) + tree.live_branches) + 64:
            self._forget(tree)
        self.allow(found)
        return found

    def after(self, state: NodeState, token: int) -> NodeState:
        """The state after a token."""
        return self.after_all([state], [token])[0]

    def after_all(self, states: Sequence[NodeState], tokens: Sequence[int]) -> list[NodeState]:
        """The state after each state and token."""
        self.allow(states)
        new: list[tuple[NodeState, int]] = []
        for state, token in zip(states, tokens, strict=True):
            if token not in state.after:
                if state.by_processor is None or token not in (state.allowed or EVERYTHING):
                    state.after[token] = NodeState(None)
                else:
                    new.append((state, token))
        if new:
            befores = zip(*[state.by_processor for state, _ in new if state.by_processor is not None], strict=True)
            chosen = [token for _, token in new]
            parts = [p.advance_all(before, chosen) for p, before in zip(self.processors, befores, strict=True)]
            for (state, token), found in zip(new, zip(*parts, strict=True), strict=True):
                state.after[token] = NodeState(found)
        return [state.after[token] for state, token in zip(states, tokens, strict=True)]

    def allow(self, states: Sequence[NodeState]) -> None:
        """Ask the constraint, if there is one, for the allowed tokens of all states that lack them at once."""
        lacking = [state for state in states if state.by_processor is not None and state.allowed is None]
        if lacking and self.mask is not None:
            asked = [*{id(state): state for state in lacking}.values()]  # each once
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
        """Grow the chains of forced tokens below nodes, as far as that surely costs little. Returns the new nodes.

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
                if len(grown) >= room or tree.position(node) + 1 >= last:
                    break
                state = self.after(state, token)
                self.allow([state])
                if state.allowed is None or state.allowed.forced is None or (child := tree.child(node, token)) in nodes:
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
