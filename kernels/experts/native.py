"""Calls the C++ mixture of experts (native.cpp): float32, bfloat16 and float16, a CPU."""

import ctypes

import torch
from torch import Tensor

from kernels import checks
from kernels.cpp import KINDS, function
from kernels.experts.packed import PackedExperts


def experts(x_TE: Tensor, mixture: PackedExperts, scored_TE: Tensor) -> Tensor:
    """See the front for arguments."""
    checks.native(x_TE)
    x_TE, scored_TE = x_TE.contiguous(), scored_TE.contiguous()
    out_TE = torch.empty_like(x_TE)
    described = ctypes.addressof(mixture.described())
    pointers = x_TE.data_ptr(), scored_TE.data_ptr(), out_TE.data_ptr()
    function("experts")(KINDS[x_TE.dtype], torch.get_num_threads(), described, *pointers, len(x_TE))
    return out_TE
