"""The weights of multi-head latent attention, as C++ and the definition take them."""

import ctypes
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

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

    Attributes:
        stacked: on a device, the matrices of all heads as one tensor, of keys [H, N, C] and of values [H, V, C].

    Raises:
        ValueError: weights that do not fit together.
    """

    stacked: tuple[Tensor, Tensor] | None = None

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

    @classmethod
    def of_stacked(cls, sizes: LatentSizes, norm_C: Tensor, keys_HNC: Tensor, values_HVC: Tensor) -> "LatentHeads":
        """Heads whose matrices are multiplied together. Raises ValueError for weights that do not fit together."""
        expect("keys_HNC", keys_HNC, norm_C.dtype, (sizes.heads, sizes.plain, sizes.rank), norm_C.device)
        expect("values_HVC", values_HVC, norm_C.dtype, (sizes.heads, sizes.value, sizes.rank), norm_C.device)
        keys, values = ([partial(F.linear, weight=x) for x in xs] for xs in (keys_HNC.transpose(1, 2), values_HVC))
        found = cls(sizes, norm_C, keys, values)
        found.stacked = keys_HNC, values_HVC
        return found

    def by_keys(self, q_THN: Tensor, out_THC: Tensor) -> None:
        """Multiply what is not rotated of queries by the matrices of keys, into a tensor of any strides."""
        if self.stacked is None:
            torch.stack([key(q_TN) for key, q_TN in zip(self.keys, q_THN.unbind(1), strict=True)], 1, out=out_THC)
        else:
            torch.bmm(q_THN.transpose(0, 1), self.stacked[0], out=out_THC.transpose(0, 1))

    def by_values(self, c_THC: Tensor) -> Tensor:
        """Multiply sums of latents by the matrices of values: [T, H, V]."""
        if self.stacked is None:
            return torch.stack([value(c_TC) for value, c_TC in zip(self.values, c_THC.unbind(1), strict=True)], 1)
        out_THV = torch.empty(*c_THC.shape[:2], self.sizes.value, dtype=c_THC.dtype, device=c_THC.device)
        torch.bmm(c_THC.transpose(0, 1), self.stacked[1].transpose(1, 2), out=out_THV.transpose(0, 1))
        return out_THV

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
