"""Multiplication of rows by packed matrices: any number of rows; floats, int8, and groups of the kinds of
`panels.GROUP_KINDS`.

`panels.py` has the layout, `reference.py` the definition; only C++ implements it (products.h), on a CPU.
"""

from torch import Tensor

from kernels.checks import expect, floats
from kernels.linear import native
from kernels.linear.native import dot_products, tiles
from kernels.linear.panels import Groups, Packed, Steps, pack, pack_groups
from kernels.linear.parts import PackedParts
from kernels.tracing import watched

__all__ = ["Groups", "Packed", "PackedParts", "Steps", "dot_products", "linear", "pack", "pack_groups", "tiles"]


def linear(x: Tensor, matrix: Packed | PackedParts, bias: Tensor | None = None) -> Tensor:
    """x W^T + b; rows are rounded if the matrix has levels (`reference.rounded`) or steps (`reference.round_to`).

    A row's result does not depend on the other rows.

    Args:
        x: [..., width], float32, bfloat16 or float16, on a CPU.
        matrix: of any dtype, or several with concatenated outputs.
        bias: [outs] or None, contiguous, in the dtype of x.

    Raises:
        ValueError: tensors that do not fit together.
    """
    floats("x", x)
    if x.shape[-1] != matrix.width:
        raise ValueError(f"x: expected a width of {matrix.width}, got {list(x.shape)}")
    if bias is not None:
        expect("bias", bias, x.dtype, (matrix.outs,), x.device)
    return (native.opaque_linear if watched() else native.linear)(x, matrix, bias)
