"""Linear layers with float weights: packed on a CPU, by our own kernels or, without them, by oneDNN."""

import math
import mmap
import os
import platform
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from kernels import cpp, same_bits
from kernels.linear import Packed, PackedParts, dot_products, linear, pack
from kernels.linear.panels import shape as panels_shape
from kernels.stack import Matrix
from kernels.tracing import register, watched
from models.trim import is_mapped, let_go

CHUNK = 1 << 18  # elements of a matrix that are in memory at once, in addition to the result

CONVERTING = ("AVX512_CORE", "AVX512_CORE_VNNI")  # levels of oneDNN that accept bfloat16 but cannot multiply it


def has_kernels(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether our own C++ kernels compute in this dtype on this machine."""
    return device.type == "cpu" and dtype in cpp.KINDS and not cpp.why_not()


def can_pack(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether oneDNN multiplies by prepacked weights of this dtype on this machine (float16 needs AVX512-FP16)."""
    if (
        device.type != "cpu"
        or not torch.backends.mkldnn.is_available()
        or platform.machine() not in ("x86_64", "AMD64")
    ):
        return False
    if dtype == torch.float32:
        return True
    if dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    if dtype == torch.float16:
        return bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())
    return False


def has_products(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether the device multiplies matrices of this dtype by instructions made for it; float32 is faster if not."""
    if dtype in (torch.float32, torch.float64):
        return True
    if device.type == "cuda":
        return dtype != torch.bfloat16 or torch.cuda.is_bf16_supported(including_emulation=False)
    if has_kernels(dtype, device):
        return dtype in dot_products()
    if dtype != torch.bfloat16 or device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return can_pack(dtype, device)
    # oneDNN packs bfloat16 on processors with AVX-512 but without AVX512-BF16, and converts it in every product.
    if not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return False
    if platform.machine() not in ("x86_64", "AMD64"):
        return True  # aarch64 with the BF16 extension
    level = os.environ.get("ONEDNN_MAX_CPU_ISA") or os.environ.get("DNNL_MAX_CPU_ISA") or ""
    return torch.cpu._is_avx512_bf16_supported() and level.upper() not in CONVERTING


class PackedLinear(nn.Module):
    """y = x W^T + b with a packed matrix, see `models.formats.linear.Linear`.

    Args:
        packed: the matrix, or several stacked ones; None if a subclass stores it in another way.
        biases: one [out] per weight, or None for all.
        dtype, device: the dtype and device of the computation; int8 matrices take any dtype.

    Attributes:
        names, made_of: names of the weights, see `models.formats.linear.Linear`.
    """

    names: Sequence[str] = ()
    made_of: Sequence[str] = ()

    def __init__(
        self,
        packed: Packed | PackedParts | None,
        biases: Sequence[Tensor] | None,
        *,
        dtype: torch.dtype,
        device: torch.device,
    ):
        super().__init__()
        self.packed, self.dtype = packed, dtype
        self.bias = torch.cat([b.to(device, dtype) for b in biases]) if biases is not None else None

    @property
    def matrix(self) -> Matrix | None:
        """The matrix for a stack, which has our own products only."""
        return Matrix(self.packed, self.bias) if self.packed and self.dtype in cpp.KINDS else None

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] -> [..., sum of outs]."""
        assert self.packed is not None
        if self.dtype in cpp.KINDS:
            return linear(x, self.packed, self.bias)
        bias = None if self.bias is None else self.bias.float()  # which steps of results come after
        return linear(x.float(), self.packed, bias).to(x.dtype)

    @property
    def rounds(self) -> bool:
        """Whether it multiplies rows rounded to 8 bits."""
        parts = self.packed.parts if isinstance(self.packed, PackedParts) else [self.packed]
        return any(part is not None and part.levels for part in parts)

    def round_rows(self) -> None:
        """Round rows from now on, if the matrix has a product that does."""
        self.packed = self.packed and self.packed.rounding()

    def rows(self, ids_U: Tensor) -> "PackedLinear | None":
        """See `models.formats.linear.Linear`."""
        if not isinstance(self.packed, Packed):
            return None
        bias = None if self.bias is None else [self.bias[ids_U]]
        return PackedLinear(self.packed.rows(ids_U), bias, dtype=self.dtype, device=self.packed.panels.device)


class FloatLinear(PackedLinear):
    """y = x W^T + b, see `models.formats.linear.Linear`.

    Weights are packed into panels for the C++ kernels, or else into oneDNN's blocked layout if it supports them, and
    the original is released, so that one copy stays resident; otherwise they are used where they are, memory-mapped or
    on the device. Panels keep weights in half precision if the layer computes in float32: the products are the same,
    with half the memory.
    """

    ROWS_HINT = 16  # rows per product that oneDNN packs for: a step of decoding, the common case

    def __init__(
        self,
        weights: Iterable[Tensor],
        biases: Sequence[Tensor] | None = None,
        *,
        dtype: torch.dtype,
        device: torch.device,
    ):
        super().__init__(None, biases, dtype=dtype, device=device)
        weights = list(weights)
        self.out_features = sum(w.shape[0] for w in weights)
        self.blocked = False  # in oneDNN's layout
        self.joined = device.type != "cpu"  # product and bias are one launch
        self.weights: list[Tensor] = []
        if has_kernels(dtype, device):
            own, width = stored_dtype({w.dtype for w in weights}, dtype), weights[0].shape[1]
            panels = pack(blocks(weights), own, self.out_features, width)
            self.packed = Packed(panels, self.out_features, width)
        elif can_pack(dtype, device):
            self.blocked = True
            self.weights = [torch.ops.mkldnn._reorder_linear_weight(_stack(weights, dtype), self.ROWS_HINT)]
        elif device.type == "cpu":
            self.weights = [w.to(device, dtype) for w in weights]
        else:  # one product instead of several
            self.weights = [_joined(weights, dtype, device)]

    @staticmethod
    def why_not(device: torch.device) -> str | None:
        """Return None: every device multiplies floats."""
        return None

    @staticmethod
    def bytes(outs: int, width: int, own: set[torch.dtype], dtype: torch.dtype, device: torch.device) -> int:
        """See `models.formats.linear.Format`."""
        if not has_kernels(dtype, device):
            return outs * width * dtype.itemsize
        stored = stored_dtype(own, dtype)
        return panel_bytes(stored, outs, width)

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] -> [..., sum of outs]."""
        if self.packed:
            return super().forward(x)
        if self.blocked:
            # An opaque operator, because the compiler would treat the packed weight as a plain one.
            run = torch.ops.coppice.blocked_linear if watched() else blocked_linear
            return run(x, self.weights[0], self.bias, self.out_features)
        if x.is_cuda and x.dtype in cpp.KINDS and same_bits.asked():  # cuBLAS chooses its order by the number of rows
            from kernels.linear import triton  # absent on some machines, and slow to import

            return triton.floats(x, self.weights[0], self.bias)
        if self.joined:
            return F.linear(x, self.weights[0], self.bias)
        y = (
            F.linear(x, self.weights[0])
            if len(self.weights) == 1
            else torch.cat([F.linear(x, w) for w in self.weights], -1)
        )
        return y if self.bias is None else y + self.bias


def stored_dtype(own: set[torch.dtype], dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of weights in panels: their own if it is half precision and the layer computes in float32."""
    halves = ({torch.bfloat16}, {torch.float16})
    return next(iter(own)) if dtype == torch.float32 and own in halves else dtype


def panel_bytes(dtype: torch.dtype, outs: int, width: int) -> int:
    """Return the bytes of a matrix's panels, without scales."""
    return math.prod(panels_shape(dtype, outs, width)) * dtype.itemsize


def blocks(weights: Iterable[Tensor]) -> Iterator[Tensor]:
    """Yield rows of matrices, a few at a time; a block's file pages are released when the next one is requested.

    Otherwise the touched pages would stay resident until the whole matrix is done: half a gigabyte for some heads.
    """
    for weight in weights:
        mapped = is_mapped(weight)
        for block in weight.split(max(1, CHUNK // weight.shape[1])):
            yield block
            if mapped:
                let_go(block)


def _stack(weights: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """Stack the weights, contiguous, and cast them while copying, so that no other cast copy exists.

    The copy lies in its own mapping, so that its memory returns to the system at once; the C library would put the next
    matrices into the holes that freed ones leave, and keep the rest.
    """
    if len(weights) == 1 and weights[0].dtype == dtype and weights[0].is_contiguous():
        return weights[0]
    shape = sum(w.shape[0] for w in weights), weights[0].shape[1]
    size = max(1, math.prod(shape) * dtype.itemsize)
    area = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    whole = torch.frombuffer(area, dtype=dtype, count=math.prod(shape)).view(shape)
    for part, w in zip(whole.split([w.shape[0] for w in weights]), weights, strict=True):
        part.copy_(w)
    return whole


def _joined(weights: Sequence[Tensor], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Stack the weights on a device. Each goes there from where it is: from the file, or from that device."""
    if len(weights) == 1:
        return weights[0].to(device, dtype).contiguous()
    whole = torch.empty(sum(w.shape[0] for w in weights), weights[0].shape[1], dtype=dtype, device=device)
    for part, w in zip(whole.split([w.shape[0] for w in weights]), weights, strict=True):
        part.copy_(w)
    return whole


def blocked_linear(x: Tensor, weight: Tensor, bias: Tensor | None, out_features: int) -> Tensor:
    """x W^T + b with W packed by oneDNN."""
    rows = x.numel() // x.shape[-1]
    spare = padded_rows(rows) - rows
    if not spare:
        return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    y = torch.ops.mkldnn._linear_pointwise(F.pad(x.reshape(rows, -1), (0, 0, 0, spare)), weight, bias, "none", [], "")
    return y[:rows].view(*x.shape[:-1], out_features)


def padded_rows(rows: int) -> int:
    """Round a number of rows up for oneDNN: any number up to 16 is kept, and few different ones beyond.

    oneDNN compiles a primitive for each number of rows that a matrix meets, half a megabyte and a millisecond each,
    and keeps a thousand of them: otherwise a chat, whose prompts have any length, would grow by a hundred megabytes.
    The results are multiples of three where it matters, because blocks have three rows on AVX2; powers of two above
    that stay unchanged.
    """
    if rows <= 16:
        return rows
    step = 3 if rows <= 33 else 6 if rows <= 66 else 16 if rows <= 256 else 64
    return -(-rows // step) * step


register("blocked_linear", blocked_linear, lambda x, _weight, _bias, outs: x.new_empty(*x.shape[:-1], outs))
