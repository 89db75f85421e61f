"""The weights of multi-head latent attention, as C++ and the definition take them."""

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from kernels.checks import expect
from kernels.cpp import OPERATORS
from kernels.layout import LatentSizes
from kernels.stack import Matrix

Product = Callable[[Tensor], Tensor]  # of rows and a matrix


class LatentHeads:
    """The weights of a layer.

    Args:
        norm_C: the weight of the latent's RMSNorm.
        keys: products with the matrices [C, N] of heads, the transposed ones of keys.
        values: products with the matrices [V, C] of heads.
        matrices: the same, packed for C++, keys and then values; None: it multiplies none of them.

    Raises:
        ValueError: weights that do not fit together.
    """

    def __init__(
        self,
        sizes: LatentSizes,
        norm_C: Tensor,
        keys: Sequence[Product],
        values: Sequence[Product],
        matrices: Sequence[Matrix] | None = None,
    ):
        self.sizes, self.norm_C, self.keys, self.values, self.matrices = sizes, norm_C, keys, values, matrices
        if {len(keys), len(values)} != {sizes.heads} or sizes.rotated % 2:
            raise ValueError(f"expected {sizes.heads} matrices of keys and of values, got {len(keys), len(values)}")
        expect("norm_C", norm_C, norm_C.dtype, (sizes.rank,), norm_C.device)
        shapes = [(sizes.rank, sizes.plain)] * sizes.heads + [(sizes.value, sizes.rank)] * sizes.heads
        for (packed, _), shape in zip(matrices or (), shapes, strict=matrices is not None):
            if (packed.outs, packed.width) != shape:
                raise ValueError(f"expected a matrix {[*shape]}, got {[packed.outs, packed.width]}")

    def described(self) -> ctypes.Structure:
        """For C++; valid as long as this object lives. Raises ValueError without packed matrices."""
        if self.matrices is None:
            raise ValueError("cpp: expected packed matrices")
        if not hasattr(self, "_described"):
            kind: Any = OPERATORS.structures["Matrix"] * len(self.matrices)
            self._chain = kind(*(matrix.packed.described(matrix.bias) for matrix in self.matrices))
            place, size, sizes = ctypes.addressof(self._chain), ctypes.sizeof(self._chain) // 2, self.sizes
            self._described = OPERATORS.structures["Latent"](
                *(sizes.heads, sizes.plain, sizes.rotated, sizes.rank, sizes.value, sizes.interleaved),
                self.norm_C.data_ptr(),
                place,
                place + size,
                sizes.eps,
            )
        return self._described
