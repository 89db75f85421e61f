"""The engine of a server: whose request starts next, long computations in pieces, no files."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from engine import Engine
from engine.contract import Evaluate, Output, Pause, Search, SearchResult, Task
from engine.contract.scoring import ROWS
from engine.demo import demo_folder
from engine.engine import Request
from engine.errors import KVMemoryError
from engine.service import CLIENT_SHARE, Entry, News, Service
from engine.step.crowding import held_pages
from engine.tasks.step_thread import StepThread
from search import ULTS, Greedy, Sample, Trie
from search.ults import delta, prior


@pytest.fixture(scope="module")
def model() -> Engine:
    return Engine.load(demo_folder(), dtype="float32", kv_memory="8M", threads=1)


@pytest.fixture
def service(model: Engine) -> Iterator[Service]:
    engine = Engine(model.model, parallel=2)
    service = engine.service()
    service.keeps_files = False
    yield service
    service.close()
    assert engine.pool.used_pages == 0


class Heard(list):
    """Hears what becomes of requests: the names of those that have started or ended."""

    def ask(self, service: Service, name: str, search: Search, tokens: int = 4, **options: Any):
        request = Request("Once upon a time", search, max_new_tokens=tokens, ignore_eos=True, **options)
        entry = Entry(service.check(request), lambda news: self.hear(name, news), name[0])
        service.submit(entry)
        return entry

    def hear(self, name: str, news: News) -> None:
        self.append((name, news.outcome))

    @property
    def started(self) -> list[str]:
        return [*dict.fromkeys(name for name, _ in self)]


def run(service: Service, most: int = 10_000) -> int:
    """Step until nothing is left; the number of steps."""
    for step in range(most):
        if not service.busy:
            return step
        StepThread.step(service)
    raise AssertionError("it goes on")


def test_clients_take_turns(service):
    """Two of nine requests of one client run when others come: the first that ends makes room for one of theirs."""
    heard = Heard()
    for i in range(9):
        heard.ask(service, f"A{i}", Greedy(), 4 + i % 2)
    service.step()
    for i in range(3):
        heard.ask(service, f"B{i}", Greedy(), 4 + i % 2)
    heard.ask(service, "C0", Greedy())
    run(service)
    assert heard.started[:4] == ["A0", "A1", "B0", "C0"]
    assert heard.started.index("B2") < heard.started.index("A6")
    assert len(heard.started) == 13 and all(isinstance(end, SearchResult) for _, end in heard if end is not None)


def test_the_last_place_is_for_who_has_none(service):
    """So that a client whose requests run long keeps nobody else waiting; one that is alone has all places."""
    heard = Heard()
    for i in range(3):
        heard.ask(service, f"A{i}", Sample(seed=i), 100)
    service.step()
    assert heard.started == ["A0", "A1"]
    service.close()
    heard.clear()
    service.alone = False
    for i in range(3):
        heard.ask(service, f"A{i}", Sample(seed=i), 100)
    service.step()
    service.step()
    assert heard.started == ["A0"]
    heard.ask(service, "B", Greedy(), 4)
    service.step()
    assert heard.started == ["A0", "B"]
    run(service)
    assert heard.started == ["A0", "B", "A1", "A2"]


@pytest.mark.parametrize("client", ["A", "B"])
def test_who_fills_every_pass_keeps_nobody_waiting(client):
    """A prompt that is longer than what wide searches leave is read beside them; that of another client at once."""
    service = Engine.load(demo_folder(), dtype="float32", kv_memory="32M", threads=1).service()
    service.alone = service.keeps_files = False
    driver, heard = service.driver, Heard()
    budget = service.models.target.runner.budget
    for i in range(5):
        heard.ask(service, f"A{i}", Trie(beams=64, early_stopping="never"), 60)
    while sum(job.pending.left for job in driver.running) < budget:
        service.step()
    request = Request("The dog ran to the park. " * 20, Greedy(), max_new_tokens=2, ignore_eos=True)
    service.submit(Entry(service.check(request), lambda news: heard.hear("long", news), client))
    before = driver.work["target"].passes
    while not any(name == "long" and end is not None for name, end in heard):
        service.step()
    assert driver.work["target"].passes - before <= (6 if client == "B" else 12)
    assert not any(end is not None for name, end in heard if name != "long")
    service.close()


def test_who_fills_the_cache_keeps_nobody_waiting():
    """A search of the client that has the most pages gives way, and others start although one was preempted."""
    service = Engine.load(demo_folder(), dtype="float32", kv_memory="2M", threads=1).service()
    service.alone = service.keeps_files = False
    pool, driver, heard = service.models.target.runner.pool, service.driver, Heard()
    for i in range(2):
        heard.ask(service, f"A{i}", Trie(beams=16), 80)
    while not driver.waiting:
        service.step()
        assert driver.running, "the cache is too large for this test"
    heard.ask(service, "A2", Greedy())
    for i in range(4):
        heard.ask(service, f"B{i}", Sample(seed=i), 60)
    before = driver.work["target"].passes
    while "B0" not in heard.started:
        service.step()
    assert driver.work["target"].passes - before <= 2 and heard.started == ["A0", "A1", "B0", "B1", "B2", "B3"]
    while not any(name == "B3" and end is not None for name, end in heard):
        service.step()
        assert held_pages(driver.running, pool)["A"] <= CLIENT_SHARE * pool.pages
        assert not any(job.client == "B" and job.gave_way for job in driver.running + driver.waiting)
    run(service)
    assert len(heard.started) == 7 and all(isinstance(end, SearchResult) for _, end in heard if end is not None)
    assert pool.used_pages == 0


def test_one_of_several_clients_has_a_share_of_the_cache():
    service = Engine.load(demo_folder(), dtype="float32", kv_memory="1M", threads=1).service()
    pool, heard = service.models.target.runner.pool, Heard()
    long = list(range(10, 20)) * 32
    request = Request(long, Greedy(), max_new_tokens=2)
    service.check(request)
    service.alone = False
    with pytest.raises(KVMemoryError, match=f"one client may have {int(CLIENT_SHARE * pool.pages)} tokens"):
        service.check(request)
    heard.ask(service, "A", Trie(beams=32), 100)
    run(service)
    [(_, error)] = [(name, end) for name, end in heard if end is not None]
    assert isinstance(error, KVMemoryError) and "of which one client may have" in str(error)
    assert pool.used_pages == 0


def test_who_waits_can_leave_and_outlives_a_failure(service, monkeypatch):
    heard = Heard()
    entries = [heard.ask(service, f"A{i}", Greedy(), 8) for i in range(4)]
    service.step()
    service.cancel(entries[2])
    service.cancel(entries[2])

    def broken(*_):
        monkeypatch.undo()
        raise RuntimeError("the device is lost")

    monkeypatch.setattr(service.models.target.runner, "pack", broken)
    run(service)
    ends = {name: end for name, end in heard if end is not None}
    assert "A2" not in ends and not service.waiting
    assert isinstance(ends["A0"], Exception) and isinstance(ends["A1"], Exception)
    assert isinstance(ends["A3"], SearchResult)


@dataclass(frozen=True)
class Ponders(Search):
    """Computes for long before it asks for anything."""

    pieces: int = 20

    def run(self, task: Task):
        for _ in range(self.pieces):
            yield Pause()
        yield Evaluate(task.tree, [task.tree.root])
        return SearchResult([Output([1], -1.0, -1.0, "length")])


def test_others_go_on_while_a_search_computes(service):
    """The other search has a pass in every step; of several that compute one goes on in a step."""
    heard, passes = Heard(), service.driver.work["target"]
    heard.ask(service, "A", Ponders(20))
    heard.ask(service, "B", Sample(seed=1), 30)
    for step in range(1, 20):
        service.step()
        assert passes.passes == step
    run(service)
    before = passes.passes
    heard.ask(service, "A", Ponders(8))
    heard.ask(service, "B", Ponders(8))
    assert run(service) >= 16 and passes.passes <= before + 2


def test_a_search_that_computes_can_be_cancelled(service):
    heard = Heard()
    entry = heard.ask(service, "A", Ponders(10**9))
    for _ in range(5):
        service.step()
    service.cancel(entry)
    assert not service.busy and not service.driver.paused


def test_log_probabilities_are_computed_in_pieces(service, monkeypatch):
    """A step applies the head to a bounded number of rows, whoever has ended, and other searches go on."""
    heard, rows, passes = Heard(), [], service.driver.work["target"]
    head = type(service.models.target.runner.model).logits

    def logits(self, hidden_NE):
        rows.append(len(hidden_NE))
        return head(self, hidden_NE)

    heard.ask(service, "A", Sample(num_return_sequences=8, seed=1), 60, logprobs=3)
    while not any(entry.finish for entry in service.entries):
        service.step()
    monkeypatch.setattr(type(service.models.target.runner.model), "logits", logits)
    heard.ask(service, "B", Greedy(), 40)
    steps = before = 0
    while not heard or heard[-1][0] != "A" or heard[-1][1] is None:
        rows.clear()
        before = passes.passes
        service.step()
        steps += 1
        assert sum(rows) <= ROWS + 1 and passes.passes > before
    assert steps > 3
    run(service)
    outputs = next(end for name, end in heard if name == "A" and end is not None).outputs
    for output in outputs:
        assert len(output.token_logprobs) == 60
        assert sum(output.token_logprobs) == pytest.approx(output.logprob, abs=0.05)


def test_a_prior_is_kept_in_memory_and_in_no_file(service, tmp_path, monkeypatch):
    """The parameters of a request name the file of its prior: there would be one for each combination."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    prior.KEPT_VECTORS.clear()
    heard = Heard()
    for children in (3, 4):
        heard.ask(service, f"A{children}", ULTS(k_max=2, children=children), 5)
        run(service)
    assert [end.stats["prior"] for _, end in heard if end is not None] == ["gathered", "cached"]
    for i in range(prior.MOST_KEPT + 4):
        heard.ask(service, "A", ULTS(k_max=1, children=2), 2 + i)
    run(service)
    [kept] = prior.KEPT_VECTORS.values()
    assert len(kept) == prior.MOST_KEPT and not prior.UNDER_WAY
    assert not [*tmp_path.iterdir()]


def test_beliefs_are_kept_up_to_a_number(service, monkeypatch):
    monkeypatch.setattr(delta, "KEPT_NUMBERS", 3 * 4 * (delta.POOL + 10))
    delta._FITTED.clear()
    for depth in (4, 4, 3, 2, 5):
        Heard().ask(service, "A", ULTS(k_max=1, children=2, samples=10), depth)
        run(service)
    assert sum(each.numbers for each in delta._FITTED.values()) <= delta.KEPT_NUMBERS
    assert [key[1] for key in delta._FITTED] == [3, 2, 5]


def test_the_fit_of_beliefs_pauses_at_every_level(service):
    heard, passes = Heard(), service.driver.work["target"]
    delta._FITTED.clear()
    heard.ask(service, "A", ULTS(k_max=1, children=2, prior="dirichlet", alpha=0.3), 40)
    while not service.driver.paused:
        service.step()
    heard.ask(service, "B", Sample(seed=1), 30)
    before = passes.passes
    for step in range(1, 31):
        service.step()
        assert passes.passes == before + step and service.driver.paused
