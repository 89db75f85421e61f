"""The observer of the driver's phases: what it is notified of, and that phases nest."""

import pytest

from engine import Engine
from engine.demo import demo_folder
from engine.errors import CoppiceError
from search import Sample, Trie


class Recorder:
    def __init__(self):
        self.open, self.seen, self.models = [], [], []

    def begin(self, phase, batch):
        assert (batch is not None) == (phase in ("run", "commit"))
        self.seen.append((*self.open, phase))
        self.open.append(phase)
        if phase == "run":
            self.models.append(batch.model)

    def end(self, phase):
        assert self.open.pop() == phase


@pytest.fixture(scope="module")
def engine():
    return Engine.load(demo_folder(), kv_memory=1 << 24)


def test_phases_nest(engine):
    engine.observer = recorder = Recorder()
    observed = engine.generate([[5, 6, 7]], Sample(), max_new_tokens=3, ignore_eos=True)
    engine.observer = None
    seen, step = len(recorder.seen), ("step",)
    assert not recorder.open and recorder.models == ["target"] * 3
    for phase in ("admit", "schedule", "run", "commit"):
        assert recorder.seen.count((*step, phase)) == 3
    for phase in ("pack", "forward", "logits", "log-softmax", "fetch"):
        assert recorder.seen.count(("step", "run", phase)) == 3
    assert ("step", "admit", "search") in recorder.seen and ("step", "commit", "search") in recorder.seen
    assert ("step", "run", "fetch", "search") in recorder.seen, "Evaluate.read is part of the search"
    plain = engine.generate([[5, 6, 7]], Sample(), max_new_tokens=3, ignore_eos=True)
    assert len(recorder.seen) == seen and plain[0].outputs == observed[0].outputs


def test_top_sums_are_observed_in_parts(engine):
    """Without an observer they are found by the call that evaluates the layers: the same."""
    engine.observer = recorder = Recorder()
    observed = engine.generate([[5, 6, 7]], Trie(beams=2), max_new_tokens=3, ignore_eos=True)
    engine.observer = None
    for phase in ("pack", "forward", "logits", "log-softmax"):
        assert recorder.seen.count(("step", "run", phase)) == 3
    plain = engine.generate([[5, 6, 7]], Trie(beams=2), max_new_tokens=3, ignore_eos=True)
    assert plain[0].outputs == observed[0].outputs


def test_a_phase_that_fails_ends(engine):
    class Broken(Trie):
        def run(self, task):
            yield from ()
            raise RuntimeError("broken")

    engine.observer = recorder = Recorder()
    with pytest.raises(CoppiceError, match="broken"):
        engine.generate([[5, 6, 7]], Broken(beams=2), max_new_tokens=3)
    engine.observer = None
    assert not recorder.open and recorder.seen[-1] == ("step", "schedule")
