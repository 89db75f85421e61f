"""Best-of-N and speculative best-of-N over tables: same utterances, right counts, memory, the Gaussian model.

Rewards are functions of the tokens, so that partial and final ones may be as correlated as a test wants.
"""

import dataclasses
import functools
import itertools
import math
import random

import pytest
import torch

from engine.errors import KVMemoryError, UsageError
from search import BoN, SBoN, make_search
from search.sbon.rates import accepted, accepted_by_risk, expected_lengths, kendall, least_correlation, rank_correlation
from tests.draws import draws
from tests.engine.contract.test_sampling import gumbels
from tests.search.drive import drive

EOS = 5
PROMPT = [1, 2, 3]
LOGP = torch.log_softmax(torch.tensor([1.2, 0.3, -0.5, 0.3, -3.0, -1.5]), -1)


def table(path):
    """A toy model of six tokens, whose last ends a sequence; a row turns with what came before."""
    return torch.cat([LOGP[:5].roll(sum(path) + len(path)), LOGP[5:]])


@functools.cache
def noise_of(tokens):
    return random.Random(repr(tokens)).gauss(0, 1)


@functools.cache
def walk_of(tokens):
    return walk_of(tokens[:-1]) + noise_of(tokens) if tokens else 0.0


def noise(tokens):
    """A reward that knows nothing of how a text goes on."""
    return noise_of(tuple(tokens))


def walk(tokens):
    """A reward that is a random walk along the text: the longer the beginning, the better it foretells the end."""
    return walk_of(tuple(tokens))


class Judge:
    """Rewards from a function of the tokens, end-of-sequence left out; notes what it was asked."""

    def __init__(self, reward):
        self.reward, self.asked, self.kept = reward, [], []

    def rewards(self, responses):
        self.asked.append([list(r) for r in responses])
        return [self.reward([t for t in r if t != EOS]) for r in responses]
        yield

    def keep(self, responses):
        self.kept.append([list(r) for r in responses])


def run(search, max_new=24, reward=walk, eos=(EOS,), pages=4000, page_size=1, rows=table):
    """The result, the reports' candidates, live slots at every pass and the judge."""
    judge = Judge(reward)
    done = drive(search, rows, max_new, eos, prompt=PROMPT, pages=pages, page_size=page_size, judge=judge)
    assert done.settled == done.outputs[0]
    seen = [[tokens for _, tokens in one.beams] for one in done.told]
    return done.result, seen, [one.live for one in done.passes], judge


@functools.cache
def utterance(i, seed=0, max_new=24, eos=(EOS,)):
    """Utterance i of best-of-N, straight from the definition."""
    path = []
    while len(path) < max_new and (not path or path[-1] not in eos):
        path.append(int((table(path) + gumbels(seed, [i], [len(PROMPT) + len(path)], 6)[0]).argmax()))
    return path


def by_hand(search, points, max_new=24, reward=walk):
    """The algorithm over whole utterances: survivors, spared, tokens drawn."""
    whole = [utterance(i, search.seed, max_new) for i in range(search.n)]
    running, spared, drawn = list(range(search.n)), [], [len(w) for w in whole]

    def value(i, tokens):
        return reward([t for t in whole[i][:tokens] if t != EOS])

    for tokens, rate in points.items():
        if not rate or all(len(whole[i]) <= tokens for i in running):
            continue
        ranked = sorted(running, key=lambda i: (-value(i, tokens), i))
        count = max(1, len(running) - math.floor(rate * len(running) + 1e-9))
        for i in ranked[count:]:
            if len(whole[i]) > tokens:
                drawn[i] = tokens
            elif search.keep_finished:
                spared.append(i)
        running = sorted(ranked[:count])
    return whole, running, spared, sum(drawn)


def test_best_of_n_is_the_best_sample():
    result, _, _, judge = run(BoN(n=40, seed=3, num_return_sequences=40))
    whole = [utterance(i, 3) for i in range(40)]
    rewards = [walk([t for t in w if t != EOS]) for w in whole]
    order = sorted(range(40), key=lambda i: (-rewards[i], i))
    assert [o.token_ids for o in result.outputs] == [whole[i] for i in order]
    assert [o.score for o in result.outputs] == [rewards[i] for i in order]
    assert len(judge.asked) == 1 and result.stats["tokens_drawn"] == sum(map(len, whole))
    assert result.stats["tokens_saved"] == 0 and result.stats["token_rate"] == 1
    for output in result.outputs:
        path = output.token_ids
        assert output.logprob == pytest.approx(sum(float(table(path[:i])[t]) for i, t in enumerate(path)), abs=1e-4)


def test_a_rate_of_zero_is_best_of_n():
    for seed in range(3):
        expected = run(BoN(n=30, seed=seed, num_return_sequences=5))[0]
        for options in ({"alpha": 0}, {"schedule": "2:0,7:0.0"}, {"tau": 1000}, {"tau": 2**31}):
            result, _, _, judge = run(SBoN(n=30, seed=seed, num_return_sequences=5, **options))
            assert result.outputs == expected.outputs and result.stats == expected.stats
            assert len(judge.asked) == 1


SCHEDULES = [
    {"tau": 4, "alpha": 0.5}, {"tau": 1, "alpha": 0.9}, {"tau": 8, "alpha": 1.0},
    {"schedule": "2:0.3,6:0.5,7:.5,12:0.9"}, {"schedule": "5:0.8, 9:0,11:0.5"},
]  # fmt: skip


@pytest.mark.parametrize("keep_finished", [True, False])
@pytest.mark.parametrize("options", SCHEDULES, ids=str)
def test_survivors_and_counts(options, keep_finished):
    for seed in range(4):
        search = SBoN(n=30, seed=seed, keep_finished=keep_finished, **options)
        whole, running, spared, drawn = by_hand(search, search.points())
        result, seen, _, judge = run(search)
        best = max(running + spared, key=lambda i: (walk([t for t in whole[i] if t != EOS]), -i))
        assert result.outputs[0].token_ids == whole[best] and result.stats["winner"] == best
        assert sorted(i for i, _ in result.stats["rewards"]) == sorted(running + spared)
        assert result.stats["tokens_drawn"] == drawn  # the corrected equation (6)
        for candidates in seen:  # whatever is still in the race is one of best-of-N's, token for token
            assert all(any(w[: len(c)] == c for w in whole) for c in candidates)
        reference = run(BoN(n=30, seed=seed))[0].outputs[0]
        assert result.outputs[0].score <= reference.score
        assert result.stats["token_rate"] <= 1 and len(judge.kept) == len(result.stats["decisions"])
        for decision, kept in zip(result.stats["decisions"], judge.kept, strict=True):
            assert decision["went_on"] == len(kept) and all(len(tokens) == decision["tokens"] for tokens in kept)


def test_slots_of_the_rejected_are_free_at_once():
    result, seen, slots, _ = run(SBoN(n=30, tau=6, alpha=0.9), eos=())
    for step, live in enumerate(slots):
        alive = seen[step - 1] if step else [[]]
        assert live == len(PROMPT) + len({tuple(c[:i]) for c in alive for i in range(1, len(c) + 1)}), step
    assert slots[6] <= len(PROMPT) + 3 * 6 < slots[5] and result.stats["decisions"][0]["went_on"] == 3


def test_the_finished_are_kept_or_not():
    """Utterances that end early and rank below the cut: candidates in our mode, lost in the paper's."""
    falling = lambda tokens: -10.0 if len(tokens) > 8 else float(len(tokens))  # noqa: E731  (long beginnings promise)
    ours = run(SBoN(n=30, tau=8, alpha=0.9, seed=1), reward=falling)[0]
    papers = run(SBoN(n=30, tau=8, alpha=0.9, seed=1, keep_finished=False), reward=falling)[0]
    assert ours.outputs[0].finish_reason == "eos" and papers.outputs[0].score == -10 < ours.outputs[0].score
    assert ours.stats["tokens_drawn"] == papers.stats["tokens_drawn"]


def test_a_rank_that_never_changes_needs_one_survivor():
    first = lambda tokens: float(noise(tokens[:2]))  # noqa: E731  (decided by the first two tokens)
    for seed in range(6):
        expected = run(BoN(n=25, seed=seed), reward=first)[0].outputs[0]
        best = run(SBoN(n=25, seed=seed, tau=2, alpha=1), reward=first)[0]
        assert best.outputs[0].score == expected.score


def test_more_outputs():
    result = run(SBoN(n=30, tau=4, alpha=0.9, num_return_sequences=7))[0]
    assert len(result.outputs) == 7
    scores = [o.score for o in result.outputs]
    assert scores == sorted(scores, reverse=True)


@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize("pages", [27, 40, 100, 400])
def test_memory_schedule_never_fails(pages, page_size):
    """The least that holds one utterance (3 + 24 - 1), and more: started and cut as the pool allows."""
    pages = -(-pages // page_size) + (page_size > 1)
    for seed in range(3):
        search = SBoN(n=60, tau=3, alpha=0.5, schedule="memory", seed=seed)
        result, _, slots, _ = run(search, pages=pages, page_size=page_size, eos=())
        started = min(60, (pages * page_size - 3) // 3)
        assert result.stats["utterances"] == started and max(slots) <= pages * page_size
        assert result.outputs[0].token_ids in [utterance(i, seed, eos=()) for i in range(started)]
        cuts = [(d["live"], d["went_on"]) for d in result.stats["decisions"]]
        assert all(after <= before - before // 2 and after < before for before, after in cuts)
        assert bool(cuts) == (result.stats["tokens_saved"] > 0)
        if pages * page_size == 400:
            assert max(slots) > 360 and cuts  # what there is, is used


def test_memory_schedule_keeps_as_many_as_are_returned():
    """300 slots hold twelve complete utterances or more, whose beginnings are shared."""
    for wanted, returned in [(1, {1}), (9, {9}), (40, range(11, 14))]:
        search = SBoN(n=60, tau=3, alpha=0.95, schedule="memory", seed=1, num_return_sequences=wanted)
        result, _, slots, _ = run(search, pages=300, eos=())
        assert len(result.outputs) in returned and max(slots) <= 300


def test_without_the_memory_schedule_a_full_pool_is_told():
    with pytest.raises(KVMemoryError, match="--sbon-schedule memory"):
        run(SBoN(n=60, tau=1000), pages=200, eos=())


# --- adaptive ---


@pytest.mark.parametrize("shape", [lambda z: z, lambda z: z.exp(), lambda z: z**3], ids=["plain", "exp", "cubed"])
def test_adaptive_rates_keep_their_risk(shape):
    """Random walks of 32 steps, cut at 4, 8 and 16 as the search does; rewards are any rising function of them."""
    risk, trials, n, generator = 0.2, draws(250), 60, torch.Generator().manual_seed(5)
    lost, drawn = 0, 0
    for _ in range(trials):
        path_NL = torch.randn(n, 32, generator=generator, dtype=torch.float64).cumsum(1)
        running, best = list(range(n)), int(path_NL[:, -1].argmax())
        for tokens in (4, 8, 16):
            reward = shape(path_NL[running][:, [tokens // 2 - 1, tokens - 1]])
            per_doubling = least_correlation(reward[:, 0].tolist(), reward[:, 1].tolist())
            correlation = per_doubling ** math.log2(32 / tokens)
            drawn += len(running) * (tokens // 2 if tokens > 4 else 4)
            order = reward[:, 1].argsort(descending=True).tolist()
            running = [running[i] for i in order[: accepted_by_risk(len(running), correlation, risk / 3)]]
        drawn += 16 * len(running)
        lost += best not in running
    assert lost <= risk * trials + 3 * math.sqrt(risk * (1 - risk) * trials), lost
    assert drawn / (trials * n * 32) < 0.8


def test_the_adaptive_schedule():
    search = SBoN(n=40, tau=2, schedule="adaptive", risk=0.2, seed=1)
    result, seen, *_ = run(search, max_new=32, eos=())
    assert [d["tokens"] for d in result.stats["decisions"]] == [2, 4, 8, 16]
    assert result.stats["decisions"][0]["went_on"] == 40 and result.stats["token_rate"] < 0.9
    whole = [utterance(i, 1, 32, ()) for i in range(40)]
    assert all(any(w[: len(c)] == c for w in whole) for candidates in seen for c in candidates)
    useless = run(search, max_new=32, eos=(), reward=noise)[0]  # rewards without any memory: hardly any is given up
    assert useless.stats["token_rate"] > 0.85
    assert len(run(dataclasses.replace(search, risk=1, num_return_sequences=9), max_new=32)[0].outputs) == 9


def test_accepted_by_risk():
    assert accepted_by_risk(100, 1.0, 0.05) == 1 and accepted_by_risk(100, 0.0, 0.05) in range(93, 98)
    for rho, alpha, kept in [(0.5, 0.8, 0.68), (0.7, 0.9, 0.73), (0.9, 0.9, 0.966), (0.9, 0.95, 0.87)]:
        count = round(100 * (1 - alpha))  # of the Gaussian table
        assert accepted_by_risk(100, rho, 1 - kept + 0.02) <= count <= accepted_by_risk(100, rho, 1 - kept - 0.02)
    counts = [accepted_by_risk(60, rho / 10, 0.05) for rho in range(11)]
    assert counts == sorted(counts, reverse=True)
    assert accepted_by_risk(100, 0.5, 0.0) > 90 and accepted_by_risk(100, 0.5, 1.0) == 1


# --- figures ---


def test_accepted_ranks_and_cuts():
    assert [accepted(100, a) for a in (0, 0.3, 0.5, 0.9, 0.95, 1)] == [100, 70, 50, 10, 5, 1]
    assert [accepted(n, 0.5) for n in (1, 2, 3, 5)] == [1, 1, 2, 3]
    assert accepted(100, 0.07) == 93 and accepted(100, 0.29) == 71  # 0.29 * 100 is 28.999999999999996
    assert accepted(10, 0.9, least=4) == 4 and accepted(3, 0.9, least=4) == 3


def test_expected_lengths():
    assert expected_lengths([10, 4, 20, 8], []) == [10, 4, 20, 8]
    assert expected_lengths([10, 4, 20, 4], [1]) == [10, 15, 20, 4]
    assert expected_lengths([10, 4, 20, 8], [1, 3]) == [10, 15, 20, 15]
    assert expected_lengths([4, 4], [0]) == [4, 4]
    rng = random.Random(1)
    whole = [rng.expovariate(1 / 50) + 1 for _ in range(4000)]
    cut = [i for i in range(4000) if whole[i] > 30 and rng.random() < 0.8]
    estimate = expected_lengths([30 if i in set(cut) else w for i, w in enumerate(whole)], cut)
    assert sum(estimate) == pytest.approx(sum(whole), rel=0.06)


def test_kendall():
    rng = random.Random(2)
    x = [rng.gauss(0, 1) for _ in range(30)]
    y = [a + rng.gauss(0, 1) for a in x]
    pairs = list(itertools.combinations(range(30), 2))
    signs = [math.copysign(1, x[i] - x[j]) * math.copysign(1, y[i] - y[j]) for i, j in pairs]
    assert kendall(x, y) == pytest.approx(sum(signs) / len(pairs))
    assert kendall(x, x) == rank_correlation(x, x) == 1 and kendall([1, 1], [1, 2]) == 0
    many = [(rng.gauss(0, 1), rng.gauss(0, 1)) for _ in range(1500)]
    rho = rank_correlation([a for a, _ in many], [(0.8 * a + 0.6 * b) ** 3 for a, b in many])  # ranks: any rising scale
    assert rho == pytest.approx(0.8, abs=0.05)


def test_configurations_are_checked():
    wrong = {
        "n": [0, 5000, 1.5, True], "tau": [0, -1, 2.5, "4"], "alpha": [-0.1, 1.1, math.nan, True, "x"],
        "schedule": ["64", 64, "0:0.5", "8:0.5,8:0.6", "8:0.5,4:0.6", "8:1.5", "8:0.5,", "memories", True, None],
        "risk": [-0.1, 2, "x"], "keep_finished": [1, "yes"], "seed": [-1], "num_return_sequences": [0, 101],
        "top_p": [0], "temperature": [-1],
    }  # fmt: skip
    for name, value in [(name, value) for name, values in wrong.items() for value in values]:
        with pytest.raises(UsageError, match=f"{name}: expected"):
            SBoN(**{name: value})
    params = {"sbon_n": 8, "sbon_tau": 3, "sbon_alpha": 1, "temperature": 0.5, "sbon_keep_finished": False}
    search = make_search("sbon", params)
    assert search == SBoN(n=8, tau=3, alpha=1, temperature=0.5, keep_finished=False)
    with pytest.raises(UsageError, match="bon_tau"):
        make_search("bon", {"bon_tau": 3})
    assert BoN(n=5).slots(10, 8) == (17, 45) and dataclasses.replace(BoN(), n=7).models == ("reward",)


# --- the Gaussian model ---


BASE, DIGITS = 64, 3  # a text of 6 tokens: the first 3 tell one uniform number, the others another


def gaussian(tokens):
    index = 0
    for token in tokens:
        index = index * BASE + token
    return math.sqrt(2) * torch.erfinv(torch.tensor((2 * index + 1) / BASE**DIGITS - 1, dtype=torch.float64)).item()


@pytest.mark.parametrize(("rho", "kept"), [(0.5, 0.49), (0.7, 0.73), (0.9, 0.966), (1.0, 1.0)])
def test_the_search_loses_the_best_as_often_as_the_gaussian_model(rho, kept):
    """A language model of uniform tokens and rewards of a known correlation: N = 100, a rate of 0.9, end to end."""
    uniform = torch.full((BASE,), -math.log(BASE))

    def reward(tokens):
        now = gaussian(tokens[:DIGITS])
        rest = tokens[DIGITS:]
        return rho * now + math.sqrt(1 - rho**2) * gaussian(rest) if rest else now

    trials, hits = draws(60), 0
    for seed in range(trials):
        options = {"max_new": 2 * DIGITS, "reward": reward, "eos": (), "rows": lambda _: uniform}
        best = run(BoN(n=100, seed=seed), **options)[0].stats["winner"]
        hits += run(SBoN(n=100, seed=seed, tau=DIGITS, alpha=0.9), **options)[0].stats["winner"] == best
    assert abs(hits - kept * trials) <= 3.3 * math.sqrt(trials * kept * (1 - kept)) + 1e-9
