"""The rank of a process among those that compute a model together. `models.sharding` defines their parts of the
model."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from torch import Tensor

T = TypeVar("T")


class Shard:
    """The place of a process among those that compute a model together; this class is for one that meets no others.

    Args:
        rank, size: the number of the process, from 0, and of processes.
        local: how many of them share this machine.
    """

    def __init__(self, rank: int = 0, size: int = 1, local: int = 1):
        self.rank, self.size, self.local = rank, size, local

    def sum(self, x: Tensor) -> Tensor:
        """The sum of the tensors of all processes, which have one shape; x may be overwritten."""
        return x

    def gather(self, x: Tensor) -> Tensor:
        """The tensors of all processes, which have one shape, by rank: [size, *x.shape]."""
        return x.unsqueeze(0)

    def first(self, make: Callable[[], T]) -> T:
        """The result of `make` in the first process, which alone calls it, so that measured numbers are the same."""
        return make()
