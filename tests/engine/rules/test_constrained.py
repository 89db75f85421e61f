"""A constraint at work: forced tokens take no pass or one, drafts and neighbours change nothing; edits of rows."""

import math

import pytest
import torch

from engine import Choices, Engine, Request, Session
from engine.cache.tree import TokenTree
from engine.contract.trace import Trace
from engine.rules.constrained import Constrained
from engine.rules.endings import STUCK
from engine.rules.processors import Masked, Processor, RepetitionPenalty
from search import ADED, ULTS, Greedy, Sample, Trie
from tests.engine.cache.test_tree import pool_of
from tests.engine.rules.automata import (
    CASES,
    EOS,
    GOLDEN,
    STATES,
    Automaton,
    ask,
    constraint_of,
    named,
    rows_of,
    scored,
)
from tests.marks import DEVICES, needs_cpp

pytestmark = pytest.mark.usefixtures("exact_pool")
VOCAB = 10


@named
@scored
def test_forced_tokens_and_limits(engine, search, scores):
    """One legal output; where rows add up to 1 its tokens are certain, and no row is evaluated."""
    options = {"choices": [[40, 41, 42, 43, 44]], "constraint_scores": scores}
    result = ask(engine, search, new=10, **options)
    assert result.outputs[0].token_ids == [40, 41, 42, 43, 44, EOS]
    if scores == "renormalised":
        assert result.stats["forward_passes"] == 0 and result.outputs[0].logprob == 0
    result = ask(engine, search, new=3, **options)
    assert result.outputs[0].token_ids == [40, 41, 42] and result.outputs[0].finish_reason == "length"


@pytest.mark.parametrize(("scores", "passes"), [("renormalised", 1), ("model", 3)])
def test_a_chain_of_forced_tokens_is_one_pass(engine, scores, passes):
    """Passes for the model's scores: a pass for the chain's own, one for the choice after it, one for the end."""
    options = {"choices": [[40, 41, 42, 43, 44], [40, 41, 42, 43, 45]], "constraint_scores": scores}
    result = ask(engine, Greedy(), new=10, **options)
    assert result.stats["forward_passes"] == passes and len(result.outputs[0].token_ids) == 6
    expected = sum(float(rows_of(engine, [5, 6, 7], [40, 41, 42, 43, 44][:i]).log_softmax(-1)[token])
                   for i, token in enumerate(result.outputs[0].token_ids[:4]))  # fmt: skip
    four = ask(engine, Greedy(), new=4, **options).outputs[0]
    assert scores == "renormalised" or four.logprob == pytest.approx(expected, abs=1e-4)


@scored
@pytest.mark.parametrize("case", [case for case in CASES if "automaton" in case][:6], ids=lambda _: "")
def test_drafts_change_nothing(engine, case, scores):
    """ADED gives the tokens of constrained greedy search and of constrained samples, in no more passes."""
    prompt = case["prompt_ids"] * 4
    for plain, drafted in ((Greedy(), ADED()), (Sample(seed=5), ADED(seed=5, temperature=1.0))):
        options = {"new": 24, "constraint_scores": scores}
        a = ask(engine, plain, prompt, constraint=constraint_of(case), **options)
        b = ask(engine, drafted, prompt, constraint=constraint_of(case), **options)
        assert a.outputs[0].token_ids == b.outputs[0].token_ids
        assert a.outputs[0].logprob == pytest.approx(b.outputs[0].logprob, abs=1e-3)
        assert b.stats["forward_passes"] <= a.stats["forward_passes"]


def test_constrained_requests_share_a_small_cache():
    """Preempted searches start again with their constraints, and drafts make room."""
    engine = Engine.load(GOLDEN / "llama/plain", dtype="float32", kv_memory=40 * 512, parallel=4)
    size = engine.pool.pages * engine.pool.page_size
    assert size < 120
    searches = [Trie(beams=3), Sample(num_return_sequences=3, seed=1), ADED(), ULTS(prior="dirichlet", k_max=2)]
    requests = [
        Request([5, 6, 7, i], search, max_new_tokens=12, eos_token_ids=[EOS], constraint=Automaton(STATES))
        for i, search in enumerate(searches * 2, 10)
    ]
    together = dict(engine.serve(requests))
    for i, request in enumerate(requests):
        [(_, alone)] = engine.serve([request])
        assert [o.token_ids for o in together[i].outputs] == [o.token_ids for o in alone.outputs]
    assert engine.pool.free_pages == engine.pool.pages


@scored
def test_sessions_and_traces(engine, scores):
    """Forced tokens that were never evaluated are evaluated with the next prompt."""
    options = {"choices": [[40, 41, 42, 43]], "constraint_scores": scores, "eos_token_ids": [EOS]}
    session, prompt = Session(engine), [5, 6, 7]
    for search in (Greedy(), ADED(), Trie(beams=2)):
        trace = Trace()
        *_, done = session.stream(prompt, search, trace=trace, **options)
        assert done.result.outputs[0].token_ids == [40, 41, 42, 43, EOS] and trace.record["end"] == "done"
        prompt = [*prompt, 40, 41, 42, 43, 8]
    *_, done = session.stream(prompt, Greedy(), max_new_tokens=5)
    [alone] = engine.generate([prompt], Greedy(), max_new_tokens=5)
    assert done.result.outputs[0].token_ids == alone.outputs[0].token_ids
    session.close()


# --- edits of rows by themselves: masks, renormalised rows, rows without any token ---


def grown(constraint, renormalise, *others):
    """A constrained tree with two nodes below its root, whose states are asked for."""
    constrained = Constrained([*others, Masked(constraint, VOCAB)], renormalise, VOCAB, [1, 4], [EOS], 9)
    tree = TokenTree(pool_of(4), [1, 4])
    constrained.states.watch(tree)
    nodes = tree.grow([tree.root] * 2, [5, 6])
    constrained.plan(tree, nodes)
    return constrained, tree, nodes


@pytest.mark.parametrize("renormalise", [False, True])
def test_rows_are_masked_and_renormalised(renormalise):
    constrained, tree, nodes = grown(Choices([[5, 7], [5, 8], [6, 9, 3], [6, 3, 3]], [EOS]), renormalise)
    rows_NV = torch.randn(2, VOCAB, generator=torch.Generator().manual_seed(1)).log_softmax(1)
    before = rows_NV.clone()
    edit = constrained.edit(tree, nodes, slice(0, 2))
    edit.apply(rows_NV)
    for row, plain, allowed in zip(rows_NV, before, ([7, 8], [3, 9]), strict=True):
        assert [i for i, x in enumerate(row.tolist()) if x > -math.inf] == allowed
        expected = plain[allowed] - (plain[allowed].logsumexp(0) if renormalise else 0)
        torch.testing.assert_close(row[allowed], expected)


def test_rows_of_a_path_are_edited_once_more():
    """The second edit gives the rows that the search was sent."""
    penalty = RepetitionPenalty(2.0)
    constrained, tree, nodes = grown(Choices([[5, 7], [5, 8], [6, 9], [6, 3]], [EOS]), True, penalty)
    logits_NV = torch.randn(2, VOCAB, generator=torch.Generator().manual_seed(2)) * 3
    sent_NV, again_NV = logits_NV.clone(), logits_NV.clone()
    edit = constrained.edit(tree, nodes, slice(0, 2))
    assert edit.of == "logits"
    edit.apply(sent_NV)
    states = [constrained.states.along([token, 0])[1] for token in (5, 6)]
    again = constrained.rewrite_edit(states, slice(0, 2))
    assert again.of == "logits"
    again.apply(again_NV)
    torch.testing.assert_close(sent_NV, again_NV, rtol=0, atol=0)


@needs_cpp
def test_renormalised_rows_depend_on_neither_threads_nor_other_rows():
    """PyTorch's reductions divide a single long row among threads."""
    vocab, threads, found = 1 << 17, torch.get_num_threads(), []
    constrained = Constrained([Processor()], True, vocab, [1], [EOS], 9)
    state = constrained.states.along([5])
    given_NV = torch.randn(64, vocab, generator=torch.Generator().manual_seed(4))
    try:
        for count, rows in ((1, 1), (2, 1), (1, 64)):
            torch.set_num_threads(count)
            found.append(given_NV.clone())
            for some_NV in found[-1].split(rows):
                constrained.rewrite_edit(state * rows, slice(0, rows)).apply(some_NV)
    finally:
        torch.set_num_threads(threads)
    assert found[0].equal(found[1]) and found[0].equal(found[2])
    torch.testing.assert_close(found[0], given_NV.log_softmax(1), rtol=0, atol=1e-4)


@DEVICES
def test_rows_with_banned_tokens_are_renormalised_as_on_a_gpu(device, monkeypatch: pytest.MonkeyPatch):
    vocab = 9000  # several pieces of Triton's operator, some of them without any token
    constrained = Constrained([Processor()], True, vocab, [1], [EOS], 9)
    rows_NV = torch.full((3, vocab), -math.inf)
    rows_NV[0, :] = torch.randn(vocab, generator=torch.Generator().manual_seed(5)) * 3
    rows_NV[0, 5:8000] = -math.inf
    rows_NV[1, 4500] = 7.0
    expected = [*rows_NV[:2].log_softmax(1), rows_NV[2].clone()]
    monkeypatch.setattr("engine.rules.constrained.best", lambda x: "triton")
    rows_NV = rows_NV.to(device)
    constrained.rewrite_edit(constrained.states.along([5]) * 3, slice(0, 3)).apply(rows_NV)
    torch.testing.assert_close(rows_NV.cpu(), torch.stack(expected), rtol=0, atol=1e-5)


@pytest.mark.parametrize("kind", ["list", "mask"])
def test_a_row_without_any_token_has_the_end_alone(kind):
    dead = Automaton([[[5, 1], [6, 2]], [], [[7, 1], [8, 1]]], kind, VOCAB)
    constrained, tree, nodes = grown(dead, False)
    rows_NV = torch.zeros(2, VOCAB)
    constrained.edit(tree, nodes, slice(0, 2)).apply(rows_NV)
    assert rows_NV[0, EOS] == STUCK and rows_NV[0].isfinite().sum() == 1
    assert rows_NV[1, [7, 8]].tolist() == [0, 0] and rows_NV[1].isfinite().sum() == 2
