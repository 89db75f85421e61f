"""The number of utterances to keep, by a rejection rate or a risk, and expected lengths of rejected utterances."""

import math
from collections.abc import Sequence
from statistics import fmean

import torch

TRIALS = 4000  # simulated draws of the Gaussian model


def accepted(n: int, alpha: float, least: int = 1) -> int:
    """Return how many of n utterances to keep at a rejection rate."""
    return min(n, max(least, n - math.floor(alpha * n + 1e-9)))


def least_correlation(before: Sequence[float], now: Sequence[float]) -> float:
    """Return the lower end of a confidence interval of the correlation between rewards now and at the next decision
    point."""
    if len(before) < 8:
        return 0.0
    correlation = min(rank_correlation(before, now), 0.999)
    return max(0.0, math.tanh(math.atanh(correlation) - 1 / math.sqrt(len(before) - 3)))


def accepted_by_risk(n: int, correlation: float, risk: float) -> int:
    """Return the fewest of n utterances to keep so that the eventual best is lost with a probability of at most `risk`.

    Rewards now and at the end are assumed to be jointly Gaussian with this correlation. The simulation is seeded: equal
    arguments give equal results.
    """
    trials = max(200, min(TRIALS, (1 << 21) // n))
    z = torch.randn(2, trials, n, generator=torch.Generator().manual_seed(0))
    correlation = math.floor(correlation * 50) / 50  # coarse: a rounding error must not decide
    now, final = correlation * z[0] + math.sqrt(1 - correlation**2) * z[1], z[0]
    best_now = now.gather(1, final.argmax(1, keepdim=True))
    ranks = (now > best_now).sum(1).sort().values  # the present rank of the eventual best in each trial
    return int(ranks[max(0, math.ceil((1 - risk) * trials) - 1)]) + 1


def rank_correlation(x: Sequence[float], y: Sequence[float]) -> float:
    """Return the correlation of a Gaussian pair with the same Kendall's tau as the values: sin(pi tau / 2)."""
    return math.sin(math.pi / 2 * kendall(x, y))


def kendall(x: Sequence[float], y: Sequence[float]) -> float:
    """Return Kendall's tau (the paper's appendix D): concordant pairs less discordant pairs, over all pairs."""
    a, b = (torch.tensor(values, dtype=torch.float64) for values in (x, y))
    signs = torch.sign(a.unsqueeze(0) - a.unsqueeze(1)) * torch.sign(b.unsqueeze(0) - b.unsqueeze(1))
    return float(signs.sum()) / max(1, len(x) * (len(x) - 1))


def expected_lengths(lengths: Sequence[int], rejected: Sequence[int]) -> list[float]:
    """Estimate the lengths without rejection: a rejected utterance gets the mean length of the longer utterances."""
    expected = [float(length) for length in lengths]
    for i in sorted(rejected, key=lambda i: -lengths[i]):
        longer = [e for length, e in zip(lengths, expected, strict=True) if length > lengths[i]]
        expected[i] = fmean(longer) if longer else expected[i]
    return expected
