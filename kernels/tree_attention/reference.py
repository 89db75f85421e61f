"""The definition of tree attention: token by token, any device, any float dtype (float64 included). Slow."""

import torch
from torch import Tensor

from kernels.kv_kinds import floats, parts
from kernels.layout import TreeLayout


def tree_attention(
    q_THD: Tensor,
    k_GSD: Tensor,
    v_GSD: Tensor,
    layout: TreeLayout,
    scale: float,
    window: int | None,
    cap: float | None = None,
    sinks_H: Tensor | None = None,
    slopes_H: Tensor | None = None,
) -> Tensor:
    """softmax(scale * q k^T) v over exactly the slots a token sees; see the front for arguments."""
    group = q_THD.shape[1] // k_GSD.shape[0]
    out_THD = torch.zeros_like(q_THD)
    starts = layout.token_starts.tolist()
    mask_TW = layout.branch_mask_TW()
    for r in range(len(starts) - 1):
        for t in range(starts[r], starts[r + 1]):
            slots, positions = visible_slots(layout, mask_TW, r, t, window)
            if len(slots):
                k_HND = floats([x[:, slots] for x in parts(k_GSD)], q_THD.dtype).repeat_interleave(group, 0)
                v_HND = floats([x[:, slots] for x in parts(v_GSD)], q_THD.dtype).repeat_interleave(group, 0)
                scores_HN = (k_HND @ q_THD[t].unsqueeze(-1)).squeeze(-1)
                if slopes_H is not None:
                    scores_HN = scores_HN + biases(slopes_H.unsqueeze(1), positions, layout.positions_T[t], q_THD.dtype)
                scores_HN = scale * scores_HN
                if cap is not None:
                    scores_HN = cap * torch.tanh(scores_HN / cap)
                if sinks_H is not None:
                    scores_HN = torch.cat([scores_HN, sinks_H.to(scores_HN.dtype).unsqueeze(1)], -1)
                p_HN = torch.softmax(scores_HN, -1)[:, : len(slots)]
                out_THD[t] = (p_HN.unsqueeze(1) @ v_HND).squeeze(1)
    return out_THD


def biases(slopes: Tensor, keys: Tensor, queries: Tensor, dtype: torch.dtype) -> Tensor:
    """Each slope times the distance from the position of a query to that of a key, which is negative before it.

    Slopes of bfloat16 are multiplied by each of both positions in bfloat16, and the difference is taken after that.
    """
    if slopes.dtype == torch.bfloat16:
        return (slopes * keys.bfloat16()).to(dtype) - (slopes * queries.bfloat16()).to(dtype)
    return slopes.to(dtype) * (keys - queries)


def visible_slots(layout: TreeLayout, mask_TW: Tensor, r: int, t: int, window: int | None) -> tuple[Tensor, Tensor]:
    """The cache slots that token t of tree r sees, and the positions of their tokens, trunk first: int64 [N] each."""
    device = layout.branch_slots_RW.device
    position = torch.arange(int(layout.trunk_seen_T[t]), device=device)
    page = layout.trunk_pages_RP[r, position // layout.page_size].long()
    trunk_slots = page * layout.page_size + position % layout.page_size
    slots = torch.cat([trunk_slots, layout.branch_slots_RW[r][mask_TW[t]]])
    positions = torch.cat([position, layout.branch_positions_RW[r][mask_TW[t]].long()])
    if window is None:
        return slots, positions
    inside = positions > layout.positions_T[t] - window
    return slots[inside], positions[inside]
