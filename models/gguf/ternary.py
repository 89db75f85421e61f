"""Matrices of -1, 0 and 1 in GGUF files of bitnet.cpp: type 36, I2_S (github.com/microsoft/BitNet).

A byte holds elements i, i + 32, i + 64 and i + 96 of 128, from its highest bits on, as numbers plus one. The scale of
the whole matrix, a float32, follows the last row. Inputs are rounded to 8 bits, token by token, as in
`models.quantized.bitnet`.
"""

import torch
from torch import Tensor

from kernels.linear.blocks import Block, BlockRows
from kernels.linear.panels import LEVELS
from models.formats.grouped import GroupedRows, GroupedWeight
from models.quantized.parts import Form

SHIFTS = torch.arange(6, -1, -2, dtype=torch.uint8).unsqueeze(1)


def _decode(b_ONB: Tensor) -> BlockRows:
    fields = (b_ONB.unsqueeze(-2) >> SHIFTS & 3).flatten(2)
    if (fields == 3).any():
        raise ValueError("the matrix has numbers other than -1, 0 and 1")
    return BlockRows((fields + 1).flatten(1), torch.ones(fields.shape[:2]))


I2_S = Block(36, 32, 128, "int2", 128, False, "floats", _decode)


def form(width: int) -> Form:
    """Return the form in memory of rows of this width."""
    return Form(I2_S.kind, width, each=4)


def ternary(stored_OB: Tensor, width: int, scale_1: Tensor) -> GroupedWeight:
    """Return the weight whose rows are stored so."""

    def rows(first: int, last: int) -> GroupedRows:
        codes_OI = I2_S.rows(stored_OB[first:last]).codes_OI
        return GroupedRows(codes_OI, scale_1.expand(len(codes_OI), 1))

    return GroupedWeight(I2_S.kind, (len(stored_OB), width), width, rows, levels=LEVELS, by_row=True)
