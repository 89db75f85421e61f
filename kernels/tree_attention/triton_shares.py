"""The shares of a tile's keys: which program has which, and how the rows of the output are merged from them.

The task of each program follows from the lengths of all trees, by a sum over them (`_shares`). All layers of a pass
that are alike have the same tasks, so a small kernel lists them once (`list_tasks`), and each program of a layer reads
its own record. `triton.py` draws the programs and explains the shapes.
"""
# pyright: reportArgumentType=false, reportCallIssue=false, reportReturnType=false, reportAttributeAccessIssue=false
# pyright: reportIndexIssue=false, reportGeneralTypeIssues=false
# (what triton.jit takes and gives is no function to a type checker)

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from kernels.gpu import after_the_last, cast, launch

WHOLE, LAST, LATER = (tl.constexpr(i) for i in range(3))  # tiles are not cut; who merges their shares
LEAST_SHARE = tl.constexpr(2)  # blocks of a share: fewer are sooner done than merged
MOST_MERGED = tl.constexpr(1 << 18)  # bytes that the last program of a tile merges
WORD = tl.constexpr(32)
TASK = tl.constexpr(12)  # numbers of a program's record
ROW = tl.constexpr(4)  # numbers of a token's record
LISTED = 1 << 12  # records that a program writes times trees that it adds up


class Trees(NamedTuple):
    """The tensors of a layout that attention reads, see `TreeLayout`."""

    positions_T: Tensor
    token_starts: Tensor
    trunk_seen_T: Tensor
    trunk_pages_RP: Tensor
    trunk_len_R: Tensor
    branch_len_R: Tensor
    branch_slots_RW: Tensor
    branch_positions_RW: Tensor
    ancestry_TC: Tensor
    page_size: int


class Tasks(NamedTuple):
    """The records of a launch's programs, int32 [programs, TASK]; of its tokens, int32 [T, ROW], if a second kernel
    merges their shares."""

    programs: Tensor
    tokens: Tensor | None


def tasks(trees: Trees, programs: int, split: int, window: int | None, **sizes: int) -> Tasks:
    """List the tasks of a launch.

    Args:
        split: WHOLE, LAST or LATER.
        sizes: GROUP, G, D2, M and N of the launch.
    """
    R, T, W = len(trees.trunk_len_R), len(trees.positions_T), trees.branch_slots_RW.shape[1]
    later, new, R2 = split == LATER.value, trees.token_starts.new_empty, max(16, triton.next_power_of_2(R))
    made, P = Tasks(new(programs, TASK.value), new(T, ROW.value) if later else None), max(16, min(128, LISTED // R2))
    launch(list_tasks, triton.cdiv(max(programs, T if later else 0), P))(
        made.programs, made.tokens, trees.token_starts, trees.trunk_len_R, trees.branch_len_R,
        programs, T, R, W, window or 0,
        WINDOWED=window is not None, SPLIT=split, R2=R2, P=P, **sizes,
    )  # fmt: skip
    return made


@triton.jit
def _keys(tokens, trunk, branches, W, window, WINDOWED: tl.constexpr, N: tl.constexpr):
    """The first key that any token of a tree may see, the blocks of its trunk from there, and all blocks of a tile.

    Args:
        tokens: number of the tree's tokens; those within the trunk are its last ones.
    """
    lo = trunk * 0
    if WINDOWED:
        lo = tl.maximum(trunk - tokens - window + 1, 0) // N * N
    trunk_blocks = (trunk - lo + N - 1) // N
    return lo, trunk_blocks, tl.maximum(trunk_blocks + (tl.minimum(branches, W) + WORD - 1) // WORD, 1)


@triton.jit
def _shares(
    programs, starts_ptr, lengths_ptr, branches_ptr, R, W, window,
    WINDOWED: tl.constexpr, SPLIT: tl.constexpr, R2: tl.constexpr, GROUP: tl.constexpr, G: tl.constexpr,
    D2: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """Where the programs of each tree end, and how many blocks a share has at most.

    A tile of b blocks has b / size shares, rounded up. With size = all blocks / (programs - tiles) all tiles have at
    most as many as there are programs.
    """
    r_R = tl.arange(0, R2)
    real_R = r_R < R
    tokens_R = tl.load(starts_ptr + r_R + 1, mask=real_R, other=0) - tl.load(starts_ptr + r_R, mask=real_R, other=0)
    trunk_R = tl.load(lengths_ptr + r_R, mask=real_R, other=0)
    branches_R = tl.load(branches_ptr + r_R, mask=real_R, other=0)
    _, _, blocks_R = _keys(tokens_R, trunk_R, branches_R, W, window, WINDOWED, N)
    tiles_R = (tokens_R * GROUP + M - 1) // M * G
    size = 1 << 30
    if SPLIT != WHOLE:
        spare = tl.maximum(programs - tl.sum(tiles_R), 1)
        size = tl.maximum((tl.sum(tiles_R * blocks_R) + spare - 1) // spare, LEAST_SHARE)
        if SPLIT == LAST:
            SHARES: tl.constexpr = MOST_MERGED // (M * D2 * 4)
            size = tl.maximum(size, (tl.max(tl.where(tiles_R > 0, blocks_R, 0)) + SHARES - 1) // SHARES)
    return tl.cumsum(tiles_R * ((blocks_R + size - 1) // size)), size


@triton.jit
def _of_trees(
    tree_P, there_P, size, starts_ptr, lengths_ptr, branches_ptr, W, window,
    WINDOWED: tl.constexpr, GROUP: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """Trees' first tokens, and how many they have; tiles of a head; the results of `_keys`; shares of a tile."""
    first_P = tl.load(starts_ptr + tree_P, mask=there_P, other=0)
    tokens_P = tl.load(starts_ptr + tree_P + 1, mask=there_P, other=1) - first_P
    trunk_P = tl.load(lengths_ptr + tree_P, mask=there_P, other=0)
    branches_P = tl.load(branches_ptr + tree_P, mask=there_P, other=0)
    lo_P, trunk_blocks_P, blocks_P = _keys(tokens_P, trunk_P, branches_P, W, window, WINDOWED, N)
    tiles_P = (tokens_P * GROUP + M - 1) // M
    return first_P, tokens_P, tiles_P, lo_P, trunk_blocks_P, blocks_P, (blocks_P + size - 1) // size


@triton.jit(do_not_specialize=["programs", "T", "R", "window"])
def list_tasks(
    task_ptr, token_ptr, starts_ptr, lengths_ptr, branches_ptr, programs, T, R, W, window,
    WINDOWED: tl.constexpr, SPLIT: tl.constexpr, R2: tl.constexpr, GROUP: tl.constexpr, G: tl.constexpr,
    D2: tl.constexpr, M: tl.constexpr, N: tl.constexpr, P: tl.constexpr,
):  # fmt: skip
    """Write the records of P programs, and of P tokens. A program that has nothing to do has the tree -1."""
    end_R, size = _shares(
        programs, starts_ptr, lengths_ptr, branches_ptr, R, W, window, WINDOWED, SPLIT, R2, GROUP, G, D2, M, N
    )
    program_P = tl.program_id(0) * P + tl.arange(0, P)
    before_PR = end_R[None, :] <= program_P[:, None]
    at_P = program_P - tl.max(tl.where(before_PR, end_R[None, :], 0), 1)
    tree_P = tl.sum(before_PR.to(tl.int32), 1)
    there_P = tree_P < R
    first_P, tokens_P, tiles_P, lo_P, trunk_blocks_P, blocks_P, shares_P = _of_trees(
        tree_P, there_P, size, starts_ptr, lengths_ptr, branches_ptr, W, window, WINDOWED, GROUP, M, N
    )
    split_P, length_P = at_P // tiles_P % shares_P, (blocks_P + shares_P - 1) // shares_P
    begin_P = split_P * length_P
    end_P = tl.minimum(begin_P + length_P, blocks_P)
    at_ptr, real_P = task_ptr + program_P * TASK, program_P < programs
    tl.store(at_ptr, tl.where(there_P, tree_P, -1), mask=real_P)
    tl.store(at_ptr + 1, first_P, mask=real_P)
    tl.store(at_ptr + 2, tokens_P * GROUP, mask=real_P)
    tl.store(at_ptr + 3, at_P % tiles_P, mask=real_P)
    tl.store(at_ptr + 4, tiles_P, mask=real_P)
    tl.store(at_ptr + 5, at_P // (tiles_P * shares_P), mask=real_P)
    tl.store(at_ptr + 6, split_P, mask=real_P)
    tl.store(at_ptr + 7, shares_P, mask=real_P)
    tl.store(at_ptr + 8, lo_P // N + begin_P, mask=real_P)
    tl.store(at_ptr + 9, lo_P // N + tl.minimum(end_P, trunk_blocks_P), mask=real_P)
    tl.store(at_ptr + 10, tl.maximum(begin_P - trunk_blocks_P, 0), mask=real_P)
    tl.store(at_ptr + 11, tl.maximum(end_P - trunk_blocks_P, 0), mask=real_P)
    if token_ptr is not None:
        r_R, t_P = tl.arange(0, R2), program_P
        starts_R = tl.load(starts_ptr + r_R, mask=r_R < R, other=0)
        tree_P = tl.sum(((starts_R[None, :] <= t_P[:, None]) & (r_R < R)[None, :]).to(tl.int32), 1) - 1
        first_P, _, tiles_P, _, _, _, shares_P = _of_trees(
            tree_P, t_P < T, size, starts_ptr, lengths_ptr, branches_ptr, W, window, WINDOWED, GROUP, M, N
        )
        begin_P = tl.max(tl.where(r_R[None, :] < tree_P[:, None], end_R[None, :], 0), 1)
        at_ptr, real_P = token_ptr + t_P * ROW, t_P < T
        tl.store(at_ptr, first_P, mask=real_P)
        tl.store(at_ptr + 1, begin_P, mask=real_P)
        tl.store(at_ptr + 2, tiles_P, mask=real_P)
        tl.store(at_ptr + 3, shares_P, mask=real_P)


@triton.jit
def task(task_ptr, program):
    """The tile and the share of keys that a program works on.

    Returns:
        its tree (-1: it has nothing to do), the tree's first token, and how many rows it has; its tile, and of how
        many; the head; its share, and of how many; its first block of the trunk's keys, counted from the trunk's
        beginning, and the end of them; its first word of branch slots, and the end of them.
    """
    at_ptr = task_ptr + program * TASK
    tree, first, rows, tile = tl.load(at_ptr), tl.load(at_ptr + 1), tl.load(at_ptr + 2), tl.load(at_ptr + 3)
    tiles, head, split, shares = tl.load(at_ptr + 4), tl.load(at_ptr + 5), tl.load(at_ptr + 6), tl.load(at_ptr + 7)
    block, last_block, word, last_word = (
        tl.load(at_ptr + 8), tl.load(at_ptr + 9), tl.load(at_ptr + 10), tl.load(at_ptr + 11)
    )  # fmt: skip
    return tree, first, rows, tile, tiles, head, split, shares, block, last_block, word, last_word


@triton.jit
def merged(
    share_ptr, log_ptr, line_B, real_B, step, shares,
    D: tl.constexpr, D2: tl.constexpr, K: tl.constexpr, FIRST: tl.constexpr = 0,
):  # fmt: skip
    """Rows of the output from their shares, each weighed by its part of the sum of exponentials, K shares at a time.

    Args:
        line_B: the rows of the first share.
        step: rows from one share to the next.
        FIRST: of the D2 elements of a row that are merged.
    """
    d_D = FIRST + tl.arange(0, D2)
    top_B = tl.full(line_B.shape, float("-inf"), tl.float32)
    sum_B = tl.zeros(line_B.shape, tl.float32)
    acc_BD = tl.zeros([line_B.shape[0], D2], tl.float32)
    for k in range(0, shares, K):
        k_K = k + tl.arange(0, K)
        line_KB = k_K[:, None] * step + line_B[None, :]
        real_KB = (k_K < shares)[:, None] & real_B[None, :]
        log_KB = tl.load(log_ptr + line_KB, mask=real_KB, other=float("-inf"), cache_modifier=".cg")
        share_KBD = tl.load(
            share_ptr + line_KB[:, :, None] * D + d_D[None, None, :],
            mask=real_KB[:, :, None] & (d_D < D)[None, None, :],
            other=0.0,
            cache_modifier=".cg",
        )
        new_B = tl.maximum(top_B, tl.max(log_KB, 0))
        base_B = tl.where(new_B == float("-inf"), 0.0, new_B)
        weight_KB = tl.exp2(log_KB - base_B[None, :])
        fade_B = tl.exp2(top_B - base_B)
        top_B, sum_B = new_B, sum_B * fade_B + tl.sum(weight_KB, 0)
        acc_BD = acc_BD * fade_B[:, None] + tl.sum(weight_KB[:, :, None] * share_KBD, 0)
    return acc_BD / tl.where(sum_B == 0, 1.0, sum_B)[:, None]


@triton.jit
def merge(
    out_ptr, share_ptr, log_ptr, token_ptr,
    GROUP: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr, D2: tl.constexpr, M: tl.constexpr, K: tl.constexpr,
    R: tl.constexpr = 0, EARLY: tl.constexpr = False,
):  # fmt: skip
    """One row of the output, if its tile was cut into shares; without its first R elements."""
    after_the_last(EARLY)
    line = tl.program_id(0)
    t, head = line // HEADS, line % HEADS
    token_ptr += t * ROW
    first, begin, tiles, shares = (
        tl.load(token_ptr), tl.load(token_ptr + 1), tl.load(token_ptr + 2), tl.load(token_ptr + 3)
    )  # fmt: skip
    if shares > 1:
        row = (t - first) * GROUP + head % GROUP
        program = begin + head // GROUP * shares * tiles + row // M
        share_B = tl.full([1], program.to(tl.int64) * M + row % M, tl.int64)
        real_B = share_B >= 0
        out_BD = merged(share_ptr, log_ptr, share_B, real_B, tiles * M, shares, D - R, D2, K)
        store(out_ptr, tl.full([1], line, tl.int64), real_B, out_BD, D, D2, R)


@triton.jit
def store(out_ptr, line_B, real_B, out_BD, D: tl.constexpr, D2: tl.constexpr, FIRST: tl.constexpr = 0):
    """Rows of the output, or of shares, from element FIRST on."""
    d_D = FIRST + tl.arange(0, D2)
    tl.store(
        out_ptr + line_B[:, None] * D + d_D[None, :],
        cast(out_BD, out_ptr.dtype.element_ty),
        mask=real_B[:, None] & (d_D < D)[None, :],
    )
