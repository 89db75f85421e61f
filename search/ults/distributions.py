"""Draws of Gamma and Beta distributions in log space, and the maximum-likelihood Beta."""

import math

import torch
from torch import Tensor

TINY = 1e-5  # a mean below which b of a Beta cannot be determined


def log_gamma(shape: Tensor, generator: torch.Generator) -> Tensor:
    """Draw log x with x from Gamma(shape), for shapes from 0 on (Marsaglia and Tsang's rejection, for shape + 1)."""
    d, out = shape + 2 / 3, torch.full_like(shape, math.nan)
    while (todo := out.isnan()).any():
        x, u = torch.empty_like(d).normal_(generator=generator), torch.empty_like(d).uniform_(generator=generator)
        v = (1 + x / (9 * d).sqrt()) ** 3
        taken = todo & (v > 0) & (u.log() < x * x / 2 + d - d * v + d * v.clamp(min=1e-300).log())
        out = torch.where(taken, (d * v).log(), out)
    return out + torch.empty_like(d).uniform_(generator=generator).clamp(min=1e-300).log() / shape


def beta_draws(log_D: Tensor, generator: torch.Generator) -> Tensor:
    """Draw log x, where x has the maximum-likelihood Beta(a, b) distribution on [0, 1] of the given values.

    The i-th draw has the rank of the i-th value, so that data that belong to the values also fit the draws.
    """
    log_x = log_D.double().clamp(max=-1e-6)
    if log_x.std() < 1e-4:  # practically a constant
        return log_D
    log_mean = log_x.logsumexp(0) - math.log(len(log_x))
    if log_mean > math.log(TINY):
        ab = _beta_fit(log_x)
        draws = log_gamma(ab.expand(len(log_x), 2), generator)
        draws = draws[:, 0] - draws.logsumexp(1)
    else:  # b tends to infinity: x = mean * Gamma(a) / a has the same sufficient statistics
        a = _gamma_fit(log_mean - log_x.mean())
        draws = (log_gamma(a.expand(len(log_x)), generator) - a.log() + log_mean).clamp(max=0)
    return torch.empty_like(log_D).scatter_(0, log_D.argsort(), draws.sort().values.float())


def _beta_fit(log_x: Tensor) -> Tensor:
    """Fit (a, b) by Newton's method on their logarithms, started at the moments; steps are at most 1."""
    x = log_x.exp()
    targets = torch.stack([log_x.mean(), (-x).log1p().mean()])  # sufficient statistics
    spread = x.mean() * (1 - x.mean()) / x.var().clamp(min=1e-30) - 1
    ab = torch.stack([x.mean(), 1 - x.mean()]) * spread.clamp(1e-3, 1e9)
    for _ in range(100):
        gradient = targets - torch.digamma(ab) + torch.digamma(ab.sum())
        curvature = torch.polygamma(1, ab.sum()) - torch.diag(torch.polygamma(1, ab))
        step = torch.linalg.solve(curvature * ab * ab[:, None], -gradient * ab)
        ab = ab * step.clamp(-1, 1).exp()
        if float(step.abs().max()) < 1e-9:
            break
    return ab


def _gamma_fit(gap: Tensor) -> Tensor:
    """Return the shape a of a Gamma with log(mean) - mean(log) = log a - digamma(a) = `gap`."""
    a = 0.5 / gap.clamp(min=1e-9)  # exact for large a, otherwise too small
    for _ in range(100):
        excess, slope = a.log() - torch.digamma(a) - gap, 1 - a * torch.polygamma(1, a)  # slope: by log a
        step = (-excess / slope).clamp(-1, 1)
        a = a * step.exp()
        if float(step.abs()) < 1e-9:
            break
    return a
