"""Calls the C++ of multi-head latent attention (native.cpp): float32, bfloat16 and float16, a CPU."""

import ctypes

import torch
from torch import Tensor

from kernels import checks
from kernels.cpp import KINDS, function
from kernels.latent.packed import LatentHeads


def absorb(queries_TF: Tensor, latent_TF: Tensor, heads: LatentHeads) -> Tensor:
    """See the front for arguments."""
    checks.native(queries_TF)
    checks.expect("norm_C", heads.norm_C, queries_TF.dtype, (heads.sizes.rank,), torch.device("cpu"))
    T, sizes = len(queries_TF), heads.sizes
    out_TF = torch.empty(T, (sizes.heads + 1) * sizes.width, dtype=queries_TF.dtype)
    pointers = (x.data_ptr() for x in (queries_TF, latent_TF, out_TF))
    function("absorb")(*_what(queries_TF, heads), *pointers, T)
    return out_TF


def expand(mixed_TF: Tensor, heads: LatentHeads) -> Tensor:
    """See the front for arguments."""
    checks.native(mixed_TF)
    T, sizes = len(mixed_TF), heads.sizes
    out_TF = torch.empty(T, sizes.heads * sizes.value, dtype=mixed_TF.dtype)
    function("expand")(*_what(mixed_TF, heads), mixed_TF.data_ptr(), out_TF.data_ptr(), T)
    return out_TF


def _what(x: Tensor, heads: LatentHeads) -> tuple[int, int, int]:
    return KINDS[x.dtype], torch.get_num_threads(), ctypes.addressof(heads.described())
