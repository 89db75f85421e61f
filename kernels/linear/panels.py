"""Packed matrices: panels of 16 outputs, one panel after the other.

A panel holds, for each step along the width, a line with a word of each output: one float32 or float16, two bfloat16 or
four int8. Processors read it as it lies, with vectors of any size: AMX tiles and the dot products of all instruction
sets take words of this kind.
"""

import ctypes
from collections.abc import Iterable

import torch
from torch import Tensor

from kernels.checks import expect
from kernels.cpp import KINDS, OPERATORS, function

PANEL = 16  # outputs
PIECE = 64  # outputs that are multiplied together; a matrix is padded to whole pieces
STEPS = {torch.float32: 1, torch.float16: 1, torch.bfloat16: 2, torch.int8: 4}  # elements in a word
MAX_INT8_WIDTH = 1 << 16  # sums of more products of int8 would not fit into 32 bits
ROWS_AT_ONCE = 1 << 20  # elements that are copied at a time when a matrix is packed


class Packed:
    """A packed matrix [outs, width].

    Args:
        panels: [panels, steps, 16, STEPS[dtype]], contiguous, on a CPU: float32, bfloat16, float16, or uint8 for int8,
            128 more than the numbers that they stand for. Outputs are padded to a multiple of 64.
        outs, width: of the matrix.
        scale_O: float32, for int8: number * scale_O[out] * 127 is the element.

    Raises:
        ValueError: panels or scales that do not fit the sizes.
    """

    def __init__(self, panels: Tensor, outs: int, width: int, scale_O: Tensor | None = None):
        self.dtype = torch.int8 if panels.dtype == torch.uint8 else panels.dtype
        if self.dtype not in STEPS:
            raise ValueError(f"panels: expected one of {list(STEPS)}, got {panels.dtype}")
        if self.dtype == torch.int8 and width > MAX_INT8_WIDTH:
            raise ValueError(f"width: int8 takes at most {MAX_INT8_WIDTH}, got {width}")
        expect("panels", panels, panels.dtype, shape(self.dtype, outs, width), torch.device("cpu"))
        if (scale_O is not None) != (self.dtype == torch.int8):
            raise ValueError(f"scale_O: expected one for int8 alone, got {scale_O} for {self.dtype}")
        if scale_O is not None:
            expect("scale_O", scale_O, torch.float32, (outs,), torch.device("cpu"))
        self.panels, self.outs, self.width, self.scale_O = panels, outs, width, scale_O

    def described(self, bias: Tensor | None) -> ctypes.Structure:
        """For C++; the tensors have to live as long as it is used."""
        scale, kind = self.scale_O, KINDS.get(self.dtype, len(KINDS))
        pointers = (None if x is None else x.data_ptr() for x in (self.panels, scale, bias))
        return OPERATORS.structures["Matrix"](kind, *pointers, self.outs, self.width)


def shape(dtype: torch.dtype, outs: int, width: int) -> tuple[int, int, int, int]:
    """The shape of a matrix's panels."""
    return -(-outs // PIECE) * (PIECE // PANEL), -(-width // STEPS[dtype]), PANEL, STEPS[dtype]


def pack(rows: Iterable[Tensor], dtype: torch.dtype, outs: int, width: int) -> Tensor:
    """Panels of a matrix that comes in blocks of rows; by C++.

    Args:
        rows: [any, width] each, `outs` together, cast to `dtype`.
        dtype: of the elements: float32, bfloat16, float16 or int8.
        outs, width: of the matrix.

    Returns:
        The panels, see `Packed`.

    Raises:
        ValueError: a matrix of int8 that is too wide.
    """
    if dtype == torch.int8 and width > MAX_INT8_WIDTH:
        raise ValueError(f"width: int8 takes at most {MAX_INT8_WIDTH}, got {width}")
    step = STEPS[dtype]
    stored = torch.uint8 if dtype == torch.int8 else dtype
    panels_PSOE = torch.empty(shape(dtype, outs, width), dtype=stored)
    most = max(1, ROWS_AT_ONCE // (width * PANEL)) * PANEL
    block_OI = torch.empty(min(most, panels_PSOE.shape[0] * PANEL), panels_PSOE.shape[1] * step, dtype=stored)
    zero = 128 if dtype == torch.int8 else 0
    block_OI[:, width:] = zero
    panel = filled = 0

    def flush() -> None:
        nonlocal panel, filled
        count = -(-filled // PANEL)
        block_OI[filled : count * PANEL] = zero
        function("pack")(
            *(torch.get_num_threads(), step * stored.itemsize, block_OI.data_ptr(), panels_PSOE[panel:].data_ptr()),
            *(count, panels_PSOE.shape[1]),
        )
        panel, filled = panel + count, 0

    for part in rows:
        while len(part):
            count = min(len(part), len(block_OI) - filled)
            into = block_OI[filled : filled + count, :width]
            into.copy_(part[:count])
            if dtype == torch.int8:
                into.bitwise_xor_(128)  # of the two's complement: 128 more
            part, filled = part[count:], filled + count
            if filled == len(block_OI):
                flush()
    if filled:
        flush()
    panels_PSOE[panel:] = zero
    return panels_PSOE
