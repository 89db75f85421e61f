"""The warped distribution over the cells of whole rows, each of which stands for several copies, in little memory.

Numbers in float64 are made for a few rows at a time. Not all cells are sorted: the border of top-k or top-p is found in
histograms of scores, each of one bin of the one before, until few cells are left.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from torch import Tensor

from engine.contract.sampling import Warp, by_row

BLOCK = 1 << 18  # cells, in whole rows, whose scores are in a CPU's memory at a time
BINS = 4096
DEPTH = 60.0  # the first histogram has bins for masses down to exp(-DEPTH)
FEW = 1 << 16  # cells that are sorted
FEW_MASSES = 1 << 20  # masses that are kept instead of computed twice
REACHED = 1 - 1e-12  # share of top-p that counts as reached, so that the rounding of sums does not matter

Weigh = Callable[[Tensor], Tensor]  # scores -> the weight of one copy of each
Border = tuple[float, float]  # score of the copy with which weights, best first, reach a limit; what better ones leave


class Copies:
    """The cells of some rows. A cell's score is its log-probability plus the offset of its row.

    Args:
        logp_WV: float32.
        offsets, counts: of each row; every cell of a row stands for `count` copies.
        warp: has the same effect as on a row of all copies; its temperature is not 0.
    """

    def __init__(self, logp_WV: Tensor, offsets: Sequence[float], counts: Sequence[int], warp: Warp):
        self.logp_WV, self.counts, self.warp = logp_WV, counts, warp
        self._rows = max(1, BLOCK // logp_WV.shape[1]) if logp_WV.is_cpu else len(logp_WV)
        given_W2 = torch.tensor([*zip(offsets, counts, strict=True)], dtype=torch.float64)
        self._offset_W1, self._n_W1 = given_W2.to(logp_WV.device).split(1, 1)
        self._best = float((logp_WV.amax(1, keepdim=True) + self._offset_W1).max())
        self._least, self._stay = -math.inf, list[int]()  # lowest score that stays; its copies that do, by row
        if warp.top_k:  # equals of the k-th copy stay
            self._least, _ = self._kth_copy(warp.top_k)
        if warp.top_p < 1:  # a copy stays if those before it do not reach top-p
            self._least, left = self._border(self._mass, lambda total: warp.top_p * REACHED * total)
            mass = math.exp((self._least - self._best) / warp.temperature)
            self._stay = self._at_border(math.ceil(left / mass) if mass else 0)
        self._few_masses = [*self._masses()] if logp_WV.numel() <= FEW_MASSES else None

    def masses(self) -> Iterable[tuple[slice, Tensor]]:
        """The probability of each cell, all copies together, up to a factor: float64 [R, V], of some rows at a time."""
        return self._few_masses or self._masses()

    def _masses(self) -> Iterator[tuple[slice, Tensor]]:
        for rows, score_RV in self._blocks():
            mass_RV = self._mass(score_RV).masked_fill_(score_RV < self._least, 0)
            if self.warp.min_p:
                mass_RV.masked_fill_(mass_RV < self.warp.min_p, 0)
            mass_RV *= self._n_W1[rows]
            for row, stay in enumerate(self._stay[rows]):
                n, token_M = self.counts[rows.start + row], (score_RV[row] == self._least).nonzero()[:, 0].flip(0)
                if stay < n * len(token_M):
                    mass_RV[row, token_M[stay // n]] *= stay % n / n
                    mass_RV[row, token_M[stay // n + 1 :]] = 0
            yield rows, mass_RV

    def total(self) -> tuple[float, int]:
        """The sum of all masses, and how many are not 0."""
        found = [(by_row(torch.sum, mass_RV), (mass_RV > 0).sum()) for _, mass_RV in self.masses()]
        return float(torch.cat([sum_R1 for sum_R1, _ in found]).sum()), int(sum(cells for _, cells in found))

    def cells(self) -> tuple[Tensor, list[float]]:
        """The places of all masses that are not 0, int64 [M], in order, and these masses."""
        V, places, masses = self.logp_WV.shape[1], list[Tensor](), list[float]()
        for rows, mass_RV in self.masses():
            places.append(mass_RV.view(-1).nonzero()[:, 0] + rows.start * V)
            masses += mass_RV.view(-1)[places[-1] - rows.start * V].tolist()
        return torch.cat(places), masses

    def _blocks(self) -> Iterator[tuple[slice, Tensor]]:
        """Scores, float64 [R, V], of some rows at a time."""
        for first in range(0, len(self.logp_WV), self._rows):
            rows = slice(first, first + self._rows)
            yield rows, self.logp_WV[rows] + self._offset_W1[rows]

    def _mass(self, score: Tensor) -> Tensor:
        """Probabilities of single copies, relative to the best."""
        return ((score - self._best) / self.warp.temperature).exp_()

    def _at_border(self, copies: int) -> list[int]:
        """Divide the copies with the lowest score that stay among the rows: among equals the last comes first."""
        equal_W = torch.cat([(score_RV == self._least).sum(1) for _, score_RV in self._blocks()]).tolist()
        stay: list[int] = []
        for equal, n in zip(reversed(equal_W), reversed(self.counts), strict=True):
            stay.insert(0, min(equal * n, copies))
            copies -= stay[0]
        return stay

    def _border(self, weigh: Weigh, limit_of: Callable[[float], float]) -> Border:
        """Find the border at a limit, a function of the sum of all weights."""
        low, high, scale = self._least, self._best, BINS / (DEPTH * self.warp.temperature)
        above, limit = 0.0, math.nan
        while True:
            sum_M, cells_M = torch.zeros(2, BINS, dtype=torch.float64, device=self.logp_WV.device)
            for score_C, n_C, bin_C in self._binned(low, high, scale):
                sum_M += torch.bincount(bin_C, weigh(score_C).mul_(n_C), BINS)
                cells_M += torch.bincount(bin_C, minlength=BINS)
            sum_M = sum_M.cumsum(0) + above
            limit = limit_of(float(sum_M[-1])) if math.isnan(limit) else limit
            reached = min(int((sum_M < limit).sum()), BINS - 1)
            above = float(sum_M[reached - 1]) if reached else above
            within = ((s_C[b_C == reached], n_C[b_C == reached]) for s_C, n_C, b_C in self._binned(low, high, scale))
            if cells_M[reached] <= FEW:
                break
            ends = torch.stack([torch.stack(score_C.aminmax()) for score_C, _ in within if len(score_C)])
            low, high = float(ends[:, 0].min()), float(ends[:, 1].max())
            if low == high:
                return low, limit - above
            scale = (BINS - 1) / (high - low)
        score_C, n_C = map(torch.cat, zip(*within, strict=True))
        return self._border_among(score_C, n_C, weigh, limit, above)

    def _border_among(self, score_C: Tensor, n_C: Tensor, weigh: Weigh, limit: float, above: float = 0.0) -> Border:
        """Find the border among some cells; `above` is the weight of those with greater scores."""
        score_C, order_C = score_C.sort(descending=True, stable=True)
        sum_C = (weigh(score_C) * n_C[order_C]).cumsum(0) + above
        border = score_C[min(int((sum_C < limit).sum()), len(sum_C) - 1)]
        better = int((score_C > border).sum())
        return float(border), limit - (float(sum_C[better - 1]) if better else above)

    def _kth_copy(self, k: int) -> Border:
        """Find the border at the k-th copy, or at the last if there are fewer."""
        if k > self.logp_WV.shape[1] // 8:
            return self._border(torch.ones_like, lambda total: min(k, total))
        score_Wk = torch.cat([torch.topk(score_RV, k).values for _, score_RV in self._blocks()])
        n_Wk = self._n_W1.expand_as(score_Wk)
        return self._border_among(score_Wk.view(-1), n_Wk.reshape(-1), torch.ones_like, k)

    def _binned(self, low: float, high: float, scale: float) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """The scores in a range, the copies of each, and its bin, greater scores first; of some rows at a time."""
        for rows, score_RV in self._blocks():
            inside_RV = (score_RV >= low) & (score_RV <= high) & (score_RV > -math.inf)
            score_C, n_C = score_RV[inside_RV], self._n_W1[rows].expand_as(score_RV)[inside_RV]
            yield score_C, n_C, ((high - score_C) * scale).clamp_(max=BINS - 1).long()
