"""Greedy decoding over tables: the argmax at every step, ties to the lower token, one live path."""

import pytest
import torch

from search import Greedy, Sample, Trie
from tests.search.drive import drive


def row_of(path):
    generator = torch.Generator().manual_seed(hash(path) % 2**31)
    return torch.log_softmax(torch.randn(8, generator=generator).mul(2).round(), -1)  # ties abound


@pytest.mark.parametrize("eos", [(), (6,), (0, 3)])
def test_argmax_with_ties_to_the_lower_token(eos):
    run = drive(Greedy(), row_of, 25, eos)
    path, logprob = [], 0.0
    while len(path) < 25 and (not path or path[-1] not in eos):
        row = row_of(tuple(path)).tolist()
        path.append(row.index(max(row)))
        logprob += max(row)
    [output] = run.result.outputs
    assert output.token_ids == path == run.settled
    assert [one.live for one in run.passes] == [3 + i for i in range(len(path))]  # one live path
    assert output.logprob == output.score == pytest.approx(logprob, abs=1e-5)
    assert output.finish_reason == ("eos" if path[-1] in eos else "length")


def test_the_first_of_many_equals_wins_in_a_large_vocabulary():
    """Vectorised argmax must not prefer a later lane."""
    for V in (8, 63, 1000, 32000, 50257):
        row = torch.zeros(1, V)
        assert int(row.argmax()) == 0
        row[0, V // 3 :] = 1.0
        assert int(row[0].argmax()) == V // 3


def test_stop_strings_and_limits():
    [output] = drive(Greedy(), row_of, 25, stops=lambda path: len(path) == 5).result.outputs
    assert output.finish_reason == "stop" and len(output.token_ids) == 5
    [output] = drive(Greedy(), row_of, 1).result.outputs
    assert output.finish_reason == "length" and len(output.token_ids) == 1


def test_same_as_one_beam_and_as_temperature_zero():
    for eos in ((), (5,)):
        greedy, *others = (drive(s, row_of, 12, eos).outputs for s in (Greedy(), Trie(beams=1), Sample(temperature=0)))
        assert others == [greedy, greedy]


def test_slots():
    assert Greedy().slots(10, 5) == (14, 14)
