"""The shares of a tile's keys: which program has which, and how the rows of the output are merged from them.

A program finds out its task from the lengths of all trees, by a sum over them (`_shares`). `triton.py` draws the
programs and explains the shapes.
"""
# pyright: reportArgumentType=false, reportCallIssue=false, reportReturnType=false, reportAttributeAccessIssue=false
# pyright: reportIndexIssue=false, reportGeneralTypeIssues=false
# (what triton.jit takes and gives is no function to a type checker)

import triton
import triton.language as tl

from kernels.gpu import cast

WHOLE, LAST, LATER = (tl.constexpr(i) for i in range(3))  # tiles are not cut; who merges their shares
LEAST_SHARE = tl.constexpr(2)  # blocks of a share: fewer are sooner done than merged
MOST_MERGED = tl.constexpr(1 << 18)  # bytes that the last program of a tile merges
WORD = tl.constexpr(32)


@triton.jit
def _keys(tokens, trunk, branches, W, window, WINDOWED: tl.constexpr, N: tl.constexpr):
    """The first key that any token of a tree may see, the blocks of its trunk from there, and all blocks of a tile.

    Args:
        tokens: of the tree; a trunk's last ones are among them, and no other stands before its end.
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
def task(
    program, programs, starts_ptr, lengths_ptr, branches_ptr, R, W, window,
    WINDOWED: tl.constexpr, SPLIT: tl.constexpr, R2: tl.constexpr, GROUP: tl.constexpr, G: tl.constexpr,
    D2: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """The tile and the share of keys that a program works on.

    Returns:
        its tree (R: it has nothing to do), the tree's first token, and how many it has; its tile, and of how many; the
        head; its share, and of how many; the tree's first key and blocks of the trunk, as of `_keys`; the first of its
        blocks, and the end of them.
    """
    end_R, size = _shares(
        programs, starts_ptr, lengths_ptr, branches_ptr, R, W, window, WINDOWED, SPLIT, R2, GROUP, G, D2, M, N
    )
    before_R = end_R <= program
    at = program - tl.max(tl.where(before_R, end_R, 0))
    tree = tl.minimum(tl.sum(before_R.to(tl.int32)), R)
    there = tree < R
    if R2 > 1:
        starts_ptr += tree
        lengths_ptr += tree
        branches_ptr += tree
    else:  # a place that is known: what lies there is loaded with what `_shares` adds up, not after it
        there = program >= 0
    first = tl.load(starts_ptr, mask=there, other=0)
    tokens = tl.load(starts_ptr + 1, mask=there, other=1) - first
    trunk = tl.load(lengths_ptr, mask=there, other=0)
    branches = tl.load(branches_ptr, mask=there, other=0)
    lo, trunk_blocks, blocks = _keys(tokens, trunk, branches, W, window, WINDOWED, N)
    tiles, shares = (tokens * GROUP + M - 1) // M, (blocks + size - 1) // size
    split, length = at // tiles % shares, (blocks + shares - 1) // shares
    begin = split * length
    end = tl.minimum(begin + length, blocks)
    head = at // (tiles * shares)
    return tree, first, tokens, at % tiles, tiles, head, split, shares, lo, trunk_blocks, begin, end


@triton.jit
def merged(share_ptr, log_ptr, line_B, real_B, step, shares, D: tl.constexpr, D2: tl.constexpr, K: tl.constexpr):
    """Rows of the output from their shares, each weighed by its part of the sum of exponentials, K shares at a time.

    Args:
        line_B: the rows of the first share.
        step: rows from one share to the next.
    """
    d_D = tl.arange(0, D2)
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


@triton.jit(do_not_specialize=["programs", "R", "window"])
def merge(
    out_ptr, share_ptr, log_ptr, starts_ptr, lengths_ptr, branches_ptr, programs, R, W, window,
    WINDOWED: tl.constexpr, R2: tl.constexpr, GROUP: tl.constexpr, HEADS: tl.constexpr,
    D: tl.constexpr, D2: tl.constexpr, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """One row of the output, if its tile was cut into shares."""
    line = tl.program_id(0)
    t, head = line // HEADS, line % HEADS
    end_R, size = _shares(
        programs, starts_ptr, lengths_ptr, branches_ptr, R, W, window,
        WINDOWED, LATER, R2, GROUP, HEADS // GROUP, D2, M, N,
    )  # fmt: skip
    r_R = tl.arange(0, R2)
    tree = tl.sum(((tl.load(starts_ptr + r_R, mask=r_R < R, other=0) <= t) & (r_R < R)).to(tl.int32)) - 1
    first = tl.load(starts_ptr + tree)
    tokens = tl.load(starts_ptr + tree + 1) - first
    _, _, blocks = _keys(tokens, tl.load(lengths_ptr + tree), tl.load(branches_ptr + tree), W, window, WINDOWED, N)
    shares, tiles = (blocks + size - 1) // size, (tokens * GROUP + M - 1) // M
    if shares > 1:
        row = (t - first) * GROUP + head % GROUP
        begin = tl.max(tl.where(r_R < tree, end_R, 0))
        program = begin + head // GROUP * shares * tiles + row // M
        share_B = tl.full([1], program.to(tl.int64) * M + row % M, tl.int64)
        real_B = share_B >= 0
        out_BD = merged(share_ptr, log_ptr, share_B, real_B, tiles * M, shares, D, D2, K)
        store(out_ptr, tl.full([1], line, tl.int64), real_B, out_BD, D, D2)


@triton.jit
def store(out_ptr, line_B, real_B, out_BD, D: tl.constexpr, D2: tl.constexpr):
    """Rows of the output, or of shares."""
    d_D = tl.arange(0, D2)
    tl.store(
        out_ptr + line_B[:, None] * D + d_D[None, :],
        cast(out_BD, out_ptr.dtype.element_ty),
        mask=real_B[:, None] & (d_D < D)[None, :],
    )
