"""What profilers and torch.compile see of the operators; no other file knows of them.

An operator in C++ or Triton is registered with `torch.library`. A profiler is shown these while it runs, see `watched`.
A compiler is shown them after `traceable`: the fronts, whose checks read numbers, give way to what it can trace.
"""

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

FUSED = ("rms_norm", "layer_norm", "rotary", "activation", "activation_mul")  # compilers get their definitions to fuse


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


@cache
def traceable() -> None:
    """Make the fronts traceable: `torch.compile(model.forward, fullgraph=True)` then gets one graph of a whole model.

    Operators over trees and packed products are opaque in it, see `register`; those of `FUSED` are PyTorch's. Nothing
    is checked. Programs that compile a model call it once before; it takes a second, in which torch's compiler is
    imported.
    """
    from kernels import kv_write, linear, rows, short_conv, tree_attention
    from kernels.rows import reference

    def trace(front: Callable[..., Any], traced: Callable[..., Any]) -> None:
        torch.compiler.substitute_in_graph(front, skip_signature_check=True)(traced)

    trace(watched, lambda: True)
    trace(linear.linear, linear.native.opaque_linear)
    trace(kv_write.kv_write, _opaque("kv_write"))
    trace(short_conv.short_conv, _opaque("short_conv"))
    trace(tree_attention.tree_attention, _tree_attention)
    for name in FUSED:
        trace(getattr(rows, name), _fused(getattr(reference, name)))


def _opaque(name: str) -> Callable[..., Any]:
    def traced(*arguments: Any, impl: str = "torch") -> Any:
        return getattr(torch.ops.coppice, f"{name}_{impl}")(*arguments)

    return traced


def _fused(definition: Callable[..., Any]) -> Callable[..., Any]:
    def traced(*arguments: Any, impl: str) -> Any:
        return definition(*arguments)

    return traced


def _tree_attention(
    q_THD: Tensor,
    k_GSD: Tensor,
    v_GSD: Tensor,
    layout: Any,
    *,
    scale: float,
    window: int | None = None,
    cap: float | None = None,
    impl: str | None = None,
) -> Tensor:
    impl = impl or layout.impl
    if impl == "triton":
        from kernels.tree_attention import triton

        operands = triton.operands(q_THD, k_GSD, v_GSD, layout)
        return torch.ops.coppice.tree_attention_triton(*operands, scale, window, cap)
    operator = getattr(torch.ops.coppice, f"tree_attention_{impl}")
    return operator(q_THD, k_GSD, v_GSD, *layout.seen, scale, window, cap)
