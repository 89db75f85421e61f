"""Calls the C++ gated delta net (native.cpp): inputs of float32, bfloat16 and float16, a CPU."""

import ctypes

import torch
from torch import Tensor

from kernels import checks
from kernels.cpp import KINDS, OPERATORS, function
from kernels.delta_net.weights import DeltaWeights
from kernels.layout import DeltaPaths


def delta_net(x_TF: Tensor, weights: DeltaWeights, rows_RW: Tensor, states_SHKV: Tensor, paths: DeltaPaths) -> Tensor:
    """See the front for arguments."""
    checks.native(x_TF)
    kind, T, x_TF = weights.kind, len(x_TF), x_TF.contiguous()
    out_TE = torch.empty(T, kind.value_heads * kind.value_size, dtype=x_TF.dtype)
    kept, queries = torch.empty(T, kind.row), torch.empty(T, kind.key_heads * kind.key_size)
    vectors = weights.taps_KC, weights.decay_H, weights.bias_H, weights.norm_V, rows_RW, states_SHKV
    numbers = paths.rows_T, paths.paths_TN, paths.lengths_T, paths.bases_T, paths.folds_T
    pointers = (x.data_ptr() for x in (x_TF, *vectors, *numbers, kept, queries, out_TE))
    sizes = T, kind.key_heads, *kind.state, kind.taps, kind.reach
    function("delta_net")(KINDS[x_TF.dtype], torch.get_num_threads(), *pointers, *sizes, weights.eps, weights.most)
    return out_TE


def described(weights: DeltaWeights, order: Tensor | None) -> ctypes.Structure:
    """The weights for a stack of layers; valid as long as they live. `order`: see `models.layers.GatedDeltaNet`."""
    vectors = weights.taps_KC, weights.decay_H, weights.bias_H, weights.norm_V, order
    pointers = (None if x is None else x.data_ptr() for x in vectors)
    kind = weights.kind
    return OPERATORS.structures["Delta"](*pointers, kind.key_heads, *kind.state, kind.taps, weights.eps, weights.most)
