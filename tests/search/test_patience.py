"""`patience` beside CTranslate2's beam search, beside a beam search by lists, and in beam sampling."""

import json
import random
from functools import partial
from pathlib import Path

import pytest

from engine import Engine, Request
from engine.errors import UsageError
from search import BeamSample, Trie
from search.options import hypotheses
from tests.search.drive import drive
from tests.search.test_trie import Table, beam_search

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "patience.json").read_text())


def test_equals_ctranslate2():
    engine, cases = Engine.load(Path(GOLDEN["model"]), dtype="float32"), GOLDEN["cases"]

    def request(case):
        names = ("beams", "length_penalty", "patience", "num_return_sequences")
        search, ends = Trie(**{name: case[name] for name in names}), [case["eos_token_id"]]
        return Request(case["prompt_ids"], search, case["max_new_tokens"], ends)

    results = dict(engine.serve(map(request, cases)))
    assert {case["patience"] for case in cases} >= {0.3, 0.5, 1.0, 1.5, 2.0}
    for i, case in enumerate(cases):
        outputs = results[i].outputs
        assert [output.token_ids for output in outputs] == [output["token_ids"] for output in case["outputs"]], i
        for output, golden in zip(outputs, case["outputs"], strict=True):
            assert output.score == pytest.approx(golden["score"], rel=1e-4, abs=1e-4)


@pytest.mark.parametrize(
    ("beams", "patience", "count"),
    [(3, 1.5, 5), (5, 0.5, 3), (5, 1.5, 8), (4, 0.3, 1), (15, 1, 15), (50, 0.29, 15), (10, 0.05, 1), (7, None, 7)],
)
def test_how_many_hypotheses(beams, patience, count):
    """Halves are rounded up, in float32: 50 x 0.29 are 14.5 there."""
    assert hypotheses(beams, patience) == count
    assert Trie(beams, patience=patience, num_return_sequences=count).patience == patience
    with pytest.raises(UsageError, match="num_return_sequences: expected an integer from 1 to"):
        Trie(beams, patience=patience, num_return_sequences=count + 1)


@pytest.mark.parametrize("patience", [0, -1, 0.1, 101, True, "1", float("nan")])
@pytest.mark.parametrize("search", [Trie, BeamSample])
def test_a_patience_that_cannot_be(search, patience):
    with pytest.raises(UsageError, match=r"^patience: "):
        search(beams=4, patience=patience)


def test_never_and_a_patience_contradict_each_other():
    with pytest.raises(UsageError, match="takes the place of early_stopping"):
        Trie(early_stopping="never", patience=1)


def by_lists(table, beams, wanted, max_new, eos, penalty):
    """Beam search that ends when `wanted` hypotheses have: all of them, best first, and the steps."""
    live, done, step = [((), 0.0)], [], 0
    while True:
        step += 1
        found = [
            (s + float(logp), (*path, token)) for path, s in live for token, logp in enumerate(table(path).tolist())
        ]
        found = sorted(found, key=lambda candidate: -candidate[0])[: 2 * beams]
        ended = [path[-1] in eos or step == max_new for _, path in found]
        done += [(s / step**penalty, path) for (s, path), end in zip(found[:beams], ended, strict=False) if end]
        if len(done) >= wanted or all(ended):
            return [list(path) for _, path in sorted(done, key=lambda one: -one[0])], step
        live = [(path, s) for (s, path), end in zip(found, ended, strict=True) if not end][:beams]


def test_equals_a_beam_search_by_lists():
    rng, earlier = random.Random(1), 0
    for seed in range(120):
        table = Table(rng.randint(8, 24), seed, rng.choice([0.3, 1.0, 3.0]), eos=(3,), eos_bias=rng.uniform(-2, 4))
        beams, penalty, patience = (
            rng.randint(1, 5),
            rng.choice([0, 0.6, 1, -1]),
            rng.choice([0.5, 1, 1.5, 2, 3.1]),
        )
        wanted, max_new = hypotheses(beams, patience), rng.randint(1, 14)
        returned = rng.randint(1, wanted)
        expected, steps = by_lists(table, beams, wanted, max_new, (3,), penalty)
        run = drive(Trie(beams, penalty, False, returned, patience), table, max_new, (3,))
        assert run.outputs == expected[:returned], (seed, beams, patience, penalty)
        assert run.result.stats["steps"] <= steps
        earlier += run.result.stats["steps"] < steps  # nothing that is returned could change any more
    assert 0 < earlier < 120


def score_of(table, penalty, path, length):
    return sum(float(table(tuple(path[:i]))[token]) for i, token in enumerate(path)) / length**penalty


def whole_score(table, penalty, path):
    return score_of(table, penalty, path, len(path))


def test_best_ends_when_nothing_live_is_better_than_what_is_returned():
    shorter = 0
    for seed in range(60):
        table, rng = Table(16, seed, eos=(3,), eos_bias=seed % 5 - 1), random.Random(seed)
        beams, penalty, returned = rng.randint(2, 5), rng.choice([0.6, 1, 2]), rng.randint(1, 2)
        run = drive(Trie(beams, penalty, "best", returned), table, 12, (3,))
        paths, _ = by_lists(table, beams, 1 << 30, 12, (3,), penalty)
        score = partial(score_of, table, penalty)
        alive = beam_search(table, beams, 12, (3,), penalty, "never")[1]
        steps = run.result.stats["steps"]
        for step, live in enumerate(alive, 1):
            ended = sorted((score(path, len(path)) for path in paths if len(path) <= step), reverse=True)
            if len(ended) >= returned and score(live[0], step) <= ended[returned - 1]:
                break
        else:
            step = len(alive) + 1
        assert steps == step, seed
        best = max((path for path in paths if len(path) <= step), key=partial(whole_score, table, penalty))
        assert run.outputs[0] == best
        shorter += steps < drive(Trie(beams, penalty, False, returned), table, 12, (3,)).result.stats["steps"]
    assert shorter > 20


def test_patience_of_one_is_early_stopping():
    for seed in range(40):
        table = Table(16, seed, eos=(3,), eos_bias=seed % 5 - 2)
        for beams, penalty in ((1, 1.0), (3, 0.6), (5, -1.0)):
            runs = [drive(Trie(beams, penalty, True, beams, patience), table, 12, (3,)) for patience in (None, 1)]
            assert runs[0].outputs == runs[1].outputs
            assert runs[0].outputs == [path for path, _ in beam_search(table, beams, 12, (3,), penalty, True)[0]]


def sampled(table, patience, seed, ends):
    """The widths of the list after each step of beam sampling with five beams, and all outputs."""
    search = BeamSample(beams=5, patience=patience, seed=seed, num_return_sequences=hypotheses(5, patience))
    run = drive(search, table, 12, ends)
    return [told.report.info["width"] for told in run.told], run.outputs


def test_beam_sampling():
    """A patience below 1 ends earlier, one above 1 fills the list up again; the draws before are the same."""
    ends, longer = (3, 4), 0
    for seed in range(25):
        table = Table(12, seed, sharp=1.0, eos=ends, eos_bias=1.0)
        widths, outputs = sampled(table, None, seed, ends)
        assert sampled(table, 1, seed, ends) == (widths, outputs)
        few, early = sampled(table, 0.4, seed, ends)  # of two entries
        last = next(step for step, width in enumerate(widths) if 5 - width >= 2)
        assert few == [*widths[:last], 0]
        assert {*map(tuple, early)} <= {tuple(path) for path in outputs if len(path) <= last + 1}
        many, _ = sampled(table, 2.4, seed, ends)  # of twelve
        ended = 0
        for width in many:
            assert ended < 12
            ended += min(5, 12 - ended) - width
        assert many[-1] == 0
        longer += len(many) > len(widths)
    assert longer > 10
