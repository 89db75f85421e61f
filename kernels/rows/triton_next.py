"""The nodes that follow the top sums of searches on a GPU: one launch for all searches of a pass.

Shapes besides those of `kernels.rows.next_nodes`: K sums of a search, C words of a node's ancestry.
"""
# pyright: reportArgumentType=false, reportCallIssue=false, reportReturnType=false, reportAttributeAccessIssue=false
# pyright: reportIndexIssue=false, reportGeneralTypeIssues=false
# (what triton.jit takes and gives is no function to a type checker)

from array import array
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.gpu import check_device, launch
from kernels.rows.checks import NextNodes

LINE = 8  # numbers of a search in the table
WORDS_AT_ONCE = 4096  # words of ancestry that a program takes of all sums
MOST_WORDS = 16  # of each


def next_nodes(
    numbers: Sequence[Tensor], wanted: Sequence[NextNodes], ancestry_TC: Tensor, vocab_size: int
) -> tuple[Tensor, Tensor, Tensor]:
    """See the front for arguments."""
    check_device(ancestry_TC, *numbers)
    ancestry_TC = ancestry_TC if ancestry_TC.stride(1) == 1 else ancestry_TC.contiguous()
    C, device, n = ancestry_TC.shape[1], ancestry_TC.device, sum(each.width for each in wanted)
    joined, starts = _joined(numbers)
    table = torch.frombuffer(_table(numbers, starts, wanted), dtype=torch.int32).to(device, non_blocking=True)
    sums_n = torch.empty(n, dtype=torch.float32, device=device)
    token_n = torch.empty(n, dtype=torch.int32, device=device)
    inherited_nC = torch.empty(n, C, dtype=torch.int32, device=device)
    K = triton.next_power_of_2(max(len(x) // 2 for x in numbers))
    words = max(1, min(MOST_WORDS, WORDS_AT_ONCE // K))
    launch(_next_nodes, len(wanted), max(1, triton.cdiv(C, words)))(
        joined, table, ancestry_TC, sums_n, token_n, inherited_nC, vocab_size, C, ancestry_TC.stride(0),
        LINE=LINE, K=K, WORDS=words,
    )  # fmt: skip
    return sums_n, token_n, inherited_nC


def _joined(numbers: Sequence[Tensor]) -> tuple[Tensor, list[int]]:
    """The numbers of all searches in one tensor, and where those of each begin. As a rule they are parts of one."""
    storage = numbers[0].untyped_storage()
    if any(x.untyped_storage().data_ptr() != storage.data_ptr() or not x.is_contiguous() for x in numbers):
        numbers = torch.cat(list(numbers)).split([len(x) for x in numbers])
        storage = numbers[0].untyped_storage()
    whole = numbers[0].as_strided((storage.nbytes() // numbers[0].itemsize,), (1,), 0)
    return whole, [x.storage_offset() for x in numbers]


def _table(numbers: Sequence[Tensor], starts: Sequence[int], wanted: Sequence[NextNodes]) -> array:
    """A line per search, then what lines point to: a search's rows' tokens, its ends and its live words."""
    lines, lists, node = array("i"), array("i"), 0
    first = LINE * len(wanted)
    for x, start, each in zip(numbers, starts, wanted, strict=True):
        at = first + len(lists)
        ends = at + len(each.parents)
        live = ends + len(each.ends)
        lines.extend([start, len(x) // 2, each.width, node, len(each.parents), at, ends, live])
        lists.extend([*each.parents, *sorted(each.ends), *each.live_C])
        node += each.width
    return lines + lists


@triton.jit(do_not_specialize=["V", "C", "stride_t"])
def _next_nodes(
    numbers_ptr, table_ptr, ancestry_ptr, sums_ptr, token_ptr, inherited_ptr, V, C, stride_t,
    LINE: tl.constexpr, K: tl.constexpr, WORDS: tl.constexpr,
):  # fmt: skip
    """A search, and some words of the ancestry of its nodes; the first programs store tokens and sums."""
    line_ptr = table_ptr + tl.program_id(0) * LINE
    numbers_ptr += tl.load(line_ptr)
    k, width, node, rows = (tl.load(line_ptr + 1), tl.load(line_ptr + 2), tl.load(line_ptr + 3), tl.load(line_ptr + 4))
    parents, ends, live = tl.load(line_ptr + 5), tl.load(line_ptr + 6), tl.load(line_ptr + 7)
    i_K = tl.arange(0, K)
    there_K = i_K < k
    place_K = tl.load(numbers_ptr + k + i_K, mask=there_K, other=0.0)
    most = (rows.to(tl.int64) * V - 1).to(tl.float64)
    place_K = tl.where(place_K >= 0, tl.minimum(place_K, most), 0.0).to(tl.int64)  # NaN is 0
    row_K = (place_K // V).to(tl.int32)
    token_K = (place_K % V).to(tl.int32)
    ended_K = tl.zeros([K], tl.int32)
    for end in range(ends, live):
        ended_K |= (token_K == tl.load(table_ptr + end)).to(tl.int32)
    go_K, stop_K = (there_K & (ended_K == 0)).to(tl.int32), (there_K & (ended_K != 0)).to(tl.int32)
    after_K = tl.sum(go_K, 0) + tl.cumsum(stop_K, 0) - 1
    rank_K = tl.where(ended_K != 0, after_K, tl.cumsum(go_K, 0) - 1)  # ended ones come last
    chosen_K = there_K & (rank_K < width)
    n_K = node + rank_K
    if tl.program_id(1) == 0:
        sum_K = tl.load(numbers_ptr + i_K, mask=there_K, other=0.0).to(tl.float32)
        tl.store(sums_ptr + n_K, sum_K, mask=chosen_K)
        tl.store(token_ptr + n_K, token_K, mask=chosen_K)
    parent_K = tl.load(table_ptr + parents + row_K, mask=chosen_K, other=0).to(tl.int64)
    c_W = tl.program_id(1) * WORDS + tl.arange(0, WORDS)
    real_KW = chosen_K[:, None] & (c_W < C)[None, :]
    live_W = tl.load(table_ptr + live + c_W, mask=c_W < C, other=0)
    word_KW = tl.load(ancestry_ptr + parent_K[:, None] * stride_t + c_W[None, :], mask=real_KW, other=0)
    tl.store(inherited_ptr + n_K[:, None].to(tl.int64) * C + c_W[None, :], word_KW & live_W[None, :], mask=real_KW)
