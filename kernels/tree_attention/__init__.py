"""Attention of tree tokens to their trunk and their ancestors: the front that checks and picks an implementation."""

from torch import Tensor, ops  # `torch` is the module beside this one

from kernels import checks
from kernels.layout import TreeLayout
from kernels.tracing import watched
from kernels.tree_attention import native, reference
from kernels.tree_attention import torch as plain

IMPLEMENTATIONS = ("reference", "torch", "cpp", "triton")


def tree_attention(
    q_THD: Tensor,
    k_GSD: Tensor,
    v_GSD: Tensor,
    layout: TreeLayout,
    *,
    scale: float,
    window: int | None = None,
    cap: float | None = None,
    sinks_H: Tensor | None = None,
    slopes_H: Tensor | None = None,
    unread: int = 0,
    impl: str | None = None,
) -> Tensor:
    """Softmax attention of each token over the trunk tokens and branch nodes that it sees.

    Args:
        q_THD: queries; H is a multiple of G, query head h reads key/value head h // (H / G).
        k_GSD, v_GSD: one layer's cache, contiguous, the keys and values of this pass already written; in q's dtype, or
            of 8 bits, see `kernels.kv_kinds`.
        layout: the pass.
        scale: factor of the dot products.
        cap: of the scores, which become cap * tanh(score / cap) (Bello et al., 2017); None: no cap.
        sinks_H: float32, contiguous, a logit of each query head that joins the denominator of its softmax and has no
            value (gpt-oss, OpenAI 2025; Miller, 2023, with a logit of 0); None: there is none.
        slopes_H: contiguous, a number for each query head, times which the distance from the query's position to the
            key's, 0 or negative, joins the dot product before it is scaled (ALiBi; Press et al., 2022, "Train short,
            test long"); None: distances change nothing. Float32, or bfloat16: then the positions and their products
            with the slope are rounded to bfloat16 (Falcon). Not together with `cap`.
        window: a token at position p sees only positions > p - window; None sees all. Without slopes, the positions of
            tokens have no other use, so `TreeLayout.in_chunks` makes windows of chunks.
        unread: this many leading elements of the result are not needed, and an implementation need not write them. Used
            if one tensor serves as keys and values (`kernels.latent`).
        impl: "reference" (the definition), "torch" (fast PyTorch, any device), "cpp" (C++, on a CPU, no FP8) or
            "triton" (GPU kernels); None uses the layout's.

    Returns:
        [T, H, D] in q's dtype; zeros for a token that sees nothing.

    Raises:
        ValueError: tensors do not fit together, a layout points outside the cache, impl is unknown, or the
            implementation does not support the case. The contents of a layout on a GPU are not checked, because that
            would wait for the GPU: the code that makes the layout is responsible for them.
    """
    impl = impl or layout.impl
    checks.implementation(impl, IMPLEMENTATIONS)
    checks.queries(q_THD, k_GSD, v_GSD, window, cap, sinks_H, slopes_H)
    if layout.positions_T.shape[0] != q_THD.shape[0]:
        raise ValueError(f"expected a layout of {q_THD.shape[0]} tokens, got {layout.positions_T.shape[0]}")
    if impl == "cpp":
        checks.native(q_THD)
        checks.native_cache(k_GSD)
        native.seen(layout, k_GSD.shape[1])  # which C++ checks, quicker than `fits`, and keeps with the layout
    else:
        checks.fits(layout, k_GSD.shape[1], k_GSD.device)
    checks.unread(q_THD, k_GSD, v_GSD, unread)
    if impl == "triton":
        from kernels.tree_attention import triton  # absent on some machines, and slow to import

        return triton.tree_attention(q_THD, k_GSD, v_GSD, layout, scale, window, cap, sinks_H, slopes_H, unread)
    if impl == "reference":
        return reference.tree_attention(q_THD, k_GSD, v_GSD, layout, scale, window, cap, sinks_H, slopes_H)
    if impl == "torch":
        return plain.tree_attention(q_THD, k_GSD, v_GSD, layout.seen, scale, window, cap, sinks_H, slopes_H)
    if watched():
        return ops.coppice.tree_attention_cpp(q_THD, k_GSD, v_GSD, layout.seen, scale, window, cap, sinks_H, slopes_H)
    seen = native.seen(layout, k_GSD.shape[1])
    return native.attend(q_THD, k_GSD, v_GSD, seen, scale, window, cap, sinks_H, slopes_H)
