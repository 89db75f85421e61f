"""What two families use: norms, activations, the shape of a model."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from kernels.rows import activation, layer_norm, rms_norm, silu_mul
from kernels.stack import Layer as StackLayer
from kernels.stack import Norm, Stack
from models.fields import Fields

ACTIVATIONS = {  # to the names of `kernels.rows.activation`
    "silu": "silu",
    "swish": "silu",
    "relu": "relu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "quick_gelu": "quick_gelu",
    "tanh": "tanh",
}


@dataclass(frozen=True)
class ModelShape:
    """What the engine needs to know of any model.

    Args:
        layers, kv_heads, head_dim, vocab_size: dimensions.
        max_positions: longest sequence the checkpoint is made for; None: no limit.
        steady_length: keys of sequences longer than this depend on how long the sequence was when they were computed,
            so that a longer prompt cannot take them over; None: they never do.
        scores: a scalar head: the model scores texts and generates none.
        switch_length: sequences longer than this use other rotary factors throughout (longrope), so that a path which
            grows past it is evaluated afresh; None: they never do.
    """

    layers: int
    kv_heads: int
    head_dim: int
    vocab_size: int
    max_positions: int | None
    steady_length: int | None = None
    scores: bool = False
    switch_length: int | None = None

    def kv_bytes_per_token(self, dtype: torch.dtype) -> int:
        """Bytes that one token's keys and values take in all layers."""
        return 2 * self.layers * self.kv_heads * self.head_dim * dtype.itemsize


def architecture(fields: Fields) -> str:
    """The first of the config's architectures, checked by `Checkpoint.architecture`."""
    return str((fields.config.get("architectures") or [""])[0])


def has_scalar_head(fields: Fields) -> bool:
    """Whether the config is of a `...ForSequenceClassification`: a reward model, which scores the text so far."""
    return architecture(fields).endswith("ForSequenceClassification")


def head_shape(scores: bool, vocab_size: int, width: int) -> dict[str, tuple[int, ...]]:
    """Name and shape of the last matrix: one score, or a logit per token."""
    return {"score.weight": (1, width)} if scores else {"lm_head.weight": (vocab_size, width)}


def gated(name: str) -> Callable[..., Tensor]:
    """The middle of a gated MLP, (x [N, 2M], impl=...) -> [N, M]: the first half, activated, times the second."""
    if name == "silu":
        return silu_mul

    def middle(x_NM: Tensor, *, impl: str) -> Tensor:
        gate, up = x_NM.chunk(2, -1)
        return activation(gate, name, impl=impl) * up

    return middle


def stacked(
    layers: Iterable[tuple[Any, ...]],
    norm: "RMSNorm | LayerNorm",
    shape: ModelShape,
    heads: int,
    activation: str,
    *,
    gated: bool = False,
    scale: float | None = None,
    window: int | None = None,
) -> Stack | None:
    """The layers of a model as one call for steps of few rows; None where that has no operators.

    Args:
        layers: of each the norms before attention and before the MLP (None: it reads what attention reads), then the
            linear layers: to queries, keys and values, out of attention, into the MLP, out of it.
        norm: after them.
        shape, heads: of the model; of queries.
        activation, gated: of the MLP, see `gated`.
        scale, window: of attention; None: 1 / sqrt(head size), and no window.
    """
    if gated and activation != "silu":
        return None
    told = []
    for attention_norm, mlp_norm, *linears in layers:
        matrices = [linear.matrix for linear in linears]
        if None in matrices:
            return None
        told.append(StackLayer(attention_norm.vectors, mlp_norm and mlp_norm.vectors, *matrices))
    return Stack(
        told,
        norm.vectors,
        activation=None if gated else activation,
        heads=heads,
        kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        eps=norm.eps,
        scale=shape.head_dim**-0.5 if scale is None else scale,
        window=window,
    )


class RMSNorm(nn.Module):
    """x / rms(x) * weight; float32 inside, whatever the dtype (Zhang and Sennrich, 2019)."""

    def __init__(self, weight: Tensor, eps: float):
        super().__init__()
        self.weight, self.eps = weight, eps

    @property
    def vectors(self) -> Norm:
        """For a stack."""
        return Norm(self.weight)

    def forward(self, x: Tensor, impl: str) -> Tensor:
        """[..., E] -> the same; `impl` is the pass's."""
        return rms_norm(x, self.weight, self.eps, impl=impl)


class LayerNorm(nn.Module):
    """(x - mean(x)) / std(x) * weight + bias; float32 inside, whatever the dtype (Ba et al., 2016)."""

    def __init__(self, weight: Tensor, bias: Tensor, eps: float):
        super().__init__()
        self.weight, self.bias, self.eps = weight, bias, eps

    @property
    def vectors(self) -> Norm:
        """For a stack."""
        return Norm(self.weight, self.bias)

    def forward(self, x: Tensor, impl: str) -> Tensor:
        """[..., E] -> the same; `impl` is the pass's."""
        return layer_norm(x, self.weight, self.bias, self.eps, impl=impl)
