"""Outputs that end because no token is allowed."""

import itertools

import pytest

from engine import ConstraintError, Engine, Progress, Text
from engine.drafts import Draft
from search import ADED, BoN, Diverse, Greedy, SBoN, Trie
from search.aded.ngrams import count, open_store
from tests.engine.rules.automata import EOS, GOLDEN, Automaton, ask, named, scored

pytestmark = pytest.mark.usefixtures("exact_pool")


@named
@scored
def test_no_token_is_allowed(engine, search, scores):
    """At a dead end the output ends."""
    dead = Automaton([[[50, 1], [51, 2]], [[52, 3]], [[53, 3]], []])
    result = ask(engine, search, new=9, constraint=dead, constraint_scores=scores)
    for output in result.outputs:
        assert output.finish_reason == "constraint" and output.token_ids in ([50, 52], [51, 53])
        assert output.logprob is not None and -99 < output.logprob < 0.01
    nothing = ask(engine, search, constraint=Automaton([[]]), constraint_scores=scores)
    assert nothing.outputs[0].token_ids == [] and nothing.outputs[0].finish_reason == "constraint"
    endless = ask(engine, search, new=9, constraint=dead, constraint_scores=scores, ignore_eos=True)
    assert {tuple(o.token_ids) for o in endless.outputs} <= {(50, 52), (51, 53)}
    assert all(o.finish_reason == "constraint" for o in endless.outputs)


def test_a_living_beam_goes_before_a_dead_one(engine):
    [some] = ask(engine, Greedy(), new=1, constraint=Automaton([[[50, 0], [51, 0], [52, 0]]])).outputs[0].token_ids
    other = next(token for token in (50, 51, 52) if token != some)
    states = [sorted([[some, 1], [other, 2]]), [], [[60, 3]], [[EOS, 3]]]
    result = ask(engine, Trie(beams=2, num_return_sequences=2), new=9, constraint=Automaton(states))
    assert [o.finish_reason for o in result.outputs] == ["eos", "constraint"]
    assert result.outputs[0].token_ids == [other, 60, EOS] and result.outputs[1].token_ids == [some]


def test_endless_bans_are_an_error(engine):
    options = {"suppress_tokens": [*range(104)], "ignore_eos": True}
    with pytest.raises(ConstraintError, match="no token is allowed after the prompt"):
        ask(engine, Greedy(), **options)
    [output] = ask(engine, Greedy(), suppress_tokens=[*range(104)]).outputs
    assert (output.token_ids, output.finish_reason) == ([], "constraint")


def test_a_dead_beam_ends_although_no_token_ends_outputs(engine):
    """Numbers of transformers 5.24: the other beams go on."""
    options = {"bad_words": [[89, token] for token in range(104)], "max_new_tokens": 5, "ignore_eos": True}
    [result] = engine.generate([[5, 6, 7]], Trie(beams=3, num_return_sequences=3), **options)
    expected = [[32, 47, 66, 33, 53], [22, 22, 22, 22, 56], [22, 22, 22, 22, 37]]
    assert [o.token_ids for o in result.outputs] == expected
    assert [o.score for o in result.outputs] == pytest.approx([-0.8362, -0.8726, -0.9608], abs=1e-4)


@named
def test_items_that_are_banned(engine, search):
    items, banned = [[71, 100], [53, 29], [53, 86], [11, 80]], [[71, 100]]
    outputs = ask(engine, search, new=4, choices=items, bad_words=banned, ignore_eos=True).outputs
    for output in outputs:
        assert output.token_ids in [[71], *items[1:]] and output.finish_reason == "constraint" and output.logprob > -99


def test_dead_beams_are_no_finished_ones(engine):
    """Numbers of transformers 5.24: with early_stopping true it waits for as many as there are beams."""
    items = [[52, 56], [8, 36], [8, 36, 68], [8, 36, 68, 65]]
    search = Trie(beams=2, length_penalty=2.0, early_stopping=True, num_return_sequences=2)
    options = {"choices": items, "bad_words": [[52, 56]], "eos_token_ids": [47], "max_new_tokens": 8}
    [result] = engine.generate([[54, 41, 64]], search, **options)
    assert [o.token_ids for o in result.outputs] == [[8, 36, 68, 47], [8, 36, 47]]
    assert [o.score for o in result.outputs] == pytest.approx([-2.4177, -3.3162], abs=1e-4)


def test_large_biases_are_no_dead_ends(engine):
    """Numbers of transformers 5.24."""
    bias = [[[102, token], -70000.0] for token in range(104)]
    options = {"suppress_tokens": [102], "eos_token_ids": [100, 32], "max_new_tokens": 8}
    [result] = engine.generate([[60, 102]], Trie(beams=3, length_penalty=2.0), sequence_bias=bias, **options)
    assert result.outputs[0].token_ids == [22, 22, 22, 22, 22, 22, 22, 49]
    assert result.outputs[0].score == pytest.approx(-1093.846, abs=1e-2)


def test_an_end_without_tokens_keeps_the_sum_of_its_own(engine):
    options = {"suppress_tokens": sorted({*range(104)} - {60, 86, 89}), "no_repeat_ngram_size": 1}
    search = Trie(beams=3, num_return_sequences=3)
    for output in ask(engine, search, new=9, eos_token_ids=[47], logprobs=0, **options).outputs:
        assert output.finish_reason == "constraint" and output.score is None
        assert output.logprob == pytest.approx(sum(output.token_logprobs), abs=1e-5)


@named
def test_the_token_that_stands_for_an_end_is_not_streamed(engine, search):
    """It has a text if the request names an ordinary token as its end of sequence."""
    options = {"choices": [[40, 29]], "suppress_tokens": [29], "eos_token_ids": [37], "max_new_tokens": 5}
    *events, done = engine.stream([5, 9], search, **options)
    output = done.result.outputs[0]
    assert (output.token_ids, output.finish_reason) == ([40], "constraint")
    assert "".join(event.text for event in events if isinstance(event, Text)) == output.text


def test_an_interrupted_output_has_no_token_that_stands_for_an_end(engine):
    """The first utterance ends after a token, while others go on."""
    choices = [[40, 29], [41, 50, 51, 52, 53], [42, 60, 61, 62, 63]]
    options = {"choices": choices, "suppress_tokens": [29], "eos_token_ids": [37]}
    outputs = []
    for seed, most in itertools.product(range(4), range(3, 8)):
        stopped = itertools.chain(itertools.repeat(False, most), itertools.repeat(True)).__next__
        *_, done = engine.stream([18, 74], BoN(temperature=6.0, n=20, seed=seed), interrupted=stopped, **options)
        outputs += [output.token_ids for output in done.result.outputs if output.finish_reason == "interrupted"]
    assert [40] in outputs and all(37 not in tokens for tokens in outputs)


def test_a_reward_is_of_the_tokens_before_an_end():
    """Without end-of-sequence tokens, token 0 stands for the end."""
    judge = Engine.load(GOLDEN / "llama/classifier", dtype="float32", kv_memory="4M")
    engine = Engine.load(GOLDEN / "llama/plain", dtype="float32", kv_memory="4M")
    engine.add("reward", judge)
    options = {"choices": [[40, 29], [60, 29]], "suppress_tokens": [29], "ignore_eos": True}
    for search in (BoN(n=4), SBoN(n=4, tau=1)):
        output = ask(engine, search, **options).outputs[0]
        assert output.token_ids in ([40], [60]) and output.finish_reason == "constraint"
        assert output.score == pytest.approx(*judge.scores([[5, 6, 7, *output.token_ids]]))


@named
def test_the_token_that_stands_for_an_end_completes_no_stop_string(engine, search):
    """Without end-of-sequence tokens it is token 0, the spelling of which may be a stop string."""
    options = {"choices": [[40, 29]], "suppress_tokens": [29], "ignore_eos": True, "stop": ["<unk>"]}
    output = ask(engine, search, **options).outputs[0]
    assert (output.token_ids, output.finish_reason) == ([40], "constraint") and output.logprob > -99


@pytest.mark.parametrize("search", [Trie(beams=3), Diverse(beams=3, groups=1)], ids=repr)
def test_candidates_lack_the_token_that_stands_for_an_end(engine, search):
    choices = [[40, 29, 18], [41, 50, 51, 52, 53, 54, 55], [42, 60, 61, 62, 63, 64]]
    options = {"choices": choices, "suppress_tokens": [29], "eos_token_ids": [37], "max_new_tokens": 8}
    shown = [
        (score, [*tokens])
        for event in engine.stream([18, 74], search, **options)
        if isinstance(event, Progress) and event.report.beams
        for score, tokens in event.report.beams()
    ]
    assert (None, [40]) in shown and not any(tokens == [40, 37] for _, tokens in shown)
    assert all(score is None or score > -1e3 for score, _ in shown)


@pytest.mark.parametrize("ends", [[EOS], []])
def test_what_stands_for_an_end_is_not_learnt(engine, tmp_path, ends):
    dead, closed = Automaton([[[50, 1]], [[52, 2]], [[53, 3]], []]), []

    class Drafts:
        open = lambda self, salt, prompt: self  # noqa: E731
        learn = lambda self, tokens: None  # noqa: E731
        draft = lambda self, ahead, nodes, depth: Draft()  # noqa: E731
        close = closed.append

    for search in (Greedy(), Trie(beams=2), ADED(save=tmp_path / "store")):
        ask(engine, search, new=9, constraint=dead, eos_token_ids=ends, drafts=Drafts())
    assert [[*tokens] for tokens in closed] == [[50, 52, 53]] * 2
    assert open_store(tmp_path / "store").run()[0].tolist() == count([6, 7, 50, 52, 53])[0].tolist()
