"""Groups of tokens in a pass that read the same state and so can be computed together."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.layout import NULL_STATE, DeltaPaths


@dataclass(frozen=True)
class Group:
    """Tokens whose blocks begin with one state, and the rows of their ancestors in these blocks.

    Args:
        tokens_N: int64, ascending, of the pass.
        rows_P: int64, the rows.
        within_AA: bool; element i, a row or then a token, has ancestor j in the block, or is j.
        base: the state.
        folds: pairs (i, the state in which the result of the i-th token is stored).
    """

    tokens_N: Tensor
    rows_P: Tensor
    within_AA: Tensor
    base: int
    folds: Sequence[tuple[int, int]]


def groups_of(paths: DeltaPaths) -> list[Group]:
    """The groups of a pass, those that make a state before those that read it; found once for a pass."""
    kept = vars(paths)
    if "_groups" not in kept:
        kept["_groups"] = _groups(paths)
    return kept["_groups"]


def _groups(paths: DeltaPaths) -> list[Group]:
    bases, folds = paths.bases_T.tolist(), paths.folds_T.tolist()
    lengths, every = paths.lengths_T.tolist(), paths.paths_TN.tolist()
    tokens: dict[tuple[int, int], list[int]] = {}  # by a state and the number of states that were in its place before
    versions = Counter[int]()
    for t, (base, fold) in enumerate(zip(bases, folds, strict=True)):
        tokens.setdefault((base, versions[base]), []).append(t)
        if fold != NULL_STATE:
            versions[fold] += 1
    found, device = [], paths.rows_T.device
    for (base, _), members in tokens.items():
        above: dict[int, list[int]] = {}  # the ancestors in the block of what is named as in `paths_TN`
        for t in members:
            path = every[t][: lengths[t]]
            above[-1 - t] = path
            for i, each in enumerate(path):
                if each in above:
                    break
                above[each] = path[i + 1 :]
        rows = [each for each in above if each >= 0]
        place = {each: i for i, each in enumerate([*rows, *(-1 - t for t in members)])}
        within_AA = torch.eye(len(place), dtype=torch.bool)
        pairs = [(place[each], place[other]) for each, path in above.items() for other in path]
        if pairs:
            within_AA[tuple(torch.tensor(pairs).T)] = True
        ends = [(i, folds[t]) for i, t in enumerate(members) if folds[t] != NULL_STATE]
        tokens_N, rows_P = (torch.tensor(x, dtype=torch.int64, device=device) for x in (members, rows))
        found.append(Group(tokens_N, rows_P, within_AA.to(device), base, ends))
    return found
