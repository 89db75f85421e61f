"""The size of a model in bytes, from the headers of its checkpoint: the model is built as usual, with weights that have
no data."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn

from kernels.linear.blocks import Block
from kernels.linear.codes import takes
from models.checkpoint.experts import EXPERT
from models.checkpoint.headers import Checkpoint
from models.checkpoint.tensor_files import FLOATS
from models.checkpoint.weights import Weights
from models.config import Config
from models.families import family_of, load_model
from models.formats.coded import code_bytes
from models.formats.floats import has_kernels
from models.formats.linear import FORMATS, format_of
from models.formats.packed import PREFIXES
from models.mtp import MTP
from models.names import HEAD
from models.quantized.parts import Form
from models.shape import ModelShape
from models.shard import Shard
from models.sharding import part


@dataclass(frozen=True)
class ModelSize:
    """Bytes of a model, and the properties that determine the bytes of its passes.

    Args:
        matrices: bytes of the linear layers in their format.
        chosen: the part of `matrices` that belongs to experts that tokens choose.
        layers: number of layers with such experts.
        vectors: bytes of norms, biases, tables of positions, and on a device the embedding.
        config, shape: the model's configuration and shape.
    """

    matrices: int
    vectors: int
    config: Config
    shape: ModelShape
    chosen: int = 0
    layers: int = 0

    @property
    def touched(self) -> int:
        """Bytes of matrices that a pass of one token reads: all except those of experts that it does not choose."""
        if (experts := self.config.experts) is None:
            return self.matrices
        return self.matrices - self.chosen + self.chosen * experts.routing.chosen // experts.count

    @property
    def weights(self) -> int:
        """Bytes of everything that stays in memory."""
        return self.matrices + self.vectors


def measure(
    checkpoint: Checkpoint,
    dtype: torch.dtype,
    device: torch.device,
    quant: str = "none",
    shard: Shard | None = None,
    *,
    own_head: bool = False,
) -> ModelSize:
    """Count the bytes of a model, or of a process's part of it; no weights are read.

    See `load_model` for other arguments and errors.

    Args:
        own_head: count the draft head in the model's checkpoint instead, see `models.mtp`.
    """
    found: list[Sizes] = []

    def reader(*arguments: Any) -> Sizes:
        found.append(Sizes(*arguments, shard=shard))
        return found[-1]

    if own_head:
        family = family_of(checkpoint.architecture, str(checkpoint.folder / "config.json"))
        model = MTP(checkpoint, family, dtype, device, quant, reader)
    else:
        model = load_model(checkpoint, dtype, device, quant, reader)
    sizes = found[0]
    return ModelSize(sizes.matrices, sizes.vectors, model.config, model.shape, sizes.chosen, len(sizes.mixed))


class Sizes(Weights):
    """Stands in for `Weights`: reads nothing and counts the bytes of the weights that a model requests."""

    matrices = vectors = chosen = 0
    mixed: frozenset[str] = frozenset()  # names of layers' experts

    def vector(
        self, name: str, *, plus_one: bool = False, some: range | None = None, dtype: torch.dtype | None = None
    ) -> Tensor:
        """Return a vector without data, and count its bytes."""
        shape = self.shapes[name] if some is None else (len(some), *self.shapes[name][1:])
        vector = torch.empty(shape, dtype=dtype or self.dtype, device="meta")
        self.vectors += vector.nbytes
        return vector

    def scalar(self, name: str) -> float:
        """Return a scalar that changes nothing."""
        return 1.0

    def linear(
        self,
        *names: str,
        bias: bool = False,
        transposed: bool = False,
        outs: Sequence[range] | None = None,
        ins: range | None = None,
        exact: bool = False,
    ) -> Any:
        """Count the bytes of a linear layer; the returned layer has no matrix."""
        all_outs = {name: self.shapes[f"{name}.weight"][transposed] for name in names}
        width = self.shapes[f"{names[0]}.weight"][not transposed]
        own = [all_outs[name] for name in names]  # a name may be there twice
        if outs is not None:
            pieces = self.pieces(names, transposed, outs)
            own = [sum(len(some) for of, some in pieces if of == name and some) for name in names]
        stored = [self.stored.get(f"{name}.weight", f"{name}.weight") for name in names]
        self.vectors += sum(own) * self.dtype.itemsize * bias
        size = self._bytes(names, own, width if ins is None else len(ins), exact=exact)
        self.matrices += size
        if EXPERT in names[0]:
            self.chosen += size
            self.mixed |= {names[0].partition(EXPERT)[0]}
        return NoMatrix(stored)

    def heads(self, names: Sequence[str], heads: int, plain: int, value: int) -> Any:
        """Count the bytes of the matrices of heads, which are floats or in the format of other matrices."""
        if len(names) == 2:
            return [self.linear(names[0])] * heads, [self.linear(names[1])] * heads
        name = f"{names[0]}.weight"
        stored, width = self.stored.get(name, name), self.shapes[name][1]
        info = self.checkpoint.tensors.get(stored)
        own = {info.dtype} if info and info.dtype in FLOATS.values() else {self.dtype}
        for outs, ins in ((width, plain), (value, width)):
            kept = FORMATS[self.quant_of_heads(outs)]
            self.matrices += heads * kept.bytes(outs, ins, own, self.dtype, self.device)
        return [NoMatrix([stored])] * heads, [NoMatrix([stored])] * heads

    def stacked_heads(self, names: Sequence[str], heads: int, plain: int) -> tuple[Tensor, Tensor]:
        """Count the bytes of the same matrices as floats; the returned tensors have no data."""
        shapes = [self.shapes[f"{name}.weight"] for name in names]
        rank = shapes[-1][1]
        keys, values = ((heads, n, rank) for n in (plain, shapes[-1][0] // heads - (plain if len(names) == 1 else 0)))
        made = [torch.empty(shape, dtype=self.dtype, device="meta") for shape in (keys, values)]
        self.matrices += sum(x.nbytes for x in made)
        return made[0], made[1]

    def stacked(self, count: int, *names: str, bias: bool = False) -> Any:
        """Count the bytes of the experts of a layer."""
        return self.linear(*names, bias=bias)

    def embedding(self, name: str) -> Any:
        """Count the bytes of the embedding: on a CPU rows are read from the file, elsewhere they are resident."""
        if self.device.type != "cpu":
            rows, width = self.shapes[name]
            self.vectors += len(part(rows, self.shard)) * width * self.dtype.itemsize
            if self.shard.size == 1:
                self.resident[self.stored.get(name, name)] = torch.empty(0)
        return nn.Identity()

    def _bytes(self, names: Sequence[str], outs: Sequence[int], width: int, *, exact: bool = False) -> int:
        tensors = self.checkpoint.tensors
        stored = [self.stored.get(f"{name}.weight", f"{name}.weight") for name in names]
        key = "+".join(stored)
        if self.checkpoint.packing and key in self.checkpoint.packing.sizes and has_kernels(torch.float32, self.device):
            parts = [tensors[name] for name in (prefix + key for prefix in PREFIXES) if name in tensors]
            return sum(math.prod(part.shape) * part.dtype.itemsize for part in parts)
        forms = [self._form(f"{name}.weight", place, width) for name, place in zip(names, stored, strict=True)]
        if all(forms):
            runs = groupby(zip(forms, outs, strict=True), key=lambda each: each[0])  # neighbours are one matrix
            return sum(self._formed(form, sum(rows for _, rows in run), width) for form, run in runs if form)
        if any(forms):  # `Joined`
            return sum(self._bytes([name], [rows], width, exact=exact) for name, rows in zip(names, outs, strict=True))
        quant = "none" if exact else format_of(self.quant, sum(outs), head=tuple(names) == (HEAD,))
        if quant == "none" and len(stored) == 1 and stored[0] in self.resident:  # the same memory
            self.vectors -= sum(outs) * width * self.dtype.itemsize
        dtypes = {tensors[name].dtype for name in stored}
        return FORMATS[quant].bytes(sum(outs), width, dtypes, self.dtype, self.device)

    def _form(self, name: str, stored: str, width: int) -> Form | Block | None:
        """Return the form of a weight that a checkpoint stores quantised; None: it stores floats."""
        scheme = self.checkpoint.scheme(name, stored)
        return None if scheme is None else scheme.form(width)

    def _formed(self, form: Form | Block, outs: int, width: int) -> int:
        """Return the bytes of a matrix of codes."""
        if self.device.type == "cpu":
            return form.packed_bytes(outs, width)
        if not takes(form.kind, form.group, width):
            return outs * width * self.dtype.itemsize
        scales = -(-width // form.group) * torch.float32.itemsize * (1 + (form.zeros or form.least))
        return code_bytes(form.kind, outs, width, scales)


class NoMatrix(nn.Module):
    """A linear layer without a matrix, see `models.formats.linear.Linear`."""

    bias, matrix = None, None

    def __init__(self, names: Sequence[str]):
        super().__init__()
        self.names = self.made_of = names
