"""Outputs that end because no token is allowed."""

import pytest

from engine import ConstraintError
from search import Greedy, Trie
from tests.engine.rules.automata import EOS, Automaton, ask, named, scored

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
    with pytest.raises(ConstraintError, match="no token is allowed after 0 new tokens"):
        ask(engine, Greedy(), **options)
    [output] = ask(engine, Greedy(), suppress_tokens=[*range(104)]).outputs
    assert (output.token_ids, output.finish_reason) == ([], "constraint")
