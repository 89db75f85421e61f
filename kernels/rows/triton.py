"""Operators on rows on a GPU, one launch each: norms, the norm of a sum, activations, gates."""
# pyright: reportArgumentType=false, reportCallIssue=false, reportReturnType=false, reportAttributeAccessIssue=false
# pyright: reportIndexIssue=false, reportGeneralTypeIssues=false
# (what triton.jit takes and gives is no function to a type checker)

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.gpu import INTERPRETED, cast, check_device, tanh
from kernels.rows.checks import Vectors

BLOCK = 1024
ROWS = 16 if INTERPRETED.value else 1  # of a program: an interpreted program costs the same however many it has
NUMBERS = {"relu": 0, "gelu": 1, "gelu_tanh": 2, "silu": 3, "quick_gelu": 4, "tanh": 5}


def rms_norm(x_NE: Tensor, weight_E: Tensor, eps: float) -> Tensor:
    """See the front for arguments."""
    return _add_norm(x_NE, (), (weight_E, None), None, 1.0, eps)[1]


def layer_norm(x_NE: Tensor, weight_E: Tensor, bias_E: Tensor, eps: float) -> Tensor:
    """See the front for arguments."""
    return _add_norm(x_NE, (), (weight_E, bias_E), None, 1.0, eps)[1]


def add_norm(
    x_NE: Tensor, addends: Sequence[Tensor], norm: Vectors | None, out_norm: Vectors | None, scale: float, eps: float
) -> tuple[Tensor, Tensor]:
    """See the front for arguments."""
    return _add_norm(x_NE, addends, norm, out_norm, scale, eps)


def activation(x_NM: Tensor, name: str) -> Tensor:
    """See the front for arguments."""
    return _gate(x_NM, name, gated=False)


def activation_mul(x_NM: Tensor, name: str) -> Tensor:
    """See the front for arguments."""
    return _gate(x_NM, name, gated=True)


def _add_norm(
    x: Tensor, addends: Sequence[Tensor], norm: Vectors | None, out_norm: Vectors | None, scale: float, eps: float
) -> tuple[Tensor, Tensor]:
    """The sum and its norm, which is the sum itself without `norm`; of at most two addends."""
    check_device(x, *addends)
    E = x.shape[-1]
    x_NE, *rest = (_rows(y) for y in (x, *addends))
    one_NE, two_NE = (*rest, *[x_NE] * 2)[:2]
    total_NE = torch.empty(x.shape, dtype=x.dtype, device=x.device) if addends else x
    out_NE = torch.empty(x.shape, dtype=x.dtype, device=x.device) if norm else total_NE
    weight_E, bias_E = norm or (x_NE, None)
    out_weight_E, out_bias_E = out_norm or (x_NE, None)
    E2 = triton.next_power_of_2(E)
    _sum[(triton.cdiv(len(x_NE), ROWS),)](
        x_NE, one_NE, two_NE, weight_E, x_NE if bias_E is None else bias_E,
        out_weight_E, x_NE if out_bias_E is None else out_bias_E, total_NE, out_NE,
        len(x_NE), x_NE.stride(0), one_NE.stride(0), two_NE.stride(0), scale, eps,
        ADDENDS=len(addends), NORM=_kind(norm), OUT_NORM=_kind(out_norm), SCALED=scale != 1.0,
        E=E, E2=E2, M=ROWS, num_warps=min(max(E2 // 256, 1), 16),
    )  # fmt: skip
    return total_NE, out_NE


def _rows(x: Tensor) -> Tensor:
    """x as [N, E], its elements side by side."""
    x_NE = x.reshape(-1, x.shape[-1])
    return x_NE if x_NE.stride(1) == 1 else x_NE.contiguous()


def _kind(norm: Vectors | None) -> int:
    """0: none, 1: RMS, 2: LayerNorm."""
    return 0 if norm is None else 1 if norm[1] is None else 2


def _gate(x: Tensor, name: str, *, gated: bool) -> Tensor:
    check_device(x)
    x_NM = _rows(x)
    N, M = len(x_NM), x_NM.shape[1] // (1 + gated)
    out = torch.empty(*x.shape[:-1], M, dtype=x.dtype, device=x.device)
    sizes = {"KIND": NUMBERS[name], "GATED": gated, "WIDTH": M, "M": ROWS, "BLOCK": BLOCK // 2}
    _activate[triton.cdiv(N, ROWS), triton.cdiv(M, BLOCK // 2)](x_NM, out, N, x_NM.stride(0), **sizes)
    return out


@triton.jit(do_not_specialize=["N"])
def _sum(
    x_ptr, one_ptr, two_ptr, weight_ptr, bias_ptr, out_weight_ptr, out_bias_ptr, total_ptr, out_ptr,
    N, stride_xn, stride_on, stride_tn, scale, eps,
    ADDENDS: tl.constexpr, NORM: tl.constexpr, OUT_NORM: tl.constexpr, SCALED: tl.constexpr,
    E: tl.constexpr, E2: tl.constexpr, M: tl.constexpr,
):  # fmt: skip
    """M rows. Every step is rounded to the dtype, as separate operators would leave it."""
    n_M = tl.program_id(0).to(tl.int64) * M + tl.arange(0, M)
    e_E = tl.arange(0, E2)
    real_ME = (n_M < N)[:, None] & (e_E < E)[None, :]
    at_ME = n_M[:, None] * E + e_E[None, :]
    dtype = out_ptr.dtype.element_ty
    x_ME = tl.load(x_ptr + n_M[:, None] * stride_xn + e_E[None, :], mask=real_ME, other=0.0).to(tl.float32)
    if ADDENDS > 0:
        y_ME = tl.load(one_ptr + n_M[:, None] * stride_on + e_E[None, :], mask=real_ME, other=0.0).to(tl.float32)
        y_ME = _left(y_ME, out_weight_ptr, out_bias_ptr, e_E, scale, eps, OUT_NORM, SCALED, E, dtype)
        if ADDENDS > 1:
            z_ME = tl.load(two_ptr + n_M[:, None] * stride_tn + e_E[None, :], mask=real_ME, other=0.0).to(tl.float32)
            z_ME = _left(z_ME, out_weight_ptr, out_bias_ptr, e_E, scale, eps, OUT_NORM, SCALED, E, dtype)
            y_ME = cast(y_ME + z_ME, dtype).to(tl.float32)
        rounded_ME = cast(x_ME + y_ME, dtype)
        tl.store(total_ptr + at_ME, rounded_ME, mask=real_ME)
        x_ME = rounded_ME.to(tl.float32)
    if NORM > 0:
        tl.store(out_ptr + at_ME, cast(_norm(x_ME, weight_ptr, bias_ptr, e_E, eps, NORM, E), dtype), mask=real_ME)


@triton.jit
def _left(
    y_ME, weight_ptr, bias_ptr, e_E, scale, eps,
    NORM: tl.constexpr, SCALED: tl.constexpr, E: tl.constexpr, dtype: tl.constexpr,
):  # fmt: skip
    """What is added, of the output of a part."""
    if NORM > 0:
        y_ME = cast(_norm(y_ME, weight_ptr, bias_ptr, e_E, eps, NORM, E), dtype).to(tl.float32)
    if SCALED:
        y_ME = cast(y_ME * scale, dtype).to(tl.float32)
    return y_ME


@triton.jit
def _norm(x_ME, weight_ptr, bias_ptr, e_E, eps, NORM: tl.constexpr, E: tl.constexpr):
    """The norm of rows that are 0 from element E on, in float32."""
    weight_E = tl.load(weight_ptr + e_E, mask=e_E < E, other=0.0).to(tl.float32)
    if NORM == 2:
        mean_M = tl.sum(x_ME, 1) / E
        x_ME = tl.where((e_E < E)[None, :], x_ME - mean_M[:, None], 0.0)
    inverse_M = 1 / tl.sqrt(tl.sum(x_ME * x_ME, 1) / E + eps)
    y_ME = x_ME * inverse_M[:, None] * weight_E[None, :]
    if NORM == 2:
        y_ME += tl.load(bias_ptr + e_E, mask=e_E < E, other=0.0).to(tl.float32)[None, :]
    return y_ME


@triton.jit(do_not_specialize=["N"])
def _activate(
    x_ptr, out_ptr, N, stride_xn,
    KIND: tl.constexpr, GATED: tl.constexpr, WIDTH: tl.constexpr, M: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A block of M rows of the output."""
    n_M = tl.program_id(0).to(tl.int64) * M + tl.arange(0, M)
    i_B = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    real_MB = (n_M < N)[:, None] & (i_B < WIDTH)[None, :]
    at_MB = n_M[:, None] * stride_xn + i_B[None, :]
    dtype = out_ptr.dtype.element_ty
    y_MB = cast(_activated(tl.load(x_ptr + at_MB, mask=real_MB, other=0.0).to(tl.float32), KIND), dtype)
    if GATED:
        up_MB = tl.load(x_ptr + at_MB + WIDTH, mask=real_MB, other=0.0).to(tl.float32)
        y_MB = cast(y_MB.to(tl.float32) * up_MB, dtype)
    tl.store(out_ptr + n_M[:, None] * WIDTH + i_B[None, :], y_MB, mask=real_MB)


@triton.jit
def _activated(x, KIND: tl.constexpr):
    """The function that `NUMBERS` numbers; NaN stays."""
    if KIND == 0:
        y = tl.where(x < 0, 0.0, x)
    elif KIND == 1:
        y = 0.5 * x * (1 + tl.erf(x * 0.7071067811865476))
    elif KIND == 2:
        y = x * _sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))  # (1 + tanh(y)) / 2 = sigmoid(2 y)
    elif KIND == 3:
        y = x * _sigmoid(x)
    elif KIND == 4:
        y = x * _sigmoid(1.702 * x)
    else:
        y = tanh(x)
    return y


@triton.jit
def _sigmoid(x):
    """1 / (1 + exp(-x)), by an exponential that does not overflow."""
    e = tl.exp(-tl.abs(x))
    return tl.where(x < 0, e, 1.0) / (1 + e)
