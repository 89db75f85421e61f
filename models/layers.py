"""What two families use: norms, activations, the shape of a model."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from kernels.rows import rms_norm, silu_mul
from kernels.stack import Layer as StackLayer
from kernels.stack import Stack
from models.fields import Fields

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "swish": F.silu,
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_new": lambda x: F.gelu(x, approximate="tanh"),
    "gelu_pytorch_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "gelu_fast": lambda x: F.gelu(x, approximate="tanh"),
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
    "tanh": torch.tanh,
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


def gated(activation: str) -> Callable[..., Tensor]:
    """The middle of a gated MLP, (x [N, 2M], impl=...) -> [N, M]: the first half, activated, times the second."""
    if activation in ("silu", "swish"):
        return silu_mul
    run = ACTIVATIONS[activation]

    def middle(x_NM: Tensor, *, impl: str) -> Tensor:
        gate, up = x_NM.chunk(2, -1)
        return run(gate) * up

    return middle


def stacked(layers: Iterable[Any], norm: "RMSNorm", config: Any) -> Stack | None:
    """The layers of a Llama or Phi-3 as one call for steps of few rows; None where that has no operators.

    Args:
        layers: `LlamaLayer` or `Phi3Layer`.
        norm: after them.
        config: of the model.
    """
    told = []
    for layer in layers:
        matrices = [linear.matrix for linear in (layer.qkv, layer.out, layer.gate_up, layer.down)]
        if None in matrices or layer.gate is not silu_mul:
            return None
        told.append(StackLayer(layer.attention_norm.weight, layer.mlp_norm.weight, *matrices))
    sizes = {"heads": config.heads, "kv_heads": config.kv_heads, "head_dim": config.head_dim}
    return Stack(told, norm.weight, **sizes, eps=norm.eps, window=config.window)


class RMSNorm(nn.Module):
    """x / rms(x) * weight; float32 inside, whatever the dtype (Zhang and Sennrich, 2019)."""

    def __init__(self, weight: Tensor, eps: float):
        super().__init__()
        self.weight, self.eps = weight, eps

    def forward(self, x: Tensor, impl: str) -> Tensor:
        """[..., E] -> the same; `impl` is the pass's."""
        return rms_norm(x, self.weight, self.eps, impl=impl)


class LayerNorm(nn.Module):
    """(x - mean(x)) / std(x) * weight + bias; float32 inside, whatever the dtype (Ba et al., 2016)."""

    def __init__(self, weight: Tensor | None, bias: Tensor | None, eps: float):
        super().__init__()
        self.weight, self.bias, self.eps = weight, bias, eps

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, x.shape[-1:], self.weight, self.bias, self.eps)
