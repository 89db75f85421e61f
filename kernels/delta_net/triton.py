"""Gated delta nets on a GPU: five launches, see `kernels.recurrent`."""
# pyright: reportArgumentType=false, reportCallIssue=false, reportReturnType=false, reportAttributeAccessIssue=false
# pyright: reportIndexIssue=false, reportGeneralTypeIssues=false
# (what triton.jit takes and gives is no function to a type checker)

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.delta_net.weights import DeltaWeights
from kernels.gpu import cast, inverse_root, launch
from kernels.layout import DeltaPaths
from kernels.recurrent import Recurrence, convolved, heads_at_once, silu, softplus
from kernels.rows.triton import sigmoid


def delta_net(x_TF: Tensor, weights: DeltaWeights, rows_RW: Tensor, states_SHKV: Tensor, paths: DeltaPaths) -> Tensor:
    """See the front for arguments.

    Raises:
        ValueError: tensors that the kernels cannot reach, or float64.
    """
    kind = weights.kind
    pass_ = Recurrence.of(x_TF, kind, rows_RW, states_SHKV, paths, inputs=0, delta=True)
    (T, _), (H, K, V), x_TF = x_TF.shape, kind.state, pass_.x_TF
    out_TE = torch.empty(T, H * V, dtype=x_TF.dtype, device=x_TF.device)
    if not T:
        return out_TE
    strengths_TH, written_TE = pass_.empty(T, H), pass_.empty(T, H * V)
    V2 = triton.next_power_of_2(V)
    some = heads_at_once(H, V2)
    grid, sizes = (T, triton.cdiv(H, some)), {"H": H, "V": V, "V2": V2, "M": some, "C": kind.channels}
    pass_.prepare_keys(weights.taps_KC, None, 0)
    launch(_prepare_values, *grid)(
        x_TF, rows_RW, pass_.paths.paths_TN, weights.taps_KC, weights.decay_H, weights.bias_D, pass_.kept_TP,
        strengths_TH, x_TF.stride(0), weights.most, weights.bound, **pass_.convolution | sizes, KEYS=pass_.keys,
        BY_KEY=kind.key_decays, BOUNDED=weights.bound != 0, K=K, K2=triton.next_power_of_2(K),
    )  # fmt: skip
    reads_TE = pass_.walk(strengths_TH, written_TE)
    launch(_finish, *grid)(
        reads_TE, x_TF, weights.norm_V, out_TE, x_TF.stride(0), weights.eps, SIGMOID=weights.sigmoid, **sizes
    )
    pass_.keep(written_TE)
    return out_TE


@triton.jit
def _prepare_values(
    x_ptr, rows_ptr, paths_ptr, taps_ptr, decay_ptr, bias_ptr, kept_ptr, strengths_ptr, stride_xt, most, bound,
    KEYS: tl.constexpr, BY_KEY: tl.constexpr, BOUNDED: tl.constexpr, H: tl.constexpr, K: tl.constexpr,
    K2: tl.constexpr, V: tl.constexpr, V2: tl.constexpr, M: tl.constexpr,
    INPUTS: tl.constexpr, C: tl.constexpr, ROW: tl.constexpr, REACH: tl.constexpr, TAPS: tl.constexpr,
):  # fmt: skip
    """Values, decays and strengths of some heads of a token."""
    t = tl.program_id(0).to(tl.int64)
    h_M, v = tl.program_id(1) * M + tl.arange(0, M), tl.arange(0, V2)[None, :]
    head, real_M = h_M[:, None], h_M < H
    real, element = (head < H) & (v < V), head * V + v
    channel = 2 * KEYS + element
    value = convolved(x_ptr, rows_ptr, paths_ptr, taps_ptr, t, stride_xt, channel, real, INPUTS, C, ROW, REACH, TAPS)
    kept_ptr += t * (ROW - C) + KEYS
    tl.store(kept_ptr + element, silu(value), mask=real)
    x_ptr += t * stride_xt + C + H * V
    strength = most * sigmoid(tl.load(x_ptr + h_M, mask=real_M, other=0.0).to(tl.float32))
    tl.store(strengths_ptr + t * H + h_M, strength, mask=real_M)
    factor_M = tl.load(decay_ptr + h_M, mask=real_M, other=0.0)
    if BY_KEY:
        k = tl.arange(0, K2)[None, :]
        real, element = (head < H) & (k < K), head * K + k
        x = tl.load(x_ptr + H + element, mask=real, other=0.0).to(tl.float32)
        x += tl.load(bias_ptr + element, mask=real, other=0.0)
        tl.store(kept_ptr + H * V + element, tl.exp(_log_of_decay(factor_M[:, None], x, bound, BOUNDED)), mask=real)
    else:
        x_M = tl.load(x_ptr + H + h_M, mask=real_M, other=0.0).to(tl.float32)
        x_M += tl.load(bias_ptr + h_M, mask=real_M, other=0.0)
        tl.store(kept_ptr + H * V + h_M, _log_of_decay(factor_M, x_M, bound, BOUNDED), mask=real_M)


@triton.jit
def _log_of_decay(factor, x, bound, BOUNDED: tl.constexpr):
    """The logarithm of a decay, by a factor below 0."""
    if BOUNDED:
        return bound * sigmoid(-factor * x)
    return factor * softplus(x)


@triton.jit
def _finish(
    reads_ptr, x_ptr, norm_ptr, out_ptr, stride_xt, eps, SIGMOID: tl.constexpr,
    H: tl.constexpr, V: tl.constexpr, V2: tl.constexpr, M: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """The norms of some heads of a token, and their gates."""
    t = tl.program_id(0).to(tl.int64)
    head, v = (tl.program_id(1) * M + tl.arange(0, M))[:, None], tl.arange(0, V2)[None, :]
    real, element = (head < H) & (v < V), head * V + v
    read = tl.load(reads_ptr + t * (H * V) + element, mask=real, other=0.0)
    gate = tl.load(x_ptr + t * stride_xt + C + element, mask=real, other=0.0).to(tl.float32)
    inverse_M = inverse_root(tl.sum(read * read, 1) / V + eps)
    gate = sigmoid(gate) if SIGMOID else silu(gate)
    out = read * inverse_M[:, None] * tl.load(norm_ptr + v, mask=v < V, other=0.0) * gate
    tl.store(out_ptr + t * (H * V) + element, cast(out, out_ptr.dtype.element_ty), mask=real)
