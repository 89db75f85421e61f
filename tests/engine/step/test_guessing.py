"""Drafters that guess for all requests of a step: one call a step, and errors and times that count."""

import pytest

from engine import Engine
from engine.demo import demo_folder
from engine.drafts import Draft
from engine.step.drafting import EngineDrafts
from engine.step.timing import PassTime
from search import Greedy, Trie
from tests.eager import EagerDrafts
from tests.marks import needs_cpp

pytestmark = needs_cpp
PROMPTS = ["Once upon a time", "The opposite of hot is", "1 2 3"]


class Joint:
    """Guesses one token for every live node; keeps how many requests and live nodes each call was for.

    Args:
        seconds: that each guess is said to have taken.
        fails: the number of the call that raises.
    """

    def __init__(self, seconds=0.0, fails=None):
        self.seconds, self.fails, self.calls = seconds, fails, []

    def open(self, salt, prompt):
        return self

    def learn(self, tokens):
        pass

    def close(self, tokens):
        pass

    def draft_together(self, wanted):
        self.calls.append([len(each.ahead) for each in wanted])
        if len(self.calls) == self.fails:
            raise RuntimeError("no idea")
        for each in wanted:
            each.seconds = self.seconds
            each.passes.append((len(self.calls), 2, self.seconds))
        return [[Draft([265], [-1], [0.9]) for _ in each.ahead] for each in wanted]


@pytest.fixture(scope="module")
def engine():
    return Engine.load(demo_folder(), draft=demo_folder("draft"), kv_memory=1 << 25, threads=1)


def generate(engine, joint, search, always=True, **options):
    engine.drafts = joint and (EagerDrafts if always else EngineDrafts)(joint)
    try:
        return engine.generate(PROMPTS, search, max_new_tokens=30, ignore_eos=True, **options)
    finally:
        engine.drafts = None
        assert engine.pool.used_pages == 0


@pytest.mark.parametrize("search", [Greedy(), Trie(beams=3)], ids=["greedy", "trie"])
def test_one_call_a_step_for_all_requests(search, engine):
    plain, joint = generate(engine, None, search), Joint()
    got = generate(engine, joint, search)
    assert [result.outputs for result in got] == [result.outputs for result in plain]
    assert len(joint.calls) <= 30 and max(map(len, joint.calls)) == len(PROMPTS)
    if isinstance(search, Trie):
        assert max(map(max, joint.calls)) == 3


def test_passes_of_a_draft_model_count_once(engine):
    joint, work = Joint(seconds=0.001), {}
    engine.drafts = EagerDrafts(joint)
    try:
        from engine import Request

        asked = [Request(prompt, Greedy(), 9, ignore_eos=True) for prompt in PROMPTS]
        results = dict(engine.serve(asked, on_step=lambda driver: work.update(draft=driver.work["draft"])))
    finally:
        engine.drafts = None
    assert work["draft"].passes == len(joint.calls)
    assert work["draft"].tokens == 2 * sum(map(len, joint.calls))
    assert sum(r.stats["draft_forward_passes"] for r in results.values()) == sum(map(len, joint.calls))


def test_a_failure_ends_the_drafts_of_all_and_no_answer(engine):
    plain, joint = generate(engine, None, Greedy()), Joint(fails=5)
    with pytest.warns(RuntimeWarning, match="a drafter failed, so its request continues without drafts: RuntimeError"):
        got = generate(engine, joint, Greedy())
    assert [result.outputs for result in got] == [result.outputs for result in plain]
    assert len(joint.calls) == 5


def test_guesses_that_take_longer_than_they_save_end(engine, monkeypatch):
    """A second for each guess, where a pass takes a millisecond: a few are tried, then none for a long time."""
    time = engine.runner.time
    monkeypatch.setattr(time, "note", lambda tokens, seconds: PassTime.note(time, tokens, 0.001))
    joint = Joint(seconds=1.0)
    got = generate(engine, joint, Greedy(), always=False)
    assert 0 < sum(map(sum, joint.calls)) <= 3 * len(PROMPTS)
    assert sum(result.stats["passes_saved"] for result in got) <= 3
