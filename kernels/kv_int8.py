"""The definition of a row of an int8 KV cache: D int8 elements and a bfloat16 scale; element i is q_i * scale.

The scale of a row is its largest magnitude / 127, rounded to bfloat16, which has float32's range; q is the row divided
by the scale, rounded to the nearest, ties to even. q * scale is exact in float32. `kernels.kv_kinds` defines the memory
layout.

All implementations write the same bits. They multiply by float32 reciprocals of 127 and of the scale, and clamp the
results before rounding, so that no compiler fuses the two. A row that is not finite has an infinite scale and
q = 0, whose product is NaN; a row whose scale would not be a normal number becomes 0.
"""

import torch
from torch import Tensor

PER_STEP = 1 / 127
LEAST_SCALE = 2.0**-126  # the smallest scale that is not 0


def quantise(x_D: Tensor) -> tuple[Tensor, Tensor]:
    """Floats [..., D] -> elements, int8 [..., D], and scales, bfloat16 [..., 1]."""
    x_D = x_D.float()
    largest = x_D.abs().amax(-1, keepdim=True)
    exact = largest * PER_STEP
    scale = torch.where(exact < LEAST_SCALE, 0.0, exact).masked_fill(~largest.isfinite(), float("inf")).bfloat16()
    inverse = torch.where(scale == 0, 0.0, 1 / scale.float())
    q_D = (x_D * inverse).nan_to_num(0.0).clamp(-127, 127).round().to(torch.int8)
    return q_D, scale


def dequantise(q_D: Tensor, scale: Tensor) -> Tensor:
    """Elements and scales -> float32 [..., D]."""
    return q_D.float() * scale.float()
