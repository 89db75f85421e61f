"""The top sums, of rows, of entries and of parts; log-probabilities of few tokens; searches that use both."""

import math
import random
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from engine import Engine
from engine.contract.top_sums import Next, TopSums, find_top_sums, found_in_entries, merged
from search.base import Evaluate

MODEL = Path(__file__).parents[2] / "golden/llama/plain"
EOS = 2


def brute_force(rows_NV, best):
    sums_M = (rows_NV + torch.tensor(best.sums).unsqueeze(1)).view(-1)
    order = sorted((i for i, x in enumerate(sums_M.tolist()) if x > -math.inf), key=lambda i: (-sums_M[i], i))
    return sums_M[order[: best.k]].tolist(), order[: best.k]


def lists(found):
    sums, places = found.tolist()
    return sums, [int(place) for place in places]


@pytest.mark.parametrize("seed", range(30))
def test_entries_and_parts_give_what_the_rows_give(seed):
    """Sums of few different values, so that many tie, also at the border."""
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    N, V, k = rng.randint(1, 9), rng.choice((3, 40, 300)), rng.choice((1, 4, 20, 5000))
    rows_NV = torch.randn(N, V, generator=generator).mul(2).round()
    rows_NV[torch.rand(N, V, generator=generator) < rng.choice((0.1, 0.9))] = -math.inf
    best = TopSums([float(rng.randint(-3, 3)) for _ in range(N)], k)
    expected = brute_force(rows_NV, best)
    assert lists(find_top_sums(rows_NV, None, best)) == expected
    row_M, token_M = (rows_NV > -math.inf).nonzero(as_tuple=True)
    assert lists(found_in_entries(rows_NV[row_M, token_M], row_M, token_M, best, V)) == expected
    cuts = sorted({0, N, *(rng.randrange(N) for _ in range(3))})
    parts = []
    for a, b in pairwise(cuts):
        part = find_top_sums(rows_NV[a:b], None, TopSums(best.sums[a:b], k))
        parts.append(part + torch.tensor([[0.0], [a * V]]))
    rng.shuffle(parts)
    assert lists(merged(parts, k)) == expected


@pytest.fixture(scope="module")
def engine():
    return Engine.load(MODEL, dtype="float32", kv_memory="8M", threads=1)


def test_a_wrong_best_is_a_fault_of_the_search(engine):
    from engine.cache.tree import TokenTree
    from engine.contract.checks import request_fault

    tree = TokenTree(engine.pool, [5, 6])
    nodes = [tree.root]
    assert not request_fault(Evaluate(tree, nodes, top_sums=TopSums([0.0], 3)), [tree])
    for best in (TopSums([], 3), TopSums([0.0], 0), ([0.0], 3)):
        assert "Evaluate.top_sums" in request_fault(Evaluate(tree, nodes, top_sums=best), [tree])
    for next in (5, Next(0, frozenset()), Next(1.5, frozenset()), Next(2, [3])):
        assert "Evaluate.next" in request_fault(Evaluate(tree, nodes, top_sums=TopSums([0.0], 2), next=next), [tree])
    both = Evaluate(tree, nodes, lambda rows, peaks: rows.view(-1), TopSums([0.0], 3))
    assert "Evaluate.top_sums" in request_fault(both, [tree])
    tree.release()
