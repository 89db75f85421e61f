"""KV writes on a GPU: one launch for keys and values, with a program per token and block of its row or, for an 8-bit
cache, per few heads. The launch includes head norms and rotations if the caller passes any."""
# pyright: reportArgumentType=false, reportCallIssue=false, reportReturnType=false, reportAttributeAccessIssue=false
# pyright: reportIndexIssue=false, reportGeneralTypeIssues=false
# (what triton.jit takes and gives is no function to a type checker)

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.gpu import INTERPRETED, after_the_last, cast, check_device, inverse_root, launch, raw
from kernels.kv_fp8 import LARGEST_NUMBER as FP8_MOST
from kernels.kv_fp8 import PER_STEP as FP8_PER_STEP
from kernels.kv_int8 import LEAST_SCALE, PER_STEP
from kernels.kv_write.turn import HeadTransform
from kernels.tracing import like, nothing, register

BLOCK = 1024
HEADS = 64 if INTERPRETED.value else 4  # of a program: an interpreted one costs the same however many it has
PER_STEP, LEAST_SCALE = tl.constexpr(PER_STEP), tl.constexpr(LEAST_SCALE)
FP8_MOST, FP8_PER_STEP = tl.constexpr(float(FP8_MOST)), tl.constexpr(FP8_PER_STEP)


def kv_write(k_GSD: Tensor, v_GSD: Tensor, k_TGD: Tensor, v_TGD: Tensor, slots_T: Tensor) -> None:
    """See the front for arguments.

    Raises:
        ValueError: tensors that the kernel cannot reach.
    """
    check_device(k_GSD, v_GSD, k_TGD, v_TGD, slots_T)
    T, G, D = k_TGD.shape
    if k_TGD.stride(2) != 1 or v_TGD.stride(2) != 1:
        k_TGD, v_TGD = k_TGD.contiguous(), v_TGD.contiguous()
    strides = k_TGD.stride(0), k_TGD.stride(1), v_TGD.stride(0), v_TGD.stride(1)
    k_GSD, v_GSD = raw(k_GSD), raw(v_GSD)
    if k_GSD.dtype.itemsize == 1:
        sizes = {"G": G, "D": D, "D2": triton.next_power_of_2(D), "M": HEADS, "num_warps": 1}
        written = k_GSD, v_GSD, k_TGD, v_TGD, slots_T, T, k_GSD.stride(0), v_GSD.stride(0)
        launch(_write_rows, triton.cdiv(T * G, HEADS))(*written, *strides, **sizes)
        return
    launch(_write, T, triton.cdiv(G * D, BLOCK))(
        k_GSD, v_GSD, k_TGD, v_TGD, slots_T,
        k_GSD.stride(0), v_GSD.stride(0), *strides,
        G=G, D=D, BLOCK=BLOCK,
    )  # fmt: skip


def rotary_write(
    k_GSD: Tensor, v_GSD: Tensor, q_THD: Tensor, k_TGD: Tensor, v_TGD: Tensor, slots_T: Tensor, turn: HeadTransform
) -> Tensor:
    """See the front for arguments.

    Raises:
        ValueError: tensors that the kernel cannot reach.
    """
    check_device(k_GSD, v_GSD, q_THD, k_TGD, v_TGD, slots_T)
    (T, H, D), G, k_GSD, v_GSD = q_THD.shape, k_TGD.shape[1], raw(k_GSD), raw(v_GSD)
    q_THD, k_TGD, v_TGD = (x if x.stride(2) == 1 else x.contiguous() for x in (q_THD, k_TGD, v_TGD))
    angles = [x.contiguous() for x in turn.angles] or [slots_T, slots_T]
    norms, kind = [], 0
    for norm in (turn.q_norm, turn.k_norm):
        if norm is not None:
            kind = 1 if norm[1] is None else 2
        weight_D, bias_D = norm or (slots_T, None)
        norms += [weight_D, slots_T if bias_D is None else bias_D]
    out_THD = torch.empty(T, H, D, dtype=q_THD.dtype, device=q_THD.device)
    strides = (x.stride(i) for x in (q_THD, k_TGD, v_TGD) for i in (0, 1))
    whole, D2 = turn.all_heads and kind > 0, triton.next_power_of_2(D)
    M = triton.next_power_of_2(max(H, G)) if whole else HEADS
    launch(_turn, *((T, 3) if whole else (triton.cdiv(T * (H + 2 * G), HEADS),)))(
        q_THD, k_TGD, v_TGD, *angles[:2], *angles[-2:], *norms, k_GSD, v_GSD, out_THD, slots_T, T,
        *strides, k_GSD.stride(0), v_GSD.stride(0), turn.eps,
        H=H, G=G, D=D, D2=D2, R=turn.angles[0].shape[1] if turn.angles else 0, NORM=kind, LAST=turn.norms_last,
        ALL=whole, OWN=turn.own_norms, VALUES=turn.value_norms, M=M, num_warps=warps(M * D2) if whole else 1,
    )  # fmt: skip
    return out_THD


def warps(elements: int) -> int:
    """The warps of a program that has the heads of a token: 16 elements for each thread."""
    return min(max(elements // 512, 1), 16)


@triton.jit
def _write(
    k_ptr, v_ptr, new_k_ptr, new_v_ptr, slots_ptr,
    stride_kg, stride_vg, stride_nkt, stride_nkg, stride_nvt, stride_nvg,
    G: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr = False,
):  # fmt: skip
    """A block of one token's keys and values, all heads in a row."""
    after_the_last(EARLY)
    t = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    g, d, real = (i // D).to(tl.int64), i % D, i < G * D
    at = tl.load(slots_ptr + t) * D + d
    k = tl.load(new_k_ptr + t * stride_nkt + g * stride_nkg + d, mask=real)
    v = tl.load(new_v_ptr + t * stride_nvt + g * stride_nvg + d, mask=real)
    tl.store(k_ptr + g * stride_kg + at, k, mask=real)
    tl.store(v_ptr + g * stride_vg + at, v, mask=real)


@triton.jit(do_not_specialize=["T"])
def _write_rows(
    k_ptr, v_ptr, new_k_ptr, new_v_ptr, slots_ptr, T,
    stride_kg, stride_vg, stride_nkt, stride_nkg, stride_nvt, stride_nvg,
    G: tl.constexpr, D: tl.constexpr, D2: tl.constexpr, M: tl.constexpr, EARLY: tl.constexpr = False,
):  # fmt: skip
    """M rows of keys and as many of values, heads of a token in a row."""
    after_the_last(EARLY)
    n_M = tl.program_id(0) * M + tl.arange(0, M)
    t_M, g_M, real_M = (n_M // G).to(tl.int64), (n_M % G).to(tl.int64), n_M < T * G
    d_D = tl.arange(0, D2)
    read_MD = real_M[:, None] & (d_D < D)[None, :]
    slot_M = tl.load(slots_ptr + t_M, mask=real_M, other=0)
    k_MD = tl.load(new_k_ptr + (t_M * stride_nkt + g_M * stride_nkg)[:, None] + d_D[None, :], mask=read_MD, other=0.0)
    v_MD = tl.load(new_v_ptr + (t_M * stride_nvt + g_M * stride_nvg)[:, None] + d_D[None, :], mask=read_MD, other=0.0)
    store_rows(k_MD, k_ptr, g_M, slot_M, stride_kg, real_M, D, D2)
    store_rows(v_MD, v_ptr, g_M, slot_M, stride_vg, real_M, D, D2)


@triton.jit
def store_rows(x_MD, cache_ptr, g_M, slot_M, stride, real_M, D: tl.constexpr, D2: tl.constexpr):
    """Rows of heads g in slots, as a cache of this dtype keeps them; see `raw`."""
    head_M = g_M * stride
    if cache_ptr.dtype.element_ty == tl.uint8:
        _store_fp8(x_MD, cache_ptr, head_M + slot_M * D, head_M + stride // (D + 4) * D + slot_M * 4, real_M, D, D2)
    elif cache_ptr.dtype.element_ty == tl.int8:
        _store_int8(x_MD, cache_ptr, head_M + slot_M * D, head_M + stride // (D + 2) * D + slot_M * 2, real_M, D, D2)
    else:
        d_D = tl.arange(0, D2)
        at_MD = (head_M + slot_M * D)[:, None] + d_D[None, :]
        tl.store(cache_ptr + at_MD, x_MD, mask=real_M[:, None] & (d_D < D)[None, :])


@triton.jit
def _largest(x_MD):
    """Rows in float32, 0 if they are not finite, their largest magnitudes, and whether they are finite: of numbers as
    bits, magnitudes have the order of the numbers."""
    x_MD = x_MD.to(tl.float32)
    most_M = tl.max(x_MD.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 1)
    finite_M = most_M < 0x7F800000
    most_M = tl.where(finite_M, most_M, 0).to(tl.float32, bitcast=True)
    return tl.where(finite_M[:, None], x_MD, 0.0), most_M, finite_M


@triton.jit
def _store_fp8(x_MD, cache_ptr, at_M, scale_at_M, real_M, D: tl.constexpr, D2: tl.constexpr):
    """Rows, as `kernels.kv_fp8` defines them. Processors before sm_89 have no conversion."""
    x_MD, most_M, finite_M = _largest(x_MD)
    scale_M = most_M * FP8_PER_STEP
    scale_M = tl.where(scale_M < LEAST_SCALE, 0.0, scale_M)
    inverse_M = tl.where(scale_M == 0, 0.0, tl.div_rn(1.0, tl.where(scale_M == 0, 1.0, scale_M)))
    y_MD = tl.minimum(tl.maximum(x_MD * inverse_M[:, None], -FP8_MOST), FP8_MOST)
    size_MD, sign_MD = tl.abs(y_MD), (y_MD.to(tl.int32, bitcast=True) >> 24) & 0x80
    bits_MD = size_MD.to(tl.int32, bitcast=True)
    e_MD = ((bits_MD + 0x7FFFF + ((bits_MD >> 20) & 1)) >> 20) - 0x3C0  # 3 bits of the fraction; exponents begin at -7
    few_MD = (size_MD + 16384.0).to(tl.int32, bitcast=True) & 15  # steps of 2^-9, which is the last bit of this sum
    e_MD = tl.where(size_MD < 0.015625, few_MD, e_MD) | sign_MD
    d_D = tl.arange(0, D2)
    real_MD = real_M[:, None] & (d_D < D)[None, :]
    tl.store(cache_ptr + at_M[:, None] + d_D[None, :], e_MD.to(tl.uint8), mask=real_MD)
    scale_ptrs = (cache_ptr + scale_at_M).to(tl.pointer_type(tl.float32))
    tl.store(scale_ptrs, tl.where(finite_M, scale_M, float("nan")), mask=real_M)


@triton.jit
def _store_int8(x_MD, cache_ptr, at_M, scale_at_M, real_M, D: tl.constexpr, D2: tl.constexpr):
    """Rows, as `kernels.kv_int8` defines them."""
    x_MD, most_M, finite_M = _largest(x_MD)
    exact_M = most_M * PER_STEP
    bits_M = exact_M.to(tl.int32, bitcast=True)
    nearest_M = (bits_M + 0x7FFF + ((bits_M >> 16) & 1)) >> 16  # of the nearest bfloat16
    bits_M = tl.where(exact_M < LEAST_SCALE, 0, nearest_M)
    scale_M = (bits_M << 16).to(tl.float32, bitcast=True)
    inverse_M = tl.where(bits_M == 0, 0.0, tl.div_rn(1.0, tl.where(bits_M == 0, 1.0, scale_M)))
    q_MD = tl.minimum(tl.maximum(x_MD * inverse_M[:, None], -127.0), 127.0)
    q_MD = (q_MD + 12582912.0) - 12582912.0  # 1.5 * 2^23: a sum with it has no fraction
    d_D = tl.arange(0, D2)
    tl.store(cache_ptr + at_M[:, None] + d_D[None, :], q_MD.to(tl.int8), mask=real_M[:, None] & (d_D < D)[None, :])
    scale_ptrs = (cache_ptr + scale_at_M).to(tl.pointer_type(tl.int16))
    tl.store(scale_ptrs, tl.where(finite_M, bits_M, 0x7F80).to(tl.int16), mask=real_M)


@triton.jit(do_not_specialize=["T"])
def _turn(
    q_ptr, new_k_ptr, new_v_ptr, cos_ptr, sin_ptr, q_cos_ptr, q_sin_ptr,
    q_weight_ptr, q_bias_ptr, k_weight_ptr, k_bias_ptr, k_ptr, v_ptr, out_ptr, slots_ptr, T,
    stride_qt, stride_qh, stride_nkt, stride_nkg, stride_nvt, stride_nvg, stride_kg, stride_vg, eps,
    H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, D2: tl.constexpr, R: tl.constexpr,
    NORM: tl.constexpr, LAST: tl.constexpr, ALL: tl.constexpr, OWN: tl.constexpr, VALUES: tl.constexpr, M: tl.constexpr,
    EARLY: tl.constexpr = False,
):  # fmt: skip
    """M heads: of a token those of queries, of keys, of values in a row; or all those of queries, keys or values of one
    token. Every step is rounded to the dtype."""
    after_the_last(EARLY)
    n_M = tl.program_id(0) * M + tl.arange(0, M)
    t_M, h_M, real_M = (n_M // (H + 2 * G)).to(tl.int64), (n_M % (H + 2 * G)).to(tl.int64), n_M < T * (H + 2 * G)
    if ALL:
        kind = tl.program_id(1)
        t_M = (tl.program_id(0) + tl.arange(0, M) * 0).to(tl.int64)
        h_M = tl.arange(0, M).to(tl.int64) + tl.where(kind == 0, 0, H + tl.where(kind == 1, 0, G))
        real_M = tl.arange(0, M) < tl.where(kind == 0, H, G)
    q_M, v_M = real_M & (h_M < H), real_M & (h_M >= H + G)
    k_M = real_M & (h_M >= H) & (h_M < H + G)
    g_M = tl.where(k_M, h_M - H, tl.where(v_M, h_M - H - G, 0))
    d_D = tl.arange(0, D2)
    real_D, turned_D = d_D < D, d_D < R
    other_D = tl.where(d_D < R // 2, d_D + R // 2, d_D - R // 2)  # the element that a rotated one is paired with
    at_q_M, at_k_M = t_M * stride_qt + h_M * stride_qh, t_M * stride_nkt + g_M * stride_nkg
    x_MD = _pick(q_ptr, at_q_M, q_M, new_k_ptr, at_k_M, k_M, d_D, real_D).to(tl.float32)
    y_MD = _pick(q_ptr, at_q_M, q_M, new_k_ptr, at_k_M, k_M, other_D, turned_D).to(tl.float32)
    dtype = out_ptr.dtype.element_ty
    norms = q_weight_ptr, q_bias_ptr, k_weight_ptr, k_bias_ptr
    LONG: tl.constexpr = ALL or OWN
    if NORM > 0 and not LAST:
        mean_M, inverse_M = _moments(x_MD, real_D, q_M | k_M, eps, D, NORM, ALL)
        x_MD = _normed(x_MD, d_D, real_D, q_M, k_M, h_M, g_M, mean_M, inverse_M, norms, D, NORM, LONG, dtype)
        y_MD = _normed(y_MD, other_D, turned_D, q_M, k_M, h_M, g_M, mean_M, inverse_M, norms, D, NORM, LONG, dtype)
    if R > 0:
        at_M, row_M = t_M * R, q_M | k_M
        cos_MD = _pick(q_cos_ptr, at_M, q_M, cos_ptr, at_M, row_M & ~q_M, d_D, turned_D).to(tl.float32)
        sin_MD = _pick(q_sin_ptr, at_M, q_M, sin_ptr, at_M, row_M & ~q_M, d_D, turned_D).to(tl.float32)
        sin_MD = tl.where((d_D < R // 2)[None, :], -sin_MD, sin_MD)
        x_MD = tl.where(turned_D[None, :], x_MD * cos_MD + y_MD * sin_MD, x_MD)
        x_MD = cast(x_MD, dtype).to(tl.float32)
    if NORM > 0 and LAST:
        mean_M, inverse_M = _moments(x_MD, real_D, q_M | k_M, eps, D, NORM, ALL)
        x_MD = _normed(x_MD, d_D, real_D, q_M, k_M, h_M, g_M, mean_M, inverse_M, norms, D, NORM, LONG, dtype)
    x_MD = cast(x_MD, dtype)
    tl.store(out_ptr + ((t_M * H + h_M) * D)[:, None] + d_D[None, :], x_MD, mask=q_M[:, None] & real_D[None, :])
    written_MD = tl.load(
        new_v_ptr + (t_M * stride_nvt + g_M * stride_nvg)[:, None] + d_D[None, :],
        mask=v_M[:, None] & real_D[None, :], other=0.0,
    )  # fmt: skip
    if VALUES:
        wide_MD = written_MD.to(tl.float32)
        wide_MD *= inverse_root(tl.sum(wide_MD * wide_MD, 1) / D + eps)[:, None]
        written_MD = cast(wide_MD, dtype)
    slot_M = tl.load(slots_ptr + t_M, mask=real_M, other=0)
    store_rows(x_MD, k_ptr, g_M, slot_M, stride_kg, k_M, D, D2)
    store_rows(written_MD, v_ptr, g_M, slot_M, stride_vg, v_M, D, D2)


@triton.jit
def _pick(one_ptr, at_one_M, one_M, two_ptr, at_two_M, two_M, d_D, real_D):
    """Elements of rows of one tensor, or of another; 0 elsewhere."""
    one_MD = tl.load(one_ptr + at_one_M[:, None] + d_D[None, :], mask=one_M[:, None] & real_D[None, :], other=0.0)
    two_MD = tl.load(two_ptr + at_two_M[:, None] + d_D[None, :], mask=two_M[:, None] & real_D[None, :], other=0.0)
    return tl.where(one_M[:, None], one_MD, two_MD)


@triton.jit
def _moments(x_MD, real_D, row_M, eps, D: tl.constexpr, NORM: tl.constexpr, ALL: tl.constexpr):
    """The mean of each row and 1 / the deviation from it; of all rows together if ALL. An RMSNorm's mean is 0."""
    share = 1 / D
    if ALL:
        share = 1 / (tl.maximum(tl.sum(row_M.to(tl.int32), 0), 1) * D).to(tl.float32)
    mean_M = tl.sum(x_MD, 1) * 0
    if NORM == 2:
        mean_M = _total(x_MD, ALL) * share
    far_MD = tl.where(row_M[:, None] & real_D[None, :], x_MD - mean_M[:, None], 0.0)
    return mean_M, inverse_root(_total(far_MD * far_MD, ALL) * share + eps)


@triton.jit
def _total(x_MD, ALL: tl.constexpr):
    """The sum of each row, or of all of them for each."""
    sum_M = tl.sum(x_MD, 1)
    if ALL:
        sum_M = sum_M * 0 + tl.sum(sum_M, 0)
    return sum_M


@triton.jit
def _normed(
    x_MD, d_D, real_D, q_M, k_M, h_M, g_M, mean_M, inverse_M, norms,
    D: tl.constexpr, NORM: tl.constexpr, LONG: tl.constexpr, dtype: tl.constexpr,
):  # fmt: skip
    """Elements d of rows after their norm."""
    q_weight_ptr, q_bias_ptr, k_weight_ptr, k_bias_ptr = norms
    y_MD = (x_MD - mean_M[:, None]) * inverse_M[:, None]
    y_MD *= _vector(q_weight_ptr, k_weight_ptr, d_D, real_D, q_M, k_M, h_M, g_M, D, LONG)
    if NORM == 2:
        y_MD += _vector(q_bias_ptr, k_bias_ptr, d_D, real_D, q_M, k_M, h_M, g_M, D, LONG)
    return cast(tl.where(real_D[None, :], y_MD, 0.0), dtype).to(tl.float32)


@triton.jit
def _vector(q_ptr, k_ptr, d_D, real_D, q_M, k_M, h_M, g_M, D: tl.constexpr, LONG: tl.constexpr):
    """Elements d of a norm's vector for each row; LONG: it has D elements for each head."""
    if LONG:
        x_MD = _pick(q_ptr, h_M * D, q_M, k_ptr, g_M * D, k_M, d_D, real_D).to(tl.float32)
    else:
        q_D = tl.load(q_ptr + d_D, mask=real_D, other=0.0).to(tl.float32)
        k_D = tl.load(k_ptr + d_D, mask=real_D, other=0.0).to(tl.float32)
        x_MD = tl.where(q_M[:, None], q_D[None, :], k_D[None, :])
    return x_MD


def _rotary_write(
    k_GSD: Tensor,
    v_GSD: Tensor,
    q_THD: Tensor,
    k_TGD: Tensor,
    v_TGD: Tensor,
    slots_T: Tensor,
    angles: Sequence[Tensor],
    q_weight: Tensor | None,
    q_bias: Tensor | None,
    k_weight: Tensor | None,
    k_bias: Tensor | None,
    eps: float,
    norms_last: bool,
    all_heads: bool,
    own_norms: bool,
    value_norms: bool,
) -> Tensor:
    """`rotary_write` as an operator of tensors and numbers, see `kernels.tracing`."""
    q_norm, k_norm = (None if x is None else (x, y) for x, y in ((q_weight, q_bias), (k_weight, k_bias)))
    turn = HeadTransform(tuple(angles), q_norm, k_norm, eps, norms_last, all_heads, own_norms, value_norms)
    return rotary_write(k_GSD, v_GSD, q_THD, k_TGD, v_TGD, slots_T, turn)


def _queries(k_GSD: Tensor, v_GSD: Tensor, q_THD: Tensor, *_: Any) -> Tensor:
    """A fake like the queries."""
    return like(q_THD)


register("kv_write_triton", kv_write, nothing, mutates=("k_GSD", "v_GSD"))
register("rotary_write_triton", _rotary_write, _queries, mutates=("k_GSD", "v_GSD"))
