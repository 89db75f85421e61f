"""Calls the C++ selective scan (native.cpp): inputs of float32, bfloat16 and float16, a CPU."""

import ctypes

import torch
from torch import Tensor

from kernels import checks
from kernels.cpp import OPERATORS, address
from kernels.delta_net.native import run, stored
from kernels.layout import DeltaPaths
from kernels.scan.weights import ScanWeights


def scan(x_TF: Tensor, weights: ScanWeights, rows_RW: Tensor, states_SHKV: Tensor, paths: DeltaPaths) -> Tensor:
    """See the front for arguments."""
    checks.native(x_TF)
    kind, T, x_TF = weights.kind, len(x_TF), x_TF.contiguous()
    G, values = kind.key_heads, kind.value_heads * kind.value_size
    out_TE = torch.empty(T, values, dtype=x_TF.dtype)
    rooms = [torch.empty(T, size) for size in (kind.row, G * kind.key_size, values, G * (kind.reach + 1))]
    run("scan", [x_TF], described(weights), stored(kind, rows_RW, states_SHKV, paths), [*rooms, out_TE])
    return out_TE


def described(weights: ScanWeights) -> ctypes.Structure:
    """The weights; valid as long as they live."""
    kind = weights.kind
    pointers = map(address, weights[1:7])
    sizes = kind.key_heads, *kind.state, kind.taps
    return OPERATORS.structures["Scan"](*pointers, *sizes, *weights[7:])
