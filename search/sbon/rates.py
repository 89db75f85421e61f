"""How many utterances go on: a rate's share, or as few as a risk allows; how long those given up would have become."""

import math
from collections.abc import Sequence
from statistics import fmean

import torch

TRIALS = 4000  # of the Gaussian model


def accepted(n: int, alpha: float, least: int = 1) -> int:
    """How many of n go on at a rejection rate."""
    return min(n, max(least, n - math.floor(alpha * n + 1e-9)))


def foretold(before: Sequence[float], now: Sequence[float]) -> float:
    """How surely the rewards of a decision point correlate with those of the next: the lower end of the error."""
    if len(before) < 8:
        return 0.0
    correlation = min(rank_correlation(before, now), 0.999)
    return max(0.0, math.tanh(math.atanh(correlation) - 1 / math.sqrt(len(before) - 3)))


def accepted_by_risk(n: int, correlation: float, risk: float) -> int:
    """The fewest of n to keep so that the eventual best is lost with a chance of at most `risk`, if rewards now and at
    the end are jointly Gaussian with this correlation; by simulation, the same each time."""
    trials = max(200, min(TRIALS, (1 << 21) // n))
    z = torch.randn(2, trials, n, generator=torch.Generator().manual_seed(0))
    correlation = math.floor(correlation * 50) / 50  # coarse: a rounding error must not decide
    now, final = correlation * z[0] + math.sqrt(1 - correlation**2) * z[1], z[0]
    best_now = now.gather(1, final.argmax(1, keepdim=True))
    ranks = (now > best_now).sum(1).sort().values  # of the eventual best
    return int(ranks[min(trials - 1, math.ceil((1 - risk) * trials) - 1)]) + 1


def rank_correlation(x: Sequence[float], y: Sequence[float]) -> float:
    """The correlation of a Gaussian pair with these values' Kendall's tau: sin(pi tau / 2)."""
    return math.sin(math.pi / 2 * kendall(x, y))


def kendall(x: Sequence[float], y: Sequence[float]) -> float:
    """Kendall's tau as the paper's appendix D has it: pairs in order less pairs out of order, over all pairs."""
    a, b = (torch.tensor(values, dtype=torch.float64) for values in (x, y))
    signs = torch.sign(a.unsqueeze(0) - a.unsqueeze(1)) * torch.sign(b.unsqueeze(0) - b.unsqueeze(1))
    return float(signs.sum()) / max(1, len(x) * (len(x) - 1))


def expected_lengths(lengths: Sequence[int], given_up: Sequence[int]) -> list[float]:
    """Lengths if all had gone on: one given up is taken to be as long as those that outlived it are on the average."""
    expected = [float(length) for length in lengths]
    for i in sorted(given_up, key=lambda i: -lengths[i]):
        longer = [e for length, e in zip(lengths, expected, strict=True) if length > lengths[i]]
        expected[i] = fmean(longer) if longer else expected[i]
    return expected
