"""Products of the few rows of a decoding step with matrices that oneDNN packed, at the bandwidth of memory.

oneDNN's own product is the definition, and faster for many rows; both read the same packed matrix. Only C++ has these
products (native.cpp); `quantize` has PyTorch too.
"""

import ctypes
import weakref

import torch
from torch import Tensor

from kernels.checks import expect, floats, native
from kernels.cpp import KINDS, function, why_not

MAX_ROWS = 256  # of a whole pass; with more, oneDNN may be some hundredths quicker
PANEL = 64
STEP = 16  # words; a panel's depth is a multiple of it
_PACKED: dict[int, tuple[torch.dtype, int, int]] = {}  # by address: dtype, rows and columns of matrices that are alive


def dtypes() -> set[torch.dtype]:
    """Returns the dtypes of matrices that have products on this machine."""
    if why_not() or not hasattr(torch.ops.mkldnn, "data_ptr"):
        return set()
    kinds = ctypes.c_int64()
    function("linear_kinds")(ctypes.addressof(kinds))
    every = (torch.float32, torch.bfloat16, torch.int8)
    return {dtype for bit, dtype in enumerate(every) if kinds.value >> bit & 1}


def panels(packed: Tensor, weight_OI: Tensor) -> int:
    """Returns the address of a packed matrix that has products here, or 0. The first and the last panel are compared.

    Args:
        packed: the matrix as oneDNN packed it; it has to live as long as the address is used.
        weight_OI: the matrix, contiguous: float32, bfloat16 or int8.
    """
    (outs, width), per_word = weight_OI.shape, 4 // weight_OI.itemsize
    if weight_OI.dtype not in dtypes() or width % per_word:
        return 0
    depth = -(-width // (per_word * STEP)) * STEP * per_word
    size = PANEL * depth * weight_OI.itemsize
    if torch.ops.mkldnn._nbytes(packed) < -(-outs // PANEL) * size:
        return 0
    address = torch.ops.mkldnn.data_ptr(packed)
    for panel in {0, (outs - 1) // PANEL}:
        rows = weight_OI[panel * PANEL : (panel + 1) * PANEL]
        whole = torch.zeros(PANEL, depth, dtype=rows.dtype)
        whole[: len(rows), :width] = rows
        memory = (ctypes.c_char * size).from_address(address + panel * size)
        found = torch.frombuffer(memory, dtype=torch.int8)
        if not found.equal(whole.view(PANEL, -1, per_word).transpose(0, 1).contiguous().view(torch.int8).flatten()):
            return 0
    _PACKED[address] = weight_OI.dtype, outs, width
    weakref.finalize(packed, _PACKED.pop, address, None)
    return address


def _check(x: Tensor, address: int, dtype: torch.dtype, out_features: int, bias: Tensor | None) -> None:
    """Raises ValueError unless rows, matrix and bias fit together."""
    floats("x", x)
    found = dtype, out_features, x.shape[-1]
    if _PACKED.get(address) != found:
        raise ValueError(f"address: expected panels of {list(found)}, got {_PACKED.get(address, 'no packed matrix')}")
    if bias is not None:
        expect("bias", bias, x.dtype, (out_features,), x.device)
    native(x)


def few_rows(x: Tensor) -> bool:
    """Whether x has so few rows that these products are faster than those of oneDNN."""
    return x.numel() <= MAX_ROWS * x.shape[-1]


def linear(x: Tensor, address: int, bias: Tensor | None, out_features: int) -> Tensor:
    """x W^T + b.

    Args:
        x: [..., in], float32 or bfloat16, the dtype of the matrix.
        address: of its `panels`.
        bias: [out_features] or None, contiguous, in the dtype of x.
        out_features: rows of the matrix.

    Raises:
        ValueError: tensors that do not fit together, or an address that `panels` did not give or that is no longer one.
    """
    _check(x, address, x.dtype, out_features, bias)
    x, width = x.contiguous(), x.shape[-1]
    out = torch.empty(*x.shape[:-1], out_features, dtype=x.dtype)
    function("linear")(
        *(KINDS[x.dtype], torch.get_num_threads(), x.data_ptr(), address),
        *(None if bias is None else bias.data_ptr(), out.data_ptr()),
        *(x.numel() // width, width * x.itemsize // 4, out_features),
    )
    return out


def int8_linear(x: Tensor, address: int, sum_O: Tensor, scale_O: Tensor, bias: Tensor | None) -> Tensor:
    """x W^T + b of rows that are rounded as `quantize` does.

    Args:
        x: [..., in], float32, bfloat16 or float16.
        address: of the `panels` of an int8 matrix.
        sum_O: int32, of the matrix's rows.
        scale_O: float32, of the matrix's rows, over 127.
        bias: [out] or None, contiguous, in the dtype of x.

    Raises:
        ValueError: see `linear`.
    """
    _check(x, address, torch.int8, len(scale_O), bias)
    expect("sum_O", sum_O, torch.int32, scale_O.shape, x.device)
    expect("scale_O", scale_O, torch.float32, scale_O.shape[:1], x.device)
    x, width = x.contiguous(), x.shape[-1]
    out = torch.empty(*x.shape[:-1], len(scale_O), dtype=x.dtype)
    function("int8_linear")(
        *(KINDS[x.dtype], torch.get_num_threads(), x.data_ptr(), address, sum_O.data_ptr(), scale_O.data_ptr()),
        *(None if bias is None else bias.data_ptr(), out.data_ptr()),
        *(x.numel() // width, width, len(scale_O)),
    )
    return out


def quantize(x: Tensor, *, impl: str) -> tuple[Tensor, Tensor]:
    """Rows in steps of 1 / 127 of their largest magnitude, rounded.

    Args:
        x: [..., in]. A row of zeros has undefined steps.
        impl: "cpp" for C++ (float32, bfloat16 and float16, on a CPU); otherwise PyTorch.

    Returns:
        uint8 steps, 128 standing for 0, and the largest magnitudes [..., 1] in the dtype of x.

    Raises:
        ValueError: x is not of floats, is empty, or is not for C++.
    """
    floats("x", x)
    if impl != "cpp":
        steps = x.to(torch.float32, copy=True)
        top = steps.abs().amax(-1, keepdim=True)
        return steps.mul_(127 / top).add_(128.5).int().to(torch.uint8), top.to(x.dtype)
    native(x)
    x, width = x.contiguous(), x.shape[-1]
    steps = torch.empty(x.shape, dtype=torch.uint8)
    top = torch.empty(*x.shape[:-1], 1, dtype=x.dtype)
    function("quantize")(
        *(KINDS[x.dtype], torch.get_num_threads(), x.data_ptr(), steps.data_ptr(), top.data_ptr(), top.numel(), width)
    )
    return steps, top
