"""Greedy decoding over tables: the argmax at every step, ties to the lower token, one live path."""

import pytest
import torch

from engine.pool import PagePool
from engine.requests import Report, Task
from engine.tree import TokenTree
from models.config import ModelShape
from search import Greedy, Sample, Trie

SHAPE = ModelShape(layers=1, kv_heads=1, head_dim=1, vocab_size=1, max_positions=None)


def run(search, row_of, max_new, eos=(), stops=None):
    tree = TokenTree(PagePool(SHAPE, 200, 4), [1, 2, 3])
    generator = search.run(Task(tree, max_new, frozenset(eos), 8, stops))
    answer, settled, passes = None, [], 0
    while True:
        try:
            request = generator.send(answer)
        except StopIteration as end:
            result = end.value
            break
        answer = None
        if isinstance(request, Report):
            settled += request.settled
            continue
        passes += 1
        tree.allocate(*tree.pending(request.nodes))
        tree.check_invariants()
        answer = request.answer(torch.stack([row_of(tree.path(n)) for n in request.nodes]))
    assert tree.live_branches == 0 and tree.live_tokens == 3 + passes - 1
    return result.outputs[0], settled, passes


def row_of(path):
    generator = torch.Generator().manual_seed(hash(tuple(path)) % 2**31)
    return torch.log_softmax(torch.randn(8, generator=generator).mul(2).round(), -1)  # ties abound


@pytest.mark.parametrize("eos", [(), (6,), (0, 3)])
def test_argmax_with_ties_to_the_lower_token(eos):
    output, settled, passes = run(Greedy(), row_of, 25, eos)
    path, logprob = [], 0.0
    while len(path) < 25 and (not path or path[-1] not in eos):
        row = row_of(path).tolist()
        path.append(row.index(max(row)))
        logprob += max(row)
    assert output.token_ids == path == settled and passes == len(path)
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
    output, *_ = run(Greedy(), row_of, 25, stops=lambda path: len(path) == 5)
    assert output.finish_reason == "stop" and len(output.token_ids) == 5
    output, *_ = run(Greedy(), row_of, 1)
    assert output.finish_reason == "length" and len(output.token_ids) == 1


def test_same_as_one_beam_and_as_temperature_zero():
    for eos in ((), (5,)):
        greedy = run(Greedy(), row_of, 12, eos)[0]
        assert run(Trie(beams=1), row_of, 12, eos)[0].token_ids == greedy.token_ids
        assert run(Sample(temperature=0), row_of, 12, eos)[0].token_ids == greedy.token_ids


def test_slots():
    assert Greedy().slots(10, 5) == (14, 14)
