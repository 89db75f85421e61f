"""Drafting and acceptance of DSBD on plain distributions: what comes out is i.i.d. from p, whatever q is.

Chi-square tests with fixed seeds: they pass or fail for ever, and a correct implementation under a fresh seed fails
with a probability of 1e-4. The same tests are run on mutants, which must fail.
"""

import inspect
import itertools
import math
import random
import textwrap
from collections import Counter
from functools import cache

import pytest
import torch

import search.dsbd
from engine.contract.sampling import Warp
from search.dsbd import DSBD, GO_ON, ForestLevel
from search.dsbd.beams import Beam
from search.dsbd.joint import Joint, Reader, pick
from search.dsbd.verify import (
    IID,
    KINDS,
    WITHOUT,
    Drafted,
    ResidualDistribution,
    acceptances,
    accepted_counts,
    draw,
    dynamic_width,
    verify_layer,
)
from tests.draws import draws

ALL_RUNS = 100_000
RUNS = draws(ALL_RUNS)


def numbers(seed):
    """Endless numbers in [0, 1): the tests' own, as fast as can be; keyed ones are tested with whole searches."""
    return iter(random.Random(seed).random, None)


def distribution(n, seed, spread=1.5):
    rng = random.Random(seed)
    weights = [math.exp(spread * rng.gauss(0, 1)) for _ in range(n)]
    return [w / sum(weights) for w in weights]


def p_value(groups):
    """The p-value of counts against probabilities, over all groups; cells that expect fewer than five are merged.

    Args:
        groups: (counts, probabilities) pairs; what has no probability must have no count.
    """
    value, freedom = 0.0, 0
    for counts, probabilities in groups:
        total = sum(counts.values())
        if any(probabilities.get(cell, 0) <= 0 for cell in counts):
            return 0.0
        large = {cell: p * total for cell, p in probabilities.items() if p * total >= 5}
        pairs = [(counts[cell], expected) for cell, expected in large.items()]
        pairs.append((total - sum(n for n, _ in pairs), total - sum(e for _, e in pairs)))
        if pairs[-1][1] < 5:  # what is left is too little for a cell of its own
            (n, e), pairs = pairs[-1], pairs[:-1]
            if pairs:
                pairs[-1] = (pairs[-1][0] + n, pairs[-1][1] + e)
        value += sum((n - e) ** 2 / e for n, e in pairs)
        freedom += max(0, len(pairs) - 1)
    if not freedom:
        return 1.0
    z = ((value / freedom) ** (1 / 3) - (1 - 2 / (9 * freedom))) / math.sqrt(2 / (9 * freedom))  # Wilson-Hilferty
    return math.erfc(z / math.sqrt(2)) / 2


def lists(p, width):
    """Probabilities of lists of i.i.d. draws."""
    return {cells: math.prod(p[x] for x in cells) for cells in itertools.product(range(len(p)), repeat=width)}


def mutant(function, old, new, **names):
    """A function with a piece of its source replaced, or with other functions under the names it calls."""
    source = textwrap.dedent(inspect.getsource(function))
    assert source.count(old) == 1, old
    scope = dict(function.__globals__) | names
    exec("from __future__ import annotations\n" + source.replace(old, new), scope)
    return scope[function.__name__]


# --- one layer ---


def outcomes(p, q, m, width, kind, runs=RUNS, verify=verify_layer, seed=1, drawn_as=None):
    """Counts of the entries of a layer, and accepted drafts per run."""
    rng, counts, accepted = numbers(seed), Counter(), 0
    drafts = [Drafted(j if p[j] > 0 else None, q[j]) for j in range(len(q))]
    for _ in range(runs):
        drawn = [drafts[j] for j in draw(q, m, drawn_as or kind, rng)]
        verdict = verify(p, q, drawn, 1.0, width, rng, kind)
        counts[tuple(verdict.entries)] += 1
        accepted += verdict.accepted
    return counts, accepted / runs


PAIRS = [(distribution(6, 1), distribution(6, 2)), (distribution(6, 7), distribution(6, 8, 0.7))]


@pytest.mark.parametrize("pair", range(2))
@pytest.mark.parametrize("kind", KINDS)
def test_entries_are_independent_draws_from_p(kind, pair):
    p, q = PAIRS[pair]
    counts, _ = outcomes(p, q, 4, 2, kind)
    assert p_value([(counts, lists(p, 2))]) > 1e-4


@pytest.mark.parametrize("kind", [IID, WITHOUT])
def test_more_entries_wanted_than_drafts(kind):
    p, q = distribution(4, 3), distribution(4, 4)
    counts, _ = outcomes(p, q, 2, 3, kind)
    assert p_value([(counts, lists(p, 3))]) > 1e-4


def test_drafts_that_run_out():
    """q has fewer cells than drafts are wanted, one of them nearly all: every one is drawn, the residual is used up."""
    p, q = [0.5, 0.3, 0.1, 0.1], [0.0, 0.97, 0.03, 0.0]
    counts, _ = outcomes(p, q, 4, 2, WITHOUT)
    assert p_value([(counts, lists(p, 2))]) > 1e-4


@pytest.mark.parametrize("kind", KINDS)
def test_disjoint_distributions(kind):
    p, q = [0.6, 0.4, 0.0, 0.0], [0.0, 0.0, 0.5, 0.5]
    counts, accepted = outcomes(p, q, 2, 2, kind)
    assert accepted == 0 and p_value([(counts, lists(p, 2))]) > 1e-4


def test_equal_distributions_are_accepted_whole():
    p, _ = PAIRS[0]
    for kind, width in ((IID, 2), (WITHOUT, 1)):
        counts, accepted = outcomes(p, p, 4, width, kind)
        assert accepted == width and p_value([(counts, lists(p, width))]) > 1e-4
    counts, accepted = outcomes(p, p, 4, 2, WITHOUT)  # no draft comes twice, though p draws some twice
    assert 1 < accepted < 2 and p_value([(counts, lists(p, 2))]) > 1e-4


@pytest.mark.parametrize("spared", [(), (1,), (1, 4)])
def test_what_is_left(spared):
    """p' against its definition, rejection by rejection."""
    for as_they_are in (list, lambda x: torch.tensor(x, dtype=torch.float64)):
        p, q = PAIRS[1]
        residual, expected = ResidualDistribution(as_they_are(p), as_they_are(q)), p
        residual.reject(1.0)
        residual.reset(spared)
        for mass in (0.9, 0.7, 0.65):
            takes = [0.0 if i in spared else b / mass for i, b in enumerate(q)]
            over = [max(0.0, a - b) for a, b in zip(expected, takes, strict=True)]
            assert residual.reject(mass) == pytest.approx(sum(over))
            expected = [x / sum(over) for x in over]
            assert [float(x) / residual.total for x in residual.probabilities()] == pytest.approx(expected)
            others = [x for x in range(6) if x not in spared]
            assert [residual.at(x) / residual.total for x in others] == pytest.approx([expected[x] for x in others])


def test_nothing_is_left_of_equal_distributions():
    p, _ = PAIRS[0]
    residual = ResidualDistribution(p, p)
    assert residual.reject(sum(p)) < 1e-15
    assert [x / residual.total for x in residual.probabilities()] == pytest.approx(p)


RATIO, TURNED = "_ * q_x * residual.total < residual.at(x) * left", "_ * residual.at(x) * left < q_x * residual.total"
MUTANTS = [  # name, how drafts are drawn, how they are verified, what is replaced by what, runs
    ("upside down", IID, IID, RATIO, TURNED, 20_000),
    ("plain q without replacement", WITHOUT, IID, "", "", 50_000),
    ("residual of plain q", WITHOUT, WITHOUT, "residual.reset(spent)", "residual.reset(())", 50_000),
    ("ratio of plain q", WITHOUT, WITHOUT, "_ * q_x * residual.total <", "_ * q_x * residual.total * left <", 50_000),
    ("p' not reset", IID, IID, "            residual.reset(spent)\n", "", ALL_RUNS),
    ("residual forgotten", IID, IID, "residual.reject(left)", "pass", 20_000),
    ("completed from p alone", IID, IID, "pick(residual.probabilities(), ", "pick(p, ", 20_000),
]


@pytest.mark.full
@pytest.mark.parametrize("name, drawn_as, kind, old, new, runs", MUTANTS, ids=[m[0] for m in MUTANTS])
def test_the_test_notices(name, drawn_as, kind, old, new, runs):
    old, new = (text.replace("_ *", "next(numbers) *") for text in (old, new))
    verify = mutant(verify_layer, old, new) if old else verify_layer
    p, q = PAIRS[0]
    counts, accepted = outcomes(p, q, 4, 2, kind, runs, verify, drawn_as=drawn_as)
    assert p_value([(counts, lists(p, 2))]) < 1e-6
    if name == "upside down":
        assert accepted > 1.9  # it looks fast


# --- equations (2) to (7) ---


def literal_counts(alphas):
    """Equations (2) and (3) as printed, with what is missing: P(m, 0)."""

    @cache
    def P(m, k):
        if k == 0:
            return math.prod(1 - a for a in alphas[:m])
        return sum(alphas[i - 1] * math.prod(1 - a for a in alphas[: i - 1]) * P(m - i, k - 1) for i in range(1, m + 1))

    return [P(len(alphas), k) for k in range(len(alphas) + 1)]


@pytest.mark.parametrize("m", range(7))
def test_accepted_counts(m):
    alphas = [random.Random(m).random() for _ in range(m)]
    counts = list(accepted_counts(alphas))
    assert counts == pytest.approx(literal_counts(tuple(alphas))) and sum(counts) == pytest.approx(1)
    for t in (0.0, 0.3, 0.7, 0.9, 1.0):
        reached = [k for k in range(m + 1) if 1 - sum(counts[:k]) >= t - 1e-9]
        assert dynamic_width(counts, t) == max(reached)


def test_acceptances_are_the_literal_equation():
    p, q = PAIRS[0]
    rest, expected = p, []
    for _ in range(4):
        expected.append(sum(min(a, b) for a, b in zip(rest, q, strict=True)))
        over = [max(0, a - b) for a, b in zip(rest, q, strict=True)]
        rest = [x / sum(over) for x in over]
    assert acceptances(p, q, 4, 1.0) == pytest.approx(expected)
    assert acceptances(p, p, 3, 1.0) == pytest.approx([1, 1, 1])
    tensors = acceptances(torch.tensor(p).double(), torch.tensor(q).double(), 4, 1.0)
    assert tensors == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("pair", range(2))
def test_simulated_counts_match_the_equations(pair):
    """Simulated with four i.i.d. drafts, none left over because enough were accepted."""
    p, q = PAIRS[pair]
    rng, counts = numbers(5), Counter()
    for _ in range(RUNS):
        drafts = [Drafted(j, q[j]) for j in draw(q, 4, IID, rng)]
        counts[verify_layer(p, q, drafts, 1.0, 4, rng, IID).accepted] += 1
    assert p_value([(counts, dict(enumerate(accepted_counts(acceptances(p, q, 4, 1.0)))))]) > 1e-4


# --- layers whose parents are partly gone; two layers ---


def table(seed, vocab=3):
    """A toy model: the log-probabilities after a path."""

    @cache
    def row(path):
        return torch.tensor(distribution(vocab, f"{seed} {path}", 1.2), dtype=torch.float64).log().float()

    return row


class Memo(Joint):
    """A distribution that answers each question once."""

    def __init__(self, joint):
        super().__init__(joint.vocab, joint.probs, joint.logps, joint.cells, joint.nodes)
        self._of, self._at = cache(super().of_nodes), {}

    def of_nodes(self, nodes):
        return self._of(tuple(nodes))

    def at(self, other):
        if id(other) not in self._at:
            self._at[id(other)] = super().at(other)
        return self._at[id(other)]


class Toy:
    """Layers of a pair of toy models, their distributions computed once for each list of beams."""

    def __init__(self, seed, config, vocab=3, warp=None):
        self.target, self.draft = table(f"target {seed}", vocab), table(f"draft {seed}", vocab)
        self.config, self.vocab, self.warp = config, vocab, warp or Warp()
        self.joint, self.grown, self.layer = cache(self.joint), cache(self.grown), cache(self.layer)
        self.paths = {}

    def joint(self, kind, beams):
        """The joint distribution of beams, given as (path, logprob, entries)."""
        model = self.target if kind == "target" else self.draft
        reader, logp_NV = Reader(self.warp, self.vocab), torch.stack([model(path) for path, _, _ in beams])
        nodes = [self.node(path) for path, _, _ in beams]
        rows = dict(zip(nodes, reader.rows(logp_NV, reader.read(logp_NV)), strict=True))
        return Memo(reader.p_beam(rows, [Beam(node, *beam[1:]) for node, beam in zip(nodes, beams, strict=True)]))

    def node(self, path):
        """A number for a path."""
        return self.paths.setdefault(path, len(self.paths))

    def grown(self, kind, beams, drawn):
        found, joint, of = [], self.joint(kind, beams), {self.node(path): (path, logprob) for path, logprob, _ in beams}
        for i in dict.fromkeys(drawn):
            node, token = joint.cell(i)
            path, logprob = of[node]
            found.append(((*path, token), round(logprob + joint.logps[i], 9), drawn.count(i)))
        return tuple(found)

    def draw(self, beams, rng):
        """A drafted layer, and the beams after it."""
        q = self.joint("draft", beams)
        return self.layer(beams, tuple(draw(q.probs, self.config.draft_beams, self.config.drafts, rng)))

    def layer(self, beams, drawn):
        nodes, q = [Beam(self.node(path), logprob, count) for path, logprob, count in beams], self.joint("draft", beams)
        return ForestLevel(nodes, q, list(drawn)), self.grown("draft", beams, drawn)


def spelled(p, toy, entries):
    """Entries as paths."""
    paths = list(toy.paths)
    return tuple((*paths[node], token) for node, token in map(p.cell, entries))


def lost_parents(config, runs=RUNS, judge=DSBD.judge, warp=None, seed=3, vocab=4):
    """A layer drafted from three beams, of which two are there: groups of entries by width."""
    toy, rng = Toy(seed, config, vocab, warp), numbers(seed)
    heads = (((0,), -0.4, 1), ((1,), -0.9, 2), ((2,), -1.1, 1))
    live = (heads[2], heads[0])
    p, groups, parents = toy.joint("target", live), {}, [toy.node(path) for path, _, _ in live]
    for _ in range(runs):
        layer, _ = toy.draw(heads, rng)
        width, verdict = judge(config, p, layer, parents, config.entries, rng)
        groups.setdefault(width, Counter())[tuple(verdict.entries)] += 1
    return [(counts, lists(p.probs, width)) for width, counts in groups.items()]


@pytest.fixture(autouse=True)
def widths_once(monkeypatch):
    """The same distributions come up again and again; their widths need not be found again."""
    known = {}

    def remembered(p, q, m, mass):
        key = (*p, *q, m, mass)
        return known[key] if key in known else known.setdefault(key, acceptances(p, q, m, mass))

    monkeypatch.setattr(search.dsbd, "acceptances", remembered)


@pytest.mark.parametrize("kind, width", [(IID, 2), (IID, 0), (WITHOUT, 2), (WITHOUT, 0)])
def test_lost_parents(kind, width):
    groups = lost_parents(DSBD(draft_beams=4, width=width, threshold=0.15, drafts=kind))
    assert len(groups) > 2 if (kind, width) == (IID, 0) else len(groups) == 1
    assert p_value(groups) > 1e-4


@pytest.mark.parametrize("kind, options", [(IID, (0.7, 3, 1.0)), (WITHOUT, (1.0, 0, 0.8)), (WITHOUT, (1.3, 6, 0.9))])
def test_warped(kind, options):
    groups = lost_parents(DSBD(draft_beams=4, width=2, drafts=kind), warp=Warp(*options))
    assert p_value(groups) > 1e-4


def two_cells(config, judge=DSBD.judge, runs=RUNS):
    """A layer of three cells, two of them below the one parent that is there: groups of entries by width."""
    q, p, rng, groups = (
        Joint(2, [0.6, 0.1, 0.3], [0.0] * 3, [0, 1, 2]),
        Joint(2, [0.5, 0.5], [0.0] * 2, [0, 1]),
        numbers(4),
        {},
    )
    for _ in range(runs):
        layer = ForestLevel([Beam(0, 0.0), Beam(1, 0.0)], q, draw(q.probs, 2, config.drafts, rng))
        width, verdict = judge(config, p, layer, [0], config.entries, rng)
        groups.setdefault(width, Counter())[tuple(verdict.entries)] += 1
    return [(counts, lists(p.probs, width)) for width, counts in groups.items()]


def test_two_cells():
    assert p_value(groups := two_cells(DSBD(draft_beams=2, threshold=0.1, drafts=IID))) > 1e-4 and len(groups) == 2
    assert p_value(two_cells(DSBD(draft_beams=2, threshold=0.1))) > 1e-4


LOST_MUTANTS = [
    ("q not renormalised", IID, "drafts, mass, width", "drafts, 1.0, width"),
    ("width by the parents lost, without replacement", WITHOUT, "mass) if self.drafts == IID", "mass) if True"),
    ("width by a draw", IID, "(len(drafts), mass)", "(1 + (layer.drawn[0] == 0), mass)"),
]


@pytest.mark.full
@pytest.mark.parametrize("name, kind, old, new", LOST_MUTANTS, ids=[m[0] for m in LOST_MUTANTS])
def test_the_test_of_lost_parents_notices(name, kind, old, new):
    groups = two_cells(DSBD(draft_beams=2, threshold=0.1, drafts=kind), mutant(DSBD.judge, old, new), 20_000)
    assert p_value(groups) < 1e-6


@pytest.mark.full
@pytest.mark.parametrize("kind, old, new", [(IID, ", mass, width", ", 1.0, width"), (WITHOUT, "self.drafts)", "IID)")])
def test_so_does_the_other(kind, old, new):
    judge = mutant(DSBD.judge, old, new)
    assert p_value(lost_parents(DSBD(draft_beams=4, width=2, drafts=kind), ALL_RUNS // 2, judge)) < 1e-6


def two_levels(config, seed, runs=RUNS):
    """Levels of a round from one beam: for each list of the first level, and width of the second, lists of the second.

    Returns:
        the first level's group, then those of the second.
    """
    toy, rng = Toy(seed, config), numbers(seed)
    root = (((), 0.0, 1),)
    first, second = Counter(), {}
    p1 = toy.joint("target", root)
    for _ in range(runs):
        layer1, heads = toy.draw(root, rng)
        layer2, _ = toy.draw(heads, rng)
        width, verdict = config.judge(p1, layer1, [toy.node(())], config.entries, rng)
        live = toy.grown("target", root, tuple(verdict.entries))
        first[spelled(p1, toy, verdict.entries)] += 1
        p2 = toy.joint("target", live)
        drafted = config.short == GO_ON and {path for path, _, _ in live} <= {path for path, _, _ in heads}
        if verdict.accepted < width and not drafted:
            entries, width = pick(p2.probs, itertools.islice(rng, width)), -1  # of another round: drawn plainly
        else:
            width, verdict = config.judge(p2, layer2, [toy.node(path) for path, _, _ in live], config.entries, rng)
            entries = verdict.entries
        counts, _ = second.setdefault((live, width), (Counter(), p2))
        counts[tuple(entries)] += 1
    groups = [(first, {spelled(p1, toy, cells): p for cells, p in lists(p1.probs, len(next(iter(first)))).items()})]
    for counts, p2 in second.values():
        groups.append((counts, lists(p2.probs, len(next(iter(counts))))))
    return groups


@pytest.mark.parametrize(
    "options, seed",
    [
        ({"width": 2, "drafts": IID}, 11),
        ({"drafts": IID, "short": "end"}, 12),
        ({"width": 2}, 12),
        ({"width": 2, "short": "end"}, 11),
        ({}, 11),
        ({"draft_beams": 1, "width": 1, "drafts": IID}, 11),  # speculative sampling
    ],
    ids=str,
)
def test_two_levels_equal_beam_sampling(options, seed):
    groups = two_levels(DSBD(**{"draft_beams": 3, "threshold": 0.7} | options), seed)
    assert len(groups) > 3 and p_value(groups) > 1e-4
