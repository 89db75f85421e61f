"""The definition of multiplication by packed matrices."""

import torch
from torch import Tensor
from torch.nn import functional as F

from kernels.linear.panels import (
    ABOVE,
    FIELDS,
    GROUP_STEPS,
    NIBBLES,
    ROUNDED,
    ROUNDED_UNGROUPED,
    Packed,
    default_zero,
    numbers,
)


def unpack(matrix: Packed) -> Tensor:
    """Elements [outs, width] in the packed dtype; the codes of groups, uint8."""
    rows = matrix.panels.transpose(1, 2).flatten(2).flatten(0, 1)[: matrix.outs]
    if matrix.groups is not None:
        kind = matrix.groups.kind
        if bits := FIELDS.get(kind):
            places = torch.arange(0, 8, bits, dtype=torch.uint8).unsqueeze(1)
            rows = (rows.unflatten(1, (-1, 1, 4)) >> places & (1 << bits) - 1).flatten(1)
        elif kind in (*NIBBLES, *ABOVE):
            lines = rows.unflatten(1, (-1, GROUP_STEPS[kind][1], 4))
            low = lines[:, :, :-1] if kind in ABOVE else lines
            rows = torch.stack([low & 15, low >> 4], 3).flatten(2, 3)
            if bits := ABOVE.get(kind):
                places = torch.arange(0, 8, bits, dtype=torch.uint8).unsqueeze(1)
                rows = rows | (lines[:, :, -1:] >> places & (1 << bits) - 1) << 4
            rows = rows.flatten(1)
        return rows[:, : matrix.width]
    rows = rows[:, : matrix.width]
    return (rows.int() - 128).to(torch.int8) if matrix.dtype == torch.int8 else rows


def unpacked(matrix: Packed) -> Tensor:
    """The values of the elements, [outs, width], columns as those of x: floats in their dtype, others in float32."""
    weight_OI, groups = unpack(matrix), matrix.groups
    if groups is not None:
        zero = default_zero(groups.kind, groups.least is not None)
        scales, zeros, leasts = groups.values()
        weight_OI = (numbers(groups.kind, weight_OI) - _spread(matrix, zeros, zero)) * _spread(matrix, scales)
        weight_OI += _spread(matrix, leasts)
    elif matrix.scale_O is not None:
        weight_OI = weight_OI * (matrix.scale_O * matrix.levels).unsqueeze(1)
    return _ordered(weight_OI, matrix)


def _ordered(weight_OI: Tensor, matrix: Packed) -> Tensor:
    """Columns as those of x."""
    if matrix.order_I is None:
        return weight_OI
    return torch.empty_like(weight_OI).index_copy_(1, matrix.order_I.long(), weight_OI)


def _spread(matrix: Packed, x: Tensor | None, default: float = 0.0) -> Tensor:
    """Values [panels, groups, 16] of groups to every element, [outs, width], float32; `default` if there are none."""
    assert matrix.groups is not None
    if x is None:
        return torch.full((matrix.outs, 1), default)
    of_rows = x.transpose(1, 2).flatten(0, 1)[: matrix.outs]
    return of_rows.repeat_interleave(matrix.groups.size, 1)[:, : matrix.width]


def quantize(x: Tensor, levels: float = 127) -> tuple[Tensor, Tensor]:
    """Rows in steps of 1 / levels of their largest magnitude, to the nearest, ties to even.

    Args:
        x: [..., in]. A row of zeros has undefined steps.
        levels: 127, or 127.5, whose largest steps are -128 and 127.

    Returns:
        Whole steps and the largest magnitudes [..., 1], float32.
    """
    x = x.float()
    top = x.abs().amax(-1, keepdim=True)
    return (x / (top / levels)).round_().clamp_(max=int(levels)), top


def rounded(x: Tensor, levels: float, group: int, together: int) -> Tensor:
    """Rows [..., in], each `together` elements rounded by their largest magnitude, counted from the beginning of each
    `group` elements of a row; float64."""
    width = x.shape[-1]
    x = _split(_split(x, group), together)
    steps, top = quantize(x, levels)
    found = torch.where(top > 0, steps.double() * (top.double() / levels), top.double())
    return found.flatten(-2)[..., :group].flatten(-2)[..., :width]


def rounded_by_row(x: Tensor, levels: float) -> Tensor:
    """Rows [..., in], rounded by their largest magnitude, 1e-5 at least, as in BitNet (Ma et al., 2024); float64.

    Steps are found in float32 by the product with levels / magnitude, as in transformers.
    """
    x = x.float()
    steps_by = levels / x.abs().amax(-1, keepdim=True).clamp(min=1e-5)
    return (x * steps_by).round_().clamp_(max=int(levels)).double() / steps_by.double()


def round_to(x: Tensor, step: float) -> Tensor:
    """The nearest of -128 to 127 times `step`, found in float32, or float64 for float64; 0: x."""
    if not step:
        return x
    whole = (x if x.dtype == torch.float64 else x.float()) / step
    return (whole.round_().clamp_(-128, 127) * step).to(x.dtype)


def _split(x: Tensor, size: int) -> Tensor:
    """[..., any] -> [..., parts, size], with zeros at the end."""
    return F.pad(x, (0, -x.shape[-1] % size)).unflatten(-1, (-1, size))


def linear(x: Tensor, matrix: Packed, bias: Tensor | None = None) -> Tensor:
    """x W^T + b, rounded to the dtype of x at the end; arguments as of `kernels.linear.linear`."""
    x = round_to(x, matrix.steps.before)
    exact = not matrix.levels or matrix.steps.before
    y = F.linear(x.double(), unpacked(matrix).double()) if exact else _rounded_product(x, matrix)
    return round_to((y if bias is None else y + bias).to(x.dtype), matrix.steps.after)


def _rounded_product(x: Tensor, matrix: Packed) -> Tensor:
    """The same by rounded rows, which lie in the order of the matrix; float64."""
    groups, order_I, scale_O = matrix.groups, matrix.order_I, matrix.scale_O
    group, together = (matrix.width, ROUNDED_UNGROUPED) if groups is None else (groups.size, ROUNDED)
    x = x if order_I is None else x[..., order_I.long()]
    row = rounded_by_row(x, matrix.levels) if matrix.by_row else rounded(x, matrix.levels, group, together)
    if scale_O is not None:
        return F.linear(row, unpack(matrix).double()) * (scale_O.double() * matrix.levels)
    weight_OI = unpacked(matrix).double()
    return F.linear(row, weight_OI if order_I is None else weight_OI[:, order_I.long()])
