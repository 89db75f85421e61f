"""Fast tree attention in plain PyTorch: matrix products on views of the trunk, a small masked gather for branches.

Per tree and tile of queries: scores over the trunk's contiguous runs, read in place, and over the gathered branch
slots stand side by side in one buffer, one softmax runs over it, and the weighted values are added up piece by
piece. Query heads that share a key/value head are rows of one matrix product, so each key is read once per tile.
"""

from itertools import groupby, pairwise

import torch
from torch import Tensor

from kernels.layout import TreeLayout, unpack_bits

LONG_RUN = 64  # tokens; a matrix product of its own pays from about here on
TILE_SCORES = 1 << 19  # scores alive at once: 2 MB in float32, whatever the prompt's length


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
    hidden_TW = ~unpack_bits(ancestry_TC)
    W = hidden_TW.shape[1]
    starts, runs = token_starts.tolist(), trunk_runs.tolist()
    for r, (first, last) in enumerate(pairwise(starts)):
        if first == last:
            continue
        trunk = [(slot, length) for tree, slot, length in runs if tree == r]
        branch_k_GWD = k_GSD.index_select(1, branch_slots_RW[r])
        branch_v_GWD = v_GSD.index_select(1, branch_slots_RW[r])
        tile = max(16, TILE_SCORES // max(1, H * (sum(length for _, length in trunk) + W)))
        for t0 in range(first, last, tile):
            t1 = min(t0 + tile, last)
            seen_t, oldest_t1 = trunk_seen_T[t0:t1], None
            if window is not None:
                oldest_t1 = (positions_T[t0:t1] - window + 1).unsqueeze(1)
            low, high = (int(x) for x in torch.aminmax(seen_t))
            runs_t = _first(trunk, high)  # the upper triangle of a prefill is never computed
            keys = _pieces(k_GSD, runs_t) + [branch_k_GWD] * bool(W)
            values = _pieces(v_GSD, runs_t) + [branch_v_GWD] * bool(W)
            if not keys:
                out_TGhD[t0:t1] = 0
                continue
            q_GND = q_TGhD[t0:t1].transpose(0, 1).reshape(G, -1, D)
            scores = [_scores(q_GND, key) for key in keys]
            if W:
                hidden_tW = hidden_TW[t0:t1]
                if oldest_t1 is not None:
                    hidden_tW = hidden_tW | (branch_positions_RW[r] < oldest_t1)
                scores[-1].view(G, t1 - t0, h, W).masked_fill_(hidden_tW.unsqueeze(1), float("-inf"))
            scores_GNK = torch.cat(scores, -1) if len(scores) > 1 else scores[0]
            if low < high or oldest_t1 is not None:
                place_K = torch.arange(high, device=q_THD.device)
                hidden_tK = place_K >= seen_t.unsqueeze(1)
                if oldest_t1 is not None:
                    hidden_tK |= place_K < oldest_t1
                scores_GNK[..., :high].unflatten(1, (-1, h)).masked_fill_(hidden_tK.unsqueeze(1), float("-inf"))
            p_GNK = torch.softmax(scores_GNK, -1)
            if low == 0 or oldest_t1 is not None:  # a token may see nothing at all
                p_GNK.masked_fill_(scores_GNK.amax(-1, keepdim=True) == float("-inf"), 0.0)
            parts = p_GNK.to(v_GSD.dtype).split([value.shape[1] for value in values], -1)
            out_GND = parts[0] @ values[0]
            if out_GND.dtype.itemsize == 2 and len(parts) > 1:
                out_GND = out_GND.float()  # many pieces must not add up their roundings
            for p_GNk, value in zip(parts[1:], values[1:], strict=True):
                out_GND += p_GNk @ value
            out_TGhD[t0:t1] = out_GND.view(G, t1 - t0, h, D).transpose(0, 1)
    return out_TGhD.flatten(1, 2)


def _scores(q_GND: Tensor, k_GnD: Tensor) -> Tensor:
    """q k^T, of float16 in float32: scores may pass 65,504 where queries and keys do not."""
    if q_GND.dtype == torch.float16:
        q_GND, k_GnD = q_GND.float(), k_GnD.float()
    return q_GND @ k_GnD.transpose(1, 2)


def _first(runs: list[tuple[int, int]], count: int) -> list[tuple[int, int]]:
    """The runs that hold the first `count` tokens of a trunk."""
    pieces = []
    for slot, length in runs:
        if count <= 0:
            break
        pieces.append((slot, min(length, count)))
        count -= length
    return pieces


def _pieces(cache_GSD: Tensor, runs: list[tuple[int, int]]) -> list[Tensor]:
    """The trunk's rows, [G, n, D] each: long runs in place; neighbouring short ones, of a crowded pool, gathered."""
    pieces = []
    for long, group in groupby(runs, key=lambda run: run[1] >= LONG_RUN):
        group = list(group)
        if long or len(group) == 1:
            pieces += [cache_GSD[:, slot : slot + n] for slot, n in group]
        else:
            slots = torch.cat([torch.arange(slot, slot + n, device=cache_GSD.device) for slot, n in group])
            pieces.append(cache_GSD.index_select(1, slots))
    return pieces


torch.library.custom_op("coppice::tree_attention_cpu", _tree_attention, mutates_args=())


@torch.library.register_fake("coppice::tree_attention_cpu")
def _(q_THD, *_args):
    return torch.empty_like(q_THD)
