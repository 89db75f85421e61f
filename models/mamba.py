"""A Mamba layer (Gu and Dao, 2023): the matrices around and between the operators of `kernels.channel_scan`.

Shape legend: K states of a channel, C channels.
"""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from kernels.channel_scan import ChannelWeights
from kernels.layout import ChannelKind
from kernels.stack.calls import Call
from models.checkpoint.weights import Weights
from models.config import Config, Recurrent
from models.names import Names
from models.norms import Norm, PlainNorm


class Mamba(nn.Module):
    """A scan by channels over the ancestors of tokens, instead of attention.

    Attributes:
        weights: its own, float32 whatever the model's dtype.
    """

    def __init__(self, c: Config, names: Names, weights: Weights, recurrent: Recurrent, kind: ChannelKind, index: int):
        super().__init__()
        layer = names.layer.format(index)
        self.into = weights.linear(*(layer + name for name in names.recurrent_in), bias=recurrent.bias)
        self.low = weights.linear(layer + names.scan_low)
        self.step = weights.linear(layer + names.scan_step)
        self.out = weights.linear(layer + names.recurrent_out, bias=recurrent.bias)

        def vector(name: str) -> Tensor:
            return weights.vector(layer + name).float()

        taps_KC = vector(names.delta_taps).squeeze(1).T.contiguous()
        shift_C = vector(names.scan_shift) if recurrent.conv_bias else taps_KC.new_zeros(kind.channels)
        rates_KC = weights.decays(layer + names.delta_decay).T.contiguous()
        bias_C, skip_C = vector(f"{names.scan_step}.bias"), vector(names.scan_skip)
        eps, norms_E = c.norm_eps if recurrent.eps is None else recurrent.eps, None
        self.norm: Norm | None = None
        if recurrent.part_norms == "plain":
            self.norm, norms_E = PlainNorm(c, weights, recurrent.rank), skip_C.new_ones(2 * kind.key_size)
            self.norm.eps = eps
        elif recurrent.part_norms:
            first, *others = names.scan_norms
            self.norm = Norm(c, weights, layer + first, eps=eps)
            norms_E = torch.cat([vector(f"{name}.weight") for name in others])
        vectors = taps_KC, shift_C, rates_KC, bias_C, skip_C, norms_E
        self.weights = ChannelWeights(kind, recurrent.rank, *vectors, eps)
        self.place = c.place(index)

    def calls(self, source: str) -> Iterator[Call]:
        """The calls from the register `source` to "out"."""
        yield Call("product", source, "gates", matrix=self.into)
        yield Call("channel_conv", "gates", "convolved", delta=self, table=self.place)
        yield Call("product", "convolved", "low", matrix=self.low)
        yield Call("part", "low", "queries", delta=self)
        if self.norm is not None:
            yield Call("norm", "queries", "queries", norm=self.norm)
        yield Call("product", "queries", "steps", matrix=self.step)
        yield Call("channel_scan", "gates", "convolved", delta=self, table=self.place)
        yield Call("product", "convolved", "out", matrix=self.out)
