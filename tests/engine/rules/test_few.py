"""Log-probabilities of few tokens are those of whole rows, and the head is evaluated for them alone."""

import math
import random

import pytest
import torch

from engine import Choices
from engine.rules.constraint import Allowed
from engine.rules.few import Few, Head
from kernels.rows import log_softmax
from search import Trie
from tests.engine.rules.automata import EOS


@pytest.mark.parametrize("renormalise", [False, True])
@pytest.mark.parametrize("most", [4, 60])
def test_few_tokens_have_the_log_probabilities_of_whole_rows(engine, renormalise, most, monkeypatch):
    """With and without the head's own rows for them, in one part and in two, over more rows than are taken at once."""
    monkeypatch.setattr("engine.rules.few.ROWS", 5)
    rng, model, V = random.Random(most), engine.runner.model, engine.shape.vocab_size
    hidden_NE = torch.randn(13, engine.runner.model.head.packed.width if model.head.packed else 32)
    tokens = [sorted(rng.sample(range(V), rng.randint(1, most))) for _ in range(13)]
    tokens = [[token % 20 for token in row] if most == 4 else row for row in tokens]
    allowed = [ids if i % 2 else torch.tensor(ids) for i, ids in enumerate(map(sorted, map(set, tokens)))]
    parts = [Few(Allowed.of(some, V), renormalise) for some in (allowed[:4], allowed[4:])]
    found, finite = Head(model, V, engine.runner.impl).logps(hidden_NE, parts)
    logp_NV = log_softmax(model.logits(hidden_NE), V, impl="torch")[0]
    expected = []
    for row_V, entry in zip(logp_NV, allowed, strict=True):
        some = row_V[torch.as_tensor(entry)]
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
                    patch.setattr("engine.rules.constrained.Constrained.few_tokens", lambda *_: None)
                search = Trie(beams=8, num_return_sequences=8)
                [result] = engine.generate([[5, 6, 7]], search, constraint_scores=scores, **options)
            outputs.append(result.outputs)
            narrow = not whole and scores == "renormalised" and engine.runner.model.head.packed is not None
            assert (max(widths) <= 11) is narrow, widths
        assert [o.token_ids for o in outputs[0]] == [o.token_ids for o in outputs[1]]
        assert [o.score for o in outputs[0]] == pytest.approx([o.score for o in outputs[1]], abs=1e-5)
