"""The drafts of one request: makes them, grows them in the tree, and compares them with the tokens that were
generated."""

import time
from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor

from engine.contract import Read
from engine.drafts import Draft
from engine.drafts.size import DraftSize
from search.aded.drafters import TextDrafter
from search.base import Task, likely, likely_tokens

MS = 1000
OBSERVED = 12  # likeliest nodes of a draft whose log-probabilities the drafter observes


class Stopwatch:
    """Adds up the processor time of this thread in its `with` blocks.

    Attributes:
        total, last: seconds of all blocks, and of the last one.
    """

    def __init__(self):
        self.total = self.last = self._began = 0.0

    def __enter__(self) -> None:
        self._began = time.thread_time()

    def __exit__(self, *_: object) -> None:
        self.last = time.thread_time() - self._began
        self.total += self.last


class Planted(NamedTuple):
    """A draft in the tree.

    Attributes:
        draft: the draft; None if none was wanted.
        row: node -> its row in the answer, the root first.
        origins: for each row the index of its token in `draft`; -1 is the root.
        read: reduces the answer to the numbers that the drafter observes; None if it observes nothing.
    """

    draft: Draft | None
    row: dict[int, int]
    origins: Sequence[int] = (-1,)
    read: Read | None = None

    def likely(self, numbers: Tensor | None) -> list[dict[int, float]]:
        """Return the model's likely tokens in each of the first rows, from the numbers that `read` returned."""
        if self.read is None or numbers is None:
            return []
        return likely_tokens(numbers, min(len(self.row), 1 + OBSERVED))


class Drafting:
    """Makes drafts for one request, and keeps its figures.

    Args:
        task: the request's task.
        drafter: guesses the continuation.
        size: decides how many nodes of a draft are evaluated.

    Attributes:
        verifying: measures the time that the search spends on an answer.
    """

    def __init__(self, task: Task, drafter: TextDrafter, size: DraftSize):
        self.task, self.drafter, self.size = task, drafter, size
        self.drafting, self.reading, self.verifying = Stopwatch(), Stopwatch(), Stopwatch()
        self._unlearnt = list(task.tree.trunk.tokens)
        self._accepted: list[int] = []  # drafted tokens that were accepted, per step
        self._nodes = 0

    def plant(self) -> Planted:
        """Make the draft to evaluate below the root, and grow it."""
        root = self.task.tree.root
        reach = self.task.tree.reach(root, self.task.max_new_tokens)
        wanted = self.size.wanted() if reach else 0
        if not wanted:
            return Planted(None, {root: 0})
        with self.drafting:
            self.drafter.learn(self._unlearnt)  # A2
            self._unlearnt = []
            draft = self.drafter.draft(wanted, reach)  # A3
            row, origins = self._grow(draft, self.size.choose(draft), reach)  # A4
        return Planted(draft, row, origins, self._read if len(row) > 1 and self.drafter.curiosity < 1 else None)

    def learn(self, planted: Planted, fresh: Sequence[int], likely: Sequence[dict[int, float]]) -> None:
        """Learn from a step: from its new tokens `fresh`, and from the model's likely tokens."""
        self._unlearnt += fresh
        if likely:
            self.drafter.observe(planted.origins[: len(likely)], likely)
        if planted.draft is not None:
            self.size.learn(planted.draft, fresh)

    def settle(self, planted: Planted, fresh: Sequence[int]) -> dict[str, Any]:
        """Account for a verified step, and return its figures."""
        nodes, accepted = len(planted.row) - 1, len(fresh) - 1
        self._accepted.append(accepted)
        self._nodes += nodes
        if planted.draft is None:
            self.size.plain(self.verifying.last)
        else:
            reading = self.reading.last if planted.read else 0.0
            self.size.settle(self.drafting.last + reading + self.verifying.last, nodes, len(fresh))
        return {"drafted": nodes, "accepted": accepted}

    def stats(self) -> dict[str, Any]:
        """Return the figures of the request, see docs/stats.md."""
        accepted, steps = self._accepted, len(self._accepted)
        return {
            "steps": steps,
            "accept_length": (steps + sum(accepted)) / steps,
            "accepted_by_depth": [sum(n > depth for n in accepted) for depth in range(max(accepted))],
            "draft_nodes": self._nodes,
            "draft_ms": self.drafting.total / steps * MS,
            "verify_ms": (self.reading.total + self.verifying.total) / steps * MS,
        }

    def _read(self, logp_NV: Tensor, peaks_NB: Tensor | None) -> Tensor:
        """Read the model's likely tokens after the likeliest nodes."""
        with self.reading:
            first = slice(1 + OBSERVED)
            return likely(logp_NV[first], self.drafter.curiosity, peaks_NB[first] if peaks_NB is not None else None)

    def _grow(self, draft: Draft, n: int, reach: int) -> tuple[dict[int, int], list[int]]:
        """Grow the first n nodes of a draft that may have successors; returns `row` and `origins` of `Planted`."""
        tree, ends = self.task.tree, self.task.eos_token_ids
        nodes, row, origins = {-1: tree.root}, {tree.root: 0}, [-1]
        last = tree.position(tree.root) + reach
        for i, (token, above) in enumerate(zip(draft.tokens[:n], draft.parents, strict=False)):
            if (parent := nodes.get(above)) is not None and token not in ends and tree.position(parent) < last:
                nodes[i] = node = tree.child(parent, token)
                if node not in row:
                    row[node] = len(origins)
                    origins.append(i)
        return row, origins
