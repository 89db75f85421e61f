"""Norms of rows and of heads."""

import torch
from torch import Tensor, nn

from kernels.rows import layer_norm, rms_norm
from models.checkpoint.weights import Weights
from models.config import Config
from models.sharding import in_halves


class Norm(nn.Module):
    """An RMSNorm, x / rms(x) * weight (Zhang and Sennrich, 2019), or, with a bias, a LayerNorm, (x - mean(x)) / std(x)
    * weight + bias (Ba et al., 2016); it computes in float32, whatever the dtype. `Config.plus_one` is added to the
    weight, which then is float32.

    Args:
        c, weights: the model's configuration and weights.
        name: the name of the norm's vectors; a norm that is not `affine` has ones and zeros instead.
        some: elements of the vectors; None: all.
        eps: the norm's epsilon; None: the model's.
        final: the norm is the last one of the model.
    """

    def __init__(
        self,
        c: Config,
        weights: Weights,
        name: str,
        some: range | None = None,
        *,
        eps: float | None = None,
        final: bool = False,
    ):
        super().__init__()
        plus_one = c.plus_one is True or (c.plus_one == "layers" and not final)
        self.eps = c.norm_eps if eps is None else eps
        self.bias: Tensor | None = None
        if c.affine:
            dtype = torch.float32 if plus_one and c.rms else None  # half precision would round the sum 1 + weight
            self.weight = weights.vector(f"{name}.weight", plus_one=plus_one, some=some, dtype=dtype)
            if not c.rms:
                self.bias = weights.vector(f"{name}.bias") if c.norm_bias else torch.zeros_like(self.weight)
        else:
            self.weight = torch.ones(c.width, dtype=weights.dtype, device=weights.device)
            self.bias = None if c.rms else torch.zeros_like(self.weight)

    def forward(self, x: Tensor, impl: str) -> Tensor:
        """[..., E] -> the same; `impl` is the pass's."""
        if self.bias is None:
            return rms_norm(x, self.weight, self.eps, impl=impl)
        return layer_norm(x, self.weight, self.bias, self.eps, impl=impl)


class PlainNorm(Norm):
    """An RMSNorm of `width` elements without a weight."""

    def __init__(self, c: Config, weights: Weights, width: int):
        nn.Module.__init__(self)
        self.eps, self.bias = c.norm_eps, None
        self.weight = torch.ones(width, dtype=weights.dtype, device=weights.device)


class DividedNorm(Norm):
    """An RMSNorm of rows that are divided among processes; the mean is that of the whole row."""

    def __init__(self, c: Config, weights: Weights, name: str, some: range):
        super().__init__(c, weights, name, some)
        self.shard, self.total = weights.shard, weights.shapes[f"{name}.weight"][0]

    def forward(self, x: Tensor, impl: str) -> Tensor:
        """[..., elements of this process] -> the same shape."""
        x_float = x.float()
        mean = self.shard.sum(x_float.square().sum(-1, keepdim=True)) / self.total
        return (x_float * torch.rsqrt(mean + self.eps) * self.weight.float()).to(x.dtype)


class OwnNorms(Norm):
    """A norm for each head, with its own weight and no bias; the vectors are concatenated.

    Args:
        name: the name of a head's norm, with {} for its number; a name without {} is a tensor with a row per head.
        heads: the heads of this process.
    """

    def __init__(self, c: Config, weights: Weights, name: str, heads: range):
        nn.Module.__init__(self)
        self.eps = c.norm_eps
        if "{}" in name:
            self.weight = torch.cat([weights.vector(f"{name.format(h)}.weight") for h in heads])
        else:
            self.weight = weights.vector(f"{name}.weight", some=heads).flatten()
        self.bias = None if c.rms else torch.zeros_like(self.weight)

    def forward(self, x: Tensor, impl: str) -> Tensor:
        """[T, H, D] -> the same."""
        rows, weights = x.unbind(1), self.weight.chunk(x.shape[1])
        if self.bias is None:
            normed = [rms_norm(row, weight, self.eps, impl=impl) for row, weight in zip(rows, weights, strict=True)]
        else:
            parts = zip(rows, weights, self.bias.chunk(x.shape[1]), strict=True)
            normed = [layer_norm(row, weight, bias, self.eps, impl=impl) for row, weight, bias in parts]
        return torch.stack(normed, 1)


def head_norm(c: Config, weights: Weights, name: str, some: range | None, heads: int) -> Norm:
    """Return the norm of each head, or of all heads together; this process has `some` of its elements.

    Args:
        heads: the number of heads of this process.
    """
    if not c.affine or c.head_norms == "plain":
        return PlainNorm(c, weights, c.head_dim)
    if c.head_norms == "own":
        first = 0 if some is None else some.start // c.head_dim
        norm = OwnNorms(c, weights, name, range(first, first + heads))
    else:
        norm = norm_of_part(c, weights, name, some)
    if c.interleaved:
        order_D = [i for part in in_halves(c) for i in part]
        norm.weight = norm.weight.unflatten(0, (-1, c.head_dim))[:, order_D].flatten()
    return norm


def norm_of_part(c: Config, weights: Weights, name: str, some: range | None) -> Norm:
    """The norm of a row of which this process has `some` elements; None: all."""
    return Norm(c, weights, name) if some is None else DividedNorm(c, weights, name, some)


def rounded(factor: float, dtype: torch.dtype) -> float:
    """Round a factor to a dtype."""
    return torch.tensor(factor, dtype=dtype).item()
