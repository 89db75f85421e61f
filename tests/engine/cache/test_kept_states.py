"""Cached prefixes of models with recurrent layers: what is kept, what a prompt then reads, answers of a cold engine."""

import random

import pytest

from engine import Engine, Request, Session
from engine.cache.kept_states import KeptStates
from engine.cache.states import Stores, TrunkStates
from engine.load import pools
from kernels.layout import BLOCK, DeltaKind
from search import Greedy, Trie
from tests.engine.cache.test_prefixes import same
from tests.invariants import check_kept_states, check_pool
from tests.marks import needs_cpp
from tests.recurrent import CHANNELS, SCAN, VOCAB, check_stores, hybrid

KIND = DeltaKind(1, 1, 1, 1, taps=4)


def kept_of(rows=90, states=9, most_rows=90, most_states=9, spacing=BLOCK):
    stores = Stores(KIND, rows=rows, states=states)
    return KeptStates(stores, 1, most_rows, most_states, spacing)


def trunk_of(kept, *lengths):
    """A trunk after passes that end at these lengths."""
    states, length = TrunkStates(kept.stores), 0
    for end in lengths:
        states.extend(length, end - length)
        length = end
    states.settle(length)
    return states


def used(kept):
    check_kept_states(kept, {*range(1000)})
    return kept.stores.rows.used, kept.stores.states.used


def test_a_trunk_goes_on_from_what_another_one_left():
    kept, pages = kept_of(), [*range(100, 170)]
    left = trunk_of(kept, 40, 70)
    kept.keep(pages, 70, left)
    state, rows = left.state, dict(left.rows)
    left.truncate(0)
    assert used(kept) == (3 + 6, 1)
    assert [kept.find(pages, n) for n in (70, 69, 67, 64, 63, 31)] == [70, 69, 67, 64, 0, 0]
    assert kept.find([*pages[:66], 7, 8, 9, 10], 70) == 66  # the tokens after them are others
    taken = trunk_of(kept, 33)
    kept.share(pages, 66, taken)
    assert (taken.state, taken.folded) == (state, 64)
    assert taken.rows == {place: rows[place] for place in range(61, 66)}
    taken.extend(66, 40)
    assert taken.base(66, 66) == state != taken.state
    kept.evict()
    assert taken.base(66, 66) == state and used(kept)[1] == 2  # the trunk has it still
    taken.truncate(0)
    assert used(kept) == (0, 0) and not kept.evict()


def test_prefixes_that_part_within_a_block_share_its_state():
    kept, pages = kept_of(), [*range(40)]
    kept.keep(pages, 40, first := trunk_of(kept, 40))
    second = trunk_of(kept, 5)
    kept.share(pages, 35, second)
    second.extend(35, 3)
    others = [*pages[:35], 90, 91, 92]
    kept.keep(others, 38, second)
    first.truncate(0), second.truncate(0)
    assert used(kept) == (3 + 8 + 3, 1) and kept.find(others, 38) == 38 and kept.find(pages, 40) == 40
    kept.forget([92, 39])
    assert used(kept) == (3 + 7 + 2, 1) and kept.find(others, 38) == 37
    kept.forget([31])  # the token that the state ends with
    assert used(kept) == (0, 0) and kept.find(pages, 40) == 0


def test_what_was_used_the_longest_ago_gives_way():
    kept = kept_of(rows=40, states=3)
    for i in range(3):
        trunk = trunk_of(kept, 32)
        kept.keep(range(100 * i, 100 * i + 32), 32, trunk)
        trunk.truncate(0)
    kept.share(range(32), 32, trunk := TrunkStates(kept.stores))
    trunk.truncate(0)
    trunk.extend(0, 40)
    assert [*kept.states] == [231, 31] and kept.stores.states.used == 3
    trunk.extend(40, 31)  # rows: the first state's, the trunk's, and 31 more
    assert [*kept.states] == [31]
    trunk.truncate(0)
    few = kept_of(most_states=2, most_rows=7)
    for i in range(3):
        few.keep(range(100 * i, 100 * i + 33), 32 + (i == 2), trunk := trunk_of(few, 33))
        trunk.truncate(0)
    assert [*few.states] == [131, 231] and used(few) == (7, 2)


def test_states_inside_of_a_prompt_take_no_more_memory_than_it():
    kept, pages = kept_of(spacing=100), range(300)
    trunk = TrunkStates(kept.stores)
    for length in range(0, 300, 20):
        trunk.extend(length, 20)
        kept.keep(pages, length + 20, trunk, inside=True)
    assert [slot + 1 for slot in kept.states] == [128, 256]


@pytest.fixture(params=[1, 16], ids=["tokens", "pages"])
def page_size(request, monkeypatch):
    monkeypatch.setitem(pools.PAGE_SIZE, "cpu", request.param)


@pytest.fixture
def load(request, tmp_path, monkeypatch):
    hybrid(tmp_path, monkeypatch, **getattr(request, "param", {}))
    options = {"dtype": "float32", "threads": 1, "kv_memory": 6 << 20}
    return lambda cache="on", **more: Engine.load(tmp_path, prefix_cache=cache, **options | more)


def read(engine, prompt, search=None, new=4):
    """A result, and how many tokens its passes evaluated."""
    passes, pack = [], engine.runner.pack
    engine.runner.pack = lambda chunks: (passes.extend(map(len, chunks)), pack(chunks))[1]
    [result] = engine.generate([prompt], search or Greedy(), max_new_tokens=new, ignore_eos=True)
    engine.runner.pack = pack
    check_stores(engine)
    check_pool(engine.pool, [])
    return result, sum(passes)


@pytest.mark.parametrize(
    "load",
    [{}, {"kind": SCAN}, {"kind": SCAN, "beside": True}, {"kind": SCAN, "shared": True}, {"kind": CHANNELS}],
    indirect=True,
    ids=["delta net", "scan", "scan beside attention", "scans sharing blocks", "scan by channels"],
)
def test_a_chat_reads_its_new_tokens_only(load, page_size):
    """By a server's requests, each with the whole conversation; then with another answer in its place."""
    warm, cold = load(), load("off")
    prompt = [3 + i % 90 for i in range(70)]
    evaluated = 0
    for turn in range(4):
        result, tokens = read(warm, prompt, Trie(beams=3))
        same(result, read(cold, prompt, Trie(beams=3))[0])
        assert result.stats["reused_tokens"] == evaluated
        assert tokens == len(prompt) - evaluated + result.stats["nodes_evaluated"] - 1  # one is the prompt's last
        evaluated = len(prompt) + 3
        prompt = [*prompt, *result.outputs[0].token_ids, *(5 + turn + i for i in range(7))]
    again, tokens = read(warm, prompt[:-7])
    assert again.stats["reused_tokens"] >= len(prompt) - 7 - BLOCK and tokens <= 4 + BLOCK


@pytest.mark.parametrize("length", [64, 70, 95, 96])
def test_the_same_prompt_again(length, load):
    warm = load()
    prompt = [3 + i % 90 for i in range(length)]
    first, again = read(warm, prompt), read(warm, prompt)
    same(first[0], again[0])
    assert again[0].stats["reused_tokens"] >= (length - 1 if length % BLOCK else length - BLOCK)


def test_prompts_that_begin_alike_leave_a_state_where_they_part(load, page_size):
    warm, cold = load(), load("off")
    stem = [3 + i % 90 for i in range(150)]
    reused = []
    for i in range(4):
        prompt = [*stem, *(7 * i + j for j in range(1, 41))]
        result, tokens = read(warm, prompt)
        same(result, read(cold, prompt)[0])
        reused.append(result.stats["reused_tokens"])
        assert tokens == len(prompt) + 3 - reused[-1]
    assert reused[1] < 128 and reused[2:] == [128, 128]


def test_random_requests_give_what_a_cold_engine_gives(load, page_size):
    rng = random.Random(3)
    warm, cold = load(kv_memory=700_000), load("off", kv_memory=700_000)
    stems = [[rng.randrange(3, VOCAB) for _ in range(n)] for n in (20, 64, 150)]
    for _ in range(9):
        asked = []
        for _ in range(3):
            stem = rng.choice(stems)
            prompt = stem[: rng.randint(1, len(stem))] + [rng.randrange(3, VOCAB) for _ in range(rng.randint(0, 40))]
            options = {"cache_salt": rng.choice(["", "", "", "a", None]), "ignore_eos": True}
            asked.append(Request(prompt, rng.choice([Greedy(), Trie(beams=3)]), rng.choice([1, 9, 40]), **options))
        results = [dict(engine.serve(asked)) for engine in (warm, cold)]
        for i in range(3):
            same(results[0][i], results[1][i])
        check_stores(warm)
        check_pool(warm.pool, [])
    prefixes = warm.pool.prefixes
    assert prefixes.hits > 5 and prefixes.reused_tokens > 200
    warm.pool.prefixes.clear()
    assert warm.pool.stores.rows.used == warm.pool.stores.states.used == 0


def test_sessions_of_the_same_beginning(load):
    warm, cold = load(), load("off")
    begin = [3 + i % 90 for i in range(70)]
    for i in range(3):
        sessions = [Session(warm), Session(cold)]
        for prompt in ([*begin, 1 + i], [*begin, 1 + i, *range(40)], [*begin, 99]):
            done = [[*session.stream(prompt, Greedy(), max_new_tokens=40)][-1].result for session in sessions]
            same(*done)
        assert done[0].stats["reused_tokens"] >= 64 and done[1].stats["reused_tokens"] == 0
        for session in sessions:
            session.close()
        check_stores(warm)


@needs_cpp
def test_the_same_bits_from_a_warm_cache(load):
    rng = random.Random(5)
    stem = [rng.randrange(3, VOCAB) for _ in range(100)]
    prompts = [[*stem[:n], *(rng.randrange(3, VOCAB) for _ in range(5))] for n in (30, 64, 90, 100, 91)]

    def bits(engine, search):
        results = dict(engine.serve(Request(p, search, 36, ignore_eos=True, logprobs=1) for p in prompts))
        found = [results[i].outputs[0] for i in range(len(prompts))]
        return [(x.token_ids, x.token_logprobs) for x in found], [r.stats["reused_tokens"] for r in results.values()]

    warm, cold = load(), load("off")
    for search in (Greedy(), Trie(beams=3), Greedy()):
        found, reused = bits(warm, search)
        assert found == bits(cold, search)[0]
    assert min(reused) >= 32
