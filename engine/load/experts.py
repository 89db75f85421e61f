"""Mixtures of experts that exceed `--memory`: the bytes that a token reads, and those that must stay in memory."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from engine.errors import UsageError
from engine.load.options import LoadOptions
from engine.load.sizes import size_text
from kernels.experts import Keeper, least_limit
from kernels.experts.keeper import MAPPINGS
from models.checkpoint.sizes import ModelSize
from models.formats.floats import has_kernels
from models.mixture import Mixture

CPU = torch.device("cpu")


@dataclass(frozen=True)
class ExpertBytes:
    """The experts of a model.

    Args:
        every: bytes of all experts.
        line: the line of the memory plan that counts them.
        layers: number of layers with experts.
        count, chosen: experts of a layer, and those that a token uses.
        apart: the reason why all of them must be in memory; None: a part suffices.
        packs: returns the bytes of the file that a start with a part of them must write first; 0: it exists.
    """

    every: int
    line: str
    layers: int
    count: int
    chosen: int
    apart: str | None
    packs: Callable[[], int]

    @staticmethod
    def of(size: ModelSize, line: str, apart: str | None, packs: Callable[[], int]) -> "ExpertBytes | None":
        """The experts of a measured model; None: it has none."""
        if (mixed := size.config.experts) is None:
            return None
        return ExpertBytes(size.chosen, line, size.layers, mixed.count, mixed.routing.chosen, apart, packs)

    @property
    def least(self) -> int:
        """Bytes that must stay in memory, because the rows of one pass may choose all experts of a layer."""
        return min(least_limit(self.every // self.layers, self.count), self.every)

    def touched(self) -> str:
        """Say what a token reads."""
        return (
            f"a token touches {self.chosen} of {self.count} experts in each of {self.layers} layers, "
            f"{size_text(self.every * self.chosen // self.count)} of {size_text(self.every)}"
        )

    def limits(self) -> str:
        """Say how many bytes of experts `--memory` holds at least."""
        if self.apart is not None:
            return f"--memory holds all: {self.apart}"
        packed = f"; with less than all a start first packs {size_text(n)} into a file" if (n := self.packs()) else ""
        return f"--memory holds at least {size_text(self.least)}{packed}"


def why_whole(options: LoadOptions) -> str | None:
    """Why all experts of a model must be in memory; None: they can be multiplied from a mapped file."""
    if options.place.size > 1:
        return "processes that share a model hold all of its experts"
    if not has_kernels(torch.float32, CPU):
        return "experts are read from a mapped file by the C++ kernels alone"
    if not MAPPINGS.exists():
        return "the system does not say which files are mapped, as Linux does"
    return None


def keep_experts(model: Any, limit: int, where: str) -> str:
    """Have a loaded model keep `limit` bytes of its experts in memory; returns what that means for its steps.

    Raises:
        UsageError: the experts are in no mapped file.
    """
    mixtures = [module.matrices for module in model.modules() if isinstance(module, Mixture)]
    try:
        known = [mixture for mixture in mixtures if mixture is not None]
        if len(known) < len(mixtures):
            raise ValueError("a matrix of an expert has no C++ product")
        keeper = Keeper(known, limit)
    except ValueError as error:
        what = f"memory: it does not hold all experts: {error}"
        raise UsageError(what, where=where, remedy="raise --memory") from None
    counts = [(len(mixture.experts), mixture.routing.chosen) for mixture in known]
    token = keeper.bytes * sum(chosen for _, chosen in counts) // sum(count for count, _ in counts)
    read = "less than that, so that every token reads experts" if limit < token else "the others are read"
    return (
        f"--memory holds {size_text(limit)} of {size_text(keeper.bytes)} of experts; a token touches "
        f"{size_text(token)}: {read} from the disk when they are chosen"
    )
