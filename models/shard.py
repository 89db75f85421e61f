"""The rank of a process among those that compute a model together. `models.sharding` defines their parts of the
model."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from torch import Tensor

T = TypeVar("T")


class Shard:
    """The place of a process among those that compute a model together; this class is for a process that runs alone.

    Args:
        rank, size: the number of this process, counted from 0, and the number of processes.
        local: the number of processes on this machine.
    """

    def __init__(self, rank: int = 0, size: int = 1, local: int = 1):
        self.rank, self.size, self.local = rank, size, local

    def sum(self, x: Tensor) -> Tensor:
        """Return the sum of all processes' tensors, which have one shape; x may be overwritten."""
        return x

    def gather(self, x: Tensor) -> Tensor:
        """Return all processes' tensors, which have one shape, by rank: [size, *x.shape]."""
        return x.unsqueeze(0)

    def first(self, make: Callable[[], T]) -> T:
        """Call `make` in the first process only, and return its result in all, so that measured numbers agree."""
        return make()
