"""KV writes on a GPU: one launch for keys and values, a program per token and block of its row, or, into an int8 cache,
per token and head."""
# pyright: reportArgumentType=false, reportCallIssue=false, reportReturnType=false, reportAttributeAccessIssue=false
# pyright: reportIndexIssue=false
# (what triton.jit takes and gives is no function to a type checker)

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.custom_ops import nothing, register
from kernels.gpu import check_device
from kernels.kv_int8 import LEAST, PER_STEP

BLOCK = 1024
PER_STEP, LEAST = tl.constexpr(PER_STEP), tl.constexpr(LEAST)


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
    if k_GSD.dtype == torch.int8:
        sizes = {"D": D, "D2": triton.next_power_of_2(D), "num_warps": 1}
        _write_int8[T, G](k_GSD, v_GSD, k_TGD, v_TGD, slots_T, k_GSD.stride(0), v_GSD.stride(0), *strides, **sizes)
        return
    _write[T, triton.cdiv(G * D, BLOCK)](
        k_GSD, v_GSD, k_TGD, v_TGD, slots_T,
        k_GSD.stride(0), v_GSD.stride(0), *strides,
        G=G, D=D, BLOCK=BLOCK,
    )  # fmt: skip


@triton.jit
def _write(
    k_ptr, v_ptr, new_k_ptr, new_v_ptr, slots_ptr,
    stride_kg, stride_vg, stride_nkt, stride_nkg, stride_nvt, stride_nvg,
    G: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A block of one token's keys and values, all heads in a row."""
    t = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    g, d, real = (i // D).to(tl.int64), i % D, i < G * D
    at = tl.load(slots_ptr + t) * D + d
    k = tl.load(new_k_ptr + t * stride_nkt + g * stride_nkg + d, mask=real)
    v = tl.load(new_v_ptr + t * stride_nvt + g * stride_nvg + d, mask=real)
    tl.store(k_ptr + g * stride_kg + at, k, mask=real)
    tl.store(v_ptr + g * stride_vg + at, v, mask=real)


@triton.jit
def _write_int8(
    k_ptr, v_ptr, new_k_ptr, new_v_ptr, slots_ptr,
    stride_kg, stride_vg, stride_nkt, stride_nkg, stride_nvt, stride_nvg,
    D: tl.constexpr, D2: tl.constexpr,
):  # fmt: skip
    """One token's keys and values of one head."""
    t, g = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    at = tl.load(slots_ptr + t) * (D + 2)
    _quantise(new_k_ptr + t * stride_nkt + g * stride_nkg, k_ptr + g * stride_kg + at, D, D2)
    _quantise(new_v_ptr + t * stride_nvt + g * stride_nvg, v_ptr + g * stride_vg + at, D, D2)


@triton.jit
def _quantise(x_ptr, row_ptr, D: tl.constexpr, D2: tl.constexpr):
    """One row, as `kernels.kv_int8` defines it; of numbers as bits, magnitudes have the order of the numbers."""
    d_D = tl.arange(0, D2)
    x_D = tl.load(x_ptr + d_D, mask=d_D < D, other=0.0).to(tl.float32)
    most = tl.max(x_D.to(tl.int32, bitcast=True) & 0x7FFFFFFF)
    finite = most < 0x7F800000
    x_D, most = tl.where(finite, x_D, 0.0), tl.where(finite, most, 0)
    exact = most.to(tl.float32, bitcast=True) * PER_STEP
    bits = exact.to(tl.int32, bitcast=True)
    bits = tl.where(exact < LEAST, 0, (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16)  # of the nearest bfloat16
    scale = (bits << 16).to(tl.float32, bitcast=True)
    inverse = tl.where(bits == 0, 0.0, tl.div_rn(1.0, tl.where(bits == 0, 1.0, scale)))
    q_D = tl.minimum(tl.maximum(x_D * inverse, -127.0), 127.0)
    q_D = (q_D + 12582912.0) - 12582912.0  # 1.5 * 2^23: a sum with it has no fraction
    tl.store(row_ptr + d_D, q_D.to(tl.int8), mask=d_D < D)
    bits = tl.where(finite, bits, 0x7F80)
    tl.store(row_ptr + D, bits.to(tl.int8))
    tl.store(row_ptr + D + 1, (bits >> 8).to(tl.int8))


register("kv_write_triton", kv_write, nothing, mutates=("k_GSD", "v_GSD"))
