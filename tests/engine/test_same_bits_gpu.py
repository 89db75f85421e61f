"""A request's log-probabilities are the same bits alone and in a batch, drafted and in chunks, with the Triton kernels
where `COPPICE_SAME_BITS=on` asks for it; in Triton's interpreter, where floats are multiplied by Triton too."""

import random

import pytest
import torch

from engine import Engine, Request
from engine.cache.pool import PagePool
from engine.load.loading import LoadedModel
from engine.step.graphs import GraphRunner
from models.formats import floats
from search import ADED, Greedy, Trie
from tests.engine.test_same_bits import answer, bits
from tests.marks import needs_interpreter
from tools.random_checkpoint import make

pytestmark = needs_interpreter

VOCAB = 60


@pytest.fixture
def folder(tmp_path):
    make(tmp_path, layers=2, width=32, mlp=48, heads=2, kv_heads=1, vocab=VOCAB, max_positions=400, seed=1, scale=0.7)
    return tmp_path


def requests(search):
    """Lengths around blocks of keys and the cut at 256 positions; text that repeats itself makes drafts."""
    rng = random.Random(2)
    texts = [[1] + [rng.randrange(3, VOCAB) for _ in range(n)] for n in (254, 6)]
    return [Request(text, search, 4, ignore_eos=True, logprobs=2) for text in (texts[0], (texts[1] * 9)[:50])]


def test_log_probabilities_are_the_same_bits(folder, monkeypatch, one_order):
    from kernels.linear import triton

    def multiply(layer, x):
        return triton.floats(x, torch.cat(layer.weights), layer.bias)

    monkeypatch.setattr(floats, "has_kernels", lambda *_: False)
    monkeypatch.setattr(floats, "can_pack", lambda *_: False)
    monkeypatch.setattr(floats.FloatLinear, "forward", multiply)
    plain = Engine.load(folder, dtype="bfloat16", kv_memory=1 << 22, threads=1)
    pool = PagePool(plain.shape, 100, 16, torch.bfloat16)
    runner = GraphRunner(plain.runner.model, pool, plain.runner.vocab_size, impl="triton", record=lambda run: run)
    engine = Engine(LoadedModel(runner, plain.shape, None, eos_token_ids=plain.eos_token_ids))
    run = lambda asked: bits(answer(engine, asked))  # noqa: E731
    alone = [run([request])[0] for request in requests(Greedy()) + requests(Trie(beams=3))[1:]]
    runner.budget = 61  # prompts in chunks
    together = answer(engine, requests(Greedy()) + requests(Trie(beams=3))[1:] + requests(ADED(nodes=4)))
    assert bits(together) == alone + alone[:2]
    assert together[-1].stats["nodes_evaluated"] > together[1].stats["nodes_evaluated"]  # drafts rode along
