"""Calls the C++ products (native.cpp)."""

import ctypes
from functools import lru_cache

import torch
from torch import Tensor

from kernels import checks
from kernels.cpp import KINDS, function, why_not
from kernels.custom_ops import register
from kernels.linear.panels import Packed


def linear(x: Tensor, panels: Tensor, scale_O: Tensor | None, bias: Tensor | None, outs: int, width: int) -> Tensor:
    """See the front and `Packed` for arguments."""
    checks.native(x)
    x = x.contiguous()
    out = torch.empty(*x.shape[:-1], outs, dtype=x.dtype)
    matrix = Packed(panels, outs, width, scale_O).described(bias)
    function("linear")(
        *(KINDS[x.dtype], torch.get_num_threads(), ctypes.addressof(matrix)),
        *(x.data_ptr(), out.data_ptr(), x.numel() // width),
    )
    return out


@lru_cache(maxsize=1)
def dot_products() -> frozenset[torch.dtype]:
    """Returns the dtypes of rows for which this processor multiplies packed matrices without a conversion to float32.

    The products of other floats take as long as those of float32, from memory of half the size.
    """
    if why_not():
        return frozenset()
    kinds = ctypes.c_int64()
    function("linear_kinds")(ctypes.addressof(kinds))
    return frozenset(dtype for dtype, kind in (KINDS | {torch.int8: len(KINDS)}).items() if kinds.value >> kind & 1)


def _like(x: Tensor, panels: Tensor, scale_O: Tensor | None, bias: Tensor | None, outs: int, width: int) -> Tensor:
    return x.new_empty(*x.shape[:-1], outs)


register("linear", linear, _like)
