"""Warpers against Hugging Face's definitions; keyed draws and their noise: their laws, and that keys do not collide."""

import itertools
import json
import math
import random
import statistics
from collections import Counter
from pathlib import Path

import pytest
import torch

from engine.contract import sampling
from engine.contract.sampling import Warp, uniforms
from kernels.rows import reference
from search.dsbd.joint import Reader
from search.ults import Children
from tests.draws import chi_square, chi_square_bound, draws

GOLDEN = json.loads((Path(__file__).parents[2] / "golden" / "warpers.json").read_text())
LOGP = torch.log_softmax(torch.tensor([1.2, 0.3, -0.5, 0.3, -3.0, 0.9]), -1)


def gumbels(seed, sequences, positions, size):
    """The noise of draws, float32 [N, size]."""
    return reference.gumbels(sampling._keys(seed, sequences, positions), size, torch.device("cpu"))


def gumbel(seed, sequence, position, size):
    """The noise of one draw."""
    return gumbels(seed, [sequence], [position], size)[0]


def plain_warp(logp, temperature, top_k, top_p, min_p=0.0):
    """One row, by Hugging Face's definitions: TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper,
    MinPLogitsWarper."""
    scores = [x / temperature for x in logp.tolist()]
    if top_k:
        kth = sorted(scores, reverse=True)[min(top_k, len(scores)) - 1]
        scores = [s if s >= kth else -math.inf for s in scores]
    if top_p < 1:
        order = sorted(range(len(scores)), key=lambda i: (scores[i], i))
        total = math.fsum(map(math.exp, scores))
        mass, gone = 0.0, []
        for i in order[:-1]:
            mass += math.exp(scores[i]) / total
            if mass <= 1 - top_p:
                gone.append(i)
        scores = [-math.inf if i in gone else s for i, s in enumerate(scores)]
    probs = [math.exp(s) / math.fsum(map(math.exp, scores)) for s in scores]
    scores = [s if p >= min_p * max(probs) else -math.inf for s, p in zip(scores, probs, strict=True)]
    total = math.log(math.fsum(map(math.exp, scores)))
    return [s - total for s in scores]


@pytest.mark.parametrize("min_p", [0.0, 0.07, 1.0])
@pytest.mark.parametrize("top_p", [1.0, 0.95, 0.5, 0.1, 1e-6])
@pytest.mark.parametrize("top_k", [0, 1, 2, 7, 50, 1000])
@pytest.mark.parametrize("temperature", [1.0, 0.3, 1.7])
def test_warpers(temperature, top_k, top_p, min_p):
    generator = torch.Generator().manual_seed(top_k)
    logp_NV = torch.log_softmax(torch.randn(6, 50, generator=generator) * 2, -1)
    logp_NV[4] = torch.log_softmax((logp_NV[4] * 0.5).round(), -1)  # ties at every border
    logp_NV[5, 3:45] = float("-inf")
    logp_NV = torch.log_softmax(logp_NV, -1)
    kept = logp_NV.clone()
    warped_NV = Warp(temperature, top_k, top_p, min_p)(logp_NV)
    assert logp_NV.equal(kept)
    for row, expected in zip(warped_NV, (plain_warp(r, temperature, top_k, top_p, min_p) for r in kept), strict=True):
        torch.testing.assert_close(row, torch.tensor(expected), rtol=1e-4, atol=1e-4)


def kept(warp, logp_V):
    """The tokens that stay; their probabilities add up to 1 and have the ratios that the temperature gives."""
    warped_V = warp(torch.stack([logp_V, logp_V.flip(0)]))[0]
    stay = warped_V.isfinite().nonzero().view(-1)
    torch.testing.assert_close(warped_V[stay], torch.log_softmax(logp_V[stay] / warp.temperature, -1))
    return stay.tolist()


def test_typical_is_that_of_transformers():
    assert len(GOLDEN["cases"]) == 200
    for i, case in enumerate(GOLDEN["cases"]):
        logp_V = torch.log_softmax(torch.tensor(case["logits"]), -1)
        assert kept(Warp(**case["options"]), logp_V) == case["kept"], i
        without = {name: x for name, x in case["options"].items() if name != "typical_p"}
        assert {*case["kept"]} <= {*kept(Warp(**without), logp_V)}
    likeliest = [max(range(len(c["logits"])), key=c["logits"].__getitem__) for c in GOLDEN["cases"]]
    assert any(best not in case["kept"] for best, case in zip(likeliest, GOLDEN["cases"], strict=True))


@pytest.mark.parametrize("options", [{"epsilon_cutoff": 0.1}, {"eta_cutoff": 0.4}])
def test_cutoffs_are_of_probabilities(options):
    """Edited rows need not be normalised; `tests/golden/draws.json` has what transformers keeps."""
    logp_V = torch.log_softmax(torch.tensor([2.0, 1.0, 0.0, -1.0, -3.0]), -1)
    stay = kept(Warp(**options), logp_V)
    assert 0 < len(stay) < 5 and kept(Warp(**options), logp_V + 3) == stay
    assert kept(Warp(**dict.fromkeys(options, 0.999)), torch.zeros(2)) == [0, 1]  # the best ones


def test_top_n_sigma_is_that_of_llama_cpp():
    """`llama_sampler_top_n_sigma_apply`: of logits before the temperature, without those that are -inf."""
    rng, removed = random.Random(0), 0
    for i in range(200):
        logits = [rng.gauss(0, rng.choice((0.3, 1.0, 3.0))) for _ in range(rng.randint(2, 40))]
        if i % 3 == 0:
            logits[rng.randrange(len(logits))] = -math.inf
        finite = [x for x in logits if x > -math.inf]
        n = rng.choice((0.1, 0.5, 1.0, 1.7, 3.0))
        least = max(finite) - n * statistics.pstdev(finite)
        stay = [token for token, x in enumerate(logits) if x >= least]
        if min(abs(x - least) for x in finite) < 1e-4 and len(finite) > 1:
            continue
        logp_V = torch.log_softmax(torch.tensor(logits), -1)
        for temperature in (0.5, 1.0, 2.0):
            assert kept(Warp(temperature, top_n_sigma=n), logp_V) == stay, i
        k = max(1, len(stay) - 1)
        assert kept(Warp(1.0, k, top_n_sigma=n), logp_V) == sorted(sorted(stay, key=lambda t: -logits[t])[:k])
        removed += len(stay) < len(finite)
    assert 100 < removed < 200


def after_xtc(logits, threshold):
    """The tokens that stay where XTC excludes, from llama.cpp's description: candidates sorted, those above the least
    probable one that still reaches the threshold removed."""
    total = math.fsum(map(math.exp, logits))
    ranked = sorted((-math.exp(x) / total, token) for token, x in enumerate(logits) if x > -math.inf)
    reach = sum(-p >= threshold for p, _ in ranked)
    return sorted(token for _, token in ranked[max(0, reach - 1) :])


def test_xtc_is_that_of_llama_cpp():
    rng, fewer = random.Random(1), 0
    for i in range(200):
        logits = [round(rng.gauss(0, rng.choice((0.3, 1.0, 3.0))), 1) for _ in range(rng.randint(1, 40))]
        if i % 3 == 0 and len(logits) > 1:
            logits[rng.randrange(len(logits))] = -math.inf
        threshold = rng.choice((0.0, 0.02, 0.0531, 0.1013, 0.2011, 0.4973, 0.7))
        temperature = rng.choice((0.5, 1.0, 2.0))
        warp = Warp(temperature, rng.choice((0, 5)), 1.0, rng.choice((0, 0.1)), 1.0, 0.0, 1.0, threshold)
        row_1V = torch.log_softmax(torch.tensor([logits]), -1)
        warped_V = warp(row_1V)[0]
        stay = after_xtc(warped_V.double().tolist(), threshold) if threshold <= 0.5 else kept(warp, row_1V[0])
        drawn = {int(warp.draws(row_1V, seed, [0], [i])) for seed in range(300)}
        assert drawn <= {*stay}, i
        gone = {*kept(warp, row_1V[0])} - {*stay}
        fewer += bool(gone)
        if threshold <= 0.5:
            assert gone == {*warp._top_choices(warped_V.unsqueeze(0))[0].nonzero().view(-1).tolist()}
    assert 60 < fewer < 180


def test_xtc_excludes_as_often_as_it_should_whatever_is_drawn():
    """The choice is another number than the noise, so what is drawn where nothing is excluded has its distribution."""
    warp = Warp(xtc_probability=0.3, xtc_threshold=0.25)
    logp_NV = torch.tensor([[0.5, 0.3, 0.2]]).log().expand(20000, 3)
    tokens = warp.draws(logp_NV, 7, [0] * 20000, range(20000)).tolist()
    expected = {0: 0.7 * 0.5, 1: 0.7 * 0.3 + 0.3 * 0.6, 2: 0.7 * 0.2 + 0.3 * 0.4}
    found, cells = chi_square(Counter(tokens), expected)
    assert found < chi_square_bound(cells)
    alone = [int(warp.draws(logp_NV[:1], 7, [0], [p])) for p in range(50)]
    assert alone == tokens[:50]  # alone or in a batch


@pytest.mark.parametrize(("top_k", "top_p"), [(1, 1), (5, 1), (5, 0.6), (300, 0.9), (0, 0.3), (0, 0.5), (0, 0.95)])
@pytest.mark.parametrize("temperature", [1, 0.6, 1.7])
def test_rows_that_few_tokens_decide(temperature, top_k, top_p):
    """Only the most probable of a large vocabulary are ranked, with the result of ranking all, ties included."""
    logits_NV = torch.randn(9, 3000, generator=torch.Generator().manual_seed(top_k)) * 3
    logits_NV[1] = (logits_NV[1] * 2).round()
    logits_NV[2, 4:], logits_NV[3] = float("-inf"), 0.0
    logits_NV[4, :3], logits_NV[4, 3:] = 9.0, -9.0  # a tie where top-p ends
    logits_NV[5] *= 0.1  # no few tokens reach top-p
    logits_NV[6, :20], logits_NV[6, 20:] = -math.log(2) * torch.arange(20), float("-inf")  # 1/2, 1/4, ...
    logp_NV = torch.log_softmax(logits_NV, -1)
    warp = Warp(temperature, top_k, top_p)
    scores_NV = logp_NV / temperature
    torch.testing.assert_close(warp(logp_NV), warp._sorted(scores_NV), rtol=1e-4, atol=1e-4)
    _, undecided_N = warp._ranked(scores_NV)
    assert not undecided_N.all()
    for n in range(9):
        assert warp(logp_NV[n : n + 1])[0].equal(warp(logp_NV)[n])  # whatever the other rows are


def test_warp_ties():
    logp_NV = torch.log(torch.tensor([[0.2, 0.2, 0.2, 0.2, 0.2], [0.4, 0.1, 0.1, 0.0, 0.4]]))
    assert Warp(top_k=1)(logp_NV).isfinite().tolist() == [[True] * 5, [True, False, False, False, True]]
    assert Warp(temperature=0)(logp_NV).isfinite().tolist() == [[True] + [False] * 4] * 2  # the lower token id


@pytest.mark.parametrize("temperature", [1e-2, 1e-4, 1e-6])
def test_a_vanishing_temperature_leaves_the_best_token(temperature):
    warped_NV = Warp(temperature=temperature)(LOGP.unsqueeze(0))
    assert not warped_NV.isnan().any() and warped_NV.argmax() == LOGP.argmax()
    assert warped_NV.exp().sum() == pytest.approx(1)


def test_a_huge_temperature_is_uniform_over_what_is_possible():
    logp_NV = torch.tensor([[0.0, -1.0, float("-inf"), -90.0]])
    torch.testing.assert_close(
        Warp(temperature=1e6)(logp_NV).exp(), torch.tensor([[1, 1, 0, 1]]) / 3, rtol=1e-3, atol=0
    )


@pytest.mark.parametrize("options", [{}, {"temperature": 0.7}, {"top_k": 3}, {"top_p": 0.7}], ids=str)
def test_one_token_has_the_exact_distribution(options):
    """4096 sequences of one request; three seeds."""
    probabilities = dict(enumerate(Warp(**options)(LOGP.unsqueeze(0))[0].double().exp().tolist()))
    counts = Counter()
    for seed in range(3):
        warped_NV = Warp(**options)(LOGP.expand(4096, 6))
        counts.update(sampling.draws(warped_NV, seed, list(range(4096)), [3] * 4096).tolist())
    value, cells = chi_square(counts, probabilities)
    assert value < chi_square_bound(cells)


@pytest.mark.parametrize("vary", ["seed", "sequence", "position"])
def test_draws_under_consecutive_keys_are_independent(vary):
    """Tokens at neighbouring keys, as pairs, against the product distribution."""
    n = draws(8000)
    keys = {"seed": [0] * n, "sequence": [0] * n, "position": [0] * n} | {vary: list(range(n))}
    drawn = []
    for seed, sequence, position in zip(*keys.values(), strict=True):
        drawn.append(int((LOGP + gumbel(seed, sequence, position, 6)).argmax()))
    p = LOGP.double().exp().tolist()
    for lag in (1, 2, 256):
        pairs = Counter(zip(drawn[: n - lag], drawn[lag:], strict=True))
        value, cells = chi_square(pairs, {(a, b): p[a] * p[b] for a in range(6) for b in range(6)})
        assert value < chi_square_bound(cells)  # pairs overlap; the statistic stays close enough to chi-square


@pytest.mark.parametrize("scale", [0.01, 3.0, 30.0])
@pytest.mark.parametrize("top_k", [0, 5])
@pytest.mark.parametrize(("rows", "vocab"), [(1, 32768), (3, 32003), (40, 1536), (2, 50257)])
def test_many_draws_are_those_of_the_definition(rows, vocab, top_k, scale):
    """Where there are many log-probabilities only the tokens that may win are looked at: the same tokens come out."""
    torch.manual_seed(vocab + top_k)
    sequences = range(rows)
    for seed in range(20):
        logits_NV = scale * torch.randn(rows, vocab)
        logits_NV[0, 7:] = float("-inf")
        logp_NV = Warp(top_k=top_k)(torch.log_softmax(logits_NV, -1))
        noise_NV = torch.stack([gumbel(seed, i, 9, vocab) for i in sequences])
        expected = (logp_NV + noise_NV).argmax(-1).tolist()
        for rows_NV in (logp_NV, logp_NV.t().contiguous().t()):  # however they lie in memory
            assert sampling.draws(rows_NV, seed, sequences, [9] * rows).tolist() == expected


def test_gumbel_moments_and_distribution():
    noise = gumbel(7, 3, 11, 200_000).double()
    n = len(noise)
    assert noise.isfinite().all()
    assert abs(noise.mean() - 0.5772156649) < 4 * math.pi / math.sqrt(6 * n)
    assert abs(noise.var() - math.pi**2 / 6) < 4 * math.sqrt((5.4 - 1) / n) * math.pi**2 / 6
    uniform = torch.exp(-torch.exp(-noise)).sort().values
    steps = torch.arange(1, n + 1) / n
    assert (uniform - steps).abs().max() < 2.23 / math.sqrt(n)  # Kolmogorov-Smirnov at 1e-4


def test_gumbel_prefixes():
    long = gumbel(5, 2, 9, 100_000)
    for size in (1, 2, 31, 32, 1000, 32000, 65537):
        assert gumbel(5, 2, 9, size).equal(long[:size])


def test_gumbel_vectors_of_different_keys_are_uncorrelated():
    base = (1000, 5, 77)
    others = [(1001, 5, 77), (1000, 6, 77), (1000, 5, 78), (1000, 77, 5), (5, 1000, 77), (1000 + 2**32, 5, 77),
              (1000 ^ 2**31, 5, 77), (1000, 5, 77 + 2**20), (1000, 5 + 2**16, 77), (0, 0, 0)]  # fmt: skip
    n = 100_000
    a = gumbel(*base, n).double()
    a = (a - a.mean()) / a.std()
    for key in others:
        b = gumbel(*key, n).double()
        b = (b - b.mean()) / b.std()
        for shift in (0, 1, 2, 255, 256):
            assert abs(float((a * b.roll(shift)).mean())) < 4.5 / math.sqrt(n), (key, shift)
    for shift in (1, 2, 3, 16, 255, 256, 4096, 65536):  # within a vector too
        assert abs(float((a * a.roll(shift)).mean())) < 4.5 / math.sqrt(n), shift


def test_gumbel_keys_do_not_collide():
    """20,000 keys of everyday use: no two share their noise."""
    heads = [(0, s, p) for s in range(40) for p in range(250)]
    heads += [(seed, 0, p) for seed in range(1, 101) for p in range(100)]
    firsts = {tuple(gumbel(*key, 3).tolist()) for key in heads}
    assert len(firsts) == len(heads)


def test_uniforms():
    numbers = list(itertools.islice(uniforms(1, 2, 3), 20_000))
    assert numbers == list(itertools.islice(uniforms(1, 2, 3), 20_000)) and 0 < min(numbers) < max(numbers) < 1
    for other in ((2, 2, 3), (1, 3, 3), (1, 2, 4), (1 + 2**32, 2, 3)):
        assert len(set(numbers) & set(itertools.islice(uniforms(*other), 20_000))) < 5
    steps = [(i + 1) / len(numbers) for i in range(len(numbers))]
    assert max(abs(a - b) for a, b in zip(sorted(numbers), steps, strict=True)) < 2.23 / math.sqrt(len(numbers))


@pytest.mark.parametrize(
    "warp", [Warp(), Warp(5.0, top_p=0.95), Warp(typical_p=0.9), Warp(xtc_probability=0.5, xtc_threshold=1e-4)]
)
def test_draws_warp_a_few_rows_at_a_time(warp, monkeypatch):
    """Neither the rows nor those of all draws are warped together, and the draws are the same."""
    logp_NV = torch.log_softmax(torch.randn(7, 3000, generator=torch.Generator().manual_seed(0)), -1)
    sequences, positions, row_n = [*range(40)], [i % 3 for i in range(40)], torch.tensor([i * i % 7 for i in range(40)])
    together = warp.draws(logp_NV, 1, sequences, positions, row_n), warp.draws(logp_NV, 1, sequences[:7], positions[:7])
    monkeypatch.setattr(sampling, "BLOCK", 1)
    rows, before = list[int](), sampling.draws
    monkeypatch.setattr(sampling, "draws", lambda x_nV, *keys: rows.append(len(x_nV)) or before(x_nV, *keys))
    assert warp.draws(logp_NV, 1, sequences, positions, row_n).equal(together[0])
    assert warp.draws(logp_NV, 1, sequences[:7], positions[:7]).equal(together[1])
    assert max(rows) == torch.get_num_threads() and sum(rows) == 47


def test_sums_of_a_single_row_do_not_depend_on_the_number_of_threads():
    rows_NV = torch.log_softmax(torch.randn(24, 1 << 17, generator=torch.Generator().manual_seed(0)) * 3, -1)
    sums = {
        "warped": lambda x_1V: Warp(temperature=0.7, typical_p=0.9)(x_1V),
        "plain": lambda x_1V: sampling.by_row(torch.logsumexp, x_1V / 0.7),
        "of squares": lambda x_1V: sampling.by_row(torch.sum, x_1V.square()),
        "dsbd": Reader(Warp(temperature=0.7, top_p=0.9), rows_NV.shape[1]).read,
        "ults": Children(5, [3]).read,
    }
    before, found = torch.get_num_threads(), list[dict[str, torch.Tensor]]()
    try:
        for threads in (1, 4):
            torch.set_num_threads(threads)
            found.append({name: torch.cat([of(x_1V) for x_1V in rows_NV.split(1)]) for name, of in sums.items()})
    finally:
        torch.set_num_threads(before)
    assert [name for name in sums if not found[0][name].equal(found[1][name])] == []
    assert found[0]["plain"].equal(sampling.by_row(torch.logsumexp, rows_NV / 0.7))
