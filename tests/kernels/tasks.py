"""The tasks of the programs of Triton's tree attention, as tests see them."""

import torch

from kernels.tree_attention import triton_shares


def tasks(trees, programs, window, split, heads, group, tile, block, device):
    """A (tree, tile, head, share, shares, first block, its end, first word, its end) of each program that has something
    to do; and the records of tokens, if their shares are merged later.

    Args:
        trees: of each its trunk's length, tokens and branch slots.
        heads: key/value heads, of 128.
        tile, block: rows and keys.
    """
    trunks, tokens, branches = (torch.tensor(x, dtype=torch.int32, device=device) for x in zip(*trees, strict=True))
    starts = torch.nn.functional.pad(tokens.cumsum(0, dtype=torch.int32), (1, 0))
    T, table = torch.empty(int(starts[-1])), torch.empty(len(trees), -(-int(branches.max()) // 32) * 32)
    listed = triton_shares.tasks(
        triton_shares.Trees(T, starts, T, table, trunks, branches, table, table, T, 16),
        programs, split, window, GROUP=group, G=heads, D2=128, M=tile, N=block,
    )  # fmt: skip
    found = []
    for row in listed.programs.tolist():
        tree, first, rows, index, tiles, head, share, shares, *keys = row
        if tree >= 0:
            assert (first, rows) == (int(starts[tree]), trees[tree][1] * group) and tiles == -(-rows // tile)
            found.append((tree, index, head, share, shares, *keys))
    return found, None if listed.tokens is None else listed.tokens.tolist()
