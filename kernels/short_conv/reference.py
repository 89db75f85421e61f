"""The definition of a short convolution over a tree: token by token."""

import torch
from torch import Tensor


def short_conv(
    x_TF: Tensor, weight_KE: Tensor, bias_E: Tensor | None, rows_SE: Tensor, slots_T: Tensor, ancestors_TN: Tensor
) -> Tensor:
    """See the front for arguments."""
    b_TE, c_TE, x_TE = x_TF.chunk(3, -1)
    rows_SE[slots_T] = (b_TE * x_TE).to(rows_SE.dtype)
    wide = torch.promote_types(x_TF.dtype, torch.float32)
    out_TE = torch.empty_like(x_TE, memory_format=torch.contiguous_format)
    for t, slot in enumerate(slots_T.tolist()):
        path_KE = rows_SE[[*reversed(ancestors_TN[t].tolist()), slot]]  # the earliest first
        sum_E = (path_KE.to(wide) * weight_KE.to(wide)).sum(0)
        if bias_E is not None:
            sum_E = sum_E + bias_E
        out_TE[t] = c_TE[t] * sum_E
    return out_TE
