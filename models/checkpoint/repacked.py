"""Packs the matrices of a mixture of experts into a file, with one matrix in memory at a time."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from models.checkpoint.cached_matrices import CachedMatrices
from models.checkpoint.experts import EXPERT
from models.checkpoint.headers import Checkpoint
from models.checkpoint.sizes import NoMatrix, measure
from models.checkpoint.weights import Weights
from models.families import load_model
from models.file_cache import NewFile

CPU = torch.device("cpu")


def repack(
    checkpoint: Checkpoint,
    dtype: torch.dtype,
    quant: str,
    matrices: CachedMatrices,
    new: NewFile,
    tell: Callable[[int], None],
) -> None:
    """Write the packed matrices of a checkpoint into a file, where `matrices` finds them afterwards.

    See `load_model` for other arguments and errors.

    Args:
        matrices: the matrices to write, see `matrices_of_experts`.
        new, tell: see `CachedMatrices.written`, also for errors.
    """
    with matrices.written(new, tell):
        load_model(checkpoint, dtype, CPU, quant, partial(_Repacking, cached=matrices))


def repacked_bytes(checkpoint: Checkpoint, dtype: torch.dtype, quant: str) -> int:
    """Estimate the bytes of such a file from headers."""
    size = measure(checkpoint, dtype, CPU, quant)
    return size.matrices if _all_packed(checkpoint, quant) else size.chosen


def _all_packed(checkpoint: Checkpoint, quant: str) -> bool:
    """Whether all matrices are quantised, so that the file contains more than experts."""
    return quant != "none" or checkpoint.quantization is not None


class _Repacking(Weights):
    """Stands in for `Weights`: the model gets no matrices, because each is dropped as soon as it is packed."""

    def linear(self, *names: str, **how: Any) -> Any:
        """Write a matrix if it belongs to the file; the returned layer has none."""
        if EXPERT in names[0] or _all_packed(self.checkpoint, self.quant):
            super().linear(*names, **how)
        return NoMatrix(names)
