"""Calls the C++ matrix multiplications (native.cpp, products.h)."""

import ctypes
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, cast

import torch
from torch import Tensor

from kernels import checks
from kernels.cpp import KINDS, function, why_not
from kernels.linear.panels import GroupKind, Groups, Packed, Steps
from kernels.linear.parts import PackedParts
from kernels.tracing import register


def linear(x: Tensor, matrix: Packed | PackedParts, bias: Tensor | None) -> Tensor:
    """See the front for arguments."""
    checks.native(x)
    x = x.contiguous()
    out = torch.empty(*x.shape[:-1], matrix.outs, dtype=x.dtype)
    described = matrix.described(bias)
    function("linear")(
        *(KINDS[x.dtype], torch.get_num_threads(), ctypes.addressof(described)),
        *(x.data_ptr(), out.data_ptr(), x.numel() // matrix.width),
    )
    return out


def dot_products() -> frozenset[torch.dtype]:
    """Returns the dtypes of rows for which this processor multiplies packed matrices without a conversion to float32.

    The products of other floats take as long as those of float32, from memory of half the size.
    """
    return frozenset(dtype for dtype, kind in (KINDS | {torch.int8: len(KINDS)}).items() if _kinds() >> kind & 1)


def tiles() -> bool:
    """Returns whether tiles multiply bfloat16 and int8: those of AMX, if Linux lets this process use them."""
    return bool(_kinds() >> 8 & 1)


@lru_cache(maxsize=1)
def _kinds() -> int:
    if why_not():
        return 0
    kinds = ctypes.c_int64()
    function("linear_kinds")(ctypes.addressof(kinds))
    return kinds.value


def _linear(
    x: Tensor,
    panels: Tensor,
    scale: Tensor | None,
    zero: Tensor | None,
    least: Tensor | None,
    unit: Tensor | None,
    least_unit: Tensor | None,
    order_I: Tensor | None,
    bias: Tensor | None,
    kind: str,
    sizes: Sequence[int],
    levels: float,
    steps: Sequence[float],
) -> Tensor:
    outs, width, group, by_row = sizes
    groups = Groups(cast(GroupKind, kind), group, cast(Tensor, scale), zero, least, unit, least_unit) if group else None
    scale_O = None if group else scale
    options: dict[str, Any] = {"groups": groups, "order_I": order_I, "levels": levels, "by_row": bool(by_row)}
    return linear(x, Packed(panels, outs, width, scale_O, **options, steps=Steps(*steps)), bias)


def opaque_linear(x: Tensor, matrix: Packed | PackedParts, bias: Tensor | None = None) -> Tensor:
    """`linear` as an operator of tensors and numbers, see `kernels.tracing`."""
    if isinstance(matrix, PackedParts):
        parts = zip(matrix.parts, matrix.biases(bias), strict=True)
        return torch.cat([opaque_linear(x, part, own) for part, own in parts], -1)
    groups = matrix.groups
    kind, size, *tensors = ("", 0, matrix.scale_O, *(None,) * 4) if groups is None else groups
    sizes = [matrix.outs, matrix.width, size, int(matrix.by_row)]
    rounding = float(matrix.levels), [*map(float, matrix.steps)]
    return torch.ops.coppice.linear(x, matrix.panels, *tensors, matrix.order_I, bias, kind, sizes, *rounding)


def _like(x: Tensor, panels, scale, zero, least, unit, least_unit, order_I, bias, kind, sizes, levels, steps) -> Tensor:
    return x.new_empty(*x.shape[:-1], sizes[0])


register("linear", _linear, _like)
