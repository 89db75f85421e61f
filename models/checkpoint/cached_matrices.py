"""A cache file of a checkpoint's packed matrices: those that are quantised or repacked when it is loaded.

Float matrices are not cached, because packing them takes about as long as reading them, except those of experts if only
a part of the experts is to be in memory.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor

from kernels.linear import Groups, Packed, PackedParts, Steps
from models.checkpoint.experts import EXPERT
from models.checkpoint.headers import Checkpoint
from models.checkpoint.tensor_files import DTYPES, FLOATS, buffer_of
from models.errors import CheckpointError, show
from models.file_cache import CachedFile, FileCache, NewFile, changed_since, identity, in_background, name_of
from models.formats.floats import has_kernels
from models.formats.packed import Size
from models.shard import Shard

WORTH = 4 << 20  # the least bytes of packed matrices that are worth a file
NAMES = {dtype: name for name, dtype in DTYPES.items()}


class CachedMatrices:
    """One process's matrices of a checkpoint in a format.

    Args:
        cache: the folder of files; None: no folder, so nothing is found.
        checkpoint: a checkpoint with experts, or with matrices that are quantised or will be.
        quant: the format of the matrices.
        shard: the place of the process.
        opened: a moment of `time.time` before the headers were read.
        floats: the dtype that float experts are packed for; None: float experts are not among the matrices.

    Raises:
        OSError: a file of the checkpoint cannot be read.
    """

    def __init__(
        self,
        cache: FileCache | None,
        checkpoint: Checkpoint,
        quant: str,
        shard: Shard,
        opened: float,
        floats: torch.dtype | None = None,
    ):
        self.cache, self.opened, self._floats = cache, opened, floats is not None
        self.paths = sorted({info.file for info in checkpoint.tensors.values()})
        self.identity = identity(self.paths)
        config = json.dumps(checkpoint.config, sort_keys=True)
        more = [] if floats is None else [str(floats)]
        self.name = name_of("matrices", self.identity, config, quant, shard.rank, shard.size, *more)
        self._known: dict[str, Packed | PackedParts] = {}
        self._new, self._write_now = False, None
        self._file: CachedFile | None = None
        self.look()

    def look(self) -> bool:
        """Open the file if it exists by now, and return whether it does."""
        self._file = self.cache.open(self.name) if self.cache else None
        return self.found

    @property
    def found(self) -> bool:
        """Whether an earlier start made the matrices."""
        return self._file is not None

    def holds(self, quant: str, name: str) -> bool:
        """Whether the file contains the matrix `name`, which is kept in the format `quant`."""
        return quant != "none" or (self._floats and EXPERT in name)

    def get(self, key: str) -> Packed | PackedParts | None:
        """Return the mapped matrix of a key; None: it is not in the file."""
        entries = self._file.facts.get(key) if self._file else None
        if entries is None:
            return None
        assert self._file is not None
        parts = [_matrix(self._file, *entry) for entry in entries]
        found = self._known[key] = parts[0] if len(parts) == 1 else PackedParts(parts)
        return found

    def add(self, key: str, matrix: Packed | PackedParts | None) -> None:
        """Register a derived matrix; None: it is stored in another way than packed."""
        if matrix is not None and self._write_now:
            self._write_now(key, matrix)
        elif matrix is not None:
            self._known[key], self._new = matrix, True

    def keep(self) -> None:
        """Write the derived matrices, if they are worth a file, in a thread that gives way to the first requests."""
        known, self._known = self._known, {}
        size = sum(part.panels.nbytes for matrix in known.values() for part in _parts(matrix))
        if self.cache and self._new and size >= WORTH:
            in_background(partial(self._write, known))

    @contextmanager
    def written(self, new: NewFile, tell: Callable[[int], None]) -> Iterator[None]:
        """Context in which each matrix is written when it is derived, and then dropped; afterwards all can be found.

        Args:
            new: the file.
            tell: called with the number of bytes written so far.

        Raises:
            CheckpointError: the checkpoint changed.
            OSError: the matrices cannot be written.
        """
        facts, done = dict[str, Any](), 0

        def write(key: str, matrix: Packed | PackedParts) -> None:
            nonlocal done
            sizes = list[int]()

            def put(tensor: Tensor) -> int:
                sizes.append(tensor.nbytes)
                return new.put(buffer_of(tensor).cast("B"))

            facts[key] = [_described(part, put) for part in _parts(matrix)]
            tell(done := done + sum(sizes))

        self._write_now = write
        try:
            yield
        finally:
            self._write_now = None
        if identity(self.paths) != self.identity:
            raise CheckpointError("the weights changed while they were packed", where=show(self.paths[0].parent))
        new.finish(facts)
        self._file = new.mapped()

    def _write(self, known: Mapping[str, Packed | PackedParts]) -> None:
        facts, tensors = {}, list[Tensor]()

        def put(tensor: Tensor) -> int:
            tensors.append(tensor)
            return len(tensors) - 1

        for key, matrix in known.items():
            facts[key] = [_described(part, put) for part in _parts(matrix)]
        with suppress(OSError):  # the checkpoint is gone
            if self.cache and not changed_since(self.paths, self.opened) and identity(self.paths) == self.identity:
                self.cache.write(self.name, facts, [buffer_of(tensor).cast("B") for tensor in tensors])


def cached_matrices(
    cache: FileCache | None, checkpoint: Checkpoint, quant: str, shard: Shard, device: torch.device, opened: float
) -> CachedMatrices | None:
    """Return `CachedMatrices` if there is something to cache: with C++ kernels, and matrices other than floats.

    Args:
        cache: the folder of files; None: nothing is cached.
        device: the device that multiplies the matrices.
    """
    derives = checkpoint.packing is None and (checkpoint.quantization is not None or quant != "none")
    if cache is not None and derives and has_kernels(torch.float32, device):
        with suppress(OSError):  # reading the weights reports the fault
            return CachedMatrices(cache, checkpoint, quant, shard, opened)
    return None


def matrices_of_experts(
    cache: FileCache | None, checkpoint: Checkpoint, dtype: torch.dtype, quant: str, opened: float
) -> CachedMatrices:
    """Return `CachedMatrices` with all experts of a mixture, including float ones. Raises OSError."""
    floats = (info.dtype in FLOATS.values() for name, info in checkpoint.tensors.items() if _is_expert(name))
    packed_for = dtype if quant == "none" and any(floats) else None
    return CachedMatrices(cache, checkpoint, quant, Shard(), opened, packed_for)


def _is_expert(name: str) -> bool:
    """Whether a tensor is a matrix of an expert, and not its scales or the like."""
    return EXPERT in name and name.endswith(".weight")


def _parts(matrix: Packed | PackedParts) -> list[Packed]:
    return matrix.parts if isinstance(matrix, PackedParts) else [matrix]


def _described(
    packed: Packed, put: Callable[[Tensor], int]
) -> tuple[Size, list[tuple[int, str, Sequence[int]] | None], Steps]:
    """Return size, tensors and steps of a matrix: number, dtype and shape of each tensor. `put` stores one and numbers
    it."""
    values = packed.groups[2:] if packed.groups else (packed.scale_O, *(None,) * 4)
    described: list[tuple[int, str, Sequence[int]] | None] = []
    for tensor in (packed.panels, *values, packed.order_I):
        if tensor is None:
            described.append(None)
            continue
        described.append((put(tensor.contiguous()), NAMES[tensor.dtype], list(tensor.shape)))
    return Size.of(packed), described, packed.steps


def _matrix(file: CachedFile, size: Sequence, described: Sequence, steps: Sequence[float] = ()) -> Packed:
    """Return the same matrix, mapped from the file."""
    tensors = [d and file.tensor(d[0], DTYPES[d[1]], d[2]) for d in described]
    panels, scale, *others, order_I = tensors
    outs, width, kind, group, levels, by_row = size
    groups = Groups(kind, group, scale, *others) if kind else None
    rounding: dict[str, Any] = {"levels": levels, "by_row": by_row, "steps": Steps(*steps)}
    return Packed(panels, outs, width, None if kind else scale, groups=groups, order_I=order_I, **rounding)
