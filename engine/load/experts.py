"""Mixtures of experts of which `--memory` holds a part: what a token touches, what stays in memory, what may not."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from engine.errors import UsageError
from engine.load.file_cache import file_cache
from engine.load.options import LoadOptions
from engine.load.sizes import size_text
from kernels.experts import Keeper, least_limit
from models.checkpoint.cached_matrices import cached_matrices
from models.checkpoint.headers import Checkpoint
from models.checkpoint.sizes import ModelSize
from models.formats.floats import has_kernels
from models.mixture import Mixture

CPU = torch.device("cpu")


@dataclass(frozen=True)
class ExpertBytes:
    """The experts of a model.

    Args:
        every: bytes of all.
        line: of a plan that counts them.
        layers: that have some.
        count, chosen: of a layer; those of a token.
        apart: says why they cannot be in memory in part; None: they can.
    """

    every: int
    line: str
    layers: int
    count: int
    chosen: int
    apart: Callable[[], str | None]

    @staticmethod
    def of(size: ModelSize, line: str, apart: Callable[[], str | None]) -> "ExpertBytes | None":
        """Those of a measured model; None: it has none."""
        if (mixed := size.config.experts) is None:
            return None
        return ExpertBytes(size.chosen, line, size.layers, mixed.count, mixed.routing.chosen, apart)

    @property
    def token(self) -> int:
        """Bytes that a token reads."""
        return self.every * self.chosen // self.count

    @property
    def least(self) -> int:
        """Bytes that have to stay in memory: the rows of one pass may choose all experts of a layer."""
        return min(least_limit(self.every // self.layers, self.count), self.every)

    def touched(self) -> str:
        """Say what a token reads."""
        return (
            f"a token touches {self.chosen} of {self.count} experts in each of {self.layers} layers, "
            f"{size_text(self.token)} of {size_text(self.every)}"
        )

    def limits(self) -> str:
        """Say how many of them `--memory` holds at least."""
        if (reason := self.apart()) is not None:
            return f"--memory holds all: {reason}"
        return f"--memory holds at least {size_text(self.least)}"


def why_whole(options: LoadOptions, checkpoint: Checkpoint, quant: str) -> str | None:
    """Why the experts of a checkpoint have to be in memory all; None: they are multiplied where a file is mapped."""
    if options.place.size > 1:
        return "processes that share a model hold all of its experts"
    if not has_kernels(torch.float32, CPU):
        return "experts are read from a mapped file by the C++ kernels alone"
    if checkpoint.packing is not None:
        return None
    cached = cached_matrices(file_cache(options.cache), checkpoint, quant, options.place, CPU, 0.0)
    if cached is not None and cached.found:
        return None
    ahead = "pack the model ahead by `python -m tools.pack`"
    if cached is None:
        kept = "the cache of derived files is off" if file_cache(options.cache) is None else "floats are not cached"
        return f"the experts have to be repacked in memory, and {kept}: {ahead}"
    return f"the experts have to be repacked in memory, and no earlier start has left them in the cache: {ahead}"


def keep_experts(model: Any, limit: int, where: str) -> str:
    """Have a loaded model keep so many bytes of its experts in memory, and say what that means for its steps.

    Raises:
        UsageError: they are in no mapped file.
    """
    mixtures = [module.matrices for module in model.modules() if isinstance(module, Mixture)]
    try:
        known = [mixture for mixture in mixtures if mixture is not None]
        if len(known) < len(mixtures):
            raise ValueError("a matrix of an expert has no C++ product")
        keeper = Keeper(known, limit)
    except ValueError as error:
        remedy = "raise --memory, or pack the model ahead by `python -m tools.pack`"
        raise UsageError(f"memory: it does not hold all experts: {error}", where=where, remedy=remedy) from None
    counts = [(len(mixture.experts), mixture.routing.chosen) for mixture in known]
    token = keeper.bytes * sum(chosen for _, chosen in counts) // sum(count for count, _ in counts)
    read = "less than that, so that every token reads experts" if limit < token else "the others are read"
    return (
        f"--memory holds {size_text(limit)} of {size_text(keeper.bytes)} of experts; a token touches "
        f"{size_text(token)}: {read} from the disk when they are chosen"
    )
