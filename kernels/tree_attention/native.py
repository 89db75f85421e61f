"""Calls the C++ tree attention (native.cpp): any head size, float32, bfloat16 and float16, a CPU."""

import ctypes
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from kernels import checks
from kernels.cpp import KINDS, OPERATORS, function
from kernels.layout import TreeLayout

_CPU = torch.device("cpu")


Attention = OPERATORS.structures["Attention"]


class Seen(NamedTuple):
    """What a layout's tensors say of which tokens see what: sizes, and addresses that live as long as the tensors."""

    trees: int
    runs: int
    width: int
    words: int
    addresses: tuple[int, ...]  # of `TreeLayout.seen`


def seen(layout: TreeLayout, slots: int) -> Seen:
    """Returns what C++ reads of a layout, checked once for each layout and number of slots of the cache.

    Raises:
        ValueError: tensors that do not fit together, are not on a CPU, or lead out of the cache.
    """
    kept = vars(layout)
    if kept.get("_slots") != slots:
        checks.tensors(layout, _CPU)
        found, pages = _seen(layout.seen), layout.trunk_pages_RP
        row, column = pages.stride()
        table = layout.page_size, pages.shape[1], row, column, pages.data_ptr(), layout.write_slots_T.data_ptr()
        if not _fits(found, layout.positions_T.shape[0], slots, *table):
            checks.ranges(layout, slots)
        kept["_seen"], kept["_slots"] = found, slots
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


def _fits(
    seen: Seen,
    tokens: int,
    slots: int,
    page_size: int = 1,
    pages: int = -1,
    tree_stride: int = 0,
    page_stride: int = 0,
    pages_at: int | None = None,
    written_at: int | None = None,
) -> bool:
    _, starts, sees, runs, branch_slots, *_ = seen.addresses
    return function("layout_fits")(
        *(tokens, seen.trees, seen.runs, seen.width, slots, page_size, pages, tree_stride, page_stride),
        *(starts, sees, runs, branch_slots, pages_at, written_at),
    )


def problem(
    q_THD: Tensor, kv_heads: int, slots: int, seen: Seen, scale: float, window: int | None, threads: int
) -> ctypes.Structure:
    """Returns what attention must know but for where q, k, v and its output lie.

    Args:
        q_THD: of the sizes, strides and dtype of those to come.
        kv_heads, slots: of the cache.
    """
    _, H, D = q_THD.shape
    return Attention(
        *(KINDS[q_THD.dtype], H, kv_heads, D, slots, *seen[:4], q_THD.stride(0), q_THD.stride(1)),
        *(-1 if window is None else window, threads, *seen.addresses, scale),
    )


def attend(q_THD: Tensor, k_GSD: Tensor, v_GSD: Tensor, seen: Seen, scale: float, window: int | None) -> Tensor:
    """Tree attention of tensors that are checked; see the front for arguments."""
    if q_THD.stride(2) != 1:
        q_THD = q_THD.contiguous()
    out_THD = torch.empty(q_THD.shape, dtype=q_THD.dtype)
    G, S, _ = k_GSD.shape
    asked = problem(q_THD, G, S, seen, scale, window, torch.get_num_threads())
    pointers = (x.data_ptr() for x in (q_THD, k_GSD, v_GSD, out_THD))
    function("tree_attention")(ctypes.addressof(asked), *pointers)
    return out_THD


def check_able(q_THD: Tensor) -> None:
    """Raises ValueError for what C++ does not have."""
    if q_THD.dtype not in KINDS or not q_THD.is_cpu:
        got = f"{q_THD.dtype} on {q_THD.device}"
        raise ValueError(f"impl 'cpp': expected float32, bfloat16 or float16 on a CPU, got {got}")


def tree_attention(
    q_THD: Tensor,
    k_GSD: Tensor,
    v_GSD: Tensor,
    positions_T: Tensor,
    token_starts: Tensor,
    trunk_seen_T: Tensor,
    trunk_runs: Tensor,
    branch_slots_RW: Tensor,
    branch_positions_RW: Tensor,
    ancestry_TC: Tensor,
    scale: float,
    window: int | None,
) -> Tensor:
    """The operator that compilers and profilers see, which comes without a layout that remembers being checked."""
    check_able(q_THD)
    checks.queries(q_THD, k_GSD, v_GSD, window)
    trunk = positions_T, token_starts, trunk_seen_T, trunk_runs
    tensors = *trunk, branch_slots_RW, branch_positions_RW, ancestry_TC
    checks.seen_tensors(tensors, q_THD.shape[0], _CPU)
    told = _seen(tensors)
    if not _fits(told, q_THD.shape[0], k_GSD.shape[1]):
        raise ValueError(f"the layout leads out of a cache of {k_GSD.shape[1]} slots")
    return attend(q_THD, k_GSD, v_GSD, told, scale, window)


torch.library.custom_op("coppice::tree_attention_cpp", tree_attention, mutates_args=())


@torch.library.register_fake("coppice::tree_attention_cpp")
def _(q_THD, *_args):
    return q_THD.new_empty(q_THD.shape)
