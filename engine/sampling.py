"""Sampling: warpers with the meaning that they have in Hugging Face's generation, and keyed Gumbel draws.

The draw for (seed, sequence, position) is a vector of Gumbel noise, one number per token, and the token drawn is
the argmax of warped log-probabilities plus that vector. Nothing is streamed from a generator, so that a draw does
not depend on batching, pruning or drafting.
"""

from dataclasses import dataclass

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


def _mix(x):
    """A bijection of 32-bit integers whose output bits each depend on all input bits (two multiply-xorshift rounds)."""
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & MASK
    x = ((x ^ (x >> 15)) * 0x846CA68B) & MASK
    return x ^ (x >> 16)


def gumbel(seed: int, sequence: int, position: int, size: int, device: torch.device | str = "cpu") -> Tensor:
    """The Gumbel vector of a draw: float32 [size].

    Counter-based: 32 uniform bits per token from integer arithmetic on (seed, sequence, position, token), the same on
    every device and for every `size` that includes the token.
    """
    one, two = 0x9E3779B9, 0x5BD1E995  # 64 bits of key: no two draws of a lifetime share a vector
    for word in (seed & MASK, (seed >> 32) & MASK, sequence & MASK, position & MASK):
        one, two = _mix((one + word) & MASK), _mix((two ^ word) * 5 + one & MASK)
    token = torch.arange(size, dtype=torch.int64, device=device)
    bits = _mix((_mix(token ^ one) + two) & MASK)
    uniform = (bits.double() + 0.5) / (1 << 32)
    return -torch.log(-torch.log(uniform)).float()


def draw(logp_NV: Tensor, seed: int, sequences: list[int], positions: list[int]) -> list[int]:
    """One token per row of warped log-probabilities, keyed by (seed, sequence, position)."""
    noise_NV = torch.stack(
        [gumbel(seed, s, p, logp_NV.shape[1], logp_NV.device) for s, p in zip(sequences, positions, strict=True)]
    )
    return (logp_NV + noise_NV).argmax(-1).tolist()
