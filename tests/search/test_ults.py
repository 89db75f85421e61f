"""ULTS over tables and on a tiny model: the reference table of toy trees, exhaustive optima, memory, interruptions."""

import itertools
import math
import random
import statistics
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from engine import Engine, Progress, UsageError
from engine.errors import KVMemoryError
from search import ULTS, Answer
from search.ults import Children
from search.ults import prior as ults_prior
from search.ults.boundary import RULES, Boundary
from tests.invariants import check_pool
from tests.search.drive import drive
from tools.random_checkpoint import make
from tools.toy_trees import ToyTree, checksum

ALPHAS = (0.1, 0.2, 0.5, 0.8)
SEEDS = range(200)

# The reference: 200 trees of branching 8 and depth 5 per alpha, (nodes, mean log-likelihood).
CHECKSUMS = dict(
    zip(ALPHAS, ("53fba92d8d528897", "2729ad72c59c893f", "49d720b72a3561e3", "a107d9df16b754b8"), strict=True)
)
OPTIMA = dict(zip(ALPHAS, (-1.6927, -2.6288, -4.0660, -4.8418), strict=True))
BEAMS = {
    0.1: (-1.8011, -1.7113, -1.7026, -1.6973, -1.6927, -1.6927, -1.6927),
    0.2: (-2.8515, -2.6779, -2.6422, -2.6320, -2.6297, -2.6297, -2.6297),
    0.5: (-4.4705, -4.2127, -4.1516, -4.1118, -4.0903, -4.0817, -4.0706),
    0.8: (-5.1942, -4.9628, -4.8963, -4.8702, -4.8597, -4.8548, -4.8481),
}
REFERENCE = {
    ("flat", 0.05): ((6.75, -1.6962), (8.85, -2.6342), (12.41, -4.0785), (14.16, -4.8599)),
    ("flat", 0.1): ((6.54, -1.6964), (8.35, -2.6378), (11.39, -4.0792), (12.66, -4.8640)),
    ("flat", 0.3): ((6.05, -1.7022), (7.37, -2.6495), (9.53, -4.1016), (10.14, -4.8917)),
    ("descendant", 0.1): ((6.37, -1.6982), (7.79, -2.6456), (9.53, -4.1025), (9.79, -4.8828)),
}


@pytest.fixture(scope="module", params=[0.2, *(pytest.param(a, marks=pytest.mark.full) for a in ALPHAS if a != 0.2)])
def trees(request):
    """All trees of an alpha."""
    return request.param, [ToyTree(seed, request.param) for seed in SEEDS]


def nodes_for(value, curve):
    """Nodes at which a piecewise linear curve of (nodes, value) reaches a value."""
    for (n0, v0), (n1, v1) in itertools.pairwise(curve):
        if v0 <= value <= v1:
            return n0 + (n1 - n0) * (value - v0) / (v1 - v0) if v1 > v0 else n0
    raise AssertionError(f"{value} is off the curve")


def test_toy_trees_and_beam_search_are_the_reference(trees):
    alpha, toys = trees
    assert checksum(toys) == CHECKSUMS[alpha]
    assert statistics.fmean(toy.optimum() for toy in toys) == pytest.approx(OPTIMA[alpha], abs=6e-5)
    for beams, value in enumerate(BEAMS[alpha], 1):
        found = [toy.beam_search(beams) for toy in toys]
        assert statistics.fmean(v for v, _ in found) == pytest.approx(value, abs=6e-5)
        assert {cost for _, cost in found} == {1 + 4 * beams}


def test_the_reference_table(trees):
    """Every cell within 4 standard errors, log-likelihoods as gaps to each tree's optimum; flat beats beam search."""
    alpha, toys = trees
    column, optima = ALPHAS.index(alpha), [toy.optimum() for toy in toys]
    curve = [(1 + 4 * k, v) for k, v in enumerate(BEAMS[alpha], 1)]
    found_optimum = {}
    for (select, epsilon), row in REFERENCE.items():
        search = ULTS(
            select=select, epsilon=epsilon, k_max=0, children=8, batch=1, prior="dirichlet", alpha=alpha, fit="beta"
        )
        results = [toy.search(search) for toy in toys]
        nodes = [r.stats["nodes_evaluated"] for r in results]
        gaps = [o - r.outputs[0].logprob for r, o in zip(results, optima, strict=True)]
        assert min(gaps) > -1e-5
        error = 4 / math.sqrt(len(toys))
        reference_nodes, reference_value = row[column]
        mean = statistics.fmean(nodes)
        assert abs(mean - reference_nodes) < error * statistics.stdev(nodes), (select, epsilon)
        gap = statistics.fmean(gaps)
        assert abs(gap - (OPTIMA[alpha] - reference_value)) < error * statistics.stdev(gaps), (select, epsilon)
        value = OPTIMA[alpha] - gap
        if select == "flat":
            assert mean < nodes_for(value, curve), f"epsilon {epsilon} lies below beam search"
            found_optimum[epsilon] = statistics.fmean(g < 1e-5 for g in gaps)
        if (select, epsilon) == ("flat", 0.1):  # 37, 57, 44 and 65 percent in the reference
            assert mean < 0.75 * nodes_for(value, curve)
    assert found_optimum[0.05] >= found_optimum[0.1] >= found_optimum[0.3]


@pytest.mark.parametrize("alpha", ALPHAS)
def test_the_optimum_is_found_as_epsilon_vanishes(alpha):
    search = ULTS(epsilon=0, k_max=0, children=8, samples=8000, prior="dirichlet", alpha=alpha)
    for seed in range(25):
        toy = ToyTree(seed, alpha)
        assert toy.search(search).outputs[0].logprob == pytest.approx(toy.optimum(), abs=1e-5)


# --- a table with end-of-sequence, and everything that a search asks for ---

VOCAB, DEPTH, EOS = 6, 4, (0, 4)


def row(path, seed=0):
    rng = random.Random(repr((seed, tuple(path))))
    return torch.log_softmax(torch.tensor([rng.gauss(0, 1.5) for _ in range(VOCAB)]), -1)


def follow(search, *, seed=0, slots=4096, eos=EOS, depth=DEPTH, row=row, **options):
    """Drive a search over the table, checking what it does; (result, [paths asked for], what it reported)."""
    run = drive(search, lambda path: row(path, seed), depth, eos, pages=slots, **options)
    best = -math.inf
    told = [one for one in run.told if "nodes" in one.report.info]
    for one in told:
        info, beams = one.report.info, one.beams
        assert info["best"] is None or info["best"] >= best
        best = -math.inf if info["best"] is None else info["best"]
        if info["best"] is not None:
            assert beams[0] == (best, one.best)
    assert [one.report.info["nodes"] for one in told] == [*itertools.accumulate(map(len, run.paths))][-len(told) :]
    flat = [path for paths in run.paths for path in paths]
    assert all(len(path) < depth and (not path or path[-1] not in eos) for path in flat)  # never a leaf
    assert run.settled == run.outputs[0]
    assert len(set(flat)) == run.evaluated == run.result.stats["nodes_evaluated"]
    assert len(run.paths) == run.result.stats["rounds"]
    assert len(run.paths[0]) == 1 and max(map(len, run.paths)) <= search.batch
    if search.k_max:
        assert all(sum(len(path) == level for path in flat) <= search.k_max for level in range(depth))
    return run.result, run.paths, [one.report.info for one in told]


def renormalised(path, seed, eos):
    raw = row(path, seed).index_fill(0, torch.tensor(eos), -math.inf)
    return raw - raw.logsumexp(0)


def all_leaves(seed, eos, depth=DEPTH, fixed=False):
    """(log-likelihood, path) of every leaf."""
    found, paths = [], [((), 0.0)]
    while paths:
        path, s = paths.pop()
        for token, logp in enumerate((renormalised(path, seed, eos) if fixed else row(path, seed)).tolist()):
            child = (*path, token)
            if fixed and token in eos:
                continue
            if token in eos or len(child) == depth:
                found.append((s + logp, child))
            else:
                paths.append((child, s + logp))
    return found


EXACT = dict(epsilon=0, k_max=0, children=VOCAB, samples=4000, prior="dirichlet", alpha=0.1)


@pytest.mark.parametrize("batch", [1, 3, 8])
@pytest.mark.parametrize("select", ["flat", "posterior"])
@pytest.mark.parametrize("penalty", [0.0, 1.0, -0.5])
def test_end_of_sequence_is_a_leaf(select, batch, penalty):
    for seed in range(8):
        result, *_ = follow(ULTS(select=select, batch=batch, length_penalty=penalty, **EXACT), seed=seed)
        best, path = max((s / len(path) ** penalty, path) for s, path in all_leaves(seed, EOS))
        output = result.outputs[0]
        assert output.score == pytest.approx(best, abs=1e-5) and tuple(output.token_ids) == path
        assert output.logprob == pytest.approx(best * len(path) ** penalty, abs=1e-5)
        assert output.finish_reason == ("eos" if path[-1] in EOS else "length")


@pytest.mark.parametrize("select", RULES)
def test_fixed_length_renormalises_without_end_of_sequence(select):
    for seed in range(8):
        result, *_ = follow(ULTS(select=select, fixed_length=True, batch=2, **EXACT), seed=seed)
        output = result.outputs[0]
        leaves = {path: s for s, path in all_leaves(seed, EOS, fixed=True)}
        assert len(output.token_ids) == DEPTH and output.finish_reason == "length"
        assert output.score == pytest.approx(leaves[tuple(output.token_ids)], abs=1e-5)
        told = sum(float(row(output.token_ids[:i], seed)[t]) for i, t in enumerate(output.token_ids))
        assert output.logprob == pytest.approx(told, abs=1e-5)  # of the model as it is
        if select != "descendant":
            assert output.score == pytest.approx(max(leaves.values()), abs=1e-5)


def test_several_outputs_are_the_best_ones():
    for seed in range(8):
        result, *_ = follow(ULTS(num_return_sequences=4, batch=2, **EXACT), seed=seed)
        best = sorted(all_leaves(seed, EOS), reverse=True)[:4]
        assert [tuple(o.token_ids) for o in result.outputs] == [path for _, path in best]
        assert [o.score for o in result.outputs] == pytest.approx([s for s, _ in best], abs=1e-5)


def test_stop_strings_end_a_path():
    def stops(path):
        return list(path[-2:]) == [2, 1]

    for seed in range(8):
        result, asked, _ = follow(ULTS(**EXACT), seed=seed, stops=stops)
        assert not any(stops(path) for paths in asked for path in paths)
        cut = {}
        for _, path in all_leaves(seed, EOS):
            end = next((i for i in range(2, len(path) + 1) if stops(path[:i])), len(path))
            cut[path[:end]] = sum(float(row(path[:i], seed)[t]) for i, t in enumerate(path[:end]))
        assert tuple(result.outputs[0].token_ids) == max(cut, key=cut.__getitem__)
        assert (result.outputs[0].finish_reason == "stop") == stops(result.outputs[0].token_ids)


@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize("select", RULES)
@pytest.mark.parametrize("k_max", [1, 2, 5])
def test_level_limits_and_repeatability(select, k_max, batch):
    """The limits themselves are checked by `follow`."""
    search = ULTS(select=select, k_max=k_max, batch=batch, children=4, samples=50, prior="dirichlet", alpha=0.2)
    orders = []
    for seed in range(6):
        first, asked, _ = follow(search, seed=seed, depth=7, eos=())
        again, asked_again, _ = follow(search, seed=seed, depth=7, eos=())
        assert (first.outputs, asked) == (again.outputs, asked_again)
        orders.append((asked, follow(replace(search, seed=1), seed=seed, depth=7, eos=())[1]))
    assert k_max == 1 or any(a != b for a, b in orders)


def test_one_node_per_level_is_greedy_in_the_end():
    """With one child per node nothing is left to choose."""
    result, asked, _ = follow(ULTS(children=1, k_max=1, prior="dirichlet"), eos=())
    path = []
    for _ in range(DEPTH):
        path.append(int(row(path).argmax()))
    assert result.outputs[0].token_ids == path and len(asked) == DEPTH


def test_samples_do_not_depend_on_the_order_of_evaluation(monkeypatch):
    """Beliefs about a node's children are the same whatever was evaluated before it."""
    seen = {}
    add = Boundary.add

    def note(self, families):
        for family in families:
            path, above = [], family
            while above.parent is not None:
                path.append(above.parent.tokens[above.place])
                above = above.parent
            seen.setdefault(tuple(path[::-1][1:]), []).append(self.samples.of([family])[0].clone())
        add(self, families)

    monkeypatch.setattr(Boundary, "add", note)
    for batch, epsilon in ((1, 0.0), (4, 0.0), (1, 0.5)):
        for select in RULES:
            follow(ULTS(select=select, batch=batch, **EXACT | {"epsilon": epsilon}), depth=5, eos=())
    shared = [values for values in seen.values() if len(values) > 3]
    assert len(shared) > 10
    assert all(value.equal(values[0]) for values in shared for value in values)


def test_children_tie_to_the_lower_token():
    def tied(path, seed):
        return torch.log_softmax(torch.tensor([0.0, 1.0, 1.0, 1.0, 0.0, 1.0]), -1)

    _, asked, _ = follow(ULTS(children=2, prior="dirichlet", k_max=0, epsilon=0), row=tied, eos=())
    assert {token for paths in asked for path in paths for token in path} == {1, 2}


@pytest.mark.parametrize("vocab", [32000, 25600, 25601, 300])
def test_the_most_probable_children_of_long_rows(vocab):
    logp_NV = torch.log_softmax(torch.randn(3, vocab, generator=torch.Generator().manual_seed(vocab)), -1)
    logp_NV[1, 100:120] = logp_NV[1].max()  # equals, the last of them in
    logp_NV[2, 5:] = -math.inf
    children = Children(10, ())
    found = children.of(Answer(logp_NV, children.read(logp_NV)))
    for row_V, (logps, tokens, _) in zip(logp_NV, found, strict=True):
        ranked = sorted((-logp, token) for token, logp in enumerate(row_V.tolist()) if logp > -math.inf)[:10]
        assert [(-logp, token) for logp, token in zip(logps, tokens, strict=True)] == ranked
    children = Children(10, (2, 110))
    kept_NV = logp_NV.index_fill(1, torch.tensor([2, 110]), -math.inf)
    mass_N1 = kept_NV.logsumexp(1, keepdim=True)
    found = children.of(Answer(logp_NV, children.read(logp_NV)))
    for row_V, mass_1, (logps, tokens, mass) in zip(kept_NV - mass_N1, mass_N1, found, strict=True):
        ranked = sorted((-logp, token) for token, logp in enumerate(row_V.tolist()) if logp > -math.inf)[:10]
        assert [(-logp, token) for logp, token in zip(logps, tokens, strict=True)] == ranked
        assert mass == float(mass_1)


def test_impossible_tokens_are_no_children():
    def sparse(path, seed):
        return torch.log_softmax(torch.tensor([-math.inf, 1.0, -math.inf, 0.0, -math.inf, -math.inf]), -1)

    result, asked, _ = follow(ULTS(prior="dirichlet", k_max=0, epsilon=0), row=sparse)
    assert {token for paths in asked for path in paths for token in path} <= {1, 3}
    assert result.outputs[0].token_ids == [1] * DEPTH


def test_the_bound_shrinks_and_ends_below_the_best():
    _, _, told = follow(ULTS(batch=1, **EXACT), eos=())
    bounds = [(info["bound"], info["better_exists"]) for info in told]
    assert all(a >= b for (a, _), (b, _) in itertools.pairwise(bounds)) and len(bounds) > 4
    assert bounds[0][1] == 1.0 and bounds[-1][1] == 0.0


def test_a_budget_is_kept():
    for budget in (1, 2, 5, 9):
        result, asked, _ = follow(ULTS(budget=budget, batch=4, **EXACT), depth=6, eos=())
        assert result.stats["nodes_evaluated"] == sum(map(len, asked)) == budget
        if budget < 6:  # no leaf can be reached: the most promising path
            output = result.outputs[0]
            assert (output.finish_reason, output.logprob, output.score) == ("interrupted", None, None)
            assert 1 <= len(output.token_ids) <= budget


# --- memory ---


@pytest.mark.parametrize("select", RULES)
@pytest.mark.parametrize("batch", [1, 4])
def test_a_full_pool_costs_subtrees_not_the_search(select, batch):
    search = ULTS(select=select, batch=batch, k_max=0, children=4, epsilon=0.0, prior="dirichlet", alpha=0.5)
    least, _ = search.slots(3, 7)
    for slots in (least, least + 1, least + 5, least + 20):
        result, *_ = follow(search, slots=slots, depth=7, eos=())
        output = result.outputs[0]
        assert output.finish_reason == "length" and len(output.token_ids) == 7
        told = sum(float(row(output.token_ids[:i])[t]) for i, t in enumerate(output.token_ids))
        assert output.logprob == pytest.approx(told, abs=1e-4)
        if slots < least + 5:
            assert result.stats["dropped_subtrees"] > 0
    roomy, *_ = follow(search, depth=7, eos=())
    assert roomy.stats["dropped_subtrees"] == 0


def test_too_little_memory_for_any_path_is_an_error():
    with pytest.raises(KVMemoryError):
        follow(ULTS(prior="dirichlet"), slots=5, depth=7, eos=())


# --- configurations ---


@pytest.mark.parametrize(
    ("name", "values"),
    {
        "select": ["best", None, 1, ["flat"]],
        "k_max": [-1, 1.5, True, "3"],
        "children": [0, 5000, True],
        "epsilon": [-0.1, 1.1, math.nan, "0.1", True, None],
        "samples": [0, 1 << 20, 10.0],
        "budget": [-1, None],
        "batch": [0, 5000],
        "prior": ["", None, 3],
        "alpha": [0, -1, math.inf, math.nan],
        "fit": ["gauss", None],
        "fixed_length": ["yes", 1, None],
        "length_penalty": [math.nan, 30, "1"],
        "num_return_sequences": [0, True],
        "seed": [-1, 2**64, 0.5],
    }.items(),
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_configurations_are_checked(name, values):
    for value in values:
        with pytest.raises(UsageError, match=f"{name}: expected"):
            ULTS(**{name: value})


def test_something_must_be_left_of_the_vocabulary():
    with pytest.raises(UsageError, match="every token"):
        ULTS(fixed_length=True).check(2, frozenset([0, 1]))


# --- on a model ---


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("llama")
    make(folder, layers=2, width=32, mlp=48, heads=4, kv_heads=2, vocab=260, max_positions=200, seed=1, scale=0.9)
    return folder


@pytest.fixture(scope="module")
def engine(folder):
    return Engine.load(folder, kv_memory=1 << 22)


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


PROMPT = [1, 30, 40, 50, 60]


def teacher_forced(engine, prompt, tokens, excluded=()):
    logits = engine.logits([*prompt, *tokens])[len(prompt) - 1 : -1, : engine.runner.vocab_size]
    if excluded:
        logits[:, sorted(excluded)] = -math.inf
    return float(torch.log_softmax(logits, -1)[torch.arange(len(tokens)), torch.tensor(tokens)].sum())


@pytest.mark.parametrize("select", RULES)
@pytest.mark.parametrize("options", [{}, {"fixed_length": True, "batch": 2}, {"length_penalty": 1.0}], ids=str)
def test_log_likelihood_is_the_teacher_forced_one(engine, select, options):
    search = ULTS(select=select, k_max=4, prior="dirichlet", num_return_sequences=3, **options)
    prompts = [PROMPT, [1, 9, 200, 12]]
    results = engine.generate(prompts, search, max_new_tokens=12)
    for prompt, result in zip(prompts, results, strict=True):
        assert len(result.outputs) == 3
        for output in result.outputs:
            assert output.logprob == pytest.approx(teacher_forced(engine, prompt, output.token_ids), abs=1e-4)
            length = len(output.token_ids)
            if search.fixed_length:
                raised = teacher_forced(engine, prompt, output.token_ids, engine.eos_token_ids)
                assert length == 12 and output.score == pytest.approx(raised, abs=1e-4)
            else:
                assert output.score == pytest.approx(output.logprob / length**search.length_penalty)
        assert result.stats["forward_passes"] == result.stats["rounds"]
    alone = engine.generate(prompts[1:2], search, max_new_tokens=12)[0]
    assert [o.token_ids for o in alone.outputs] == [o.token_ids for o in results[1].outputs]  # a batch is its lines
    check_pool(engine.pool, [])


@pytest.mark.parametrize("penalty", [12, 20.0, -20.0])
def test_penalties_of_outputs_of_one_length_change_nothing(engine, penalty):
    options = {"prior": "dirichlet", "k_max": 2, "fixed_length": True}
    plain, other = (
        engine.generate([PROMPT], ULTS(length_penalty=p, **options), max_new_tokens=90)[0] for p in (0.0, penalty)
    )
    assert other.outputs[0].token_ids == plain.outputs[0].token_ids
    assert other.stats["nodes_evaluated"] == plain.stats["nodes_evaluated"]


def test_one_token_needs_no_vector_of_the_prompt(engine):
    [eos] = sorted(engine.eos_token_ids)[:1]
    search = ULTS(prior="dirichlet", fixed_length=True)
    for new in (1, 2):
        [result] = engine.generate([PROMPT], search, max_new_tokens=new, choices=[[eos]])
        assert (result.outputs[0].token_ids, result.outputs[0].finish_reason) == ([], "constraint")


def test_interrupted_the_best_is_kept(engine):
    options = {"prior": "dirichlet", "alpha": 0.5, "fit": "pools"}
    search = ULTS(k_max=0, batch=1, num_return_sequences=100, **options)  # from several families

    def bests(rounds):
        reports = []
        stop = {"interrupted": lambda: len(reports) >= rounds, "max_new_tokens": 6}
        for event in engine.stream(PROMPT, search, **stop):
            if isinstance(event, Progress):
                reports.append((list(event.report.best()), event.report.info["best"]))
        return reports, event.result.outputs

    rounds = len(bests(math.inf)[0])
    for after in (1, 4, rounds - 1):
        reports, [output] = bests(after)
        assert len(reports) == after and output.finish_reason == "interrupted"
        assert output.token_ids == reports[-1][0]
        check_pool(engine.pool, [])
        assert engine.pool.used_pages == 0
    assert reports[-1][1] is not None and len(reports[-1][0]) == 6  # a leaf by then


def test_abandoned_the_pool_is_whole(engine):
    stream = engine.stream(PROMPT, ULTS(prior="dirichlet"), max_new_tokens=9)
    next(event for event in stream if isinstance(event, Progress) and event.report.info.get("nodes", 0) > 10)
    stream.close()
    check_pool(engine.pool, [])
    assert engine.pool.used_pages == 0


def test_a_small_pool_on_a_model(folder, engine):
    search = ULTS(k_max=0, children=10, epsilon=0.0, prior="dirichlet", budget=200)
    little = Engine.load(folder, kv_memory=30 * engine.pool.bytes_per_token)
    [result] = little.generate([PROMPT], search, max_new_tokens=9)
    assert result.stats["dropped_subtrees"] > 0 and result.stats["live_nodes_peak"] <= 30
    output = result.outputs[0]
    assert output.logprob == pytest.approx(teacher_forced(engine, PROMPT, output.token_ids), abs=1e-4)
    assert little.pool.used_pages == 0


def test_a_prior_is_gathered_once_and_kept(engine, tmp_path):
    search = ULTS(k_max=3, children=7)
    notes, results = [], []
    for _ in range(2):
        for event in engine.stream(PROMPT, search, max_new_tokens=8):
            if isinstance(event, Progress) and "note" in event.report.info:
                notes.append(event.report.info["note"])
        results.append(event.result)
    [kept] = (tmp_path / "coppice" / "ults").iterdir()
    assert kept.name.startswith(engine.model_key) and "depth8" in kept.name and "branching7" in kept.name
    assert notes and all(str(kept) in note for note in notes)
    assert [r.stats["prior"] for r in results] == ["gathered", "cached"]
    assert results[0].outputs == results[1].outputs  # the first run's answer is every later one's
    assert results[0].stats["nodes_evaluated"] == results[1].stats["nodes_evaluated"]
    assert results[0].stats["forward_passes"] == results[1].stats["forward_passes"] + 8
    engine.generate([PROMPT], search, max_new_tokens=9)
    assert len(list(kept.parent.iterdir())) == 2
    assert engine.pool.used_pages == 0


def test_of_many_searches_one_gathers(engine):
    prompts = [[1, n] for n in range(5, 11)]
    results = engine.generate(prompts, ULTS(k_max=3), max_new_tokens=6)
    assert sorted(r.stats["prior"] for r in results) == ["cached"] * 5 + ["gathered"]
    for prompt, result in zip(prompts[:2], results, strict=False):
        [alone] = engine.generate([prompt], ULTS(k_max=3), max_new_tokens=6)
        assert alone.outputs == result.outputs
    check_pool(engine.pool, [])


def test_two_streams_at_once_do_not_wait_for_each_other(engine):
    """One of them may never be asked for more."""
    first = engine.stream(PROMPT, ULTS(k_max=3), max_new_tokens=8)
    assert any(isinstance(e, Progress) and "note" in e.report.info for e in itertools.islice(first, 20))
    second = list(engine.stream(PROMPT, ULTS(k_max=3), max_new_tokens=8))[-1].result
    assert second.stats["prior"] == "gathered"
    assert list(first)[-1].result.outputs == second.outputs
    assert engine.pool.used_pages == 0


def test_no_room_for_a_prior_is_no_error(engine, tmp_path, monkeypatch):
    """The model's row for the prompt must do."""

    def full(*_):
        raise KVMemoryError("full")
        yield

    monkeypatch.setattr(ults_prior, "gather", full)
    [result] = engine.generate([PROMPT], ULTS(k_max=3), max_new_tokens=8)
    assert result.stats["prior"] == "the prompt" and len(result.outputs[0].token_ids) == 8
    assert engine.pool.used_pages == 0 and not list(tmp_path.rglob("*.safetensors"))


def test_epsilon_of_one_still_finds_a_leaf():
    result, *_ = follow(ULTS(prior="dirichlet", epsilon=1.0), eos=())
    assert result.outputs[0].finish_reason == "length" and result.outputs[0].logprob is not None


def test_only_end_of_sequence_is_possible():
    def ends(path, seed):
        return torch.tensor([0.0] + [-math.inf] * 5) if path else row(path, seed)

    result, asked, _ = follow(ULTS(prior="dirichlet", fixed_length=True, k_max=0), row=ends)
    assert asked and result.outputs[0].finish_reason == "constraint" and len(result.outputs[0].token_ids) == 1


def test_without_a_cache_folder_it_works_all_the_same(engine, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    first, second = (engine.generate([PROMPT], ULTS(k_max=3), max_new_tokens=5)[0] for _ in range(2))
    assert first.stats["prior"] == second.stats["prior"] == "gathered" and first.outputs == second.outputs


def test_a_user_without_a_home_keeps_the_prior_in_memory(engine, monkeypatch):
    def home():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", home)
    first, second = (engine.generate([PROMPT], ULTS(k_max=3), max_new_tokens=6)[0] for _ in range(2))
    assert (first.stats["prior"], second.stats["prior"]) == ("gathered", "cached") and first.outputs == second.outputs


def test_the_first_of_two_tokens_needs_no_prior(engine):
    [result] = engine.generate([PROMPT], ULTS(), max_new_tokens=1)
    logp = torch.log_softmax(engine.logits(PROMPT)[-1, : engine.runner.vocab_size], -1)
    assert result.outputs[0].token_ids == [int(logp.argmax())] and result.stats["nodes_evaluated"] == 1
