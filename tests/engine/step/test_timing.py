"""Times of passes are learnt by their size; halves of searches take turns where the host is slower than the device."""

import random

import pytest

from engine.step.timing import Overlap, PassTime


def test_pass_times_are_learnt_by_size():
    """A processor's times: flat up to nine tokens, rising from there. No size may be taken for one of the others."""
    rng, time = random.Random(0), PassTime()
    for _ in range(200):
        tokens = rng.choice([1, 1, 1, 5, 8, 16, 24, 48])
        time.note(tokens, max(1.0, 1 + 0.065 * (tokens - 9)) * rng.uniform(0.95, 1.05))
    for tokens in (1, 3, 8, 16, 20, 32, 48, 64):
        assert time.seconds(tokens) == pytest.approx(max(1.0, 1 + 0.065 * (tokens - 9)), rel=0.1)
    for _ in range(50):
        time.note(8, rng.uniform(0.95, 1.05))
    assert time.seconds(48) == pytest.approx(1 + 0.065 * 39, rel=0.1)  # what was learnt stays


def test_pass_times_are_learnt():
    for one, more in ((1.0, 0.02), (0.001, 0.5), (5.0, 0.0)):
        rng, time = random.Random(0), PassTime()
        assert time.seconds(10) == 0
        for _ in range(600):
            tokens = rng.choice([1, 1, 2, 8, 24, 64])
            hiccup = 10 if rng.random() < 0.02 else 1
            time.note(tokens, one * (1 + more * (tokens - 1)) * rng.uniform(0.95, 1.05) * hiccup)
        for tokens in (1, 8, 24, 64):
            assert time.seconds(tokens) == pytest.approx(one * (1 + more * (tokens - 1)), rel=0.2)
        assert time.charge(5, 0, 0) == pytest.approx(time.seconds(5))
        alone = time.charge(1, 3, 3)
        assert alone == pytest.approx(time.seconds(4) / 4)
        assert time.charge(9, 3, 3) - alone == pytest.approx(time.seconds(12) - time.seconds(4))


def test_when_halves_help():
    overlap = Overlap()
    assert not overlap.helps(8)
    overlap.note(host=0.008, device=0.004, searches=8)
    assert overlap.helps(8) and not overlap.helps(4) and not overlap.helps(1)
    for _ in range(100):
        overlap.note(host=0.001, device=0.004, searches=4)
    assert not overlap.helps(8) and overlap.helps(17)


def test_when_some_miss_a_pass():
    """They lose their part of it; others hide the host's work, which counts up to the time of a pass."""
    overlap = Overlap()
    assert overlap.helps_without(4, 8) and not overlap.helps_without(5, 8)  # before anything is measured
    overlap.note(host=0.002, device=0.008, searches=8)  # a quarter of a pass
    assert overlap.helps_without(0, 8) and overlap.helps_without(2, 8) and not overlap.helps_without(3, 8)
    slow_host = Overlap()
    slow_host.note(host=0.032, device=0.008, searches=8)
    assert slow_host.helps_without(4, 8) and not slow_host.helps_without(5, 8)
