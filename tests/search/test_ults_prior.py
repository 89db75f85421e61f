"""The beliefs of ULTS: Dirichlet draws, Beta fits, the recursion of Delta, files."""

import math

import numpy as np
import pytest
import torch

from engine import UsageError
from search import ULTS
from search.ults import delta
from search.ults.delta import POOL
from search.ults.delta import path_key as key
from search.ults.distributions import beta_draws, log_gamma
from search.ults.prior import Vectors, dirichlet


def fit(*args, **options):
    """The distributions, computed without a pause."""
    work = delta.fit(*args, **options)
    while True:
        try:
            next(work)
        except StopIteration as stop:
            return stop.value


def kolmogorov(a, b):
    """Distance of two samples, and the bound that it exceeds with probability 1e-4."""
    a, b = np.sort(np.asarray(a)), np.sort(np.asarray(b))
    x = np.concatenate([a, b])
    gap = np.abs(np.searchsorted(a, x, "right") / len(a) - np.searchsorted(b, x, "right") / len(b)).max()
    return gap, 2.23 * math.sqrt(1 / len(a) + 1 / len(b))


@pytest.mark.parametrize(("alpha", "branching"), [(0.1, 8), (0.8, 8), (3.0, 5), (0.01, 300), (0.05, 2)])
def test_dirichlet_draws(alpha, branching):
    """Largest and second largest entries as numpy draws them."""
    vectors = dirichlet(alpha, branching)
    draws = np.sort(np.random.RandomState(0).dirichlet([alpha] * branching, size=4096), axis=1)[:, ::-1]
    p = vectors.logp_RK.double().exp().numpy()
    for column in (0, 1):
        gap, bound = kolmogorov(p[:, column], draws[:, column])
        assert gap < bound
    assert np.all(np.diff(p, axis=1) <= 0) and np.all(p.sum(1) < 1 + 1e-5)
    if branching <= 8:
        assert p.sum(1) == pytest.approx(1.0, abs=1e-5)


@pytest.mark.parametrize(("alpha", "branching"), [(1e-4, 32000), (5e-6, 32000), (1e-9, 2), (0.1, 50000), (1e6, 3)])
def test_dirichlet_draws_do_not_underflow(alpha, branching):
    p = dirichlet(alpha, branching).logp_RK.double().exp()
    assert not p.isnan().any() and bool((p[:, 0] > 0).all()) and bool((p.sum(1) < 1 + 1e-5).all())
    if alpha * branching < 0.2:
        assert p[:, 0].mean() > 0.8


@pytest.mark.parametrize("shape", [0.02, 0.5, 1.0, 30.0])
def test_gamma_draws(shape):
    generator = torch.Generator().manual_seed(3)
    logs = log_gamma(torch.full((20000,), shape, dtype=torch.float64), generator)
    truth = np.log(np.maximum(np.random.RandomState(1).standard_gamma(shape, 20000), 1e-300))
    gap, bound = kolmogorov(np.maximum(logs.numpy(), math.log(1e-300)), truth)
    assert gap < bound


@pytest.mark.parametrize(("a", "b"), [(0.5, 0.7), (2.0, 5.0), (0.3, 40.0), (60.0, 3.0)])
def test_the_beta_of_greatest_likelihood_is_the_one_drawn_from(a, b):
    x = np.random.RandomState(2).beta(a, b, 20000)
    logs = beta_draws(torch.from_numpy(np.log(x)).float(), torch.Generator().manual_seed(5))
    gap, bound = kolmogorov(logs.exp().numpy(), x)
    assert gap < bound and bool((logs <= 0).all())


def one_vector(*p, tokens=None):
    """A collection in which every softmax vector is the same."""
    logp = torch.tensor([p]).log().sort(1, descending=True)
    return Vectors(logp.values, torch.tensor([tokens]) if tokens else logp.indices)


def level(rest, n):
    values = rest.log_LP[n].unique()
    assert len(values) == 1
    return float(values)


def test_delta_of_a_known_vector_is_known():
    rest = fit(one_vector(0.5, 0.3, 0.2), depth=6, children=3, samples=10)
    for n in range(1, 6):
        assert level(rest, n) == pytest.approx((6 - n) * math.log(0.5), abs=1e-5)


def test_delta_with_end_of_sequence():
    """Ending costs 0.4 once, going on 0.5 per level: it ends as soon as it can, but at the last level."""
    vectors = one_vector(0.5, 0.4, 0.1)
    rest = fit(vectors, depth=6, children=3, samples=10, eos=frozenset([1]))
    assert [level(rest, n) for n in range(1, 6)] == pytest.approx([math.log(0.4)] * 4 + [math.log(0.5)])
    excluded = fit(vectors, depth=6, children=3, samples=10, eos=frozenset([1]), fixed_length=True)
    assert [level(excluded, n) for n in range(1, 6)] == pytest.approx(
        [n * math.log(0.5 / 0.6) for n in (5, 4, 3, 2, 1)]
    )


def test_delta_by_length():
    """With the penalty it goes on: log 0.5 per token is better than log 0.4."""
    vectors = one_vector(0.5, 0.4, 0.1)
    rest = fit(vectors, depth=6, children=3, samples=10, eos=frozenset([1]), length_penalty=1.0)
    for n in range(1, 6):
        assert level(rest, n) == pytest.approx((6 - n) * math.log(0.5), abs=1e-5)
        assert rest.length_LP[n].unique().tolist() == [6 - n]


def test_delta_of_two_vectors_is_distributed_as_it_must():
    """Two levels above the leaves: products of independent draws of (0.9, 0.1) and (0.6, 0.4)."""
    vectors = Vectors(torch.tensor([[0.9, 0.1], [0.6, 0.4]]).log(), torch.zeros(2, 2, dtype=torch.int64))
    rest = fit(vectors, depth=3, children=2, samples=10, beta=False)
    last = rest.log_LP[2].exp()
    assert last.unique().tolist() == pytest.approx([0.6, 0.9])
    assert float((last > 0.8).float().mean()) == pytest.approx(0.5, abs=0.04)
    values, counts = rest.log_LP[1].exp().round(decimals=4).unique(return_counts=True)
    share = dict(zip(values.tolist(), (counts / counts.sum()).tolist(), strict=True))
    expected = {0.81: 0.25, 0.54: 0.5, 0.36: 0.25}  # by the first child's Delta; the second never does better
    assert sorted(share) == pytest.approx(sorted(expected), abs=1e-3)
    for value, p in expected.items():
        assert share[min(share, key=lambda v: abs(v - value))] == pytest.approx(p, abs=0.05)


def test_fewer_children_promise_less():
    vectors = dirichlet(0.5, 50)
    means = [float(fit(vectors, 8, children, 10).log_LP[1].mean()) for children in (1, 2, 5, 20)]
    assert means == sorted(means) and means[0] < means[-1] - 1


def test_beta_beliefs_stay_within_bounds():
    rest = fit(dirichlet(0.1, 8), 5, 8, 1000, beta=True)
    assert bool((rest.log_LP <= 0).all()) and not rest.log_LP.isnan().any()
    pools = fit(dirichlet(0.1, 8), 5, 8, 1000, beta=False)
    assert float(rest.log_LP[4].exp().mean()) == pytest.approx(float(pools.log_LP[4].exp().mean()), abs=0.03)


def test_samples_are_keyed():
    rest = fit(dirichlet(0.5, 8), 5, 8, 1000)

    def draws(nodes, tokens):
        places_C = rest.places(nodes, torch.tensor(tokens)).view(-1)
        return rest.draws(places_C, torch.empty(len(places_C), 1000))

    log_CN, lengths = draws([(1, key(5, 1)), (2, key(5, 1)), (1, key(5, 1)), (4, key(9, 9))], [[3], [3], [3], [7]])
    assert lengths is None and log_CN.shape == (4, 1000)
    assert log_CN[0].equal(log_CN[2]) and not log_CN[0].equal(log_CN[1])
    for n, row in zip([1, 2, 1, 4], log_CN, strict=True):
        assert bool(torch.isin(row, rest.log_LP[n]).all())
    many = draws([(1, key(1, n)) for n in range(1000)], [[0, 1]] * 1000)[0].double()
    alone, pairs = many.mean(1), torch.corrcoef(many[:100])
    assert (
        float((alone.mean() - rest.log_LP[1].double().mean()).abs()) < 4 * float(alone.std()) / math.sqrt(2000) + 0.01
    )
    assert float(pairs.fill_diagonal_(0).abs().mean()) < 0.05  # 0.8 / sqrt(1000) for independent ones


def test_keys_do_not_collide():
    keys = {key(key(seed, a), b) for seed in range(4) for a in range(100) for b in range(100)}
    assert len(keys) == 40000
    assert len({k % POOL for k in keys}) > 0.9 * POOL * (1 - math.exp(-40000 / POOL))


def test_the_last_level_alone():
    assert fit(one_vector(0.5, 0.5), depth=1, children=2, samples=5).log_LP.shape[0] == 1


def test_few_possible_tokens(tmp_path):
    """A vocabulary that is mostly excluded: the rest of a row is -inf."""
    logp = torch.full((4, 100), -math.inf)
    logp[:, :3] = torch.log_softmax(torch.randn(4, 3), -1)
    Vectors.of(logp).save(tmp_path / "prior")
    rest = fit(Vectors.load(tmp_path / "prior"), depth=5, children=20, samples=10)
    assert bool((rest.log_LP <= 0).all()) and bool(rest.log_LP.isfinite().all())


def test_any_token_may_be_the_largest_entry_of_a_dirichlet_draw():
    vectors = dirichlet(0.5, 10)
    assert all(len(set(row)) == 10 for row in vectors.tokens_RK.tolist())
    counts = torch.bincount(vectors.tokens_RK[:, 0], minlength=10).double()
    assert float(((counts - counts.mean()) ** 2 / counts.mean()).sum()) < 33.7  # chi-square, 9 degrees, 1e-4


@pytest.mark.parametrize(("mean", "deviation"), [(-1, 0.5), (-10, 2), (-40, 6), (-800, 20), (-30, 0), (-1e-9, 0)])
def test_beta_beliefs_of_deep_trees(mean, deviation):
    """Likelihoods far below the least float: the mean log and the log mean are those of the draws."""
    given = (torch.randn(4096, generator=torch.Generator().manual_seed(0)) * deviation + mean).clamp(max=0)
    drawn = beta_draws(given, torch.Generator().manual_seed(5))
    assert bool((drawn <= 0).all()) and bool((drawn[given.argsort()].diff() >= 0).all())
    spread = 4 * float(drawn.std()) / 64 + 1e-3
    assert float(drawn.mean()) == pytest.approx(float(given.mean()), abs=spread)
    assert float(drawn.logsumexp(0)) == pytest.approx(float(given.logsumexp(0)), abs=0.5)


def test_files(tmp_path):
    path = tmp_path / "deep" / "prior.safetensors"
    vectors = Vectors.of(torch.log_softmax(torch.randn(5, 100), -1))
    vectors.save(path)
    read = Vectors.load(path)
    assert read.logp_RK.equal(vectors.logp_RK) and read.tokens_RK.equal(vectors.tokens_RK)
    assert [p.name for p in path.parent.iterdir()] == ["prior.safetensors"]
    Vectors(vectors.logp_RK[:2], vectors.tokens_RK[:2]).save(path)
    assert len(Vectors.load(path).logp_RK) == 2  # not the one remembered


@pytest.mark.parametrize(
    "change",
    [
        lambda t: {"logp": t["logp"]},
        lambda t: {"logp": t["logp"].half(), "tokens": t["tokens"]},
        lambda t: {"logp": t["logp"], "tokens": t["tokens"].int()},
        lambda t: {"logp": t["logp"][0], "tokens": t["tokens"][0]},
        lambda t: {"logp": t["logp"] + 20, "tokens": t["tokens"]},
        lambda t: {"logp": t["logp"] * 0, "tokens": t["tokens"]},
        lambda t: {"logp": t["logp"] - math.inf, "tokens": t["tokens"]},
        lambda t: {"logp": t["logp"].flip(1).contiguous(), "tokens": t["tokens"]},
        lambda t: {"logp": t["logp"] * math.nan, "tokens": t["tokens"]},
        lambda t: {"logp": t["logp"][:0], "tokens": t["tokens"][:0]},
        lambda t: b"{}",
        lambda t: b"",
    ],
)
def test_files_that_hold_something_else(tmp_path, change):
    from safetensors.torch import save

    path = tmp_path / "prior"
    vectors = Vectors.of(torch.log_softmax(torch.randn(5, 100), -1))
    content = change({"logp": vectors.logp_RK, "tokens": vectors.tokens_RK})
    path.write_bytes(content if isinstance(content, bytes) else save(content))
    with pytest.raises(UsageError, match="the prior of ULTS: "):
        Vectors.load(path)


def test_a_damaged_file_is_refused(tmp_path):
    """A bit of any value: most of them leave descending log-probabilities, and tokens of some vocabulary."""
    Vectors.of(torch.log_softmax(torch.randn(2, 100), -1)).save(tmp_path / "prior")
    whole = (tmp_path / "prior").read_bytes()
    start = 8 + int.from_bytes(whole[:8], "little")
    for place in range(start, len(whole), 7):
        damaged = bytearray(whole)
        damaged[place] ^= 1
        (tmp_path / f"prior{place}").write_bytes(damaged)
        with pytest.raises(UsageError, match="the prior of ULTS: "):
            Vectors.load(tmp_path / f"prior{place}")


def test_a_file_of_others_has_no_checksum(tmp_path):
    from safetensors.torch import save

    vectors = Vectors.of(torch.log_softmax(torch.randn(5, 100), -1))
    whole = save({"logp": vectors.logp_RK, "tokens": vectors.tokens_RK})
    length = int.from_bytes(whole[:8], "little")
    header = b'{"__metadata__":null,' + whole[9 : 8 + length]
    (tmp_path / "plain").write_bytes(whole)
    (tmp_path / "null").write_bytes(len(header).to_bytes(8, "little") + header + whole[8 + length :])
    for name in ("plain", "null"):
        assert Vectors.load(tmp_path / name).logp_RK.equal(vectors.logp_RK)


def test_a_file_that_is_too_large(tmp_path):
    with (tmp_path / "model").open("wb") as file:
        file.truncate(1 << 40)  # of holes
    with pytest.raises(UsageError, match="too large"):
        Vectors.load(tmp_path / "model")


def test_nothing_is_left_of_a_file_that_could_not_be_written(tmp_path):
    (tmp_path / "prior" / "below").mkdir(parents=True)  # what is there cannot be replaced
    with pytest.raises(OSError, match="prior"):
        Vectors.of(torch.log_softmax(torch.randn(5, 100), -1)).save(tmp_path / "prior")
    assert [p.name for p in tmp_path.iterdir()] == ["prior"]


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(UsageError, match="No such file"):
        ULTS(prior=str(tmp_path / "absent")).check(10, frozenset())
    with pytest.raises(UsageError, match="No such file"):
        Vectors.load(tmp_path / "absent")
