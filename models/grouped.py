"""Weights as small numbers in groups that share a scale, as quantised checkpoints have them.

Shape legend: O outputs, I inputs (the width of a row), G groups of a row.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal, NamedTuple

import torch
from torch import Tensor

Kind = Literal["int4", "int8", "float8"]
ZEROS = {"int4": 8.0, "int8": 128.0, "float8": 0.0}  # what stands for zero where groups have none of their own


class GroupedRows(NamedTuple):
    """Rows of a matrix: w[o, i] = (number of codes[o, i] - zero[o, i / group]) * scale[o, i / group].

    Args:
        codes_OI: uint8. int4: 0 to 15; int8: 0 to 255; float8: the bits of an e4m3 number.
        scale_OG: float32.
        zero_OG: float32, or None for that of `ZEROS`.
    """

    codes_OI: Tensor
    scale_OG: Tensor
    zero_OG: Tensor | None = None


@dataclass(frozen=True, eq=False)
class GroupedWeight:
    """A weight [outs, width] that a checkpoint holds quantised. Nothing of its size exists before rows are asked for.

    Args:
        kind: what codes are.
        shape: outs, width.
        group: elements of a row, side by side, that share a scale; the last group may be shorter.
        rows: rows [first, last) of the matrix.
        order_I: int64; codes_OI[:, i] multiplies input order_I[i]. None: in their own order.
        levels: activations are rounded to steps of 1 / levels of the largest magnitude of their row and multiplied as
            int8; None: they are multiplied as floats.
    """

    kind: Kind
    shape: tuple[int, int]
    group: int
    rows: Callable[[int, int], GroupedRows]
    order_I: Tensor | None = None
    levels: float | None = None

    @property
    def groups(self) -> int:
        """Groups of a row."""
        return -(-self.shape[1] // self.group)

    def floats(self, first: int = 0, last: int | None = None) -> Tensor:
        """Rows [first, last) as float32, their columns in the order of the inputs."""
        codes_OI, scale_OG, zero_OG = self.rows(first, self.shape[0] if last is None else last)
        numbers_OI = codes_OI.view(torch.float8_e4m3fn).float() if self.kind == "float8" else codes_OI.float()
        spread = partial(_spread, group=self.group, width=self.shape[1])
        numbers_OI -= ZEROS[self.kind] if zero_OG is None else spread(zero_OG)
        numbers_OI *= spread(scale_OG)
        if self.order_I is None:
            return numbers_OI
        floats_OI = torch.empty_like(numbers_OI)
        floats_OI[:, self.order_I] = numbers_OI
        return floats_OI


def _spread(x_OG: Tensor, group: int, width: int) -> Tensor:
    """Values of groups to every element of a row."""
    return x_OG.repeat_interleave(group, 1)[:, :width]
