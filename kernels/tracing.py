"""The operators as profilers and torch.compile see them.

An operator in C++ or Triton is registered with `torch.library`. A running profiler sees these operators, see `watched`.
A compiler sees them in the graph of a whole model, see `kernels.whole_graph`.
"""

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

FUSED = (  # compilers get their definitions to fuse
    "rms_norm",
    "layer_norm",
    "rotary",
    "activation",
    "activation_mul",
    "xielu",
    "sparsify",
    "add_weighted",
    "sigmoid_mul",
)


def register(name: str, run: Callable[..., Any], fake: Callable[..., Any], *, mutates: Sequence[str] = ()) -> None:
    """Registers `coppice::name`.

    Args:
        fake: takes the same arguments and returns empty tensors like the results.
        mutates: names of the arguments that are written to.
    """
    torch.library.custom_op(f"coppice::{name}", run, mutates_args=mutates).register_fake(fake)


def like(x: Tensor, *_: Any) -> Tensor:
    """A fake whose result is contiguous, with the shape and dtype of the first argument."""
    return x.new_empty(x.shape)


def as_wide(x: Tensor, weight: Tensor, *_: Any) -> Tensor:
    """A fake with the rows and dtype of the first argument, as wide as the second."""
    return x.new_empty(x.shape[0], weight.shape[1])


def nothing(*_: Any) -> None:
    """A fake without a result."""


def watched() -> bool:
    """Whether a profiler is active: it sees calls that go through torch's dispatcher only."""
    return torch.autograd.profiler._is_profiler_enabled


@cache
def compiled(run: Callable[..., Any]) -> Callable[..., Any]:
    """A function compiled for all sizes when it is first called."""
    return torch.compile(run, dynamic=True, fullgraph=True)
