"""Trie beam search against an independent beam search over tables: no model, exact ties, stop strings, streaming."""

import itertools
import math
import random

import pytest
import torch

from engine.errors import UsageError
from search import Trie
from search.base import evaluate_top_sums
from tests.search.drive import drive

PROMPT = 3  # tokens
NEVER = -1e9


class Table:
    """Log-probabilities of a toy model, a function of the whole sequence; `step` rounds them, so that sums tie; a bias,
    `raised`, is added to all."""

    def __init__(self, vocab, seed, sharp=2.0, step=0.0, eos=(), eos_bias=0.0, dead=0.0, raised=0.0):
        self.vocab, self.seed, self.sharp, self.step = vocab, seed, sharp, step
        self.eos, self.eos_bias, self.dead, self.raised = eos, eos_bias, dead, raised
        self.known = {}

    def __call__(self, path):
        key = tuple(path)
        if key not in self.known:
            rng = random.Random(repr((self.seed, key)))
            logits = torch.tensor([rng.gauss(0, self.sharp) for _ in range(self.vocab)])
            logits[list(self.eos)] += self.eos_bias
            row = torch.log_softmax(logits, -1) + self.raised
            if self.step:  # multiples of a power of two: sums are exact in float32
                row = -torch.clamp((-row / self.step).round(), min=1) * self.step
            if self.dead:
                row[[i for i in range(self.vocab) if rng.random() < self.dead and i not in (0, 1)]] = float("-inf")
            self.known[key] = row
        return self.known[key]


def beam_search(table, k, max_new, eos, penalty, mode, stops=lambda path: False):
    """ALGORITHMS 1b by lists: [(tokens, score)], best first; the live paths of each step; steps."""
    live, scores, done, alive = [()], [0.0], [], []
    count = max(2, 1 + len(eos)) * k
    step = 0
    while True:
        step += 1
        sums = torch.stack([s + table(path) for path, s in zip(live, torch.tensor(scores), strict=True)]).tolist()
        flat = [(s, b * table.vocab + v) for b, row in enumerate(sums) for v, s in enumerate(row) if s > float("-inf")]
        flat.sort(key=lambda c: (-c[0], c[1]))
        found = [(s, (*live[i // table.vocab], i % table.vocab)) for s, i in flat[:count]]
        stopping = [path[-1] in eos or step == max_new or stops(path) for _, path in found]
        for rank, ((s, path), stop) in enumerate(zip(found, stopping, strict=True)):
            if stop and rank < k:
                done.append((s / step**penalty, path))
        done = [done[i] for i in sorted(range(len(done)), key=lambda i: (-done[i][0], i))[:k]]
        going = [c for c, stop in zip(found, stopping, strict=True) if not stop][:k]
        if all(stopping) or (mode is True and len(done) == k):
            break
        length = max_new if mode == "never" and penalty > 0 else step
        worst = done[-1][0] if len(done) == k else NEVER
        if not going[0][0] / length**penalty > worst:
            break
        scores, live = [s for s, _ in going], [path for _, path in going]
        alive.append(live)
    return [(list(path), score) for score, path in done], alive, step


def watched(table, search, max_new, eos=(), stops=None, page_size=4, **options):
    run = drive(search, table, max_new, eos, page_size=page_size, stops=stops, **options)
    assert run.settled == run.outputs[0]
    assert all(one.live == PROMPT + one.needed for one in run.passes)  # prompt and distinct ancestors
    for told in run.told[:-1]:
        assert told.beams == sorted(told.beams, key=lambda one: -one[0]) and told.best == told.beams[0][1]
        ended = told.best[-1] in eos or (stops is not None and stops(told.best))
        assert ended == (told.report.ready is not None)
    return run


def compare(table, k, max_new, eos, penalty, mode, returned, stops=None):
    search = Trie(k, penalty, mode, returned)
    ours = watched(table, search, max_new, eos, stops, rising=table.raised > 0)
    expected, alive, steps = beam_search(table, k, max_new, eos, penalty, mode, stops or (lambda path: False))
    assert ours.outputs == [path for path, _ in expected[:returned]]
    for output, (path, score) in zip(ours.result.outputs, expected, strict=False):
        assert output.score == pytest.approx(score, abs=1e-5, rel=1e-6)
        logprob = sum(float(table(path[:i])[t]) for i, t in enumerate(path))
        assert output.logprob == pytest.approx(logprob, abs=1e-4)
        reason = "eos" if path[-1] in eos else "stop" if stops and stops(path) else "length"
        assert output.finish_reason == reason
    assert ours.paths[1:] == alive[: len(ours.paths) - 1]
    assert ours.result.stats["steps"] <= steps  # it may see the end before the definition does
    return ours


PENALTIES = [0, 1, -0.5, 2, 0.6]


@pytest.mark.parametrize("mode", [False, True, "never"])
@pytest.mark.parametrize("k", [1, 2, 3, 5, 9])
def test_equals_the_definition(k, mode):
    for penalty, eos, seed in itertools.product(PENALTIES, [(3,), (3, 0, 11)], range(5)):
        table = Table(vocab=17, seed=seed, eos=eos, eos_bias=[-1.0, 0.0, 1.5, 3.0, -3.0][seed])
        compare(table, k, 11, eos, penalty, mode, returned=1 + seed % k)


@pytest.mark.parametrize("mode", [False, True, "never"])
@pytest.mark.parametrize("k", [1, 2, 3, 5, 9])
def test_ties_go_to_the_lower_rank_then_the_lower_token(k, mode):
    for penalty, eos, seed in itertools.product([0, 1, 0.6], [(), (3,), (3, 0, 11)], range(5)):
        step = [1.0, 0.5, 2.0, 4.0, 0.25][seed]
        table = Table(vocab=16, seed=seed, sharp=1.0, step=step, eos=eos, eos_bias=[0, 1, 2, -1, 3][seed])
        compare(table, k, 8, eos, penalty, mode, returned=k)


@pytest.mark.parametrize("vocab", [20, 34, 97, 512])
def test_vocabularies_with_and_without_blocks(vocab):
    for seed, step in itertools.product(range(2), [0.0, 0.5]):
        eos = (2, vocab - 1)
        compare(Table(vocab, seed, sharp=1.5, step=step, eos=eos, eos_bias=2.0), 3, 7, eos, 1.0, False, 3)


def test_tokens_that_cannot_be():
    """-inf entries, some rows with hardly a possible token: fewer candidates than asked for."""
    for seed, k, mode in itertools.product(range(6), [1, 3, 9], [False, True, "never"]):
        table = Table(vocab=9, seed=seed, eos=(0,), dead=0.9)
        compare(table, k, 6, (0,), 1.0, mode, returned=1)


def test_a_negative_penalty_is_bounded_at_the_current_length():
    """A longer hypothesis scores worse then, also with "never"."""
    for seed in range(60):
        table = Table(6, seed, sharp=3.0, eos=(3, 4, 5), eos_bias=3.0)
        compare(table, 3, 13, (3, 4, 5), -0.5 - seed % 2, "never", 3)


@pytest.mark.parametrize("mode", [False, True, "never"])
def test_sums_that_rise(mode):
    """With a bias a longer hypothesis may be more probable: none is abandoned because sums only fall."""
    for seed, penalty in itertools.product(range(10), [0, 1]):
        table = Table(6, seed, eos=(3,), eos_bias=1.0, raised=2.0)
        compare(table, 3, 9, (3,), penalty, mode, returned=1 + seed % 3)


def test_no_eos_and_one_token():
    compare(Table(12, 1), 4, 1, (), 1.0, False, 4)
    compare(Table(12, 1), 4, 6, (), 1.0, True, 4)
    compare(Table(2, 1), 1, 6, (1,), 1.0, "never", 1)


def test_random_settings():
    rng = random.Random(0)
    for seed in range(150):
        vocab = rng.randint(6, 40)
        eos = tuple(rng.sample(range(vocab), rng.choice([0, 1, 1, 3])))
        k = rng.randint(1, min(9, vocab - len(eos)))
        table = Table(vocab, seed, rng.choice([0.3, 1.0, 3.0]), rng.choice([0.0, 0.0, 0.5]), eos, rng.uniform(-2, 4))
        mode = rng.choice([False, True, "never", "false", "true"])
        plain = {"false": False, "true": True}.get(mode, mode)
        penalty = rng.choice([*PENALTIES, -2, 3.5])
        search, max_new = Trie(k, penalty, mode, rng.randint(1, k)), rng.randint(1, 14)
        ours = watched(table, search, max_new, eos, page_size=rng.choice([2, 3, 16]))
        expected, *_ = beam_search(table, k, max_new, eos, penalty, plain)
        assert ours.outputs == [path for path, _ in expected[: search.num_return_sequences]], (seed, search)


def test_one_beam_is_greedy():
    table, eos = Table(30, 5, eos=(4,), eos_bias=1.0), (4,)
    path = []
    while len(path) < 20 and (not path or path[-1] not in eos):
        path.append(int(table(path).argmax()))
    assert watched(table, Trie(beams=1), 20, eos).outputs == [path]


@pytest.mark.parametrize("k", [1, 3, 5])
def test_stop_strings_end_hypotheses_like_eos(k):
    """A stop is a run of tokens here; streamed tokens stay a prefix of the best output."""

    def stops(path):
        return len(path) >= 2 and (path[-1] + path[-2]) % 5 == 0

    for seed, mode, penalty in itertools.product(range(6), [False, True, "never"], [1.0, 0.0, -1.0]):
        compare(Table(12, seed, eos=(3,)), k, 10, (3,), penalty, mode, 1 + seed % k, stops)


def test_settled_tokens_come_before_the_end():
    """On peaked tables beams agree on all but the last tokens: most of the text is told while they still compete."""
    early = total = 0
    for seed in range(10):
        ours = watched(Table(20, seed, sharp=4.0), Trie(beams=4), 30)
        shared = itertools.takewhile(lambda tokens: len({*tokens}) == 1, zip(*ours.paths[-1], strict=False))
        early += sum(1 for _ in shared)
        total += len(ours.settled)
    assert early > total / 2


def test_memory_is_linear_in_beams_and_steps():
    for k in (1, 4, 9):
        ours = watched(Table(24, 3, sharp=0.5), Trie(beams=k), 25)
        low, high = Trie(beams=k).slots(3, 25)
        assert ours.trees["target"].peak_live <= high
        assert low <= high
        peaked = watched(Table(24, 3, sharp=30.0), Trie(beams=k), 25)
        assert low <= peaked.trees["target"].peak_live <= high


def test_configurations_are_checked():
    wrong = {
        "beams": [0, -1, True, 2.0, "4", None],
        "length_penalty": ["1", math.nan, math.inf, True, None, 1e9, -100],
        "early_stopping": ["maybe", None, 1, 0.0],
        "num_return_sequences": [0, 5, True, 1.0],
    }
    for name, value in [(name, value) for name, values in wrong.items() for value in values]:
        with pytest.raises(UsageError, match="expected"):
            Trie(**{name: value})
    with pytest.raises(UsageError, match="at most 7"):
        Trie(beams=8).check(10, frozenset([1, 2, 3]))
    Trie(beams=7).check(10, frozenset([1, 2, 3]))


@pytest.mark.parametrize("penalty", [-3.0, 20, -20, 20.0, -20.0])
def test_extreme_penalties(penalty):
    """A score below -1e9, the stand-in for "nothing finished yet", is no reason to return nothing."""
    row = torch.log_softmax(torch.tensor([1.0, 1.0, -6.0]), -1)

    for mode in (False, "never"):
        assert len(drive(Trie(1, penalty, mode), lambda path: row, 1300, (2,), page_size=64).outputs) == 1


# --- evaluate_top_sums ---


def brute_force(logp_NV, scores, k):
    sums = (logp_NV + torch.tensor(scores, dtype=torch.float32).unsqueeze(1)).view(-1).tolist()
    order = sorted((i for i in range(len(sums)) if sums[i] > float("-inf")), key=lambda i: (-sums[i], i))[:k]
    V = logp_NV.shape[1]
    return [sums[i] for i in order], [i // V for i in order], [i % V for i in order]


def equal(logp_NV, scores, k):
    steps = evaluate_top_sums(None, range(len(logp_NV)), scores, k)
    with pytest.raises(StopIteration) as stop:
        steps.send(next(steps).answer(logp_NV))
    assert stop.value.value == brute_force(logp_NV, scores, k)


@pytest.mark.parametrize("V", [1, 2, 7, 15, 16, 17, 31, 32, 97, 101, 480, 512, 997, 1000, 1024, 2048])
def test_evaluate_top_sums(V):
    generator = torch.Generator().manual_seed(V)
    for N, k, levels in itertools.product([1, 2, 5], [1, 2, 3, 8, 40, N_ALL], [None, 2, 5, 50]):
        logp_NV = torch.log_softmax(torch.randn(N, V, generator=generator), -1)
        scores = (-torch.rand(N, generator=generator) * 3).tolist()
        if levels:
            logp_NV = (logp_NV * levels / 4).round() * 4 / levels
            scores = [round(s) * 1.0 for s in scores]
        equal(logp_NV, scores, N * V if k is N_ALL else k)
        logp_NV[torch.rand(N, V, generator=generator) < 0.7] = float("-inf")
        equal(logp_NV, scores, N * V if k is N_ALL else k)


N_ALL = None


def test_evaluate_top_sums_at_the_edges():
    inf = float("-inf")
    equal(torch.full((2, 32), inf), [0.0, 0.0], 4)  # nothing is possible
    equal(torch.zeros(3, 1024), [0.0, 0.0, 0.0], 7)  # everything ties
    equal(torch.zeros(3, 1024), [-1.0, 0.0, 0.0], 2000)
    row = torch.full((1, 1024), inf)
    row[0, [5, 600, 1023]] = torch.tensor([-1.0, -1.0, -2.0])
    equal(row, [0.0], 2)
    equal(row, [0.0], 3)
    equal(row, [0.0], 4)
    for border in range(1, 12):  # equal values in several blocks, cut anywhere
        logp_NV = torch.full((2, 2048), -5.0)
        logp_NV[0, [3, 511, 512, 1500]] = -1.0
        logp_NV[1, [0, 2047, 700]] = -1.0
        equal(logp_NV, [0.0, 0.0], border)
        equal(logp_NV, [0.0, -1.0], border)
    equal(torch.log_softmax(torch.randn(1, 64000, generator=torch.Generator().manual_seed(0)), -1), [-400.0], 30)


def test_rounding_of_sums_makes_ties_that_are_broken_by_row_and_token():
    """At a score of -1e6 float32 sums differ in steps of 1/16: unequal log-probabilities tie."""
    logp_NV = torch.log_softmax(torch.randn(4, 320, generator=torch.Generator().manual_seed(1)), -1)
    for k in (1, 5, 17, 100):
        equal(logp_NV, [-1e6] * 4, k)
        equal(logp_NV, [-1e6, -1e6 + 0.0625, -1e6 - 0.0625, -1e6], k)
