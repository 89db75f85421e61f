"""Diverse beam search beside group beam search of transformers 4, and beside one by lists over tables."""

import itertools
import json
import math
import random
from pathlib import Path

import pytest

from engine import Engine, Request
from engine.errors import UsageError
from search import Diverse
from tests.search.drive import drive
from tests.search.test_trie import Table

ROOT = Path(__file__).parents[1] / "golden"
GOLDEN = json.loads((ROOT / "diverse.json").read_text())


def test_equals_transformers():
    engine, cases = Engine.load(ROOT / GOLDEN["model"], dtype="float32", device="cpu"), GOLDEN["cases"]

    def request(case):
        names = ("beams", "groups", "penalty", "length_penalty", "early_stopping", "num_return_sequences")
        search, ends = Diverse(**{name: case[name] for name in names}), case["eos_token_ids"]
        suppressed = GOLDEN["suppress_tokens"]
        return Request(case["prompt_ids"], search, case["max_new_tokens"], ends, suppress_tokens=suppressed)

    results = dict(engine.serve(map(request, cases)))
    assert len(cases) == 200 and {case["early_stopping"] for case in cases} == {False, True, "never"}
    ended = 0
    for i, case in enumerate(cases):
        outputs, ends = results[i].outputs, case["eos_token_ids"]
        found = [[ends[0] if token in ends else token for token in output.token_ids] for output in outputs]
        assert found == [output["token_ids"] for output in case["outputs"]], i
        assert [o.score for o in outputs] == pytest.approx([o["score"] for o in case["outputs"]], abs=1e-4, rel=1e-4)
        ended += sum(output.finish_reason == "eos" for output in outputs)
    assert ended > 200


def by_lists(table, search, max_new, eos, stops=lambda path: False):
    """Group beam search as the steps of docs/algorithms.md say it: [(score, tokens)], best first, and the steps."""
    mode = {"false": False, "true": True}.get(search.early_stopping, search.early_stopping)
    size, k = search.size, max(2, 1 + len(eos)) * search.size
    live = [[(0.0, ())] for _ in range(search.beams // size)]
    done = [[] for _ in live]
    step = 0
    while any(live):
        step += 1
        taken = []
        for g, beams in enumerate(live):
            if not beams:
                continue
            found = []
            for total, path in beams:
                for token, logp in enumerate(table(path).tolist()):
                    if logp > -math.inf:
                        found.append((total + logp - search.penalty * taken.count(token), (*path, token)))
            found = sorted(found, key=lambda candidate: -candidate[0])[:k]
            ends = [path[-1] in eos or stops(path) for _, path in found]
            done[g] += [
                (t / step**search.length_penalty, p) for (t, p), end in zip(found[:size], ends, strict=False) if end
            ]
            done[g] = sorted(done[g], key=lambda one: -one[0])[:size]
            going = [candidate for candidate, end in zip(found, ends, strict=True) if not end][:size]
            taken += [path[-1] for _, path in going]
            length = max_new if mode == "never" and search.length_penalty > 0 else step
            worst = done[g][-1][0] if len(done[g]) == size else -math.inf
            full = len(done[g]) == size and (mode is True or worst >= found[0][0] / length**search.length_penalty)
            if step == max_new and not full:
                done[g] += [(total / step**search.length_penalty, path) for total, path in going]
                done[g] = sorted(done[g], key=lambda one: -one[0])[:size]
            live[g] = [] if full or step == max_new else going
    return sorted(itertools.chain(*done), key=lambda one: -one[0]), step


def compare(table, search, max_new, eos, stops=None):
    run = drive(search, table, max_new, eos, page_size=4, stops=stops)
    expected, steps = by_lists(table, search, max_new, eos, stops or (lambda path: False))
    expected = expected[: search.num_return_sequences]
    assert [tuple(tokens) for tokens in run.outputs] == [path for _, path in expected], search
    assert run.settled == run.outputs[0] and run.result.stats["steps"] == steps
    for output, (score, path) in zip(run.result.outputs, expected, strict=True):
        assert output.score == pytest.approx(score, abs=1e-9)
        assert output.logprob == pytest.approx(sum(float(table(path[:i])[t]) for i, t in enumerate(path)), abs=1e-4)
        assert output.finish_reason == ("eos" if path[-1] in eos else "stop" if stops and stops(path) else "length")
    return run


def test_equals_a_group_beam_search_by_lists():
    rng = random.Random(2)
    for seed in range(250):
        vocab = rng.randint(12, 30)
        eos = tuple(rng.sample(range(vocab), rng.choice([0, 1, 1, 3])))
        size, groups = rng.randint(1, 4), rng.randint(1, 5)
        table = Table(vocab, seed, rng.choice([0.3, 1.0, 3.0]), 0.0, eos, rng.uniform(-2, 4))
        search = Diverse(
            size * groups, groups, rng.choice([0.0, 0.25, 1.0, 30.0]), rng.choice([0, 1, 0.6, 2, -0.5]),
            rng.choice([False, True, "never", "false"]), rng.randint(1, size * groups if groups < 2 else size),
        )  # fmt: skip
        if search.penalty == 0.0 and groups > 1:  # equal groups: ties between them
            continue
        compare(table, search, rng.randint(1, 12), eos)


def test_ties_go_to_the_lower_rank_then_the_lower_token():
    """Sums and penalties are multiples of a power of two: many candidates tie, in each group and at its border."""
    for seed, penalty in itertools.product(range(20), [0.5, 1.0]):
        table = Table(16, seed, sharp=1.0, step=0.5)
        run = drive(Diverse(6, 3, penalty, num_return_sequences=6), table, 5)
        expected, _ = by_lists(table, Diverse(6, 3, penalty), 5, ())
        assert sorted(map(tuple, run.outputs)) == sorted(path for _, path in expected)


def test_stop_strings_end_hypotheses_like_eos():
    def stops(path):
        return len(path) >= 2 and (path[-1] + path[-2]) % 5 == 0

    for seed, mode in itertools.product(range(10), [False, True, "never"]):
        compare(Table(14, seed, eos=(3,)), Diverse(6, 2, 0.7, 1.0, mode, 4), 10, (3,), stops)


def test_groups_differ_and_share_one_tree():
    table = Table(20, 1, sharp=3.0)
    same = drive(Diverse(4, penalty=0.0, num_return_sequences=4), table, 8)
    assert len({*map(tuple, same.outputs)}) == 1 and max(map(len, same.paths)) == 1  # four groups, one node
    apart = drive(Diverse(4, penalty=100.0, num_return_sequences=4), table, 8)
    assert len({tokens[0] for tokens in apart.outputs}) == 4
    assert [max(map(len, run.paths)) for run in (same, apart)] == [1, 4]
    for search in (Diverse(4), Diverse(6, 2, 3.0), Diverse(6, 1)):
        low, high = search.slots(3, 25)
        assert low <= drive(search, Table(24, 3, sharp=0.5), 25).trees["target"].peak_live <= high


def test_tokens_that_cannot_be():
    for seed in range(10):
        run = drive(Diverse(4, 2, 0.5, num_return_sequences=1), Table(9, seed, eos=(0,), dead=0.9), 6, (0,))
        assert len(run.outputs) == 1


def test_configurations_are_checked():
    wrong = {
        "beams": [0, True, 2.0, "4", None],
        "groups": [0, 5, 1.0, True],
        "penalty": [-0.1, math.nan, math.inf, "1", None],
        "length_penalty": ["1", math.nan, None, 1e9],
        "early_stopping": ["maybe", "best", None, 1, 0.0],
        "num_return_sequences": [0, 5, True, 1.0],
    }
    for name, value in [(name, value) for name, values in wrong.items() for value in values]:
        with pytest.raises(UsageError, match="expected"):
            Diverse(**{name: value})
    with pytest.raises(UsageError, match="cannot be divided into 3 groups"):
        Diverse(4, 3)
    with pytest.raises(UsageError, match="at most 7"):
        Diverse(beams=16, groups=2).check(10, frozenset([1, 2, 3]))
    Diverse(beams=14, groups=2).check(10, frozenset([1, 2, 3]))
