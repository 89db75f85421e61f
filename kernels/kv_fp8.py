"""The definition of an FP8 KV cache: how the rows of a head, of D elements in each of S slots, lie in memory.

    [e e e ... e] x S [scale] x S          S x D e4m3, then S float32: element i of a row is e_i * scale

It is a tensor [..., S, D + 4] in all, but its slots are rows of two views (`planes`): elements lie by themselves, since
a GPU fetches ahead only what is aligned. S * D is a multiple of 4.

The scale of a row is its largest magnitude / 448, e the nearest to the row divided by it, ties to even. All
implementations write the same bits: they multiply by float32 reciprocals of 448 and of the scale, and clamp the
products before they round them. A row that is not finite has a scale of NaN and e = 0; a row whose scale would not be a
normal number is 0. So no e is NaN itself.
"""

import torch
from torch import Tensor

from kernels.kv_int8 import LEAST

DTYPE = torch.float8_e4m3fn
SCALE_BYTES = 4
MOST = 448
PER_STEP = 1 / MOST


def planes(cache: Tensor) -> tuple[Tensor, Tensor]:
    """Views of a contiguous cache [..., S, D + 4]: elements, uint8 [..., S, D], and scales, float32 [..., S, 1]."""
    *_, S, width = cache.shape
    flat, end = cache.view(torch.uint8).flatten(-2), S * (width - SCALE_BYTES)
    return flat[..., :end].unflatten(-1, (S, -1)), flat[..., end:].view(torch.float32).unsqueeze(-1)


def quantise(x_D: Tensor) -> tuple[Tensor, Tensor]:
    """Floats [..., D] -> rows of both planes: uint8 [..., D], float32 [..., 1]."""
    x_D = x_D.float()
    largest = x_D.abs().amax(-1, keepdim=True)
    bad = ~largest.isfinite()
    scale = largest * PER_STEP
    scale = torch.where(scale < LEAST, 0.0, scale)
    inverse = torch.where(scale == 0, 0.0, 1 / scale)
    e_D = (x_D * inverse).clamp(-MOST, MOST).masked_fill(bad, 0.0).to(DTYPE)
    return e_D.view(torch.uint8), scale.masked_fill(bad, float("nan"))


def dequantise(e_D: Tensor, scale: Tensor) -> Tensor:
    """Rows of both planes -> float32 [..., D]."""
    return e_D.view(DTYPE).float() * scale
