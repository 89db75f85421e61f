"""Fold blocks of keys and values into the running softmax of a tile's rows; shared by both kinds of attention."""
# pyright: reportArgumentType=false, reportCallIssue=false, reportReturnType=false, reportAttributeAccessIssue=false
# pyright: reportIndexIssue=false, reportGeneralTypeIssues=false
# (what triton.jit takes and gives is no function to a type checker)

import triton
import triton.language as tl

from kernels.gpu import cast, dot, finite_e4m3, tanh


@triton.jit
def fold(
    q_MD, k_ptr, v_ptr, slot_N, live_N, visible_MN, scale, cap, top_M, sum_M, acc_MD, far,
    CAPPED: tl.constexpr, MASKED: tl.constexpr, SCALE: tl.constexpr, D: tl.constexpr, D2: tl.constexpr,
    q_MR=None, R: tl.constexpr = 0, R2: tl.constexpr = 0, bias_MN=None,
):  # fmt: skip
    """Take one more block of keys and values into the running maximum, sum and output; unless MASKED all are live.

    `bias_MN`, if given, is added to the scores (`biases`). With R, the values are the keys without their first R
    elements, which `q_MR` multiplies. Keys of 8 bits are loaded twice, because the compiler does not prefetch bytes
    that two products use.
    """
    ONCE: tl.constexpr = R > 0 and SCALE == 0
    d_D = tl.arange(0, D2)
    at_ND = slot_N[:, None] * D + (R + d_D)[None, :]
    if MASKED or D - R < D2:
        live_ND = (live_N if MASKED else slot_N >= 0)[:, None] & (d_D < D - R)[None, :]
        k_ND = tl.load(k_ptr + at_ND, mask=live_ND, other=0)
        v_ND = k_ND if ONCE else tl.load(v_ptr + at_ND, mask=live_ND, other=0)
    else:
        k_ND = tl.load(k_ptr + at_ND)
        v_ND = k_ND if ONCE else tl.load(v_ptr + at_ND)
    if SCALE:
        k_scale_N = _scales(k_ptr + far, slot_N, live_N)
        v_scale_N = k_scale_N if R else _scales(v_ptr + far, slot_N, live_N)
        k_ND, v_ND = _numbers(k_ND, q_MD.dtype), _numbers(v_ND, q_MD.dtype)
        if q_MD.dtype == tl.float16:
            v_ND = (v_ND.to(tl.float32) * v_scale_N[:, None]).to(tl.float16)
    score_MN = dot(q_MD, tl.trans(k_ND))
    if R:
        r_R = tl.arange(0, R2)
        live_NR = (live_N if MASKED else slot_N >= 0)[:, None] & (r_R < R)[None, :]
        k_NR = tl.load(k_ptr + slot_N[:, None] * D + r_R[None, :], mask=live_NR, other=0)
        if SCALE:
            k_NR = _numbers(k_NR, q_MD.dtype)
        score_MN += dot(q_MR, tl.trans(k_NR))
    score_MN *= scale
    if SCALE:
        score_MN *= k_scale_N[None, :]
    if bias_MN is not None:
        score_MN += bias_MN
    if CAPPED:
        score_MN = tanh(score_MN) * cap
    score_MN = tl.where(visible_MN, score_MN, float("-inf"))
    p_MN, fade_M, top_M, sum_M = weigh(score_MN, top_M, sum_M)
    if SCALE and q_MD.dtype != tl.float16:
        p_MN *= v_scale_N[None, :]
    return top_M, sum_M, acc_MD * fade_M[:, None] + dot(cast(p_MN, v_ND.dtype), v_ND)


@triton.jit
def biases(slope_M, place_M, place_N, scale):
    """Return what distances from rows to keys, by their positions, add to scores; None without slopes."""
    bias_MN = None
    if slope_M is not None:
        if slope_M.dtype == tl.bfloat16:
            slope_M = slope_M.to(tl.float32)
            place_M = slope_M * cast(place_M.to(tl.float32), tl.bfloat16).to(tl.float32)
            place_N = cast(place_N.to(tl.float32), tl.bfloat16).to(tl.float32)
            key_MN = cast(slope_M[:, None] * place_N[None, :], tl.bfloat16).to(tl.float32)
            bias_MN = (key_MN - cast(place_M, tl.bfloat16).to(tl.float32)[:, None]) * scale
        else:
            bias_MN = (place_N[None, :] - place_M[:, None]).to(tl.float32) * (slope_M * scale)[:, None]
    return bias_MN


@triton.jit
def weigh(score_MN, top_M, sum_M):
    """Weights of a block's keys, of all before them, and the running maximum and sum."""
    new_M = tl.maximum(top_M, tl.max(score_MN, 1))
    base_M = tl.where(new_M == float("-inf"), 0.0, new_M)
    p_MN = tl.exp2(score_MN - base_M[:, None])
    fade_M = tl.exp2(top_M - base_M)
    return p_MN, fade_M, new_M, sum_M * fade_M + tl.sum(p_MN, 1)


@triton.jit
def _scales(scale_ptr, slot_N, live_N):
    """Scales of slots, float32 of FP8 and bfloat16 of int8, as float32."""
    if scale_ptr.dtype.element_ty == tl.uint8:
        return tl.load(scale_ptr.to(tl.pointer_type(tl.float32)) + slot_N, mask=live_N, other=0.0)
    bits_N = tl.load(scale_ptr.to(tl.pointer_type(tl.int16)) + slot_N, mask=live_N, other=0)
    return (bits_N.to(tl.int32) << 16).to(tl.float32, bitcast=True)


@triton.jit
def _numbers(x_ND, dtype: tl.constexpr):
    """Elements of a cache of 8 bits, which every dtype of queries holds."""
    if x_ND.dtype == tl.uint8:
        return finite_e4m3(x_ND, dtype)
    return cast(x_ND.to(tl.float32), dtype)
