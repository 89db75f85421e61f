"""Tensors as headers describe them, and rows of a matrix that are read from its file on demand."""

import json
import math
import os
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from models.errors import CheckpointError, show
from models.quantized.parts import Part, Scheme, Source


class Cut(NamedTuple):
    """Rows `first`, `first + step` and so on below `last` of a matrix (or elements of a vector) in a tensor of several.

    Args:
        number: the matrix's number in the tensor.
        transposed: the rows are stored as columns.
        below: so many matrices lie below each other in the tensor, which has two dimensions; 0: it has three.
    """

    number: int
    first: int
    last: int
    step: int = 1
    transposed: bool = False
    below: int = 0

    def of(self, stored: Tensor) -> Tensor:
        """Return the rows as a view of the stored tensor."""
        found = (stored.unflatten(0, (self.below, -1)) if self.below else stored)[self.number]
        found = found.T if self.transposed else found
        return found[self.first : self.last : self.step]


class View(NamedTuple):
    """A tensor in another shape of equal size; `minus_one`: 1, which the file has added, is subtracted in float32."""

    shape: tuple[int, ...]
    minus_one: bool = False

    def of(self, stored: Tensor) -> Tensor:
        """Return the tensor, as a view of the stored one if the values are equal."""
        found = stored.view(self.shape)
        return found.float() - 1 if self.minus_one else found


@dataclass(frozen=True)
class TensorInfo:
    """A tensor as a header describes it. `packed`: the file has its values only in a packed matrix.

    `name`: the name in the file, if the model's name differs.
    `part`: the part of the file's tensor, or its form here; None: the whole tensor, unchanged.
    `stored`: the dtype in the file, if the tensor is read as another one; None: `dtype`.
    """

    file: Path
    shape: tuple[int, ...]
    dtype: torch.dtype
    packed: bool = False
    name: str = ""
    part: Cut | View | None = None
    stored: torch.dtype | None = None

    @property
    def elements(self) -> int:
        """The number of its elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes that it takes in the file."""
        return math.prod(self.shape) * self.held.itemsize

    @property
    def held(self) -> torch.dtype:
        """The dtype in the file."""
        return self.stored or self.dtype

    def fits(self, part: Part) -> bool:
        """Whether it has a shape and a dtype that a model needs."""
        return self.shape in part.shapes and self.dtype in part.dtypes


class RowReader:
    """Rows of a matrix in a file, read on request: an embedding that takes no memory.

    A mapping would also work, but the kernel maps whole neighbourhoods of every touched page, so that a few hundred
    scattered rows make most of an embedding resident; and a file that is truncated while mapped kills the process.
    """

    def __init__(self, info: TensorInfo, name: str, start: int | None = None):
        """`start`: the matrix's first byte in the file; None: read it from the header of safetensors."""
        self.info, self.name = info, name
        self.width = info.shape[1]
        self.row_bytes = self.width * info.held.itemsize
        self._fd = os.open(info.file, os.O_RDONLY)
        weakref.finalize(self, os.close, self._fd)
        self._start = self._by_header(info.name or name) if start is None else start

    def _by_header(self, name: str) -> int:
        """Return a tensor's offset in a safetensors file, whose header was checked when the checkpoint was opened."""
        size = int.from_bytes(os.pread(self._fd, 8, 0), "little")
        header = json.loads(os.pread(self._fd, size, 8))
        return 8 + size + header[name]["data_offsets"][0]

    def __call__(self, rows: Sequence[int]) -> Tensor:
        """Return [len(rows), width] in the tensor's dtype. Raises CheckpointError if the file has become shorter."""
        buffer = bytearray(len(rows) * self.row_bytes)
        view = memoryview(buffer)
        for i, row in enumerate(rows):
            piece = view[i * self.row_bytes : (i + 1) * self.row_bytes]
            if os.preadv(self._fd, [piece], self._start + row * self.row_bytes) != self.row_bytes:
                raise CheckpointError(f"{self.name} is cut short", where=show(self.info.file))
        return torch.frombuffer(buffer, dtype=self.info.held).view(-1, self.width).to(self.info.dtype)


class GroupedReader:
    """Rows of a quantised matrix as float32, read from the file on request: see `RowReader`.

    Args:
        scheme, width: the matrix's scheme and width; each of its tensors has a row for each of its rows.
        parts: readers of the rows of its tensors, by the suffixes of their names.
        name: the name of the matrix.
    """

    def __init__(self, scheme: Scheme, width: int, parts: Mapping[str, RowReader], name: str):
        self.scheme, self.width, self.parts, self.name = scheme, width, parts, name

    def __call__(self, rows: Sequence[int]) -> Tensor:
        """Return [len(rows), width]. Raises CheckpointError if the file has become shorter, or values are invalid."""
        read = {suffix: part(rows) for suffix, part in self.parts.items()}
        return self.scheme.weight(len(rows), self.width, Source(read.get, self._error)).floats()

    def _error(self, what: str) -> CheckpointError:
        where = show(next(iter(self.parts.values())).info.file)
        return CheckpointError(f"{show(self.name)}: {what}", where=where)
