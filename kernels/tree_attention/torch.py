"""Fast tree attention in plain PyTorch: matrix multiplications on views of the trunk, a small masked gather for
branches.

Per tree and tile of queries, one buffer holds the scores of the trunk's contiguous runs, read in place, and those of
the gathered branch slots; one softmax runs over it, and the weighted values are added piece by piece. Query heads that
share a key/value head are rows of one matrix multiplication, so each key is read once per tile. Everything that depends
only on the layout is computed once per pass, not once per layer.
"""

from collections.abc import Sequence
from functools import lru_cache
from itertools import groupby, pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from kernels.kv_kinds import SCALE_BYTES, floats, parts
from kernels.layout import WORD, unpack_bits
from kernels.tracing import like, register

LONG_RUN = 64  # tokens of a trunk's run from which on a matrix product of its own pays
TILE_SCORES = 1 << 20  # scores alive at once: 4 MB in float32, whatever the prompt's length
TILE_SLOTS = 1 << 11  # gathered at once where every token has branch slots of its own; more if keys are small:
TILE_BYTES = 1 << 20  # of keys, which stay in a core's cache
MAX_SHARED_COLUMNS = 512  # branch slots of a tree up to which every token takes all of them
MAX_COPIED_BYTES = 1 << 17  # of keys, up to which copying them all costs less than products in pieces


class Tile(NamedTuple):
    """Queries of one tree that are answered together. N = tokens x query heads per key/value head."""

    first: int  # token
    last: int  # the one after the last
    pieces: list[slice | Tensor]  # where the trunk rows that any of them sees lie in the cache, in order
    branch_slots: Tensor | None  # [W], the same for all; or [t, W], each token's own; of a small tree all that it has
    branch_bias_NW: Tensor | None  # 0 for an ancestor, -inf for the others
    masked: slice  # the trunk rows, counted from the first piece's first, that not all of them see
    hidden_NK: Tensor | None  # of those, who does not see which
    blind_N1: Tensor | None  # sees nothing at all (padding); None where all see something
    places: tuple[Tensor, Tensor] | None  # positions of keys, [K] or [t, K], and of queries, [t, 1], for slopes


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
    """See the front for arguments."""
    H, D = q_THD.shape[1:]
    G = k_GSD.shape[0]
    quantised = k_GSD.dtype in SCALE_BYTES
    dtype = q_THD.dtype  # of the scores: in float16 they may pass 65,504
    if dtype == torch.float16 or ((quantised or slopes_H is not None) and dtype == torch.bfloat16):
        dtype = torch.float32
    mixed = dtype if quantised else v_GSD.dtype  # of the values
    q_TGhD = (q_THD * scale).unflatten(1, (G, H // G))
    parts = []
    for tile in _tiles(*seen, H, H // G, window, dtype, G * D * mixed.itemsize, slopes_H is not None):
        q_GND = q_TGhD[tile.first : tile.last].transpose(0, 1).reshape(G, -1, D).to(dtype)
        keys, values = _rows(k_GSD, tile, dtype), _rows(v_GSD, tile, mixed)
        if not keys:
            parts.append(torch.zeros_like(q_THD[tile.first : tile.last]))
            continue
        scores_GNK = _scores(q_GND, keys, tile.branch_bias_NW, cap)
        if slopes_H is not None:
            scores_GNK += _biases(tile, slopes_H, G, dtype) * scale
        if tile.hidden_NK is not None:
            scores_GNK[..., tile.masked].masked_fill_(tile.hidden_NK, float("-inf"))
        p_GNK = _softmax(scores_GNK, sinks_H).to(mixed)
        if tile.blind_N1 is not None:
            p_GNK.masked_fill_(tile.blind_N1, 0.0)
        out_GND = _mix(p_GNK, values)
        parts.append(out_GND.view(G, -1, H // G, D).transpose(0, 1).contiguous().view(-1, H, D))
    out_THD = torch.cat(parts) if len(parts) > 1 else parts[0]
    return out_THD.to(q_THD.dtype)


def _scores(q_GND: Tensor, keys: list[Tensor], bias_NW: Tensor | None, cap: float | None) -> Tensor:
    """q k^T over keys that lie in pieces, side by side; with a bias the last piece is the branches'."""
    if q_GND.dtype.itemsize == 2:  # a product copies a view of the cache transposed, which takes thrice as long
        if bias_NW is not None and len(keys) > 1 and keys[-1].shape[1] == bias_NW.shape[1]:
            scores_GNK = _capped(q_GND @ torch.cat(keys, 1).transpose(1, 2), cap)
            scores_GNK[..., -bias_NW.shape[1] :] += bias_NW
            return scores_GNK
        keys = [key.contiguous() for key in keys]
    trunk = keys if bias_NW is None else keys[:-1]
    scores = [_capped(q_GND @ key.transpose(1, 2), cap) for key in trunk]
    if bias_NW is not None:
        scores.append(_branch_scores(bias_NW, q_GND, keys[-1], cap))
    return torch.cat(scores, -1) if len(scores) > 1 else scores[0]


def _softmax(scores_GNK: Tensor, sinks_H: Tensor | None) -> Tensor:
    """Weights of keys; a head's sink takes the rest."""
    if sinks_H is None:
        return torch.softmax(scores_GNK, -1)
    G, N, _ = scores_GNK.shape
    sinks_Gh = sinks_H.to(scores_GNK.dtype).view(G, -1)
    sinks_GN1 = sinks_Gh.repeat(1, N // sinks_Gh.shape[1]).unsqueeze(-1)
    return torch.softmax(torch.cat([scores_GNK, sinks_GN1], -1), -1)[..., :-1]


def _biases(tile: Tile, slopes_H: Tensor, kv_heads: int, dtype: torch.dtype) -> Tensor:
    """Slopes times distances [G, N, K], see the definition."""
    assert tile.places is not None
    keys, queries_t1 = tile.places
    slopes_Gh = slopes_H.view(kv_heads, 1, -1, 1)
    keys_tK, queries_t1 = (x.expand(len(queries_t1), -1).unsqueeze(1) for x in (keys, queries_t1))
    if slopes_H.dtype == torch.bfloat16:
        bias_GthK = (slopes_Gh * keys_tK.bfloat16()).to(dtype) - (slopes_Gh * queries_t1.bfloat16()).to(dtype)
    else:
        bias_GthK = slopes_Gh.to(dtype) * (keys_tK - queries_t1)
    return bias_GthK.flatten(1, 2)


def _capped(scores: Tensor, cap: float | None) -> Tensor:
    """cap * tanh(scores / cap), in place."""
    return scores if cap is None else scores.div_(cap).tanh_().mul_(cap)


def _branch_scores(bias_NW: Tensor, q_GND: Tensor, key: Tensor, cap: float | None) -> Tensor:
    """q k^T + bias: keys [G, W, D] for all queries, or [G, t * W, D], W for each token."""
    if key.shape[1] == bias_NW.shape[1]:
        if cap is not None:
            return _capped(q_GND @ key.transpose(1, 2), cap).add_(bias_NW)
        return torch.baddbmm(bias_NW, q_GND, key.transpose(1, 2))
    (G, N, D), W = q_GND.shape, bias_NW.shape[1]
    t = key.shape[1] // W
    scores = q_GND.reshape(G * t, N // t, D) @ key.view(G * t, W, D).transpose(1, 2)
    return _capped(scores, cap).view(G, N, W).add_(bias_NW)


def _mix(p_GNK: Tensor, values: list[Tensor]) -> Tensor:
    """The weighted sum of values that lie in pieces; the last may hold values of each token's own."""
    widths = [value.shape[1] for value in values]
    widths[-1] = p_GNK.shape[-1] - sum(widths[:-1])
    if widths == [values[0].shape[1]]:
        return p_GNK @ values[0]
    parts = list(p_GNK.split(widths, -1))
    own_GND = None
    if widths[-1] != values[-1].shape[1]:
        own_GND = _own_values(parts.pop(), values[-1])
        if not parts:
            return own_GND
    out_GND = parts[0] @ values[0]
    if out_GND.dtype.itemsize == 2:
        out_GND = out_GND.float()  # many pieces must not add up their roundings
        for p_GNk, value in zip(parts[1:], values[1:], strict=False):
            out_GND += p_GNk @ value
    else:
        for p_GNk, value in zip(parts[1:], values[1:], strict=False):
            out_GND.baddbmm_(p_GNk, value)
    return out_GND if own_GND is None else out_GND.add_(own_GND)


def _own_values(p_GNW: Tensor, value: Tensor) -> Tensor:
    """The weighted sum of values [G, t * W, D], W for each token."""
    (G, N, W), D = p_GNW.shape, value.shape[2]
    t = value.shape[1] // W
    return (p_GNW.reshape(G * t, N // t, W) @ value.view(G * t, W, D)).view(G, N, D)


def _rows(cache_GSD: Tensor, tile: Tile, dtype: torch.dtype) -> list[Tensor]:
    """Keys or values that a tile sees, [G, n, D] each, as floats: long runs in place, the rest gathered."""
    pieces = tile.pieces if tile.branch_slots is None else [*tile.pieces, tile.branch_slots.flatten()]
    planes = parts(cache_GSD)
    return [floats([x[:, p] if isinstance(p, slice) else x.index_select(1, p) for x in planes], dtype) for p in pieces]


# Keyed by the tensors' identity: all layers of a pass share one layout, and nothing writes to one that "torch" reads.
@lru_cache(maxsize=1)
def _tiles(
    positions_T: Tensor,
    token_starts: Tensor,
    trunk_seen_T: Tensor,
    trunk_runs: Tensor,
    branch_slots_RW: Tensor,
    branch_positions_RW: Tensor,
    ancestry_TC: Tensor,
    heads: int,
    group: int,
    window: int | None,
    dtype: torch.dtype,
    row_bytes: int,
    placed: bool,
) -> list[Tile]:
    """Cut a pass into tiles; `group` query heads share a key/value head, a slot's keys are `row_bytes`; `placed`: tiles
    have `places`."""
    starts, runs, tiles = token_starts.tolist(), trunk_runs.tolist(), []
    for r, (start, end) in enumerate(pairwise(starts)):
        if start == end:
            continue
        trunk = [(slot, length) for tree, slot, length in runs if tree == r]
        columns, visible_TW = _columns(ancestry_TC[start:end])
        W, own = visible_TW.shape[1], columns.dim() == 2
        size = max(16, TILE_SCORES // max(1, heads * (sum(length for _, length in trunk) + W)))
        if own:
            size = max(1, min(size, max(TILE_SLOTS, TILE_BYTES // row_bytes) // W))
        for first in range(start, end, size):
            last = min(first + size, end)
            mine = slice(first - start, last - start)
            columns_W = columns[mine] if own else columns
            rows = _mask(
                positions_T[first:last, None],
                trunk_seen_T[first:last, None],
                visible_TW[mine],
                branch_positions_RW[r][columns_W],
                window,
            )
            small = not own and 0 < (rows.end - rows.start + W) * row_bytes <= MAX_COPIED_BYTES
            tile = _tile(first, last, rows, trunk, branch_slots_RW[r][columns_W], group, dtype, small)
            if placed:
                in_branches = branch_positions_RW[r][columns_W]
                in_trunk = torch.arange(rows.start, rows.end, device=in_branches.device)
                in_trunk = in_trunk.expand(*in_branches.shape[:-1], -1)
                tile = tile._replace(places=(torch.cat([in_trunk, in_branches], -1), positions_T[first:last, None]))
            tiles.append(tile)
    return tiles


class Mask(NamedTuple):
    """Rows that the tokens of a tile see. Trunk rows before `start` are seen by none, from there to `masked` by all."""

    start: int
    masked: int
    end: int  # rows from here on are seen by none
    hidden_tK: Tensor | None  # rows masked .. end - 1 that a token does not see
    visible_tW: Tensor  # branch slots
    blind_t1: Tensor  # sees nothing at all


def _mask(
    positions_t1: Tensor, seen_t1: Tensor, visible_tW: Tensor, branch_positions_W: Tensor, window: int | None
) -> Mask:
    low, end = (int(x) for x in torch.aminmax(seen_t1))
    start, masked = 0, low
    oldest_t1 = torch.zeros_like(seen_t1)
    if window is not None:
        oldest_t1 = (positions_t1 - window + 1).clamp(min=0)
        visible_tW = visible_tW & (branch_positions_W >= oldest_t1)
        start, latest = (min(end, int(x)) for x in torch.aminmax(oldest_t1))
        masked = start if latest > start else max(low, start)
    hidden_tK = None
    if masked < end:  # the upper triangle of a prefill is never computed
        place_K = torch.arange(masked, end, device=seen_t1.device)
        hidden_tK = (place_K >= seen_t1) | (place_K < oldest_t1)
    blind_t1 = (seen_t1 <= oldest_t1) & ~visible_tW.any(-1, keepdim=True)
    return Mask(start, masked, end, hidden_tK, visible_tW, blind_t1)


def _tile(
    first: int,
    last: int,
    rows: Mask,
    trunk: list[tuple[int, int]],
    slots: Tensor,
    group: int,
    dtype: torch.dtype,
    small: bool,
) -> Tile:
    """A tile of tokens first .. last - 1; of a small tree the trunk is gathered along with the branch slots."""
    device, hidden_tK = slots.device, rows.hidden_tK
    pieces = _pieces(trunk, rows.start, rows.end, device)
    bias_tW = torch.zeros(rows.visible_tW.shape, dtype=dtype, device=device)
    bias_tW.masked_fill_(~rows.visible_tW, float("-inf"))
    if small:
        slots = torch.cat([*(_slots(piece, device) for piece in pieces), slots])
        trunk_tK = torch.zeros(last - first, rows.end - rows.start, dtype=dtype, device=device)
        if hidden_tK is not None:
            trunk_tK[:, rows.masked - rows.start :].masked_fill_(hidden_tK, float("-inf"))
        bias_tW, pieces, hidden_tK = torch.cat([trunk_tK, bias_tW], 1), [], None
    return Tile(
        first,
        last,
        pieces,
        slots if bias_tW.shape[1] else None,
        bias_tW.repeat_interleave(group, 0) if bias_tW.shape[1] else None,
        slice(rows.masked - rows.start, rows.end - rows.start),
        hidden_tK.repeat_interleave(group, 0) if hidden_tK is not None else None,
        rows.blind_t1.repeat_interleave(group, 0) if rows.blind_t1.any() else None,
        None,
    )


def _columns(words_TC: Tensor) -> tuple[Tensor, Tensor]:
    """Which branch slots the tokens of a tree see: columns [W] of its table and bool [T, W].

    Of a wide table (many long branches side by side) only those that any token sees; and if tokens have little in
    common, as when each grows a branch of its own, columns [T, W] of each token's own.
    """
    T, C = words_TC.shape
    if C * WORD <= MAX_SHARED_COLUMNS:
        return torch.arange(C * WORD, device=words_TC.device), unpack_bits(words_TC)
    token_n, word_n = words_TC.nonzero(as_tuple=True)
    n_m, bit_m = unpack_bits(words_TC[token_n, word_n].unsqueeze(1)).nonzero(as_tuple=True)
    token_m, column_m = token_n[n_m], word_n[n_m] * WORD + bit_m
    count_T = torch.bincount(token_m, minlength=T)
    seen_W = torch.zeros(C * WORD, dtype=torch.bool, device=words_TC.device)
    seen_W[column_m] = True
    most, W = int(count_T.max()), int(seen_W.sum())
    if T * most < W * (1 + T // 8):  # rows to gather, against those of all columns and an eighth of the scores
        place_m = torch.arange(len(token_m), device=words_TC.device) - (count_T.cumsum(0) - count_T)[token_m]
        columns_TW = torch.zeros(T, most, dtype=torch.int64, device=words_TC.device)
        columns_TW[token_m, place_m] = column_m
        return columns_TW, torch.arange(most, device=words_TC.device) < count_T.unsqueeze(1)
    visible_TW = torch.zeros(T, W, dtype=torch.bool, device=words_TC.device)
    visible_TW[token_m, (seen_W.cumsum(0) - 1)[column_m]] = True
    return seen_W.nonzero().squeeze(1), visible_TW


def _pieces(runs: list[tuple[int, int]], start: int, end: int, device: torch.device) -> list[slice | Tensor]:
    """Trunk rows start .. end - 1 of (first slot, length) runs: long ones in place, short neighbours gathered."""
    cut, place = [], 0
    for slot, length in runs:
        first, last = max(start, place), min(end, place + length)
        if first < last:
            cut.append((slot + first - place, last - first))
        place += length
    pieces: list[slice | Tensor] = []
    for long, neighbours in groupby(cut, key=lambda run: run[1] >= LONG_RUN):
        group = list(neighbours)
        if long or len(group) == 1:
            pieces += [slice(slot, slot + n) for slot, n in group]
        else:
            pieces.append(torch.cat([torch.arange(slot, slot + n, device=device) for slot, n in group]))
    return pieces


def _slots(piece: slice | Tensor, device: torch.device) -> Tensor:
    return torch.arange(piece.start, piece.stop, device=device) if isinstance(piece, slice) else piece


register("tree_attention_torch", tree_attention, like)
