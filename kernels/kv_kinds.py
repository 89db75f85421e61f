"""What operators and pools ask of a KV cache of any dtype: the size of its rows, views whose rows are slots, floats.

Floats lie as they are; `kernels.kv_int8` and `kernels.kv_fp8` define the others.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from kernels import kv_fp8, kv_int8

SCALE_BYTES = {torch.int8: kv_int8.SCALE_BYTES, kv_fp8.DTYPE: kv_fp8.SCALE_BYTES}  # of a row


def row_width(head_dim: int, dtype: torch.dtype) -> int:
    """Elements of a row in a cache of this dtype."""
    return head_dim + SCALE_BYTES.get(dtype, 0)


def parts(cache: Tensor) -> tuple[Tensor, ...]:
    """Views of a contiguous cache [..., S, any], in which a slot is a row."""
    return kv_fp8.planes(cache) if cache.dtype == kv_fp8.DTYPE else (cache,)


def stored(x_D: Tensor, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Floats [..., D] as rows of the parts of a cache of a dtype."""
    if dtype == kv_fp8.DTYPE:
        return kv_fp8.quantise(x_D)
    return (kv_int8.quantise(x_D),) if dtype == torch.int8 else (x_D,)


def floats(rows: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """Rows of the parts of a cache as floats of a dtype."""
    if len(rows) == 2:
        return kv_fp8.dequantise(*rows).to(dtype)
    return (kv_int8.dequantise(rows[0]) if rows[0].dtype == torch.int8 else rows[0]).to(dtype)
