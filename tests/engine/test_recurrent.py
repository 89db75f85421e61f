"""Searches of models with recurrent layers: their log-probabilities are those of each text evaluated by itself."""

import pytest
import torch

from engine import Engine, Request
from engine.cache.tree import TokenTree
from engine.drafts.backoff import NGramDrafter
from engine.errors import KVMemoryError
from engine.load.budget import plan
from engine.load.options import LoadOptions
from engine.load.sizes import Workload
from engine.step.driver import Driver
from engine.step.jobs import Job
from engine.step.packing import Chunk
from kernels.layout import BLOCK
from models.errors import CheckpointError
from models.shard import Shard
from search import ADED, DSBD, ULTS, BeamSample, BoN, Diverse, Greedy, Sample, SBoN, Speculative, Trie
from tests.eager import EagerDrafts
from tests.invariants import check_pool
from tests.marks import needs_cpp
from tests.recurrent import BY_KEY, CHANNELS, SCAN, check_stores, fresh, hybrid

PROMPTS = [[5, 6, 7], [*range(3, 90)], [1, 9, 9, 1] * 8 + [4]]
SEARCHES = [
    Greedy(),
    Sample(num_return_sequences=3),
    Trie(beams=4, num_return_sequences=4),
    Diverse(beams=4, groups=2),
    BeamSample(beams=3),
    ULTS(),
    ADED(nodes=8),
]


BESIDE = {"kind": SCAN, "beside": True}


BY_CHANNELS = {"kind": CHANNELS}
SHARED = {"kind": SCAN, "shared": True, "seed": 7}
NAMES = ["delta net", "delta net by key", "scan", "scan beside attention", "scans sharing blocks", "scan by channels"]


@pytest.fixture(params=[{}, {"kind": BY_KEY}, {"kind": SCAN}, BESIDE, SHARED, BY_CHANNELS], ids=NAMES)
def load(request, tmp_path, monkeypatch):
    def make(**options):
        names = "layers", "seed"
        hybrid(tmp_path / "model", monkeypatch, **request.param, **{n: options.pop(n) for n in names if n in options})
        return Engine.load(tmp_path / "model", **{"dtype": "float32", "kv_memory": "48M", "threads": 1} | options)

    return make


def check(engine, prompt, result, tolerance=1e-4):
    """Every token's log-probability is that of the text by itself."""
    for output in result.outputs:
        ids = [*prompt, *output.token_ids]
        rows = fresh(engine, ids)[len(prompt) - 1 :]
        expected = [rows[i, token].item() for i, token in enumerate(output.token_ids)]
        assert output.token_logprobs == pytest.approx(expected, abs=tolerance)
        assert len(ids) > len(prompt)


def answers(engine, search, new=45, prompts=PROMPTS):
    asked = [Request(prompt, search, new, ignore_eos=True, logprobs=1) for prompt in prompts]
    found = dict(engine.serve(asked))
    return [found[i] for i in range(len(asked))]


@pytest.mark.parametrize("search", SEARCHES, ids=lambda search: type(search).__name__)
def test_every_search_is_exact(search, load):
    engine = load()
    new = 12 if isinstance(search, ULTS) else 45
    for prompt, result in zip(PROMPTS, answers(engine, search, new), strict=True):
        check(engine, prompt, result)
    check_stores(engine)
    check_pool(engine.pool, [])


@pytest.mark.parametrize("search", [SBoN(n=5), BoN(n=3)], ids=lambda search: type(search).__name__)
def test_best_of_n_with_a_reward(search, load):
    engine = load()
    engine.add("reward", lambda prompt, texts: [float(len(text) % 7) for text in texts])
    for prompt, result in zip(PROMPTS, answers(engine, search, 40), strict=True):
        check(engine, prompt, result)
    check_stores(engine)


@pytest.mark.parametrize("search", [DSBD(draft_beams=3), Speculative(gamma=4)], ids=lambda s: type(s).__name__)
def test_drafts_of_another_recurrent_model(search, load, tmp_path, monkeypatch):
    engine = load()
    hybrid(tmp_path / "draft", monkeypatch, seed=2)
    draft = Engine.load(tmp_path / "draft", dtype="float32", kv_memory="48M", threads=1)
    engine.add("draft", draft)
    for prompt, result in zip(PROMPTS, answers(engine, search), strict=True):
        check(engine, prompt, result)
    check_stores(engine)
    check_stores(draft)


@pytest.mark.parametrize("layers", ["ra", "rrra", "ar", "arrr", "rr"])
@pytest.mark.parametrize(
    "load", [{}, {"interleaved": True}, {"kind": SCAN}, BESIDE, SHARED, BY_CHANNELS], indirect=True, ids=str
)
def test_layers_of_both_kinds_in_any_order(layers, load):
    engine = load(layers=layers)
    for search in (Greedy(), Trie(beams=3)):
        for prompt, result in zip(PROMPTS, answers(engine, search, 36), strict=True):
            check(engine, prompt, result)
    check_stores(engine)


def test_prompts_in_chunks_drafts_and_preemption(load, monkeypatch):
    """The same tokens whatever rides along, and when a search has to begin anew."""
    engine = load()
    tokens = {}
    for search in (Greedy(), Trie(beams=4)):
        tokens[search] = [r.outputs[0].token_ids for r in answers(engine, search)]
    engine.runner.budget = 19
    for search, expected in tokens.items():
        results = answers(engine, search)
        assert [r.outputs[0].token_ids for r in results] == expected
        [check(engine, prompt, result) for prompt, result in zip(PROMPTS, results, strict=True)]
    engine.runner.budget, engine.drafts = 256, EagerDrafts(NGramDrafter())
    for search, expected in tokens.items():
        results = answers(engine, search)
        assert [r.outputs[0].token_ids for r in results] == expected
        assert sum(r.stats["drafted_accepted"] for r in results) > 0
        [check(engine, prompt, result) for prompt, result in zip(PROMPTS, results, strict=True)]
    check_stores(engine)

    preempted, preempt = list[Job](), Driver._preempt
    monkeypatch.setattr(Driver, "_preempt", lambda driver, job: (preempted.append(job), preempt(driver, job))[1])
    rows = 110 if engine.shape.delta.block == BLOCK else 50
    small = load(kv_memory=3 * rows * engine.pool.row_bytes)  # they run out, of which prompts take half; or states do
    results = answers(small, Trie(beams=4))
    assert [r.outputs[0].token_ids for r in results] == tokens[Trie(beams=4)]
    assert preempted
    check_stores(small)


@needs_cpp
def test_log_probabilities_are_the_same_bits(load):
    """Alone and together, in chunks, drafted, with other threads."""

    def bits(search, prompts=PROMPTS):
        return [(r.outputs[0].token_ids, r.outputs[0].token_logprobs) for r in answers(engine, search, 40, prompts)]

    engine = load()
    alone = [bits(Greedy(), [prompt])[0] for prompt in PROMPTS]
    beams = [bits(Trie(beams=4), [prompt])[0] for prompt in PROMPTS]
    assert bits(Greedy()) == alone and bits(Trie(beams=4)) == beams and bits(ADED(nodes=6)) == alone
    engine.runner.budget = 19
    assert bits(Greedy()) == alone and bits(Trie(beams=4)) == beams
    engine.runner.budget, engine.drafts = 256, EagerDrafts(NGramDrafter())
    assert bits(Greedy()) == alone and bits(Trie(beams=4)) == beams
    before = torch.get_num_threads()
    try:
        engine = load(threads=2)
        assert bits(Greedy()) == alone and bits(Trie(beams=4)) == beams
    finally:
        torch.set_num_threads(before)


def test_rows_that_do_not_suffice_for_one_search(load):
    engine = load(kv_memory=3 * 70 * load().pool.row_bytes)
    with pytest.raises(KVMemoryError, match="rows of recurrent layers are in use"):
        engine.generate([PROMPTS[1]], Sample(num_return_sequences=40), max_new_tokens=40, ignore_eos=True)
    check_stores(engine)
    check_pool(engine.pool, [])
    [result] = engine.generate([PROMPTS[1]], Greedy(), max_new_tokens=9, ignore_eos=True, logprobs=1)
    check(engine, PROMPTS[1], result)


def test_too_little_memory_for_one_sequence(load):
    with pytest.raises(KVMemoryError, match="does not hold the states of the recurrent layers for one sequence"):
        load(kv_memory="12K")


def test_a_conversation_goes_on_where_it_ended(load):
    engine = load()
    tree = TokenTree(engine.pool, PROMPTS[1])
    trunk, _ = tree.pending([tree.root])
    engine.runner.forward([Chunk(tree, trunk, [], tree.allocate(trunk, []))])
    longer = [*PROMPTS[1], 4, 5, 6]
    tree = TokenTree(engine.pool, longer, trunk=tree.retire())
    assert tree.reused == len(PROMPTS[1])
    trunk, _ = tree.pending([tree.root])
    hidden = engine.runner.forward([Chunk(tree, trunk, [], tree.allocate(trunk, []))])
    torch.testing.assert_close(
        torch.log_softmax(engine.runner.model.logits(hidden), -1), fresh(engine, longer)[-3:], rtol=0, atol=1e-4
    )
    tree = TokenTree(engine.pool, [*PROMPTS[1][:40], 4, 5, 6], trunk=tree.retire())
    assert tree.reused == 0  # its state is of more tokens
    tree.release()
    check_stores(engine)


@pytest.mark.parametrize("options", [{"kv_dtype": "int8"}, {"dtype": "bfloat16"}, {"quant": "int8"}], ids=str)
def test_other_dtypes(options, load):
    """Keys and values of 8 bits, 16-bit numbers, weights of 8 bits: as the text by itself in the same format."""
    engine = load(**options)
    assert all(x.dtype == torch.float32 for x in engine.pool.cache.recurrent)
    for prompt, result in zip(PROMPTS, answers(engine, Trie(beams=3), 36), strict=True):
        check(engine, prompt, result, 0.2 if "dtype" in options else 2e-2)
    check_stores(engine)


def test_memory_is_reported(load):
    engine = load()
    [result] = answers(engine, Trie(beams=15), 20, PROMPTS[1:2])
    pages = result.stats["live_nodes_peak"] * engine.pool.bytes_per_token
    assert pages < result.stats["kv_bytes_peak"] < pages + 300 * engine.pool.row_bytes + 5 * engine.pool.state_bytes


def test_recurrent_layers_are_not_divided_among_processes(load):
    with pytest.raises(CheckpointError, match="recurrent layers cannot be divided among processes"):
        load(shard=Shard(0, 2))


def test_the_plan_counts_rows_and_states(load, tmp_path):
    """A third of the cache is for keys and values: what the plan says is enough is, and a byte less is not."""
    engine = load()
    options = LoadOptions(tmp_path / "model", dtype="float32")
    planned = plan(options, Workload(Greedy(), 200, 50))
    assert planned.token == 3 * engine.pool.bytes_per_token
    cache = planned.cache(0)
    shape = engine.shape
    assert cache == planned.least == 3 * max(2 * shape.delta.reach * shape.row_bytes, 3 * shape.state_bytes)
    load(kv_memory=cache)
    with pytest.raises(KVMemoryError, match="give --kv-memory at least"):
        load(kv_memory=cache - 1)
    assert planned.cache(10**6) == (10**6 + 2) * planned.token


def test_a_model_of_float64_has_float32_in_these_layers(load):
    """Its logits are those of float32, whose layers hold the same rows and states."""
    ids, logits = PROMPTS[1], {}
    for dtype in ("float32", "float64"):
        engine = load(dtype=dtype)
        logits[dtype] = engine.logits(ids)
        [result] = engine.generate([ids], Trie(beams=2), max_new_tokens=3, ignore_eos=True, logprobs=1)
        check(engine, ids, result)
    assert torch.allclose(logits["float64"], logits["float32"], atol=1e-4)
