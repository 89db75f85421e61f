"""Row-wise operators on a GPU: norms, the norm of a sum, activations, gates and the top sums, one launch each;
log-probabilities, two."""
# pyright: reportArgumentType=false, reportCallIssue=false, reportReturnType=false, reportAttributeAccessIssue=false
# pyright: reportIndexIssue=false, reportGeneralTypeIssues=false
# (what triton.jit takes and gives is no function to a type checker)

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.gpu import INTERPRETED, after_the_last, cast, check_device, inverse_root, launch, tanh
from kernels.rows import triton_sums
from kernels.rows.checks import ACTIVATIONS, GATES, SPAN, LogSoftmax, TopSums, Vectors
from kernels.rows.triton_next import next_nodes as next_nodes  # an operator of this implementation

BLOCK = 1024
WIDE = 4096  # elements of a row of logits that a program takes
ROWS = 16 if INTERPRETED.value else 1  # of a program: an interpreted program costs the same however many it has
NUMBERS = {name: number for number, name in enumerate((*ACTIVATIONS, *GATES))}


def rms_norm(x_NE: Tensor, weight_E: Tensor, eps: float) -> Tensor:
    """See the front for arguments."""
    return _add_norm(x_NE, (), (weight_E, None), None, 1.0, eps)[1]


def layer_norm(x_NE: Tensor, weight_E: Tensor, bias_E: Tensor, eps: float) -> Tensor:
    """See the front for arguments."""
    return _add_norm(x_NE, (), (weight_E, bias_E), None, 1.0, eps)[1]


def add_norm(
    x_NE: Tensor,
    addends: Sequence[Tensor],
    norm: Vectors | None,
    out_norm: Vectors | None = None,
    *,
    scale: float = 1.0,
    eps: float,
) -> tuple[Tensor, Tensor]:
    """See the front for arguments."""
    return _add_norm(x_NE, addends, norm, out_norm, scale, eps)


def activation(x_NM: Tensor, name: str) -> Tensor:
    """See the front for arguments."""
    return _gate(x_NM, name, gated=False)


def activation_mul(x_NM: Tensor, name: str) -> Tensor:
    """See the front for arguments."""
    return _gate(x_NM, name, gated=True)


def xielu(x_NM: Tensor, curve_4: Tensor) -> Tensor:
    """See the front for arguments."""
    check_device(x_NM, curve_4)
    rows_NM = _rows(x_NM)
    N, M = rows_NM.shape
    out = torch.empty(x_NM.shape, dtype=x_NM.dtype, device=x_NM.device)
    grid, sizes = (triton.cdiv(N, ROWS), triton.cdiv(M, BLOCK // 2)), {"WIDTH": M, "M": ROWS, "BLOCK": BLOCK // 2}
    launch(_xielu, *grid)(rows_NM, curve_4.contiguous(), out, N, rows_NM.stride(0), **sizes)
    return out


def sigmoid_mul(x_NM: Tensor, gate_NM: Tensor, softplus: bool = False) -> Tensor:
    """See the front for arguments."""
    check_device(x_NM, gate_NM)
    x_NM, gate_NM = _rows(x_NM), _rows(gate_NM)
    N, M = x_NM.shape
    out_NM = torch.empty(N, M, dtype=x_NM.dtype, device=x_NM.device)
    grid = triton.cdiv(N, ROWS), triton.cdiv(M, BLOCK // 2)
    strides, sizes = (x_NM.stride(0), gate_NM.stride(0)), {"WIDTH": M, "M": ROWS, "BLOCK": BLOCK // 2}
    sizes |= {"SHARE": M // max(1, gate_NM.shape[1]), "SOFTPLUS": softplus}
    launch(_let_through, *grid)(x_NM, gate_NM, out_NM, N, *strides, **sizes)
    return out_NM


def log_softmax(x_NV: Tensor, size: int, out: LogSoftmax | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """See the front for arguments; two launches, so that a few rows keep a GPU busy."""
    check_device(x_NV)
    x_NV = _rows(x_NV)
    (N, V), device = x_NV.shape, x_NV.device
    grid = triton.cdiv(N, ROWS), triton.cdiv(V, WIDE)
    part_3NC = torch.empty(3, N, grid[1], dtype=torch.float32, device=device)
    logp_NV, finite_N, peaks_NB = out or (
        torch.empty(N, V, dtype=torch.float32, device=device),
        torch.empty(N, dtype=torch.bool, device=device),
        None,
    )
    if peaks_NB is None:
        peaks_NB = torch.empty(N, triton.cdiv(V, SPAN), dtype=torch.float32, device=device)
    launch(_mass, *grid)(x_NV, part_3NC, N, x_NV.stride(0), V=V, M=ROWS, WIDE=WIDE)
    launch(_log_softmax, *grid)(
        x_NV, part_3NC, logp_NV, finite_N.view(torch.uint8), peaks_NB, N, x_NV.stride(0),
        V=V, END=size, SPAN=SPAN, C=grid[1], C2=triton.next_power_of_2(grid[1]), M=ROWS, WIDE=WIDE,
    )  # fmt: skip
    return logp_NV, finite_N, peaks_NB


def top_sums_of(logp_NV: Tensor, wanted: Sequence[tuple[slice, TopSums]], peaks_NB: Tensor | None) -> list[Tensor]:
    """See the front for arguments; one launch, and another one where peaks are not known."""
    check_device(logp_NV)
    (N, V), device = logp_NV.shape, logp_NV.device
    logp_NV = _rows(logp_NV)
    ranges = [(rows.start, rows.stop) for rows, _ in wanted]
    counts = [min(k, (end - first) * V) for (first, end), (_, (_, k)) in zip(ranges, wanted, strict=True)]
    if peaks_NB is None:
        peaks_NB = torch.empty(N, triton.cdiv(V, SPAN), dtype=torch.float32, device=device)
        grid = triton.cdiv(N, ROWS), triton.cdiv(V, WIDE)
        launch(_peaks, *grid)(logp_NV, peaks_NB, N, logp_NV.stride(0), V=V, SPAN=SPAN, M=ROWS, WIDE=WIDE)
    lists = [x for _, (sums, _) in wanted if not isinstance(sums, Tensor) for x in sums]
    given_M, parts, at = torch.tensor(lists, dtype=torch.float32).to(device, non_blocking=True), [], 0
    for _, (sums, _) in wanted:
        parts.append(sums if isinstance(sums, Tensor) else given_M[at : at + len(sums)])
        at += 0 if isinstance(sums, Tensor) else len(sums)
    sums_M = given_M if at == sum(map(len, parts)) else torch.cat(parts) if len(parts) > 1 else parts[0]
    out = triton_sums.top_sums(logp_NV, ranges, sums_M, counts, peaks_NB)
    return list(out.split([2 * k + 1 for k in counts]))


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
    weight_E, bias_E, out_weight_E, out_bias_E = (
        x_NE if y_E is None else y_E.contiguous() for y_E in (*(norm or (None, None)), *(out_norm or (None, None)))
    )  # the tensor that stands for none is not read
    E2 = triton.next_power_of_2(E)
    launch(_sum, triton.cdiv(len(x_NE), ROWS))(
        x_NE, one_NE, two_NE, weight_E, bias_E, out_weight_E, out_bias_E, total_NE, out_NE,
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
    launch(_activate, triton.cdiv(N, ROWS), triton.cdiv(M, BLOCK // 2))(x_NM, out, N, x_NM.stride(0), **sizes)
    return out


@triton.jit(do_not_specialize=["N"])
def _sum(
    x_ptr, one_ptr, two_ptr, weight_ptr, bias_ptr, out_weight_ptr, out_bias_ptr, total_ptr, out_ptr,
    N, stride_xn, stride_on, stride_tn, scale, eps,
    ADDENDS: tl.constexpr, NORM: tl.constexpr, OUT_NORM: tl.constexpr, SCALED: tl.constexpr,
    E: tl.constexpr, E2: tl.constexpr, M: tl.constexpr, EARLY: tl.constexpr = False,
):  # fmt: skip
    """M rows. Every step is rounded to the dtype, as separate operators would leave it."""
    after_the_last(EARLY)
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
    """The output of a part as it is added to the stream: normed and scaled."""
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
    inverse_M = inverse_root(tl.sum(x_ME * x_ME, 1) / E + eps)
    y_ME = x_ME * inverse_M[:, None] * weight_E[None, :]
    if NORM == 2:
        y_ME += tl.load(bias_ptr + e_E, mask=e_E < E, other=0.0).to(tl.float32)[None, :]
    return y_ME


@triton.jit(do_not_specialize=["N"])
def _mass(x_ptr, part_ptr, N, stride_xn, V: tl.constexpr, M: tl.constexpr, WIDE: tl.constexpr):
    """For a piece of M rows: the largest, the sum of exponentials below it, and whether all are finite, 1 or 0."""
    n_M = tl.program_id(0).to(tl.int64) * M + tl.arange(0, M)
    v_W = tl.program_id(1) * WIDE + tl.arange(0, WIDE)
    x_MW, real_MW = _piece(x_ptr, n_M, v_W, N, stride_xn, V)
    finite_MW = (x_MW.to(tl.int32, bitcast=True) & 0x7F800000) != 0x7F800000
    x_MW = tl.where(finite_MW, x_MW, float("-inf"))
    top_M = tl.max(x_MW, 1)
    mass_M = tl.sum(tl.exp(x_MW - tl.where(top_M == float("-inf"), 0.0, top_M)[:, None]), 1)
    finite_M = tl.min(tl.where(real_MW & (finite_MW == 0), 0.0, 1.0), 1)
    C = tl.num_programs(1)
    at_M, size = n_M * C + tl.program_id(1), N.to(tl.int64) * C
    tl.store(part_ptr + at_M, top_M, mask=n_M < N)
    tl.store(part_ptr + size + at_M, mass_M, mask=n_M < N)
    tl.store(part_ptr + 2 * size + at_M, finite_M, mask=n_M < N)


@triton.jit(do_not_specialize=["N"])
def _log_softmax(
    x_ptr, part_ptr, out_ptr, finite_ptr, peaks_ptr, N, stride_xn,
    V: tl.constexpr, END: tl.constexpr, SPAN: tl.constexpr, C: tl.constexpr, C2: tl.constexpr,
    M: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """A piece of M rows, of which `_mass` has seen all pieces; a row that is not finite becomes NaN."""
    n_M = tl.program_id(0).to(tl.int64) * M + tl.arange(0, M)
    c_C = tl.arange(0, C2)
    real_MC = (n_M < N)[:, None] & (c_C < C)[None, :]
    at_MC, size = n_M[:, None] * C + c_C[None, :], N.to(tl.int64) * C
    top_MC = tl.load(part_ptr + at_MC, mask=real_MC, other=float("-inf"))
    mass_MC = tl.load(part_ptr + size + at_MC, mask=real_MC, other=0.0)
    finite_M = tl.min(tl.load(part_ptr + 2 * size + at_MC, mask=real_MC, other=1.0), 1) > 0
    if tl.program_id(1) == 0:
        tl.store(finite_ptr + n_M, finite_M.to(tl.uint8), mask=n_M < N)
    finite_M &= n_M < N
    top_M = tl.max(top_MC, 1)
    top_M = tl.where(top_M == float("-inf"), 0.0, top_M)
    mass_M = tl.where(finite_M, tl.sum(mass_MC * tl.exp(top_MC - top_M[:, None]), 1), 1.0)
    v_W = tl.program_id(1) * WIDE + tl.arange(0, WIDE)
    x_MW, real_MW = _piece(x_ptr, n_M, v_W, N, stride_xn, V)
    x_MW = tl.where(finite_M[:, None], x_MW, 0.0)
    x_MW = tl.where((v_W < END)[None, :], x_MW - top_M[:, None] - tl.log(mass_M)[:, None], float("-inf"))
    out_MW = tl.where(finite_M[:, None], x_MW, float("nan"))
    tl.store(out_ptr + n_M[:, None] * V + v_W[None, :], out_MW, mask=real_MW)
    _store_peaks(x_MW, peaks_ptr, n_M, N, V, SPAN, M, WIDE)


@triton.jit(do_not_specialize=["N"])
def _peaks(x_ptr, peaks_ptr, N, stride_xn, V: tl.constexpr, SPAN: tl.constexpr, M: tl.constexpr, WIDE: tl.constexpr):
    """Peaks of a piece of M rows."""
    n_M = tl.program_id(0).to(tl.int64) * M + tl.arange(0, M)
    x_MW, _ = _piece(x_ptr, n_M, tl.program_id(1) * WIDE + tl.arange(0, WIDE), N, stride_xn, V)
    _store_peaks(x_MW, peaks_ptr, n_M, N, V, SPAN, M, WIDE)


@triton.jit
def _piece(x_ptr, n_M, v_W, N, stride_xn, V: tl.constexpr):
    """Elements v of rows n in float32, -inf where there are none; and where there are some."""
    real_MW = (n_M < N)[:, None] & (v_W < V)[None, :]
    at_MW = n_M[:, None] * stride_xn + v_W[None, :]
    return tl.load(x_ptr + at_MW, mask=real_MW, other=float("-inf")).to(tl.float32), real_MW


@triton.jit
def _store_peaks(x_MW, peaks_ptr, n_M, N, V: tl.constexpr, SPAN: tl.constexpr, M: tl.constexpr, WIDE: tl.constexpr):
    """The largest of each `SPAN` elements of this program's piece."""
    B: tl.constexpr = (V + SPAN - 1) // SPAN
    b_P = tl.program_id(1) * (WIDE // SPAN) + tl.arange(0, WIDE // SPAN)
    peaks_MP = tl.max(tl.reshape(x_MW, [M, WIDE // SPAN, SPAN]), 2)
    tl.store(peaks_ptr + n_M[:, None] * B + b_P[None, :], peaks_MP, mask=(n_M < N)[:, None] & (b_P < B)[None, :])


@triton.jit(do_not_specialize=["N"])
def _activate(
    x_ptr, out_ptr, N, stride_xn,
    KIND: tl.constexpr, GATED: tl.constexpr, WIDTH: tl.constexpr, M: tl.constexpr, BLOCK: tl.constexpr,
    EARLY: tl.constexpr = False,
):  # fmt: skip
    """A block of M rows of the output."""
    after_the_last(EARLY)
    n_M = tl.program_id(0).to(tl.int64) * M + tl.arange(0, M)
    i_B = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    real_MB = (n_M < N)[:, None] & (i_B < WIDTH)[None, :]
    at_MB = n_M[:, None] * stride_xn + i_B[None, :]
    dtype = out_ptr.dtype.element_ty
    x_MB = tl.load(x_ptr + at_MB, mask=real_MB, other=0.0).to(tl.float32)
    if GATED:
        up_MB = tl.load(x_ptr + at_MB + WIDTH, mask=real_MB, other=0.0).to(tl.float32)
        y_MB = gated(x_MB, up_MB, KIND, dtype)
    else:
        y_MB = cast(activated(x_MB, KIND), dtype)
    tl.store(out_ptr + n_M[:, None] * WIDTH + i_B[None, :], y_MB, mask=real_MB)


@triton.jit(do_not_specialize=["N"])
def _xielu(
    x_ptr, curve_ptr, out_ptr, N, stride_xn,
    WIDTH: tl.constexpr, M: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr = False,
):  # fmt: skip
    """A block of M rows of the output; exp(x) - 1 by a hyperbolic tangent, so that it keeps its digits near 0."""
    after_the_last(EARLY)
    n_M = tl.program_id(0).to(tl.int64) * M + tl.arange(0, M)
    i_B = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    real_MB = (n_M < N)[:, None] & (i_B < WIDTH)[None, :]
    x_MB = tl.load(x_ptr + n_M[:, None] * stride_xn + i_B[None, :], mask=real_MB, other=0.0).to(tl.float32)
    above, below, slope = tl.load(curve_ptr), tl.load(curve_ptr + 1), tl.load(curve_ptr + 2)
    near = tl.minimum(tl.load(curve_ptr + 3), 0.0)
    t_MB = tanh(0.5 * tl.where(x_MB < near, x_MB, near))
    left_MB = below * (2 * t_MB / (1 - t_MB) - x_MB)
    y_MB = tl.where(x_MB > 0, above * x_MB * x_MB, left_MB) + slope * x_MB
    tl.store(out_ptr + n_M[:, None] * WIDTH + i_B[None, :], cast(y_MB, out_ptr.dtype.element_ty), mask=real_MB)


@triton.jit(do_not_specialize=["N"])
def _let_through(
    x_ptr, gate_ptr, out_ptr, N, stride_xn, stride_gn,
    WIDTH: tl.constexpr, SHARE: tl.constexpr, SOFTPLUS: tl.constexpr, M: tl.constexpr, BLOCK: tl.constexpr,
    EARLY: tl.constexpr = False,
):  # fmt: skip
    """A block of M rows, times the logistic function of their gates, or times their softplus."""
    after_the_last(EARLY)
    n_M = tl.program_id(0).to(tl.int64) * M + tl.arange(0, M)
    i_B = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    real_MB = (n_M < N)[:, None] & (i_B < WIDTH)[None, :]
    x_MB = tl.load(x_ptr + n_M[:, None] * stride_xn + i_B[None, :], mask=real_MB, other=0.0).to(tl.float32)
    gate_B = i_B // SHARE
    gate_MB = tl.load(gate_ptr + n_M[:, None] * stride_gn + gate_B[None, :], mask=real_MB, other=0.0).to(tl.float32)
    if SOFTPLUS:
        small_MB = tl.exp(-tl.abs(gate_MB))  # log(1 + small), precise where it is near to small
        above_MB = 1 + small_MB
        lost_MB = above_MB == 1
        share_MB = small_MB / tl.where(lost_MB, 1.0, above_MB - 1)
        log_MB = tl.where(lost_MB, small_MB, tl.log(above_MB) * share_MB)
        y_MB = cast(x_MB * (tl.where(gate_MB < 0, 0.0, gate_MB) + log_MB), out_ptr.dtype.element_ty)
    else:
        y_MB = cast(x_MB * sigmoid(gate_MB), out_ptr.dtype.element_ty)
    tl.store(out_ptr + n_M[:, None] * WIDTH + i_B[None, :], y_MB, mask=real_MB)


@triton.jit
def gated(gate, up, KIND: tl.constexpr, dtype: tl.constexpr):
    """The function of a gate times what it lets through, both float32, rounded as `activation_mul` does."""
    if KIND == 7:
        gate = tl.where(gate > 7, 7.0, gate)
        up = tl.where(up > 7, 7.0, tl.where(up < -7, -7.0, up)) + 1
    return cast(cast(activated(gate, KIND), dtype).to(tl.float32) * up, dtype)


@triton.jit
def activated(x, KIND: tl.constexpr):
    """The function that `NUMBERS` numbers; NaN stays."""
    if KIND == 0:
        y = tl.where(x < 0, 0.0, x)
    elif KIND == 1:
        y = 0.5 * x * (1 + tl.erf(x * 0.7071067811865476))
    elif KIND == 2:
        y = x * sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))  # (1 + tanh(y)) / 2 = sigmoid(2 y)
    elif KIND == 3:
        y = x * sigmoid(x)
    elif KIND == 4 or KIND == 7:
        y = x * sigmoid(1.702 * x)
    elif KIND == 6:
        y = tl.where(x < 0, 0.0, x * x)
    else:
        y = tanh(x)
    return y


@triton.jit
def sigmoid(x):
    """1 / (1 + exp(-x)), by an exponential that does not overflow."""
    e = tl.exp(-tl.abs(x))
    return tl.where(x < 0, e, 1.0) / (1 + e)
