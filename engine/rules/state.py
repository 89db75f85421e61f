"""The states of a request's nodes: a state per processor, the tokens that the constraint allows, known rows.

A node's state is computed from its parent's, once per node, when its row is requested. States that are computed
together, usually those of all beams of a step, are stored together, in columns.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import chain, compress, count, repeat
from operator import itemgetter, not_
from typing import NamedTuple

import torch

from engine.cache.tree import TokenTree
from engine.rules.constraint import Allowed, State, joined
from engine.rules.processors import Masked, Processor

MOST_AHEAD = 8  # most nodes of a pass evaluated ahead: a pass of few rows takes hardly longer than one of one row
TOKEN = (1 << 32) - 1
KEPT_PER_LIVE = 4  # states are dropped when there are this many times as many as live nodes


@dataclass(eq=False, slots=True)
class StateColumns:
    """States that were computed together.

    Attributes:
        by_processor: the states of each processor; none for forbidden nodes.
        allowed: the tokens that the constraint allows next; None if it was not asked yet, or if there is none.
        rows: the known rows by place: the only token, and its log-probability; None: to be known from the next pass.
        after: place << 32 | token -> the state after this token, if it was requested since states were last dropped.
    """

    by_processor: Sequence[Sequence[State]]
    allowed: Allowed | None = None
    rows: dict[int, tuple[int, float] | None] = field(default_factory=dict)
    after: "dict[int, NodeState]" = field(default_factory=dict)


class NodeState(NamedTuple):
    """The states that the engine keeps for a node, as a place in columns."""

    columns: StateColumns
    place: int

    @property
    def forbidden(self) -> bool:
        """Whether the constraint excludes the node."""
        return not self.columns.by_processor

    @property
    def forced(self) -> int | None:
        """The only token that the constraint allows next; None if there are several, or if it was not asked."""
        return None if self.columns.allowed is None else self.columns.allowed.forced.get(self.place)


def ending(states: Sequence[NodeState]) -> list[int]:
    """The indices of the states, not forbidden themselves, after which the constraint allows no token."""
    empty = {
        columns: columns.allowed.nothing
        for columns in columns_of(states)
        if columns.allowed is not None and columns.allowed.nothing and columns.by_processor
    }
    return [i for i, (columns, place) in enumerate(states) if place in empty.get(columns, ())] if empty else []


def ahead(states: Sequence[NodeState]) -> list[int]:
    """The indices of the states of nodes that are evaluated ahead, whose rows are to be stored."""
    if not have_rows(states):
        return []
    return [i for i, (columns, place) in enumerate(states) if columns.rows.get(place, ()) is None]


def have_rows(states: Sequence[NodeState]) -> bool:
    """Whether states lie in columns with known rows, or rows to be known."""
    return any(columns.rows for columns in columns_of(states))


def columns_of(states: Sequence[NodeState]) -> Mapping[StateColumns, None]:
    """The columns in which states lie; thousands of beams have few."""
    return dict.fromkeys(map(itemgetter(0), states))


class NodeStates:
    """The states of the nodes of all trees of a request that begin with its prompt.

    Args:
        processors: the processors, in the order in which they edit rows; at most one is a constraint.
        prompt: token ids.

    Attributes:
        mask: the constraint, if there is one.
        alone: whether only the constraint edits rows.
        forbidden: the state of every node that the constraint excludes.
    """

    def __init__(self, processors: Sequence[Processor], prompt: Sequence[int]):
        self.processors, self.prompt = [*processors], [*prompt]
        self.mask = next((p for p in processors if isinstance(p, Masked)), None)
        self.alone = self.mask is not None and len(self.processors) == 1
        # Done here, because a long prompt takes longer than a step. Not for a constraint, whose code may be foreign.
        self._begun = [None if p is self.mask else p.start(self.prompt) for p in self.processors]
        nothing = torch.empty(0, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)
        self.forbidden = NodeState(StateColumns((), Allowed(*nothing)), 0)
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
        if tree not in self._trees:
            return False
        columns, place = self.of(tree, node)
        return columns.rows.get(place) is not None

    def of(self, tree: TokenTree, node: int) -> NodeState:
        """The state of a node, computed from that of its nearest ancestor that has one."""
        return self._trees[tree].get(node) or self.of_all(tree, [node])[0]

    def of_all(self, tree: TokenTree, nodes: Sequence[int]) -> list[NodeState]:
        """The states of nodes, computed from those of their nearest ancestors that have one."""
        states, levels, above = self._trees[tree], list[list[int]](), nodes
        if all(found := [*map(states.get, nodes)]):
            return found  # type: ignore[return-value]
        while new := [node for node in dict.fromkeys(above) if node not in states]:
            levels.append(new)
            above = [parent for node in new if (parent := tree.parent(node)) >= 0]
        for level in reversed(levels):
            states.update({node: self._first(tree) for node in level if tree.parent(node) < 0})
            new = [node for node in level if node not in states]
            before, tokens = [states[parent] for parent in map(tree.parent, new)], [*map(tree.token, new)]
            steps = steps_of(before, tokens)
            after = [columns.after.get(step) for (columns, _), step in zip(before, steps, strict=True)]
            states.update(zip(new, self.after_all(before, tokens) if None in after else after, strict=True))  # type: ignore[arg-type]
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
        steps, new = steps_of(states, tokens), dict[StateColumns, list[int]]()
        for columns, among in grouped(states).items():
            each = dict.fromkeys(map(steps.__getitem__, among))  # once
            if fresh := [step for step in each if step not in columns.after]:
                allowed = [True] * len(fresh) if columns.allowed is None else columns.allowed.has(fresh)
                columns.after.update(dict.fromkeys(compress(fresh, map(not_, allowed)), self.forbidden))
                new[columns] = [*compress(fresh, allowed)]
        if chosen := [step & TOKEN for own in new.values() for step in own]:
            before = [
                [columns.by_processor[i][step >> 32] for columns, own in new.items() for step in own]
                for i in range(len(self.processors))
            ]
            parts = [p.advance_all(own, chosen) for p, own in zip(self.processors, before, strict=True)]
            made = map(partial(tuple.__new__, NodeState), zip(repeat(StateColumns(parts)), count()))
            for columns, own in new.items():
                columns.after.update(zip(own, made, strict=False))
        return [columns.after[step] for (columns, _), step in zip(states, steps, strict=True)]

    def allow(self, states: Sequence[NodeState]) -> None:
        """Ask the constraint, if there is one, for the allowed tokens of all states that lack them at once."""
        if self.mask is not None and (
            lacking := [columns for columns in columns_of(states) if columns.allowed is None]
        ):
            place, at = self.processors.index(self.mask), 0
            parts = [columns.by_processor[place] for columns in lacking]
            allowed = self.mask.allowed([*chain.from_iterable(parts)])
            for columns, part in zip(lacking, parts, strict=True):
                columns.allowed = allowed.some(range(at, at := at + len(part)))

    def allowed(self, states: Sequence[NodeState]) -> Allowed:
        """The tokens that the constraint allows after each of these states, for which it was asked."""
        groups, parts = grouped(states), []
        for columns, among in groups.items():
            assert columns.allowed is not None
            parts.append(columns.allowed.some([states[i].place for i in among]))
        if len(parts) == 1:
            return parts[0]
        order = {i: at for at, i in enumerate(chain.from_iterable(groups.values()))}
        return joined(parts).some([order[i] for i in range(len(states))])

    def lists(self, states: Sequence[NodeState]) -> bool:
        """Whether only the constraint edits rows, and lists the tokens that it allows after each of these states."""
        every = [columns.allowed for columns in columns_of(states)] if self.alone else [None]
        if None in every or not any(allowed.masks for allowed in every if allowed is not None):
            return None not in every
        return not any(place in columns.allowed.masks for columns, place in states)  # type: ignore[union-attr]

    def along(self, tokens: Sequence[int]) -> list[NodeState]:
        """The state before each of the new tokens, without a tree."""
        states = [NodeState(StateColumns(self._start), 0)]
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
        states, grown, last = self._trees[tree], [], tree.prompt_length + limit - 1
        forced = [n for n in nodes if states[n].forced is not None and tree.position(n) + 1 < last]
        room = min(MOST_AHEAD, tree.pool.free_pages // 2 - tree.pages_wanted(nodes, 0)) if forced else 0
        for node in forced if room > 0 else ():
            state = states[node]
            while len(grown) < room and tree.position(node) + 1 < last:
                if (token := state.forced) is None or token in ends:
                    break
                state = self.after(state, token)
                self.allow([state])
                if state.forced is None or (child := tree.child(node, token)) in nodes:
                    break
                states[child] = state
                state.columns.rows.setdefault(state.place)
                grown.append(node := child)
        return grown

    def _first(self, tree: TokenTree) -> NodeState:
        """The state of a tree's first root: after its prompt, which may hold new tokens of the request."""
        state = NodeState(StateColumns(self._start), 0)
        for token in tree.trunk.tokens[len(self.prompt) : tree.prompt_length]:
            state = self.after(state, token)
        return state

    @cached_property
    def _start(self) -> list[list[State]]:
        """The processors' states after the prompt."""
        begun = zip(self.processors, self._begun, strict=True)
        return [[p.start(self.prompt) if p is self.mask else part] for p, part in begun]

    def _forget(self, tree: TokenTree) -> None:
        """Drop the states that no live node has."""
        self.of(tree, tree.root)
        self._trees[tree] = {node: state for node, state in self._trees[tree].items() if tree.is_live(node)}
        for state in self._trees[tree].values():
            state.columns.after.clear()


def steps_of(states: Sequence[NodeState], tokens: Sequence[int]) -> list[int]:
    """Keys of `StateColumns.after`."""
    return [place << 32 | token for (_, place), token in zip(states, tokens, strict=True)]


def grouped(states: Sequence[NodeState]) -> Mapping[StateColumns, Sequence[int]]:
    """The indices of the states that lie in the same columns."""
    if len(columns_of(states)) == 1:
        return {states[0].columns: range(len(states))}
    found: dict[StateColumns, list[int]] = {}
    for i, (columns, _) in enumerate(states):
        found.setdefault(columns, []).append(i)
    return found
