"""A candidate for `python -m tools.kernels --candidate FILE`: right, and slow. Make it fast.

Define `tree_attention`, or `kv_write`, or both: what is defined is compared. Called with the arguments below by
position, on the lab's device. Raise NotImplementedError for what it cannot do (a dtype, a window): that is listed and
counts neither for nor against it.

Shapes: T tokens of a pass, H query heads, G key/value heads (query head h reads head h // (H / G)), D head size, S
slots of the cache. The layout (kernels/layout.py draws one) has R trees, tree r's tokens being token_starts[r] ..
token_starts[r + 1] - 1, each of which sees

- the first trunk_seen_T[t] tokens of its tree's trunk; token i of it lies in slot
  trunk_pages_RP[r, i // page_size] * page_size + i % page_size;
- the branch slots branch_slots_RW[r, w] whose bit w is set in ancestry_TC[t], itself among them;
- with a window, of both only those at positions above positions_T[t] - window.

No other slot may be read: the lab fills them with NaN. Slot 0, which holes of the table point at, holds zeros.
"""

from itertools import pairwise

import torch
from torch import Tensor
from torch.nn import functional as F

from kernels.layout import TreeLayout


def tree_attention(
    q_THD: Tensor, k_GSD: Tensor, v_GSD: Tensor, layout: TreeLayout, scale: float, window: int | None
) -> Tensor:
    """softmax(scale * q k^T) v over what each token sees: a new tensor [T, H, D] in q's dtype."""
    out_THD, size = torch.zeros_like(q_THD), layout.page_size
    mask_TW = layout.branch_mask_TW()
    for r, (first, last) in enumerate(pairwise(layout.token_starts.tolist())):
        own = slice(first, last)
        place = torch.arange(int(layout.trunk_len_R[r]), device=q_THD.device)
        trunk = layout.trunk_pages_RP[r, place // size].long() * size + place % size
        slots_N = torch.cat([trunk, layout.branch_slots_RW[r]])
        visible_tN = torch.cat([place < layout.trunk_seen_T[own].unsqueeze(1), mask_TW[own]], 1)
        if window is not None:
            positions_N = torch.cat([place, layout.branch_positions_RW[r]])
            visible_tN &= positions_N > layout.positions_T[own].unsqueeze(1) - window
        mixed = F.scaled_dot_product_attention(
            q_THD[own].transpose(0, 1)[None],
            k_GSD[:, slots_N][None],
            v_GSD[:, slots_N][None],
            attn_mask=visible_tN,
            scale=scale,
            enable_gqa=True,
        )
        out_THD[own] = mixed[0].transpose(0, 1)
    return out_THD


def kv_write(k_GSD: Tensor, v_GSD: Tensor, k_TGD: Tensor, v_TGD: Tensor, slots_T: Tensor) -> None:
    """Store row t of the new keys and values in slot slots_T[t], in place; the rows may be strided views."""
    k_GSD[:, slots_T] = k_TGD.transpose(0, 1)
    v_GSD[:, slots_T] = v_TGD.transpose(0, 1)
