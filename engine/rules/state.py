"""The constraint and the processors of one request at work: states beside the nodes of its trees, and edited rows.

A node gets its states when its row is asked for, once per node, from those of its parent. Where a row is known without
the model, because the constraint allows one token only and scores are renormalised, or because the node itself is
forbidden (a draft that the constraint excludes), nothing is evaluated: a chain of forced tokens is evaluated with the
next row that is not known. With the model's scores the log-probabilities of forced tokens are needed: the pass that
evaluates a node evaluates the chain of forced tokens below it too, and their rows, one number each, are known from then
on.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

from torch import Tensor

from engine.cache.tree import TokenTree
from engine.contract import Output, SearchResult
from engine.rules.constraint import EVERYTHING, Allowed, ConstraintError, State
from engine.rules.few import Few
from engine.rules.processors import Masked, Processor

STUCK = float(-(1 << 16))  # log-probability of the end where no token is allowed: `search.finished` ranks it last
AHEAD = 8  # most nodes of a pass that are evaluated ahead: a pass of few rows takes hardly longer than one of one
LEFT = 4  # states are dropped when there are this many times as many as live nodes


class Edit(NamedTuple):
    """An edit of a range of rows after the softmax.

    Attributes:
        rows: the range.
        apply: function of the rows, and of what their logits have in excess of them [N, 1] where `logits` asks for it.
        logits: whether it needs the logits.
    """

    rows: slice
    apply: "partial[None]"
    logits: bool


@dataclass
class Known:
    """What the engine keeps beside a node: a state per processor, and the tokens that the constraint allows after it.

    Attributes:
        states: None for a forbidden node.
        allowed: None if the constraint was not asked yet, or if there is none.
        row: the row, where it is known: its only token, and the token's log-probability.
        forced: the entry after the only token that is allowed, if a pass was to evaluate it ahead.
    """

    states: tuple[State, ...] | None
    allowed: Allowed | None = None
    row: tuple[int, float] | None = None
    forced: "Known | None" = None


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
        processors: in the order in which they edit rows; at most one is a constraint.
        renormalise: whether they edit logits, before the softmax, instead of log-probabilities.
        prompt: token ids.
        eos: tokens that end an output, those that the model can generate; the least of them ends an output after which
            no token is allowed.
        limit: most new tokens.
    """

    def __init__(
        self, processors: Sequence[Processor], renormalise: bool, prompt: Sequence[int], eos: Sequence[int], limit: int
    ):
        self.limit = limit
        self.processors, self.renormalise, self.prompt, self.eos = [*processors], renormalise, [*prompt], sorted(eos)
        self.mask = next((p for p in processors if isinstance(p, Masked)), None)
        self.raises = not renormalise and any(p.raises for p in processors)
        self._logits = renormalise and any(p.of_logits for p in processors)
        self._alone = self.mask is not None and len(self.processors) == 1
        self._bans = any(p.bans for p in processors)
        # With a long prompt this takes longer than a step; a constraint may have been written by somebody else.
        self._begun = [None if p is self.mask else p.start(self.prompt) for p in self.processors]
        self._start: tuple[State, ...] | None = None
        self.restart()

    def restart(self) -> None:
        """Forget all trees: the search starts again."""
        self._known: dict[TokenTree, dict[int, Known]] = {}
        self._ends: set[tuple[int, ...]] = set()  # paths after which no token is allowed

    def watch(self, tree: TokenTree) -> None:
        """Constrain a tree, if it begins with the request's prompt."""
        if tree.trunk.tokens[: len(self.prompt)] == self.prompt:
            self._known[tree] = {}

    def watches(self, tree: TokenTree) -> bool:
        """Whether the tree is constrained."""
        return tree in self._known

    # --- states ---

    def plan(self, tree: TokenTree, nodes: Sequence[int]) -> RowPlan:
        """Compute the states of nodes. Raises ConstraintError."""
        known = self._known[tree]
        found = [(node, self._states(tree, node)) for node in nodes]
        if len(known) > LEFT * (len(nodes) + tree.live_branches) + 64:
            self._forget(tree)
        if self.mask is None:
            return RowPlan([*nodes], {}, [])
        self._allow([entry for _, entry in found])
        plan = RowPlan([], {}, [])
        for node, entry in found:
            if entry.row is None and entry.states is None:
                entry.row = self.eos[0] if self.eos else 0, STUCK
            elif entry.row is None and (token := self.certain(entry)) is not None:
                entry.row = token, 0.0
            if entry.row is not None:
                plan.known[node] = entry.row
            else:
                plan.asked.append(node)
        if self._alone and not self.renormalise and tree.switch_length is None:
            plan.ahead.extend(self._chains(tree, plan.asked))
        return plan

    def knows(self, tree: TokenTree, node: int) -> bool:
        """Whether the row of a node is known without an evaluation, or from an earlier one."""
        return tree in self._known and self._states(tree, node).row is not None

    def _chains(self, tree: TokenTree, nodes: Sequence[int]) -> list[int]:
        """Grow the chains of forced tokens below nodes, as far as it is sure to cost little. Returns the new nodes."""
        room = min(AHEAD, tree.pool.free_pages // 2 - tree.pages_wanted(nodes, 0))
        last, grown = tree.prompt_length + self.limit - 1, []
        for node in nodes:
            entry = self._known[tree][node]
            while entry.allowed is not None and (token := entry.allowed.forced) is not None and token not in self.eos:
                if entry.forced is None:
                    entry.forced = self._next(entry, token)
                entry = entry.forced
                self._allow([entry])
                if len(grown) >= room or tree.position(node) + 1 >= last or entry.allowed is None:
                    break
                if entry.allowed.forced is None or (child := tree.child(node, token)) in nodes:
                    break
                self._known[tree][child] = entry
                grown.append(node := child)
        return grown

    def _states(self, tree: TokenTree, node: int) -> Known:
        """The entry of a node, computed from that of its nearest ancestor that has one."""
        known, path = self._known[tree], []
        while node not in known and (parent := tree.parent(node)) >= 0:
            path.append(node)
            node = parent
        if node not in known:
            known[node] = self._first(tree)
        entry = known[node]
        for below in reversed(path):
            entry = known[below] = self._next(entry, tree.token(below))
        return entry

    def _first(self, tree: TokenTree) -> Known:
        """The entry of a tree's first root: after its prompt, which may hold new tokens of the request."""
        if self._start is None:
            self._start = self._starts()
        entry = Known(self._start)
        for token in tree.trunk.tokens[len(self.prompt) : tree.prompt_length]:
            entry = self._next(entry, token)
        return entry

    def _starts(self) -> tuple[State, ...]:
        """The states after the prompt."""
        mask = self.mask
        return tuple(
            mask.start(self.prompt) if processor is mask and mask is not None else state
            for processor, state in zip(self.processors, self._begun, strict=True)
        )

    def _next(self, entry: Known, token: int) -> Known:
        """The entry after a token."""
        if entry.states is None:
            return entry
        if self.mask is not None:
            self._allow([entry])
            if token not in (entry.allowed or EVERYTHING):
                return Known(None)
            if entry.forced is not None:
                return entry.forced
        return Known(tuple([p.advance(state, token) for p, state in zip(self.processors, entry.states, strict=True)]))

    def _allow(self, entries: Sequence[Known]) -> None:
        """Ask the constraint for the allowed tokens of entries, of all that lack them at once."""
        assert self.mask is not None
        asked = [entry for entry in entries if entry.states is not None and entry.allowed is None]
        if asked:
            place = self.processors.index(self.mask)
            states = [entry.states[place] for entry in asked if entry.states is not None]
            for entry, allowed in zip(asked, self.mask.allowed(states), strict=True):
                entry.allowed = allowed

    def _forget(self, tree: TokenTree) -> None:
        """Drop the states of nodes that are not live."""
        known = self._known[tree]
        self._states(tree, tree.root)
        self._known[tree] = {node: entry for node, entry in known.items() if tree.is_live(node)}

    # --- rows ---

    def edit(self, tree: TokenTree, nodes: Sequence[int], rows: slice) -> Edit:
        """The edit of the rows of evaluated nodes, whose states are known."""
        return Edit(rows, partial(self._apply, tree, nodes), self._logits)

    def _apply(self, tree: TokenTree, nodes: Sequence[int], rows_NV: Tensor, excess_N1: Tensor | None) -> None:
        """Edit rows in place. Raises ConstraintError."""
        entries = [self._states(tree, node) for node in nodes]
        self._rewrite(entries, rows_NV, excess_N1)
        if self._bans:
            self._end(tree, nodes, entries, rows_NV)
        if self._alone and not self.renormalise:
            self._note(entries, rows_NV)

    def _rewrite(self, entries: Sequence[Known], rows_NV: Tensor, excess_N1: Tensor | None) -> None:
        if excess_N1 is not None:
            rows_NV += excess_N1
        for i, processor in enumerate(self.processors):
            if processor is self.mask:
                processor.apply(rows_NV, [entry.allowed or EVERYTHING for entry in entries])
            else:
                processor.apply(rows_NV, [entry.states[i] for entry in entries if entry.states is not None])
        if self.renormalise:
            rows_NV -= rows_NV.logsumexp(1, keepdim=True).clamp_(min=-3e38)  # of rows without any token

    # --- rows of a path, once more ---

    def along(self, tokens: Sequence[int]) -> list[Known]:
        """The entry before each of the new tokens, without a tree."""
        entries = [Known(self._starts() if self._start is None else self._start)]
        for token in tokens[:-1]:
            entries.append(self._next(entries[-1], token))
        if self.mask is not None:
            self._allow(entries)
        return entries

    def rewrite(self, entries: Sequence[Known], logp_NV: Tensor, logits_NV: Tensor) -> None:
        """Edit rows of entries in place as those were that a search was sent."""
        self._rewrite(entries, logp_NV, logits_NV[:, :1].float() - logp_NV[:, :1] if self._logits else None)

    def certain(self, entry: Known) -> int | None:
        """The token whose probability is 1 after an entry, so that no row is evaluated; None without one."""
        return entry.allowed.forced if self.renormalise and self._alone and entry.allowed is not None else None

    @staticmethod
    def _note(entries: Sequence[Known], rows_NV: Tensor) -> None:
        """Keep the rows of the entries whose only token was evaluated ahead, or which were."""
        chains = [(i, e, e.allowed.forced) for i, e in enumerate(entries) if e.allowed and e.allowed.forced is not None]
        if chains:
            places, found, tokens = zip(*chains, strict=True)
            for entry, token, number in zip(found, tokens, rows_NV[places, tokens].tolist(), strict=True):
                entry.row = token, number

    def _end(self, tree: TokenTree, nodes: Sequence[int], entries: Sequence[Known], rows_NV: Tensor) -> None:
        """Where no token is allowed, the output ends: give an end-of-sequence token a row's only log-probability."""
        if self._alone and all(entry.allowed is None or entry.allowed.ids is not None for entry in entries):
            stuck = [i for i, entry in enumerate(entries) if entry.allowed is not None and entry.allowed.nothing]
        else:
            stuck = (rows_NV.amax(1) == -math.inf).nonzero().view(-1).tolist()
        for i in stuck:
            self._stuck(tree, nodes[i], entries[i].allowed)
            rows_NV[i, self.eos[0] if self.eos else 0] = STUCK

    def _stuck(self, tree: TokenTree, node: int, allowed: Allowed | None) -> None:
        """Note that the output ends after a node. Raises ConstraintError if no token can end it."""
        path = tree.path(node)
        if self.eos:
            self._ends.add(tuple(path))
        elif not path or allowed is None or not allowed.nothing:  # `ends` has not ended the output before
            raise ConstraintError(
                f"no token is allowed after {len(path)} new tokens, and no token ends an output",
                remedy="allow end-of-sequence tokens (no ignore_eos), or loosen what is allowed",
            )

    def few(self, tree: TokenTree, nodes: Sequence[int]) -> Few | None:
        """The allowed tokens of evaluated nodes; None if other processors edit rows, or if there are not ids for all.

        Where no token is allowed the output ends: an end-of-sequence token stands for that.
        """
        found = [self._states(tree, node).allowed for node in nodes]
        if not self._alone or any(allowed is None or allowed.ids is None for allowed in found):
            return None
        end = Allowed([self.eos[0] if self.eos else 0])
        return Few.of([end if allowed.nothing else allowed for allowed in found if allowed], self.renormalise)

    def note(self, tree: TokenTree, nodes: Sequence[int], few: Few, logp_M: Tensor) -> None:
        """Keep known rows, and give ends their log-probability, in place, as an edit does. Raises ConstraintError."""
        single = (few.count_N == 1).nonzero().view(-1)
        for i, place in zip(single.tolist(), (few.count_N.cumsum(0) - 1)[single].tolist(), strict=True):
            entry = self._states(tree, nodes[i])
            if entry.allowed is not None and entry.allowed.nothing:
                self._stuck(tree, nodes[i], entry.allowed)
                logp_M[place] = STUCK
            elif not self.renormalise:
                entry.row = int(few.token_M[place]), float(logp_M[place])

    # --- ends of outputs ---

    def with_ends(
        self, tree: TokenTree, stops: Callable[[Sequence[int]], bool] | None
    ) -> Callable[[Sequence[int]], bool]:
        """`Task.hits_stop` of a request without end-of-sequence tokens: an output also ends where the constraint allows
        no token after its new tokens.

        Args:
            tree: the target's.
            stops: whether new tokens contain a stop string.
        """
        return lambda tokens: (stops is not None and stops(tokens)) or self._is_stuck(tree, tokens)

    def _is_stuck(self, tree: TokenTree, tokens: Sequence[int]) -> bool:
        if self.mask is None:
            return False
        node = tree.descend(tokens)
        entry = self._states(tree, node)
        for token in tokens[tree.position(node) + 1 - tree.prompt_length :]:
            entry = self._next(entry, token)
        self._allow([entry])
        if entry.allowed is None or not entry.allowed.nothing:
            return False
        self._ends.add(tuple(tokens))
        return True

    def settle(self, result: SearchResult, ranked: bool) -> None:
        """Give outputs their items, and those that ended because no token was allowed the finish reason "constraint".

        Args:
            result: a search's.
            ranked: whether scores are those of a reward, not of log-probabilities.
        """
        result.outputs = [self._named(self._settled(output, ranked)) for output in result.outputs]

    def _named(self, output: Output) -> Output:
        if self.mask is None:
            return output
        tokens = output.token_ids[:-1] if output.finish_reason == "eos" else output.token_ids
        return replace(output, item=self.mask.item(tokens))

    def _settled(self, output: Output, ranked: bool) -> Output:
        tokens = output.token_ids
        if output.finish_reason == "constraint" and not ranked:  # where a search knows itself
            return replace(output, score=None)
        if output.finish_reason == "stop" and tuple(tokens) in self._ends:
            return replace(output, finish_reason="constraint")
        if output.finish_reason != "eos" or tuple(tokens[:-1]) not in self._ends:
            return output
        logprob = None if output.logprob is None else output.logprob - STUCK
        score = output.score if ranked else None
        return replace(output, token_ids=tokens[:-1], logprob=logprob, score=score, finish_reason="constraint")
