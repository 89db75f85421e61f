"""The best sums of an `Evaluate`: of rows, of a few entries of rows, or of parts that several passes evaluated.

A sum is a number of the node plus a log-probability after it, in float32. Of equal sums the lower row comes first, then
the lower token.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from kernels.rows import best_sums
from models.sharding import Shard


class Best(NamedTuple):
    """What is wanted: the k greatest sums.

    Attributes:
        sums: the number of each node.
        k: how many; fewer are found if fewer are finite.
    """

    sums: Sequence[float]
    k: int


class Next(NamedTuple):
    """What a search will most likely ask for after its best sums: new nodes for the first of them that do not end.

    Attributes:
        width: how many nodes.
        ends: tokens that end a sequence.
    """

    width: int
    ends: frozenset[int]


class Found(NamedTuple):
    """Finite sums, best first, and their places in the flattened rows: row * V + token; float32 and int64, on a CPU."""

    values: Tensor
    places: Tensor

    def numbers(self) -> Tensor:
        """As `Answer.numbers`: the sums, then their places; float64 [2 n]."""
        return torch.cat([self.values.double(), self.places.double()])


def of_rows(numbers: Tensor, rows_NV: Tensor, best: Best) -> Found:
    """What is wanted of rows.

    Args:
        numbers: returned by `best_sums`, on the host.
        rows_NV: the rows, for the case that PyTorch left open which of several equal sums it chose.
    """
    k = len(numbers) // 2
    values, places = numbers[:k].float(), numbers[k : 2 * k].long()
    if math.isinf(numbers[-1]) and numbers[-1] > 0:  # C++ and Triton have sorted them and broken ties
        return _finite(values, places)
    if k and numbers[-1] == numbers[k - 1] > -math.inf:
        sums_N = torch.tensor(best.sums, dtype=torch.float32).to(rows_NV.device, non_blocking=True)
        sums_NV = rows_NV + sums_N.unsqueeze(1)
        places = (sums_NV.view(-1) >= numbers[k - 1]).nonzero().view(-1)
        values, places = sums_NV.view(-1)[places].cpu(), places.cpu()
    return _sorted(values, places, best.k)


def of_entries(values_M: Tensor, row_M: Tensor, token_M: Tensor, best: Best, width: int) -> Found:
    """What is wanted of rows of which a few entries are not -inf.

    Args:
        values_M: log-probabilities, float32, on a CPU.
        row_M, token_M: where they are, in the order of their places.
        width: of the rows.
    """
    sums_M = values_M + torch.tensor(best.sums, dtype=torch.float32)[row_M]
    if len(sums_M) > best.k:
        chosen = (sums_M >= sums_M.topk(best.k, sorted=False).values.min()).nonzero().view(-1)
        sums_M, row_M, token_M = sums_M[chosen], row_M[chosen], token_M[chosen]
    return _sorted(sums_M, row_M * width + token_M, best.k)


def merged(parts: Sequence[Found], k: int) -> Found:
    """What is wanted of parts whose places are those of the whole."""
    if len(parts) == 1:
        return parts[0]
    return _sorted(torch.cat([part.values for part in parts]), torch.cat([part.places for part in parts]), k)


def of_shards(shard: Shard, founds: Sequence[Found], bests: Sequence[Best]) -> list[Found]:
    """What is wanted of rows of which each process has a part; places are those of the whole."""
    own = torch.full((2 * sum(best.k for best in bests),), -math.inf, dtype=torch.float64)
    at = 0
    for found, best in zip(founds, bests, strict=True):
        own[at : at + len(found.values)] = found.values
        own[at + best.k : at + best.k + len(found.places)] = found.places
        at += 2 * best.k
    parts, whole = shard.gather(own).split([2 * best.k for best in bests], 1), []
    for part, best in zip(parts, bests, strict=True):
        values, places = (x.flatten() for x in part.split(best.k, 1))
        there = values > -math.inf
        whole.append(_sorted(values[there].float(), places[there].long(), best.k))
    return whole


def of_all(rows_NV: Tensor, peaks_NB: Tensor | None, best: Best) -> Found:
    """What is wanted of rows that are there as a whole."""
    return of_rows(best_sums(rows_NV, best.sums, best.k, peaks_NB).cpu(), rows_NV, best)


def _sorted(values: Tensor, places: Tensor, k: int) -> Found:
    places, order = places.sort()
    values, rank = values[order].sort(descending=True, stable=True)
    return _finite(values[:k], places[rank[:k]])


def _finite(values: Tensor, places: Tensor) -> Found:
    """Without sums of -inf, which are last."""
    count = int((values > -math.inf).sum())
    return Found(values[:count], places[:count])
