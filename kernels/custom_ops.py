"""Operators as `torch.library` has them: what compilers and profilers see in the place of a call into C++ or Triton."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor


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
