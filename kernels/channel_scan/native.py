"""Calls the C++ scan by channels (native.cpp): inputs of float32, bfloat16 and float16, a CPU."""

import ctypes

import torch
from torch import Tensor

from kernels import checks
from kernels.channel_scan.weights import ChannelWeights
from kernels.cpp import KINDS, OPERATORS, function
from kernels.layout import DeltaPaths


def channel_conv(x_TF: Tensor, weights: ChannelWeights, rows_RW: Tensor, paths: DeltaPaths) -> Tensor:
    """See the front for arguments."""
    checks.native(x_TF)
    x_TF, out_TC = x_TF.contiguous(), torch.empty(len(x_TF), weights.kind.channels, dtype=x_TF.dtype)
    structures = described(weights), _stored(weights, rows_RW, None, paths)
    pointers = x_TF.data_ptr(), *map(ctypes.addressof, structures), out_TC.data_ptr()
    function("channel_conv")(KINDS[x_TF.dtype], torch.get_num_threads(), *pointers, len(x_TF))
    return out_TC


def channel_scan(
    x_TF: Tensor,
    convolved_TC: Tensor,
    low_TL: Tensor,
    steps_TC: Tensor,
    weights: ChannelWeights,
    rows_RW: Tensor,
    states_SHKV: Tensor,
    paths: DeltaPaths,
) -> Tensor:
    """See the front for arguments."""
    checks.native(x_TF)
    kind, T = weights.kind, len(x_TF)
    inputs = [x.contiguous() for x in (x_TF, convolved_TC, low_TL, steps_TC)]
    out_TC = torch.empty(T, kind.channels, dtype=x_TF.dtype)
    structures = described(weights), _stored(weights, rows_RW, states_SHKV, paths)
    rooms = [torch.empty(T, size) for size in (kind.row, kind.key_size)]
    pointers = *(x.data_ptr() for x in inputs), *map(ctypes.addressof, structures)
    pointers = *pointers, *(x.data_ptr() for x in (*rooms, out_TC))
    function("channel_scan")(KINDS[x_TF.dtype], torch.get_num_threads(), *pointers, T)
    return out_TC


def described(weights: ChannelWeights) -> ctypes.Structure:
    """The weights; valid as long as they live."""
    kind = weights.kind
    pointers = (None if x is None else x.data_ptr() for x in weights[2:8])
    sizes = kind.key_size, kind.channels, kind.taps, weights.rank
    return OPERATORS.structures["ChannelScan"](*pointers, *sizes, weights.eps)


def _stored(
    weights: ChannelWeights, rows_RW: Tensor, states_SHKV: Tensor | None, paths: DeltaPaths
) -> ctypes.Structure:
    numbers = paths.rows_T, paths.paths_TN, paths.lengths_T, paths.bases_T, paths.folds_T
    pointers = (None if x is None else x.data_ptr() for x in (*numbers, rows_RW, states_SHKV))
    counts = len(rows_RW), 0 if states_SHKV is None else len(states_SHKV)
    return OPERATORS.structures["Paths"](*pointers, weights.kind.reach, *counts)
