"""Threads of a step and of packing: as many as cores that others leave, and torch's own number again afterwards."""

import asyncio
import os
import sys
import threading
import time
from types import SimpleNamespace

import pytest
import torch

from engine import Engine
from engine.demo import demo_folder
from engine.tasks import async_engine, step_thread
from models import threads
from models.checkpoint.weights import Weights
from models.threads import Threads, release_threads
from search import Greedy


@pytest.fixture
def machine(monkeypatch):
    """Two cores whose time the test spends."""
    spent = {"now": 0.0, "all": 0.0, "own": 0.0}
    monkeypatch.setattr(threads, "time", SimpleNamespace(monotonic=lambda: spent["now"]))

    def spend(seconds: float, own: float, others: float) -> None:
        spent["now"] += seconds
        spent["all"] += (own + others) * seconds
        spent["own"] += own * seconds

    return Threads(2, lambda: (spent["now"], spent["all"], spent["own"])), spend


def test_others_take_their_cores(machine):
    found, spend = machine
    assert found.count() == 2
    for own, others, count in [
        (2, 0, 2),
        (1.3, 0.7, 1),
        (1, 1, 1),
        (0.67, 1.33, 1),
        (1, 0, 2),
        (1.8, 0.2, 2),
        (0, 2, 1),
    ]:
        spend(0.25, own, others)
        assert found.count() == count, (own, others)


def test_a_moment_and_a_pause_say_nothing(machine):
    found, spend = machine
    spend(0.1, 0, 2)
    assert found.count() == 2
    spend(5, 0, 2)
    assert found.count() == 2
    spend(0.3, 0, 2)
    assert found.count() == 1


def test_torch_has_its_threads_again(machine):
    found, spend = machine
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        spend(0.3, 1, 1)
        with pytest.raises(KeyError), found.limited():
            assert torch.get_num_threads() == 1
            raise KeyError
        assert torch.get_num_threads() == 2
        torch.set_num_threads(1)
        with found.limited():
            assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(before)


def test_compiled_models_keep_their_threads(monkeypatch):
    """Each number of threads would compile them once more."""
    engine = Engine.load(demo_folder(), kv_memory=1 << 22)
    monkeypatch.setattr(Threads, "limited", lambda self: pytest.fail("a limit"))
    engine.runner.token_buckets = engine.runner.word_buckets = [1, 8, 64]
    assert engine.generate(["Once"], Greedy(), max_new_tokens=2)[0].outputs[0].token_ids


def test_packing_leaves_others_their_cores(monkeypatch):
    """Each region of two threads waits for the one that shares its core with another program."""
    before, taken, packed = torch.get_num_threads(), [], Weights._linear

    def pack(*arguments):
        taken.append(torch.get_num_threads())
        return packed(*arguments)

    monkeypatch.setattr(Weights, "_linear", pack)
    monkeypatch.setattr(Threads, "count", lambda self: 1)
    try:
        torch.set_num_threads(2)
        Engine.load(demo_folder(), kv_memory=1 << 22, dtype="float32")
        assert len(taken) > 8 and {*taken} == {1} and torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_systems_without_counts_keep_their_threads():
    found = Threads(4, lambda: None)
    assert found.count() == 4


@pytest.mark.skipif(sys.platform != "linux", reason="/proc/stat is Linux'")
def test_linux_counts():
    now, every, own = threads._times({0})
    assert now > 0 and every > 0 and own > 0
    assert threads._times({0, 1})[1] >= every


def test_results_are_those_of_any_number(monkeypatch):
    engine = Engine.load(demo_folder(), kv_memory=1 << 22)
    found = [engine.generate(["Once"], Greedy(), max_new_tokens=8)[0].outputs[0]]
    monkeypatch.setattr(Threads, "count", lambda self: 1)
    found.append(engine.generate(["Once"], Greedy(), max_new_tokens=8)[0].outputs[0])
    assert found[0].token_ids == found[1].token_ids and found[0].logprob == found[1].logprob


def test_others_are_ignored_on_demand(machine):
    found, spend = machine
    spend(0.3, 1, 1)
    assert found.count() == 1
    found.ignore_others()
    spend(0.3, 1, 1)
    assert found.count() == 2


@pytest.mark.skipif(not os.path.exists("/proc/self/task"), reason="needs Linux's list of threads")
def test_no_thread_of_openmp_stays_with_a_thread_that_computes_no_more():
    """Each that OpenMP keeps counts when it decides how long the others spin; the settings and the results stay."""

    def count() -> int:
        """Threads, without those of Python, which other tests may have started: they end when they like."""
        return len({*map(int, os.listdir("/proc/self/task"))} - {each.native_id for each in threading.enumerate()})

    torch.set_num_threads(2)
    x = torch.randn(300, 300)
    expected, kept = (x @ x).sum(), count()
    for _ in range(2):
        release_threads()
        until = time.monotonic() + 60
        while count() >= kept and time.monotonic() < until:
            time.sleep(0.01)
        assert count() < kept
        assert torch.get_num_threads() == 2 and torch.equal((x @ x).sum(), expected)
        assert count() == kept


@pytest.mark.parametrize("start", ["step thread", "AsyncEngine"])
def test_the_thread_that_loads_keeps_none(monkeypatch, start):
    released = []
    monkeypatch.setattr(step_thread, "release_threads", lambda: released.append("step thread"))
    monkeypatch.setattr(async_engine, "release_threads", lambda: released.append("AsyncEngine"))
    if start == "step thread":
        thread = step_thread.StepThread()
        thread.start()
        thread.start()
        thread.stop()
    else:
        engine = async_engine.AsyncEngine(Engine.load(demo_folder(), dtype="float32", kv_memory="4M"))
        asyncio.run(engine.close())
    assert released == [start]
