"""Short convolutions in plain PyTorch: one gather of all taps."""

import torch
from torch import Tensor

from kernels.tracing import as_wide, register


def short_conv(
    x_TF: Tensor, weight_KE: Tensor, bias_E: Tensor | None, rows_SE: Tensor, slots_T: Tensor, ancestors_TN: Tensor
) -> Tensor:
    """See the front for arguments."""
    b_TE, c_TE, x_TE = x_TF.chunk(3, -1)
    rows_TE, wide = (b_TE * x_TE).to(rows_SE.dtype), torch.promote_types(x_TF.dtype, torch.float32)
    rows_SE.index_copy_(0, slots_T, rows_TE)
    taps = len(weight_KE)
    sum_TE = rows_TE.to(wide) * weight_KE[-1].to(wide)
    if taps > 1:
        path_NTE = rows_SE.index_select(0, ancestors_TN.T.reshape(-1)).view(taps - 1, *rows_TE.shape)
        sum_TE = sum_TE + (path_NTE.to(wide) * weight_KE[:-1].flip(0).to(wide).unsqueeze(1)).sum(0)
    if bias_E is not None:
        sum_TE = sum_TE + bias_E
    return (c_TE * sum_TE).to(x_TF.dtype)


register("short_conv_torch", short_conv, as_wide, mutates=("rows_SE",))
