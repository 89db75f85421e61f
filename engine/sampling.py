"""Sampling: warpers with the meaning that they have in Hugging Face's generation, and keyed Gumbel draws.

The draw for (seed, sequence, position) is a vector of Gumbel noise, one number per token, and the token drawn is
the argmax of warped log-probabilities plus that vector. Nothing is streamed from a generator, so that a draw does
not depend on batching, pruning or drafting.
"""

import functools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count

import torch
from torch import Tensor

from engine.errors import UsageError

MASK = (1 << 32) - 1
MANY = 1 << 15  # log-probabilities of draws, from which it pays to look for those that may win


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
    """`_mix` of every element, int32 as two's complement."""
    x = (x >> 16).bitwise_and_(0xFFFF).bitwise_xor_(x).mul_(_signed(0x7FEB352D))
    x = (x >> 15).bitwise_and_(0x1FFFF).bitwise_xor_(x).mul_(_signed(0x846CA68B))
    return (x >> 16).bitwise_and_(0xFFFF).bitwise_xor_(x)


def _signed(x: int) -> int:
    """32 bits as two's complement."""
    return (x ^ 1 << 31) - (1 << 31)


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
    return _noise(_uniform_bits(seed, sequences, positions, size, device))


def _uniform_bits(
    seed: int, sequences: Sequence[int], positions: Sequence[int], size: int, device: torch.device | str
) -> Tensor:
    """32 uniform bits per draw and token, less 2^31: int32 [N, size]."""
    start = _key((seed & MASK, seed >> 32 & MASK))
    keys = [[*map(_signed, _key((s & MASK, p & MASK), *start))] for s, p in zip(sequences, positions, strict=True)]
    token_V = torch.arange(size, dtype=torch.int32, device=device)
    one_N1, two_N1 = torch.tensor(keys, dtype=torch.int32, device=device).unsqueeze(2).unbind(1)
    return _mix_all(_mix_all(token_V ^ one_N1).add_(two_N1)).bitwise_xor_(-1 << 31)


def _noise(bits: Tensor) -> Tensor:
    """Gumbel noise -log(-log(u)) of `_uniform_bits`: float32."""
    uniform = bits.double().add_((1 << 31) + 0.5).div_(1 << 32)
    return uniform.log_().neg_().log_().neg_().float()


def draws(logp_NV: Tensor, seed: int, sequences: Sequence[int], positions: Sequence[int]) -> Tensor:
    """One token per row of warped log-probabilities, keyed by (seed, sequence, position): int64 [N] on the device."""
    logp_NV = logp_NV.contiguous()
    bits_NV = _uniform_bits(seed, sequences, positions, logp_NV.shape[1], logp_NV.device)
    if logp_NV.device.type == "cpu" and logp_NV.numel() >= MANY:
        likely_M = _contenders(logp_NV, bits_NV)
        if len(likely_M) <= logp_NV.numel() // 8:
            return _best(logp_NV, bits_NV, likely_M)
    return (logp_NV + _noise(bits_NV)).argmax(-1)


def _contenders(logp_NV: Tensor, bits_NV: Tensor) -> Tensor:
    """Places in the flattened rows that hold every token which the noise may have made the best of its row.

    The most probable token reaches its log-probability less 3.14, the least noise, or more. Another one gets as far if
    -log(u) is at most the ratio of their probabilities, a; and 1 - u is never more than -log(u). That leaves about 23
    tokens over the most probable one's probability, found without a logarithm.
    """
    a_NV = (logp_NV - (logp_NV.amax(1, keepdim=True) - 3.2)).exp_()
    spare_NV = a_NV.mul_(1.00001 * (1 << 32)).add_(1024 - (1 << 31)).add_(bits_NV)  # 2^32 (a - (1 - u)), and rounding
    block_K, near_KB, place_M = at_least(spare_NV, 0.0)
    width = near_KB.shape[1]
    return block_K[place_M // width] * width + place_M % width


def _best(logp_NV: Tensor, bits_NV: Tensor, place_M: Tensor) -> Tensor:
    """The best token of each row, of those in these places of the flattened rows; the first of equals."""
    N, V = logp_NV.shape
    score_M, row_M = logp_NV.view(-1)[place_M] + _noise(bits_NV.view(-1)[place_M]), place_M // V
    best_N = torch.full((N,), float("-inf")).scatter_reduce_(0, row_M, score_M, "amax")
    winner_W = place_M[score_M == best_N[row_M]]
    return torch.full((N,), V - 1).scatter_reduce_(0, winner_W // V, winner_W % V, "amin")


def at_least(x_NV: Tensor, bound: float) -> tuple[Tensor, Tensor, Tensor]:
    """What is not below a bound, looked for in the blocks of rows where the largest value is not.

    Those are few, and largest values are found many times faster than places.

    Returns:
        numbers [K] of these blocks of the flattened rows, their values [K, B], the places [M] of values in those.
    """
    blocks_SB = x_NV.view(-1, _block(x_NV.shape[1]))
    block_K = (blocks_SB.amax(1) >= bound).nonzero().view(-1)
    near_KB = blocks_SB.index_select(0, block_K)
    return block_K, near_KB, (near_KB.view(-1) >= bound).nonzero().view(-1)


@functools.cache
def _block(V: int) -> int:
    """The largest divisor of a vocabulary's size that is no more than 128; the size itself if all are tiny."""
    return next((w for w in range(128, 15, -1) if V % w == 0), V)


def draw(logp_NV: Tensor, seed: int, sequences: Sequence[int], positions: Sequence[int]) -> list[int]:
    """`draws`, on the host."""
    return draws(logp_NV, seed, sequences, positions).tolist()


def uniforms(seed: int, stream: int, position: int) -> Iterator[float]:
    """Endless numbers in (0, 1), keyed likewise: for searches that make several decisions at one position."""
    one, two = _key((seed & MASK, seed >> 32 & MASK, stream & MASK, position & MASK))
    return ((_mix((_mix(i ^ one) + two) & MASK) + 0.5) / (1 << 32) for i in count())
