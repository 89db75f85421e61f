"""Requests of lm-evaluation-harness to the engine; the harness itself where it is installed."""

import math
import random

import pytest

from engine import Engine
from engine.demo import demo_folder
from engine.errors import UsageError
from search import Greedy
from tools import lm_eval


@pytest.fixture(scope="module")
def engine() -> Engine:
    return Engine.load(demo_folder(), dtype="float32")


def test_loglikelihoods(engine):
    """Contexts in any order, equal requests, one too long for the context: each as alone."""
    rng = random.Random(0)
    contexts = [[1, *(rng.randrange(3, 1536) for _ in range(n))] for n in (5, 9, 30)]
    pairs = [(rng.choice(contexts), [rng.randrange(3, 1536) for _ in range(rng.randint(1, 4))]) for _ in range(20)]
    long = [1, *(rng.randrange(3, 1536) for _ in range(600))]
    pairs += [pairs[3], (long, [7, 8])]
    found = lm_eval.loglikelihoods(engine, pairs)
    for (context, continuation), (logprob, greedy) in zip(pairs[:-1], found, strict=False):
        [score] = engine.score(context, [continuation])
        assert (pytest.approx(score.logprob, abs=1e-4), score.is_greedy) == (logprob, greedy)
    [score] = engine.score([*long, 7, 8][-513:-2], [[7, 8]])
    assert found[-1][0] == pytest.approx(score.logprob, abs=1e-4) and math.isfinite(score.logprob)
    assert lm_eval.loglikelihoods(engine, []) == []


def test_answers(engine):
    ids = engine.encode("The opposite of hot is")
    [plain] = engine.generate([ids], Greedy(), max_new_tokens=6)
    [cut] = engine.generate([ids], Greedy(), max_new_tokens=6, stop=["."])
    arguments = [{"max_gen_toks": 6}, {"max_gen_toks": 6, "until": ["."]}, {"max_gen_toks": 6, "until": "."}]
    found = lm_eval.answers(engine, [(ids, one) for one in arguments])
    assert found == [plain.outputs[0].text, cut.outputs[0].text, cut.outputs[0].text] and found[0] != found[1]


def test_the_harness(engine):
    try:
        model = lm_eval.model_class()(engine)
    except UsageError as error:
        assert error.remedy == "pip install lm-eval"
        return
    from lm_eval.api.instance import Instance  # type: ignore[import-not-found]

    pairs = [("The opposite of hot is", " cold"), ("The opposite of hot is ", "cold"), ("", "The")]
    asked = [Instance("loglikelihood", {}, pair, i) for i, pair in enumerate(pairs)]
    first, second, _ = model.loglikelihood(asked)
    assert first == second and first[0] == pytest.approx(engine.score(*[pairs[0][0], [pairs[0][1]]])[0].logprob)
    [whole] = model.loglikelihood_rolling([Instance("loglikelihood_rolling", {}, ("The dog ran.",), 0)])
    assert whole < 0
