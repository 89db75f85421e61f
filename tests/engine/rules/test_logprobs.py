"""Log-probabilities of the tokens of outputs: those of the sequence evaluated afresh, for every search."""

import json
import math
from functools import partial

import pytest
import torch

from engine import Engine, Request, Session, UsageError
from engine.contract import scoring
from engine.rules.logprobs import HiddenRows
from engine.step.runner import Runner
from search import DSBD, Greedy, Sample, Trie
from search.base import REGISTRY, Evaluate, Output, Search, SearchResult, make_search
from tests.search.test_waits import OPTIONS, ROOT

PROMPT = "Once upon a time there was"
TOP = 3


@pytest.fixture(scope="module")
def engine():
    companions = {"draft": ROOT / "draft", "reward": ROOT / "reward"}
    return Engine.load(ROOT / "target", device="cpu", dtype="float32", **companions, kv_memory=1 << 26)


@pytest.fixture(autouse=True)
def own_priors(monkeypatch, tmp_path_factory):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.getbasetemp() / "priors"))


def afresh(engine, prompt, tokens):
    logits = engine.runner.logits([*prompt, *tokens[:-1]])[len(prompt) - 1 :]
    logits[:, engine.runner.vocab_size :] = -math.inf
    return logits.log_softmax(1)


def check(engine, prompt, output, rows=None):
    """Against a fresh evaluation, or against rows that the caller edited."""
    rows = afresh(engine, prompt, output.token_ids) if rows is None else rows
    own = [float(row[token]) for row, token in zip(rows, output.token_ids, strict=True)]
    assert output.token_logprobs == pytest.approx(own, abs=1e-3)
    for row, top in zip(rows, output.top_logprobs, strict=True):
        best = row.topk(TOP).values
        assert [logp for _, logp in top] == pytest.approx(best[best > -math.inf].tolist(), abs=1e-3)
        assert [logp for _, logp in top] == pytest.approx([float(row[token]) for token, _ in top], abs=1e-3)
    if output.logprob is not None:
        assert sum(output.token_logprobs) == pytest.approx(output.logprob, abs=1e-3)


def test_the_head_computes_few_rows_of_a_large_vocabulary(engine, monkeypatch):
    """Rows that --memory does not count: as many as fit some bytes, in every call; on a GPU always the same number."""
    for device, rows in (("cpu", [64, 64, 27, 16, 1]), ("cuda", [64] * 5)):
        counts = [scoring.rows_at_once(x, torch.device(device)) for x in (9, 65536, 151936, 262144, 1 << 30)]
        assert counts == rows
    ask = partial(engine.generate, [PROMPT], Greedy(), max_new_tokens=20, ignore_eos=True, logprobs=TOP)
    [before], given = ask(), engine.score(PROMPT, [" one two three four", " one two five"])
    monkeypatch.setattr(scoring, "ROWS_BYTES", 3 * 4 * engine.runner.vocab_size)
    rows, logits = list[int](), type(engine.runner.model).logits
    monkeypatch.setattr(
        type(engine.runner.model),
        "logits",
        lambda self, x_NE, *rest: rows.append(len(x_NE)) or logits(self, x_NE, *rest),
    )
    [after] = ask()
    assert after.outputs == before.outputs and max(rows) == 3
    rows.clear()
    assert [score.token_ids for score in engine.score(PROMPT, [" one two three four", " one two five"])] == [
        score.token_ids for score in given
    ]
    assert max(rows) <= 3


@pytest.mark.parametrize("name", sorted(REGISTRY))
def test_every_search(engine, name):
    search = make_search(name, OPTIONS.get(name, {}))
    prompt = engine.tokenizer.encode(PROMPT)
    [plain] = engine.generate([prompt], search, max_new_tokens=8)
    [result] = engine.generate([prompt], search, max_new_tokens=8, logprobs=TOP)
    assert [o.token_ids for o in result.outputs] == [o.token_ids for o in plain.outputs]
    assert plain.outputs[0].token_logprobs is None and "token_logprobs" not in plain.record(0)["outputs"][0]
    for output in result.outputs:
        check(engine, prompt, output)
    json.dumps(result.record(0), allow_nan=False)


@pytest.mark.parametrize("name", sorted(REGISTRY))
def test_an_output_that_a_constraint_ends_before_its_first_token(engine, name):
    options = {"choices": [[19, 3]], "suppress_tokens": [19], "logprobs": TOP}
    [result] = engine.generate([PROMPT], make_search(name, OPTIONS.get(name, {})), max_new_tokens=8, **options)
    for output in result.outputs:
        assert (output.token_ids, output.token_logprobs, output.top_logprobs) == ([], [], [])


@pytest.mark.parametrize("name", ["greedy", "trie", "ults", "sample", "aded"])
@pytest.mark.parametrize("scores", ["model", "renormalised"])
def test_a_constraint_edits_the_rows(engine, name, scores):
    prompt, eos = engine.tokenizer.encode(PROMPT), min(engine.eos_token_ids)
    choices = [
        engine.tokenizer.encode(text, add_special=False) for text in (" a little girl", " a little dog named Tim")
    ]
    search = make_search(name, OPTIONS.get(name, {}))
    [result] = engine.generate(
        [prompt], search, max_new_tokens=8, choices=choices, constraint_scores=scores, logprobs=TOP
    )
    for output in result.outputs:
        rows, forced = afresh(engine, prompt, output.token_ids), 0
        for i, row in enumerate(rows):
            after = sorted({[*c, eos][i] for c in choices if c[:i] == output.token_ids[:i]})
            closed = torch.full_like(row, -math.inf)
            closed[after] = row[after].log_softmax(0) if scores == "renormalised" else row[after]
            row.copy_(closed)
            forced += len(after) == 1
        check(engine, prompt, output, rows)
        assert forced and (scores == "model" or output.token_logprobs.count(0.0) >= forced)


def test_penalties_and_functions_of_rows(engine):
    prompt, bias = engine.tokenizer.encode(PROMPT), {5: 4.0}
    options = {"logit_bias": bias, "logits_processor": lambda ids, row: row * 0.5, "constraint_scores": "renormalised"}
    [result] = engine.generate([prompt], Trie(beams=3), max_new_tokens=6, logprobs=TOP, **options)
    [output] = result.outputs
    logits = engine.runner.logits([*prompt, *output.token_ids[:-1]])[len(prompt) - 1 :]
    logits[:, engine.runner.vocab_size :] = -math.inf
    logits[:, 5] += 4.0
    check(engine, prompt, output, (logits * 0.5).log_softmax(1))


def test_an_output_that_a_constraint_ends(engine):
    [[output]] = [r.outputs for r in engine.generate([PROMPT], Greedy(), choices=[[5, 6]], ignore_eos=True, logprobs=1)]
    assert output.finish_reason == "constraint" and len(output.token_logprobs) == 2
    assert sum(output.token_logprobs) == pytest.approx(output.logprob, abs=1e-3)


class Deep(Search):
    """Evaluates chains of which it asks for the last row, and ends where it likes."""

    def run(self, task):
        tree, tokens = task.tree, []
        rows, _ = yield Evaluate(tree, [tree.root])
        first = rows[0].topk(2).indices.tolist()
        chain = tree.grow_path(tree.child(tree.root, first[1]), [7, 9])
        rows, _ = yield Evaluate(tree, [chain[-1]])
        tokens = [first[1], 7, 9, int(rows[0].argmin())]
        tree.keep([tree.root])
        (yield Evaluate(tree, [tree.child(tree.root, first[0])]))
        return SearchResult([Output(tokens, None, None, "length"), Output([first[0], 1, 2, 3], None, None, "length")])


def test_a_search_of_ones_own_and_its_gaps(engine):
    prompt = engine.tokenizer.encode(PROMPT)
    [result] = engine.generate([prompt], Deep(), logprobs=TOP)
    check(engine, prompt, result.outputs[0])
    assert [x is None for x in result.outputs[1].token_logprobs] == [False, False, True, True]
    assert [len(x) for x in result.outputs[1].top_logprobs] == [TOP, TOP, 0, 0]
    json.dumps(result.record(0), allow_nan=False)


def test_in_batches_sessions_and_after_a_preemption(engine):
    prompts = [engine.tokenizer.encode(text) for text in (PROMPT, "The dog", "One day a girl saw a big red")]
    small = Engine.load(ROOT / "target", device="cpu", dtype="float32", kv_memory=60 * engine.pool.bytes_per_token)
    requests = [
        Request(p, s, 8, logprobs=TOP) for p in prompts for s in (Trie(beams=4), Sample(num_return_sequences=3))
    ]
    for i, result in small.serve(requests):
        for output in result.outputs:
            check(engine, requests[i].prompt, output)
    session, prompt = Session(engine), prompts[0]
    for _ in range(3):
        *_, done = session.stream(prompt, Greedy(), max_new_tokens=4, logprobs=TOP)
        check(engine, prompt, done.result.outputs[0])
        prompt = [*prompt, *done.result.outputs[0].token_ids, 9]
    session.close()


def test_an_interrupted_output(engine):
    prompt, steps = engine.tokenizer.encode(PROMPT), iter(range(4))
    *_, done = engine.stream(prompt, Trie(beams=3), interrupted=lambda: next(steps, None) is None, logprobs=TOP)
    [output] = done.result.outputs
    assert output.finish_reason == "interrupted" and output.token_ids
    check(engine, prompt, output)


def test_no_pass_is_added_and_nothing_is_kept_unasked(engine, monkeypatch):
    calls = []
    monkeypatch.setattr(
        Runner, "forward", lambda self, *given, real=Runner.forward: calls.append(1) or real(self, *given)
    )
    monkeypatch.setattr(HiddenRows, "keep", lambda *args, real=HiddenRows.keep: calls.append("keep") or real(*args))
    counts = []
    for options in ({}, {"logprobs": 0}):
        calls.clear()
        [result] = engine.generate([PROMPT], DSBD(draft_beams=2, gamma=2), max_new_tokens=6, **options)
        counts.append((calls.count(1), "keep" in calls))
    assert counts == [(counts[0][0], False), (counts[0][0], True)]
    assert result.outputs[0].top_logprobs == [[] for _ in result.outputs[0].token_ids]


@pytest.mark.parametrize("wrong", [-1, 1.5, True, "3", 5000])
def test_wrong_numbers(engine, wrong):
    with pytest.raises(UsageError, match="logprobs: expected an integer from 0 to 1024"):
        engine.generate([PROMPT], Greedy(), logprobs=wrong)
