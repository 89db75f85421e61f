"""What algorithms share: the contract with the engine, the registry, exact top-k over a whole frontier."""

import dataclasses
import difflib
import math
from collections.abc import Generator, Sequence
from typing import Any

import torch
from torch import Tensor

from engine.errors import UsageError
from engine.requests import Evaluate, Output, Report, Search, SearchGenerator, SearchResult, Task
from engine.tree import TokenTree
from kernels.rows import at_least

__all__ = [
    "REGISTRY",
    "Evaluate",
    "Output",
    "Report",
    "Search",
    "SearchGenerator",
    "SearchResult",
    "Task",
    "best_candidates",
    "evaluate_best",
    "likely",
    "make_search",
    "register",
]

REGISTRY: dict[str, type] = {}
SHARED_PARAMS = (
    "beams",
    "length_penalty",
    "early_stopping",
    "num_return_sequences",
    "temperature",
    "top_k",
    "top_p",
    "seed",
)


def register(name: str):
    """Class decorator: make a configuration known under a name; its docstring's first line describes it."""

    def add(cls: type) -> type:
        REGISTRY[name] = cls
        return cls

    return add


def parameters(name: str) -> dict[str, str]:
    """A search's parameters as users write them -> its configuration's fields (own ones carry the search's name)."""
    return {
        f.name if f.name in SHARED_PARAMS else f"{name}_{f.name}": f.name for f in dataclasses.fields(REGISTRY[name])
    }


def make_search(name: str, params: dict[str, Any]) -> Search:
    """A configuration from user parameters (snake_case, as in batch lines).

    Raises:
        UsageError: unknown search, a parameter that this search does not have, a value out of range.
    """
    if not isinstance(name, str) or name not in REGISTRY:
        raise UsageError(f"search: expected one of {', '.join(REGISTRY)}, got {name!r}")
    known = parameters(name)
    for key in params:
        if key not in known:
            takers = [other for other in REGISTRY if key in parameters(other)]
            near = difflib.get_close_matches(key, known, 1)
            raise UsageError(
                f"{key}: the search {name!r} has no such parameter",
                remedy=f"searches that have it: {', '.join(takers)}"
                if takers
                else f"did you mean {near[0]}?"
                if near
                else f"it has: {', '.join(known) or 'none'}",
            )
    return REGISTRY[name](**{known[key]: value for key, value in params.items()})


def best_candidates(logp_NV: Tensor, scores: list[float], k: int) -> tuple[list[float], list[int], list[int]]:
    """The k best sums score + log-probability of a frontier, exactly: value descending, then row, then token.

    Args:
        logp_NV: float32 log-probabilities; -inf is never returned.
        scores: of the N rows, added in float32.
        k: how many; fewer are returned if fewer are possible.

    Returns:
        sums, rows, tokens.
    """
    return _ranked(logp_NV, scores, _leaders(logp_NV, scores, k).tolist())


def evaluate_best(
    tree: TokenTree, nodes: Sequence[int], scores: list[float], k: int
) -> Generator[Evaluate, Any, tuple[list[float], list[int], list[int]]]:
    """`best_candidates` of the nodes, evaluated: to be asked with `yield from`. One wait for the device."""
    answer = yield Evaluate(tree, nodes, lambda logp_NV: _leaders(logp_NV, scores, k))
    logp_NV, leaders = answer if isinstance(answer, tuple) else (answer, _leaders(answer, scores, k))
    return _ranked(logp_NV, scores, leaders.tolist())


def _leaders(logp_NV: Tensor, scores: list[float], k: int) -> Tensor:
    """k best sums in any order, their places in the flattened rows, and the best sum besides: float64 [2 * k + 1]."""
    N, V = logp_NV.shape
    scores_N = torch.tensor(scores, dtype=torch.float32).to(logp_NV.device, non_blocking=True)
    k = min(k, N * V)
    # The k best lie in the k blocks with the largest maxima, so most of the vocabulary is read once and never sorted.
    block = next((b for b in range(512, 15, -1) if V % b == 0), 0)
    if block and k < N * V // block:
        blocks_MB = logp_NV.view(-1, block)
        maxima_M = (blocks_MB.amax(-1).view(N, -1) + scores_N.unsqueeze(1)).view(-1)
        top, which_k = torch.topk(maxima_M, k + 1)
        which_k = which_k[:k]
        sums = (blocks_MB[which_k] + scores_N[which_k // (V // block)].unsqueeze(1)).view(-1)
        values, place = torch.topk(sums, min(k + 1, len(sums)))
        flat = which_k[place // block] * block + place % block
        rival = torch.cat([top[k:], values[k:]]).max()
    else:
        sums = (logp_NV + scores_N.unsqueeze(1)).view(-1)
        values, flat = torch.topk(sums, min(k + 1, len(sums)))
        rival = values[k] if len(values) > k else torch.full_like(values[0], float("-inf"))
    return torch.cat([values[:k].double(), flat[:k].double(), rival.double().view(1)])


def _ranked(logp_NV: Tensor, scores: list[float], packed: list[float]) -> tuple[list[float], list[int], list[int]]:
    """What `_leaders` found, in order."""
    V, k = logp_NV.shape[1], len(packed) // 2
    found = list(zip(packed[:k], packed[k : 2 * k], strict=True))
    if packed[-1] == packed[k - 1]:  # a tie across the border: which of the equals topk chose is not defined
        sums = (logp_NV + torch.tensor(scores, dtype=torch.float32, device=logp_NV.device).unsqueeze(1)).view(-1)
        flat = (sums >= packed[k - 1]).nonzero().view(-1)
        found = list(zip(sums[flat].tolist(), flat.tolist(), strict=True))
    found = sorted(((s, int(i)) for s, i in found if s != float("-inf")), key=lambda c: (-c[0], c[1]))[:k]
    return [s for s, _ in found], [i // V for _, i in found], [i % V for _, i in found]


def likely(logp_NV: Tensor, least: float) -> list[dict[int, float]]:
    """Of each row of log-probabilities, those of the tokens at least as probable as `least`, lower tokens first."""
    least = max(least, 1e-38)
    most = min(logp_NV.shape[1], int(1 / least))  # a row adds up to 1: there are no more
    return [
        {int(token): logp for logp, token in zip(logps, tokens, strict=True) if logp == logp}  # the rest is NaN
        for logps, tokens in at_least(logp_NV, math.log(least), most).tolist()
    ]
