"""Calls the C++ short convolution (native.cpp): float32, bfloat16 and float16, a CPU."""

import torch
from torch import Tensor

from kernels import checks
from kernels.cpp import KINDS, address, function
from kernels.tracing import as_wide, register


def short_conv(
    x_TF: Tensor, weight_KE: Tensor, bias_E: Tensor | None, rows_SE: Tensor, slots_T: Tensor, ancestors_TN: Tensor
) -> Tensor:
    """See the front for arguments."""
    checks.native(x_TF)
    checks.native(rows_SE)
    x_TF, (K, E), (T, _), S = x_TF.contiguous(), weight_KE.shape, x_TF.shape, len(rows_SE)
    out_TE = torch.empty(T, E, dtype=x_TF.dtype)
    bias, kinds = address(bias_E), (KINDS[x_TF.dtype], KINDS[rows_SE.dtype])
    pointers = x_TF.data_ptr(), weight_KE.data_ptr(), bias, rows_SE.data_ptr()
    slots = slots_T.data_ptr(), ancestors_TN.data_ptr()
    if not function("short_conv")(
        *kinds, torch.get_num_threads(), *pointers, *slots, out_TE.data_ptr(), T, E, K - 1, S
    ):
        checks.within("slots_T", slots_T.tolist(), S)
        checks.within("ancestors_TN", ancestors_TN.flatten().tolist(), S)
    return out_TE


register("short_conv_cpp", short_conv, as_wide, mutates=("rows_SE",))
