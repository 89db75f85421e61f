"""Calls the C++ tree attention (native.cpp): any head size, float32, bfloat16 and float16, any cache but FP8, a CPU."""

import ctypes
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from kernels import checks
from kernels.cpp import KINDS, OPERATORS, address, function
from kernels.layout import TreeLayout
from kernels.tracing import like, register

_CPU = torch.device("cpu")


Attention = OPERATORS.structures["Attention"]


class Seen(NamedTuple):
    """Sizes and addresses of a layout's tensors; the addresses live as long as the tensors."""

    trees: int
    runs: int
    width: int
    words: int
    addresses: tuple[int, ...]  # of `TreeLayout.seen`


def seen(layout: TreeLayout, slots: int) -> Seen:
    """Returns the part of a layout that C++ reads. Its tensors are checked once; what they hold is checked for each
    number of slots of the cache, and again when it has changed.

    Raises:
        ValueError: tensors that do not fit together, are not on a CPU, or lead out of the cache.
    """
    kept = vars(layout)
    if "_seen" not in kept:
        checks.tensors(layout, _CPU)
        pages = layout.trunk_pages_RP
        sizes = layout.page_size, pages.shape[1], *pages.stride()
        kept["_table"] = *sizes, pages.data_ptr(), layout.write_slots_T.data_ptr()
        kept["_seen"] = _seen(layout.seen)
    if kept.get("_slots") != slots:
        if not _fits(kept["_seen"], layout.positions_T.shape[0], slots, kept["_table"]):
            checks.ranges(layout, slots)
        kept["_slots"] = slots
    return kept["_seen"]


def _seen(seen: Sequence[Tensor]) -> Seen:
    _, token_starts, _, trunk_runs, branch_slots_RW, _, ancestry_TC = seen
    return Seen(
        token_starts.shape[0] - 1,
        trunk_runs.shape[0],
        branch_slots_RW.shape[1],
        ancestry_TC.shape[1],
        tuple(x.data_ptr() for x in seen),
    )


NO_PAGES = 1, -1, 0, 0, None, None


def _fits(seen: Seen, tokens: int, slots: int, pages: Sequence[int | None] = NO_PAGES) -> bool:
    """Whether a layout leads to slots of the cache only; pages: `layout_fits` of operators.h has their six numbers."""
    _, starts, sees, runs, branch_slots, *_ = seen.addresses
    sizes, addresses = pages[:4], pages[4:]
    return function("layout_fits")(
        *(tokens, seen.trees, seen.runs, seen.width, slots, *sizes, starts, sees, runs, branch_slots, *addresses)
    )


def problem(
    q_THD: Tensor,
    k_GSD: Tensor,
    seen: Seen,
    scale: float,
    window: int | None,
    threads: int,
    cap: float | None = None,
    sinks_H: Tensor | None = None,
    slopes_H: Tensor | None = None,
) -> ctypes.Structure:
    """Returns the arguments of attention but the addresses of q, k, v and the output.

    Args:
        q_THD: with the sizes, strides and dtype of the queries.
        k_GSD: with the sizes and dtype of the cache; there may be layers before the heads.
    """
    (_, H, D), (G, S, _), kind = q_THD.shape, k_GSD.shape[-3:], KINDS[q_THD.dtype]
    cache = KINDS.get(k_GSD.dtype, len(KINDS))
    return Attention(
        *(kind, cache, H, G, D, S, *seen[:4], q_THD.stride(0), q_THD.stride(1)),
        *(-1 if window is None else window, threads, *seen.addresses, scale, cap or 0.0),
        *map(address, (sinks_H, slopes_H)),
        slopes_H is not None and slopes_H.dtype == torch.bfloat16,
    )


def attend(
    q_THD: Tensor,
    k_GSD: Tensor,
    v_GSD: Tensor,
    seen: Seen,
    scale: float,
    window: int | None,
    cap: float | None = None,
    sinks_H: Tensor | None = None,
    slopes_H: Tensor | None = None,
) -> Tensor:
    """Tree attention of tensors that are checked; see the front for arguments."""
    if q_THD.stride(2) != 1:
        q_THD = q_THD.contiguous()
    out_THD = torch.empty(q_THD.shape, dtype=q_THD.dtype)
    asked = problem(q_THD, k_GSD, seen, scale, window, torch.get_num_threads(), cap, sinks_H, slopes_H)
    pointers = (x.data_ptr() for x in (q_THD, k_GSD, v_GSD, out_THD))
    function("tree_attention")(ctypes.addressof(asked), *pointers)
    return out_THD


def tree_attention(
    q_THD: Tensor,
    k_GSD: Tensor,
    v_GSD: Tensor,
    seen: Sequence[Tensor],
    scale: float,
    window: int | None,
    cap: float | None = None,
    sinks_H: Tensor | None = None,
    slopes_H: Tensor | None = None,
) -> Tensor:
    """The operator that compilers and profilers see: it gets no layout that keeps the result of its check."""
    checks.native(q_THD)
    checks.native_cache(k_GSD)
    checks.queries(q_THD, k_GSD, v_GSD, window, cap, sinks_H, slopes_H)
    checks.seen_tensors(seen, q_THD.shape[0], _CPU)
    found = _seen(seen)
    if not _fits(found, q_THD.shape[0], k_GSD.shape[1]):
        raise ValueError(f"the layout leads out of a cache of {k_GSD.shape[1]} slots")
    return attend(q_THD, k_GSD, v_GSD, found, scale, window, cap, sinks_H, slopes_H)


register("tree_attention_cpp", tree_attention, like)
