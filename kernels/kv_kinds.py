"""KV caches of any dtype: the memory layout of a head's rows, of D elements in each of S slots.

Float caches store only elements. An 8-bit cache also has a scale per row. Scales follow all elements of the head, so
that rows are aligned, because a GPU prefetches only aligned rows::

    [q q q ... q] x S [scale] x S          S x D of 8 bits, then S scales: element i of a row is q_i * scale

It is a tensor [..., S, D + the bytes of a scale] in all, but its slots are rows of two views (`parts`). S * D is a
multiple of the bytes of a scale. `kernels.kv_int8` and `kernels.kv_fp8` define the numbers.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from kernels import kv_fp8, kv_int8

SCALES = {torch.int8: torch.bfloat16, kv_fp8.DTYPE: torch.float32}  # the dtype of scales, by that of elements
SCALE_BYTES = {dtype: scale.itemsize for dtype, scale in SCALES.items()}


def row_width(head_dim: int, dtype: torch.dtype) -> int:
    """Elements of a row in a cache of this dtype."""
    return head_dim + SCALE_BYTES.get(dtype, 0)


def parts(cache: Tensor) -> tuple[Tensor, ...]:
    """Views of a contiguous cache [..., S, any], in which a slot is a row: the cache itself, or elements [..., S, D],
    FP8 as uint8, and scales [..., S, 1]."""
    if cache.dtype not in SCALES:
        return (cache,)
    *_, S, width = cache.shape
    flat = cache if cache.dtype == torch.int8 else cache.view(torch.uint8)
    flat, end = flat.flatten(-2), S * (width - SCALE_BYTES[cache.dtype])
    return flat[..., :end].unflatten(-1, (S, -1)), flat[..., end:].view(SCALES[cache.dtype]).unsqueeze(-1)


def stored(x_D: Tensor, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Floats [..., D] as rows of the parts of a cache of a dtype."""
    if dtype not in SCALES:
        return (x_D,)
    return kv_int8.quantise(x_D) if dtype == torch.int8 else kv_fp8.quantise(x_D)


def floats(rows: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """Rows of the parts of a cache as floats of a dtype."""
    if len(rows) == 1:
        return rows[0].to(dtype)
    return (kv_int8 if rows[0].dtype == torch.int8 else kv_fp8).dequantise(*rows).to(dtype)
