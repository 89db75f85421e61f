"""The top sums of an `Evaluate`: the greatest sums of a node's number and a log-probability after it, in float32.

They are found in rows, in a few entries of rows, or in parts that several passes or processes evaluated. Of equal sums
the lower row comes first, then the lower token.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from kernels.rows import TopSums, top_sums
from models.sharding import Shard


class Next(NamedTuple):
    """A hint: after its top sums the search will probably ask for new nodes for the first of them that do not end.

    Attributes:
        width: how many nodes.
        ends: tokens that end a sequence.
    """

    width: int
    ends: frozenset[int]


class FoundSums(NamedTuple):
    """Finite sums, best first, and their places in the flattened rows: row * V + token; float32 and int64, on a CPU."""

    values: Tensor
    places: Tensor

    def numbers(self) -> Tensor:
        """The form that `Answer.numbers` has: the sums, then their places; float64 [2 n]."""
        return torch.cat([self.values.double(), self.places.double()])


def found_in_rows(numbers: Tensor, rows_NV: Tensor, wanted: TopSums) -> FoundSums:
    """The top sums of rows.

    Args:
        numbers: returned by `kernels.rows.top_sums`, on the host.
        rows_NV: the rows, for the case that PyTorch left open which of several equal sums it chose.
    """
    k = len(numbers) // 2
    values, places = numbers[:k].float(), numbers[k : 2 * k].long()
    if math.isinf(numbers[-1]) and numbers[-1] > 0:  # C++ and Triton have sorted them and broken ties
        return _finite(values, places)
    if k and numbers[-1] == numbers[k - 1] > -math.inf:
        sums_N = torch.tensor(wanted.sums, dtype=torch.float32).to(rows_NV.device, non_blocking=True)
        sums_NV = rows_NV + sums_N.unsqueeze(1)
        places = (sums_NV.view(-1) >= numbers[k - 1]).nonzero().view(-1)
        values, places = sums_NV.view(-1)[places].cpu(), places.cpu()
    return _sorted(values, places, wanted.k)


def found_in_entries(values_M: Tensor, row_M: Tensor, token_M: Tensor, wanted: TopSums, width: int) -> FoundSums:
    """The top sums of rows of which a few entries are not -inf.

    Args:
        values_M: log-probabilities, float32, on a CPU.
        row_M, token_M: where they are, in the order of their places.
        width: of the rows.
    """
    sums_M = values_M + torch.tensor(wanted.sums, dtype=torch.float32)[row_M]
    if len(sums_M) > wanted.k:
        chosen = (sums_M >= sums_M.topk(wanted.k, sorted=False).values.min()).nonzero().view(-1)
        sums_M, row_M, token_M = sums_M[chosen], row_M[chosen], token_M[chosen]
    return _sorted(sums_M, row_M * width + token_M, wanted.k)


def merged(parts: Sequence[FoundSums], k: int) -> FoundSums:
    """The top sums of parts whose places are those of the whole."""
    if len(parts) == 1:
        return parts[0]
    return _sorted(torch.cat([part.values for part in parts]), torch.cat([part.places for part in parts]), k)


def found_in_shards(shard: Shard, founds: Sequence[FoundSums], wanted: Sequence[TopSums]) -> list[FoundSums]:
    """The top sums of rows whose columns are divided among processes; places are those in whole rows."""
    own = torch.full((2 * sum(each.k for each in wanted),), -math.inf, dtype=torch.float64)
    at = 0
    for found, each in zip(founds, wanted, strict=True):
        own[at : at + len(found.values)] = found.values
        own[at + each.k : at + each.k + len(found.places)] = found.places
        at += 2 * each.k
    parts, whole = shard.gather(own).split([2 * each.k for each in wanted], 1), []
    for part, each in zip(parts, wanted, strict=True):
        values, places = (x.flatten() for x in part.split(each.k, 1))
        there = values > -math.inf
        whole.append(_sorted(values[there].float(), places[there].long(), each.k))
    return whole


def find_top_sums(rows_NV: Tensor, peaks_NB: Tensor | None, wanted: TopSums) -> FoundSums:
    """The top sums of rows; waits for a GPU."""
    return found_in_rows(top_sums(rows_NV, wanted.sums, wanted.k, peaks_NB).cpu(), rows_NV, wanted)


def _sorted(values: Tensor, places: Tensor, k: int) -> FoundSums:
    places, order = places.sort()
    values, rank = values[order].sort(descending=True, stable=True)
    return _finite(values[:k], places[rank[:k]])


def _finite(values: Tensor, places: Tensor) -> FoundSums:
    """Drop the sums of -inf, which are last."""
    count = int((values > -math.inf).sum())
    return FoundSums(values[:count], places[:count])
