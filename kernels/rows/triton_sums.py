"""The top sums of rows on a GPU, of several searches at once: one launch.

The k largest elements are in the k blocks with the largest peaks, and those blocks in the k groups of blocks with the
largest peaks; ties always go to the lower position, so this holds for equal values too. Programs find the groups'
peaks; the last one of a search to arrive descends from groups to blocks to elements. At each level it finds the k-th
largest by bisection, chooses exactly k in the order of their positions, and takes those of their children that are not
below it. Finally it ranks them, unless there are thousands, which are sorted after the launch: it compares each with
each.

Floats are compared as integers in the same order (`_key`); NaN counts as -inf. Shapes besides those of
`kernels.rows`: T keys of a tile.
"""
# pyright: reportArgumentType=false, reportCallIssue=false, reportReturnType=false, reportAttributeAccessIssue=false
# pyright: reportIndexIssue=false, reportGeneralTypeIssues=false, reportOperatorIssue=false
# (what triton.jit takes and gives is no function to a type checker)

from collections.abc import Sequence
from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.gpu import counters, last_of, launch
from kernels.rows.checks import SPAN

TILE = 2048
GROUPS = (1, 16, 64)  # blocks of a group: few sizes, as each is compiled by itself
MOST_RANKED = 1024  # sums of a range
OPTIONS = {"num_warps": 8, "maxnreg": 192}  # at 128 registers a few are spilled
LEAST_KEY = tl.constexpr(-0x7FFFFFFF)  # below the key of -inf
FLIP = tl.constexpr(0x7FFFFFFF)


def top_sums(
    logp_NV: Tensor, ranges: Sequence[tuple[int, int]], sums_M: Tensor, counts: Sequence[int], peaks_NB: Tensor
) -> Tensor:
    """The results of `kernels.rows.top_sums` for ranges of rows, one after the other.

    Args:
        ranges: the first row of each, and the end.
        sums_M: float32, on the device: of the rows of all ranges, one after the other.
        counts: k of each range, at most as many as it has elements.
    """
    V, B = logp_NV.shape[1], peaks_NB.shape[1]
    most = max(end - first for first, end in ranges) * B
    few = max(TILE, 8 * max(counts))  # groups: a tile stays in registers, and of many most can be left out
    group = next((size for size in GROUPS if most <= size * few), GROUPS[-1])
    table_P7, outs, works = _table(tuple(ranges), tuple(counts), B, group, logp_NV.device)
    out = torch.empty(outs, dtype=torch.float64, device=logp_NV.device)
    work = torch.empty(works, dtype=torch.int32, device=logp_NV.device)
    ranked = max(counts) <= MOST_RANKED
    launch(_top_sums, triton.cdiv(most, TILE), len(ranges))(
        logp_NV, peaks_NB, sums_M, table_P7, work, out, counters(logp_NV.device), V, B, logp_NV.stride(0),
        LOG_GROUP=group.bit_length() - 1, LOG_SPAN=SPAN.bit_length() - 1, TILE=TILE, RANKED=ranked, **OPTIONS,
    )  # fmt: skip
    for part, k in zip(out.split([2 * k + 1 for k in counts]), counts, strict=True) if not ranked else ():
        values_k, order_k = part[:k].sort(descending=True, stable=True)
        part[:k], part[k : 2 * k] = values_k, part[k : 2 * k][order_k]
    return out


@lru_cache(256)  # the ranges of a step are as a rule those of the step before
def _table(
    ranges: tuple[tuple[int, int], ...], counts: tuple[int, ...], B: int, group: int, device: torch.device
) -> tuple[Tensor, int, int]:
    """A line per range: its first row, its rows, k, where its sums begin, where its results and its keys and places
    begin in theirs, and how many candidates there are at most; then the sizes of both."""
    lines, sums, outs, works = [], 0, 0, 0
    for (first, end), k in zip(ranges, counts, strict=True):
        rows = end - first
        groups, blocks = triton.cdiv(rows * B, group), min(k, rows * B)
        candidates = max(groups, min(k, groups) * group, blocks * SPAN)
        lines.append([first, rows, k, sums, outs, works, candidates])
        sums, outs, works = sums + rows, outs + 2 * k + 1, works + 2 * (k + candidates)
    return torch.tensor(lines, dtype=torch.int32).to(device, non_blocking=True), outs, works


@triton.jit(do_not_specialize=["V", "B"])
def _top_sums(
    logp_ptr, peaks_ptr, sums_ptr, table_ptr, work_ptr, out_ptr, count_ptr, V, B, stride_n,
    LOG_GROUP: tl.constexpr, LOG_SPAN: tl.constexpr, TILE: tl.constexpr, RANKED: tl.constexpr,
):  # fmt: skip
    """A tile of the peaks of a range; the last program of a range finds the best."""
    GROUP: tl.constexpr = 1 << LOG_GROUP
    table_ptr += tl.program_id(1) * 7
    first, rows, k = tl.load(table_ptr).to(tl.int64), tl.load(table_ptr + 1), tl.load(table_ptr + 2)
    sums_ptr += tl.load(table_ptr + 3)
    out_ptr += tl.load(table_ptr + 4)
    best_ptr, most = work_ptr + tl.load(table_ptr + 5), tl.load(table_ptr + 6)
    near_ptr = best_ptr + 2 * k  # in both there are keys, then places
    logp_ptr += first * stride_n
    peaks_ptr += first * B
    blocks = rows * B
    programs = tl.cdiv(blocks, TILE)
    if tl.program_id(0) < programs:
        b_T = tl.program_id(0) * TILE + tl.arange(0, TILE)
        key_T = _sums(peaks_ptr + b_T, sums_ptr + b_T // B, b_T < blocks)
        if GROUP > 1:
            key_T = tl.max(tl.reshape(key_T, [TILE // GROUP, GROUP]), 1)
        g_T = tl.program_id(0) * (TILE // GROUP) + tl.arange(0, TILE // GROUP)
        near = tl.cdiv(blocks, GROUP)
        tl.store(near_ptr + g_T, key_T, mask=g_T < near)
        tl.store(near_ptr + most + g_T, g_T, mask=g_T < near)
        if last_of(count_ptr + tl.program_id(1), programs):
            LEVELS: tl.constexpr = 3 if GROUP > 1 else 2
            count = k * 0
            for level in range(LEVELS):
                count, least = _choose(near_ptr, most, near, k, best_ptr, TILE)
                if level < LEVELS - 1:
                    near = _children(
                        best_ptr + k, count, least, logp_ptr, peaks_ptr, sums_ptr, near_ptr, most, blocks, V, B,
                        stride_n, level == LEVELS - 2, LOG_GROUP, LOG_SPAN, TILE,
                    )  # fmt: skip
            _write(best_ptr, count, k, out_ptr, RANKED)


@triton.jit
def _key(x):
    """Integers in the order of floats; -0 is 0."""
    bits = tl.where(x == 0, 0.0, tl.where(x == x, x, float("-inf"))).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & FLIP)


@triton.jit
def _sums(x_ptrs, sum_ptrs, real):
    """The keys of sums; `LEAST_KEY` where there are none."""
    x = tl.load(x_ptrs, mask=real, other=0.0) + tl.load(sum_ptrs, mask=real, other=0.0)
    return tl.where(real, _key(x), LEAST_KEY)


@triton.jit
def _choose(near_ptr, most, n, k, best_ptr, TILE: tl.constexpr):
    """Stores the k largest of n candidates, in the order in which they lie; of equal keys the first.

    Returns how many there are, and what k keys at least are not below.
    """
    tl.debug_barrier()
    i_T = tl.arange(0, TILE)
    key_T = tl.load(near_ptr + i_T, mask=i_T < n, other=LEAST_KEY, cache_modifier=".cg")  # the others are read again
    low_T, high_T = tl.where(i_T < n, key_T, FLIP), key_T
    for first in range(TILE, n, TILE):
        more_T = tl.load(near_ptr + first + i_T, mask=first + i_T < n, other=LEAST_KEY, cache_modifier=".cg")
        low_T = tl.minimum(low_T, tl.where(first + i_T < n, more_T, FLIP))
        high_T = tl.maximum(high_T, more_T)
    low, high, above = tl.min(low_T, 0).to(tl.int64), tl.max(high_T, 0).to(tl.int64), k * 0
    high = tl.where(n <= k, low, high)
    while low < high:  # k keys or more are at least `low`; fewer, `above`, are greater than `high`
        middle = (low + high + 1) >> 1
        count_T = (key_T >= middle.to(tl.int32)).to(tl.int32)
        for first in range(TILE, n, TILE):
            more_T = tl.load(near_ptr + first + i_T, mask=first + i_T < n, other=LEAST_KEY, cache_modifier=".cg")
            count_T += (more_T >= middle.to(tl.int32)).to(tl.int32)
        count = tl.sum(count_T, 0)
        low = tl.where(count < k, low, middle)
        high = tl.where(count > k, high, tl.where(count < k, middle - 1, middle))
        above = tl.where(count < k, count, above)
    least = low.to(tl.int32)
    stored, equals = k * 0, k * 0
    for first in range(0, n, TILE):
        real_T = first + i_T < n
        key_T = tl.load(near_ptr + first + i_T, mask=real_T, other=LEAST_KEY, cache_modifier=".cg")
        equal_T = (real_T & (key_T == least)).to(tl.int32)
        rank_T = equals + tl.cumsum(equal_T, 0) - equal_T
        chosen_T = real_T & ((key_T > least) | ((equal_T > 0) & (rank_T < k - above)))
        place_T = tl.load(near_ptr + most + first + i_T, mask=chosen_T, other=0, cache_modifier=".cg")
        stored = _append(best_ptr, k, stored, key_T, place_T, chosen_T)
        equals += tl.sum(equal_T, 0)
    return stored, tl.where(n < k, LEAST_KEY, least)


@triton.jit
def _children(
    place_ptr, count, least, logp_ptr, peaks_ptr, sums_ptr, near_ptr, most, blocks, V, B, stride_n,
    elements, LOG_GROUP: tl.constexpr, LOG_SPAN: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Stores those elements of blocks, or blocks of groups, that are not below `least`; returns how many."""
    tl.debug_barrier()
    SPAN: tl.constexpr = 1 << LOG_SPAN
    stored, log = count * 0, tl.where(elements, LOG_SPAN, LOG_GROUP)
    size = 1 << log
    for first in range(0, count * size, TILE):
        i_T = first + tl.arange(0, TILE)
        real_T = i_T < count * size
        parent_T = tl.load(place_ptr + (i_T >> log), mask=real_T, other=0, cache_modifier=".cg")
        place_T = (parent_T << log) + (i_T & (size - 1))
        block_T = tl.where(elements, parent_T, place_T)
        n_T = block_T // B
        v_T = (block_T - n_T * B) * SPAN + (i_T & (SPAN - 1))
        real_T &= (block_T < blocks) & ((v_T < V) | (elements == 0))
        x_ptrs = tl.where(elements, logp_ptr + (n_T.to(tl.int64) * stride_n + v_T), peaks_ptr + place_T)
        key_T = _sums(x_ptrs, sums_ptr + n_T, real_T)
        place_T = tl.where(elements, n_T * V + v_T, place_T)
        stored = _append(near_ptr, most, stored, key_T, place_T, real_T & (key_T >= least))
    return stored


@triton.jit
def _append(to_ptr, most, stored, key_T, place_T, chosen_T):
    """Stores the chosen keys, and from `most` on their places, after those that are stored; returns how many are."""
    one_T = chosen_T.to(tl.int32)
    at_T = stored + tl.cumsum(one_T, 0) - one_T
    tl.store(to_ptr + at_T, key_T, mask=chosen_T)
    tl.store(to_ptr + most + at_T, place_T, mask=chosen_T)
    return stored + tl.sum(one_T, 0)


@triton.jit
def _write(best_ptr, count, k, out_ptr, RANKED: tl.constexpr):
    """The result: largest first, of equal ones the first, or in the order of their places; -inf for those that
    lack."""
    tl.debug_barrier()
    for first in range(0, k, 256):
        i_R = first + tl.arange(0, 256)
        there_R = i_R < count
        key_R = tl.load(best_ptr + i_R, mask=there_R, other=-0x7F800001, cache_modifier=".cg")  # of -inf
        place_R = tl.load(best_ptr + k + i_R, mask=there_R, other=0, cache_modifier=".cg")
        at_R = i_R
        if RANKED:
            before_R = tl.zeros([256], tl.int32)
            for other in range(0, count, 32):
                j_J = other + tl.arange(0, 32)
                key_J = tl.load(best_ptr + j_J, mask=j_J < count, other=LEAST_KEY, cache_modifier=".cg")
                equal_RJ = (key_J[None, :] == key_R[:, None]) & (j_J[None, :] < i_R[:, None])
                before_R += tl.sum(((key_J[None, :] > key_R[:, None]) | equal_RJ).to(tl.int32), 1)
            at_R = tl.where(there_R, before_R, i_R)
        value_R = (key_R ^ ((key_R >> 31) & FLIP)).to(tl.float32, bitcast=True).to(tl.float64)
        tl.store(out_ptr + at_R, value_R, mask=i_R < k)
        tl.store(out_ptr + k + at_R, place_R.to(tl.float64), mask=i_R < k)
    tl.store(out_ptr + 2 * k, float("inf"))
