"""The head on a model's states: its states are the model's, it ranks what can be ranked, and the engine computes it."""

import shutil

import pytest
import torch

from engine import Engine
from engine.demo import demo_folder
from engine.errors import UsageError
from tools.bench.variants import first_layers
from tools.reward_head import Answered, agreement, answered, fit, reward_folder, states

ANSWERS = [[40, 41, 42], [40, 43], [40, 41, 42], []]  # two that share a beginning, one twice, an empty one


@pytest.fixture(scope="module")
def engine():
    return Engine.load(demo_folder(), dtype="float32", threads=1)


def test_states_are_what_the_head_reads(engine):
    [rows] = states(engine, [Answered([1, 30, 31], ANSWERS, [True] * 4)])
    assert [len(rows_TE) for rows_TE in rows] == [3, 2, 3, 0]
    for tokens, rows_TE in zip(ANSWERS[:3], rows, strict=False):
        wanted_TV = engine.runner.logits([1, 30, 31, *tokens])[3:]
        torch.testing.assert_close(engine.runner.model.logits(rows_TE), wanted_TV, rtol=1e-4, atol=1e-4)


def test_the_engine_scores_as_the_head_was_fitted(engine, tmp_path):
    folder = first_layers(demo_folder(), 2, tmp_path)
    some = [Answered([1, 30, 31], ANSWERS, [True, False, True, False]), Answered([1, 32], [[50], [51]], [False, True])]
    rows = states(Engine.load(folder, dtype="float32", threads=1), some)
    head_E = fit(some, rows)
    scores = [[(rows_TE @ head_E).tolist() for rows_TE in own[:3]] for own in rows]
    reward_folder(folder, head_E)
    scorer = Engine.load(folder, dtype="float32", threads=1)
    assert scorer.shape.scores and scorer.template is None
    for one, own in zip(some, scores, strict=True):
        found = scorer.scores([one.ids + tokens for tokens in one.answers if tokens])
        assert found == pytest.approx([of[-1] for of in own], rel=0.05, abs=0.01)  # weights are the folder's bfloat16
    shutil.rmtree(folder)


def test_beginnings_that_differ_are_ranked_and_others_are_chance():
    right = [True, False, True, False]
    some = [Answered([1], [[5, 6]] * 4, right)] * 3
    rows = [[torch.tensor([[1.0, 0.0], [float(good), 1.0]]) for good in right] for _ in some]
    head_E = fit(some, rows)
    scores = [[(rows_TE @ head_E).tolist() for rows_TE in own] for own in rows]
    assert head_E[0] > 0
    assert agreement(some, scores, 1) == 0.5 and agreement(some, scores, 2) == agreement(some, scores, 9) == 1
    assert agreement([Answered([1], [[5]], [True])], [[[0.0]]], 1) is None


def test_what_cannot_be_learnt_is_refused():
    with pytest.raises(UsageError, match="right and wrong"):
        fit([Answered([1], [[5], [6]], [True, True])], [[torch.ones(1, 2)] * 2])


def test_the_model_answers_for_itself(engine):
    seen = []

    def right(text, answers):
        seen.append((text, len(answers)))
        return [i == 0 for i in range(len(answers))]

    found = answered(engine, ["What is 1 + 2?", "Hello"], right, 3, max_new_tokens=4, temperature=1.0, seed=0)
    assert sorted(seen) == [("Hello", 3), ("What is 1 + 2?", 3)]
    assert all(one.right == [True, False, False] and len(one.answers) == 3 for one in found)
    assert all(len(tokens) <= 4 and not engine.eos_token_ids & {*tokens} for one in found for tokens in one.answers)
    assert found[0].ids != found[1].ids
