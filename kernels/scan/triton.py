"""Selective scans on a GPU: five launches, see `kernels.recurrent`."""
# pyright: reportArgumentType=false, reportCallIssue=false, reportReturnType=false, reportAttributeAccessIssue=false
# pyright: reportIndexIssue=false, reportGeneralTypeIssues=false
# (what triton.jit takes and gives is no function to a type checker)

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.gpu import cast, inverse_root, launch
from kernels.layout import DeltaPaths
from kernels.recurrent import Recurrence, convolved, heads_at_once, silu, softplus
from kernels.scan.weights import ScanWeights

NORMALISED = 2048  # elements of a group's heads for 4 warps; each may have 16 times as many


def scan(x_TF: Tensor, weights: ScanWeights, rows_RW: Tensor, states_SHKV: Tensor, paths: DeltaPaths) -> Tensor:
    """See the front for arguments.

    Raises:
        ValueError: tensors that the kernels cannot reach, or float64.
    """
    kind = weights.kind
    (H, _, V), G = kind.state, kind.key_heads
    pass_ = Recurrence.of(x_TF, kind, rows_RW, states_SHKV, paths, inputs=H * V, delta=False)
    T, x_TF = len(x_TF), pass_.x_TF
    out_TE = torch.empty(T, H * V, dtype=x_TF.dtype, device=x_TF.device)
    if not T:
        return out_TE
    V2, skipped_TE = triton.next_power_of_2(V), pass_.empty(T, H * V)
    some = heads_at_once(H, V2)
    pass_.prepare_keys(weights.taps_KC, weights.shift_C, H * V)
    launch(_prepare_values, T, triton.cdiv(H, some))(
        x_TF, rows_RW, pass_.paths.paths_TN, weights.taps_KC, weights.shift_C, weights.decay_H, weights.bias_H,
        weights.skip_H, pass_.kept_TP, skipped_TE, x_TF.stride(0), weights.least, weights.most, weights.step,
        **pass_.convolution, KEYS=pass_.keys, H=H, V=V, V2=V2, M=some,
    )  # fmt: skip
    reads_TE, E = pass_.walk(None, None), H * V // G
    E2, norm_E = triton.next_power_of_2(E), weights.norm_E
    launch(_finish, T, G)(
        reads_TE, skipped_TE, x_TF, out_TE if norm_E is None else norm_E, out_TE, x_TF.stride(0), weights.eps,
        weights.gate, G=G, E=E, E2=E2, NORMED=norm_E is not None, num_warps=min(16, max(4, 4 * E2 // NORMALISED)),
    )  # fmt: skip
    pass_.keep(pass_.kept_TP[:, pass_.keys :])
    return out_TE


@triton.jit
def _prepare_values(
    x_ptr, rows_ptr, paths_ptr, taps_ptr, shift_ptr, decay_ptr, bias_ptr, skip_ptr, kept_ptr, skipped_ptr, stride_xt,
    least, most, factor,
    KEYS: tl.constexpr, H: tl.constexpr, V: tl.constexpr, V2: tl.constexpr, M: tl.constexpr,
    INPUTS: tl.constexpr, C: tl.constexpr, ROW: tl.constexpr, REACH: tl.constexpr, TAPS: tl.constexpr,
):  # fmt: skip
    """The writes of some heads of a token, their decays, and their reads of their own x."""
    t = tl.program_id(0).to(tl.int64)
    h_M, v = tl.program_id(1) * M + tl.arange(0, M), tl.arange(0, V2)[None, :]
    head, real_M = h_M[:, None], h_M < H
    real, element = (head < H) & (v < V), head * V + v
    x = convolved(x_ptr, rows_ptr, paths_ptr, taps_ptr, t, stride_xt, element, real, INPUTS, C, ROW, REACH, TAPS)
    x = silu(x + tl.load(shift_ptr + element, mask=real, other=0.0))
    more_M = tl.load(x_ptr + t * stride_xt + INPUTS + C + h_M, mask=real_M, other=0.0).to(tl.float32)
    step_M = softplus(more_M * factor + tl.load(bias_ptr + h_M, mask=real_M, other=0.0))
    step_M = tl.minimum(tl.maximum(step_M, least), most)
    skip_M = tl.load(skip_ptr + h_M, mask=real_M, other=0.0)
    kept_ptr += t * (ROW - C) + KEYS
    tl.store(kept_ptr + element, x * step_M[:, None], mask=real)
    tl.store(skipped_ptr + t * (H * V) + element, x * skip_M[:, None], mask=real)
    tl.store(kept_ptr + H * V + h_M, tl.load(decay_ptr + h_M, mask=real_M, other=0.0) * step_M, mask=real_M)


@triton.jit
def _finish(
    reads_ptr, skipped_ptr, x_ptr, norm_ptr, out_ptr, stride_xt, eps, gate,
    G: tl.constexpr, E: tl.constexpr, E2: tl.constexpr, NORMED: tl.constexpr,
):  # fmt: skip
    """The gates of a group's heads, and their norm as one row, if there is one."""
    t, e = tl.program_id(0).to(tl.int64), tl.arange(0, E2)
    real, element = e < E, tl.program_id(1) * E + e
    place = t * (G * E) + element
    read = tl.load(reads_ptr + place, mask=real, other=0.0) + tl.load(skipped_ptr + place, mask=real, other=0.0)
    read *= silu(tl.load(x_ptr + t * stride_xt + element, mask=real, other=0.0).to(tl.float32) * gate)
    if NORMED:
        inverse = inverse_root(tl.sum(read * read, 0) / E + eps)
        read = read * inverse * tl.load(norm_ptr + element, mask=real, other=0.0)
    tl.store(out_ptr + place, cast(read, out_ptr.dtype.element_ty), mask=real)
