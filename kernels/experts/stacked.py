"""The matrices of all experts of a layer, stacked, as a GPU reads them."""

from dataclasses import dataclass

from torch import Tensor
from torch.nn import functional as F

from kernels.linear.codes import Codes, unpacked


@dataclass(frozen=True, eq=False)
class Stacked:
    """Matrices [outs, width] of X experts.

    Args:
        count: X.
        table: floats [X outs, width], contiguous, or small numbers.
        bias: [X outs], contiguous, or None.

    Raises:
        ValueError: rows or biases that are not those of X matrices.
    """

    count: int
    table: Tensor | Codes
    bias: Tensor | None = None

    def __post_init__(self) -> None:
        rows = self._rows
        if rows % self.count or (self.bias is not None and self.bias.shape != (rows,)):
            biases = "none" if self.bias is None else list(self.bias.shape)
            raise ValueError(f"expected the rows of {self.count} matrices, got {rows}, biases {biases}")

    @property
    def _rows(self) -> int:
        return self.table.outs if isinstance(self.table, Codes) else len(self.table)

    @property
    def outs(self) -> int:
        """Outputs of one expert."""
        return self._rows // self.count

    @property
    def width(self) -> int:
        """Elements of a row."""
        return self.table.width if isinstance(self.table, Codes) else self.table.shape[1]

    def product(self, x: Tensor, number: int) -> Tensor:
        """x W^T + b of one expert, the definition: elements in the dtype of x."""
        some = slice(number * self.outs, (number + 1) * self.outs)
        floats_OI = unpacked(self.table) if isinstance(self.table, Codes) else self.table
        return F.linear(x, floats_OI[some].to(x.dtype), None if self.bias is None else self.bias[some])
