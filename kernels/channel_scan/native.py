"""Calls the C++ scan by channels (native.cpp): inputs of float32, bfloat16 and float16, a CPU."""

import ctypes

import torch
from torch import Tensor

from kernels import checks
from kernels.channel_scan.weights import ChannelWeights
from kernels.cpp import OPERATORS, address
from kernels.delta_net.native import run, stored
from kernels.layout import DeltaPaths


def channel_conv(x_TF: Tensor, weights: ChannelWeights, rows_RW: Tensor, paths: DeltaPaths) -> Tensor:
    """See the front for arguments."""
    checks.native(x_TF)
    x_TF, out_TC = x_TF.contiguous(), torch.empty(len(x_TF), weights.kind.channels, dtype=x_TF.dtype)
    run("channel_conv", [x_TF], described(weights), stored(weights.kind, rows_RW, None, paths), [out_TC])
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
    rooms = [torch.empty(T, size) for size in (kind.row, kind.key_size)]
    run("channel_scan", inputs, described(weights), stored(kind, rows_RW, states_SHKV, paths), [*rooms, out_TC])
    return out_TC


def described(weights: ChannelWeights) -> ctypes.Structure:
    """The weights; valid as long as they live."""
    kind = weights.kind
    pointers = map(address, weights[2:8])
    sizes = kind.key_size, kind.channels, kind.taps, weights.rank
    return OPERATORS.structures["ChannelScan"](*pointers, *sizes, weights.eps)
