"""Multiplication of rows by quantised matrices in groups on a GPU: x keeps its dtype; codes are converted to it in
registers.

A program takes M rows, N outputs and a share of the width; the last program of a tile to arrive adds the sums of the
shares, in order. Codes are integers, or have few bits, so bfloat16 and float16 represent them exactly; each block of at
most one group is multiplied on matrix units into float32, and only then by its scale. A zero or a minimum multiplies
the sum of x over the block. So the matrix is never rounded.

With `COPPICE_SAME_BITS=on` a row's sums do not depend on the other rows: programs have a fixed size, and the matrix
alone determines the shares of the width; with many rows, one program computes all shares one after another. `floats`
multiplies float matrices in this way.

Shapes besides those of `kernels.linear.codes`: T rows, M, N and K rows, outputs and elements of x in a block.
"""
# pyright: reportArgumentType=false, reportCallIssue=false, reportReturnType=false, reportAttributeAccessIssue=false
# pyright: reportIndexIssue=false, reportGeneralTypeIssues=false
# (what triton.jit takes and gives is no function to a type checker)

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels import same_bits
from kernels.gpu import (
    INTERPRETED,
    after_the_last,
    cast,
    check_device,
    counters,
    dot,
    e4m3,
    last_of,
    launch,
    properties,
)
from kernels.linear.codes import BLOCK, HALF, Codes, takes

NUMBERS = {"int4": 4, "int8": 5, "float8": 6}
FLOATS = tl.constexpr(7)
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
MAX_SPLITS = 8
SAME_ROWS = {torch.float32: 32, torch.bfloat16: 64, torch.float16: 64}  # of a program, however many there are
WAVES = 2  # programs for each multiprocessor that splits of the width aim at
HALF_BLOCK = tl.constexpr(HALF)


def _halves(kind: str, exponent: int, one: int, less: int) -> tl.constexpr:
    """PTX that makes numbers of four bytes' halves, in pairs: `exponent` above a number's bits is a power of two plus
    the number, of which `less`, as a float of 16 bits, is left over.

    Lin, Tang et al., "AWQ", and Kim et al., "Who Says Elephants Can't Run", convert so.
    """
    lines = [f"mov.b32 e, {exponent * 0x01010101:#x};", f"mov.b32 one, {one * 0x10001:#x};"]
    lines += [f"mov.b32 less, {less * 0x10001:#x};", "shr.u32 high, $4, 4;"]
    lines += ["and.b32 low, $4, 0x0f0f0f0f;", "and.b32 high, high, 0x0f0f0f0f;"]
    for i, (half, bytes) in enumerate((h, b) for h in ("low", "high") for b in ("0x4140", "0x4342")):
        lines += [f"prmt.b32 pair, {half}, e, {bytes};", f"fma.rn.{kind} ${i}, pair, one, less;"]
    return tl.constexpr("\n".join(["{", ".reg .b32 low, high, e, one, less, pair;", *lines, "}"]))


WHOLE_BF16, LESS_BF16 = (_halves("bf16x2", 0x43, 0x3F80, less) for less in (0xC300, 0xC308))  # -128, -136
WHOLE_F16, LESS_F16 = (_halves("f16x2", 0x64, 0x3C00, less) for less in (0xE400, 0xE408))  # -1024, -1032


def linear(x: Tensor, matrix: Codes, bias: Tensor | None = None) -> Tensor:
    """x W^T + b.

    Args:
        x: [..., width], float16, bfloat16 or float32.
        matrix: on the same device.
        bias: [outs] or None, contiguous, in the dtype of x.

    Raises:
        ValueError: tensors that do not fit together, or that the kernel cannot reach.
    """
    check_device(x, matrix.codes_OB, matrix.scale_GO)
    if x.dtype not in DTYPES or x.shape[-1] != matrix.width:
        raise ValueError(f"x: expected floats of a width of {matrix.width}, got {list(x.shape)}, {x.dtype}")
    if bias is not None and (bias.shape != (matrix.outs,) or bias.dtype != x.dtype):
        raise ValueError(f"bias: expected {x.dtype} [{matrix.outs}], got {bias.dtype} {list(bias.shape)}")
    if not takes(matrix.kind, matrix.size, matrix.width):
        raise ValueError(f"matrix: groups of {matrix.size} {matrix.kind} in rows of {matrix.width} have no product")
    return _multiply(x, matrix, matrix.codes_OB, NUMBERS[matrix.kind], bias)


def floats(x: Tensor, matrix_OI: Tensor, bias: Tensor | None = None) -> Tensor:
    """x W^T + b of floats; a row does not depend on the rows beside it.

    Args:
        x: [..., width], float16, bfloat16 or float32.
        matrix_OI: in the dtype of x, contiguous, on the same device.
        bias: [outs] or None, contiguous, in the dtype of x.

    Raises:
        ValueError: tensors that the kernel cannot reach or multiply.
    """
    check_device(x, matrix_OI)
    width = matrix_OI.shape[1]
    if x.dtype not in DTYPES or matrix_OI.dtype != x.dtype or x.shape[-1] != width or not matrix_OI.is_contiguous():
        raise ValueError(
            f"expected a matrix in x's dtype, in order, of a width of {x.shape[-1]}, got {list(matrix_OI.shape)}"
        )
    return _multiply(x, whole(matrix_OI), matrix_OI, FLOATS.value, bias)


def whole(matrix_OI: Tensor) -> Codes:
    """Floats in the place of small numbers: one group a row, and no scales."""
    outs, width = matrix_OI.shape
    return Codes("int8", width, outs, width, matrix_OI, matrix_OI)


def _multiply(x: Tensor, matrix: Codes, table: Tensor, kind: int, bias: Tensor | None) -> Tensor:
    """x W^T + b of numbers in a table [outs, ...]."""
    x_TI = x.reshape(-1, matrix.width)
    x_TI = x_TI if x_TI.stride(1) == 1 else x_TI.contiguous()
    T, outs = len(x_TI), matrix.outs
    out = torch.empty(*x.shape[:-1], outs, dtype=x.dtype, device=x.device)
    same = same_bits.asked() or kind == FLOATS.value
    sizes = shape(matrix, SAME_ROWS[x.dtype] if same else T)
    grid = triton.cdiv(outs, sizes["N"]), triton.cdiv(T, sizes["M"])
    tiles, blocks = grid[0] * (1 if same else grid[1]), triton.cdiv(matrix.width, sizes["K"])
    splits, turns = split_count(properties(x.device).processors, tiles, blocks), 1
    if same and grid[1] > 1:
        splits, turns = 1, splits
    parts = torch.empty(splits, T, outs, dtype=torch.float32, device=x.device) if splits > 1 else out
    zero, least, order = matrix.zero_GO, matrix.least_GO, matrix.order_I
    launch(_product, *grid, splits)(
        x_TI, table, matrix.scale_GO, matrix.scale_GO if zero is None else zero,
        matrix.scale_GO if least is None else least,
        table if order is None else order, out if bias is None else bias, out, parts, counters(x.device),
        T, x_TI.stride(0),
        OUTS=outs, WIDTH=matrix.width, BYTES=table.shape[1], GROUP=matrix.size, KIND=kind,
        ZEROS=zero is not None, LEAST=least is not None, ORDERED=order is not None, BIAS=bias is not None,
        SPLIT=splits > 1, TURNS=turns, **sizes,
    )  # fmt: skip
    return out


def shape(matrix: Codes, rows: int) -> dict[str, int]:
    """The shape of a program, for so many rows: few are bound by memory, of which as much as fits is on its way."""
    M = min(max(16, triton.next_power_of_2(rows)), 64)
    K = BLOCK
    while matrix.kind != "int4" and matrix.size != matrix.width and matrix.size % K:
        K //= 2
    stages = 3 if M > 16 else 6 if matrix.codes_OB.itemsize < 4 else 4  # six of float32 take 100 KiB
    return {"M": M, "N": 128 if INTERPRETED else 64, "K": K, "num_warps": 4, "num_stages": stages}


def split_count(processors: int, tiles: int, blocks: int) -> int:
    """Into how many shares the width is split: of four blocks or more each."""
    return max(1, min(WAVES * processors // tiles, MAX_SPLITS, blocks // 4))


@triton.jit(do_not_specialize=["T"])
def _product(
    x_ptr, codes_ptr, scale_ptr, zero_ptr, least_ptr, order_ptr, bias_ptr, out_ptr, part_ptr, count_ptr,
    T, stride_xt,
    OUTS: tl.constexpr, WIDTH: tl.constexpr, BYTES: tl.constexpr, GROUP: tl.constexpr, KIND: tl.constexpr,
    ZEROS: tl.constexpr, LEAST: tl.constexpr, ORDERED: tl.constexpr, BIAS: tl.constexpr, SPLIT: tl.constexpr,
    TURNS: tl.constexpr, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, EARLY: tl.constexpr = False,
):  # fmt: skip
    """M rows, N outputs, one share of the width."""
    after_the_last(EARLY)
    n_N = tl.program_id(0) * N + tl.arange(0, N)
    t_M = tl.program_id(1) * M + tl.arange(0, M)
    real_N, real_M = n_N < OUTS, t_M < T
    x_ptrs = x_ptr + t_M.to(tl.int64) * stride_xt
    code_ptrs = codes_ptr + n_N.to(tl.int64) * BYTES
    share = tl.cdiv((WIDTH + K - 1) // K, tl.num_programs(2) * TURNS)
    tables = scale_ptr, zero_ptr, least_ptr
    acc_MN = tl.zeros([M, N], tl.float32)
    if TURNS > 1:
        for turn in range(0, TURNS):
            acc_MN += sums(
                x_ptr, x_ptrs, code_ptrs, tables, order_ptr, n_N, real_M, real_N, turn * share, share,
                OUTS, WIDTH, GROUP, KIND, ZEROS, LEAST, ORDERED, M, N, K,
            )  # fmt: skip
    else:
        acc_MN = sums(
            x_ptr, x_ptrs, code_ptrs, tables, order_ptr, n_N, real_M, real_N, tl.program_id(2) * share, share,
            OUTS, WIDTH, GROUP, KIND, ZEROS, LEAST, ORDERED, M, N, K,
        )  # fmt: skip

    real_MN = real_M[:, None] & real_N[None, :]
    at_MN = t_M[:, None].to(tl.int64) * OUTS + n_N[None, :]
    last = True
    if SPLIT:
        tile = tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
        last = is_last_share(acc_MN, part_ptr, count_ptr + tile, at_MN, real_MN, T * OUTS)
    if last:
        if SPLIT:
            acc_MN = sum_of_shares(part_ptr, at_MN, real_MN, T * OUTS, M, N)
        SCALED: tl.constexpr = GROUP >= WIDTH and KIND != FLOATS and not LEAST
        acc_MN = finished(acc_MN, scale_ptr, bias_ptr, n_N, real_N, SCALED, BIAS)
        tl.store(out_ptr + at_MN, cast(acc_MN, out_ptr.dtype.element_ty), mask=real_MN)


@triton.jit
def is_last_share(acc_MN, part_ptr, count_ptr, at_MN, real_MN, size):
    """Store the sums of a share of the width, in a plane of `size` numbers; whether all shares of a tile are stored."""
    tl.store(part_ptr + tl.program_id(2) * size + at_MN, acc_MN, mask=real_MN)
    return last_of(count_ptr, tl.num_programs(2))


@triton.jit
def sum_of_shares(part_ptr, at_MN, real_MN, size, M: tl.constexpr, N: tl.constexpr):
    """The sums of all shares, in their order."""
    acc_MN = tl.zeros([M, N], tl.float32)
    for split in range(0, tl.num_programs(2)):
        acc_MN += tl.load(part_ptr + split * size + at_MN, mask=real_MN, other=0.0, cache_modifier=".cg")
    return acc_MN


@triton.jit
def finished(acc_MN, scale_ptr, bias_ptr, n_N, real_N, SCALED: tl.constexpr, BIAS: tl.constexpr):
    """Sums times the scales of outputs, plus their biases."""
    if SCALED:
        acc_MN *= tl.load(scale_ptr + n_N, mask=real_N, other=0.0).to(tl.float32)[None, :]
    if BIAS:
        acc_MN += tl.load(bias_ptr + n_N, mask=real_N, other=0.0).to(tl.float32)[None, :]
    return acc_MN


@triton.jit
def sums(
    x_ptr, x_ptrs, code_ptrs, tables, order_ptr, n_N, real_M, real_N, begin, share,
    OUTS: tl.constexpr, WIDTH: tl.constexpr, GROUP: tl.constexpr, KIND: tl.constexpr,
    ZEROS: tl.constexpr, LEAST: tl.constexpr, ORDERED: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """The sums of one share of the width, of rows at `x_ptrs` and outputs n of a table; where a row is one group,
    without its scale."""
    end = tl.minimum(begin + share, (WIDTH + K - 1) // K)
    acc_MN = tl.zeros([M, N], tl.float32)
    low = _group(tables, n_N, real_N & (begin < end), begin * K, OUTS, WIDTH, GROUP, KIND, ZEROS, LEAST)
    high = low
    if KIND == 4:
        middle = begin * K + HALF_BLOCK
        high = _group(tables, n_N, real_N & (begin < end), middle, OUTS, WIDTH, GROUP, KIND, ZEROS, LEAST)
    AHEAD: tl.constexpr = 1 if M < 64 else 0  # turns; two groups of 64 rows' tiles would take all registers
    for step in range(begin, end):
        first = step * K
        later, live_N = first + AHEAD * K, real_N & (step + AHEAD < end)
        next_low = _group(tables, n_N, live_N, later, OUTS, WIDTH, GROUP, KIND, ZEROS, LEAST)
        next_high = next_low
        if KIND == 4:
            next_high = _group(tables, n_N, live_N, later + HALF_BLOCK, OUTS, WIDTH, GROUP, KIND, ZEROS, LEAST)
        if AHEAD == 0:
            low, high = next_low, next_high
        if KIND == 4:
            byte_NB = tl.load(
                code_ptrs[:, None] + (tl.arange(0, HALF_BLOCK) + first // 2)[None, :],
                mask=real_N[:, None],
                other=0,
            )
            low_NB, high_NB = _nibbles(byte_NB, x_ptr.dtype.element_ty, ZEROS or LEAST)
            acc_MN = _add(
                acc_MN, low_NB, x_ptrs, real_M, low, order_ptr, first,
                WIDTH, GROUP, ZEROS, LEAST, ORDERED, HALF_BLOCK,
            )  # fmt: skip
            acc_MN = _add(
                acc_MN, high_NB, x_ptrs, real_M, high, order_ptr, first + HALF_BLOCK,
                WIDTH, GROUP, ZEROS, LEAST, ORDERED, HALF_BLOCK,
            )  # fmt: skip
        elif KIND == FLOATS:
            i_K = tl.arange(0, K) + first
            real_NK = real_N[:, None] & (i_K < WIDTH)[None, :]
            number_NK = tl.load(code_ptrs[:, None] + i_K[None, :], mask=real_NK, other=0.0)
            acc_MN = _add(
                acc_MN, number_NK, x_ptrs, real_M, low, order_ptr, first, WIDTH, GROUP, ZEROS, LEAST, ORDERED, K
            )
        else:
            byte_NK = tl.load(code_ptrs[:, None] + (tl.arange(0, K) + first)[None, :], mask=real_N[:, None], other=0)
            number_NK = e4m3(byte_NK) if KIND == 6 else byte_NK.to(tl.int8, bitcast=True).to(tl.float32)
            acc_MN = _add(
                acc_MN, cast(number_NK, x_ptr.dtype.element_ty), x_ptrs, real_M, low, order_ptr, first,
                WIDTH, GROUP, ZEROS, LEAST, ORDERED, K,
            )  # fmt: skip
        low, high = next_low, next_high
    return acc_MN


@triton.jit
def _group(
    tables, n_N, live_N, first, OUTS: tl.constexpr, WIDTH: tl.constexpr, GROUP: tl.constexpr, KIND: tl.constexpr,
    ZEROS: tl.constexpr, LEAST: tl.constexpr,
):  # fmt: skip
    """Scales, zeros and minima of the group of element `first`, for a turn before they are needed: they are in no
    product of matrix units, so the compiler fetches nothing of them ahead."""
    scale_ptr, zero_ptr, least_ptr = tables
    scale_N = tl.zeros(n_N.shape, tl.float32)
    zero_N, least_N = scale_N, scale_N
    at_N = n_N
    if GROUP < WIDTH:
        at_N += tl.minimum(first, WIDTH - 1) // GROUP * OUTS
    if GROUP < WIDTH or LEAST:
        scale_N = tl.load(scale_ptr + at_N, mask=live_N, other=0.0).to(tl.float32)
    if ZEROS:
        zero_N = tl.load(zero_ptr + at_N, mask=live_N, other=0.0).to(tl.float32)
        if KIND == 5:
            zero_N -= 128.0
    if LEAST:
        least_N = tl.load(least_ptr + at_N, mask=live_N, other=0.0).to(tl.float32)
    return scale_N, zero_N, least_N


@triton.jit
def _nibbles(byte_NB, dtype: tl.constexpr, WHOLE: tl.constexpr):
    """The numbers in the low and high halves of bytes, exactly; 8 less of each unless WHOLE."""
    if INTERPRETED or dtype == tl.float32:
        less = 0.0 if WHOLE else 8.0
        low_NB, high_NB = (byte_NB & 15).to(tl.float32) - less, (byte_NB >> 4).to(tl.float32) - less
        return cast(low_NB, dtype), cast(high_NB, dtype)
    elif dtype == tl.bfloat16:
        return tl.inline_asm_elementwise(
            WHOLE_BF16 if WHOLE else LESS_BF16, "=r,=r,=r,=r,r", [byte_NB], (tl.bfloat16, tl.bfloat16), True, 4
        )
    else:
        return tl.inline_asm_elementwise(
            WHOLE_F16 if WHOLE else LESS_F16, "=r,=r,=r,=r,r", [byte_NB], (tl.float16, tl.float16), True, 4
        )


@triton.jit
def _add(
    acc_MN, number_NK, x_ptrs, real_M, group, order_ptr, first,
    WIDTH: tl.constexpr, GROUP: tl.constexpr,
    ZEROS: tl.constexpr, LEAST: tl.constexpr, ORDERED: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """Take one block into the sums. Past the end of a row x is 0."""
    scale_N, zero_N, least_N = group
    i_K = tl.arange(0, K) + first
    at_K = i_K
    if ORDERED:
        at_K = tl.load(order_ptr + i_K, mask=i_K < WIDTH, other=0)
    x_MK = tl.load(x_ptrs[:, None] + at_K[None, :], mask=real_M[:, None] & (i_K < WIDTH)[None, :], other=0.0)
    part_MN = dot(x_MK, tl.trans(number_NK))
    if ZEROS:
        part_MN -= tl.sum(x_MK.to(tl.float32), 1)[:, None] * zero_N[None, :]
    if GROUP < WIDTH or LEAST:
        part_MN *= scale_N[None, :]
    if LEAST:
        part_MN += tl.sum(x_MK.to(tl.float32), 1)[:, None] * least_N[None, :]
    return acc_MN + part_MN
