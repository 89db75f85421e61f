"""Sampling: warpers with the meaning that they have in Hugging Face's generation, and keyed Gumbel draws.

The draw for (seed, sequence, position) is a vector of Gumbel noise, one number per token, and the token drawn is
the argmax of warped log-probabilities plus that vector. Nothing is streamed from a generator, so that a draw does
not depend on batching, pruning or drafting.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count

import torch
from torch import Tensor

from engine.errors import UsageError

MASK = (1 << 32) - 1


@dataclass(frozen=True)
class Warp:
    """Temperature, then top-k, then top-p, then renormalising (the order of Hugging Face).

    Args:
        temperature: divides the log-probabilities; 0 leaves the most probable token alone.
        top_k: tokens at least as probable as the k-th stay; 0 keeps all.
        top_p: the smallest set of most probable tokens that reaches this probability stays; 1 keeps all.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0

    def __post_init__(self):
        if not (_is_number(self.temperature) and (self.temperature == 0 or 1e-6 <= self.temperature <= 1e6)):
            raise UsageError(f"temperature: expected 0 or a number from 1e-6 to 1e6, got {self.temperature!r}")
        if not isinstance(self.top_k, int) or isinstance(self.top_k, bool) or self.top_k < 0:
            raise UsageError(f"top_k: expected an integer >= 0 (0 keeps all tokens), got {self.top_k!r}")
        if not (_is_number(self.top_p) and 0 < self.top_p <= 1):
            raise UsageError(f"top_p: expected a number in (0, 1], got {self.top_p!r}")

    def __call__(self, logp_NV: Tensor) -> Tensor:
        """Warped log-probabilities, float32 [N, V], normalised; -inf for tokens that cannot be drawn."""
        if self.temperature == 0:
            best_N1 = logp_NV.argmax(-1, keepdim=True)
            return torch.full_like(logp_NV, float("-inf")).scatter_(-1, best_N1, 0.0)
        scores_NV = logp_NV / self.temperature if self.temperature != 1 else logp_NV
        if 0 < self.top_k < scores_NV.shape[-1]:
            kth_N1 = torch.topk(scores_NV, self.top_k).values[:, -1:]
            scores_NV = scores_NV.masked_fill(scores_NV < kth_N1, float("-inf"))
        if self.top_p < 1:
            ascending_NV, order_NV = torch.sort(scores_NV, descending=False, stable=True)
            gone_NV = ascending_NV.softmax(-1).cumsum(-1) <= 1 - self.top_p
            gone_NV[:, -1] = False
            scores_NV = scores_NV.masked_fill(torch.zeros_like(gone_NV).scatter_(-1, order_NV, gone_NV), float("-inf"))
        return scores_NV if scores_NV is logp_NV else torch.log_softmax(scores_NV, -1)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _mix(x: int) -> int:
    """A bijection of 32-bit integers whose output bits each depend on all input bits (two multiply-xorshift rounds)."""
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & MASK
    x = ((x ^ (x >> 15)) * 0x846CA68B) & MASK
    return x ^ (x >> 16)


def _mix_all(x: Tensor) -> Tensor:
    """`_mix` of every element."""
    x = (x >> 16).bitwise_xor_(x).mul_(0x7FEB352D).bitwise_and_(MASK)
    x = (x >> 15).bitwise_xor_(x).mul_(0x846CA68B).bitwise_and_(MASK)
    return (x >> 16).bitwise_xor_(x)


def _key(words: Iterable[int], one: int = 0x9E3779B9, two: int = 0x5BD1E995) -> tuple[int, int]:
    """64 bits out of 32-bit words: no two draws of a lifetime share a vector."""
    for word in words:
        one, two = _mix((one + word) & MASK), _mix((two ^ word) * 5 + one & MASK)
    return one, two


def gumbel(seed: int, sequence: int, position: int, size: int, device: torch.device | str = "cpu") -> Tensor:
    """The Gumbel vector of a draw: float32 [size].

    Counter-based: 32 uniform bits per token from integer arithmetic on (seed, sequence, position, token), the same on
    every device and for every `size` that includes the token.
    """
    return gumbels(seed, [sequence], [position], size, device)[0]


def gumbels(
    seed: int, sequences: Sequence[int], positions: Sequence[int], size: int, device: torch.device | str = "cpu"
) -> Tensor:
    """The Gumbel vectors of many draws, float32 [N, size]: rows as `gumbel` gives them."""
    start = _key((seed & MASK, seed >> 32 & MASK))
    keys = [_key((s & MASK, p & MASK), *start) for s, p in zip(sequences, positions, strict=True)]
    token_V = torch.arange(size, dtype=torch.int64, device=device)
    one_N1, two_N1 = torch.tensor(keys, dtype=torch.int64, device=device).unsqueeze(2).unbind(1)
    bits_NV = _mix_all(_mix_all(token_V ^ one_N1).add_(two_N1).bitwise_and_(MASK))
    uniform_NV = bits_NV.double().add_(0.5).div_(1 << 32)
    return uniform_NV.log_().neg_().log_().neg_().float()


def draws(logp_NV: Tensor, seed: int, sequences: Sequence[int], positions: Sequence[int]) -> Tensor:
    """One token per row of warped log-probabilities, keyed by (seed, sequence, position): int64 [N] on the device."""
    return (logp_NV + gumbels(seed, sequences, positions, logp_NV.shape[1], logp_NV.device)).argmax(-1)


def draw(logp_NV: Tensor, seed: int, sequences: Sequence[int], positions: Sequence[int]) -> list[int]:
    """`draws`, on the host."""
    return draws(logp_NV, seed, sequences, positions).tolist()


def uniforms(seed: int, stream: int, position: int) -> Iterator[float]:
    """Endless numbers in (0, 1), keyed likewise: for searches that make several decisions at one position."""
    one, two = _key((seed & MASK, seed >> 32 & MASK, stream & MASK, position & MASK))
    return ((_mix((_mix(i ^ one) + two) & MASK) + 0.5) / (1 << 32) for i in count())
