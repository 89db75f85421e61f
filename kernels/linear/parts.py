"""Packed matrices with the same input, each in its own format, presented as one matrix with concatenated outputs."""

import ctypes
from collections.abc import Sequence

from torch import Tensor

from kernels.linear.panels import Packed


class PackedParts:
    """Matrices below each other.

    Args:
        parts: of equal widths.

    Attributes:
        outs, width: of the whole.

    Raises:
        ValueError: widths that differ.
    """

    def __init__(self, parts: Sequence[Packed]):
        self.parts, self.width = [*parts], parts[0].width
        self.outs = sum(part.outs for part in parts)
        self._chains: dict[int, ctypes.Array[ctypes.Structure]] = {}
        if any(part.width != self.width for part in parts):
            raise ValueError(f"expected one width, got {[part.width for part in parts]}")

    def biases(self, bias: Tensor | None) -> list[Tensor | None]:
        """The bias of each part."""
        return [None] * len(self.parts) if bias is None else [*bias.split([part.outs for part in self.parts])]

    def rounding(self) -> "PackedParts":
        """See `Packed.rounding`."""
        return PackedParts([part.rounding() for part in self.parts])

    def described(self, bias: Tensor | None) -> ctypes.Structure:
        """For C++, see `Packed`: the first part, from which the others can be reached as long as this object lives."""
        place = 0 if bias is None else bias.data_ptr()
        if place not in self._chains:
            described = [part.described(own) for part, own in zip(self.parts, self.biases(bias), strict=True)]
            chain = (type(described[0]) * len(described))(*described)
            for i in range(len(chain) - 1):
                chain[i].next = ctypes.addressof(chain) + (i + 1) * ctypes.sizeof(chain[i])
            self._chains = {place: chain}
        return self._chains[place][0]
