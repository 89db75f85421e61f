"""Tree attention on a GPU in one order: a row has the same bits whatever is beside it and wherever its keys lie.

`COPPICE_SAME_BITS=on` takes it instead of `triton.py`, which cuts keys by the number of programs and adds up branch
slots after the trunk. Here all tiles have one size, and a row's keys are added up block by block of N positions, in a
lane for each position, as in C++ (keys.h)::

    positions   0 ..... 31 | 32 ..... 63 | 64 ..... 95 | 96 .....       trunk of 70 tokens
    all rows    trunk      | trunk       |             |
    each token                           | t70 a b ... | c ...          its own: the trunk's end and its branch

A key that a row does not see has a weight of 0, which changes no bit of a sum. Every CUT positions the softmax begins
anew. These parts are joined pairwise, as the leaves of a binary tree over all positions, and one without keys changes
no bit of another. A share is such a tree's node, of a power of two parts: how many parts a share has depends on all
lengths and on the GPU, the result does not::

    parts     [ 0   1   2   3   4   5 ]      shares of 1 part: a program each, joined by a second kernel
              [ 0-1     2-3     4-5   ]      shares of 2: a program joins two parts, the second kernel three shares
              [ 0-3             4-5   ]      shares of 4
              [ 0-5                   ]      shares of 8: a program joins all

What a program has joined lies in memory, a row of the tree's levels each. `list_paths` finds the keys of each token's
own once a pass, `list_shares` what each program does.

Shapes besides those of `triton.py`: L places of a token's own keys, K shares of a tile at most, P programs, B rows.
"""
# pyright: reportArgumentType=false, reportCallIssue=false, reportReturnType=false, reportAttributeAccessIssue=false
# pyright: reportIndexIssue=false, reportGeneralTypeIssues=false
# (what triton.jit takes and gives is no function to a type checker)

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.gpu import after_the_last, launch, properties, raw
from kernels.kv_kinds import row_width
from kernels.tree_attention.triton_fold import biases, fold
from kernels.tree_attention.triton_shares import WORD, Trees, store

CUT = tl.constexpr(256)  # positions after which the softmax begins anew
LEVELS = 6  # of the tree of a tile's shares
WAVES = 4  # programs for each multiprocessor that shares aim at
SCRATCH = 1 << 28  # bytes that the programs of a launch keep levels in, unless shares need more: others follow in turns
TASK = tl.constexpr(10)  # numbers of a program's record
ROW = tl.constexpr(5)  # numbers of a token's record
LOG2_E = tl.constexpr(1.4426950408889634)
FAR = tl.constexpr(1 << 30)  # a position after all
COLUMNS = tl.constexpr(1024)  # branch slots that `list_paths` reads at once


class Paths(NamedTuple):
    """Where each token's own keys end, 0 for one without a branch; how many of the trunk's keys come before them; their
    slots, int32 [T, L], from the block on in which the tree's trunk ends, -1 where there is none; and where the keys of
    each tree end."""

    end_T: Tensor
    shared_T: Tensor
    slots_TL: Tensor
    end_R: Tensor


def sizes(head: int, dtype: torch.dtype, roomy: bool) -> dict[str, int]:
    """The shape of all programs, however many rows there are: matrix units of some GPUs add up tiles below 64 rows by
    other instructions."""
    if dtype == torch.float32:
        return {"M": 32 if head <= 64 else 16, "N": 16, "num_warps": 4 if head <= 128 else 8, "num_stages": 2}
    return {"M": 64 if head <= 128 else 32, "N": 32, "num_warps": 4, "num_stages": 4 if roomy else 2}


def run(
    q_THD: Tensor,
    k_GSD: Tensor,
    v_GSD: Tensor,
    trees: Trees,
    made: dict[tuple, object],
    scale: float,
    window: int | None,
    cap: float | None,
    sinks_H: Tensor | None,
    slopes_H: Tensor | None,
) -> Tensor:
    """Launch the kernels; arguments as of the front. `made` is what other layers of the pass have listed."""
    T, H, D = q_THD.shape
    G, R, W = k_GSD.shape[0], len(trees.trunk_len_R), trees.branch_slots_RW.shape[1]
    gpu = properties(q_THD.device)
    shape = sizes(D, q_THD.dtype, gpu.roomy)
    M, N, group = shape["M"], shape["N"], H // G
    tiles = (triton.cdiv(T * group, M) + R - 1) * G
    longest = trees.trunk_pages_RP.shape[1] * trees.page_size + W
    split = tiles < WAVES * gpu.processors and longest > CUT.value
    programs = max(tiles, WAVES * gpu.processors) if split else tiles
    if (key := ("paths", N)) not in made:
        made[key] = paths(trees, N)
    path: Paths = made[key]  # type: ignore[assignment]
    if (key := ("shares", programs, split, window, group, G, M)) not in made:
        made[key] = _listed(trees, path, programs, split, window, GROUP=group, G=G, M=M)
    task, token = made[key]  # type: ignore[misc]
    levels = triton.cdiv(longest, CUT.value).bit_length() + 1
    D2, new = max(16, triton.next_power_of_2(D)), q_THD.new_empty
    out_THD = new(T, H, D)
    most = max(SCRATCH // (4 * levels * M * D) // 8 * 8, 8)  # a task's address stays aligned
    most = programs if split else min(programs, most)
    level_PLMD, log_PLM = (new(most, levels, M, *more, dtype=torch.float32) for more in ((D,), ()))
    k_GSD, v_GSD = raw(k_GSD), raw(v_GSD)
    kept = {"GROUP": group, "HEADS": H, "D": D, "D2": D2, "M": M}
    for begin in range(0, programs, most):
        launch(_attend, min(most, programs - begin))(
            q_THD, k_GSD, v_GSD, sinks_H, slopes_H, out_THD, level_PLMD, log_PLM, task[begin:], trees.positions_T,
            *path[:3], trees.trunk_pages_RP, path.slots_TL.shape[1], levels,
            scale / cap if cap else scale * LOG2_E.value, (cap or 0.0) * LOG2_E.value, window or 0,
            q_THD.stride(0), q_THD.stride(1), k_GSD.stride(0), v_GSD.stride(0), *trees.trunk_pages_RP.stride(),
            WINDOWED=window is not None, CAPPED=cap is not None, PAGE=trees.page_size, SCALE=row_width(0, k_GSD.dtype),
            **{**kept, **shape},
        )  # fmt: skip
    if split:
        launch(_join_shares, T * H)(
            out_THD, sinks_H, level_PLMD, log_PLM, token, levels, LEVELS=LEVELS, num_warps=4, **kept
        )
    return out_THD


def paths(trees: Trees, N: int) -> Paths:
    """Find each token's own keys, in blocks of N positions."""
    T, R, W = len(trees.positions_T), len(trees.trunk_len_R), trees.branch_slots_RW.shape[1]
    new = trees.token_starts.new_empty
    L = triton.cdiv(W + N - 1, N) * N if W else 0
    found = Paths(new(T), new(T), new(T, L), torch.zeros_like(trees.trunk_len_R))
    launch(list_paths, T)(
        *found, trees.token_starts, trees.trunk_seen_T, trees.trunk_pages_RP, trees.trunk_len_R, trees.branch_len_R,
        trees.branch_slots_RW, trees.branch_positions_RW, trees.ancestry_TC, R, W, L, *trees.trunk_pages_RP.stride(),
        PAGE=trees.page_size, N=N, R2=max(16, triton.next_power_of_2(R)),
    )  # fmt: skip
    return found


def _listed(
    trees: Trees, path: Paths, programs: int, split: bool, window: int | None, **more: int
) -> tuple[Tensor, Tensor | None]:
    """The records of programs, int32 [programs, TASK], and of tokens, int32 [T, ROW], whose shares are joined later."""
    R, T, new = len(trees.trunk_len_R), len(trees.positions_T), trees.token_starts.new_empty
    task, token = new(programs, TASK.value), new(T, ROW.value) if split else None
    R2, P = max(16, triton.next_power_of_2(R)), 32
    launch(list_shares, triton.cdiv(max(programs, T if split else 0), P))(
        task, token, trees.token_starts, trees.trunk_len_R, path.end_R, programs, T, R, window or 0,
        WINDOWED=window is not None, SPLIT=split, R2=R2, P=P, K=1 << LEVELS, **more,
    )  # fmt: skip
    return task, token


@triton.jit(do_not_specialize=["R", "W", "L", "stride_pr", "stride_pp"])
def list_paths(
    end_ptr, shared_ptr, own_ptr, last_ptr, starts_ptr, seen_ptr, pages_ptr, lengths_ptr, branches_ptr,
    slots_ptr, places_ptr, words_ptr, R, W, L, stride_pr, stride_pp,
    PAGE: tl.constexpr, N: tl.constexpr, R2: tl.constexpr,
):  # fmt: skip
    """The own keys of one token."""
    t = tl.program_id(0).to(tl.int64)
    r_R, c_C = tl.arange(0, R2), tl.arange(0, COLUMNS)
    tree = tl.sum(((tl.load(starts_ptr + r_R, mask=r_R < R, other=1 << 30) <= t) & (r_R < R)).to(tl.int32), 0) - 1
    seen, columns = tl.load(seen_ptr + t), tl.minimum(tl.load(branches_ptr + tree), W)
    slots_ptr += tree * W
    places_ptr += tree * W
    words_ptr += t * (W // WORD)
    begin, end = tl.load(lengths_ptr + tree) // N * N, seen * 0
    for c in range(0, columns, COLUMNS):
        here_C = _bits(words_ptr, c + c_C, W)
        place_C = tl.load(places_ptr + c + c_C, mask=here_C, other=0)
        end = tl.maximum(end, tl.max(tl.where(here_C, place_C + 1, 0)))
    tl.store(end_ptr + t, end)
    tl.store(shared_ptr + t, tl.where(end > 0, tl.minimum(seen, begin), seen))
    tl.atomic_max(last_ptr + tree, tl.maximum(end, seen), sem="relaxed")  # the next kernel reads it
    own_ptr += t * L
    for n in range(0, L, COLUMNS):
        n_C = n + c_C
        trunk_C = (end > 0) & (begin + n_C < seen) & (n_C < L)
        page_C = tl.load(pages_ptr + tree * stride_pr + (begin + n_C) // PAGE * stride_pp, mask=trunk_C, other=0)
        tl.store(own_ptr + n_C, tl.where(trunk_C, page_C * PAGE + (begin + n_C) % PAGE, -1), mask=n_C < L)
    tl.debug_barrier()
    for c in range(0, columns, COLUMNS):
        here_C = _bits(words_ptr, c + c_C, W)
        place_C = tl.load(places_ptr + c + c_C, mask=here_C, other=0) - begin
        slot_C = tl.load(slots_ptr + c + c_C, mask=here_C, other=0)
        tl.store(own_ptr + place_C, slot_C.to(tl.int32), mask=here_C & (place_C < L))


@triton.jit
def _bits(words_ptr, c_C, W):
    """Whether a token sees branch slots."""
    return ((tl.load(words_ptr + c_C // WORD, mask=c_C < W, other=0) >> (c_C % WORD)) & 1) != 0


@triton.jit
def _counts(tokens, trunk, last, size, window, WINDOWED: tl.constexpr, GROUP: tl.constexpr, M: tl.constexpr):
    """The tiles of a head, the first part of which any token of a tree may see a key, the end of its parts, and the
    first share and the end of them."""
    part = trunk * 0
    if WINDOWED:
        part = tl.maximum(trunk - tokens - window + 1, 0) // CUT
    parts = tl.maximum((last + CUT - 1) // CUT, 1)
    part = tl.minimum(part, parts - 1)
    return (tokens * GROUP + M - 1) // M, part, parts, part // size, (parts + size - 1) // size


@triton.jit(do_not_specialize=["programs", "T", "R", "window"])
def list_shares(
    task_ptr, token_ptr, starts_ptr, lengths_ptr, last_ptr, programs, T, R, window,
    WINDOWED: tl.constexpr, SPLIT: tl.constexpr, R2: tl.constexpr, GROUP: tl.constexpr, G: tl.constexpr,
    M: tl.constexpr, P: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """Write the records of P programs, and of P tokens. A program that has nothing to do has the tree -1.

    With shares of all parts / (programs - 2 tiles) parts or more, all tiles have at most as many as there are
    programs, as a tile's first share and its last one may have fewer parts.
    """
    r_R = tl.arange(0, R2)
    real_R = r_R < R
    first_R = tl.load(starts_ptr + r_R, mask=real_R, other=0)
    tokens_R = tl.load(starts_ptr + r_R + 1, mask=real_R, other=0) - first_R
    trunk_R = tl.load(lengths_ptr + r_R, mask=real_R, other=0)
    last_R = tl.load(last_ptr + r_R, mask=real_R, other=0)
    size = 1 << 24
    if SPLIT:
        tiles_R, part_R, parts_R, _, _ = _counts(tokens_R, trunk_R, last_R, 1, window, WINDOWED, GROUP, M)
        tiles_R *= G
        spare = tl.maximum(programs - 2 * tl.sum(tiles_R), 1)
        least = (tl.sum(tiles_R * (parts_R - part_R)) + spare - 1) // spare
        least = tl.maximum(least, (tl.max(parts_R) + K - 1) // K)
        size = 1
        while size < least:
            size *= 2
    tiles_R, _, _, share_R, shares_R = _counts(tokens_R, trunk_R, last_R, size, window, WINDOWED, GROUP, M)
    end_R = tl.cumsum(tiles_R * G * (shares_R - share_R))
    program_P = tl.program_id(0) * P + tl.arange(0, P)
    before_PR = (end_R[None, :] <= program_P[:, None]) & real_R[None, :]
    at_P = program_P - tl.max(tl.where(before_PR, end_R[None, :], 0), 1)
    tree_P = tl.sum(before_PR.to(tl.int32), 1)
    there_P = tree_P < R
    first_P = tl.load(starts_ptr + tree_P, mask=there_P, other=0)
    tokens_P = tl.load(starts_ptr + tree_P + 1, mask=there_P, other=1) - first_P
    trunk_P = tl.load(lengths_ptr + tree_P, mask=there_P, other=0)
    last_P = tl.load(last_ptr + tree_P, mask=there_P, other=0)
    tiles_P, part_P, parts_P, share_P, shares_P = _counts(tokens_P, trunk_P, last_P, size, window, WINDOWED, GROUP, M)
    own_P = share_P + at_P // tl.maximum(tiles_P * G, 1)
    real_P, at_ptr = program_P < programs, task_ptr + program_P * TASK
    tl.store(at_ptr, tl.where(there_P, tree_P, -1), mask=real_P)
    tl.store(at_ptr + 1, first_P, mask=real_P)
    tl.store(at_ptr + 2, tokens_P * GROUP, mask=real_P)
    tl.store(at_ptr + 3, at_P % tl.maximum(tiles_P, 1), mask=real_P)
    tl.store(at_ptr + 4, at_P // tl.maximum(tiles_P, 1) % G, mask=real_P)
    tl.store(at_ptr + 5, shares_P - share_P, mask=real_P)
    tl.store(at_ptr + 6, own_P * size, mask=real_P)
    tl.store(at_ptr + 7, tl.maximum(part_P, own_P * size), mask=real_P)
    tl.store(at_ptr + 8, tl.minimum(parts_P, (own_P + 1) * size), mask=real_P)
    tl.store(at_ptr + 9, trunk_P, mask=real_P)
    if token_ptr is not None:
        t_P, real_P = program_P, program_P < T
        tree_P = tl.sum(((first_R[None, :] <= t_P[:, None]) & real_R[None, :]).to(tl.int32), 1) - 1
        first_P = tl.load(starts_ptr + tree_P, mask=real_P, other=0)
        tokens_P = tl.load(starts_ptr + tree_P + 1, mask=real_P, other=1) - first_P
        trunk_P = tl.load(lengths_ptr + tree_P, mask=real_P, other=0)
        last_P = tl.load(last_ptr + tree_P, mask=real_P, other=0)
        tiles_P, _, _, share_P, shares_P = _counts(tokens_P, trunk_P, last_P, size, window, WINDOWED, GROUP, M)
        at_ptr = token_ptr + t_P * ROW
        tl.store(at_ptr, first_P, mask=real_P)
        tl.store(at_ptr + 1, tl.max(tl.where(r_R[None, :] < tree_P[:, None], end_R[None, :], 0), 1), mask=real_P)
        tl.store(at_ptr + 2, tiles_P, mask=real_P)
        tl.store(at_ptr + 3, share_P, mask=real_P)
        tl.store(at_ptr + 4, shares_P, mask=real_P)


@triton.jit(do_not_specialize=["L", "levels", "window", "stride_pr", "stride_pp"])
def _attend(
    q_ptr, k_ptr, v_ptr, sinks_ptr, slopes_ptr, out_ptr, level_ptr, log_ptr, task_ptr, positions_ptr,
    end_ptr, shared_ptr, own_ptr, pages_ptr, L, levels, scale, cap, window,
    stride_qt, stride_qh, stride_kg, stride_vg, stride_pr, stride_pp,
    WINDOWED: tl.constexpr, CAPPED: tl.constexpr, GROUP: tl.constexpr, HEADS: tl.constexpr, PAGE: tl.constexpr,
    SCALE: tl.constexpr, D: tl.constexpr, D2: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    EARLY: tl.constexpr = False,
):  # fmt: skip
    """One tile of rows, one share of the parts, one key/value head."""
    after_the_last(EARLY)
    program = tl.program_id(0).to(tl.int64)
    at_ptr = task_ptr + program * TASK
    tree, first, rows, tile, g = (
        tl.load(at_ptr), tl.load(at_ptr + 1), tl.load(at_ptr + 2), tl.load(at_ptr + 3), tl.load(at_ptr + 4)
    )  # fmt: skip
    shares, origin, first_part, last_part = (
        tl.load(at_ptr + 5), tl.load(at_ptr + 6), tl.load(at_ptr + 7), tl.load(at_ptr + 8)
    )  # fmt: skip
    begin = tl.load(at_ptr + 9) // N * N
    if tree < 0:
        return
    g = g.to(tl.int64)
    row_M = tile * M + tl.arange(0, M)
    real_M = row_M < rows
    t_M = first + row_M // GROUP
    head_M = g * GROUP + row_M % GROUP
    d_D = tl.arange(0, D2)
    q_MD = tl.load(
        q_ptr + t_M[:, None].to(tl.int64) * stride_qt + head_M[:, None] * stride_qh + d_D[None, :],
        mask=real_M[:, None] & (d_D < D)[None, :],
        other=0.0,
    )
    shared_M = tl.load(shared_ptr + t_M, mask=real_M, other=0)
    hi, last_own = tl.max(shared_M), tl.max(tl.load(end_ptr + t_M, mask=real_M, other=0))
    oldest_M, lo = shared_M * 0, hi * 0
    if WINDOWED:
        oldest_M = (tl.load(positions_ptr + t_M, mask=real_M, other=0) - window + 1).to(tl.int32)
        lo = tl.maximum(tl.min(tl.where(shared_M > 0, oldest_M, hi)), 0)
    slope_M, place_M = None, None
    if slopes_ptr is not None:
        slope_M = tl.load(slopes_ptr + head_M, mask=real_M, other=0.0)
        place_M = tl.load(positions_ptr + t_M, mask=real_M, other=0).to(tl.int32)
    first_t = first + tile * M // GROUP
    tokens = first + (tl.minimum(rows, (tile + 1) * M) - 1) // GROUP + 1 - first_t
    far = stride_kg // (D + SCALE) * D  # from the elements of a head to their scales
    k_ptr += g * stride_kg
    v_ptr += g * stride_vg
    pages_ptr += tree * stride_pr
    level_ptr += program * levels * M * D
    log_ptr += program * levels * M
    m_M = tl.arange(0, M).to(tl.int64)
    for part in range(first_part, last_part):
        cut, next_cut = part * CUT, (part + 1) * CUT
        first_n, last_n = tl.maximum(cut, lo) // N * N, tl.minimum(next_cut, hi)
        blocks = tl.maximum(last_n - first_n + N - 1, 0) // N
        first_own = tl.maximum(begin, cut)
        most = tl.maximum(tl.minimum(last_own, next_cut) - first_own + N - 1, 0) // N  # blocks of a token's own
        top_M = tl.full([M], float("-inf"), tl.float32)
        sum_M = tl.zeros([M], tl.float32)
        acc_MD = tl.zeros([M, D2], tl.float32)
        t, block = first_t, 0
        for j in range(0, blocks + most * tokens):  # one loop, that both kinds of blocks go through the same code
            own = j >= blocks
            n_N = tl.where(own, first_own + block * N, first_n + j * N) + tl.arange(0, N)
            trunk_N = (n_N < last_n) & (j < blocks)
            page_N = tl.load(pages_ptr + n_N // PAGE * stride_pp, mask=trunk_N, other=0)
            found_N = tl.load(own_ptr + t.to(tl.int64) * L + n_N - begin, mask=(n_N - begin < L) & own, other=-1)
            slot_N = tl.where(own, found_N, page_N * PAGE + n_N % PAGE).to(tl.int64)
            live_N = tl.where(own, found_N >= 0, trunk_N)
            end_M = tl.where(own, tl.where(t_M == t, FAR, 0), shared_M)
            visible_MN = tl.where(live_N, n_N, FAR)[None, :] < end_M[:, None]
            if WINDOWED:
                visible_MN &= n_N[None, :] >= oldest_M[:, None]
            top_M, sum_M, acc_MD = fold(
                q_MD, k_ptr, v_ptr, slot_N, live_N, visible_MN, scale,
                cap, top_M, sum_M, acc_MD, far, CAPPED, True, SCALE, D, D2, None, 0, 0,
                biases(slope_M, place_M, n_N, scale),
            )  # fmt: skip
            block += own.to(tl.int32)
            t += (block == most).to(tl.int32)
            block = tl.where(block == most, 0, block)

        sum_M = tl.where(sum_M != 0, sum_M, 1.0)  # NaN stays
        out_MD, out_M = acc_MD / sum_M[:, None], top_M + tl.log2(sum_M)  # -inf where nothing was seen
        left, size, level, last = part - origin, 1, 0, part + 1 == last_part
        while ((left & 1) != 0) | (last & (left > 0)):
            if ((left & 1) != 0) & ((part - origin) // (2 * size) * 2 * size + size + origin > first_part):
                line_M = level * M + m_M
                there_MD = line_M[:, None] * D + d_D[None, :]
                before_M = tl.load(log_ptr + line_M)
                before_MD = tl.load(level_ptr + there_MD, mask=(d_D < D)[None, :], other=0.0)
                out_MD, out_M = _join(before_MD, before_M, out_MD, out_M)
            left, size, level = left >> 1, size * 2, level + 1
        if last & (shares == 1):
            if sinks_ptr is not None:
                sink_M = tl.load(sinks_ptr + head_M, mask=real_M, other=0.0) * LOG2_E
                out_MD, out_M = _join(tl.zeros([M, D2], tl.float32), sink_M, out_MD, out_M)
            store(out_ptr, t_M.to(tl.int64) * HEADS + head_M, real_M, out_MD, D, D2)
        else:
            level = tl.where(last, 0, level)
            tl.store(log_ptr + level * M + m_M, out_M)
            store(level_ptr, level * M + m_M, real_M | (row_M >= 0), out_MD, D, D2)
        tl.debug_barrier()  # other threads may load what these have stored


@triton.jit
def _join(before_BD, before_B, out_BD, out_B):
    """Two neighbouring nodes of the tree of parts, and the logarithms of their sums. The compiler has no choice of what
    to contract, as other kernels have to find the same bits."""
    top_B = tl.maximum(before_B, out_B)
    base_B = tl.where(top_B == float("-inf"), 0.0, top_B)
    before_B, out_B = tl.exp2(before_B - base_B), tl.exp2(out_B - base_B)
    sum_B = before_B + out_B
    sum_B = tl.where(sum_B != 0, sum_B, 1.0)
    before_B, out_B = before_B / sum_B, out_B / sum_B
    return tl.fma(before_BD, _across(before_B, before_BD), out_BD * out_B[:, None]), top_B + tl.log2(sum_B)


@triton.jit
def _across(x_B, like_BD):
    return tl.broadcast_to(x_B[:, None], like_BD.shape)


@triton.jit(do_not_specialize=["levels"])
def _join_shares(
    out_ptr, sinks_ptr, level_ptr, log_ptr, token_ptr, levels,
    GROUP: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr, D2: tl.constexpr, M: tl.constexpr,
    LEVELS: tl.constexpr, EARLY: tl.constexpr = False,
):  # fmt: skip
    """One row of the output, if its tile was cut into shares: pairs of them are joined, and pairs of these."""
    after_the_last(EARLY)
    line = tl.program_id(0)
    t, head = line // HEADS, line % HEADS
    token_ptr += t * ROW
    first, begin, tiles, share, shares = (
        tl.load(token_ptr), tl.load(token_ptr + 1), tl.load(token_ptr + 2), tl.load(token_ptr + 3),
        tl.load(token_ptr + 4),
    )  # fmt: skip
    K: tl.constexpr = 1 << LEVELS
    if shares - share > 1:
        row = (t - first) * GROUP + head % GROUP
        k_K, d_D = tl.arange(0, K), tl.arange(0, D2)
        program_K = begin + ((k_K - share) * (HEADS // GROUP) + head // GROUP) * tiles + row // M
        line_K = program_K.to(tl.int64) * levels * M + row % M
        real_K = (k_K >= share) & (k_K < shares)
        out_K = tl.load(log_ptr + line_K, mask=real_K, other=float("-inf"))
        out_KD = tl.load(
            level_ptr + line_K[:, None] * D + d_D[None, :], mask=real_K[:, None] & (d_D < D)[None, :], other=0.0
        )
        for i in tl.static_range(LEVELS):
            before_K, after_K = tl.split(tl.reshape(out_K, [1 << (LEVELS - 1 - i), 2]))
            both_KDB = tl.permute(tl.reshape(out_KD, [1 << (LEVELS - 1 - i), 2, D2]), [0, 2, 1])
            before_KD, after_KD = tl.split(both_KDB)
            out_KD, out_K = _join(before_KD, before_K, after_KD, after_K)
        if sinks_ptr is not None:
            sink_K = tl.full([1], 0, tl.float32) + tl.load(sinks_ptr + head) * LOG2_E
            out_KD, out_K = _join(tl.zeros([1, D2], tl.float32), sink_K, out_KD, out_K)
        store(out_ptr, tl.full([1], line, tl.int64), tl.full([1], True, tl.int1), out_KD, D, D2)
