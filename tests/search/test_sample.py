"""Sampling: keyed draws, warpers against plain ones, the distribution itself, and the noise under it.

Statistical tests have fixed seeds, so they pass or fail for ever; each bound has an error rate of 1e-4 or less for a
correct implementation under a fresh seed.
"""

import math
from collections import Counter

import pytest
import torch

from engine.contract.sampling import XTC, _keys
from engine.errors import UsageError
from search import Sample
from tests.draws import chi_square, chi_square_bound
from tests.engine.contract.test_sampling import gumbel
from tests.search.drive import drive

PROMPT = (0, 1, 0)
LOGP = torch.log_softmax(torch.tensor([1.2, 0.3, -0.5, 0.3, -3.0, 0.9]), -1)


def table(path):
    """A toy model of six tokens: its row turns with the last token and the length."""
    return LOGP.roll(sum(path) + len(path))


def run(search, max_new, eos=(), **options):
    run = drive(search, table, max_new, eos, pages=4000, page_size=4, **options)
    prompt = len(options.get("prompt", PROMPT))
    assert all(one.live == prompt + one.needed for one in run.passes)  # sequences that agree share their nodes
    return run


def by_hand(search, i, max_new, eos=()):
    """Sequence i, drawn alone, straight from the definition."""
    warp, path = search.warp(), []
    while len(path) < max_new and (not path or path[-1] not in eos):
        noise = gumbel(search.seed, i, len(PROMPT) + len(path), 6)
        warped_V = warp(table(path).unsqueeze(0))[0]
        if excludes(search, i, len(PROMPT) + len(path)):
            warped_V = warped_V.masked_fill(warp._top_choices(warped_V.unsqueeze(0))[0], -math.inf)
        path.append(int((warped_V + noise).argmax()))
    return path


def excludes(search, sequence, position):
    """Whether XTC excludes top choices of one draw."""
    return _keys(search.seed, [sequence], [position], XTC)[0] / 2**32 < search.xtc_probability


WARPS = [{}, {"temperature": 0.5}, {"top_k": 3}, {"top_p": 0.6}, {"temperature": 0}, {"min_p": 0.4},
         {"typical_p": 0.5}, {"top_n_sigma": 0.7}, {"epsilon_cutoff": 0.15}, {"eta_cutoff": 0.6},
         {"xtc_probability": 0.5, "xtc_threshold": 0.15}]  # fmt: skip


@pytest.mark.parametrize("options", WARPS, ids=str)
def test_sequences_do_not_depend_on_how_many_are_drawn(options):
    alone = [by_hand(Sample(seed=4, **options), i, 9, (5,)) for i in range(7)]
    for n in (1, 2, 5, 7):
        drawn = run(Sample(seed=4, num_return_sequences=n, **options), 9, (5,))
        outputs = drawn.result.outputs
        assert sorted(drawn.outputs) == sorted(alone[:n])
        assert drawn.settled == drawn.outputs[0]
        assert [o.logprob for o in outputs] == sorted((o.logprob for o in outputs), reverse=True)
        for output in outputs:
            path = output.token_ids
            logprob = sum(float(table(path[:i])[t]) for i, t in enumerate(path))
            assert output.logprob == output.score == pytest.approx(logprob, abs=1e-5)  # of the model, unwarped
            assert output.finish_reason == ("eos" if path[-1] == 5 else "length")


def test_seeds_and_positions_differ():
    drawn = {seed: run(Sample(seed=seed), 30).outputs[0] for seed in (0, 1, 2**32, 2**63 - 1)}
    assert len({tuple(path) for path in drawn.values()}) == 4
    assert run(Sample(seed=0), 30, prompt=(*PROMPT, 1)).outputs[0] != drawn[0]


def test_temperature_zero_is_greedy_and_one_node_wide():
    drawn = run(Sample(temperature=0, num_return_sequences=5), 12)
    path = []
    for _ in range(12):
        path.append(int(table(path).argmax()))
    assert drawn.outputs == [path] * 5 and set(map(len, drawn.paths)) == {1}


def test_configurations_are_checked():
    wrong = {
        "temperature": [-1, math.inf, math.nan, "1", None, 5e-324, 1e30, True],
        "top_k": [-1, 1.5, True, None],
        "top_p": [0, 1.5, -0.1, math.nan, "x"],
        "min_p": [1.5, -0.1, math.nan, "x"],
        "typical_p": [0, 1.5, -0.1, math.nan, "x", True],
        "epsilon_cutoff": [1, 1.5, -0.1, math.nan, "x", True],
        "eta_cutoff": [1, 1.5, -0.1, math.nan, "x", True],
        "top_n_sigma": [-0.1, math.nan, math.inf, "x", True],
        "xtc_probability": [1.5, -0.1, math.nan, "x", True],
        "xtc_threshold": [1.5, -0.1, math.nan, "x", True],
        "seed": [-1, 1.0, True, 2**64],
        "num_return_sequences": [0, 5000, True, 1.0],
    }
    for name, value in [(name, value) for name, values in wrong.items() for value in values]:
        with pytest.raises(UsageError, match=f"{name}: expected"):
            Sample(**{name: value})


# --- the distribution ---


def test_two_tokens_have_the_exact_joint_distribution():
    """Positions are independent: pairs from the search itself, 36 cells."""
    joint = {(a, b): math.exp(float(table([])[a]) + float(table([a])[b])) for a in range(6) for b in range(6)}
    counts = Counter()
    for seed in range(3):
        counts.update(map(tuple, run(Sample(seed=seed, num_return_sequences=4096), 2).outputs))
    value, cells = chi_square(counts, joint)
    assert value < chi_square_bound(cells)
