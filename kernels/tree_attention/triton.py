"""Flash attention over token trees on a GPU: one kernel for prefill and decode.

A program takes a tile of M rows, one key/value head and a share of the keys. Rows are the queries of one tree times
the query heads that share the key/value head, so that a key is read once however many beams and heads look at it; what
tiles share they read side by side, from the L2 cache. Keys come in blocks of N: first the trunk, through its page
table, masked by length alone, then the branch slots, gathered and masked by ancestry bits. Tiles of a prompt take what
lies in consecutive pages a block at once, where the GPU has an engine for such copies (tensor descriptors)::

              lo             hi   branch slots
    keys      [ n n n n n n n ]  [ n n ]         blocks of N, dealt out to the shares of a tile in order
    rows  M   row i: token first + i // group, query head g * group + i % group

Where tiles are few, they are cut into shares of nearly as many blocks, whatever the lengths of their trees, so that
about as many are made as the GPU runs programs at once::

    programs  [ tree 0: head 0: share 0: tiles | share 1: tiles | head 1: ... ][ tree 1: ... ][ none ]

How many programs there are depends on shapes alone. What each of them does follows from the lengths of the trees, and a
small kernel lists it once for all layers of a pass that are alike (`triton_shares.tasks`). So everything that changes
from step to step is read from tensors, and the launches can be part of a CUDA graph. A program leaves its share of the
output, normalised, with the logarithm of the sum of its exponentials, by which shares are weighed. The last program of
a tile to arrive merges them, in the order of keys; where a few tiles have all programs, one program would read shares
for longer than a launch takes, and a second kernel of many programs does it. Logarithms are to base 2 throughout.

Of a cache of 8 bits (kernels/kv_kinds.py) elements become numbers of the queries' dtype in registers. Scores are
multiplied by the scales of keys, and weights by those of values; for float16, whose range they may leave, the values.

Keys that are the values (`unread`, latents) are loaded once. Their first R elements, which are no value, are a product
of their own: as one they would be padded to the next power of two.

Shapes besides those of `kernels.layout`: M rows of a tile, N keys of a block, H query heads, K shares, B rows.
"""
# pyright: reportArgumentType=false, reportCallIssue=false, reportReturnType=false, reportAttributeAccessIssue=false
# pyright: reportIndexIssue=false, reportGeneralTypeIssues=false
# (what triton.jit takes and gives is no function to a type checker)

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from kernels import same_bits
from kernels.gpu import (
    INTERPRETED,
    Properties,
    after_the_last,
    cast,
    check_device,
    counters,
    dot,
    last_of,
    launch,
    options,
    properties,
    raw,
    ready,
    tanh,
)
from kernels.kv_kinds import row_width
from kernels.layout import TreeLayout
from kernels.tracing import like, register
from kernels.tree_attention import triton_fixed
from kernels.tree_attention.triton_fold import biases, fold, weigh
from kernels.tree_attention.triton_shares import (
    LAST,
    LATER,
    WHOLE,
    WORD,
    Trees,
    merge,
    merged,
    store,
    task,
    tasks,
)

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
MAX_HEAD_DIM, MAX_HEAD_DIM_FLOAT32 = 512, 256
MAX_RANK, MAX_RANK_FLOAT32, MAX_ROTATED = 512, 128, 128  # of keys that are the values
LONG = 128  # rows of a prompt's tile, which has a multiprocessor for itself
WAVES = 4  # so many times the programs that run at once even out trees of all lengths by themselves
ROOM: dict[tuple, int] = {}  # how many programs a multiprocessor has room for, by kernel
ALONE = 1 << 16  # bytes that a program merges in less time than the launch of another kernel takes
LOG2_E = tl.constexpr(1.4426950408889634)


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
    unread: int = 0,
) -> Tensor:
    """See the front for arguments.

    Raises:
        ValueError: what the kernel cannot do: a dtype, a head or a latent above 512, another device.
    """
    made = vars(layout).setdefault("_tasks", {})
    return _run(q_THD, k_GSD, v_GSD, _trees(layout), made, scale, window, cap, sinks_H, slopes_H, unread)


def operands(q_THD: Tensor, k_GSD: Tensor, v_GSD: Tensor, layout: TreeLayout) -> tuple:
    """The arguments of the custom operator that come before scale and window."""
    *tensors, page_size = _trees(layout)
    return q_THD, k_GSD, v_GSD, tensors, page_size


def _trees(layout: TreeLayout) -> Trees:
    return Trees(*(getattr(layout, name) for name in Trees._fields))


def _tree_attention(
    q_THD: Tensor,
    k_GSD: Tensor,
    v_GSD: Tensor,
    trees: Sequence[Tensor],
    page_size: int,
    scale: float,
    window: int | None,
    cap: float | None = None,
    sinks_H: Tensor | None = None,
    slopes_H: Tensor | None = None,
    unread: int = 0,
) -> Tensor:
    return _run(q_THD, k_GSD, v_GSD, Trees(*trees, page_size), {}, scale, window, cap, sinks_H, slopes_H, unread)


def _run(
    q_THD: Tensor,
    k_GSD: Tensor,
    v_GSD: Tensor,
    trees: Trees,
    made: dict[tuple, Any],
    scale: float,
    window: int | None,
    cap: float | None,
    sinks_H: Tensor | None,
    slopes_H: Tensor | None,
    unread: int,
) -> Tensor:
    """Launch the kernels; `made` are the tasks of other layers."""
    _check(q_THD, k_GSD, v_GSD, trees.token_starts, unread)
    if q_THD.stride(2) != 1:
        q_THD = q_THD.contiguous()
    if same_bits.asked():
        return triton_fixed.run(q_THD, k_GSD, v_GSD, trees, made, scale, window, cap, sinks_H, slopes_H)
    T, H, D = q_THD.shape
    G, R, W = k_GSD.shape[0], len(trees.trunk_len_R), trees.branch_slots_RW.shape[1]
    gpu = properties(q_THD.device)
    rows = T * H // G // R
    of_heads = partial(_sizes, head=D, windowed=window is not None)
    sizes = (_latent_sizes if unread else of_heads)(rows, dtype=q_THD.dtype, roomy=gpu.roomy)
    M, N, D2, group = sizes["M"], sizes["N"], max(16, triton.next_power_of_2(D - unread)), H // G
    constants = {
        "WINDOWED": window is not None, "CAPPED": cap is not None, "GROUP": group, "HEADS": H, "PAGE": trees.page_size,
        "SCALE": row_width(0, k_GSD.dtype), "D": D, "D2": D2, "R": unread,
        "R2": max(16, triton.next_power_of_2(unread)) if unread else 0, **sizes,
    }  # fmt: skip
    k_GSD, v_GSD = raw(k_GSD), raw(v_GSD)
    blocks = None, None
    if gpu.bulk and M == LONG and not unread and window is None and D == D2 and k_GSD.dtype == q_THD.dtype:
        blocks = tuple(TensorDescriptor(x, [G * x.shape[1], D], [D, 1], [N, D]) for x in (k_GSD, v_GSD))
    plain = W, scale / cap if cap else scale * LOG2_E.value, (cap or 0.0) * LOG2_E.value, window or 0
    strides = q_THD.stride(0), q_THD.stride(1), k_GSD.stride(0), v_GSD.stride(0), *trees.trunk_pages_RP.stride()
    tables = trees.positions_T, trees.trunk_seen_T, trees.trunk_pages_RP
    tables += trees.branch_slots_RW, trees.branch_positions_RW, trees.ancestry_TC

    def arguments(task: Tensor, out: Tensor, shares: Tensor, logs: Tensor, counts: Tensor) -> tuple:
        given = q_THD, k_GSD, v_GSD, sinks_H, slopes_H, *blocks
        return *given, out, shares, logs, counts, task, *tables, *plain, *strides

    def room(split: int) -> int:
        if INTERPRETED:
            return 2
        slopes = None if slopes_H is None else slopes_H.dtype
        kinds = q_THD.dtype, k_GSD.dtype, blocks[0] is None, sinks_H is None, slopes
        key = (q_THD.device, *kinds, split, *constants.values())
        if key not in ROOM:
            share, log = torch.empty(2, 4, device=q_THD.device)  # both aligned, or another kernel is compiled for it
            counts = counters(q_THD.device)
            if (found := _room(gpu, arguments(counts, q_THD, share, log, counts), split, constants)) is None:
                return 2
            ROOM[key] = found
        return ROOM[key]

    programs, split = _grid(gpu.processors, room, T * group, R, G, M, D2)
    if (key := (programs, split, window, group, G, D2, M, N)) not in made:
        made[key] = tasks(trees, programs, split, window, GROUP=group, G=G, D2=D2, M=M, N=N)
    listed = made[key]
    out_THD = torch.empty((T, H, D), dtype=q_THD.dtype, device=q_THD.device)
    if split == WHOLE.value:
        launch(_attend, programs)(*arguments(listed.programs, *[out_THD] * 4), SPLIT=split, **constants)
        return out_THD
    shares = torch.empty((programs, M, D - unread), dtype=torch.float32, device=q_THD.device)
    logs = torch.empty((programs, M), dtype=torch.float32, device=q_THD.device)
    counts = counters(q_THD.device)
    launch(_attend, programs)(*arguments(listed.programs, out_THD, shares, logs, counts), SPLIT=split, **constants)
    if split == LATER.value:
        kept = {name: constants[name] for name in ("GROUP", "HEADS", "D", "D2", "M", "R")}
        launch(merge, T * H)(out_THD, shares, logs, listed.tokens, K=min(16, 4096 // D2), num_warps=2, **kept)
    return out_THD


def _room(gpu: Properties, arguments: tuple, split: int, constants: dict[str, int]) -> int | None:
    """How many programs of the kernel, which is compiled for this, a multiprocessor runs at once; None as long as a
    thread compiles it."""
    kernel = ready(_attend.warmup(*arguments, grid=(1,), SPLIT=split, **constants, **options(_attend)))
    if kernel is None:
        return None
    kernel._init_handles()
    return gpu.programs(kernel.n_regs, kernel.metadata.shared, constants["num_warps"])


def _grid(
    processors: int, room: Callable[[int], int], rows: int, trees: int, heads: int, tile: int, head: int
) -> tuple[int, int]:
    """How many programs there are, and whether and where shares of tiles are merged.

    Args:
        processors: of the GPU.
        room: how many programs of a kernel a processor has room for.
        rows: of all trees.
        heads: key/value heads.
        tile: rows of a program.
        head: the size of a head.
    """
    most = (triton.cdiv(rows, tile) + trees - 1) * heads  # tiles, however rows are spread
    even = trees * triton.cdiv(triton.cdiv(rows, trees), tile) * heads  # if they are spread evenly
    waves = WAVES if trees > 1 else 1
    if even >= waves * processors * (256 // tile):  # more than there can be room for
        return most, WHOLE.value
    split = LAST.value
    programs = processors * room(split)
    if programs // even * tile * head * 4 > ALONE:
        split = LATER.value
        programs = processors * room(split)
    return (most, WHOLE.value) if even >= waves * programs else (max(most, programs), split)


def _check(q_THD: Tensor, k_GSD: Tensor, v_GSD: Tensor, token_starts: Tensor, unread: int) -> None:
    """Refuse what the kernel cannot do."""
    D = q_THD.shape[-1]
    if q_THD.dtype not in DTYPES:
        raise ValueError(f"impl 'triton': expected float16, bfloat16 or float32, got {q_THD.dtype}")
    if unread and same_bits.asked():
        raise ValueError(f"impl 'triton': {same_bits.NAME}=on is not supported where keys are the values")
    if unread and (why := why_no_latents(D - unread, unread, q_THD.dtype)):
        raise ValueError(f"impl 'triton': {why}")
    if not unread and (why := why_not_heads(D, q_THD.dtype)):
        raise ValueError(f"impl 'triton': {why}")
    check_device(q_THD, k_GSD, v_GSD, token_starts)


def why_not_heads(head: int, dtype: torch.dtype) -> str | None:
    """Why the kernel cannot take heads of this size."""
    most = MAX_HEAD_DIM_FLOAT32 if dtype == torch.float32 else MAX_HEAD_DIM  # of which two parts would be in registers
    most, same = (min(most, same_bits.MOST_HEAD), f" with {same_bits.NAME}=on") if same_bits.asked() else (most, "")
    name = str(dtype).removeprefix("torch.")
    return f"expected heads of at most {most} elements in {name}{same}, got {head}" if head > most else None


def why_no_latents(rank: int, rotated: int, dtype: torch.dtype) -> str | None:
    """Why the kernel cannot take keys that are the values, of so many elements after those that are rotated."""
    most = MAX_RANK_FLOAT32 if dtype == torch.float32 else MAX_RANK  # of which two parts would be in registers
    if rank <= most and rotated <= MAX_ROTATED:
        return None
    name = str(dtype).removeprefix("torch.")
    return f"expected latents of at most {most} elements in {name} and {MAX_ROTATED} rotated, got {rank} and {rotated}"


def _sizes(rows: int, head: int, dtype: torch.dtype, roomy: bool, windowed: bool = False) -> dict[str, int]:
    """The shape of a program, for about so many rows per tree.

    Stages: a page's number is loaded a step before its keys, which five stages of the pipeline turn into two blocks in
    flight. How many programs a multiprocessor has room for then is asked of the compiled kernel.
    """
    if dtype == torch.float32:  # each number is two in the registers of the products
        M = min(max(16, triton.next_power_of_2(rows)), 32 if head <= 64 else 16)
        if head > 128:  # 4 warps spill three times as much, and two stages take 100 KiB
            return {"M": M, "N": 16, "num_warps": 8, "num_stages": 2 if roomy else 1}
        return {"M": M, "N": 16, "num_warps": 4, "num_stages": 2}
    if head > 256:  # 8 warps share the registers of the sums
        M = min(max(16, triton.next_power_of_2(rows)), 32)
        fits = roomy and not (windowed and M == 32)  # two blocks and the positions of a window do not fit on sm_80
        return {"M": M, "N": 32, "num_warps": 8, "num_stages": 5 if fits else 2}
    M = min(max(16, triton.next_power_of_2(rows)), 128 if head <= 128 else 32)
    N = 32 if M == 64 or head > 128 else 64
    return {"M": M, "N": N, "num_warps": 8 if M == 128 else 4, "num_stages": 5 if roomy else 2}


def _latent_sizes(rows: int, dtype: torch.dtype, roomy: bool) -> dict[str, int]:
    """The shape of a program whose keys are the values; 8 warps share the registers of its sums."""
    if dtype == torch.float32:
        return {"M": 16, "N": 16, "num_warps": 8, "num_stages": 2}
    M = min(max(16, triton.next_power_of_2(rows)), 32)
    return {"M": M, "N": 32, "num_warps": 8, "num_stages": 5 if roomy or M == 16 else 4}


@triton.jit(do_not_specialize=["window", "stride_pr", "stride_pp"])
def _attend(
    q_ptr, k_ptr, v_ptr, sinks_ptr, slopes_ptr, k_blocks, v_blocks, out_ptr, share_ptr, log_ptr, count_ptr, task_ptr,
    positions_ptr, seen_ptr, pages_ptr, slots_ptr, places_ptr, words_ptr, W, scale, cap, window,
    stride_qt, stride_qh, stride_kg, stride_vg, stride_pr, stride_pp,
    WINDOWED: tl.constexpr, CAPPED: tl.constexpr, SPLIT: tl.constexpr, GROUP: tl.constexpr, HEADS: tl.constexpr,
    PAGE: tl.constexpr, SCALE: tl.constexpr, D: tl.constexpr, D2: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    R: tl.constexpr = 0, R2: tl.constexpr = 0, TURN: tl.constexpr = 1, EARLY: tl.constexpr = False,
):  # fmt: skip
    """One tile of rows, one share of the keys, one key/value head; shares are merged TURN at a time."""
    after_the_last(EARLY)
    program = tl.program_id(0)
    tree, first, rows, tile, tiles, g, split, shares, block, last_block, first_w, last_w = task(task_ptr, program)
    if tree < 0:
        return
    g = g.to(tl.int64)
    row_M = tile * M + tl.arange(0, M)
    real_M = row_M < rows
    t_M = first + row_M // GROUP
    head_M = g * GROUP + row_M % GROUP
    d_D = tl.arange(0, D2)
    q_M = q_ptr + t_M.to(tl.int64) * stride_qt + head_M * stride_qh
    q_MD = tl.load(q_M[:, None] + (R + d_D)[None, :], mask=real_M[:, None] & (d_D < D - R)[None, :], other=0.0)
    q_MR = None
    if R:
        r_R = tl.arange(0, R2)
        q_MR = tl.load(q_M[:, None] + r_R[None, :], mask=real_M[:, None] & (r_R < R)[None, :], other=0.0)
    seen_M = tl.load(seen_ptr + t_M, mask=real_M, other=0)
    oldest_M = seen_M  # the first position inside the window
    hi = tl.max(seen_M)
    first_n, last_n = block * N, tl.minimum(last_block * N, hi)
    if WINDOWED:
        oldest_M = (tl.load(positions_ptr + t_M, mask=real_M, other=0) - window + 1).to(tl.int32)
        first_n = tl.maximum(first_n, tl.min(tl.where(seen_M > 0, oldest_M, hi)) // N * N)

    slope_M, place_M = None, None
    if slopes_ptr is not None:
        slope_M = tl.load(slopes_ptr + head_M, mask=real_M, other=0.0)
        place_M = tl.load(positions_ptr + t_M, mask=real_M, other=0).to(tl.int32)

    # The share's words, up to the last one in which a row of this tile sees a slot.
    words = 0
    AHEAD: tl.constexpr = 2048 // M  # words that are read at once
    for c in range(first_w, last_w, AHEAD):
        c_C = c + tl.arange(0, AHEAD)
        word_MC = tl.load(
            words_ptr + t_M[:, None] * (W // WORD) + c_C[None, :],
            mask=real_M[:, None] & (c_C < last_w)[None, :],
            other=0,
        )
        words = tl.maximum(words, tl.max(tl.where(word_MC != 0, c_C[None, :] + 1, 0)))

    top_M = tl.full([M], float("-inf"), tl.float32)
    sum_M = tl.zeros([M], tl.float32)
    if sinks_ptr is not None:  # noqa: SIM102 (known when it is compiled, unlike the next)
        if split == 0:
            top_M = tl.load(sinks_ptr + head_M, mask=real_M, other=0.0) * LOG2_E
            sum_M += 1.0
    acc_MD = tl.zeros([M, D2], tl.float32)
    far = stride_kg // (D + SCALE) * D  # from the elements of a head to their scales
    k_ptr += g * stride_kg
    v_ptr += g * stride_vg
    if not WINDOWED:  # whole blocks, seen by all rows that see any key: without a mask of keys
        least = tl.min(tl.where(real_M & (seen_M > 0), seen_M, hi))
        whole = tl.maximum(tl.minimum(least // N * N, last_n), first_n)
        if k_blocks is not None:  # of consecutive pages
            page, straight = _straight(pages_ptr + tree * stride_pr, stride_pp, whole, PAGE)
            at = (g * (stride_kg // D)).to(tl.int32) + page * PAGE
            straight = tl.maximum(straight // N * N, first_n)
            for n in range(first_n, straight, N):
                score_MN = dot(q_MD, tl.trans(k_blocks.load([at + n, 0]))) * scale
                if slopes_ptr is not None:
                    score_MN += biases(slope_M, place_M, n + tl.arange(0, N), scale)
                if CAPPED:
                    score_MN = tanh(score_MN) * cap
                score_MN = tl.where(seen_M[:, None] > 0, score_MN, float("-inf"))
                p_MN, fade_M, top_M, sum_M = weigh(score_MN, top_M, sum_M)
                v_ND = v_blocks.load([at + n, 0])
                acc_MD = acc_MD * fade_M[:, None] + dot(cast(p_MN, v_ND.dtype), v_ND)
            first_n = straight
        for n in range(first_n, whole, N):
            n_N = n + tl.arange(0, N)
            page_N = tl.load(pages_ptr + tree * stride_pr + (n_N // PAGE) * stride_pp)
            top_M, sum_M, acc_MD = fold(
                q_MD, k_ptr, v_ptr, page_N.to(tl.int64) * PAGE + n_N % PAGE, n_N >= 0, seen_M[:, None] > 0, scale,
                cap, top_M, sum_M, acc_MD, far, CAPPED, False, SCALE, D, D2, q_MR, R, R2,
                biases(slope_M, place_M, n_N, scale),
            )  # fmt: skip
        first_n = whole
    for n in range(first_n, last_n, N):
        n_N = n + tl.arange(0, N)
        live_N = n_N < hi
        page_N = tl.load(pages_ptr + tree * stride_pr + (n_N // PAGE) * stride_pp, mask=live_N, other=0)
        visible_MN = n_N[None, :] < seen_M[:, None]
        if WINDOWED:
            visible_MN &= n_N[None, :] >= oldest_M[:, None]
        top_M, sum_M, acc_MD = fold(
            q_MD, k_ptr, v_ptr, page_N.to(tl.int64) * PAGE + n_N % PAGE, live_N, visible_MN, scale,
            cap, top_M, sum_M, acc_MD, far, CAPPED, True, SCALE, D, D2, q_MR, R, R2,
            biases(slope_M, place_M, n_N, scale),
        )  # fmt: skip
    for w in range(first_w, words):
        word_M = tl.load(words_ptr + t_M * (W // WORD) + w, mask=real_M, other=0)
        w_N = w * WORD + tl.arange(0, WORD)  # a branch here would keep slots and keys from being fetched ahead
        slot_N = tl.load(slots_ptr + tree * W + w_N)
        visible_MN = ((word_M[:, None] >> tl.arange(0, WORD)[None, :]) & 1) != 0
        if WINDOWED:
            visible_MN &= tl.load(places_ptr + tree * W + w_N)[None, :] >= oldest_M[:, None]
        live_N = tl.max(visible_MN.to(tl.int32), 0) > 0  # others may never have been written
        bias_MN = None
        if slopes_ptr is not None:
            bias_MN = biases(slope_M, place_M, tl.load(places_ptr + tree * W + w_N), scale)
        top_M, sum_M, acc_MD = fold(
            q_MD, k_ptr, v_ptr, slot_N, live_N, visible_MN, scale,
            cap, top_M, sum_M, acc_MD, far, CAPPED, True, SCALE, D, D2, q_MR, R, R2, bias_MN,
        )  # fmt: skip

    sum_M = tl.where(sum_M != 0, sum_M, 1.0)  # NaN stays
    out_MD = acc_MD / sum_M[:, None]
    line_M = t_M.to(tl.int64) * HEADS + head_M
    store(out_ptr, line_M, real_M & (shares == 1), out_MD, D, D2, R)
    if SPLIT != WHOLE:  # noqa: SIM102 (known when it is compiled, unlike the next)
        if shares > 1:
            share_M = program.to(tl.int64) * M + tl.arange(0, M)
            tl.store(log_ptr + share_M, top_M + tl.log2(sum_M), mask=real_M)  # -inf where nothing was seen
            store(share_ptr, share_M, real_M, out_MD, D - R, D2)
            if SPLIT == LAST:
                head = program - split * tiles  # that has the first share
                if last_of(count_ptr + head, shares):
                    first_M = share_M - split * tiles * M
                    COLUMNS: tl.constexpr = min(D2, 128) if R else D2
                    for i in tl.static_range(D2 // COLUMNS):
                        part_MD = merged(
                            share_ptr, log_ptr, first_M, real_M, tiles * M, shares, D - R, COLUMNS, TURN, i * COLUMNS
                        )
                        store(out_ptr, line_M, real_M, part_MD, D, COLUMNS, R + i * COLUMNS)


@triton.jit
def _straight(pages_ptr, stride, keys, PAGE: tl.constexpr):
    """The first page of a trunk, and how many of its first keys lie in that page and those right after it."""
    first, pages = tl.load(pages_ptr, mask=keys > 0, other=0), (keys + PAGE - 1) // PAGE
    run = pages
    for p in range(0, pages, 256):
        p_P = p + tl.arange(0, 256)
        page_P = tl.load(pages_ptr + p_P * stride, mask=p_P < pages, other=0)
        run = tl.minimum(run, tl.min(tl.where((p_P < pages) & (page_P != first + p_P), p_P, pages)))
    return first, tl.minimum(run * PAGE, keys)


register("tree_attention_triton", _tree_attention, like)
