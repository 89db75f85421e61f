"""The definition of a row of an FP8 KV cache: D e4m3 elements and a float32 scale; element i is e_i * scale.

The scale of a row is its largest magnitude / 448; e is the row divided by the scale, rounded to the nearest, ties to
even. `kernels.kv_kinds` defines the memory layout.

All implementations write the same bits: they multiply by float32 reciprocals of 448 and of the scale, and clamp the
results before rounding. A row that is not finite has a scale of NaN and e = 0; a row whose scale would not be a
normal number becomes 0. So e itself is never NaN.
"""

import torch
from torch import Tensor

from kernels.kv_int8 import LEAST_SCALE

DTYPE = torch.float8_e4m3fn
LARGEST_NUMBER = 448
PER_STEP = 1 / LARGEST_NUMBER


def quantise(x_D: Tensor) -> tuple[Tensor, Tensor]:
    """Floats [..., D] -> elements as uint8 [..., D], and scales, float32 [..., 1]."""
    x_D = x_D.float()
    largest = x_D.abs().amax(-1, keepdim=True)
    bad = ~largest.isfinite()
    scale = largest * PER_STEP
    scale = torch.where(scale < LEAST_SCALE, 0.0, scale)
    inverse = torch.where(scale == 0, 0.0, 1 / scale)
    e_D = (x_D * inverse).clamp(-LARGEST_NUMBER, LARGEST_NUMBER).masked_fill(bad, 0.0).to(DTYPE)
    return e_D.view(torch.uint8), scale.masked_fill(bad, float("nan"))


def dequantise(e_D: Tensor, scale: Tensor) -> Tensor:
    """Elements and scales -> float32 [..., D]."""
    return e_D.view(DTYPE).float() * scale
