"""The definition of an int8 KV cache: how the row of a head, its D elements for one token, lies in memory.

    [q q q ... q][scale]          D int8, then a bfloat16 in two bytes: a row of D + 2, element i is q_i * scale

The scale of a row is its largest magnitude / 127, rounded to bfloat16, whose range is that of float32; q is the row
divided by it, rounded to the nearest, ties to even. q * scale is exact in float32. A scale lies beside its elements, so
that slots are copied as those of any other cache, and a row is read from one place.

All implementations write the same bits. They multiply by float32 reciprocals of 127 and of the scale, and clamp the
products before they round them, so that no compiler joins the two. A row that is not finite has an infinite scale and
q = 0, whose product is NaN; a row whose scale would not be a normal number is 0.
"""

import torch
from torch import Tensor

SCALE_BYTES = 2
PER_STEP = 1 / 127
LEAST = 2.0**-126  # the smallest scale that is not 0


def quantise(x_D: Tensor) -> Tensor:
    """Floats [..., D] -> rows of an int8 cache [..., D + 2]."""
    x_D = x_D.float()
    largest = x_D.abs().amax(-1, keepdim=True)
    exact = largest * PER_STEP
    scale = torch.where(exact < LEAST, 0.0, exact).masked_fill(~largest.isfinite(), float("inf")).bfloat16()
    inverse = torch.where(scale == 0, 0.0, 1 / scale.float())
    q_D = (x_D * inverse).nan_to_num(0.0).clamp(-127, 127).round().to(torch.int8)
    return torch.cat([q_D, scale.view(torch.int8)], -1)


def dequantise(rows: Tensor) -> Tensor:
    """Rows of an int8 cache [..., D + 2] -> float32 [..., D]."""
    scale = rows[..., -SCALE_BYTES:].clone(memory_format=torch.contiguous_format).view(torch.bfloat16)
    return rows[..., :-SCALE_BYTES].float() * scale.float()
