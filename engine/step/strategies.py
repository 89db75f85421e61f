"""How a pass is evaluated: what its searches want of the rows decides, when the batch is built."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.contract.best import Best, of_entries
from engine.rules.constraint import ConstraintError
from engine.rules.few import Few
from engine.step.jobs import Batch, Share
from engine.step.partial import PartialSums
from engine.step.phases import phase
from engine.step.runner import Rows, Runner, Strategy


class WholeRows:
    """Log-probabilities over the whole vocabulary, and what searches read of them."""

    def run(self, runner: Runner, batch: Batch) -> Rows:
        """See `Strategy`."""
        return batch.take(*runner.evaluate(batch.chunks, batch.asked, batch.reads, batch.edits, batch.keeps))


@dataclass(frozen=True)
class FewTokens:
    """The log-probabilities of the few tokens that constraints allow, on a CPU: the head computes no others.

    Args:
        shares: those that have rows.
        parts: the tokens of each.
    """

    shares: Sequence[Share]
    parts: Sequence[Few]

    def run(self, runner: Runner, batch: Batch) -> Rows:
        """See `Strategy`."""
        logps, finite = runner.evaluate_few(batch.chunks, batch.asked, self.parts, batch.keeps)
        with phase(runner.observer, "search"):
            for share, part, logp_M in zip(self.shares, self.parts, logps, strict=True):
                self._take(share, part, logp_M)
        return torch.empty(0, 0), finite

    @staticmethod
    def _take(share: Share, few: Few, logp_M: Tensor) -> None:
        constrained, sums = share.pending.constrained, share.pending.partial
        assert constrained is not None and isinstance(sums, PartialSums)
        try:
            constrained.note(share.chunk.tree, share.nodes, few, logp_M)
        except ConstraintError as error:
            share.job.fault = error
        best = sums.best_of(share.nodes)
        sums.found(of_entries(logp_M, few.row_M, few.token_M, best, sums.width), share.nodes)


@dataclass(frozen=True)
class TopSums:
    """The best sums of rows that are divided among processes, and which nobody gathers.

    Args:
        shares: those that have rows.
        bests: what each wants.
    """

    shares: Sequence[Share]
    bests: Sequence[Best]

    def run(self, runner: Runner, batch: Batch) -> Rows:
        """See `Strategy`."""
        founds, finite = runner.evaluate_best(batch.chunks, batch.asked, self.bests, batch.keeps)
        for share, found in zip(self.shares, founds, strict=True):
            assert isinstance(share.pending.partial, PartialSums)
            share.pending.partial.found(found, share.nodes)
        return torch.empty(0, 0), finite


WHOLE_ROWS = WholeRows()


def strategy_of(batch: Batch) -> Strategy:
    """The cheapest strategy that gives every share of a batch what it wants."""
    shares = [share for share in batch.shares if share.nodes]
    if shares and batch.runner.device.type == "cpu":
        parts = [few_of(share) for share in shares]
        if None not in parts:
            return FewTokens(shares, [part for part in parts if part is not None])
    if shares and batch.runner.gathers:
        bests = [None if share.pending.constrained is not None else share.best for share in shares]
        if None not in bests:
            return TopSums(shares, [best for best in bests if best is not None])
    return WHOLE_ROWS


def few_of(share: Share) -> Few | None:
    """The tokens that constraints allow after a share's nodes, if the best sums over them are all that is wanted."""
    constrained = share.pending.constrained
    return None if constrained is None or share.best is None else constrained.few(share.chunk.tree, share.nodes)
