"""A request's log-probabilities are the same bits alone and in a batch, drafted, from a cached prefix, in chunks,
preempted, and with any number of threads; with the C++ kernels."""

import random

import pytest
import torch

from engine import Engine, Request
from engine.drafts.backoff import NGramDrafter
from engine.step.drafting import EngineDrafts
from engine.step.driver import Driver
from engine.step.jobs import Job
from search import ADED, Greedy, Trie
from tests.marks import needs_cpp
from tools.random_checkpoint import make

pytestmark = needs_cpp

VOCAB = 260
OPTIONS = [
    pytest.param({"dtype": "float32"}, id="float32"),
    pytest.param({"dtype": "bfloat16"}, id="bfloat16"),
    pytest.param({"dtype": "bfloat16", "kv_dtype": "int8"}, id="int8 cache"),
    pytest.param({"dtype": "bfloat16", "quant": "int8"}, id="int8"),
    pytest.param({"dtype": "float32", "quant": "int4"}, id="int4"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("llama")
    make(folder, layers=2, width=64, mlp=96, heads=4, kv_heads=2, vocab=VOCAB, max_positions=600, seed=1, scale=0.7)
    return folder


def prompts():
    """Lengths around blocks of keys; two begin alike, and text that repeats itself makes drafts that are right."""
    rng = random.Random(2)
    texts = [[1] + [rng.randrange(3, VOCAB) for _ in range(n)] for n in (4, 30, 33, 70, 270)]
    return [*texts, [*texts[3][:50], 9, 8, 7], (texts[0] * 12)[:41], texts[2] + texts[2]]


def asked(search):
    return [Request(prompt, search, 24, ignore_eos=True, logprobs=3) for prompt in prompts()]


def bits(results):
    """Tokens and log-probabilities of the best output; floats compare bit by bit, as none is 0 or NaN."""
    return [(r.outputs[0].token_ids, r.outputs[0].token_logprobs, r.outputs[0].top_logprobs) for r in results]


def answer(engine, requests):
    results = dict(engine.serve(requests))
    return [results[i] for i in range(len(requests))]


def run(engine, requests):
    return bits(answer(engine, requests))


@pytest.mark.parametrize("options", OPTIONS)
def test_log_probabilities_are_the_same_bits(options, folder, monkeypatch):
    load = lambda **more: Engine.load(folder, **options, **{"kv_memory": 1 << 22, "threads": 1} | more)  # noqa: E731
    before = torch.get_num_threads()
    try:
        engine = load(prefix_cache="off")
        alone = [run(engine, [request])[0] for request in asked(Greedy())]
        assert run(engine, asked(Greedy())) == alone
        assert run(engine, asked(ADED(nodes=6))) == alone  # drafted
        beams = [run(engine, [request])[0] for request in asked(Trie(beams=4))]
        assert run(engine, asked(Trie(beams=4)) + asked(Greedy())) == beams + alone
        engine.runner.budget = 19  # prompts in chunks
        assert run(engine, asked(Greedy())) == alone
        assert run(engine, asked(Trie(beams=4))) == beams
        engine = load(threads=2, prefix_cache="on")
        assert run(engine, asked(Greedy())) == alone
        again = answer(engine, asked(Greedy()))
        assert bits(again) == alone and all(r.stats["reused_tokens"] for r in again)
        assert run(engine, asked(Trie(beams=4))) == beams
        small = load(kv_memory=420 * engine.pool.bytes_per_token, prefix_cache="off")  # not enough for all at once
        preempted, preempt = list[Job](), Driver._preempt
        monkeypatch.setattr(Driver, "_preempt", lambda driver, job: (preempted.append(job), preempt(driver, job))[1])
        assert run(small, asked(Trie(beams=4))) == beams and preempted
        drafting = load(prefix_cache="off")
        drafting.drafts = EngineDrafts(NGramDrafter(), always=True)  # whatever it costs
        for search, wanted in ((Greedy(), alone), (Trie(beams=4), beams)):
            answers = answer(drafting, asked(search))
            assert bits(answers) == wanted and sum(r.stats["drafted_accepted"] for r in answers) > 0
    finally:
        torch.set_num_threads(before)
