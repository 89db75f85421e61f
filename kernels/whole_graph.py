"""Functions that torch.compile traces in place of the fronts, whose checks read values: one graph for a whole model."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

from kernels import kv_write, linear, rows, short_conv, tree_attention
from kernels.layout import TreeLayout
from kernels.rows import reference
from kernels.tracing import FUSED, watched


@cache
def traceable() -> None:
    """Make the fronts traceable: `torch.compile(model.forward, fullgraph=True)` then gets one graph of a whole model.

    Operators over trees and packed products are opaque in it, see `register`; those of `FUSED` and sums with a norm are
    PyTorch's. Nothing is checked. Programs that compile a model call it once before, and give it layouts of `fusible`;
    it takes a second, in which torch's compiler is imported.
    """

    def trace(front: Callable[..., Any], traced: Callable[..., Any]) -> None:
        torch.compiler.substitute_in_graph(front, skip_signature_check=True)(traced)

    trace(watched, lambda: True)
    trace(linear.linear, linear.native.opaque_linear)
    trace(kv_write.kv_write, _opaque("kv_write"))
    trace(kv_write.rotary_write, _rotary_write)
    trace(short_conv.short_conv, _opaque("short_conv"))
    trace(tree_attention.tree_attention, _tree_attention)
    for name in (*FUSED, "add_norm"):
        trace(getattr(rows, name), _fused(getattr(reference, name)))


def fusible(layout: TreeLayout) -> TreeLayout:
    """The layout of a pass whose operators on rows a compiler fuses. Of Triton's kernels for several operators at once,
    `rotary_write` is opaque and `add_norm` is fused; those of latents and experts cannot be traced."""
    return layout if layout.impl == "triton" else replace(layout, rows="torch")


def _opaque(name: str) -> Callable[..., Any]:
    def traced(*arguments: Any, impl: str = "torch") -> Any:
        return getattr(torch.ops.coppice, f"{name}_{impl}")(*arguments)

    return traced


def _fused(definition: Callable[..., Any]) -> Callable[..., Any]:
    def traced(*arguments: Any, impl: str, **options: Any) -> Any:
        return definition(*arguments, **options)

    return traced


def _rotary_write(*tensors: Any, impl: str) -> Tensor:
    from kernels.kv_write import triton  # noqa: F401 (it needs Triton, and registers the operator)

    *arguments, turn = tensors
    norms = [x for norm in (turn.q_norm, turn.k_norm) for x in (norm or (None, None))]
    return torch.ops.coppice.rotary_write_triton(*arguments, turn.angles, *norms, *turn[3:])


def _tree_attention(
    q_THD: Tensor,
    k_GSD: Tensor,
    v_GSD: Tensor,
    layout: Any,
    *,
    scale: float,
    window: int | None = None,
    cap: float | None = None,
    sinks_H: Tensor | None = None,
    slopes_H: Tensor | None = None,
    unread: int = 0,
    impl: str | None = None,
) -> Tensor:
    impl = impl or layout.impl
    if impl == "triton":
        from kernels.tree_attention import triton  # which needs Triton

        operands = triton.operands(q_THD, k_GSD, v_GSD, layout)
        return torch.ops.coppice.tree_attention_triton(*operands, scale, window, cap, sinks_H, slopes_H, unread)
    operator = getattr(torch.ops.coppice, f"tree_attention_{impl}")
    return operator(q_THD, k_GSD, v_GSD, layout.seen, scale, window, cap, sinks_H, slopes_H)
