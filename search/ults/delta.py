"""p(Delta): the likelihood of the best completion below a node, relative to the node's own (ULTS, section 3.2).

Each level has one distribution, represented by samples (algorithm 1). The paper fits a Beta to them; its code leaves
location and scale free, so that "likelihoods" above 1 and below 0 occur. Here the samples are used as they are, or, for
comparison, a Beta on [0, 1] is fitted to them.
"""

import math
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from engine.contract import Pause
from engine.errors import UsageError
from search.ults.distributions import beta_draws
from search.ults.prior import DRAWS, Vectors

POOL = 1 << 14  # draws on the tape of a level, from which nodes read their samples
STRIDE = 0x9E3779B1  # odd: siblings whose tokens differ by less than POOL read different windows
WORD_BITS = (1 << 64) - 1
KEPT_NUMBERS = 1 << 22  # the most numbers of all distributions that are kept for other requests


def path_key(path: int, token: int) -> int:
    """Return the key of a path and one more token: 64 bits (splitmix64)."""
    x = (path ^ (token + 1) * 0x9E3779B97F4A7C15) & WORD_BITS
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & WORD_BITS
    x = (x ^ x >> 27) * 0x94D049BB133111EB & WORD_BITS
    return x ^ x >> 31


@dataclass(frozen=True, eq=False)
class Delta:
    """The distributions of Delta on each level, as tapes of draws: each node reads a window of its level's tape.

    Args:
        log_LP: float32, draws of log Delta; row l belongs to nodes of level l, row 0 is not used.
        length_LP: float32, the number of tokens of the path that attains it; None if lengths do not matter.
        samples: length of a window (N of the paper).
    """

    log_LP: Tensor
    length_LP: Tensor | None
    samples: int

    @property
    def numbers(self) -> int:
        """The count of numbers on the tapes."""
        return self.log_LP.numel() * (1 if self.length_LP is None else 2)

    def places(self, nodes: Sequence[tuple[int, int]], token_FC: Tensor) -> Tensor:
        """Return where on the tapes the windows [F, C] of children begin, by their level, parent and token.

        Args:
            nodes: for each family the children's level and the key of the parent's path.
            token_FC: int64, the children's tokens.
        """
        start_F1 = torch.tensor([[level * self.log_LP.shape[1]] for level, _ in nodes])
        key_F1 = torch.tensor([[key & POOL - 1] for _, key in nodes])
        return start_F1 + (key_F1 + token_FC * STRIDE & POOL - 1)

    def draws(self, place_C: Tensor, out_CN: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return log Delta [C, N] of the nodes at places, written to `out_CN`; and the lengths."""
        shape = (self.log_LP.numel() - self.samples + 1, self.samples)  # a view of all windows
        log_CN = torch.index_select(self.log_LP.as_strided(shape, (1, 1)), 0, place_C, out=out_CN)
        if self.length_LP is None:
            return log_CN, None
        return log_CN, self.length_LP.as_strided(shape, (1, 1)).index_select(0, place_C)


_FITTED: dict[tuple[Any, ...], Delta] = {}  # keys are the arguments of `fit`; the latest entry is last


def _children(vectors: Vectors, children: int, eos: frozenset[int], fixed_length: bool) -> tuple[Tensor, Tensor]:
    """Return for each softmax vector the log-probabilities of a node's children, and whether each ends the sequence."""
    logp_RK, ends_RK = vectors.logp_RK, torch.isin(vectors.tokens_RK, torch.tensor(sorted(eos), dtype=torch.int64))
    if fixed_length:
        p_RK = logp_RK.exp()
        mass_R1 = (p_RK * ~ends_RK).sum(1, keepdim=True) + (1 - p_RK.sum(1, keepdim=True)).clamp(min=0)
        logp_RK = (logp_RK - mass_R1.log()).masked_fill(ends_RK, -math.inf).sort(1, descending=True).values
        alive_R = logp_RK[:, 0].isfinite()
        logp_RK, ends_RK = logp_RK[alive_R], torch.zeros_like(ends_RK)[alive_R]
    if not len(logp_RK):
        raise UsageError("prior: every softmax vector of it ends the text for certain")
    return logp_RK[:, :children], ends_RK[:, :children]


def fit(
    vectors: Vectors,
    depth: int,
    children: int,
    samples: int,
    eos: frozenset[int] = frozenset(),
    fixed_length: bool = False,
    length_penalty: float = 0.0,
    beta: bool = False,
) -> Generator[Pause, None, Delta]:
    """Run algorithm 1: compute p(Delta) of every level from p(c), from the leaves up; it pauses after each level.

    Args:
        vectors: p(c).
        depth: level of the leaves.
        children: the most children of a node.
        samples: N of the paper.
        eos: tokens that make a leaf (Delta = 1).
        fixed_length: exclude these tokens instead, and renormalise the others.
        length_penalty: the best completion is the one with the best logprob / length ** length_penalty.
        beta: replace the draws of each level by draws of the maximum-likelihood Beta(a, b) with the same ranks.
    """
    key = vectors, depth, children, samples, eos, fixed_length, length_penalty, beta
    if key in _FITTED:
        return _FITTED[key]
    generator = torch.Generator().manual_seed(1)

    def pick(high: int, *size: int) -> Tensor:
        return torch.randint(high, size, generator=generator)

    logp_RK, ends_RK = _children(vectors, children, eos, fixed_length)
    R, K = logp_RK.shape
    lengths = bool(length_penalty) and not fixed_length
    log_LP = torch.zeros(depth, POOL + samples)
    length_LP = torch.zeros_like(log_LP) if lengths else None
    below_D, lengths_D = torch.zeros(DRAWS), torch.zeros(DRAWS)  # Delta = 1 at the leaves
    for level in range(depth - 1, 0, -1):
        row_D, which_DK = pick(R, DRAWS), pick(DRAWS, DRAWS, K)
        way_DK = logp_RK[row_D] + below_D[which_DK].masked_fill(ends_RK[row_D], 0.0)  # c_nj * Delta_nj
        if lengths:
            tokens_DK = 1 + lengths_D[which_DK].masked_fill(ends_RK[row_D], 0.0)
            best_D1 = (way_DK / tokens_DK.double() ** length_penalty).argmax(1, keepdim=True)
            below_D, lengths_D = way_DK.gather(1, best_D1)[:, 0], tokens_DK.gather(1, best_D1)[:, 0]
        else:
            below_D = way_DK.amax(1)
        if beta:
            below_D = beta_draws(below_D, generator)
        tape_P = pick(DRAWS, POOL + samples)
        log_LP[level] = below_D[tape_P]
        if length_LP is not None:
            length_LP[level] = lengths_D[tape_P]
        yield Pause()
    _FITTED[key] = Delta(log_LP, length_LP, samples)
    while len(_FITTED) > 1 and sum(delta.numbers for delta in _FITTED.values()) > KEPT_NUMBERS:
        del _FITTED[next(iter(_FITTED))]
    return _FITTED[key]
