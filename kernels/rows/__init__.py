"""Operators on rows, which stand between a layer's matrix products: the front that picks an implementation.

With impl "cpp" it is C++, eager on a CPU, each operator one pass over its rows. Otherwise it is PyTorch, which a
compiler fuses.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from kernels.cpp import watched
from kernels.rows import cpp, reference


def _pick(name: str, impl: str) -> Callable[..., Tensor]:
    if impl != "cpp" or torch.compiler.is_compiling():
        return getattr(reference, name)
    return getattr(torch.ops.coppice, name) if watched() else getattr(cpp, name)


def rms_norm(x_NE: Tensor, weight_E: Tensor, eps: float, *, impl: str) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight, each row by itself (Zhang and Sennrich, 2019).

    Args:
        x_NE, weight_E: of one dtype; arithmetic is float32 or better.
        impl: of the pass, see `kernels.tree_attention`.
    """
    return _pick("rms_norm", impl)(x_NE, weight_E, eps)


def rotary(x_THD: Tensor, cos_TR: Tensor, sin_TR: Tensor, *, impl: str) -> Tensor:
    """Rotates the first R dims of each head, pairs i and i + R/2; dims past them pass through (Su et al., 2021).

    Args:
        x_THD: queries or keys.
        cos_TR, sin_TR: of each token's angles, both halves alike, in the dtype of x.
        impl: of the pass, see `kernels.tree_attention`.
    """
    return _pick("rotary", impl)(x_THD, cos_TR, sin_TR)


def silu_mul(x_NM: Tensor, *, impl: str) -> Tensor:
    """SiLU of the first half of each row times the second half, [N, M / 2] (Shazeer, 2020).

    Args:
        x_NM: gates, then what they let through.
        impl: of the pass, see `kernels.tree_attention`.
    """
    return _pick("silu_mul", impl)(x_NM)
