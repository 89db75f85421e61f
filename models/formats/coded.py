"""Linear layers with quantised weights on a GPU: the matrix stays in 8 or 4 bits, activations are not rounded."""

import importlib.util
import warnings
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor, nn

from kernels.linear import Packed
from kernels.linear.codes import Codes, pack_codes, row_bytes, takes
from kernels.linear.panels import GroupKind
from kernels.linear.reference import unpack
from kernels.stack import Matrix

DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def has_codes(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether this device multiplies codes directly: a GPU with triton does."""
    return device.type == "cuda" and dtype in DTYPES and importlib.util.find_spec("triton") is not None


def why_not(device: torch.device) -> str | None:
    """Return why a device cannot multiply codes; None if it can."""
    if has_codes(torch.float16, device):
        return None
    return f"weights in 8 and 4 bits need a CPU, or a GPU and the package triton, not {device.type}"


def code_bytes(kind: GroupKind, outs: int, width: int, scale: int) -> int:
    """Return the bytes of a matrix with `scale` bytes of scales and zeros per row."""
    return outs * (row_bytes(kind, width) + scale)


class CodedLinear(nn.Module):
    """y = x W^T + b with one matrix or several stacked ones, see `models.formats.linear.Linear`.

    Args:
        parts: the matrices, on the device.
        biases: one [out] per weight, or None for all.
        dtype, device: the dtype and device of the computation.
    """

    names: Sequence[str] = ()
    made_of: Sequence[str] = ()
    matrix: Matrix | None = None

    def __init__(
        self, parts: Sequence[Codes], biases: Sequence[Tensor] | None, *, dtype: torch.dtype, device: torch.device
    ):
        super().__init__()
        self.parts = [*parts]
        self.bias = torch.cat([b.to(device, dtype) for b in biases]) if biases is not None else None

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] -> [..., sum of outs]."""
        from kernels.linear import triton  # absent on some machines, and slow to import

        if len(self.parts) == 1:
            return triton.linear(x, self.parts[0], self.bias)
        y = torch.cat([triton.linear(x, part) for part in self.parts], -1)
        return y if self.bias is None else y + self.bias

    def rows(self, ids_U: Tensor) -> None:
        """See `models.formats.linear.Linear`."""


def of_int8(rows: Iterable[Tensor], scale_O: Tensor, outs: int, width: int, device: torch.device) -> Codes:
    """Return a matrix of int8 rows with a scale each; a row's scale must be set when the row is yielded."""

    def blocks() -> Iterator[tuple[Tensor, Tensor, None]]:
        first = 0
        for part in rows:
            last = first + len(part)
            yield part.view(torch.uint8) ^ 128, scale_O[first:last, None].clone(), None
            first = last

    return pack_codes(blocks(), "int8", outs, width, width, device=device)


def of_packed(packed: Packed, device: torch.device) -> Codes | None:
    """Convert a matrix that was packed for a CPU; None: it has floats, or groups that a GPU does not multiply."""
    numbers, (outs, width), groups = unpack(packed), (packed.outs, packed.width), packed.groups
    if packed.scale_O is not None:
        return of_int8([numbers], packed.scale_O * packed.levels, outs, width, device)
    if groups is None or not takes(groups.kind, groups.size, width):
        return None
    values = (None if x is None else x.transpose(1, 2).flatten(0, 1)[:outs] for x in groups.values())
    blocks = [(numbers, *values)]
    return pack_codes(blocks, groups.kind, outs, width, groups.size, packed.order_I, device)


def warn_of_floats(kind: GroupKind, size: int, dtype: torch.dtype) -> None:
    """Warn that weights become floats, because a GPU has no product for groups of this size."""
    name = str(dtype).removeprefix("torch.")
    warnings.warn(f"{kind} weights in groups of {size} have no product on a GPU: they become {name}", stacklevel=2)
