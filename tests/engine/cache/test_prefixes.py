"""Cached prefixes: the tokens of a cold engine, whatever ran before and beside; the pool exact; no memory lost."""

import contextlib
import json
import random
from pathlib import Path

import pytest

from engine import Engine, KVMemoryError, Request, Session, UsageError
from engine.load import loading, pools
from search import DSBD, Greedy, Sample, Trie
from tests.invariants import check_pool
from tools.random_checkpoint import make

ROOT = Path(__file__).parents[3]
VOCAB = 120
SEARCHES = [Greedy(), Trie(beams=3), Sample(num_return_sequences=3, seed=4), Trie(beams=5, early_stopping=True)]


def make_folder(folder):
    make(folder, layers=2, width=32, mlp=48, heads=4, kv_heads=2, vocab=VOCAB, max_positions=400, seed=1, scale=0.7)
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_folder(tmp_path_factory.mktemp("llama"))


@pytest.fixture(params=[1, 4], ids=["tokens", "pages"])
def page_size(request, monkeypatch):
    monkeypatch.setitem(pools.PAGE_SIZE, "cpu", request.param)
    return request.param


def load(folder, tokens=4000, **options):
    per_token = 2 * 2 * 2 * 8 * 4  # layers, keys and values, heads, their size, bytes
    return Engine.load(folder, kv_memory=tokens * per_token, dtype="float32", **{"prefix_cache": "on"} | options)


def exact(engine, held=0):
    check_pool(engine.pool, [] if not held else None)
    assert engine.pool.used_pages == held


def same(warm, cold):
    assert [(o.token_ids, o.finish_reason) for o in warm.outputs] == [
        (o.token_ids, o.finish_reason) for o in cold.outputs
    ]
    assert [o.logprob for o in warm.outputs] == pytest.approx([o.logprob for o in cold.outputs], abs=1e-4)


def requests(rng, count):
    """Prompts that share beginnings, of different lengths, with salts and without."""
    stems = [[rng.randrange(3, VOCAB) for _ in range(rng.randint(5, 60))] for _ in range(3)]
    for _ in range(count):
        stem = rng.choice(stems)
        prompt = stem[: rng.randint(1, len(stem))] + [rng.randrange(3, VOCAB) for _ in range(rng.randint(0, 9))]
        options = {"logprobs": rng.choice([None, 1]), "cache_salt": rng.choice(["", "", "a", None])}
        yield Request(prompt, rng.choice(SEARCHES), rng.randint(1, 12), **options)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("tokens", [110, 4000])
def test_random_requests_give_what_a_cold_engine_gives(folder, page_size, tokens, seed):
    """With a pool that holds one of them at a time, and with one that holds all."""
    rng = random.Random(seed)
    warm, cold = load(folder, tokens, parallel=3), load(folder, tokens, parallel=3, prefix_cache="off")
    asked = [*requests(rng, 25)]
    results, expected = dict(warm.serve(asked)), dict(cold.serve(asked))
    for i, request in enumerate(asked):
        if isinstance(expected[i], KVMemoryError):
            assert isinstance(results[i], KVMemoryError), (i, request)
            continue
        same(results[i], expected[i])
        assert results[i].stats["nodes_evaluated"] == expected[i].stats["nodes_evaluated"]
        assert request.cache_salt is not None or not results[i].stats["reused_tokens"]
    prefixes = warm.pool.prefixes
    assert prefixes.hits > 3 and prefixes.reused_tokens > 30
    exact(warm)
    warm.pool.prefixes.clear()
    assert not warm.pool.kept and not warm.pool.idle_pages
    exact(warm)


def test_a_prompt_is_read_once(folder, page_size):
    warm, document = load(folder), [5 + i % 90 for i in range(300)]
    [first] = warm.generate([[*document, 7]], Greedy(), max_new_tokens=4)
    [again] = warm.generate([[*document, 9, 8]], Greedy(), max_new_tokens=4)
    assert first.stats["reused_tokens"] == 0 and again.stats["reused_tokens"] == 300
    assert again.stats["forward_passes"] == 4 and again.stats["nodes_evaluated"] == first.stats["nodes_evaluated"]
    continued = [*document, 9, 8, *again.outputs[0].token_ids, 6]
    [more] = warm.generate([continued], Greedy(), max_new_tokens=2)
    assert more.stats["reused_tokens"] == len(continued) - 2  # the answer's last token was never evaluated
    assert warm.pool.prefixes.hits == 2
    exact(warm)


def test_requests_that_wait_share_what_the_first_reads(folder, page_size):
    warm, document = load(folder), [5 + i % 90 for i in range(390)]
    results = warm.generate([[*document, i] for i in range(10, 18)], Trie(beams=2), max_new_tokens=3)
    read = sum(390 - result.stats["reused_tokens"] for result in results)
    assert read < 390 + 8 * 40 and warm.pool.prefixes.lookups == 8
    cold = load(folder, prefix_cache="off")
    for warm_result, cold_result in zip(
        results, cold.generate([[*document, i] for i in range(10, 18)], Trie(beams=2), max_new_tokens=3), strict=True
    ):
        same(warm_result, cold_result)
    exact(warm)


def test_salts_keep_prompts_apart(folder):
    warm, prompt = load(folder), [5 + i % 90 for i in range(50)]
    reused = []
    for salt in ("", "a", "a", "b", None, ""):
        [result] = warm.generate([prompt], Greedy(), max_new_tokens=2, cache_salt=salt)
        reused.append(result.stats["reused_tokens"])
    assert reused == [0, 0, 49, 0, 0, 49]
    with pytest.raises(UsageError, match="cache_salt: expected a text or None, got 3"):
        warm.generate([prompt], Greedy(), cache_salt=3)


def test_a_prompt_token_is_reused_once_where_its_text_crosses_the_border_of_longrope():
    """The prompt is taken over from the cache in both variants of the rotary embeddings: below and above 32 tokens."""
    warm = Engine.load(ROOT / "tests/golden/phi3/longrope", dtype="float32", kv_memory=1 << 22, prefix_cache="on")
    for prompt, new in ((range(5, 35), 20), (range(5, 36), 8), (range(5, 45), 4)):
        for expected in (None, len(prompt) - 1):
            [result] = warm.generate([[*prompt]], Greedy(), max_new_tokens=new, ignore_eos=True)
            assert expected in (None, result.stats["reused_tokens"])
            assert 0 <= result.stats["reused_tokens"] < len(prompt)


def test_the_least_recently_used_goes_first(folder, page_size):
    warm = load(folder, 120)
    ask = lambda start: warm.generate([[start] * 4 + [9] * 26], Greedy(), max_new_tokens=2)[0].stats["reused_tokens"]  # noqa: E731
    assert [ask(3), ask(4), ask(5)] == [0, 0, 0]
    assert ask(3) == 29
    ask(6), ask(7)
    assert ask(3) > 0 and ask(4) == 0
    exact(warm)


def test_a_full_cache_is_no_full_pool(folder, page_size):
    """A search may take as much, and is refused as much, as without cached prefixes."""
    warm, cold = load(folder, 100), load(folder, 100, prefix_cache="off")
    for engine_ in (warm, cold):
        for start in range(10, 20):
            engine_.generate([[start] * 60], Greedy(), max_new_tokens=8)
        with pytest.raises(KVMemoryError):
            engine_.generate([[5] * 101], Greedy(), max_new_tokens=8)
    assert warm.pool.free_pages == cold.pool.free_pages == warm.pool.pages and warm.pool.idle_pages > 60 // page_size
    for beams in (2, 8):
        prompt = [[31] * 60 + [7, 9]]
        same(*(e.generate(prompt, Trie(beams=beams), max_new_tokens=5)[0] for e in (warm, cold)))
    exact(warm)


def test_sessions(folder, page_size):
    warm, cold = load(folder, 300), load(folder, 300, prefix_cache="off")
    for _ in range(2):
        sessions, prompts = [Session(warm), Session(cold)], [[5 + i % 90 for i in range(40)]] * 2
        for turn in range(3):
            done = [[*s.stream(p, Trie(beams=3), max_new_tokens=6)][-1] for s, p in zip(sessions, prompts, strict=True)]
            same(done[0].result, done[1].result)
            assert done[0].result.stats["reused_tokens"] >= done[1].result.stats["reused_tokens"]
            prompts = [[*p, *d.result.outputs[0].token_ids, 8 + turn] for p, d in zip(prompts, done, strict=True)]
        check_pool(warm.pool, sessions[0].trunk.pages)
        [beside] = warm.generate([prompts[0][:50]], Greedy(), max_new_tokens=3)
        assert beside.stats["reused_tokens"] == 49
        sessions[0].close(), sessions[1].close()
        exact(warm)


def evaluated(stream, prompt, turns=4, new=10):
    """How many tokens of its prompt each turn of a conversation evaluates."""
    for _ in range(turns):
        *_, done = stream(prompt, Greedy(), max_new_tokens=new, ignore_eos=True)
        yield len(prompt) - done.result.stats["reused_tokens"]
        prompt = [*prompt, *done.result.outputs[0].token_ids, 5, 6]


def test_a_session_keeps_more_than_idle_pages_may_take(folder, monkeypatch):
    monkeypatch.setattr(loading, "IDLE", 80 * 256)  # 80 tokens
    warm = Engine.load(folder, dtype="float32", prefix_cache="on")
    assert [*evaluated(warm.stream, [*range(3, 63)])] == [60, 3, 4, 16]
    with contextlib.closing(Session(warm)) as session:
        assert [*evaluated(session.stream, [*range(63, 113)], 5)] == [50, 3, 3, 3, 3]
    exact(warm)


def test_a_session_keeps_keys_that_are_not_cached():
    """Those of a model whose keys depend on the length of the sequence, up to the length from which they do."""
    engine = Engine.load(ROOT / "tests/golden/llama/dynamic", dtype="float32", kv_memory=1 << 20, prefix_cache="on")
    assert [*evaluated(engine.stream, [5, 6, 7], new=4)] == [3, 9, 15, 21]
    with contextlib.closing(Session(engine)) as session:
        assert [*evaluated(session.stream, [5, 6, 7], 7, new=4)] == [3, 3, 3, 3, 3, 33, 39]


def test_companions(folder, page_size):
    warm = load(folder, 600, draft=folder)
    cold = load(folder, 600, draft=folder, prefix_cache="off")
    prompt, search = [5 + i % 90 for i in range(60)], DSBD(draft_beams=2, gamma=3, seed=3)
    for _ in range(3):
        same(*(e.generate([prompt], search, max_new_tokens=10)[0] for e in (warm, cold)))
    assert warm.companions["draft"].pool.idle_pages > 0
    exact(warm), exact(warm.companions["draft"])


@pytest.mark.parametrize("family", ["lfm2/plain", "mistral/window", "gemma/two", "phi3/longrope", "llama/plain"])
@pytest.mark.parametrize("kv_dtype", ["auto", "int8"])
def test_families(family, kv_dtype, page_size):
    path = ROOT / "tests/golden" / family
    warm, cold = (
        Engine.load(path, kv_memory=1 << 22, dtype="float32", kv_dtype=kv_dtype, prefix_cache=cache)
        for cache in ("on", "off")
    )
    rng = random.Random(1)
    reach = min(warm.shape.max_positions or 60, 60) - 8
    stem = [rng.randrange(3, warm.runner.vocab_size) for _ in range(reach)]
    for _ in range(6):
        prompt = stem[: rng.randint(3, reach)] + [rng.randrange(3, warm.runner.vocab_size) for _ in range(2)]
        same(*(e.generate([prompt], Trie(beams=3), max_new_tokens=6)[0] for e in (warm, cold)))
    assert warm.pool.prefixes.hits >= 4
    exact(warm)


def test_keys_that_depend_on_the_whole_sequence_are_not_kept(tmp_path):
    make(tmp_path, layers=1, width=32, mlp=48, heads=4, kv_heads=2, vocab=VOCAB, max_positions=64, seed=1)
    config = json.loads((tmp_path / "config.json").read_text())
    config["rope_scaling"] = {"rope_type": "dynamic", "factor": 2.0}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert load(tmp_path).pool.prefixes is None
    with pytest.raises(UsageError, match="prefix_cache: expected on or off, got 'yes'"):
        load(tmp_path, prefix_cache="yes")


def test_a_session_caches_a_page_under_one_salt(folder):
    engine, other, text = load(folder, 120), load(folder), [*range(10, 50)]

    def ask(engine, ids, salt):
        return engine.generate([ids], Greedy(), max_new_tokens=8, cache_salt=salt)[0].outputs

    session = Session(engine)
    for salt in ("", None, "a"):
        [*_] = session.stream(text, Greedy(), max_new_tokens=8, ignore_eos=True, cache_salt=salt)
        check_pool(engine.pool, session.trunk.pages)
    session.close()
    for i in range(3):
        ask(engine, [*range(50 + 20 * i, 70 + 20 * i)] * 2, "b")
        assert ask(engine, [*text, 7], "a") == ask(other, [*text, 7], "a")
    check_pool(engine.pool, [])
