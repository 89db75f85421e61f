"""Mixtures of experts on a GPU: rows sorted by expert on the device, in tiles of one expert each.

Four kernels: one chooses the experts of rows, one lists their tiles, one, launched twice, multiplies tiles by matrices
(like `kernels.linear.triton`, with the gates in the first launch), one sums the results. Shapes alone determine the
number of programs, and nothing waits for the device, so CUDA graphs can record it.

Shape legend: T tokens, X experts, C chosen ones of a token, P = T C places of rows sorted by expert, E width; M, N and
K rows, outputs and elements of x in a block. An entry is a token's number times C plus the rank of the choice.
"""
# pyright: reportArgumentType=false, reportCallIssue=false, reportReturnType=false, reportAttributeAccessIssue=false
# pyright: reportIndexIssue=false, reportGeneralTypeIssues=false
# (what triton.jit takes and gives is no function to a type checker)

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.experts.routing import SCORES, Routing
from kernels.experts.stacked import Stacked
from kernels.gpu import INTERPRETED, after_the_last, cast, check_device, counters, launch, properties
from kernels.linear import triton as products
from kernels.linear.codes import Codes, takes
from kernels.linear.triton import FLOATS, NUMBERS, finished, is_last_share, sum_of_shares, sums
from kernels.rows.triton import NUMBERS as FUNCTIONS
from kernels.rows.triton import activated, gated, sigmoid

ROWS = 16 if INTERPRETED.value else 1  # of a program: an interpreted program costs the same however many it has
ENTRIES = 512  # that a program sorts at once
BLOCK = 512  # elements of a row that a program adds up
UNEVEN = 2  # times the mean of rows of an expert that a tile has room for


def routed(
    x_TE: Tensor,
    logits_TX: Tensor,
    up: Stacked,
    down: Stacked,
    routing: Routing,
    function: str,
    bias_X: Tensor | None,
    shared_TE: Tensor | None,
    gate_T1: Tensor | None,
    factors_X: Tensor | None,
) -> Tensor:
    """See the front for arguments; five launches, and two of PyTorch's if weights multiply inputs."""
    check_device(x_TE, logits_TX, *(_codes(matrix).codes_OB for matrix in (up, down)))
    if x_TE.dtype not in products.DTYPES or not all(takes(x.kind, x.size, x.width) for x in map(_codes, (up, down))):
        raise ValueError(f"impl 'triton': it has no product of {x_TE.dtype} with groups of this size")
    x_TE, logits_TX = (x if x.stride(1) == 1 else x.contiguous() for x in (x_TE, logits_TX))
    (T, E), X, C, device = x_TE.shape, up.count, routing.chosen, x_TE.device
    experts_TC, weights_TC = chosen(logits_TX, bias_X, factors_X, routing)
    rows = min(T, triton.cdiv(UNEVEN * T * C, X))
    M, some = products.shape(_codes(up), rows)["M"], min(X, T * C)
    tiles = some + (T * C - some) // M
    order_P = torch.empty(T * C, dtype=torch.int32, device=device)
    tiles_3 = torch.empty(3, tiles, dtype=torch.int32, device=device)
    launch(_sort, X)(experts_TC, order_P, tiles_3, T * C, tiles, X2=triton.next_power_of_2(X), M=M, ENTRIES=ENTRIES)
    read, each = x_TE, C  # rows, and how many entries in turn read one
    if routing.on_inputs:
        read, each = (x_TE.unsqueeze(1) * weights_TC.unsqueeze(2)).to(x_TE.dtype).flatten(0, 1), 1
        weights_TC = torch.ones_like(weights_TC)
    middle_PM = _multiply(read, up, order_P, tiles_3, rows, each, FUNCTIONS[function], up.outs != down.width)
    made_TCE = _multiply(middle_PM, down, order_P, tiles_3, rows, C, -1, False)
    out_TE = torch.empty(T, E, dtype=x_TE.dtype, device=device)
    shared = out_TE if shared_TE is None else shared_TE
    launch(_add_up, triton.cdiv(T, ROWS), triton.cdiv(E, BLOCK))(
        made_TCE, weights_TC, shared, shared if gate_T1 is None else gate_T1, out_TE, T,
        E=E, C=C, SHARED=shared_TE is not None, GATED=gate_T1 is not None, ROWS=ROWS, BLOCK=BLOCK,
    )  # fmt: skip
    return out_TE


def chosen(
    logits_TX: Tensor, bias_X: Tensor | None, factors_X: Tensor | None, routing: Routing
) -> tuple[Tensor, Tensor]:
    """The experts of tokens, int32, and their weights, as `kernels.experts.routing.choose` defines them."""
    (T, X), C, device = logits_TX.shape, routing.chosen, logits_TX.device
    experts_TC = torch.empty(T, C, dtype=torch.int32, device=device)
    weights_TC = torch.empty(T, C, dtype=torch.float32, device=device)
    X2, (bias, factors) = triton.next_power_of_2(X), (logits_TX if x is None else x for x in (bias_X, factors_X))
    launch(_choose, triton.cdiv(T, ROWS))(
        logits_TX, bias, factors, experts_TC, weights_TC, T, logits_TX.stride(0), routing.epsilon, routing.scale,
        2 * routing.jitter, X=X, X2=X2, C=C, C2=triton.next_power_of_2(C), SCORES=SCORES.index(routing.scores),
        NORMALIZED=routing.normalized, BIASED=bias_X is not None, FACTORS=factors_X is not None, ROWS=ROWS, num_warps=1,
        G=routing.groups, G2=triton.next_power_of_2(routing.groups), KEPT=routing.kept, BEST=routing.best,
    )  # fmt: skip
    return experts_TC, weights_TC


def _codes(matrix: Stacked) -> Codes:
    return matrix.table if isinstance(matrix.table, Codes) else products.whole(matrix.table)


def _multiply(
    x: Tensor, matrix: Stacked, order_P: Tensor, tiles_3: Tensor, rows: int, chosen: int, function: int, gated: bool
) -> Tensor:
    """Products of tiles: of tokens, a function of them, or of gates and what they let through, in sorted order; or
    (function -1) of such rows, by entries."""
    codes, floats = _codes(matrix), isinstance(matrix.table, Tensor)
    P, tiles, outs = len(order_P), tiles_3.shape[1], matrix.outs
    out = torch.empty(P, outs // 2 if gated else outs, dtype=x.dtype, device=x.device)
    sizes = products.shape(codes, rows)
    grid = tiles, triton.cdiv(outs, sizes["N"])
    blocks = triton.cdiv(codes.width, sizes["K"])
    splits = products.split_count(properties(x.device).processors, grid[0] * grid[1], blocks)
    parts = torch.empty(splits, P, outs, dtype=torch.float32, device=x.device) if splits > 1 else out
    zero, least, order, bias = codes.zero_GO, codes.least_GO, codes.order_I, matrix.bias
    launch(_product, *grid, splits)(
        x, order_P, tiles_3, codes.codes_OB, codes.scale_GO, codes.scale_GO if zero is None else zero,
        codes.scale_GO if least is None else least, codes.codes_OB if order is None else order,
        out if bias is None else bias, out, parts, counters(x.device), tiles, P, x.stride(0),
        C=chosen, ALL=codes.outs, OUTS=outs, WIDTH=codes.width, BYTES=codes.codes_OB.shape[1], GROUP=codes.size,
        KIND=FLOATS.value if floats else NUMBERS[codes.kind], FUNCTION=function, ZEROS=zero is not None,
        LEAST=least is not None, ORDERED=order is not None, BIAS=bias is not None, SPLIT=splits > 1, GATED=gated,
        **sizes,
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["T"])
def _choose(
    logits_ptr, bias_ptr, factors_ptr, experts_ptr, weights_ptr, T, stride_lt, epsilon, scale, far,
    X: tl.constexpr, X2: tl.constexpr, C: tl.constexpr, C2: tl.constexpr, SCORES: tl.constexpr,
    NORMALIZED: tl.constexpr, BIASED: tl.constexpr, FACTORS: tl.constexpr, ROWS: tl.constexpr,
    G: tl.constexpr = 1, G2: tl.constexpr = 1, KEPT: tl.constexpr = 1, BEST: tl.constexpr = 1,
    EARLY: tl.constexpr = False,
):  # fmt: skip
    """The experts of some tokens and their weights, as `kernels.experts.routing.choose` defines them."""
    after_the_last(EARLY)
    t_R = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    x_X, c_C = tl.arange(0, X2)[None, :], tl.arange(0, C2)[None, :]
    real_RX = (t_R < T)[:, None] & (x_X < X)
    logits_RX = tl.load(logits_ptr + t_R[:, None] * stride_lt + x_X, mask=real_RX, other=0.0).to(tl.float32)
    logits_RX = tl.where(x_X < X, logits_RX, float("-inf"))
    scores_RX = sigmoid(logits_RX) if SCORES == 2 else logits_RX
    if SCORES == 0 and BIASED:
        scores_RX = tl.exp(logits_RX - _top(logits_RX))
        scores_RX /= tl.sum(scores_RX, 1)[:, None]
    wanted_RX = scores_RX
    if BIASED:
        wanted_RX += tl.load(bias_ptr + x_X, mask=x_X < X, other=0.0)
    wanted_RX = tl.where(wanted_RX == wanted_RX, wanted_RX, float("inf"))  # NaN comes first, and no expert twice
    left_RX = (x_X < X) & (t_R >= 0)[:, None]
    if G > 1:
        left_RX &= _in_groups(tl.where(x_X < X, wanted_RX, float("-inf")), X, X2, G, G2, KEPT, BEST)
    experts_RC = tl.zeros([ROWS, C2], tl.int32)
    found_RC = tl.full([ROWS, C2], float("-inf"), tl.float32)
    for c in range(0, C):
        most_R1 = tl.max(tl.where(left_RX, wanted_RX, float("-inf")), 1)[:, None]
        best_R1 = tl.min(tl.where(left_RX & (wanted_RX == most_R1), x_X, X2), 1)[:, None]
        if SCORES == 3:  # sparsemixer
            is_far_RX = most_R1 - logits_RX > far * tl.maximum(tl.abs(logits_RX), most_R1)
            near_RX = left_RX & (is_far_RX == 0)
            score_R1 = 1 / tl.sum(tl.where(near_RX, tl.exp(logits_RX - most_R1), 0.0), 1)[:, None]
        else:
            score_R1 = tl.sum(tl.where(x_X == best_R1, scores_RX, 0.0), 1)[:, None]
        experts_RC = tl.where(c_C == c, best_R1, experts_RC)
        found_RC = tl.where(c_C == c, score_R1, found_RC)
        left_RX &= x_X != best_R1
    if SCORES == 0 and not BIASED:
        top_R1 = _top(logits_RX)
        weights_RC = tl.exp(found_RC - top_R1) / tl.sum(tl.exp(logits_RX - top_R1), 1)[:, None]
    elif SCORES == 1:
        weights_RC = tl.exp(found_RC - _top(found_RC))
        weights_RC /= tl.sum(weights_RC, 1)[:, None]
    elif SCORES == 4:
        weights_RC = tl.where(c_C < C, sigmoid(found_RC), 0.0)
    else:
        weights_RC = tl.where(c_C < C, found_RC, 0.0)
    if NORMALIZED:
        weights_RC /= tl.sum(weights_RC, 1)[:, None] + epsilon
    real_RC, at_RC = (t_R < T)[:, None] & (c_C < C), t_R[:, None] * C + c_C
    if FACTORS:
        weights_RC *= tl.load(factors_ptr + experts_RC, mask=real_RC, other=0.0)
    tl.store(experts_ptr + at_RC, experts_RC, mask=real_RC)
    tl.store(weights_ptr + at_RC, weights_RC * scale, mask=real_RC)


@triton.jit
def _in_groups(
    wanted_RX,
    X: tl.constexpr, X2: tl.constexpr, G: tl.constexpr, G2: tl.constexpr, KEPT: tl.constexpr, BEST: tl.constexpr,
):  # fmt: skip
    """Whether experts are in the best groups, of equals the lower numbers."""
    g_G, x_X = tl.arange(0, G2), tl.arange(0, X2)
    own_GX = x_X[None, :] // (X // G) == g_G[:, None]
    wanted_RGX = tl.where(own_GX[None, :, :], wanted_RX[:, None, :], float("-inf"))
    good_RG = tl.zeros([wanted_RX.shape[0], G2], tl.float32)
    for _ in range(BEST):
        most_RG = tl.max(wanted_RGX, 2)
        good_RG += most_RG
        best_RG = tl.min(tl.where(wanted_RGX == most_RG[:, :, None], x_X[None, None, :], X2), 2)
        wanted_RGX = tl.where(x_X[None, None, :] == best_RG[:, :, None], float("-inf"), wanted_RGX)
    good_RG = tl.where(good_RG == good_RG, good_RG, float("inf"))
    left_RG = (g_G < G)[None, :] & (good_RG == good_RG)
    kept_RG = left_RG & (g_G < 0)[None, :]
    for _ in range(KEPT):
        most_R1 = tl.max(tl.where(left_RG, good_RG, float("-inf")), 1)[:, None]
        best_R1 = tl.min(tl.where(left_RG & (good_RG == most_R1), g_G[None, :], G2), 1)[:, None]
        kept_RG |= g_G[None, :] == best_R1
        left_RG &= g_G[None, :] != best_R1
    return tl.max((kept_RG[:, :, None] & own_GX[None, :, :]).to(tl.int32), 1) > 0


@triton.jit
def _top(x_RN):
    """The largest of each row; 0 where all are -inf."""
    top_R = tl.max(x_RN, 1)
    return tl.where(top_R == float("-inf"), 0.0, top_R)[:, None]


@triton.jit(do_not_specialize=["entries", "tiles"])
def _sort(
    experts_ptr, order_ptr, tiles_ptr, entries, tiles,
    X2: tl.constexpr, M: tl.constexpr, ENTRIES: tl.constexpr, EARLY: tl.constexpr = False,
):  # fmt: skip
    """One expert: the entries that chose it, in order, and its tiles: the expert, the first place and the one after the
    last; -1 for an expert where there are fewer tiles than programs."""
    after_the_last(EARLY)
    own, x_X, i_B = tl.program_id(0), tl.arange(0, X2), tl.arange(0, ENTRIES)
    counts_X = tl.zeros([X2], tl.int32)
    for first in range(0, entries, ENTRIES):
        real_B = first + i_B < entries
        counts_X += tl.histogram(tl.load(experts_ptr + first + i_B, mask=real_B, other=0), X2, mask=real_B)
    tiles_X = (counts_X + M - 1) // M
    place, end = tl.sum(tl.where(x_X < own, counts_X, 0)), tl.sum(tl.where(x_X <= own, counts_X, 0))
    tile, last = tl.sum(tl.where(x_X < own, tiles_X, 0)), tl.sum(tl.where(x_X <= own, tiles_X, 0))
    for at in range(tile, last, X2):
        first_X = place + (at - tile + x_X) * M
        real_X = at + x_X < last
        tl.store(tiles_ptr + at + x_X, tl.zeros([X2], tl.int32) + own, mask=real_X)
        tl.store(tiles_ptr + tiles + at + x_X, first_X, mask=real_X)
        tl.store(tiles_ptr + 2 * tiles + at + x_X, tl.minimum(first_X + M, end), mask=real_X)
    if own == 0:
        for at in range(tl.sum(tiles_X), tiles, X2):
            tl.store(tiles_ptr + at + x_X, tl.full([X2], -1, tl.int32), mask=at + x_X < tiles)
    if place < end:
        for first in range(0, entries, ENTRIES):
            mine_B = tl.load(experts_ptr + first + i_B, mask=first + i_B < entries, other=-1) == own
            rank_B = tl.cumsum(mine_B.to(tl.int32), 0)
            tl.store(order_ptr + place + rank_B - 1, first + i_B, mask=mine_B)
            place += tl.sum(mine_B.to(tl.int32))


@triton.jit(do_not_specialize=["tiles", "P"])
def _product(
    x_ptr, order_ptr, tiles_ptr, codes_ptr, scale_ptr, zero_ptr, least_ptr, columns_ptr, bias_ptr, out_ptr, part_ptr,
    count_ptr, tiles, P, stride_xt,
    C: tl.constexpr, ALL: tl.constexpr, OUTS: tl.constexpr, WIDTH: tl.constexpr, BYTES: tl.constexpr,
    GROUP: tl.constexpr, KIND: tl.constexpr, FUNCTION: tl.constexpr, ZEROS: tl.constexpr, LEAST: tl.constexpr,
    ORDERED: tl.constexpr, BIAS: tl.constexpr, SPLIT: tl.constexpr, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
    GATED: tl.constexpr = True, EARLY: tl.constexpr = False,
):  # fmt: skip
    """A tile, N outputs, one share of the width. Tiles of an expert are neighbours, so that they find its matrix in the
    second level of cache. Gates and what they let through take turns, so that each thread has both of a pair."""
    after_the_last(EARLY)
    expert = tl.load(tiles_ptr + tl.program_id(0))
    if expert < 0:
        return
    p_M = tl.load(tiles_ptr + tiles + tl.program_id(0)) + tl.arange(0, M)
    real_M = p_M < tl.load(tiles_ptr + 2 * tiles + tl.program_id(0))
    entry_M = tl.load(order_ptr + p_M, mask=real_M, other=0)
    j_N = tl.program_id(1) * N + tl.arange(0, N)
    real_N, n_N = j_N < OUTS, expert * OUTS + j_N
    x_M, out_M = p_M, entry_M
    if FUNCTION >= 0:
        x_M, out_M = entry_M // C, p_M
        if GATED:
            n_N = expert * OUTS + j_N // 2 + j_N % 2 * (OUTS // 2)
    share = tl.cdiv((WIDTH + K - 1) // K, tl.num_programs(2))
    acc_MN = sums(
        x_ptr, x_ptr + x_M.to(tl.int64) * stride_xt, codes_ptr + n_N.to(tl.int64) * BYTES,
        (scale_ptr, zero_ptr, least_ptr), columns_ptr, n_N, real_M, real_N, tl.program_id(2) * share, share,
        ALL, WIDTH, GROUP, KIND, ZEROS, LEAST, ORDERED, M, N, K,
    )  # fmt: skip
    real_MN = real_M[:, None] & real_N[None, :]
    at_MN = p_M[:, None].to(tl.int64) * OUTS + j_N[None, :]
    last = True
    if SPLIT:
        tile = tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
        last = is_last_share(acc_MN, part_ptr, count_ptr + tile, at_MN, real_MN, P * OUTS)
    if last:
        if SPLIT:
            acc_MN = sum_of_shares(part_ptr, at_MN, real_MN, P * OUTS, M, N)
        SCALED: tl.constexpr = GROUP >= WIDTH and KIND != FLOATS and not LEAST
        acc_MN = finished(acc_MN, scale_ptr, bias_ptr, n_N, real_N, SCALED, BIAS)
        dtype: tl.constexpr = out_ptr.dtype.element_ty
        if FUNCTION < 0 or not GATED:
            if FUNCTION >= 0:
                acc_MN = activated(cast(acc_MN, dtype).to(tl.float32), FUNCTION)
            out_ptrs = out_ptr + out_M[:, None].to(tl.int64) * OUTS + j_N[None, :]
            tl.store(out_ptrs, cast(acc_MN, dtype), mask=real_MN)
        else:
            gate_MH, up_MH = tl.split(tl.reshape(cast(acc_MN, dtype).to(tl.float32), [M, N // 2, 2]))
            j_H = tl.program_id(1) * (N // 2) + tl.arange(0, N // 2)
            out_ptrs = out_ptr + out_M[:, None].to(tl.int64) * (OUTS // 2) + j_H[None, :]
            real_MH = real_M[:, None] & (j_H < OUTS // 2)[None, :]
            tl.store(out_ptrs, gated(gate_MH, up_MH, FUNCTION, dtype), mask=real_MH)


@triton.jit(do_not_specialize=["T"])
def _add_up(
    made_ptr, weights_ptr, shared_ptr, gate_ptr, out_ptr, T,
    E: tl.constexpr, C: tl.constexpr, SHARED: tl.constexpr, GATED: tl.constexpr, ROWS: tl.constexpr,
    BLOCK: tl.constexpr, EARLY: tl.constexpr = False,
):  # fmt: skip
    """A block of the sums of some tokens, in the order of their choice, the shared expert last."""
    after_the_last(EARLY)
    t_R = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    e_B = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    real_RB = (t_R < T)[:, None] & (e_B < E)[None, :]
    sum_RB = tl.zeros([ROWS, BLOCK], tl.float32)
    for c in range(0, C):
        weight_R = tl.load(weights_ptr + t_R * C + c, mask=t_R < T, other=0.0)
        made_RB = tl.load(made_ptr + (t_R * C + c)[:, None] * E + e_B[None, :], mask=real_RB, other=0.0)
        sum_RB += weight_R[:, None] * made_RB.to(tl.float32)
    if SHARED:
        shared_RB = tl.load(shared_ptr + t_R[:, None] * E + e_B[None, :], mask=real_RB, other=0.0).to(tl.float32)
        if GATED:
            shared_RB *= sigmoid(tl.load(gate_ptr + t_R, mask=t_R < T, other=0.0).to(tl.float32))[:, None]
        sum_RB += shared_RB
    tl.store(out_ptr + t_R[:, None] * E + e_B[None, :], cast(sum_RB, out_ptr.dtype.element_ty), mask=real_RB)
