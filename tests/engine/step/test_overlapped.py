"""Passes that a GPU begins with before the host has the answer of the last one: the same tokens, whatever was guessed.

Without a GPU a pass is done when it is launched; that it is launched earlier is what these tests make of the runner.
"""

import random
from typing import Any

import pytest
import torch

from engine import Engine
from engine.cache.pool import PagePool
from engine.cache.tree import TokenTree
from engine.contract.top_sums import Next
from engine.engine import Request
from engine.load.loading import LoadedModel
from engine.service import starter
from engine.step.graphs import GraphRunner
from engine.step.jobs import Job
from engine.step.overlapped import Guess, choose
from engine.step.packing import Blank
from engine.step.runner import Launched, Runner
from engine.step.timing import Overlap
from models.shape import ModelShape
from search import Sample, Trie
from tests.invariants import check_pool, check_tree
from tools.random_checkpoint import make

PROMPTS = [[7, 20, 33], list(range(5, 40)), [9], list(range(40, 17, -1))]
END = 11


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    folder = tmp_path_factory.mktemp("llama")
    make(folder, layers=2, width=32, mlp=40, heads=4, kv_heads=2, vocab=48, max_positions=512, seed=3)
    return Engine.load(folder, dtype="float32", kv_memory=1 << 22)


@pytest.fixture
def events(monkeypatch):
    """The launches and reads, in order."""
    seen, read, wait = [], Runner.read, Launched.wait
    for kind in (Runner, GraphRunner):

        def launch(self, work, *arguments, real=kind.launch, **options):
            self.guessed = any(isinstance(chunk, Blank) for chunk in work.chunks)
            return real(self, work, *arguments, **options)

        monkeypatch.setattr(kind, "launch", launch)

    def launched(self, *arguments):
        seen.append("guess" if self.guessed else "launch")
        return read(self, *arguments)

    def landed(self):
        seen.append("read")
        return wait(self)

    monkeypatch.setattr(Runner, "read", launched)
    monkeypatch.setattr(Launched, "wait", landed)
    return seen


def ahead(plain, kind=Runner, pages=400, page_size=16):
    """An engine that looks ahead, with a pool of its own, full of NaN."""
    pool = PagePool(plain.shape, pages, page_size)
    for cache in (pool.cache.k_LGSD, pool.cache.v_LGSD):
        cache[:, :, pool.reserved * page_size :] = float("nan")
    options: dict[str, Any] = {"record": lambda run: run} if kind is GraphRunner else {}
    runner = kind(plain.runner.model, pool, plain.runner.vocab_size, impl="reference", **options)
    runner.asynchronous = True
    return Engine(LoadedModel(runner, plain.shape, plain.model.tokenizer, eos_token_ids=plain.eos_token_ids))


def check(plain, other, prompts, search, **options):
    wanted, got = (engine.generate(prompts, search, **options) for engine in (plain, other))
    for w, g in zip(wanted, got, strict=True):
        assert [o.token_ids for o in g.outputs] == [o.token_ids for o in w.outputs]
        assert [o.finish_reason for o in g.outputs] == [o.finish_reason for o in w.outputs]
        assert [o.logprob for o in g.outputs] == pytest.approx([o.logprob for o in w.outputs], abs=1e-4)
        for name in ("forward_passes", "nodes_evaluated", "live_nodes_peak", "unshared_nodes_peak"):
            assert g.stats[name] == w.stats[name], name
    check_pool(other.pool, [])
    return got


@pytest.mark.parametrize("kind", [Runner, GraphRunner])
@pytest.mark.parametrize("beams", [1, 3, 15])
@pytest.mark.parametrize("count", [1, 4])
def test_the_same_tokens(plain, kind, beams, count, events):
    search = Trie(beams=beams, num_return_sequences=beams, length_penalty=0.5)
    got = check(plain, ahead(plain, kind), PROMPTS[:count], search, max_new_tokens=14, eos_token_ids=[END])
    passes = max(result.stats["forward_passes"] for result in got)
    assert events.count("guess") >= passes - 3 * count


def test_a_pass_is_launched_before_the_last_one_is_read(plain, events):
    ahead(plain).generate([PROMPTS[0]], Trie(beams=3), max_new_tokens=6, ignore_eos=True)
    assert events == ["launch", *["guess", "read"] * 5, "read"]


def test_several_ends(plain, events):
    """The device knows which tokens end a hypothesis, and not when a search does."""
    engine = ahead(plain)
    for ends in ([END], [END, 3, 5, 30], list(range(24))):
        options = {"max_new_tokens": 12, "eos_token_ids": ends}
        check(plain, engine, PROMPTS, Trie(beams=4, num_return_sequences=4), **options)
    assert "guess" in events


def test_wrong_guesses_change_nothing(plain, monkeypatch, events):
    rng = random.Random(5)

    def wrong(guesses, numbers, ancestry_TC, vocab_size, impl):
        nodes = choose(guesses, numbers, ancestry_TC, vocab_size, impl)
        widths = [guess.next.width for guess in guesses]
        for guess, *parts in zip(guesses, nodes.token_n.split(widths), nodes.inherited_nC.split(widths), strict=True):
            if rng.random() < 0.5:
                guess.k += 1  # as no search asks
                parts[0].add_(1).remainder_(vocab_size)
                parts[1].zero_()
        return nodes

    monkeypatch.setattr("engine.step.overlapped.choose", wrong)
    for page_size, prompts in ((4, PROMPTS[:1]), (1, PROMPTS), (16, PROMPTS)):
        engine = ahead(plain, page_size=page_size, pages=6400 // page_size)
        for beams in (1, 5):
            check(plain, engine, prompts, Trie(beams=beams), max_new_tokens=20, eos_token_ids=[END])
    assert events.count("guess") > 60


def test_a_full_pool(plain, events):
    """Without room for a guess a search goes on as it would."""
    for pages in range(6, 20):
        engine = ahead(plain, pages=pages, page_size=4)
        check(plain, engine, [PROMPTS[0], PROMPTS[2]], Trie(beams=4), max_new_tokens=8, ignore_eos=True)
    assert "guess" in events


@pytest.mark.parametrize("shared", [False, True])
def test_processes_that_share_a_model_do_not_go_by_their_clocks(plain, monkeypatch, shared):
    """They would evaluate other passes than each other, and wait for ever."""
    monkeypatch.setattr(Launched, "seconds", 0.004)
    engine = ahead(plain)
    vars(engine.runner)["shared"] = shared
    engine.generate([PROMPTS[0]], Trie(beams=2), max_new_tokens=4, ignore_eos=True)
    assert bool(engine.runner.overlap.device) != shared


@pytest.mark.parametrize("options", [{"logprobs": 1}, {"repetition_penalty": 1.5}], ids=str)
def test_what_is_not_looked_ahead(plain, events, options):
    check(plain, ahead(plain), PROMPTS[:2], Trie(beams=3), max_new_tokens=6, ignore_eos=True, **options)
    assert "guess" not in events


@pytest.mark.parametrize(("mixed", "pages"), [(False, 400), (True, 400), (True, 30)])
def test_searches_come_and_go(plain, mixed, pages, events):
    """Some begin and some are cancelled while a pass is under way; some look ahead and others, if mixed, do not; in a
    small pool some give way."""
    engine, rng = ahead(plain, page_size=4, pages=pages), random.Random(1)
    searches = [Sample(seed=i, num_return_sequences=2) if mixed and i % 3 == 0 else Trie(beams=2 + i % 3)
                for i in range(12)]  # fmt: skip
    requests = [Request(PROMPTS[i % 4], search, max_new_tokens=8, ignore_eos=True) for i, search in enumerate(searches)]
    alone = [plain.generate([r.prompt], r.search, max_new_tokens=8, ignore_eos=True)[0].outputs for r in requests]
    service, jobs, cancelled = engine.service(), {}, set()
    driver = service.driver
    while len(jobs) < len(requests) or driver.busy:
        for _ in range(rng.randrange(3)):
            if len(jobs) < len(requests):
                checked = service.check(requests[len(jobs)])
                jobs[len(jobs)] = driver.submit(Job(starter(service.models, driver, checked, None, "")))
        driver.step()
        running = [i for i, job in jobs.items() if job in driver.running]
        check_pool(engine.pool, [p for i in running for tree in jobs[i].trees for p in tree.pages_held])
        for tree in (tree for i in running for tree in jobs[i].trees):
            check_tree(tree)
        if running and rng.random() < 0.15:
            cancelled.add(i := rng.choice(running))
            driver.cancel(jobs[i])
    check_pool(engine.pool, [])
    for i, job in jobs.items():
        assert (job.result is None) == (i in cancelled) and job.error is None
        assert i in cancelled or [o.token_ids for o in job.result.outputs] == [o.token_ids for o in alone[i]]
    assert 0 < len(cancelled) < len(jobs) and "guess" in events
    assert any(job.gave_way for job in jobs.values()) == (pages < 400)


def test_halves_take_turns(plain, monkeypatch, events):
    """One half is launched before the other is read; searches that look ahead have no need of it."""
    monkeypatch.setattr(Overlap, "helps", lambda self, searches: searches > 1)
    search = Sample(seed=3, num_return_sequences=2)
    check(plain, ahead(plain), PROMPTS, search, max_new_tokens=8, ignore_eos=True)
    events.clear()
    ahead(plain).generate(PROMPTS, search, max_new_tokens=8, ignore_eos=True)
    assert events == ["launch", *["launch", "read"] * 15, "read"]
    check(plain, ahead(plain), PROMPTS, Trie(beams=2), max_new_tokens=8, ignore_eos=True)
    events.clear()
    ahead(plain).generate(PROMPTS, Trie(beams=2), max_new_tokens=8, ignore_eos=True)
    assert events.count("launch") <= 2 and events.count("guess") == 7


@pytest.mark.parametrize("helps", [False, True], ids=["together", "halves"])
def test_those_look_ahead_that_can(plain, helps, monkeypatch, events):
    """Prompts of many lengths: while one is read, the others look ahead, and it rides along in every second pass."""
    monkeypatch.setattr(Overlap, "helps", lambda self, searches: helps and searches > 1)
    engine = ahead(plain, pages=800)
    engine.runner.budget = 128
    prompts = [[5 + (i * j) % 40 for i in range(40 * j)] for j in range(1, 9)]
    search, options = Trie(beams=3), {"max_new_tokens": 24, "ignore_eos": True}
    got, wanted = (each.generate(prompts, search, **options) for each in (engine, plain))
    assert [result.outputs[0].token_ids for result in got] == [result.outputs[0].token_ids for result in wanted]
    launches = events.count("guess"), events.count("launch")
    assert launches == (36, 1)


def test_too_many_searches_without_a_hint_are_waited_for(plain, events):
    """One of three says what it will ask for: a pass of its own would take the time of one for all."""
    engine = ahead(plain)
    service = engine.service()
    for i, search in enumerate((Trie(beams=3), Sample(seed=1), Sample(seed=2))):
        request = Request(PROMPTS[0], search, max_new_tokens=8, ignore_eos=True)
        service.driver.submit(Job(starter(service.models, service.driver, service.check(request), None, str(i))))
    while service.driver.busy:
        service.driver.step()
    assert events == ["launch", "read"] * 8


def test_choices_are_the_same_on_host_and_device():
    """A guess chooses on the device what it picks on the host."""
    shape = ModelShape(layers=1, kv_heads=1, head_dim=1, vocab_size=10, max_positions=None)
    tree = TokenTree(PagePool(shape, 4), [1])
    slots, branches = tree.reserve(2, 1)
    guess = Guess(Next(2, frozenset([3, 8])), 5, [4, 6], Blank(tree, 0, branches, slots, 1))
    values, places = [-1.0, -1.5, -1.5, -2.0, -float("inf")], [3, 12, 8, 5, 0]
    numbers = torch.tensor([*values, *places, 0.0], dtype=torch.float64)
    words_TC = torch.arange(7, dtype=torch.int32).unsqueeze(1)
    sums_n, token_n, inherited_nC = choose([guess], [numbers], words_TC, 10, "torch")
    sums, chosen = guess.picked(numbers, 10)
    assert (sums_n.tolist(), token_n.tolist()) == (sums, [token for _, token in chosen])
    live = sum(1 << slot for slot, node in enumerate(tree.slots.owner) if node >= 0)
    assert inherited_nC.tolist() == [[guess.asked[row] & live] for row, _ in chosen]
    tree.release()
