"""Makes the fronts of the row-wise operators from their signatures: each checks its arguments, then calls the
implementation that the pass chose."""

from collections.abc import Callable
from functools import cache, wraps
from importlib.util import find_spec
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from kernels.cpp import why_not
from kernels.rows import checks, native, reference
from kernels.tracing import FUSED, compiled, watched

Front = TypeVar("Front", bound=Callable[..., Any])


def operator(signature: Front) -> Front:
    """Make the front of the operator that has this name and signature; a decorator.

    The function of the same name in `checks` refuses arguments; the one in `reference` is the definition, and takes the
    same arguments but `impl`, as do those in `native` and `triton`, where there are any.
    """
    name = signature.__name__
    check = getattr(checks, name)

    @wraps(signature)
    def front(*arguments: Any, impl: str | None = None, **options: Any) -> Any:
        check(*arguments, **options)
        return implementation(name, impl or best(arguments[0]))(*arguments, **options)

    return cast(Front, front)


def implementation(name: str, impl: str) -> Callable[..., Any]:
    """An operator's implementation of a pass; where it has none, the definition."""
    definition = getattr(reference, name)
    if impl == "cpp":
        return getattr(torch.ops.coppice if watched() else native, name, definition)
    if impl == "triton":
        from kernels.rows import triton  # absent on some machines, and slow to import

        return getattr(triton, name, definition)
    return compiled(definition) if impl == "compiled" and name in FUSED else definition


def best(x: Tensor) -> str:
    """The fastest implementation of an operator that no pass chooses for."""
    if x.dtype != torch.float32:
        return "torch"
    if x.is_cuda:
        return "triton" if _has_triton() else "torch"
    return "cpp" if x.is_cpu and not why_not() else "torch"


@cache
def _has_triton() -> bool:
    return find_spec("triton") is not None
