"""Scans by channels on a GPU: a launch for the convolution, four for the scan, see `kernels.recurrent`."""
# pyright: reportArgumentType=false, reportCallIssue=false, reportReturnType=false, reportAttributeAccessIssue=false
# pyright: reportIndexIssue=false, reportGeneralTypeIssues=false
# (what triton.jit takes and gives is no function to a type checker)

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.channel_scan.weights import ChannelWeights
from kernels.gpu import INTERPRETED, cast, check_device, inverse_root, launch
from kernels.layout import DeltaPaths
from kernels.recurrent import Recurrence, check_dtype, convolved, silu, softplus

BLOCK = 512  # channels of a program


def channel_conv(x_TF: Tensor, weights: ChannelWeights, rows_RW: Tensor, paths: DeltaPaths) -> Tensor:
    """See the front for arguments.

    Raises:
        ValueError: tensors that the kernels cannot reach, or float64.
    """
    check_device(x_TF, rows_RW, paths.rows_T)
    check_dtype(x_TF)
    kind, x_TF = weights.kind, x_TF if x_TF.stride(1) == 1 else x_TF.contiguous()
    T, C = len(x_TF), kind.channels
    out_TC = torch.empty(T, C, dtype=x_TF.dtype, device=x_TF.device)
    sizes = {"INPUTS": 0, "C": C, "ROW": kind.row, "REACH": kind.reach, "TAPS": kind.taps, "BLOCK": _block(C)}
    if T:
        launch(_convolve, T, triton.cdiv(C, _block(C)))(
            x_TF, rows_RW, paths.paths_TN, weights.taps_KC, weights.shift_C, out_TC, x_TF.stride(0), **sizes
        )
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
    """See the front for arguments.

    Raises:
        ValueError: tensors that the kernels cannot reach, or float64.
    """
    kind = weights.kind
    pass_ = Recurrence.of(x_TF, kind, rows_RW, states_SHKV, paths, inputs=0, delta=False)
    convolved_TC, low_TL, steps_TC = (x.contiguous() for x in (convolved_TC, low_TL, steps_TC))
    T, x_TF, K, C = len(x_TF), pass_.x_TF, kind.key_size, kind.channels
    out_TC = torch.empty(T, C, dtype=x_TF.dtype, device=x_TF.device)
    if not T:
        return out_TC
    grid, sizes = (T, triton.cdiv(C, _block(C))), {"C": C, "BLOCK": _block(C)}
    norms_E = weights.norms_E
    launch(_prepare, *grid)(
        convolved_TC, low_TL, steps_TC, weights.bias_C, weights.bias_C if norms_E is None else norms_E,
        pass_.kept_TP, pass_.queries_TE, weights.eps, **sizes, L=low_TL.shape[1], K=K,
        K2=triton.next_power_of_2(K), NORMED=norms_E is not None,
    )  # fmt: skip
    reads_TC = pass_.walk(None, None, weights.rates_KC)
    launch(_finish, *grid)(reads_TC, convolved_TC, x_TF, weights.skip_C, out_TC, x_TF.stride(0), **sizes)
    pass_.keep(pass_.kept_TP[:, K:])
    return out_TC


def _block(channels: int) -> int:
    """Channels of a program; an interpreted program costs the same however many it has."""
    every = triton.next_power_of_2(channels)
    return every if INTERPRETED.value else min(BLOCK, every)


@triton.jit
def _convolve(
    x_ptr, rows_ptr, paths_ptr, taps_ptr, shift_ptr, out_ptr, stride_xt,
    INPUTS: tl.constexpr, C: tl.constexpr, ROW: tl.constexpr, REACH: tl.constexpr, TAPS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Some channels of a token."""
    t, e = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    real = e < C
    x = convolved(x_ptr, rows_ptr, paths_ptr, taps_ptr, t, stride_xt, e, real, INPUTS, C, ROW, REACH, TAPS)
    x = silu(x + tl.load(shift_ptr + e, mask=real, other=0.0))
    tl.store(out_ptr + t * C + e, cast(x, out_ptr.dtype.element_ty), mask=real)


@triton.jit
def _normed(x, norm_ptr, k, eps, K: tl.constexpr, NORMED: tl.constexpr):
    if NORMED:
        x *= tl.load(norm_ptr + k, mask=k < K, other=0.0) * inverse_root(tl.sum(x * x, 0) / K + eps)
    return x


@triton.jit
def _prepare(
    convolved_ptr, low_ptr, steps_ptr, bias_ptr, norms_ptr, kept_ptr, queries_ptr, eps,
    C: tl.constexpr, BLOCK: tl.constexpr, L: tl.constexpr, K: tl.constexpr, K2: tl.constexpr, NORMED: tl.constexpr,
):  # fmt: skip
    """The steps of some channels of a token and what they write; the first program also has B and C."""
    t, e = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    real, k = e < C, tl.arange(0, K2)
    kept_ptr += t * (K + 2 * C)
    if tl.program_id(1) == 0:
        shared_ptr = low_ptr + t * L + L - 2 * K
        b = tl.load(shared_ptr + k, mask=k < K, other=0.0).to(tl.float32)
        c = tl.load(shared_ptr + K + k, mask=k < K, other=0.0).to(tl.float32)
        tl.store(kept_ptr + k, _normed(b, norms_ptr, k, eps, K, NORMED), mask=k < K)
        tl.store(queries_ptr + t * K + k, _normed(c, norms_ptr + K, k, eps, K, NORMED), mask=k < K)
    step = tl.load(steps_ptr + t * C + e, mask=real, other=0.0).to(tl.float32)
    step = softplus(step + tl.load(bias_ptr + e, mask=real, other=0.0))
    x = tl.load(convolved_ptr + t * C + e, mask=real, other=0.0).to(tl.float32)
    tl.store(kept_ptr + K + e, step * x, mask=real)
    tl.store(kept_ptr + K + C + e, step, mask=real)


@triton.jit
def _finish(
    reads_ptr, convolved_ptr, x_ptr, skip_ptr, out_ptr, stride_xt, C: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Some channels of a token: their reads, their own x, and their gates."""
    t, e = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    real, place = e < C, t * C + e
    x = tl.load(convolved_ptr + place, mask=real, other=0.0).to(tl.float32)
    read = tl.load(reads_ptr + place, mask=real, other=0.0) + tl.load(skip_ptr + e, mask=real, other=0.0) * x
    read *= silu(tl.load(x_ptr + t * stride_xt + C + e, mask=real, other=0.0).to(tl.float32))
    tl.store(out_ptr + place, cast(read, out_ptr.dtype.element_ty), mask=real)
