"""The definition of the rows of an int8 KV cache: D int8 and a bfloat16 scale; element i is q_i * scale.

The scale of a row is its largest magnitude / 127, rounded to bfloat16, whose range is that of float32; q is the row
divided by it, rounded to the nearest, ties to even. q * scale is exact in float32. `kernels.kv_kinds` says where they
lie.

All implementations write the same bits. They multiply by float32 reciprocals of 127 and of the scale, and clamp the
products before they round them, so that no compiler joins the two. A row that is not finite has an infinite scale and
q = 0, whose product is NaN; a row whose scale would not be a normal number is 0.
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
