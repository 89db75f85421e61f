"""The packed matrices of a checkpoint in a file of the cache: those that are quantised, or repacked, when it is loaded.

Matrices of floats are not kept: to pack them takes about the time that it takes to read them.
"""

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial

import torch
from torch import Tensor

from kernels.linear import Groups, Packed, PackedParts
from models.checkpoint.headers import Checkpoint
from models.checkpoint.tensor_files import DTYPES, buffer_of
from models.file_cache import CachedFile, FileCache, changed_since, identity, in_background, name_of
from models.formats.floats import has_kernels
from models.formats.packed import Size
from models.shard import Shard

WORTH = 4 << 20  # bytes of packed matrices that are worth a file
NAMES = {dtype: name for name, dtype in DTYPES.items()}


class CachedMatrices:
    """The matrices of a checkpoint in a format, of one process.

    Args:
        cache: the folder of files.
        checkpoint: has matrices that are quantised, or are to be.
        quant: the format of the matrices.
        shard: the place of the process.
        opened: a moment of `time.time` before the headers were read.

    Raises:
        OSError: a file of the checkpoint cannot be read.
    """

    def __init__(self, cache: FileCache, checkpoint: Checkpoint, quant: str, shard: Shard, opened: float):
        self.cache, self.opened = cache, opened
        self.paths = sorted({info.file for info in checkpoint.tensors.values()})
        self.identity = identity(self.paths)
        config = json.dumps(checkpoint.config, sort_keys=True)
        self.name = name_of("matrices", self.identity, config, quant, shard.rank, shard.size)
        self._file = cache.open(self.name)
        self._known: dict[str, Packed | PackedParts] = {}
        self._new = False

    @property
    def found(self) -> bool:
        """Whether an earlier start made them."""
        return self._file is not None

    def get(self, key: str) -> Packed | PackedParts | None:
        """The matrix of a key, mapped; None: it is not in the file."""
        entries = self._file.facts.get(key) if self._file else None
        if entries is None:
            return None
        assert self._file is not None
        parts = [_matrix(self._file, *entry) for entry in entries]
        found = self._known[key] = parts[0] if len(parts) == 1 else PackedParts(parts)
        return found

    def add(self, key: str, matrix: Packed | PackedParts | None) -> None:
        """Take note of a matrix that was derived; None: it is kept in a way that is no packed matrix."""
        if matrix is not None:
            self._known[key], self._new = matrix, True

    def keep(self) -> None:
        """Write what was derived, if it is worth a file, in a thread: whatever the model is asked first goes before."""
        known, self._known = self._known, {}
        size = sum(part.panels.nbytes for matrix in known.values() for part in _parts(matrix))
        if self._new and size >= WORTH:
            in_background(partial(self._write, known))

    def _write(self, known: Mapping[str, Packed | PackedParts]) -> None:
        facts, tensors = {}, list[Tensor]()
        for key, matrix in known.items():
            facts[key] = [_described(part, tensors) for part in _parts(matrix)]
        with suppress(OSError):  # the checkpoint is gone
            if not changed_since(self.paths, self.opened) and identity(self.paths) == self.identity:
                self.cache.write(self.name, facts, [buffer_of(tensor).cast("B") for tensor in tensors])


def cached_matrices(
    cache: FileCache | None, checkpoint: Checkpoint, quant: str, shard: Shard, device: torch.device, opened: float
) -> CachedMatrices | None:
    """`CachedMatrices` where there is something to keep: C++ kernels, and matrices that are not floats.

    Args:
        cache: None keeps nothing.
        device: that the matrices are multiplied on.
    """
    derives = checkpoint.packing is None and (checkpoint.quantization is not None or quant != "none")
    if cache is not None and derives and has_kernels(torch.float32, device):
        with suppress(OSError):  # reading the weights says what is wrong
            return CachedMatrices(cache, checkpoint, quant, shard, opened)
    return None


def _parts(matrix: Packed | PackedParts) -> list[Packed]:
    return matrix.parts if isinstance(matrix, PackedParts) else [matrix]


def _described(packed: Packed, tensors: list[Tensor]) -> tuple[Size, list[tuple[int, str, Sequence[int]] | None]]:
    """Size and tensors of a matrix: the number, dtype and shape of each; they are added to the list."""
    values = packed.groups[2:] if packed.groups else (packed.scale_O, *(None,) * 4)
    described: list[tuple[int, str, Sequence[int]] | None] = []
    for tensor in (packed.panels, *values, packed.order_I):
        if tensor is None:
            described.append(None)
            continue
        described.append((len(tensors), NAMES[tensor.dtype], list(tensor.shape)))
        tensors.append(tensor.contiguous())
    return Size.of(packed), described


def _matrix(file: CachedFile, size: Sequence, described: Sequence) -> Packed:
    """The same matrix, mapped."""
    tensors = [d and file.tensor(d[0], DTYPES[d[1]], d[2]) for d in described]
    panels, scale, *others, order_I = tensors
    outs, width, kind, group, levels = size
    groups = Groups(kind, group, scale, *others) if kind else None
    return Packed(panels, outs, width, None if kind else scale, groups=groups, order_I=order_I, levels=levels)
