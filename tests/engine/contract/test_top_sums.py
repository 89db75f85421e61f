"""The top sums, of rows, of entries and of parts; log-probabilities of few tokens; searches that use both."""

import math
import random
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from engine import Choices, Engine
from engine.contract.top_sums import FoundSums, Next, TopSums, find_top_sums, found_in_entries, merged
from engine.rules.constraint import Allowed
from engine.rules.few import Few, Head
from kernels.rows import log_softmax
from search import Trie
from search.base import Evaluate

MODEL = Path(__file__).parents[2] / "golden/llama/plain"
EOS = 2


def brute_force(rows_NV, best):
    sums_M = (rows_NV + torch.tensor(best.sums).unsqueeze(1)).view(-1)
    order = sorted((i for i, x in enumerate(sums_M.tolist()) if x > -math.inf), key=lambda i: (-sums_M[i], i))
    return sums_M[order[: best.k]].tolist(), order[: best.k]


def lists(found):
    return found.values.tolist(), found.places.tolist()


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
        parts.append(FoundSums(part.values, part.places + a * V))
    rng.shuffle(parts)
    assert lists(merged(parts, k)) == expected


@pytest.fixture(scope="module")
def engine():
    return Engine.load(MODEL, dtype="float32", kv_memory="8M", threads=1)


@pytest.mark.parametrize("renormalise", [False, True])
@pytest.mark.parametrize("most", [4, 60])
def test_few_tokens_have_the_log_probabilities_of_whole_rows(engine, renormalise, most, monkeypatch):
    """With and without the head's own rows for them, in one part and in two, over more rows than are taken at once."""
    monkeypatch.setattr("engine.rules.few.ROWS", 5)
    rng, model, V = random.Random(most), engine.runner.model, engine.shape.vocab_size
    hidden_NE = torch.randn(13, engine.runner.model.head.packed.width if model.head.packed else 32)
    tokens = [sorted(rng.sample(range(V), rng.randint(1, most))) for _ in range(13)]
    tokens = [[token % 20 for token in row] if most == 4 else row for row in tokens]
    allowed = [
        Allowed(ids) if i % 2 else Allowed(torch.tensor(ids)) for i, ids in enumerate(map(sorted, map(set, tokens)))
    ]
    parts = [Few.of(allowed[:4], renormalise), Few.of(allowed[4:], renormalise)]
    found, finite = Head(model, V, engine.runner.impl).logps(hidden_NE, parts)
    logp_NV = log_softmax(model.logits(hidden_NE), V, impl="torch")[0]
    expected = []
    for row_V, entry in zip(logp_NV, allowed, strict=True):
        some = row_V[torch.as_tensor(entry.ids)]
        expected += (some - some.logsumexp(0) if renormalise else some).tolist()
    assert torch.cat(found).tolist() == pytest.approx(expected, abs=1e-5) and finite == [True] * 13
    hidden_NE[3] = math.nan
    assert Head(model, V, engine.runner.impl).logps(hidden_NE, parts)[1] == [i != 3 for i in range(13)]


def test_the_head_is_evaluated_for_the_allowed_tokens_alone(engine, monkeypatch):
    """Tokens and scores are those of whole rows."""
    widths, logits = [], engine.runner.model.logits
    monkeypatch.setattr(
        engine.runner.model, "logits", lambda *given: widths.append((x := logits(*given)).shape[1]) or x
    )
    rng = random.Random(5)
    choices = Choices([[rng.randrange(10, 20) for _ in range(3)] for _ in range(60)], [EOS])
    options = {"constraint": choices, "eos_token_ids": [EOS], "max_new_tokens": 4}
    for scores in ("model", "renormalised"):
        outputs = []
        for whole in (False, True):
            widths.clear()
            with monkeypatch.context() as patch:
                if whole:
                    patch.setattr("engine.rules.few.FewAnswers.wanted", lambda *_: None)
                search = Trie(beams=8, num_return_sequences=8)
                [result] = engine.generate([[5, 6, 7]], search, constraint_scores=scores, **options)
            outputs.append(result.outputs)
            narrow = not whole and scores == "renormalised" and engine.runner.model.head.packed is not None
            assert (max(widths) <= 11) is narrow, widths
        assert [o.token_ids for o in outputs[0]] == [o.token_ids for o in outputs[1]]
        assert [o.score for o in outputs[0]] == pytest.approx([o.score for o in outputs[1]], abs=1e-5)


@pytest.mark.parametrize(
    "options", [{}, {"constraint_scores": "model"}, {"constraint_scores": "renormalised"}], ids=str
)
def test_a_step_of_several_passes_finds_the_same(engine, options, monkeypatch):
    rng = random.Random(6)
    if options:
        items = [[rng.randrange(10, 50) for _ in range(rng.randint(1, 4))] for _ in range(300)]
        options = options | {"constraint": Choices(items, [EOS])}
    found = []
    for budget in (256, 7):
        monkeypatch.setattr(engine.runner, "budget", budget)
        search = Trie(beams=20, num_return_sequences=20)
        [result] = engine.generate([[5, 6, 7]], search, eos_token_ids=[EOS], max_new_tokens=5, **options)
        found.append([(output.token_ids, round(output.score, 4)) for output in result.outputs])
    assert found[0] == found[1] and len(found[0]) == 20


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
