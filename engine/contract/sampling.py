"""Sampling: warpers like those of Hugging Face's generation, and keyed Gumbel draws.

The draw for (seed, sequence, position) is a vector of Gumbel noise, one number per token, and the sampled token is the
argmax of warped log-probabilities plus that vector. There is no random stream, so a draw does not depend on
batching, pruning or drafting.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count

import torch
from torch import Tensor

from engine.errors import UsageError, check_integer, check_number
from kernels.rows import gumbel_argmax, top_k

MASK = (1 << 32) - 1
NUCLEUS = 256  # tokens that are ranked for top-p; if they do not suffice, all are
MAX_SIGMAS = 1e6
ROUNDING = 1e-6  # error of sums of probabilities
BLOCK = 1 << 19  # numbers, in whole rows, that a CPU warps at a time, or a row for each thread
XTC = 0x585443  # keys numbers that are independent of the Gumbel vector of the same draw


@dataclass(frozen=True)
class Warp:
    """Temperature, top-n-sigma, top-k, top-p, min-p, typical, epsilon, eta, then renormalising: Hugging Face's order.

    Args:
        temperature: divides the log-probabilities; 0 keeps only the most probable token.
        top_k: tokens at least as probable as the k-th stay; 0 keeps all.
        top_p: the smallest set of most probable tokens that reaches this probability stays; 1 keeps all.
        min_p: tokens of at least this multiple of the best one's probability stay; 0 keeps all.
        typical_p: the smallest set that reaches this probability stays, of the tokens whose surprise, -logp, is nearest
            to the entropy of the row (Meister et al., 2022); 1 keeps all.
        epsilon_cutoff: tokens of at least this probability stay, and the best one (Hewitt et al., 2022); 0 keeps all.
        eta_cutoff: the same with eta = min(cutoff, sqrt(cutoff) * exp(-entropy of the row)); 0 keeps all.
        top_n_sigma: tokens stay whose logit is at most this many standard deviations of the row's logits below the
            best one, at any temperature (Tang et al., 2024; llama.cpp has the same); 0 keeps all.
        xtc_probability: with this probability a draw excludes top choices, after everything else: of the tokens whose
            probability is at least `xtc_threshold` only the least probable one stays, among equals the one with the
            highest id (llama.cpp's XTC; its author is p-e-w). See `draws`.
        xtc_threshold: above 0.5 nothing is excluded.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    typical_p: float = 1.0
    top_n_sigma: float = 0.0
    xtc_probability: float = 0.0
    xtc_threshold: float = 0.1
    epsilon_cutoff: float = 0.0
    eta_cutoff: float = 0.0

    def __post_init__(self):
        if not (_is_number(self.temperature) and (self.temperature == 0 or 1e-6 <= self.temperature <= 1e6)):
            raise UsageError(f"temperature: expected 0 or a number from 1e-6 to 1e6, got {self.temperature!r}")
        check_integer("top_k", self.top_k, 0)
        for name in ("top_p", "typical_p"):
            if not (_is_number(value := getattr(self, name)) and 0 < value <= 1):
                raise UsageError(f"{name}: expected a number in (0, 1], got {value!r}")
        check_number("top_n_sigma", self.top_n_sigma, 0, MAX_SIGMAS)
        for name in ("epsilon_cutoff", "eta_cutoff"):
            if not (_is_number(value := getattr(self, name)) and 0 <= value < 1):
                raise UsageError(f"{name}: expected a number in [0, 1), got {value!r}")
        for name in ("min_p", "xtc_probability", "xtc_threshold"):
            if not (_is_number(value := getattr(self, name)) and 0 <= value <= 1):
                raise UsageError(f"{name}: expected a number in [0, 1], got {value!r}")

    def __call__(self, logp_NV: Tensor) -> Tensor:
        """Warped log-probabilities, float32 [N, V], normalised, before XTC; -inf for tokens that cannot be drawn."""
        if self.temperature == 0:
            best_N1 = logp_NV.argmax(-1, keepdim=True)
            return torch.full_like(logp_NV, float("-inf")).scatter_(-1, best_N1, 0.0)
        scores_NV = logp_NV / self.temperature if self.temperature != 1 else logp_NV
        if self.top_n_sigma:
            scores_NV = self._near_best(scores_NV)
        scores_NV = self._cut(scores_NV)
        if self.min_p:
            scores_NV = self._without_improbable(scores_NV)
        if self.typical_p != 1:
            scores_NV = self._typical(scores_NV)
        if self.epsilon_cutoff or self.eta_cutoff:
            scores_NV = torch.log_softmax(scores_NV, -1)
        if self.epsilon_cutoff:
            scores_NV = self._probable(scores_NV, math.log(self.epsilon_cutoff))
        if self.eta_cutoff:
            log_cutoff = math.log(self.eta_cutoff)
            entropy_N1 = -by_row(torch.nansum, scores_NV * scores_NV.exp())
            scores_NV = self._probable(scores_NV, (log_cutoff / 2 - entropy_N1).clamp_(max=log_cutoff))
        return scores_NV

    def draws(
        self,
        logp_NV: Tensor,
        seed: int,
        sequences: Sequence[int],
        positions: Sequence[int],
        row_n: Tensor | None = None,
    ) -> Tensor:
        """One token per draw, keyed by (seed, sequence, position): int64 [n] on the device.

        Args:
            logp_NV: log-probabilities of the model, or edited ones.
            seed, sequences, positions: the keys of n draws.
            row_n: int64, the row of each draw; None: each draw has its own.
        """
        threads = torch.get_num_threads()
        most = max(1, BLOCK // logp_NV.shape[1] // threads) * threads
        if not logp_NV.is_cpu or max(len(logp_NV), len(sequences)) <= most:
            return self._drawn(self(logp_NV) if row_n is None else self(logp_NV)[row_n], seed, sequences, positions)
        row_n = torch.arange(len(sequences)) if row_n is None else row_n
        token_n = torch.empty_like(row_n)
        for first in range(0, len(logp_NV), most):
            own_m = ((row_n >= first) & (row_n < first + most)).nonzero()[:, 0]
            if not len(own_m):
                continue
            warped_NV = self(logp_NV[first : first + most])
            for draw_m in own_m.split(most):
                keys = [[given[i] for i in draw_m.tolist()] for given in (sequences, positions)]
                token_n[draw_m] = self._drawn(warped_NV[row_n[draw_m] - first], seed, *keys)
        return token_n

    def _drawn(self, warped_nV: Tensor, seed: int, sequences: Sequence[int], positions: Sequence[int]) -> Tensor:
        """One token per row of warped log-probabilities."""
        if self.xtc_probability and self.xtc_threshold <= 0.5:
            numbers = [one / (1 << 32) for one in _keys(seed, sequences, positions, XTC)[::2]]
            excludes = torch.tensor([[number < self.xtc_probability] for number in numbers])
            excludes_n1 = excludes.to(warped_nV.device, non_blocking=True)
            warped_nV = warped_nV.masked_fill(self._top_choices(warped_nV) & excludes_n1, float("-inf"))
        return draws(warped_nV, seed, sequences, positions)

    def _top_choices(self, warped_NV: Tensor) -> Tensor:
        """The tokens that XTC excludes, bool [N, V]."""
        logp_NV = torch.log_softmax(warped_NV, -1)
        likely_NV = logp_NV >= (math.log(self.xtc_threshold) if self.xtc_threshold else -math.inf)
        likely_NV &= logp_NV > -math.inf
        least_N1 = logp_NV.masked_fill(~likely_NV, math.inf).amin(-1, keepdim=True)
        place_V = torch.arange(logp_NV.shape[-1], device=logp_NV.device)
        kept_N1 = torch.where(likely_NV & (logp_NV == least_N1), place_V, -1).amax(-1, keepdim=True)
        return likely_NV & (place_V != kept_N1)

    def _near_best(self, scores_NV: Tensor) -> Tensor:
        """Rows, normalised, without the tokens that top-n-sigma removes; tokens of probability 0 do not count."""
        possible_NV = scores_NV > float("-inf")
        count_N1 = possible_NV.sum(-1, keepdim=True)
        mean_N1 = by_row(torch.sum, scores_NV.masked_fill(~possible_NV, 0.0)) / count_N1
        squares_NV = (scores_NV - mean_N1).square().masked_fill(~possible_NV, 0.0)
        sigma_N1 = (by_row(torch.sum, squares_NV) / count_N1).sqrt()
        least_N1 = scores_NV.amax(-1, keepdim=True) - self.top_n_sigma * sigma_N1
        return torch.log_softmax(scores_NV.masked_fill(scores_NV < least_N1, float("-inf")), -1)

    def _typical(self, scores_NV: Tensor) -> Tensor:
        """Rows without the tokens that the typical warper removes."""
        logp_NV = torch.log_softmax(scores_NV, -1)
        entropy_N1 = -by_row(torch.nansum, logp_NV * logp_NV.exp())
        distance_NV = (-logp_NV - entropy_N1).abs()
        ascending_NV, order_NV = torch.sort(distance_NV)
        mass_NV = logp_NV.gather(-1, order_NV).exp().cumsum(-1)
        last_N1 = (mass_NV < self.typical_p).sum(-1, keepdim=True).clamp_(max=logp_NV.shape[-1] - 1)
        gone_NV = distance_NV > ascending_NV.gather(-1, last_N1)
        return torch.log_softmax(logp_NV.masked_fill(gone_NV, float("-inf")), -1)

    @staticmethod
    def _probable(logp_NV: Tensor, least: float | Tensor) -> Tensor:
        """Rows of log-probabilities without the tokens below `least`, except the best ones."""
        gone_NV = (logp_NV < least) & (logp_NV < logp_NV.amax(-1, keepdim=True))
        return torch.log_softmax(logp_NV.masked_fill(gone_NV, float("-inf")), -1)

    def _without_improbable(self, scores_NV: Tensor) -> Tensor:
        """Rows without the tokens that min-p removes."""
        least_N1 = scores_NV.amax(-1, keepdim=True) + math.log(self.min_p)
        return torch.log_softmax(scores_NV.masked_fill(scores_NV < least_N1, float("-inf")), -1)

    def _cut(self, scores_NV: Tensor) -> Tensor:
        """Rows after top-k and top-p, normalised; the rows themselves if they would not change."""
        V = scores_NV.shape[-1]
        if not 0 < self.top_k < V and self.top_p == 1:
            return scores_NV if self.temperature == 1 else torch.log_softmax(scores_NV, -1)
        if scores_NV.device.type != "cpu" or max(self.top_k, NUCLEUS) >= V // 4:  # ranking would wait for a GPU
            return self._sorted(scores_NV)
        warped_NV, undecided_N = self._ranked(scores_NV)
        if undecided_N.any():
            warped_NV[undecided_N] = self._sorted(scores_NV[undecided_N])
        return warped_NV

    def _sorted(self, scores_NV: Tensor) -> Tensor:
        """Warped rows computed from all tokens."""
        if 0 < self.top_k < scores_NV.shape[-1]:
            kth_N1 = torch.topk(scores_NV, self.top_k).values[:, -1:]
            scores_NV = scores_NV.masked_fill(scores_NV < kth_N1, float("-inf"))
        if self.top_p < 1:
            ascending_NV, order_NV = torch.sort(scores_NV, descending=False, stable=True)
            gone_NV = ascending_NV.softmax(-1).cumsum(-1) <= 1 - self.top_p
            gone_NV[:, -1] = False
            scores_NV = scores_NV.masked_fill(torch.zeros_like(gone_NV).scatter_(-1, order_NV, gone_NV), float("-inf"))
        return torch.log_softmax(scores_NV, -1)

    def _ranked(self, scores_NV: Tensor) -> tuple[Tensor, Tensor]:
        """Warped rows computed from their most probable tokens, and whether each row is undecided: more tokens would
        stay, or rounding or the order of equal tokens decides which ones stay."""
        score_NK, place_NK = top_k(scores_NV, (self.top_k or NUCLEUS) + 1).unbind(1)
        if self.top_k:
            undecided_N = score_NK[:, -1] == score_NK[:, -2]
            score_NK, place_NK = score_NK[:, :-1], place_NK[:, :-1]
            mass_NK = score_NK.softmax(-1)
        else:
            mass_NK = (score_NK - by_row(torch.logsumexp, scores_NV)).exp()
            undecided_N = mass_NK[:, :-1].sum(-1) < self.top_p
        if self.top_p < 1:
            spare_NK = mass_NK.cumsum(-1) - mass_NK - self.top_p  # a token with at least 0 is removed
            gone_NK, equal_NK = spare_NK >= 0, score_NK[:, 1:] == score_NK[:, :-1]
            undecided_N |= (gone_NK[:, 1:] & ~gone_NK[:, :-1] & equal_NK).any(-1) | (spare_NK.abs() < ROUNDING).any(-1)
            score_NK = score_NK.masked_fill(gone_NK, float("-inf"))
        warped_NK = torch.log_softmax(score_NK, -1).to(scores_NV.dtype)
        return torch.full_like(scores_NV, float("-inf")).scatter_(1, place_NK.long(), warped_NK), undecided_N


def by_row(reduce: Callable[..., Tensor], x_NV: Tensor) -> Tensor:
    """Return the sum of each row, [N, 1], by a function of torch.

    PyTorch divides a single row among threads, so that the last bits depend on their number; two rows it does not.
    """
    alone = len(x_NV) == 1 and x_NV.is_cpu
    return reduce(x_NV.expand(2, -1) if alone else x_NV, -1, keepdim=True)[: len(x_NV)]


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _mix(x: int) -> int:
    """A bijection of 32-bit integers whose output bits each depend on all input bits (two multiply-xorshift rounds)."""
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & MASK
    x = ((x ^ (x >> 15)) * 0x846CA68B) & MASK
    return x ^ (x >> 16)


def _key(words: Iterable[int], one: int = 0x9E3779B9, two: int = 0x5BD1E995) -> tuple[int, int]:
    """64 bits from 32-bit words; two draws have the same bits with negligible probability."""
    for word in words:
        one, two = _mix((one + word) & MASK), _mix((two ^ word) * 5 + one & MASK)
    return one, two


def _keys(seed: int, sequences: Sequence[int], positions: Sequence[int], *purpose: int) -> list[int]:
    """Two 32-bit numbers for each draw; numbers of another `purpose` (at most one word) are independent of them."""
    start = _key((seed & MASK, seed >> 32 & MASK))
    pairs = zip(sequences, positions, strict=True)
    return [x for s, p in pairs for x in _key((s & MASK, p & MASK, *purpose), *start)]


def draws(logp_NV: Tensor, seed: int, sequences: Sequence[int], positions: Sequence[int]) -> Tensor:
    """One token per row of warped log-probabilities, keyed by (seed, sequence, position): int64 [N] on the device."""
    return gumbel_argmax(logp_NV, _keys(seed, sequences, positions))


def uniforms(seed: int, stream: int, position: int) -> Iterator[float]:
    """An endless sequence of keyed numbers in (0, 1), for searches that make several decisions at one position."""
    one, two = _key((seed & MASK, seed >> 32 & MASK, stream & MASK, position & MASK))
    for i in count():
        yield (_mix((_mix(i ^ one) + two) & MASK) + 0.5) / (1 << 32)
