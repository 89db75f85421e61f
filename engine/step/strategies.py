"""The ways to evaluate a pass, chosen when the batch is built according to what its searches need from the rows."""

from collections.abc import Sequence
from functools import partial

import torch

from engine.contract.top_sums import TopSums, found_in_entries
from engine.rules.constraint import ConstraintError
from engine.rules.few import Few
from engine.step.jobs import Batch, Share, Strategy
from engine.step.partial import PartialSums
from engine.step.phases import phase
from engine.step.runner import Rows

NO_ROWS = torch.empty(0, 0)


def whole_rows(batch: Batch) -> Rows:
    """Log-probabilities over the whole vocabulary, and the values that searches read from them."""
    return batch.take(*batch.runner.evaluate(batch.work))


def few_tokens(shares: Sequence[Share], parts: Sequence[Few], batch: Batch) -> Rows:
    """The log-probabilities of the few tokens that constraints allow, on a CPU: the head computes no others.

    Args:
        shares: the shares that have rows.
        parts: the tokens of each share.
    """
    logps, finite = batch.runner.evaluate_few(batch.work, parts)
    with phase(batch.runner.observer, "search"):
        for share, few, logp_M in zip(shares, parts, logps, strict=True):
            constrained, sums = share.pending.constrained, share.pending.partial
            assert constrained is not None and isinstance(sums, PartialSums)
            try:
                constrained.note_few(share.chunk.tree, share.nodes, few, logp_M)
            except ConstraintError as error:
                share.job.fault = error
            wanted, allowed = sums.top_sums(share.nodes), few.allowed
            sums.found(found_in_entries(logp_M, allowed.row_M, allowed.token_M, wanted, sums.width), share.nodes)
    return NO_ROWS, finite


def only_sums(shares: Sequence[Share], wanted: Sequence[TopSums], batch: Batch) -> Rows:
    """The top sums of rows that nothing reads: a CPU does not compute the rows, and processes do not gather them.

    Args:
        shares: the shares that have rows.
        wanted: the sums that each share wants, and then those of each of its drafts.
    """
    founds, finite = batch.runner.evaluate_top_sums(batch.work, wanted)
    at = 0
    for share in shares:
        assert isinstance(share.pending.partial, PartialSums)
        share.pending.partial.found(founds[at], share.nodes)
        end = at + 1 + len(share.chunk.drafts)
        share.take_drafts(founds[at + 1 : end])
        at = end
    return NO_ROWS, finite


def strategy_of(batch: Batch) -> Strategy:
    """The cheapest strategy that gives every share of a batch what it wants."""
    shares = [share for share in batch.shares if share.nodes]
    if shares and batch.runner.device.type == "cpu" and all(share.pending.constrained for share in shares):
        parts = [few_of(share) for share in shares]
        if None not in parts and not batch.runner.adapters(batch.work):
            return partial(few_tokens, shares, [part for part in parts if part is not None])
    if shares and batch.runner.only_sums and not any(share.pending.constrained for share in shares):
        wanted = [each for share in shares for each in (share.top_sums, *share.drafts_wanted)]
        if None not in wanted:
            return partial(only_sums, shares, [each for each in wanted if each is not None])
    return whole_rows


def few_of(share: Share) -> Few | None:
    """The tokens that constraints allow after a share's nodes, if the top sums over them are all that is wanted."""
    constrained = share.pending.constrained
    if constrained is None or share.top_sums is None:
        return None
    return constrained.few_tokens(share.chunk.tree, share.nodes)
