"""Fast tree attention in plain PyTorch: matrix products on views of the trunk, a small masked gather for branches.

Per tree and tile of queries: scores over the trunk's contiguous runs, read in place, and over the gathered branch
slots stand side by side in one buffer, one softmax runs over it, and the weighted values are added up piece by
piece. Query heads that share a key/value head are rows of one matrix product, so each key is read once per tile.
"""

import torch
from torch import Tensor

from kernels.layout import TreeLayout, unpack_bits

TILE_SCORES = 1 << 21  # scores alive at once: 8 MB in float32, whatever the prompt's length


def tree_attention(
    q_THD: Tensor, k_GSD: Tensor, v_GSD: Tensor, layout: TreeLayout, scale: float, window: int | None
) -> Tensor:
    """See the front for arguments."""
    return _tree_attention(
        q_THD,
        k_GSD,
        v_GSD,
        layout.positions_T,
        layout.token_starts,
        layout.trunk_seen_T,
        layout.trunk_runs,
        layout.branch_slots_RW,
        layout.branch_positions_RW,
        layout.ancestry_TC,
        scale,
        window,
    )


def _tree_attention(
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
    H, D = q_THD.shape[1:]
    G, h = k_GSD.shape[0], H // k_GSD.shape[0]
    q_TGhD = (q_THD * scale).unflatten(1, (G, h))
    out_TGhD = torch.empty_like(q_TGhD)
    mask_TW = unpack_bits(ancestry_TC)
    W = mask_TW.shape[1]
    starts, runs = token_starts.tolist(), trunk_runs.tolist()
    for r, (first, last) in enumerate(zip(starts, starts[1:], strict=False)):
        if first == last:
            continue
        trunk = [(slot, length) for tree, slot, length in runs if tree == r]
        total = sum(length for _, length in trunk)
        branch_k_GWD = branch_v_GWD = None
        if W:
            branch_k_GWD = k_GSD.index_select(1, branch_slots_RW[r])
            branch_v_GWD = v_GSD.index_select(1, branch_slots_RW[r])
        tile = max(16, TILE_SCORES // max(1, H * (total + W)))
        for t0 in range(first, last, tile):
            t1 = min(t0 + tile, last)
            seen_T = trunk_seen_T[t0:t1]
            low, high = (int(x) for x in torch.aminmax(seen_T))
            pieces = _first(trunk, high)  # the upper triangle of a prefill is never computed
            keys = [k_GSD[:, slot : slot + n] for slot, n in pieces]
            values = [v_GSD[:, slot : slot + n] for slot, n in pieces]
            if W:
                keys.append(branch_k_GWD)
                values.append(branch_v_GWD)
            q_GND = q_TGhD[t0:t1].transpose(0, 1).reshape(G, -1, D)
            scores = [q_GND @ key.transpose(1, 2) for key in keys]
            if not scores:
                out_TGhD[t0:t1] = 0
                continue
            scores_GNK = torch.cat(scores, -1) if len(scores) > 1 else scores[0]
            blind = low == 0  # a token that sees no trunk may see nothing at all
            if W or low < high or window is not None:
                hidden_TK = ~mask_TW[t0:t1]
                if high:
                    place_K = torch.arange(high, device=q_THD.device)
                    hidden_TK = torch.cat([place_K >= seen_T.unsqueeze(1), hidden_TK], 1)
                    if window is not None:
                        place_K = torch.cat([place_K, branch_positions_RW[r]])
                elif window is not None:
                    place_K = branch_positions_RW[r]
                if window is not None:
                    hidden_TK |= place_K <= positions_T[t0:t1].unsqueeze(1) - window
                    blind = True
                scores_GNK.view(G, t1 - t0, h, -1).masked_fill_(hidden_TK.unsqueeze(1), float("-inf"))
            p_GNK = torch.softmax(scores_GNK, -1)
            if blind:
                p_GNK.masked_fill_(scores_GNK.amax(-1, keepdim=True) == float("-inf"), 0.0)
            sizes = [value.shape[1] for value in values]
            out_GND: Tensor | None = None
            for p_GNk, value in zip(p_GNK.split(sizes, -1), values, strict=True):
                out_GND = p_GNk @ value if out_GND is None else out_GND.baddbmm_(p_GNk, value)
            out_TGhD[t0:t1] = out_GND.view(G, t1 - t0, h, D).transpose(0, 1)
    return out_TGhD.flatten(1, 2)


def _first(runs: list[tuple[int, int]], count: int) -> list[tuple[int, int]]:
    """The runs that hold the first `count` tokens of a trunk."""
    pieces = []
    for slot, length in runs:
        if count <= 0:
            break
        pieces.append((slot, min(length, count)))
        count -= length
    return pieces


torch.library.custom_op("coppice::tree_attention_cpu", _tree_attention, mutates_args=())


@torch.library.register_fake("coppice::tree_attention_cpu")
def _(q_THD, *_args):
    return torch.empty_like(q_THD)
