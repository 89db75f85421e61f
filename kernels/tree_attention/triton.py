"""Flash attention over token trees on a GPU: one kernel for prefill and decode, and one that merges splits of the keys.

A program takes a tile of M rows, one key/value head and one split of the keys. Rows are the queries of one tree times
the query heads that share the key/value head, so that a key is read once however many beams and heads look at it; what
tiles share they read side by side, from the L2 cache. Keys come in blocks of N: first the trunk, through its page
table, masked by length alone, then the branch slots, gathered and masked by ancestry bits::

              lo             hi   branch slots
    keys      [ n n n n n n n ]  [ n n ]         blocks of N, dealt out to the splits in order
    rows  M   row i: token first + i // group, query head g * group + i % group

Where tiles are few, keys are split over programs; each leaves its share of the output, normalised, with the logarithm
of the sum of its exponentials, by which the second kernel weighs the shares. Logarithms are to base 2 throughout.
Everything that changes from step to step is read from tensors, so that the launch can be part of a CUDA graph.

Of an int8 cache a row is D int8 and a bfloat16 (kernels/kv_int8.py): rows begin at even addresses only, so they are
fetched two bytes at a time.

Shapes besides those of `kernels.layout`: M rows of a tile, N keys of a block, H query heads, K splits.
"""
# pyright: reportArgumentType=false, reportCallIssue=false, reportReturnType=false, reportAttributeAccessIssue=false
# pyright: reportIndexIssue=false
# (what triton.jit takes and gives is no function to a type checker)

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.custom_ops import like, register
from kernels.gpu import INTERPRETED, Properties, cast, check_device, dot, properties, tanh
from kernels.layout import TreeLayout

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
MAX_HEAD_DIM = 256
MAX_SPLITS = 128
# Most programs on a multiprocessor, by rows of the tile: larger shares cost more.
AT_ONCE = {16: 3, 32: 3, 64: 2, 128: 1}
ROOM: dict[tuple, int] = {}  # as many as a multiprocessor has room for, by kernel
WORD = tl.constexpr(32)
LOG2_E = 1.4426950408889634


def tree_attention(
    q_THD: Tensor,
    k_GSD: Tensor,
    v_GSD: Tensor,
    layout: TreeLayout,
    scale: float,
    window: int | None,
    cap: float | None = None,
) -> Tensor:
    """See the front for arguments.

    Raises:
        ValueError: what the kernel cannot do: a dtype, a head size above 256, another device.
    """
    return _tree_attention(*operands(q_THD, k_GSD, v_GSD, layout), scale, window, cap)


def operands(q_THD: Tensor, k_GSD: Tensor, v_GSD: Tensor, layout: TreeLayout) -> tuple:
    """The arguments of the custom operator that come before scale and window."""
    trunk = layout.positions_T, layout.token_starts, layout.trunk_seen_T, layout.trunk_pages_RP
    branches = layout.branch_slots_RW, layout.branch_positions_RW, layout.ancestry_TC
    return q_THD, k_GSD, v_GSD, *trunk, *branches, layout.page_size


def _tree_attention(
    q_THD: Tensor,
    k_GSD: Tensor,
    v_GSD: Tensor,
    positions_T: Tensor,
    token_starts: Tensor,
    trunk_seen_T: Tensor,
    trunk_pages_RP: Tensor,
    branch_slots_RW: Tensor,
    branch_positions_RW: Tensor,
    ancestry_TC: Tensor,
    page_size: int,
    scale: float,
    window: int | None,
    cap: float | None = None,
) -> Tensor:
    _check(q_THD, k_GSD, v_GSD, token_starts)
    if q_THD.stride(2) != 1:
        q_THD = q_THD.contiguous()
    T, H, D = q_THD.shape
    G, (R, P), W = k_GSD.shape[0], trunk_pages_RP.shape, branch_slots_RW.shape[1]
    gpu = properties(q_THD.device)
    sizes = _sizes(T * H // G // R, D, q_THD.dtype, gpu.roomy)
    tiles = triton.cdiv(T * H // G, sizes["M"]) + R - 1  # the most that R trees can have, however tokens are spread
    constants = {
        "WINDOWED": window is not None, "CAPPED": cap is not None,
        "R2": 1 if R == 1 else max(16, triton.next_power_of_2(R)), "GROUP": H // G, "HEADS": H, "PAGE": page_size,
        "ROW": k_GSD.shape[2], "D": D, "D2": max(16, triton.next_power_of_2(D)), **sizes,
    }  # fmt: skip
    trunk = T, R, W, scale / cap if cap else scale * LOG2_E, (cap or 0.0) * LOG2_E, window or 0
    strides = q_THD.stride(0), q_THD.stride(1), k_GSD.stride(0), v_GSD.stride(0), *trunk_pages_RP.stride()
    tables = positions_T, token_starts, trunk_seen_T, trunk_pages_RP, branch_slots_RW, branch_positions_RW, ancestry_TC

    def arguments(shares: Tensor, logs: Tensor) -> tuple:
        return q_THD, k_GSD, v_GSD, shares, logs, *tables, *trunk, *strides

    most = triton.cdiv(P * page_size, sizes["N"]) + W // WORD.value
    at_once, work = AT_ONCE[sizes["M"]], (T * H // G, R, sizes["M"], G, most)
    splits = _splits(gpu.processors * at_once, *work)
    if splits > 1 and not INTERPRETED:
        key = (q_THD.device, q_THD.dtype, k_GSD.dtype, *constants.values())
        if key not in ROOM:
            ROOM[key] = _room(gpu, arguments(*torch.empty(2, 1, device=q_THD.device)), constants)
        splits = _splits(gpu.processors * min(at_once, ROOM[key]), *work)
    out_THD = torch.empty((T, H, D), dtype=q_THD.dtype, device=q_THD.device)
    shares_KTHD, logs_KTH = out_THD, out_THD
    if splits > 1:
        shares_KTHD = torch.empty((splits, T, H, D), dtype=torch.float32, device=q_THD.device)
        logs_KTH = torch.empty((splits, T, H), dtype=torch.float32, device=q_THD.device)
    _attend[tiles, splits, G](*arguments(shares_KTHD, logs_KTH), SPLIT=splits > 1, **constants)
    if splits > 1:
        K2 = triton.next_power_of_2(splits)
        _merge[(T * H,)](
            shares_KTHD, logs_KTH, out_THD, T * H, splits,
            D=D, D2=triton.next_power_of_2(D), K2=K2, K=min(K2, 16), num_warps=2,
        )  # fmt: skip
    return out_THD


def _room(gpu: Properties, arguments: tuple, constants: dict[str, int]) -> int:
    """How many programs of the kernel, which is compiled for this, a multiprocessor runs at once."""
    kernel = _attend.warmup(*arguments, grid=(1,), SPLIT=True, **constants)
    kernel._init_handles()
    return gpu.programs(kernel.n_regs, kernel.metadata.shared, constants["num_warps"])


def _splits(programs: int, rows: int, trees: int, tile: int, heads: int, most: int) -> int:
    """Into how many shares the keys are split, so that one wave of programs does it all.

    Args:
        programs: that the GPU runs at once.
        rows: of all trees, which are taken to have as many each.
        tile: rows of a program.
        heads: key/value heads.
        most: blocks of keys.
    """
    tiles = trees * triton.cdiv(triton.cdiv(rows, trees), tile)
    return max(1, min(programs // (tiles * heads), MAX_SPLITS, most))


def _check(q_THD: Tensor, k_GSD: Tensor, v_GSD: Tensor, token_starts: Tensor) -> None:
    """Refuse what the kernel cannot do."""
    D = q_THD.shape[-1]
    if q_THD.dtype not in DTYPES:
        raise ValueError(f"impl 'triton': expected float16, bfloat16 or float32, got {q_THD.dtype}")
    if D > MAX_HEAD_DIM:
        raise ValueError(f"impl 'triton': expected a head size of at most {MAX_HEAD_DIM}, got {D}")
    check_device(q_THD, k_GSD, v_GSD, token_starts)


def _sizes(rows: int, head: int, dtype: torch.dtype, roomy: bool) -> dict[str, int]:
    """The shape of a program, for about so many rows per tree.

    Stages: a page's number is loaded a step before its keys, which five stages of the pipeline turn into two blocks in
    flight. How many programs a multiprocessor has room for then is asked of the compiled kernel.
    """
    if dtype == torch.float32:  # each number is two in the registers of the products
        M = min(max(16, triton.next_power_of_2(rows)), 32 if head <= 64 else 16)
        return {"M": M, "N": 16, "num_warps": 4, "num_stages": 2}
    M = min(max(16, triton.next_power_of_2(rows)), 128 if head <= 128 else 32)
    N = 32 if M == 64 or head > 128 else 64
    return {"M": M, "N": N, "num_warps": 8 if M == 128 else 4, "num_stages": 5 if roomy else 2}


@triton.jit(do_not_specialize=["T", "R", "window", "stride_pr", "stride_pp"])
def _attend(
    q_ptr, k_ptr, v_ptr, share_ptr, log_ptr,
    positions_ptr, starts_ptr, seen_ptr, pages_ptr, slots_ptr, places_ptr, words_ptr,
    T, R, W, scale, cap, window,
    stride_qt, stride_qh, stride_kg, stride_vg, stride_pr, stride_pp,
    WINDOWED: tl.constexpr, CAPPED: tl.constexpr, SPLIT: tl.constexpr, R2: tl.constexpr, GROUP: tl.constexpr,
    HEADS: tl.constexpr, PAGE: tl.constexpr, ROW: tl.constexpr, D: tl.constexpr, D2: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """One tile of rows, one split of the keys, one key/value head."""
    tile, split, g = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)

    # Tree r's tiles begin at starts[r] * GROUP // M + r: gaps, which return at once, instead of a running sum.
    tree = 0
    if R2 > 1:
        r_R = tl.arange(0, R2)
        begin_R = tl.load(starts_ptr + r_R, mask=r_R < R, other=0) * GROUP // M + r_R
        tree = tl.sum(((begin_R <= tile) & (r_R < R)).to(tl.int32)) - 1
    first = tl.load(starts_ptr + tree)
    rows = (tl.load(starts_ptr + tree + 1) - first) * GROUP
    row = (tile - first * GROUP // M - tree) * M
    if row >= rows:
        return
    row_M = row + tl.arange(0, M)
    real_M = row_M < rows
    t_M = first + row_M // GROUP
    head_M = g * GROUP + row_M % GROUP
    d_D = tl.arange(0, D2)
    q_MD = tl.load(
        q_ptr + t_M[:, None].to(tl.int64) * stride_qt + head_M[:, None] * stride_qh + d_D[None, :],
        mask=real_M[:, None] & (d_D < D)[None, :],
        other=0.0,
    )
    seen_M = tl.load(seen_ptr + t_M, mask=real_M, other=0)
    oldest_M = seen_M  # the first position inside the window
    lo, hi = 0, tl.max(seen_M)
    if WINDOWED:
        oldest_M = (tl.load(positions_ptr + t_M, mask=real_M, other=0) - window + 1).to(tl.int32)
        lo = tl.maximum(tl.min(tl.where(seen_M > 0, oldest_M, hi)), 0) // N * N

    words = 0  # up to the last one in which a row of this tile sees a slot
    AHEAD: tl.constexpr = 2048 // M  # words that are read at once
    for c in range(0, W // WORD, AHEAD):
        c_C = c + tl.arange(0, AHEAD)
        word_MC = tl.load(
            words_ptr + t_M[:, None] * (W // WORD) + c_C[None, :],
            mask=real_M[:, None] & (c_C < W // WORD)[None, :],
            other=0,
        )
        words = tl.maximum(words, tl.max(tl.where(word_MC != 0, c_C[None, :] + 1, 0)))

    trunk_blocks = tl.cdiv(tl.maximum(hi - lo, 0), N)
    blocks = trunk_blocks + words
    share = tl.cdiv(blocks, tl.num_programs(1))
    begin = split * share
    end = tl.minimum(begin + share, blocks)

    top_M = tl.full([M], float("-inf"), tl.float32)
    sum_M = tl.zeros([M], tl.float32)
    acc_MD = tl.zeros([M, D2], tl.float32)
    k_ptr += g * stride_kg
    v_ptr += g * stride_vg
    first_n, last_n = lo + begin * N, tl.minimum(lo + end * N, hi)
    if not WINDOWED:  # whole blocks, seen by all rows that see any key: without a mask of keys
        least = tl.min(tl.where(real_M & (seen_M > 0), seen_M, hi))
        whole = tl.maximum(tl.minimum(least // N * N, last_n), first_n)
        for n in range(first_n, whole, N):
            n_N = n + tl.arange(0, N)
            page_N = tl.load(pages_ptr + tree * stride_pr + (n_N // PAGE) * stride_pp)
            top_M, sum_M, acc_MD = _fold(
                q_MD, k_ptr, v_ptr, page_N.to(tl.int64) * PAGE + n_N % PAGE, n_N >= 0, seen_M[:, None] > 0, scale,
                cap, top_M, sum_M, acc_MD, CAPPED, False, ROW, D, D2,
            )  # fmt: skip
        first_n = whole
    for n in range(first_n, last_n, N):
        n_N = n + tl.arange(0, N)
        live_N = n_N < hi
        page_N = tl.load(pages_ptr + tree * stride_pr + (n_N // PAGE) * stride_pp, mask=live_N, other=0)
        visible_MN = n_N[None, :] < seen_M[:, None]
        if WINDOWED:
            visible_MN &= n_N[None, :] >= oldest_M[:, None]
        top_M, sum_M, acc_MD = _fold(
            q_MD, k_ptr, v_ptr, page_N.to(tl.int64) * PAGE + n_N % PAGE, live_N, visible_MN, scale,
            cap, top_M, sum_M, acc_MD, CAPPED, True, ROW, D, D2,
        )  # fmt: skip
    for w in range(tl.maximum(begin - trunk_blocks, 0), end - trunk_blocks):
        word_M = tl.load(words_ptr + t_M * (W // WORD) + w, mask=real_M, other=0)
        if tl.max((word_M != 0).to(tl.int32)) > 0:
            w_N = w * WORD + tl.arange(0, WORD)
            slot_N = tl.load(slots_ptr + tree * W + w_N)
            visible_MN = ((word_M[:, None] >> tl.arange(0, WORD)[None, :]) & 1) != 0
            if WINDOWED:
                visible_MN &= tl.load(places_ptr + tree * W + w_N)[None, :] >= oldest_M[:, None]
            top_M, sum_M, acc_MD = _fold(
                q_MD, k_ptr, v_ptr, slot_N, w_N < W, visible_MN, scale,
                cap, top_M, sum_M, acc_MD, CAPPED, True, ROW, D, D2,
            )  # fmt: skip

    some_M = sum_M != 0  # NaN counts
    sum_M = tl.where(some_M, sum_M, 1.0)
    out_MD = acc_MD / sum_M[:, None]
    line_M = t_M.to(tl.int64) * HEADS + head_M
    if SPLIT:
        line_M += split.to(tl.int64) * T * HEADS
        tl.store(log_ptr + line_M, top_M + tl.log2(sum_M), mask=real_M)  # -inf where nothing was seen
        real_M = real_M & some_M  # a share of nothing is not read
    tl.store(
        share_ptr + line_M[:, None] * D + d_D[None, :],
        cast(out_MD, share_ptr.dtype.element_ty),
        mask=real_M[:, None] & (d_D < D)[None, :],
    )


@triton.jit
def _fold(
    q_MD, k_ptr, v_ptr, slot_N, live_N, visible_MN, scale, cap, top_M, sum_M, acc_MD,
    CAPPED: tl.constexpr, MASKED: tl.constexpr, ROW: tl.constexpr, D: tl.constexpr, D2: tl.constexpr,
):  # fmt: skip
    """Take one more block of keys and values into the running maximum, sum and output; unless MASKED all are live."""
    d_D = tl.arange(0, D2)
    at_ND = slot_N[:, None] * ROW + d_D[None, :]
    if MASKED or D < D2:
        live_ND = (live_N if MASKED else slot_N >= 0)[:, None] & (d_D < D)[None, :]
        k_ND = tl.load(k_ptr + at_ND, mask=live_ND, other=0)
        v_ND = tl.load(v_ptr + at_ND, mask=live_ND, other=0)
    else:
        k_ND, v_ND = tl.load(k_ptr + at_ND), tl.load(v_ptr + at_ND)
    if ROW > D:  # int8, which all of q's dtypes hold; their scales may be too small for float16, the values are not
        k_ND = cast(k_ND.to(tl.float32), q_MD.dtype)
        v_ND = cast(v_ND.to(tl.float32) * _scales(v_ptr + slot_N * ROW + D, live_N)[:, None], q_MD.dtype)
    score_MN = dot(q_MD, tl.trans(k_ND)) * scale
    if ROW > D:
        score_MN *= _scales(k_ptr + slot_N * ROW + D, live_N)[None, :]
    if CAPPED:
        score_MN = tanh(score_MN) * cap
    score_MN = tl.where(visible_MN, score_MN, float("-inf"))
    new_M = tl.maximum(top_M, tl.max(score_MN, 1))
    base_M = tl.where(new_M == float("-inf"), 0.0, new_M)
    p_MN = tl.exp2(score_MN - base_M[:, None])
    fade_M = tl.exp2(top_M - base_M)
    return new_M, sum_M * fade_M + tl.sum(p_MN, 1), acc_MD * fade_M[:, None] + dot(cast(p_MN, v_ND.dtype), v_ND)


@triton.jit
def _scales(byte_N, live_N):
    """The bfloat16 at addresses of an int8 cache, as float32."""
    low_N = tl.load(byte_N, mask=live_N, other=0).to(tl.int32) & 255
    high_N = tl.load(byte_N + 1, mask=live_N, other=0).to(tl.int32)
    return ((high_N << 24) | (low_N << 16)).to(tl.float32, bitcast=True)


@triton.jit
def _merge(
    share_ptr, log_ptr, out_ptr, lines, splits,
    D: tl.constexpr, D2: tl.constexpr, K2: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """One row of the output from its shares, each weighed by its part of the sum of exponentials."""
    line = tl.program_id(0).to(tl.int64)
    k_K2 = tl.arange(0, K2)
    top = tl.max(tl.load(log_ptr + k_K2 * lines + line, mask=k_K2 < splits, other=float("-inf")))
    base = tl.where(top == float("-inf"), 0.0, top)
    d_D = tl.arange(0, D2)
    total = 0.0
    acc_D = tl.zeros([D2], tl.float32)
    for k in range(0, splits, K):
        k_K = k + tl.arange(0, K)
        log_K = tl.load(log_ptr + k_K * lines + line, mask=k_K < splits, other=float("-inf"))
        weight_K = tl.exp2(log_K - base)
        read_KD = (log_K != float("-inf"))[:, None] & (d_D < D)[None, :]
        share_KD = tl.load(share_ptr + (k_K[:, None] * lines + line) * D + d_D[None, :], mask=read_KD, other=0.0)
        total += tl.sum(weight_K)
        acc_D += tl.sum(weight_K[:, None] * share_KD, 0)
    out_D = acc_D / tl.where(total == 0, 1.0, total)
    tl.store(out_ptr + line * D + d_D, cast(out_D, out_ptr.dtype.element_ty), mask=d_D < D)


register("tree_attention_triton", _tree_attention, like)
