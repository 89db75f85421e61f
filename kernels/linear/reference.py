"""The definition of products with packed matrices."""

import torch
from torch import Tensor
from torch.nn import functional as F

from kernels.linear.panels import Packed


def unpack(matrix: Packed) -> Tensor:
    """Elements [outs, width] in the packed dtype."""
    rows = matrix.panels.transpose(1, 2).flatten(2).flatten(0, 1)[: matrix.outs, : matrix.width]
    return (rows.int() - 128).to(torch.int8) if matrix.dtype == torch.int8 else rows


def unpacked(matrix: Packed) -> Tensor:
    """What the elements stand for: floats in their dtype, or int8 times their scales in float32."""
    weight_OI = unpack(matrix)
    return weight_OI if matrix.scale_O is None else weight_OI * (matrix.scale_O * 127).unsqueeze(1)


def quantize(x: Tensor) -> tuple[Tensor, Tensor]:
    """Rows in steps of 1 / 127 of their largest magnitude, rounded.

    Args:
        x: [..., in]. A row of zeros has undefined steps.

    Returns:
        uint8 steps, 128 standing for 0, and the largest magnitudes [..., 1] in the dtype of x.
    """
    steps = x.to(torch.float32, copy=True)
    top = steps.abs().amax(-1, keepdim=True)
    return steps.mul_(127 / top).add_(128.5).int().to(torch.uint8), top.to(x.dtype)


def linear(x: Tensor, matrix: Packed, bias: Tensor | None = None) -> Tensor:
    """x W^T + b, rounded to the dtype of x at the end; arguments as of `kernels.linear.linear`."""
    weight_OI = unpack(matrix)
    if matrix.scale_O is None:
        y = F.linear(x.double(), weight_OI.double())
    else:
        steps, top = quantize(x)
        y = F.linear(steps.double() - 128, weight_OI.double()) * matrix.scale_O * top
    return (y if bias is None else y + bias).to(x.dtype)
