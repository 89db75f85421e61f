"""Short convolutions on a GPU: a launch that writes the inputs, and one that reads each token's taps."""
# pyright: reportArgumentType=false, reportCallIssue=false, reportReturnType=false, reportAttributeAccessIssue=false
# pyright: reportIndexIssue=false, reportGeneralTypeIssues=false
# (what triton.jit takes and gives is no function to a type checker)

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.gpu import check_device, launch
from kernels.tracing import as_wide, register

BLOCK = 1024


def short_conv(
    x_TF: Tensor, weight_KE: Tensor, bias_E: Tensor | None, rows_SE: Tensor, slots_T: Tensor, ancestors_TN: Tensor
) -> Tensor:
    """See the front for arguments.

    Raises:
        ValueError: tensors that the kernels cannot reach.
    """
    check_device(x_TF, weight_KE, rows_SE, slots_T, ancestors_TN)
    T, (K, E) = len(x_TF), weight_KE.shape
    if x_TF.stride(1) != 1:
        x_TF = x_TF.contiguous()
    out_TE = torch.empty(T, E, dtype=x_TF.dtype, device=x_TF.device)
    grid, sizes = (T, triton.cdiv(E, BLOCK)), {"E": E, "BLOCK": BLOCK}
    launch(_write, *grid)(x_TF, rows_SE, slots_T, x_TF.stride(0), **sizes)
    bias, sizes = weight_KE if bias_E is None else bias_E, sizes | {"N": K - 1, "BIAS": bias_E is not None}
    launch(_mix, *grid)(x_TF, weight_KE, bias, rows_SE, ancestors_TN, slots_T, out_TE, x_TF.stride(0), **sizes)
    return out_TE


@triton.jit
def _write(x_ptr, rows_ptr, slots_ptr, stride_xt, E: tl.constexpr, BLOCK: tl.constexpr):
    """A block of one token's input, rounded as a product of the dtype is, and then to the cache's."""
    t = tl.program_id(0).to(tl.int64)
    e = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    b = tl.load(x_ptr + t * stride_xt + e, mask=e < E)
    x = tl.load(x_ptr + t * stride_xt + 2 * E + e, mask=e < E)
    product = (b.to(tl.float32) * x.to(tl.float32)).to(b.dtype)
    tl.store(rows_ptr + tl.load(slots_ptr + t) * E + e, product.to(rows_ptr.dtype.element_ty), mask=e < E)


@triton.jit
def _mix(
    x_ptr, weight_ptr, bias_ptr, rows_ptr, ancestors_ptr, slots_ptr, out_ptr,
    stride_xt,
    N: tl.constexpr, BIAS: tl.constexpr, E: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A block of one token's output."""
    t = tl.program_id(0).to(tl.int64)
    e = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    real = e < E
    own = tl.load(rows_ptr + tl.load(slots_ptr + t) * E + e, mask=real)
    total = own.to(tl.float32) * tl.load(weight_ptr + N * E + e, mask=real).to(tl.float32)
    for n in tl.static_range(N):
        row = tl.load(rows_ptr + tl.load(ancestors_ptr + t * N + n) * E + e, mask=real)
        total += row.to(tl.float32) * tl.load(weight_ptr + (N - 1 - n) * E + e, mask=real).to(tl.float32)
    if BIAS:
        total += tl.load(bias_ptr + e, mask=real).to(tl.float32)
    c = tl.load(x_ptr + t * stride_xt + E + e, mask=real)
    tl.store(out_ptr + t * E + e, (c.to(tl.float32) * total).to(c.dtype), mask=real)


register("short_conv_triton", short_conv, as_wide, mutates=("rows_SE",))
