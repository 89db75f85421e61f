"""Weights: prepares a checkpoint's tensors for use, one matrix at a time, so loading peaks at one matrix above the
result.

With tensor parallelism, each process reads its part of each matrix.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from kernels.experts import Stacked
from kernels.linear.panels import EXACT
from kernels.linear.reference import unpacked
from models.checkpoint.cached_matrices import CachedMatrices
from models.checkpoint.headers import Checkpoint
from models.checkpoint.tensor_files import FETCH_AGAIN
from models.config import Config
from models.errors import CheckpointError, show
from models.formats.coded import CodedLinear, has_codes, of_packed
from models.formats.floats import PackedLinear, blocks, has_kernels
from models.formats.grouped import GroupedLinear, GroupedWeight
from models.formats.linear import FORMATS, Joined, Linear, format_of
from models.names import HEAD
from models.quantized.parts import EMBEDDING, LINEAR, TRANSPOSED
from models.shard import Shard
from models.sharding import EVEN, Agreed, Gathered, Partition, Summed, part
from models.threads import MACHINE
from models.trim import trim_memory

LARGE = 1 << 20  # elements of a large matrix


class Weights:
    """Reads a checkpoint's tensors for a dtype and device.

    Args:
        checkpoint: a checkpoint that was checked.
        stored: the stored names of tensors whose own name is absent (`Checkpoint.check` returns them).
        shapes: the shapes of tensors that the checkpoint was checked for.
        dtype, device: the dtype and device of the computation.
        quant: format of the matrices, a key of `models.formats.linear.FORMATS`; "none" keeps them in `dtype`.
        shard: the place of this process among those that compute the model.
        cached: matrices that an earlier start made, or that this one makes for later ones; None: nothing is cached.
        rounding: matrices of codes multiply activations rounded to 8 bits; their stored form does not change.

    Attributes:
        part: this process's part of the model, once `divide` was called.
        resident: token embeddings on a device, by their stored names; a tied float head shares their memory.
    """

    part: Partition

    def __init__(
        self,
        checkpoint: Checkpoint,
        stored: Mapping[str, str],
        shapes: Mapping[str, tuple[int, ...]],
        dtype: torch.dtype,
        device: torch.device,
        quant: str = "none",
        shard: Shard | None = None,
        cached: CachedMatrices | None = None,
        rounding: bool = False,
    ):
        self.rounding = rounding
        self.checkpoint, self.stored, self.shapes, self.cached = checkpoint, stored, shapes, cached
        self.dtype, self.device, self.quant, self.shard = dtype, device, quant, shard or Shard()
        self.resident: dict[str, Tensor] = {}

    def divide(self, c: Config) -> Config:
        """Return the configuration of this process's part; raises CheckpointError if the model cannot be divided."""
        if self.checkpoint.packing and self.shard.size > 1:
            raise CheckpointError(
                "matrices that were packed ahead cannot be divided among processes",
                where=str(self.checkpoint.folder),
                remedy="give the checkpoint that they were packed from",
            )
        even = 1 if self.checkpoint.quantization else EVEN  # groups that share a scale stay whole if they can
        self.part = Partition.of(c, self.shard, str(self.checkpoint.folder), even)
        return self.part.config

    def vector(
        self, name: str, *, plus_one: bool = False, some: range | None = None, dtype: torch.dtype | None = None
    ) -> Tensor:
        """Return a tensor such as a norm's weight or a table of positions, copied because a view would keep the whole
        mapping alive.

        Args:
            plus_one: add 1 in float32, before the copy is made.
            some: elements, or rows; None: all.
            dtype: the copy's dtype; None: the dtype of the computation.
        """
        found = _cut(self._read(name), some)
        return (found.float() + 1 if plus_one else found).to(self.device, dtype or self.dtype, copy=True)

    def decays(self, name: str) -> Tensor:
        """Return minus the exponentials of a tensor, float32. Values of float64 are not rounded before: see
        `models.gguf.tensors.Stored.negative_exp`."""
        found = self._read(name).to(self.device)
        return -(found if found.dtype == torch.float64 else found.to(self.dtype).float()).exp().float()

    def scalar(self, name: str) -> float:
        """Return the value of a vector with one element."""
        return self._read(name).to(self.dtype).item()

    def linear(
        self,
        *names: str,
        bias: bool = False,
        transposed: bool = False,
        outs: Sequence[range] | None = None,
        ins: range | None = None,
        exact: bool = False,
    ) -> Linear:
        """Return a linear layer of one matrix, or of several that share their input; names without `.weight`.

        Matrices are stored [out, in]; `transposed` ones [in, out].

        Args:
            outs: the layer's outputs among those of the stacked matrices; None: all.
            ins: the layer's inputs, in which case the processes sum its products; None: all.
            exact: weights that are stored as floats stay floats, whatever the format of other matrices.
        """
        pieces = self.pieces(names, transposed, outs)
        with MACHINE.limited():
            layer = self._linear(names, bias, transposed, pieces, ins, exact)
        layer.made_of = names
        if sum(math.prod(self.shapes[f"{name}.weight"]) for name in names) >= LARGE:
            trim_memory()  # returns the temporary memory of packing
        if ins is None:
            return layer
        added = torch.cat([self.vector(f"{name}.bias") for name in names]) if bias else None
        return Summed(layer, added, self.shard)

    def heads(self, names: Sequence[str], heads: int, plain: int, value: int) -> tuple[list[Linear], list[Linear]]:
        """Return each head's matrix that computes keys from a latent, transposed, and each that computes values.

        Args:
            names: one matrix with the rows of keys and then of values for each head; or two matrices, the first with
                the transposed matrices of keys.
            heads, plain, value: the number of heads, and the rows of keys and of values of each.
        """
        if len(names) == 2:
            sizes = [self.shapes[f"{name}.weight"][0] // heads for name in names]
            keys, values = ([self.linear(name, outs=[range(h * size, (h + 1) * size)]) for h in range(heads)]
                            for name, size in zip(names, sizes, strict=True))  # fmt: skip
            return keys, values
        rows_HXC = self._floats(f"{names[0]}.weight").unflatten(0, (heads, plain + value))
        parts = [rows_XC.split([plain, value]) for rows_XC in rows_HXC]

        def linear(weight: Tensor) -> Linear:
            return FORMATS[self.quant_of_heads(len(weight))](
                [weight.contiguous()], dtype=self.dtype, device=self.device
            )

        with MACHINE.limited():
            return [linear(keys.T) for keys, _ in parts], [linear(values) for _, values in parts]

    def stacked_heads(self, names: Sequence[str], heads: int, plain: int) -> tuple[Tensor, Tensor]:
        """Return the same matrices on a device, as floats however they are stored: those of keys [H, N, C], not
        transposed, and of values [H, V, C]. Arguments as for `heads`."""
        parts = [self._floats(f"{name}.weight").unflatten(0, (heads, -1)) for name in names]
        keys, values = (parts[0].mT, parts[1]) if len(parts) == 2 else (parts[0][:, :plain], parts[0][:, plain:])
        return keys.to(self.device, self.dtype).contiguous(), values.to(self.device, self.dtype).contiguous()

    def quant_of_heads(self, outs: int) -> str:
        """Return the format of the matrices of heads, which files that were packed ahead store unpacked."""
        packing = self.checkpoint.packing
        return format_of(self.quant if packing is None else packing.quant, outs)

    def _floats(self, name: str) -> Tensor:
        """Return a matrix of a layer as floats, however it is stored. Raises CheckpointError if it has steps."""
        stored, shape = self.stored.get(name, name), self.shapes[name]
        if packed := self.checkpoint.packed([stored], *shape):
            return unpacked(packed)
        grouped = self.checkpoint.grouped(name, stored, shape, LINEAR, biased=False)
        if grouped is None:
            return self._read(name)
        if grouped.steps != EXACT:
            what = "static steps of activations are not supported where each head multiplies the latent"
            remedy = "Use a checkpoint in which this matrix is not quantised, or has no steps."
            raise CheckpointError(f"{show(stored)}: {what}", where=show(self.checkpoint.folder), remedy=remedy)
        return grouped.floats().to(self.dtype)

    def stacked(self, count: int, *names: str, bias: bool = False) -> Stacked:
        """Return the matrices of a layer's `count` experts on a GPU; those of `names` share their input.

        Raises:
            CheckpointError: the experts are stored in different ways.
        """
        layer: Any = self.linear(*names, bias=bias)
        layer = getattr(layer, "whole", None) or layer
        tables = layer.parts if isinstance(layer, CodedLinear) else getattr(layer, "weights", [])
        if len(tables) != 1:
            raise CheckpointError(
                f"a GPU multiplies experts of one format and order, unlike those of {show(names[0])}",
                where=show(self.checkpoint.folder),
                remedy="Use --device cpu.",
            )
        return Stacked(count, tables[0], layer.bias)

    def head(self, name: str, *, bias: bool = False) -> Linear:
        """Return the head's layer, which computes logits, or the scores of a scalar head."""
        if self.shard.size == 1:
            return self.linear(name, bias=bias)
        if self.part.vocab is None:
            return Agreed(self.linear(name, bias=bias), self.shard)
        own = self.linear(name, bias=bias, outs=[self.part.vocab])
        return Gathered(own, self.part.vocab, self.shapes[f"{name}.weight"][0], self.shard)

    def pieces(
        self, names: Sequence[str], transposed: bool, outs: Sequence[range] | None
    ) -> list[tuple[str, range | None]]:
        """Return for each matrix its outputs among `outs`, which count the outputs of the stacked matrices."""
        if outs is None:
            return [(name, None) for name in names]
        found: list[tuple[str, range | None]] = []
        first = 0
        for name in names:
            last = first + self.shapes[f"{name}.weight"][transposed]
            found += [(name, range(x.start - first, x.stop - first, x.step)) for x in outs if first <= x.start < last]
            first = last
        return found

    def _linear(
        self,
        names: Sequence[str],
        bias: bool,
        transposed: bool,
        pieces: Sequence[tuple[str, range | None]],
        ins: range | None,
        exact: bool = False,
    ) -> Linear:
        own = bias and ins is None  # the bias is added after a sum over processes
        biases = [_cut(found, some) for found, some in self._parts(pieces, "bias")] if own else None
        outs = sum(self.shapes[f"{name}.weight"][transposed] for name in names)
        quant = "none" if exact else format_of(self.quant, outs, head=tuple(names) == (HEAD,))
        stored = [self.stored.get(f"{name}.weight", f"{name}.weight") for name in names]
        width = self.shapes[f"{names[0]}.weight"][not transposed]
        if (packed := self.checkpoint.packed(stored, outs, width)) and has_kernels(torch.float32, self.device):
            return PackedLinear(packed, biases, dtype=self.dtype, device=self.device)
        key = repr((quant, transposed, stored, pieces, ins))
        if self.cached and (found := self.cached.get(key)):
            layer = PackedLinear(found, biases, dtype=self.dtype, device=self.device)
            layer.names = stored
            return self._rounding(layer, exact)
        grouped = self._grouped(pieces, transposed, ins) if not packed else []
        if grouped and not all(grouped):
            return Joined([self._linear((piece[0],), bias, transposed, [piece], ins) for piece in pieces])
        if grouped:
            try:
                layer = GroupedLinear([w for w in grouped if w], biases, dtype=self.dtype, device=self.device)
            except ValueError as error:
                what, where = f"{show(', '.join(stored))}: {error}", show(self.checkpoint.folder)
                raise CheckpointError(what, where=where, remedy=FETCH_AGAIN) from None
            layer.names = stored
            if self.cached:
                self.cached.add(key, layer.packed)
            return self._rounding(layer, exact)
        codes = of_packed(packed, self.device) if packed and has_codes(self.dtype, self.device) else None
        if codes:
            layer = CodedLinear([codes], biases, dtype=self.dtype, device=self.device)
            layer.names = stored
            return layer
        if packed:
            weights = iter([unpacked(packed)])
        elif quant == "none" and len(stored) == 1 and stored[0] in self.resident:
            weights = iter([self.resident[stored[0]]])
        else:
            # An iterator, so that the file pages of each matrix can be released when it is copied.
            read = self._parts(pieces, "weight")
            if transposed:
                weights = (_cut(weight, ins, some).T for weight, some in read)
            else:
                weights = (_cut(weight, some, ins) for weight, some in read)
        layer = FORMATS[quant](weights, biases, dtype=self.dtype, device=self.device)
        layer.names = stored
        if self.cached and self.cached.holds(quant, names[0]):
            self.cached.add(key, getattr(layer, "packed", None))
        return layer

    def _rounding(self, layer: PackedLinear, exact: bool) -> PackedLinear:
        """Return the layer, set to round its rows if `rounding`, unless it is exact."""
        if self.rounding and not exact:
            layer.round_rows()
        return layer

    def embedding(self, name: str) -> "Embedding":
        """Return the token embeddings."""
        stored, shape = self.stored.get(name, name), self.shapes[name]
        if self.device.type == "cpu":
            return Embedding(self.checkpoint.rows(name, stored, shape), self.dtype)
        grouped = self.checkpoint.grouped(name, stored, shape, EMBEDDING, biased=True)
        some = part(shape[0], self.shard)
        if grouped is None:
            table = _cut(self._read(name), some).to(self.device, self.dtype)
        else:
            table = torch.empty(len(some), shape[1], dtype=self.dtype, device=self.device)
            rows = max(1, LARGE // shape[1])  # a part at a time: all rows as float32 may not fit into the host's memory
            for at in range(0, len(some), rows):
                piece = some[at : at + rows]
                try:
                    table[at : at + len(piece)] = grouped.floats(piece.start, piece.stop).to(self.device, self.dtype)
                except ValueError as error:
                    what, where = f"{show(stored)}: {error}", show(self.checkpoint.folder)
                    raise CheckpointError(what, where=where, remedy=FETCH_AGAIN) from None
        if self.shard.size == 1:
            self.resident[stored] = table
        return Embedding(table, self.dtype, some.start, self.shard)

    def _grouped(
        self, pieces: Sequence[tuple[str, range | None]], transposed: bool, ins: range | None
    ) -> list[GroupedWeight | None]:
        """Return the weights that are stored quantised, None for others; empty if none is."""
        found, kind = [], TRANSPOSED if transposed else LINEAR
        for module, those in groupby(pieces, key=itemgetter(0)):
            name = f"{module}.weight"
            stored, shape = self.stored.get(name, name), self.shapes[name]
            biased = f"{module}.bias" in self.shapes  # that of a scan's steps is added within the scan
            weight = self.checkpoint.grouped(name, stored, shape, kind, biased=biased)
            try:
                found += [weight and weight.part(some, ins) for _, some in those]
            except ValueError as error:
                remedy = "use fewer processes, or a checkpoint that is not quantised"
                what = f"{module} cannot be divided among {self.shard.size} processes: {error}"
                raise CheckpointError(what, where=str(self.checkpoint.folder), remedy=remedy) from None
        return found if any(found) else []

    def _parts(self, pieces: Sequence[tuple[str, range | None]], kind: str) -> Iterator[tuple[Tensor, range | None]]:
        """Yield the tensor of each piece; a tensor with several pieces is read once."""
        for name, those in groupby(pieces, key=itemgetter(0)):
            found = self._read(f"{name}.{kind}")
            for _, some in those:
                yield found, some

    def _read(self, name: str) -> Tensor:
        name = self.stored.get(name, name)
        return self.checkpoint.read([name])[name]


class Embedding(nn.Module):
    """Token embeddings: on a CPU read row by row from the checkpoint's file, on a device resident.

    Args:
        table: the matrix [V, E], of which each process may have some rows; or a function that reads rows.
        dtype: the dtype of returned rows.
        first: the token of the matrix's first row.
        shard: the place of this process.
    """

    def __init__(
        self,
        table: Tensor | Callable[[Sequence[int]], Tensor],
        dtype: torch.dtype,
        first: int = 0,
        shard: Shard | None = None,
    ):
        super().__init__()
        self.dtype, self.first, self.shard = dtype, first, shard or Shard()
        self.weight, self.rows = (table, None) if isinstance(table, Tensor) else (None, table)

    def forward(self, tokens_T: Tensor) -> Tensor:
        """int64 [T] -> [T, E]."""
        if self.weight is not None:
            if self.shard.size == 1:
                return F.embedding(tokens_T, self.weight)
            row_T = tokens_T - self.first
            mine_T = (row_T >= 0) & (row_T < len(self.weight))
            return self.shard.sum(torch.where(mine_T.unsqueeze(1), self.weight[row_T * mine_T], 0))
        assert self.rows is not None
        return self.rows(tokens_T.tolist()).to(self.dtype)


def _cut(x: Tensor, rows: range | None, columns: range | None = None) -> Tensor:
    """Return some rows as a view, or some of their columns as a copy that is read a few rows at a time."""
    if rows is not None:
        x = x[rows.start : rows.stop : rows.step]
    if columns is None:
        return x
    copy, at = x.new_empty(len(x), len(columns)), 0
    for block in blocks([x]):
        copy[at : at + len(block)] = block[:, columns.start : columns.stop]
        at += len(block)
    return copy
