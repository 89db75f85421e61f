"""Attention of tree tokens over their trunk and their ancestors: the front that checks and picks an implementation."""

import torch
from torch import Tensor

from kernels.cpp import watched
from kernels.layout import TreeLayout
from kernels.tree_attention import cpp, cpu, reference

IMPLEMENTATIONS = ("reference", "cpu", "cpp", "triton")


def tree_attention(
    q_THD: Tensor,
    k_GSD: Tensor,
    v_GSD: Tensor,
    layout: TreeLayout,
    *,
    scale: float,
    window: int | None = None,
    impl: str | None = None,
) -> Tensor:
    """Softmax attention of each token over the trunk tokens and branch nodes that it sees.

    Args:
        q_THD: queries; H is a multiple of G, query head h reads key/value head h // (H / G).
        k_GSD, v_GSD: one layer's cache, the keys and values of this pass already written.
        layout: the pass.
        scale: factor of the dot products.
        window: a token at position p sees only positions > p - window; None sees all.
        impl: "reference" (the definition), "cpu" (fast PyTorch, any device), "cpp" (a C++ kernel, on a CPU) or "triton"
            (GPU kernels); None takes the layout's.

    Returns:
        [T, H, D] in q's dtype; zeros for a token that sees nothing.

    Raises:
        ValueError: shapes or dtypes that do not fit together, unknown impl, or what the implementation cannot do.
    """
    T, H, D = q_THD.shape
    if k_GSD.shape != v_GSD.shape or k_GSD.shape[2] != D or H % k_GSD.shape[0]:
        raise ValueError(
            f"expected k and v [G, S, {D}] with G dividing {H}, got {list(k_GSD.shape)}, {list(v_GSD.shape)}"
        )
    if not (q_THD.dtype == k_GSD.dtype == v_GSD.dtype):
        raise ValueError(f"expected one dtype, got q {q_THD.dtype}, k {k_GSD.dtype}, v {v_GSD.dtype}")
    if layout.positions_T.shape[0] != T:
        raise ValueError(f"expected a layout of {T} tokens, got {layout.positions_T.shape[0]}")
    impl = impl or layout.impl
    if impl not in IMPLEMENTATIONS:
        raise ValueError(f"impl: expected one of {', '.join(IMPLEMENTATIONS)}, got {impl!r}")
    if impl == "triton":
        from kernels.tree_attention import triton  # absent on some machines, and slow to import

        if torch.compiler.is_compiling():  # opaque to the compiler; called straight when eager
            return torch.ops.coppice.tree_attention_triton(*triton.operands(q_THD, k_GSD, v_GSD, layout), scale, window)
        return triton.tree_attention(q_THD, k_GSD, v_GSD, layout, scale, window)
    if impl == "reference":
        return reference.tree_attention(q_THD, k_GSD, v_GSD, layout, scale, window)
    if impl == "cpp":
        run = torch.ops.coppice.tree_attention_cpp if watched() else cpp.tree_attention
    else:
        run = torch.ops.coppice.tree_attention_cpu if torch.compiler.is_compiling() else cpu.tree_attention
    return run(q_THD, k_GSD, v_GSD, *layout.seen, scale, window)
