"""Sampling: any number of sequences, sampled token by token, as one tree.

The token of sequence i at position p is argmax(warped log-probabilities + Gumbel(seed, i, p)) and depends on nothing
else, so a sequence does not depend on the number of sequences. Sequences share nodes as long as they agree.
"""

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

from engine.cache.prefixes import shared_length
from engine.contract.sampling import Warp
from search.base import Evaluate, Output, Report, SearchGenerator, SearchResult, Task, register
from search.options import RowSampling, check_integers


@register("sample")
@dataclass(frozen=True)
class Sample(RowSampling):
    """Draws from the model's distribution (temperature, top-k, top-p), reproducible by seed.

    Args:
        num_return_sequences: sequences to draw; returned most probable first.
    """

    num_return_sequences: int = 1

    def __post_init__(self):
        super().__post_init__()
        check_integers(self, num_return_sequences=(1, 4096))

    def run(self, task: Task) -> SearchGenerator:
        drawn = Utterances(task, self.num_return_sequences, self.warp(), self.seed)
        settled = 0
        while drawn.live:
            yield from drawn.extend(apart=True)
            shared = shared_length(*drawn.tokens, start=settled)
            yield Report(
                drawn.tokens[0][settled:shared],
                lambda: drawn.tokens[0],
                beams=lambda: sorted(zip(drawn.logprobs, drawn.tokens, strict=True), key=itemgetter(0), reverse=True),
            )
            settled = shared
        order = sorted(range(self.num_return_sequences), key=lambda i: -drawn.logprobs[i])
        yield Report(drawn.tokens[order[0]][settled:])
        return SearchResult([drawn.output(i, drawn.logprobs[i]) for i in order])


class Utterances:
    """Sequences drawn side by side on the task's tree; nodes are shared as long as tokens agree.

    Args:
        task: the task; the tokens are grown in its tree.
        count: number of sequences, which are numbered from 0.
        warp, seed: determine the keyed draws.

    Attributes:
        tokens, logprobs, reasons: one entry per sequence; the finish reason is None while the sequence is live.
        live: unfinished sequences, in order.
    """

    def __init__(self, task: Task, count: int, warp: Warp, seed: int):
        self.task, self.tree, self.warp, self.seed = task, task.tree, warp, seed
        self.tokens: list[list[int]] = [[] for _ in range(count)]
        self.logprobs = [0.0] * count
        self.reasons: list[str | None] = [None] * count
        self.live = list(range(count))
        self._node = [self.tree.root] * count  # the last node of each sequence

    def extend(self, apart: bool = False) -> Generator[Evaluate, Any, None]:
        """Draw one more token of every live sequence. A KVMemoryError changes nothing.

        Args:
            apart: sequences whose next rows are known already, because the tokens were drafted, draw further tokens
                without a pass; sequences do not wait for each other.
        """
        yield from self._draw(self.live, apart)
        while apart and (known := [i for i in self.live if self.tree.has_row(self._node[i])]):
            if len(known) == len(self.live):
                return  # all sequences have made one step
            yield from self._draw(known, apart)

    def _draw(self, going: Sequence[int], apart: bool) -> Generator[Evaluate, Any, None]:
        """Draw one more token of some of the live sequences."""
        rows = {node: row for row, node in enumerate(dict.fromkeys(self._node[i] for i in going))}
        row = [rows[self._node[i]] for i in going]
        positions = [self.tree.position(self._node[i]) + 1 for i in going]

        def read(logp_NV: Tensor, _peaks_NB: Tensor | None) -> Tensor:
            """Return the tokens drawn, and their log-probabilities."""
            row_n = torch.tensor(row).to(logp_NV.device, non_blocking=True)
            token_n = self.warp.draws(logp_NV, self.seed, going, positions, row_n)
            return torch.cat([token_n.double(), logp_NV[row_n, token_n].double()])

        found = (yield Evaluate(self.tree, list(rows), read, apart=apart)).numbers
        drawn = found.tolist()
        for i, token, logp in zip(going, map(int, drawn), drawn[len(row) :], strict=False):
            self.tokens[i].append(token)
            self.logprobs[i] += logp
            self.reasons[i] = self.task.finish_reason(self.tokens[i])
        going = [i for i in going if self.reasons[i] is None]
        nodes = self.tree.grow([self._node[i] for i in going], [self.tokens[i][-1] for i in going])
        for i, node in zip(going, nodes, strict=True):
            self._node[i] = node
        self.retain([i for i in self.live if self.reasons[i] is None])

    def retain(self, live: Sequence[int]) -> None:
        """Continue only these live sequences; free the slots of the others."""
        self.live = list(live)
        if self.live:
            self.tree.keep(self._node[i] for i in self.live)

    def output(self, i: int, score: float) -> Output:
        """Return the output of sequence i."""
        return Output(self.tokens[i], self.logprobs[i], score, self.reasons[i] or "")
