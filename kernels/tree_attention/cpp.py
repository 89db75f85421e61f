"""Calls the C++ tree attention (tree_attention.cpp): any head size, float32, bfloat16 and float16, a CPU."""

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from kernels.cpp import KINDS, function


class Problem(ctypes.Structure):
    """In step with `Problem` in tree_attention.cpp."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("kind", "heads", "kv_heads", "head_dim", "slots", "trees", "run_count")),
        *((name, ctypes.c_int64) for name in ("table_width", "words", "q_token", "q_head", "window", "threads")),
        *((name, ctypes.c_void_p) for name in ("positions", "starts", "seen", "runs", "branch_slots")),
        *((name, ctypes.c_void_p) for name in ("branch_positions", "ancestry")),
        ("scale", ctypes.c_float),
    )


def problem(q_THD: Tensor, k_GSD: Tensor, seen: Sequence[Tensor], scale: float, window: int | None) -> Problem:
    """What attention must know but for where q, k, v and its output lie. The tensors must outlive it.

    Args:
        q_THD, k_GSD: of the sizes, strides and dtype of those to come.
        seen: `TreeLayout.seen`.
    """
    (_, H, D), (G, S, _) = q_THD.shape, k_GSD.shape
    positions_T, token_starts, trunk_seen_T, trunk_runs, branch_slots_RW, branch_positions_RW, ancestry_TC = seen
    return Problem(
        *(KINDS[q_THD.dtype], H, G, D, S, token_starts.shape[0] - 1, trunk_runs.shape[0]),
        *(branch_slots_RW.shape[1], ancestry_TC.shape[1]),
        *(q_THD.stride(0), q_THD.stride(1), -1 if window is None else window, torch.get_num_threads()),
        *(positions_T.data_ptr(), token_starts.data_ptr(), trunk_seen_T.data_ptr(), trunk_runs.data_ptr()),
        *(branch_slots_RW.data_ptr(), branch_positions_RW.data_ptr(), ancestry_TC.data_ptr()),
        scale,
    )


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
    """See the front for arguments; the layout's tensors are contiguous."""
    if q_THD.dtype not in KINDS or q_THD.device.type != "cpu":
        got = f"{q_THD.dtype} on {q_THD.device}"
        raise ValueError(f"impl 'cpp': expected float32, bfloat16 or float16 on a CPU, got {got}")
    if not (k_GSD.is_contiguous() and v_GSD.is_contiguous()):
        raise ValueError(f"impl 'cpp': expected contiguous k and v, got strides {k_GSD.stride()}, {v_GSD.stride()}")
    if q_THD.stride(2) != 1:
        q_THD = q_THD.contiguous()
    out_THD = torch.empty(q_THD.shape, dtype=q_THD.dtype)
    trunk = positions_T, token_starts, trunk_seen_T, trunk_runs
    branches = branch_slots_RW, branch_positions_RW, ancestry_TC
    asked = problem(q_THD, k_GSD, (*trunk, *branches), scale, window)
    pointers = (x.data_ptr() for x in (q_THD, k_GSD, v_GSD, out_THD))
    function("tree_attention")(ctypes.addressof(asked), *pointers)
    return out_THD


torch.library.custom_op("coppice::tree_attention_cpp", tree_attention, mutates_args=())


@torch.library.register_fake("coppice::tree_attention_cpp")
def _(q_THD, *_args):
    return q_THD.new_empty(q_THD.shape)
