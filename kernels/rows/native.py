"""Calls the C++ operators on rows (native.cpp): float32, bfloat16 and float16, a CPU, contiguous but for heads."""

import math
from array import array
from collections.abc import Sequence

import torch
from torch import Tensor

from kernels.cpp import KINDS, function
from kernels.rows.checks import ACTIVATIONS, SPAN


def _able(x: Tensor) -> None:
    """Refuses what C++ does not have; whether tensors fit together the front has checked."""
    if x.dtype not in KINDS or not x.is_cpu:
        raise ValueError(f"impl 'cpp': expected float32, bfloat16 or float16 on a CPU, got {x.dtype} on {x.device}")


def rms_norm(x_NE: Tensor, weight_E: Tensor, eps: float) -> Tensor:
    """See the front for arguments."""
    _able(x_NE)
    x_NE, weight_E, width = x_NE.contiguous(), weight_E.contiguous(), x_NE.shape[-1]
    out_NE = torch.empty_like(x_NE)
    function("rms_norm")(
        *(KINDS[x_NE.dtype], torch.get_num_threads(), x_NE.data_ptr(), weight_E.data_ptr(), out_NE.data_ptr()),
        *(x_NE.numel() // width, width, eps),
    )
    return out_NE


def layer_norm(x_NE: Tensor, weight_E: Tensor, bias_E: Tensor, eps: float) -> Tensor:
    """See the front for arguments."""
    _able(x_NE)
    x_NE, weight_E, bias_E, width = x_NE.contiguous(), weight_E.contiguous(), bias_E.contiguous(), x_NE.shape[-1]
    out_NE = torch.empty_like(x_NE)
    function("layer_norm")(
        *(KINDS[x_NE.dtype], torch.get_num_threads()),
        *(x_NE.data_ptr(), weight_E.data_ptr(), bias_E.data_ptr(), out_NE.data_ptr()),
        *(x_NE.numel() // width, width, eps),
    )
    return out_NE


def rotary(x_THD: Tensor, cos_TR: Tensor, sin_TR: Tensor) -> Tensor:
    """See the front for arguments."""
    _able(x_THD)
    cos_TR, sin_TR = cos_TR.contiguous(), sin_TR.contiguous()
    if x_THD.stride(2) != 1:
        x_THD = x_THD.contiguous()
    out_THD = torch.empty(x_THD.shape, dtype=x_THD.dtype)
    function("rotary")(
        *(KINDS[x_THD.dtype], torch.get_num_threads()),
        *(x_THD.data_ptr(), cos_TR.data_ptr(), sin_TR.data_ptr(), out_THD.data_ptr()),
        *(*x_THD.shape, cos_TR.shape[1], x_THD.stride(0), x_THD.stride(1), out_THD.stride(0)),
    )
    return out_THD


def silu_mul(x_NM: Tensor) -> Tensor:
    """See the front for arguments."""
    _able(x_NM)
    x_NM, width = x_NM.contiguous(), x_NM.shape[-1] // 2
    out = torch.empty(*x_NM.shape[:-1], width, dtype=x_NM.dtype)
    function("silu_mul")(
        *(KINDS[x_NM.dtype], torch.get_num_threads(), x_NM.data_ptr(), out.data_ptr(), out.numel() // width, width)
    )
    return out


def activation(x_NM: Tensor, name: str) -> Tensor:
    """See the front for arguments."""
    _able(x_NM)
    x_NM, width = x_NM.contiguous(), x_NM.shape[-1]
    out_NM = torch.empty_like(x_NM)
    function("activation")(
        *(KINDS[x_NM.dtype], torch.get_num_threads(), ACTIVATIONS.index(name), x_NM.data_ptr(), out_NM.data_ptr()),
        *(x_NM.numel() // width, width),
    )
    return out_NM


def log_softmax(x_NV: Tensor, size: int) -> tuple[Tensor, Tensor, Tensor]:
    """See the front for arguments."""
    _able(x_NV)
    x_NV, (N, V) = x_NV.contiguous(), x_NV.shape
    logp_NV, finite_N, peaks_NB = torch.empty(N, V), torch.empty(N, dtype=torch.bool), torch.empty(N, -(-V // SPAN))
    pointers = x_NV.data_ptr(), logp_NV.data_ptr(), finite_N.data_ptr(), peaks_NB.data_ptr()
    function("log_softmax")(KINDS[x_NV.dtype], torch.get_num_threads(), *pointers, N, V, size)
    return logp_NV, finite_N, peaks_NB


def _floats(x_NV: Tensor, peaks_NB: Tensor | None = None) -> tuple[Tensor, int, int | None]:
    """Rows in order, their address, that of their peaks."""
    if x_NV.dtype != torch.float32 or not x_NV.is_cpu:
        raise ValueError(f"impl 'cpp': expected float32 on a CPU, got {x_NV.dtype} on {x_NV.device}")
    x_NV = x_NV.contiguous()
    return x_NV, x_NV.data_ptr(), None if peaks_NB is None else peaks_NB.data_ptr()


def top_k(x_NV: Tensor, k: int) -> Tensor:
    """See the front for arguments; float32 only."""
    x_NV, x, _ = _floats(x_NV)
    N, V = x_NV.shape
    out_N2K = torch.empty(N, 2, k, dtype=torch.float64)
    function("top_k")(torch.get_num_threads(), x, out_N2K.data_ptr(), N, V, k)
    return out_N2K


def best_sums(logp_NV: Tensor, sums: Sequence[float], k: int, peaks_NB: Tensor | None = None) -> Tensor:
    """See the front for arguments; float32 only. They are in order, so that no rival matters."""
    logp_NV, x, peaks = _floats(logp_NV, peaks_NB)
    N, V = logp_NV.shape
    k, sums_N = min(k, N * V), array("f", sums)
    out = torch.full((2 * k + 1,), math.inf, dtype=torch.float64)
    function("best_sums")(x, peaks, sums_N.buffer_info()[0], out.data_ptr(), N, V, k)
    return out


def at_least(logp_NV: Tensor, least: float, k: int, peaks_NB: Tensor | None = None) -> Tensor:
    """See the front for arguments; float32 only."""
    logp_NV, x, peaks = _floats(logp_NV, peaks_NB)
    N, V = logp_NV.shape
    out_N2K = torch.empty(N, 2, k, dtype=torch.float64)
    function("at_least")(x, peaks, out_N2K.data_ptr(), N, V, k, least)
    return out_N2K


def gumbel_argmax(logp_NV: Tensor, keys: Sequence[int]) -> Tensor:
    """See the front for arguments."""
    logp_NV, x, _ = _floats(logp_NV)
    (N, V), words = logp_NV.shape, array("I", keys)
    out_N = torch.empty(N, dtype=torch.int64)
    function("gumbel_argmax")(*(torch.get_num_threads(), x, words.buffer_info()[0], out_N.data_ptr(), N, V))
    return out_N


for run in (rms_norm, layer_norm, rotary, silu_mul, activation, log_softmax, top_k, best_sums, at_least, gumbel_argmax):
    torch.library.custom_op(f"coppice::{run.__name__}", run, mutates_args=())


@torch.library.register_fake("coppice::rms_norm")
def _(x_NE, _weight_E, _eps):
    return torch.empty_like(x_NE, memory_format=torch.contiguous_format)


@torch.library.register_fake("coppice::layer_norm")
def _(x_NE, _weight_E, _bias_E, _eps):
    return torch.empty_like(x_NE, memory_format=torch.contiguous_format)


@torch.library.register_fake("coppice::rotary")
def _(x_THD, _cos_TR, _sin_TR):
    return x_THD.new_empty(x_THD.shape)


@torch.library.register_fake("coppice::silu_mul")
def _(x_NM):
    return x_NM.new_empty(*x_NM.shape[:-1], x_NM.shape[-1] // 2)


@torch.library.register_fake("coppice::activation")
def _(x_NM, _name):
    return torch.empty_like(x_NM, memory_format=torch.contiguous_format)


@torch.library.register_fake("coppice::log_softmax")
def _(x_NV, _size):
    (N, V), floats = x_NV.shape, {"dtype": torch.float32}
    return (
        x_NV.new_empty(N, V, **floats),
        x_NV.new_empty(N, dtype=torch.bool),
        x_NV.new_empty(N, -(-V // SPAN), **floats),
    )


@torch.library.register_fake("coppice::top_k")
def _(x_NV, k):
    return x_NV.new_empty(len(x_NV), 2, k, dtype=torch.float64)


@torch.library.register_fake("coppice::best_sums")
def _(logp_NV, _sums, k, _peaks_NB=None):
    return logp_NV.new_empty(2 * min(k, logp_NV.numel()) + 1, dtype=torch.float64)


@torch.library.register_fake("coppice::at_least")
def _(x_NV, _least, k, _peaks_NB=None):
    return x_NV.new_empty(len(x_NV), 2, k, dtype=torch.float64)


@torch.library.register_fake("coppice::gumbel_argmax")
def _(logp_NV, _keys):
    return logp_NV.new_empty(len(logp_NV), dtype=torch.int64)
