"""Chains of a pass: sequences of tokens, each of which passes its state to the next.

A GPU program walks a chain with its state in registers; different chains run in parallel::

    pass      0 1 2 3 4 5 6        3 is below 2, 6 is below 2 as well, 4 and 5 begin elsewhere
    chains    [0 1 2 3] [4] [5] [6]

Ancestors in a chain's block that are not part of the chain are walked again. A chain whose first block begins with a
state that another chain of the pass produces is of a later level than that chain.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import torch

from kernels.layout import NULL_STATE, DeltaPaths


def chains_of(
    parents: Sequence[int], lengths: Sequence[int], bases: Sequence[int], folds: Sequence[int]
) -> tuple[list[tuple[int, int]], tuple[int, ...]]:
    """The chains of a pass, as (first token, end), level by level, and how many chains each level has.

    Args:
        parents: the first element of each token's path; with the others as of `DeltaPaths`.
    """

    def goes_on(t: int) -> bool:
        """Whether the state before a token is what the token before it leaves."""
        if lengths[t]:
            return parents[t] == -t
        return folds[t - 1] != NULL_STATE and bases[t] == folds[t - 1]

    tokens = len(parents)
    starts = [t for t in range(tokens) if t == 0 or not goes_on(t)]
    levels: list[list[tuple[int, int]]] = []
    made: dict[int, int] = {}  # the first level that may read what the pass leaves in a state
    read: dict[int, int] = {}  # the first level that may write over what a state held
    for first, end in pairwise([*starts, tokens]):
        base, written = bases[first], {fold for fold in folds[first:end] if fold != NULL_STATE}
        level = max(made.get(base, 0), *(max(made.get(s, 0), read.get(s, 0)) for s in written), 0)
        read[base] = max(read.get(base, 0), level + 1)
        for state in written:
            made[state] = level + 1
        levels += [[] for _ in range(level + 1 - len(levels))]
        levels[level].append((first, end))
    return [chain for level in levels for chain in level], tuple(map(len, levels))


def with_chains(paths: DeltaPaths) -> DeltaPaths:
    """Paths with their chains; chains that were not planned are found here, which waits for a GPU."""
    if paths.chains_N2 is not None:
        return paths
    kept = vars(paths)
    if "_planned" not in kept:
        columns = (x.tolist() for x in (paths.paths_TN[:, 0], paths.lengths_T, paths.bases_T, paths.folds_T))
        chains, levels = chains_of(*columns)
        chains_N2 = torch.tensor(chains, dtype=torch.int64, device=paths.rows_T.device).view(-1, 2)
        kept["_planned"] = replace(paths, chains_N2=chains_N2, levels=levels)
    return kept["_planned"]
