"""Linear layers: the interface of weight formats, and their registry."""

from collections.abc import Iterable, Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

from kernels.linear import Packed, PackedParts
from kernels.stack import Matrix
from models.formats import FORMATS, NAMES
from models.formats.floats import FloatLinear, PackedLinear
from models.formats.int4 import Int4
from models.formats.int8 import Int8Linear


class Linear(Protocol):
    """y = x W^T + b with one weight or several stacked weights that share their input (such as query, key, value)."""

    bias: Tensor | None
    names: Sequence[str]  # names of the checkpoint's tensors
    made_of: Sequence[str]  # transformers' names, as in the model's table of names

    @property
    def matrix(self) -> Matrix | None:
        """The matrix for the native stack of layers; None: the stack has no product for it."""

    def __call__(self, x: Tensor) -> Tensor:
        """[..., in] -> [..., sum of outs]."""
        ...

    def rows(self, ids_U: Tensor) -> "Linear | None":
        """Return a layer of these outputs only, int64, in their order; None if the weights' form does not allow it."""


class Joined(nn.Module):
    """Layers that share an input and concatenate their outputs, see `Linear`: for matrices stored in different ways."""

    bias: Tensor | None = None
    names: Sequence[str]
    made_of: Sequence[str] = ()
    matrix: Matrix | None

    def __init__(self, layers: Sequence[Linear]):
        super().__init__()
        self.layers = nn.ModuleList(layers)  # type: ignore[arg-type]
        self.names = [name for layer in layers for name in layer.names]
        self.matrix = _joined([layer.matrix for layer in layers])

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] -> [..., sum of outs]."""
        return torch.cat([layer(x) for layer in self.layers], -1)

    def rows(self, ids_U: Tensor) -> None:
        """See `Linear`."""


def _joined(matrices: Sequence[Matrix | None]) -> Matrix | None:
    """Stack matrices into one; None: the stack has no product for one of them, or only some have biases."""
    parts, biases = list[Packed](), list[Tensor]()
    for matrix in matrices:
        if matrix is None:
            return None
        parts += matrix.packed.parts if isinstance(matrix.packed, PackedParts) else [matrix.packed]
        biases += [] if matrix.bias is None else [matrix.bias]
    if len(biases) not in (0, len(matrices)):
        return None
    return Matrix(PackedParts(parts), torch.cat(biases) if biases else None)


class Format(Protocol):
    """A way to keep weights: a class of linear layers, whose instances are `Linear` and modules."""

    def __call__(
        self,
        weights: Iterable[Tensor],
        biases: Sequence[Tensor] | None = None,
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> Linear:
        """Pack a layer.

        Args:
            weights: [out, in] each, in the checkpoint's dtype, usually memory-mapped. Those of an iterator are released
                as soon as they are copied.
            biases: one [out] per weight, or None for all.
            dtype, device: the dtype and device of the computation.
        """
        ...

    def why_not(self, device: torch.device) -> str | None:
        """Return why it cannot run on this machine; None if it can."""

    def bytes(self, outs: int, width: int, own: set[torch.dtype], dtype: torch.dtype, device: torch.device) -> int:
        """Return the bytes that a matrix [outs, width] will take, without its bias.

        Args:
            own: dtypes of the weights in the checkpoint.
            dtype, device: the dtype and device of the computation.
        """
        ...


_KINDS: list[Format] = [
    FloatLinear,
    Int8Linear,
    Int4(),
    Int4(head=True),
    Int4(64),
    Int4(128),
    Int4(32, zeros=True),
    Int4(64, zeros=True),
    Int4(128, zeros=True),
]
FORMATS |= zip(NAMES, _KINDS, strict=True)


def is_small(layer: Linear, dtype: torch.dtype) -> bool:
    """Whether a layer rounds by more than 11 bits: it computes in half precision, or its weights are quantised."""
    if dtype.itemsize < torch.float32.itemsize:
        return True
    packed = getattr(layer, "packed", None) if layer.matrix is None else layer.matrix.packed
    return isinstance(packed, PackedParts) or (packed is not None and not packed.panels.dtype.is_floating_point)


def rounds_rows(model: nn.Module) -> bool:
    """Whether a matrix of a model multiplies rows rounded to 8 bits."""
    return any(isinstance(layer, PackedLinear) and layer.rounds for layer in model.modules())


def format_of(quant: str, outs: int, *, head: bool = False) -> str:
    """Return the format of a matrix with `outs` outputs, in a model whose format is `quant`.

    A scalar head is not quantised, because that saves nothing and loses the most; the head's matrix has 8 bits if
    others have 4, except in formats that name the head.
    """
    if outs == 1:
        return "none"
    kept = FORMATS[quant]
    return "int8" if head and isinstance(kept, Int4) and not kept.head else quant
