"""Calls the C++ gated delta net (native.cpp): inputs of float32, bfloat16 and float16, a CPU."""

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from kernels import checks
from kernels.cpp import KINDS, OPERATORS, address, function
from kernels.delta_net.weights import DeltaWeights
from kernels.layout import DeltaKind, DeltaPaths


def delta_net(x_TF: Tensor, weights: DeltaWeights, rows_RW: Tensor, states_SHKV: Tensor, paths: DeltaPaths) -> Tensor:
    """See the front for arguments."""
    checks.native(x_TF)
    kind, T, x_TF = weights.kind, len(x_TF), x_TF.contiguous()
    out_TE = torch.empty(T, kind.value_heads * kind.value_size, dtype=x_TF.dtype)
    rooms = torch.empty(T, kind.row), torch.empty(T, kind.key_heads * kind.key_size)
    run("delta_net", [x_TF], described(weights), stored(kind, rows_RW, states_SHKV, paths), [*rooms, out_TE])
    return out_TE


def run(
    name: str, inputs: Sequence[Tensor], weights: ctypes.Structure, kept: ctypes.Structure, others: Sequence[Tensor]
) -> None:
    """Call an operator on inputs of T tokens; weights and kept: see `described` and `stored`."""
    addresses = [ctypes.addressof(structure) for structure in (weights, kept)]
    pointers = *(x.data_ptr() for x in inputs), *addresses, *(x.data_ptr() for x in others)
    function(name)(KINDS[inputs[0].dtype], torch.get_num_threads(), *pointers, len(inputs[0]))


def stored(kind: DeltaKind, rows_RW: Tensor, states_SHKV: Tensor | None, paths: DeltaPaths) -> ctypes.Structure:
    """The rows and states of a layer, and the paths of a pass; valid as long as they live."""
    numbers = paths.rows_T, paths.paths_TN, paths.lengths_T, paths.bases_T, paths.folds_T
    pointers = map(address, (*numbers, rows_RW, states_SHKV))
    counts = len(rows_RW), 0 if states_SHKV is None else len(states_SHKV)
    return OPERATORS.structures["Paths"](*pointers, kind.reach, *counts)


def described(weights: DeltaWeights, order: Tensor | None = None) -> ctypes.Structure:
    """The weights; valid as long as they live. `order`: see `models.layers.GatedDeltaNet`, for a stack of layers."""
    vectors = weights.taps_KC, weights.decay_H, weights.bias_D, weights.norm_V, order
    pointers = map(address, vectors)
    kind = weights.kind
    sizes = kind.key_heads, *kind.state, kind.taps, kind.key_decays, weights.sigmoid
    return OPERATORS.structures["Delta"](*pointers, *sizes, weights.eps, weights.most, weights.bound)
