"""KV writes on a GPU: one launch for keys and values, a program per token and block of its row."""
# pyright: reportArgumentType=false, reportCallIssue=false, reportReturnType=false, reportAttributeAccessIssue=false
# pyright: reportIndexIssue=false
# (what triton.jit takes and gives is no function to a type checker)

import triton
import triton.language as tl
from torch import Tensor

from kernels.custom_ops import nothing, register
from kernels.gpu import check_device

BLOCK = 1024


def kv_write(k_GSD: Tensor, v_GSD: Tensor, k_TGD: Tensor, v_TGD: Tensor, slots_T: Tensor) -> None:
    """See the front for arguments.

    Raises:
        ValueError: tensors that the kernel cannot reach.
    """
    check_device(k_GSD, v_GSD, k_TGD, v_TGD, slots_T)
    T, G, D = k_TGD.shape
    if k_TGD.stride(2) != 1 or v_TGD.stride(2) != 1:
        k_TGD, v_TGD = k_TGD.contiguous(), v_TGD.contiguous()
    _write[T, triton.cdiv(G * D, BLOCK)](
        k_GSD, v_GSD, k_TGD, v_TGD, slots_T,
        k_GSD.stride(0), v_GSD.stride(0), k_TGD.stride(0), k_TGD.stride(1), v_TGD.stride(0), v_TGD.stride(1),
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


register("kv_write_triton", kv_write, nothing, mutates=("k_GSD", "v_GSD"))
