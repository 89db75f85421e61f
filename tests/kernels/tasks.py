"""The tasks of the programs of Triton's tree attention, as tests see them."""
# pyright: reportArgumentType=false, reportCallIssue=false

import torch
import triton
import triton.language as tl

from kernels.tree_attention.triton_shares import task


@triton.jit
def _list(
    out_ptr, programs, starts_ptr, lengths_ptr, branches_ptr, R, W, window,
    WINDOWED: tl.constexpr, SPLIT: tl.constexpr, R2: tl.constexpr, GROUP: tl.constexpr, G: tl.constexpr,
    D2: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    tree, _, _, tile, _, g, split, shares, _, _, begin, end = task(
        program, programs, starts_ptr, lengths_ptr, branches_ptr, R, W, window,
        WINDOWED, SPLIT, R2, GROUP, G, D2, M, N,
    )  # fmt: skip
    values = tree, tile, g, split, shares, begin, end
    for i in tl.static_range(7):
        tl.store(out_ptr + program * 7 + i, values[i])


def tasks(trees, programs, window, split, heads, group, tile, block, device):
    """A (tree, tile, head, share, shares, first block, end of blocks) of each program that has something to do.

    Args:
        trees: of each its trunk's length, tokens and branch slots.
        heads: key/value heads, of 128.
        tile, block: rows and keys.
    """
    trunks, tokens, branches = (torch.tensor(x, dtype=torch.int32, device=device) for x in zip(*trees, strict=True))
    starts = torch.nn.functional.pad(tokens.cumsum(0, dtype=torch.int32), (1, 0))
    out = torch.empty(programs, 7, dtype=torch.int32, device=device)
    R, W = len(trees), -(-int(branches.max()) // 32) * 32
    _list[(programs,)](
        out, programs, starts, trunks, branches, R, W, window or 0, WINDOWED=window is not None, SPLIT=split,
        R2=1 if R == 1 else max(16, triton.next_power_of_2(R)), GROUP=group, G=heads, D2=128, M=tile, N=block,
    )  # fmt: skip
    return [tuple(row) for row in out.tolist() if row[0] < R]
