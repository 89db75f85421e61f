"""Distributions over (beam, token), and drawing from them: what beam sampling and DSBD share.

The next list of beams is drawn from all continuations of the present one, equation (1) of the DSBD paper:

    p_beam(i, v) = p(beam i) p(v | beam i) / sum,

warped once, as one distribution. Where the warp leaves few cells (beam, token) they are found by the maxima of blocks,
so that the rows are read once and never sorted, and kept in lists; otherwise all cells are, as a tensor.
"""

import math
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate, islice
from typing import Any

import torch
from torch import Tensor

from engine.sampling import Warp

FEW = 1024  # cells that are kept in lists
NUCLEUS = (256, 4096)  # how many of the largest cells are looked at for top-p before all of them are sorted
Probabilities = list[float] | Tensor


class Rows:
    """Next-token log-probabilities of nodes, [N, V]; the largest are found by the maxima of blocks."""

    def __init__(self, logp_NV: Tensor):
        self.logp_NV = logp_NV

    @cached_property
    def blocks_MB(self) -> Tensor:
        """All rows, cut into blocks."""
        size = block_size(self.logp_NV.shape[1])
        short = -self.logp_NV.shape[1] % size
        padded = torch.nn.functional.pad(self.logp_NV, (0, short), value=float("-inf")) if short else self.logp_NV
        return padded.reshape(-1, size)

    @cached_property
    def maxima_NM(self) -> Tensor:
        """The largest of each block."""
        return self.blocks_MB.amax(-1).view(len(self.logp_NV), -1)

    def largest(
        self, which: Sequence[int], offsets: Sequence[float], k: int
    ) -> tuple[list[int], list[int], list[float]] | None:
        """The cells with the k largest sums of a row's offset and a log-probability.

        Returns:
            places in `which`, tokens, log-probabilities, in no order; None if there are no k such cells, or if others
            equal the least of them.
        """
        (N, M), size = self.maxima_NM.shape, self.blocks_MB.shape[1]
        if k >= len(which) * M:
            return None
        offset_of = dict(zip(which, offsets, strict=True))
        offset_N = torch.tensor([offset_of.get(row, -math.inf) for row in range(N)], device=self.logp_NV.device)
        maxima, block_k = torch.topk((self.maxima_NM + offset_N.unsqueeze(1)).view(-1), k + 1)
        block_k = block_k[:k]  # the k largest cells lie in the k blocks with the largest maxima
        logp_kB = self.blocks_MB.index_select(0, block_k)
        offset_k1 = offset_N.index_select(0, block_k // M).unsqueeze(1)
        sums, cell_k = torch.topk((logp_kB + offset_k1).view(-1), k + 1)
        cell_k = cell_k[:k]
        blocks, cells, logps, rivals = told(
            block_k, cell_k, logp_kB.take(cell_k), torch.cat([sums[k - 1 :], maxima[k:]])
        )
        if max(rivals[1:]) >= rivals[0]:
            return None
        place = {row: i for i, row in enumerate(which)}
        places, tokens = [], []
        for cell in cells:
            nth, column = divmod(int(cell), size)
            row, block = divmod(int(blocks[nth]), M)
            places.append(place[row])
            tokens.append(block * size + column)
        return places, tokens, logps

    def mass(self, which: Sequence[int], offsets: Sequence[float], temperature: float, vocab: int) -> float:
        """The logarithm of the sum of exp((offset + log-probability) / temperature) over all cells."""
        if temperature == 1 and self.logp_NV.shape[1] <= vocab:  # rows are normalised
            return math.log(math.fsum(map(math.exp, offsets)))
        logp_NV = self.chosen(which, vocab)
        return float(torch.logsumexp((logp_NV + _column(offsets, logp_NV)).view(-1) / temperature, 0))

    def chosen(self, which: Sequence[int], vocab: int) -> Tensor:
        """Some rows, as wide as the vocabulary."""
        logp_NV = self.logp_NV if list(which) == list(range(len(self.logp_NV))) else self.logp_NV[list(which)]
        short = vocab - logp_NV.shape[1]
        return logp_NV[:, :vocab] if short <= 0 else torch.nn.functional.pad(logp_NV, (0, short), value=float("-inf"))


def told(*tensors: Tensor) -> list[list[Any]]:
    """Values of vectors; from a GPU in one synchronisation, where whole numbers are to be below 2^24."""
    if tensors[0].device.type == "cpu":
        return [x.tolist() for x in tensors]
    values = iter(torch.cat([x.float() for x in tensors]).tolist())
    return [list(islice(values, len(x))) for x in tensors]


@lru_cache
def block_size(V: int) -> int:
    """A divisor of V near 128, where reading maxima and reading blocks cost about the same; 128 if there is none."""
    return min((b for b in range(32, 513) if V % b == 0), key=lambda b: abs(b - 128), default=128)


@dataclass
class Joint:
    """A distribution over cells (row, token): cell = row * vocab + token.

    Args:
        vocab: tokens of a row.
        probs: of the cells that can be drawn, or of all; float64.
        logps: log-probabilities of the tokens after their rows, not warped.
        cells: which these are, ascending; None: all.
    """

    vocab: int
    probs: Probabilities
    logps: list[float] | Tensor
    cells: list[int] | None = None

    def cell(self, i: int) -> tuple[int, int]:
        """Row and token of the i-th."""
        return divmod(i if self.cells is None else self.cells[i], self.vocab)

    def find(self, row: int, token: int) -> int | None:
        """Where a cell is; None if it cannot be drawn."""
        cell = row * self.vocab + token
        return cell if self.cells is None else self._place.get(cell)

    @cached_property
    def _place(self) -> dict[int, int]:
        return {cell: i for i, cell in enumerate(self.cells or ())}

    def of_rows(self, rows: Sequence[int]) -> float:
        """Probability of some rows."""
        if isinstance(self.probs, Tensor):
            return float(self.probs.view(-1, self.vocab)[list(rows)].sum())
        chosen = set(rows)
        cells = zip(self.cells or (), self.probs, strict=True)
        return math.fsum(prob for cell, prob in cells if cell // self.vocab in chosen)

    def at(self, other: "Joint", rows: Sequence[int]) -> Probabilities:
        """Probabilities of the cells of another distribution, whose row i is row rows[i] here."""
        V = self.vocab
        if other.cells is not None:
            places = (self.find(rows[cell // V], cell % V) for cell in other.cells)
            return [0.0 if i is None else float(self.probs[i]) for i in places]
        assert isinstance(other.probs, Tensor)
        if isinstance(self.probs, Tensor):
            return self.probs.view(-1, V)[list(rows)].view(-1)
        full = torch.zeros_like(other.probs)
        place = {row: i for i, row in enumerate(rows)}
        cells = zip(self.cells or (), self.probs, strict=True)
        mine = {place[cell // V] * V + cell % V: prob for cell, prob in cells if cell // V in place}
        full[list(mine)] = torch.tensor(list(mine.values()), dtype=full.dtype, device=full.device)
        return full


def p_beam(rows: Rows, which: Sequence[int], weights: Sequence[float], warp: Warp, vocab: int) -> Joint:
    """Equation (1), warped.

    Args:
        rows, which: the beams' rows.
        weights: logarithms of the beams' probabilities, times how many entries they are; in any unit.
        warp: of the joint distribution.
        vocab: tokens that exist; columns from there on are -inf.
    """
    heaviest = max(weights)
    offsets = [weight - heaviest for weight in weights]
    k = 1 if warp.temperature == 0 else warp.top_k
    for size in (k,) if k else NUCLEUS if warp.top_p < 1 else ():
        found = rows.largest(which, offsets, size)
        if found is None:
            break
        if cells := _nucleus(
            found, offsets, warp, vocab, None if k else rows.mass(which, offsets, warp.temperature, vocab)
        ):
            places, masses, logps = zip(*sorted(cells), strict=True)
            total = math.fsum(masses)
            return Joint(vocab, [mass / total for mass in masses], list(logps), list(places))
    logp_NV = rows.chosen(which, vocab)
    warped = torch.log_softmax(warp((logp_NV + _column(offsets, logp_NV)).view(1, -1))[0].double(), 0).exp()
    if len(warped) <= FEW or int((warped > 0).sum()) <= FEW:
        cells = warped.nonzero().view(-1)
        return Joint(vocab, warped[cells].tolist(), logp_NV.reshape(-1)[cells].tolist(), cells.tolist())
    return Joint(vocab, warped, logp_NV.reshape(-1))


def _nucleus(
    found: tuple[list[int], list[int], list[float]],
    offsets: Sequence[float],
    warp: Warp,
    vocab: int,
    log_mass: float | None,
) -> list[tuple[int, float, float]] | None:
    """Temperature and top-p on the largest cells, which are the whole support unless there is a `log_mass` of all.

    Returns:
        (cell, mass in any unit, log-probability) of those that stay; None if cells that were not found belong to them.
    """
    T = warp.temperature or 1.0
    ranked = sorted(((logp + offsets[i]) / T, i * vocab + token, logp) for i, token, logp in zip(*found, strict=True))
    ranked.reverse()
    best = ranked[0][0]
    cells = [(cell, math.exp(score - best), logp) for score, cell, logp in ranked]
    if warp.top_p == 1:
        return cells
    total = math.fsum(mass for _, mass, _ in cells) if log_mass is None else math.exp(log_mass - best)
    kept, before = 0, 0.0
    while kept < len(cells) and before < warp.top_p * total:  # a cell stays if those before it do not reach top-p
        before += cells[kept][1]
        kept += 1
    return cells[:kept] if log_mass is None or before >= warp.top_p * total else None


def _column(offsets: Sequence[float], like: Tensor) -> Tensor:
    return torch.tensor(offsets, dtype=torch.float32, device=like.device).unsqueeze(1)


def pick(probs: Probabilities, numbers: Iterable[float]) -> list[int]:
    """Independent draws: for each number in (0, 1) the first place where the cumulative sum exceeds it."""
    if isinstance(probs, Tensor):
        sums = probs.cumsum(0)
        wanted = torch.tensor(list(numbers), dtype=sums.dtype, device=sums.device) * sums[-1]
        return torch.searchsorted(sums, wanted, right=True).tolist()
    sums = list(accumulate(probs))
    return [bisect_right(sums, number * sums[-1]) for number in numbers]
