"""Paths that cross the length at which rotary factors change (longrope): every answer is that of a fresh prefill."""

import random
from pathlib import Path

import pytest
import torch

from engine import Done, Engine, Evaluate, Output, SearchResult, Session
from engine.step.jobs import Job
from search import Greedy, Sample, Trie
from tests.invariants import check_pool, check_tree

FOLDER = Path(__file__).parents[1] / "golden" / "phi3" / "longrope"


@pytest.fixture(scope="module")
def engine():
    engine = Engine.load(FOLDER, dtype="float32", threads=1, kv_memory=16 << 20)
    assert engine.shape.switch_length == 32
    return engine


def fresh(engine, tokens):
    return engine.logits(tokens)[-1].log_softmax(-1)


def wander(driver, run, prompt, seed, records):
    """Grow single nodes and chains at random places, ask for some of mixed depths, drop some."""
    rng = random.Random(seed)
    tree = driver.open_tree(run, "target", prompt)
    records.append((list(prompt), (yield Evaluate(tree, [tree.root])).rows_NV[0]))
    live = [tree.root]
    for _ in range(12):
        for _ in range(rng.randint(1, 4)):
            live += tree.grow_path(rng.choice(live), [rng.randrange(3, 100) for _ in range(rng.choice([1, 1, 2, 7]))])
        live = [n for n in dict.fromkeys(live) if tree.is_live(n)]
        asked = [n for n in live if not tree.is_evaluated(n) and rng.random() < 0.6]
        if asked:
            for node, row in zip(asked, (yield Evaluate(tree, asked)).rows_NV, strict=True):
                records.append(([*prompt, *tree.path(node)], row.clone()))
        check_tree(tree)
        if rng.random() < 0.4:
            tree.keep(rng.sample(live, min(3, len(live))))
            live = [n for n in live if tree.is_live(n)]
    return SearchResult([Output([], None, None, "length")])


@pytest.mark.parametrize("seed", range(2))
def test_random_trees_across_the_border(engine, seed):
    rng = random.Random(seed)
    records, driver = [], engine.service().driver
    runs = []
    for i, length in enumerate([20, 29, 31, 32, 33, 50]):
        prompt = [rng.randrange(3, 100) for _ in range(length)]
        runs.append(driver.submit(Job(lambda run, p=prompt, i=i: wander(driver, run, p, seed * 10 + i, records))))
    while driver.busy:
        driver.step()
    assert not [run.error for run in runs if run.error]
    assert len({len(tokens) > 32 for tokens, _ in records}) == 2
    for tokens, row in records:
        torch.testing.assert_close(row, fresh(engine, tokens), atol=1e-4, rtol=1e-4)
    check_pool(engine.pool, [])


def test_logprobs_and_neighbours(engine):
    """Each output's log-probability is what fresh prefills of its prefixes add up to, alone and beside others."""
    rng = random.Random(9)
    prompts = [[rng.randrange(3, 100) for _ in range(length)] for length in (5, 26, 30, 40)]
    for search in (Greedy(), Trie(beams=4, num_return_sequences=4), Sample(seed=1, num_return_sequences=3)):
        together = engine.generate(prompts, search, max_new_tokens=16, ignore_eos=True)
        for prompt, result in zip(prompts, together, strict=True):
            [alone] = engine.generate([prompt], search, max_new_tokens=16, ignore_eos=True)
            assert [o.token_ids for o in alone.outputs] == [o.token_ids for o in result.outputs]
            for output in result.outputs:
                tokens = [*prompt, *output.token_ids]
                places = range(len(prompt), len(tokens))
                want = sum(float(fresh(engine, tokens[:p])[tokens[p]]) for p in places)
                assert output.logprob == pytest.approx(want, abs=1e-3)


def test_a_session_across_the_border(engine):
    session, tokens = Session(engine), [7, 8, 9, 10] * 5
    try:
        for turn in range(4):
            [done] = [e for e in session.stream(tokens, Greedy(), max_new_tokens=6) if isinstance(e, Done)]
            [want] = engine.generate([tokens], Greedy(), max_new_tokens=6)
            assert done.result.outputs[0].token_ids == want.outputs[0].token_ids
            assert done.result.outputs[0].logprob == pytest.approx(want.outputs[0].logprob, abs=1e-3)
            tokens = [*tokens, *want.outputs[0].token_ids, 11 + turn]
        assert len(tokens) > 33
    finally:
        session.close()
    check_pool(engine.pool, [])
