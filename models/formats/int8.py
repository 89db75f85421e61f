"""Int8 linear layers: weights quantised per output channel when loaded, activations per token on the fly.

Sums of int8 products are exact in int32, and every token has its own scales, so a token's result does not
depend on the other tokens.
"""

from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache

import torch
from torch import Tensor

from kernels.linear import Packed, pack
from kernels.linear.reference import quantize as quantize_rows
from kernels.tracing import register, watched
from models.formats import coded
from models.formats.coded import CodedLinear, of_int8
from models.formats.floats import PackedLinear, blocks, has_kernels, panel_bytes

LEVELS = 0x7F7F  # levels of activations with oneDNN


@lru_cache(maxsize=1)
def _exact() -> bool:
    """Whether oneDNN sums int8 products in 32 bits: without VNNI it uses 16 bits, which overflow silently."""
    weight, ones = torch.full((64, 64), 127, dtype=torch.int8), torch.ones(64)
    packed = torch.ops.onednn.qlinear_prepack(weight, None)
    x, zero = torch.full((1, 64), 255, dtype=torch.uint8), torch.zeros(64, dtype=torch.int32)
    return bool(_onednn(x, packed, ones, zero).eq(64 * 127 * (255 - 128)).all())


class Int8Linear(PackedLinear):
    """y = x W^T + b with W as int8 times a scale per row, see `models.formats.linear.Linear`.

    In C++, x is rounded to 255 steps of the largest magnitude of each 64 elements of a row; with oneDNN, to 65279 steps
    of the largest magnitude of the row; on a GPU it is not rounded.
    """

    def __init__(
        self,
        weights: Iterable[Tensor],
        biases: Sequence[Tensor] | None = None,
        *,
        dtype: torch.dtype,
        device: torch.device,
    ):
        super().__init__(None, biases, dtype=dtype, device=device)
        weights = [*weights]
        outs, width = sum(len(w) for w in weights), weights[0].shape[1]
        scale_O = torch.empty(outs)
        rows, self.whole = quantized(weights, scale_O), None
        if device.type != "cpu":
            parts = [of_int8(rows, scale_O, outs, width, device)]
            self.whole = CodedLinear(parts, biases, dtype=dtype, device=device)
        elif has_kernels(torch.float32, device):
            panels = pack(rows, torch.int8, outs, width)
            self.packed = Packed(panels, outs, width, scale_O.div_(127))
        else:
            self.weight = torch.ops.onednn.qlinear_prepack(torch.cat([*rows]), None)
            self.scale_O = scale_O.div_(LEVELS)
            self.zero_O = torch.zeros(outs, dtype=torch.int32)

    @staticmethod
    def why_not(device: torch.device) -> str | None:
        """Return why int8 linear layers cannot run on this machine; None if they can."""
        if device.type != "cpu":
            return coded.why_not(device)
        if has_kernels(torch.float32, device):
            return None
        if not torch.backends.mkldnn.is_available() or not hasattr(torch.ops.onednn, "qlinear_pointwise"):
            return "this torch was built without oneDNN's int8 products"
        if not torch.cpu._is_vnni_supported():
            return "without C++ kernels int8 needs a processor with AVX-VNNI or AVX512-VNNI"
        if not _exact():
            return "oneDNN's int8 products overflow here: is ONEDNN_MAX_CPU_ISA set to less than the processor has?"
        return None

    @staticmethod
    def bytes(outs: int, width: int, own: set[torch.dtype], dtype: torch.dtype, device: torch.device) -> int:
        """See `models.formats.linear.Format`."""
        if device.type != "cpu":
            return coded.code_bytes("int8", outs, width, torch.float32.itemsize)
        if has_kernels(torch.float32, device):
            return panel_bytes(torch.int8, outs, width) + outs * torch.float32.itemsize
        return outs * (width + torch.float32.itemsize + torch.int32.itemsize)

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] -> [..., sum of outs]."""
        if self.whole:
            return self.whole(x)
        if self.packed:
            return super().forward(x)
        run = torch.ops.coppice.int8_linear if watched() else int8_linear
        return run(x, self.weight, self.scale_O, self.zero_O, self.bias)


def quantized(weights: Sequence[Tensor], scale_O: Tensor) -> Iterator[Tensor]:
    """Quantise stacked matrices of equal width, and yield blocks of int8 rows; float32 scales per row go to scale_O.

    Rows are read in chunks, so that no float copy of a matrix exists.
    """
    first = 0
    for part in blocks(weights):
        last = first + len(part)
        part = part.float()
        scale_O[first:last] = part.abs().amax(-1) / 127
        steps = scale_O[first:last].clamp(min=torch.finfo(torch.float32).tiny).unsqueeze(-1)
        yield (part / steps).round_().to(torch.int8)
        first = last


def int8_linear(x: Tensor, weight: Tensor, scale_O: Tensor, zero_O: Tensor, bias: Tensor | None) -> Tensor:
    """Multiply with oneDNN; scale_O is the weights' scale over LEVELS. Steps have two digits in base 256, which are
    multiplied one by one: separate scales for each 64 elements, as in C++, would need more products."""
    steps, top = quantize_rows(x, LEVELS)
    steps = torch.where(top > 0, steps, 0).int()
    least = (steps + 128 & 255) - 128
    high, low = (
        _onednn((digit + 128).to(torch.uint8), weight, scale_O, zero_O) for digit in ((steps - least) >> 8, least)
    )
    y = high.mul_(256).add_(low).mul_(top)
    return (y if bias is None else y.add_(bias)).to(x.dtype)


def _onednn(steps: Tensor, weight: Tensor, scale_O: Tensor, zero_O: Tensor) -> Tensor:
    """Return oneDNN's product of uint8 steps, in which 128 represents 0, with a packed matrix; float32."""
    product = (steps, 1.0, 128, weight, scale_O, zero_O, None, 1.0, 0, torch.float32, "none", [], "")
    return torch.ops.onednn.qlinear_pointwise(*product)


register("int8_linear", int8_linear, lambda x, _weight, scale_O, *_: x.new_empty(*x.shape[:-1], scale_O.shape[0]))
