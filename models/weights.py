"""Weights: a checkpoint's tensors made ready for use, one matrix at a time: loading peaks at one above the result."""

import math
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from kernels.linear.reference import unpacked
from models.checkpoint import Checkpoint
from models.coded import CodedLinear, has_codes, of_packed
from models.config import HEAD
from models.floats import PackedLinear, has_kernels
from models.grouped import GroupedLinear, GroupedWeight
from models.linear import FORMATS, Joined, Linear, format_of
from models.memory import trim_memory
from models.quantized import EMBEDDING, LINEAR, TRANSPOSED

LARGE = 1 << 20  # elements of a matrix


class Weights:
    """Reads a checkpoint's tensors for a dtype and device.

    Args:
        checkpoint: checked already.
        stored: the name a tensor is stored under, where it is not its own (`Checkpoint.check` returns this).
        shapes: of the tensors, as the checkpoint was checked for.
        dtype, device: to compute in.
        quant: format of the matrices, a key of `models.linear.FORMATS`; "none" keeps them in `dtype`.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        stored: Mapping[str, str],
        shapes: Mapping[str, tuple[int, ...]],
        dtype: torch.dtype,
        device: torch.device,
        quant: str = "none",
    ):
        self.checkpoint, self.stored, self.shapes = checkpoint, stored, shapes
        self.dtype, self.device, self.quant = dtype, device, quant

    def vector(self, name: str, *, plus_one: bool = False) -> Tensor:
        """A norm's weight or a table of positions, say: a copy, as a view would hold on to the whole mapping.

        `plus_one` adds 1 in float32, before the sum is rounded to the dtype.
        """
        found = self._read(name)
        return (found.float() + 1 if plus_one else found).to(self.device, self.dtype, copy=True)

    def linear(self, *names: str, bias: bool = False, transposed: bool = False) -> Linear:
        """A linear layer of one matrix, or of several that share their input; names without `.weight`.

        Matrices are stored [out, in]; `transposed` ones [in, out].
        """
        layer = self._linear(names, bias, transposed)
        if sum(math.prod(self.shapes[f"{name}.weight"]) for name in names) >= LARGE:
            trim_memory()  # of what packing took besides
        return layer

    def _linear(self, names: Sequence[str], bias: bool, transposed: bool) -> Linear:
        biases = [self._read(f"{name}.bias") for name in names] if bias else None
        outs = sum(self.shapes[f"{name}.weight"][transposed] for name in names)
        quant = format_of(self.quant, outs, head=names == (HEAD,))
        stored = [self.stored.get(f"{name}.weight", f"{name}.weight") for name in names]
        if (packed := self.checkpoint.packed(stored)) and has_kernels(torch.float32, self.device):
            return PackedLinear(packed, biases, dtype=self.dtype, device=self.device)
        grouped = self._grouped(names, bias, transposed) if not packed else []
        if grouped and not all(grouped):
            return Joined([self.linear(name, bias=bias, transposed=transposed) for name in names])
        if grouped:
            layer: Linear = GroupedLinear([w for w in grouped if w], biases, dtype=self.dtype, device=self.device)
            layer.names = stored
            return layer
        codes = of_packed(packed, self.device) if packed and has_codes(self.dtype, self.device) else None
        if codes:
            layer = CodedLinear([codes], biases, dtype=self.dtype, device=self.device)
            layer.names = stored
            return layer
        if packed:
            weights = iter([unpacked(packed)])
        else:
            # Read one after the other by whoever takes them, so that their pages of the file can go when copied.
            read = (self._read(f"{name}.weight") for name in names)
            weights = (weight.T for weight in read) if transposed else read
        layer = FORMATS[quant](weights, biases, dtype=self.dtype, device=self.device)
        layer.names = stored
        return layer

    def embedding(self, name: str) -> "Embedding":
        """Token embeddings."""
        stored, shape = self.stored.get(name, name), self.shapes[name]
        if self.device.type == "cpu":
            return Embedding(self.checkpoint.rows(name, stored, shape), self.dtype)
        grouped = self.checkpoint.grouped(name, stored, shape, EMBEDDING, biased=True)
        return Embedding((grouped.floats() if grouped else self._read(name)).to(self.device, self.dtype), self.dtype)

    def _grouped(self, names: Sequence[str], bias: bool, transposed: bool) -> list[GroupedWeight | None]:
        """The weights that are stored quantised, None for others; empty if all are others."""
        found, kind = [], TRANSPOSED if transposed else LINEAR
        for name in (f"{name}.weight" for name in names):
            stored, shape = self.stored.get(name, name), self.shapes[name]
            found.append(self.checkpoint.grouped(name, stored, shape, kind, biased=bias))
        return found if any(found) else []

    def _read(self, name: str) -> Tensor:
        name = self.stored.get(name, name)
        return self.checkpoint.read([name])[name]


class Embedding(nn.Module):
    """Token embeddings: on a CPU read row by row from the checkpoint's file, on a device resident.

    Args:
        table: the matrix [V, E], or reads rows of it.
        dtype: of the rows returned.
    """

    def __init__(self, table: Tensor | Callable[[Sequence[int]], Tensor], dtype: torch.dtype):
        super().__init__()
        self.dtype = dtype
        self.weight, self.rows = (table, None) if isinstance(table, Tensor) else (None, table)

    def forward(self, tokens_T: Tensor) -> Tensor:
        """int64 [T] -> [T, E]."""
        if self.weight is not None:
            return F.embedding(tokens_T, self.weight)
        assert self.rows is not None
        return self.rows(tokens_T.tolist()).to(self.dtype)
