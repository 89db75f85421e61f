"""Top-k of a node's score plus the log-probability of a token after it, in float32: the top sums of an `Evaluate`.

They are taken from full rows, from a few entries of rows, or merged from parts that several passes or processes
evaluated. Equal sums are ordered by row, then by token.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from kernels.rows import TopSums, top_sums
from models.shard import Shard


class Next(NamedTuple):
    """A hint: after its top sums the search will probably ask for new nodes for the first of them that do not end.

    Attributes:
        width: how many nodes.
        ends: tokens that end a sequence.
    """

    width: int
    ends: frozenset[int]


FoundSums = Tensor  # float64 [2, n], on a CPU: finite sums, best first, and their places row * V + token


def found_in_rows(numbers: Tensor, rows_NV: Tensor, wanted: TopSums) -> FoundSums:
    """The top sums of rows.

    Args:
        numbers: returned by `kernels.rows.top_sums`, on the host.
        rows_NV: the rows, for the case that PyTorch left open which of several equal sums it chose.
    """
    found, left_out = numbers[:-1].view(2, -1), float(numbers[-1])
    if left_out == math.inf:  # C++ and Triton have sorted them and broken ties
        return _finite(found)
    if found.numel() and left_out == found[0, -1] > -math.inf:
        sums_N = torch.tensor(wanted.sums, dtype=torch.float32).to(rows_NV.device, non_blocking=True)
        sums_M = (rows_NV + sums_N.unsqueeze(1)).view(-1)
        places = (sums_M >= left_out).nonzero().view(-1)
        found = torch.stack([sums_M[places].double(), places.double()]).cpu()
    return _sorted(found, wanted.k)


def found_in_entries(values_M: Tensor, row_M: Tensor, token_M: Tensor, wanted: TopSums, width: int) -> FoundSums:
    """The top sums of rows that have only a few entries other than -inf.

    Args:
        values_M: log-probabilities, float32, on a CPU.
        row_M, token_M: rows and tokens of the values, in the order of their places.
        width: length of the rows.
    """
    sums_M = values_M + torch.tensor(wanted.sums, dtype=torch.float32)[row_M]
    return _sorted(torch.stack([sums_M.double(), (row_M * width + token_M).double()]), wanted.k, in_order=True)


def merged(parts: Sequence[FoundSums], k: int) -> FoundSums:
    """The top sums of parts whose places are those of the whole."""
    return parts[0] if len(parts) == 1 else _sorted(torch.cat([*parts], 1), k)


def found_in_shards(shard: Shard, founds: Sequence[FoundSums], wanted: Sequence[TopSums]) -> list[FoundSums]:
    """The top sums of rows whose columns are divided among processes; places are those in whole rows."""
    own, at = torch.full((2, sum(each.k for each in wanted)), -math.inf, dtype=torch.float64), 0
    for found, each in zip(founds, wanted, strict=True):
        own[:, at : at + found.shape[1]] = found
        at += each.k
    parts = shard.gather(own.view(-1)).view(-1, 2, at).split([each.k for each in wanted], 2)
    return [_sorted(part.transpose(0, 1).flatten(1), each.k) for part, each in zip(parts, wanted, strict=True)]


def find_top_sums(rows_NV: Tensor, peaks_NB: Tensor | None, wanted: TopSums) -> FoundSums:
    """The top sums of rows; waits for a GPU."""
    return found_in_rows(top_sums(rows_NV, wanted.sums, wanted.k, peaks_NB).cpu(), rows_NV, wanted)


def _sorted(found: FoundSums, k: int, *, in_order: bool = False) -> FoundSums:
    """The k best; `in_order`: places ascend already."""
    if found.shape[1] > 2 * k:  # thousands of beams: two sorts of all parts would take many times as long
        found = found[:, found[0] >= found[0].topk(k, sorted=False).values.min()]
    if not in_order:
        found = found[:, found[1].sort().indices]
    return _finite(found[:, found[0].sort(descending=True, stable=True).indices[:k]])


def _finite(found: FoundSums) -> FoundSums:
    """Drop the sums of -inf, which are last."""
    return found if found.shape[1] and found[0, -1] > -math.inf else found[:, : int((found[0] > -math.inf).sum())]
