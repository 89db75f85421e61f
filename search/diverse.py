"""Diverse beam search: groups of beams, each of which avoids the tokens that earlier groups chose, on one tree.

"Diverse Beam Search: Decoding Diverse Solutions from Neural Sequence Models" (Vijayakumar et al., 2016), algorithm 1
with Hamming diversity, with the candidates, scores and stopping rules of group beam search in transformers 4. Comments
cite the steps of docs/algorithms.md. Groups that agree share nodes; one pass evaluates the beams of all groups.
"""

import math
from collections import Counter
from collections.abc import Generator, Sequence
from dataclasses import dataclass, replace
from heapq import nsmallest
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from engine.cache.tree import TokenTree
from engine.contract.top_sums import TopSums, found_in_rows
from engine.errors import UsageError
from kernels.rows import top_sums_of
from search.base import Evaluate, Output, Report, Search, SearchGenerator, SearchResult, Task, register
from search.finished import Candidate, Finished
from search.options import MAX_PENALTY, check_integers, check_numbers

EARLY_STOPPING = {False: "false", True: "true", "false": "false", "true": "true", "never": "never"}
MAX_DIVERSITY = 1e6  # a penalty, in nats
Likeliest = dict[int, list[tuple[float, int]]]  # node -> log-probabilities and tokens, best first


class Extension(NamedTuple):
    """A beam and a token after it.

    Attributes:
        total: the sum of log-probabilities less penalties; the group ranks extensions by it.
        rank: the beam's rank in its group.
        token: the token after the beam's node.
        paid: the sum of penalties.
    """

    total: float
    rank: int
    token: int
    paid: float


class BeamGroup:
    """A group of beams.

    Args:
        tree: the tree that all groups share.
        done: the finished hypotheses of the group.
        best: the best finished hypotheses of all groups.

    Attributes:
        live: the last nodes of its beams, best first; empty after the group has ended.
        totals, paid: each beam's sum of log-probabilities less penalties, and its penalties.
    """

    def __init__(self, tree: TokenTree, done: Finished, best: Finished):
        self.tree, self.done, self.best = tree, done, best
        self.live, self.totals, self.paid = [tree.root], [0.0], [0.0]

    def path(self, extension: Extension) -> list[int]:
        """The tokens of an extension."""
        return [*self.tree.path(self.live[extension.rank]), extension.token]

    def end(self, extension: Extension, reason: str) -> None:
        """Make an extension a finished hypothesis."""
        for done in (self.done, self.best):
            done.add(self.path(extension), extension.total, reason, extension.paid)

    def grow(self, going: Sequence[Extension]) -> None:
        """Grow the next live beams."""
        self.live = self.tree.grow([self.live[e.rank] for e in going], [e.token for e in going])
        self.totals, self.paid = [e.total for e in going], [e.paid for e in going]


@register("diverse")
@dataclass(frozen=True)
class Diverse(Search):
    """Beam search in groups that avoid each other's tokens: outputs that differ (Vijayakumar et al., 2016).

    Args:
        beams: live hypotheses of all groups together; a multiple of `groups` (num_beams).
        groups: number of groups; none: one group per beam, for the most diversity (num_beam_groups).
        penalty: subtracted from a token's score for each beam of earlier groups that has just taken it; 0 makes all
            groups the same (diversity_penalty).
        length_penalty: a finished hypothesis scores (logprob - penalties) / length ** length_penalty.
        early_stopping: a group ends when it has as many finished hypotheses as beams and, with False, if its best
            candidate could not beat the worst of them at its current length, with "never" at any length.
        num_return_sequences: finished hypotheses to return, the best of all groups; at most `beams`.
    """

    beams: int = 4
    groups: int | None = None
    penalty: float = 0.5
    length_penalty: float = 1.0
    early_stopping: bool | str = False
    num_return_sequences: int = 1

    def __post_init__(self):
        check_integers(self, beams=(1, math.inf))
        check_integers(self, num_return_sequences=(1, self.beams))
        if self.groups is not None:
            check_integers(self, groups=(1, self.beams))
            if self.beams % self.groups:
                what = f"groups: {self.beams} beams cannot be divided into {self.groups} groups of one size"
                raise UsageError(what, remedy="make beams a multiple of groups")
        check_numbers(self, penalty=(0, MAX_DIVERSITY), length_penalty=(-MAX_PENALTY, MAX_PENALTY))
        if not isinstance(self.early_stopping, bool | str) or self.early_stopping not in EARLY_STOPPING:
            raise UsageError(f"early_stopping: expected false, true or never, got {self.early_stopping!r}")

    @property
    def size(self) -> int:
        """The beams of a group."""
        return 1 if self.groups is None else self.beams // self.groups

    def with_all_outputs(self) -> "Diverse":
        return replace(self, num_return_sequences=self.beams)

    def run(self, task: Task) -> SearchGenerator:
        tree, step = task.tree, 0
        candidates = max(2, 1 + len(task.eos_token_ids)) * self.size
        best = Finished(self.length_penalty, 1)
        groups = [
            BeamGroup(tree, Finished(self.length_penalty, self.size), best) for _ in range(self.beams // self.size)
        ]
        while live := [group for group in groups if group.live]:  # G1
            step += 1
            nodes = sorted({node for group in live for node in group.live})
            rows = yield from _likeliest(tree, nodes, candidates + self.beams - self.size)  # G2
            chosen: Counter[int] = Counter()
            for group in live:
                found = nsmallest(candidates, self._extensions(group, rows, chosen), key=_rank)  # G3
                going = self._going(task, group, found)  # G4
                chosen.update(extension.token for extension in going)  # G5
                done = self._is_done(group, found, task, step)  # G6
                if not done and step == task.max_new_tokens:  # G7
                    for extension in going:
                        group.end(extension, "length")
                group.grow([] if done or step == task.max_new_tokens else going)
            if any(group.live for group in groups):
                tree.keep([node for group in groups for node in group.live])
                yield self._report(tree, groups, best, step)
        yield Report(best.remainder())
        return self._result(groups, best, step)

    def _extensions(self, group: BeamGroup, rows: Likeliest, chosen: Counter[int]) -> list[Extension]:
        """The likeliest extensions of a group's beams, with the penalties of tokens that earlier groups chose."""
        found = []
        for rank, (node, total, paid) in enumerate(zip(group.live, group.totals, group.paid, strict=True)):
            for logp, token in rows[node]:
                fine = self.penalty * chosen[token]
                found.append(Extension(total + logp - fine, rank, token, paid + fine))
        return found

    def _going(self, task: Task, group: BeamGroup, found: Sequence[Extension]) -> list[Extension]:
        """Finish the candidates that end, and return the others."""
        going: list[Extension] = []
        for place, extension in enumerate(found):
            reason = self._reason(task, group, extension)
            if reason is None:
                going.append(extension)
            elif place < self.size:
                group.end(extension, reason)
        return going[: self.size]

    @staticmethod
    def _reason(task: Task, group: BeamGroup, extension: Extension) -> str | None:
        """Why a candidate ends before the limit; None if it does not."""
        if extension.token in task.eos_token_ids:
            return "eos"
        return None if task.ends is None else task.ends([group.live[extension.rank]], [[extension.token]])[0]

    def _is_done(self, group: BeamGroup, found: Sequence[Extension], task: Task, step: int) -> bool:
        """Whether a group ends with its present finished hypotheses."""
        mode, worst = EARLY_STOPPING[self.early_stopping], group.done.score_at(self.size - 1)
        if not found or worst == -math.inf or mode == "true":
            return not found or group.done.has_ended(self.size)
        length = task.max_new_tokens if mode == "never" and self.length_penalty > 0 else step
        return worst >= group.done.score(found[0].total, length)

    @staticmethod
    def _report(tree: TokenTree, groups: Sequence[BeamGroup], best: Finished, step: int) -> Report:
        ahead = max(
            (best.score(total, step), node) for g in groups for total, node in zip(g.totals, g.live, strict=True)
        )

        def tokens() -> list[int]:
            return tree.path(ahead[1]) if ahead[0] > best.score_at(0) else best.outputs[0].token_ids

        def ranked() -> list[Candidate]:
            found = [c for g in groups for c in g.done.ranked(zip(g.totals, map(tree.path, g.live), strict=True))]
            return sorted(found, key=itemgetter(0), reverse=True)

        return Report(best.settle(tree), tokens, beams=ranked)

    def _result(self, groups: Sequence[BeamGroup], best: Finished, step: int) -> SearchResult:
        """The best finished hypotheses of all groups (G8)."""
        first = best.outputs[0].token_ids

        def rank(output: Output) -> tuple[float, bool]:
            assert output.score is not None
            return -output.score, output.token_ids != first

        outputs = sorted([output for group in groups for output in group.done.outputs], key=rank)
        return SearchResult(outputs[: self.num_return_sequences], {"steps": step, "answer_step": len(first)})

    def slots(self, prompt_tokens: int, new_tokens: int) -> tuple[int, int]:
        return prompt_tokens + new_tokens + self.size - 2, prompt_tokens + self.beams * (new_tokens - 1)

    def check(self, vocab_size: int, eos_token_ids: frozenset[int]) -> None:
        ends = sum(token < vocab_size for token in eos_token_ids)
        if self.size > vocab_size - ends:
            raise UsageError(
                f"beams: groups of at most {vocab_size - ends} fit this model, got groups of {self.size}",
                where=f"vocabulary {vocab_size}, of which {ends} end a sequence",
            )


def _rank(extension: Extension) -> tuple[float, int, int]:
    """Return the sort key: the best total first; equal totals are ordered by rank, then by token."""
    return -extension.total, extension.rank, extension.token


def _likeliest(tree: TokenTree, nodes: Sequence[int], k: int) -> Generator[Evaluate, Any, Likeliest]:
    """Evaluate nodes, ascending, and find the k likeliest tokens after each; among equals the lower token comes first.
    Fewer are returned if fewer are possible.

    It suffices if k is the number of a group's candidates plus the number of the other groups' beams: each of these
    beams penalises at most one token, so any token that is not returned has enough candidates before it.
    """
    wanted = TopSums([0.0], k)

    def read(logp_NV: Tensor, peaks_NB: Tensor | None) -> Tensor:
        return torch.cat(top_sums_of(logp_NV, [(slice(i, i + 1), wanted) for i in range(len(logp_NV))], peaks_NB))

    rows_NV, numbers = yield Evaluate(tree, nodes, read)
    found: Likeliest = {}
    for i, (node, part) in enumerate(zip(nodes, numbers.view(len(nodes), -1), strict=True)):
        values, tokens = found_in_rows(part, rows_NV[i : i + 1], wanted)
        found[node] = list(zip(values.tolist(), map(int, tokens.tolist()), strict=True))
    return found
