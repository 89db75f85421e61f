"""Norms of rows and of heads."""

import torch
from torch import Tensor, nn

from kernels.rows import layer_norm, rms_norm
from models.checkpoint.weights import Weights
from models.config import Config
from models.sharding import in_halves


class Norm(nn.Module):
    """An RMSNorm, x / rms(x) * weight (Zhang and Sennrich, 2019), or, with a bias, a LayerNorm, (x - mean(x)) / std(x)
    * weight + bias (Ba et al., 2016); float32 inside, whatever the dtype. `Config.plus_one` is part of the weight,
    which then is float32.

    Args:
        c, weights: of the model.
        name: of its vectors; a norm that is not `affine` has ones and zeros for them.
        some: elements of the vectors; None: all.
        eps: of a norm that has another than the model's.
    """

    def __init__(self, c: Config, weights: Weights, name: str, some: range | None = None, *, eps: float | None = None):
        super().__init__()
        self.eps = c.norm_eps if eps is None else eps
        self.bias: Tensor | None = None
        if c.affine:
            dtype = torch.float32 if c.plus_one and c.rms else None  # a sum that half precision would round
            self.weight = weights.vector(f"{name}.weight", plus_one=c.plus_one, some=some, dtype=dtype)
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
    """An RMSNorm of `width` elements that has no weight."""

    def __init__(self, c: Config, weights: Weights, width: int):
        nn.Module.__init__(self)
        self.eps, self.bias = c.norm_eps, None
        self.weight = torch.ones(width, dtype=weights.dtype, device=weights.device)


class DividedNorm(Norm):
    """An RMSNorm of rows of which each process has a part; the mean is that of the whole row."""

    def __init__(self, c: Config, weights: Weights, name: str, some: range):
        super().__init__(c, weights, name, some)
        self.shard, self.total = weights.shard, weights.shapes[f"{name}.weight"][0]

    def forward(self, x: Tensor, impl: str) -> Tensor:
        """[..., elements of this process] -> the same."""
        x_float = x.float()
        mean = self.shard.sum(x_float.square().sum(-1, keepdim=True)) / self.total
        return (x_float * torch.rsqrt(mean + self.eps) * self.weight.float()).to(x.dtype)


class OwnNorms(Norm):
    """A norm for each head, with a weight of its own and no bias; their vectors lie one after the other.

    Args:
        name: of a head's norm, the place of its number is {}; without one, of a tensor with a row of each.
        heads: that this process has.
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
    """The norm of each head, or of all of them, of which this process has `some` elements.

    Args:
        heads: of this process.
    """
    if not c.affine:
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
    """A factor as a number of a dtype."""
    return torch.tensor(factor, dtype=dtype).item()
