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
import search.verify
from engine.sampling import Warp
from search.beam_sample import Beam
from search.dsbd import DSBD, Layer
from search.joint import Joint, Rows, p_beam, pick
from search.verify import (
    DISTINCT,
    IID,
    KINDS,
    WITHOUT,
    Drafted,
    acceptances,
    accepted_counts,
    distinct_counts,
    draw,
    dynamic_width,
)

RUNS = 100_000


def numbers(seed):
    """Endless numbers in [0, 1): the tests' own, as fast as can be; keyed ones are tested with whole searches."""
    return iter(random.Random(seed).random, None)


def distribution(n, seed, spread=1.5):
    rng = random.Random(seed)
    weights = [math.exp(spread * rng.gauss(0, 1)) for _ in range(n)]
    return [w / sum(weights) for w in weights]


def p_value(groups):
    """Of counts against probabilities, added up over groups; cells that expect fewer than five are taken together.

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


def outcomes(p, q, m, width, kind, runs=RUNS, verify=search.verify.verify, seed=1, drawn_as=None):
    """Counts of the entries of a layer, and accepted drafts per run."""
    rng, counts, accepted = numbers(seed), Counter(), 0
    for _ in range(runs):
        drafts = [Drafted(j, j if p[j] > 0 else None, q[j]) for j in draw(q, m, drawn_as or kind, rng)]
        verdict = verify(p, q, drafts, 1.0, width, rng, kind)
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


@pytest.mark.parametrize("kind", [WITHOUT, DISTINCT])
def test_drafts_that_run_out(kind):
    """q has fewer cells than drafts are wanted, one of them nearly all: every one is drawn, the residual is used up."""
    p, q = [0.5, 0.3, 0.1, 0.1], [0.0, 0.97, 0.03, 0.0]
    counts, _ = outcomes(p, q, 4, 2, kind)
    assert p_value([(counts, lists(p, 2))]) > 1e-4


@pytest.mark.parametrize("kind", KINDS)
def test_disjoint_distributions(kind):
    p, q = [0.6, 0.4, 0.0, 0.0], [0.0, 0.0, 0.5, 0.5]
    counts, accepted = outcomes(p, q, 2, 2, kind, 20_000)
    assert accepted == 0 and p_value([(counts, lists(p, 2))]) > 1e-4


def test_equal_distributions_are_accepted_whole():
    p, _ = PAIRS[0]
    for kind, width in ((IID, 4), (DISTINCT, 4), (WITHOUT, 1)):
        counts, accepted = outcomes(p, p, 4, width, kind, 3000)
        assert accepted == width
    counts, accepted = outcomes(p, p, 4, 2, WITHOUT)  # no draft comes twice, though p draws some twice
    assert 1 < accepted < 2 and p_value([(counts, lists(p, 2))]) > 1e-4


def test_nothing_is_left_of_equal_distributions():
    p, _ = PAIRS[0]
    assert search.verify.residual(p, p, 1.0) == (p, 0.0)
    tensor = torch.tensor(p)
    assert search.verify.residual(tensor, tensor, 1.0)[0].equal(tensor)


MUTANTS = [  # name, how drafts are drawn, how they are verified, what is replaced by what, runs
    ("upside down", IID, IID, "_ * q_x < float(rest[x]) * left", "_ * float(rest[x]) * left < q_x", 20_000),
    ("plain q without replacement", WITHOUT, IID, "", "", 50_000),
    ("residual of plain q", WITHOUT, WITHOUT, "left_q = without(left_q, [x])", "pass", 50_000),
    ("ratio of plain q", WITHOUT, WITHOUT, "_ * q_x <", "_ * q_x * left <", 50_000),
    ("nothing put back", DISTINCT, DISTINCT, "left_q, left, gone = q, mass, {}", "gone = {}", RUNS),
    ("rejected ones again", DISTINCT, DISTINCT, "if j in gone:", "if False:", 50_000),
    ("p' not reset", IID, IID, "            rest = p\n", "            pass\n", RUNS),
    ("residual forgotten", IID, IID, "rest, _ = residual(rest, left_q, left)", "pass", 20_000),
    ("completed from p alone", IID, IID, "pick(rest, islice(numbers, 1))", "pick(p, islice(numbers, 1))", 20_000),
]


@pytest.mark.parametrize("name, drawn_as, kind, old, new, runs", MUTANTS, ids=[m[0] for m in MUTANTS])
def test_the_test_notices(name, drawn_as, kind, old, new, runs):
    old, new = (text.replace("_ *", "next(numbers) *") for text in (old, new))
    verify = mutant(search.verify.verify, old, new) if old else search.verify.verify
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
    counts = accepted_counts(alphas)
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


def test_distinct_counts():
    """Adds up to 1; exact for one draft; a favourite that p and q share cannot fill two entries."""
    p, q = PAIRS[0]
    for m in (1, 2, 4):
        counts = distinct_counts(p, q, m)
        assert len(counts) == m + 1 and sum(counts) == pytest.approx(1)
        assert distinct_counts(torch.tensor(p), torch.tensor(q), m) == pytest.approx(counts, rel=1e-4)
    assert distinct_counts(p, q, 1) == pytest.approx(accepted_counts(acceptances(p, q, 1, 1.0)))
    sharp = [0.97, 0.01, 0.01, 0.01]
    assert dynamic_width(distinct_counts(sharp, sharp, 3), 0.7) == 1
    assert dynamic_width(accepted_counts(acceptances(sharp, sharp, 3, 1.0)), 0.7) == 3
    assert distinct_counts([1.0], [1.0], 3) == pytest.approx([0, 1, 0, 0])


@pytest.mark.parametrize("pair", range(2))
def test_simulated_counts_match_the_equations(pair):
    """Of four i.i.d. drafts, with none left over because enough were accepted."""
    p, q = PAIRS[pair]
    rng, counts = numbers(5), Counter()
    for _ in range(RUNS):
        drafts = [Drafted(j, j, q[j]) for j in draw(q, 4, IID, rng)]
        counts[search.verify.verify(p, q, drafts, 1.0, 4, rng, IID).accepted] += 1
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
        super().__init__(joint.vocab, joint.probs, joint.logps, joint.cells)
        self._rows, self._at = cache(super().of_rows), {}

    def of_rows(self, rows):
        return self._rows(tuple(rows))

    def at(self, other, rows):
        key = (id(other), *rows)
        if key not in self._at:
            self._at[key] = super().at(other, rows)
        return self._at[key]


class Toy:
    """Layers of a pair of toy models, their distributions computed once for each list of beams."""

    def __init__(self, seed, config, vocab=3, warp=None):
        self.target, self.draft = table(f"target {seed}", vocab), table(f"draft {seed}", vocab)
        self.config, self.vocab, self.warp = config, vocab, warp or Warp()
        self.joint = cache(self.joint)

    def joint(self, kind, beams):
        """Of beams, given as (path, logprob, entries)."""
        model = self.target if kind == "target" else self.draft
        rows = Rows(torch.stack([model(path) for path, _, _ in beams]))
        weights = [logprob + math.log(count) for _, logprob, count in beams]
        return Memo(p_beam(rows, range(len(beams)), weights, self.warp, self.vocab))

    def grown(self, beams, joint, drawn):
        found = []
        for i in dict.fromkeys(drawn):
            row, token = joint.cell(i)
            path, logprob, _ = beams[row]
            found.append(((*path, token), round(logprob + joint.logps[i], 9), drawn.count(i)))
        return tuple(found)

    def draw(self, beams, rng):
        """A drafted layer, and the beams after it."""
        q = self.joint("draft", beams)
        drawn = draw(q.probs, self.config.draft_beams, self.config.drafts, rng)
        nodes = [Beam(i, logprob, count) for i, (_, logprob, count) in enumerate(beams)]
        return Layer(nodes, q, drawn), self.grown(beams, q, drawn)


def spelled(p, beams, entries):
    """Entries as paths."""
    return tuple((*beams[row][0], token) for row, token in map(p.cell, entries))


def lost_parents(config, runs=RUNS, judge=DSBD.judge, warp=None, seed=3, vocab=4):
    """A layer drafted from three beams, of which two are there: groups of entries by width."""
    toy, rng = Toy(seed, config, vocab, warp), numbers(seed)
    heads = (((0,), -0.4, 1), ((1,), -0.9, 2), ((2,), -1.1, 1))
    live = (heads[2], heads[0])
    p, groups = toy.joint("target", live), {}
    for _ in range(runs):
        layer, _ = toy.draw(heads, rng)
        width, verdict = judge(config, p, layer, [2, 0], config.entries, rng)
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


@pytest.mark.parametrize("kind, width", [(IID, 2), (IID, 0), (WITHOUT, 2), (DISTINCT, 0)])
def test_lost_parents(kind, width):
    groups = lost_parents(DSBD(draft_beams=4, width=width, threshold=0.15, drafts=kind))
    assert len(groups) > 2 if (kind, width) == (IID, 0) else len(groups) == 1
    assert p_value(groups) > 1e-4


@pytest.mark.parametrize("kind, options", [(IID, (0.7, 3, 1.0)), (WITHOUT, (1.0, 0, 0.8)), (DISTINCT, (1.3, 6, 0.9))])
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
        layer = Layer([Beam(0, 0.0), Beam(1, 0.0)], q, draw(q.probs, 2, config.drafts, rng))
        width, verdict = judge(config, p, layer, [0], config.entries, rng)
        groups.setdefault(width, Counter())[tuple(verdict.entries)] += 1
    return [(counts, lists(p.probs, width)) for width, counts in groups.items()]


def test_two_cells():
    assert p_value(groups := two_cells(DSBD(draft_beams=2, threshold=0.1, drafts=IID))) > 1e-4 and len(groups) == 2
    assert p_value(two_cells(DSBD(draft_beams=2, threshold=0.1))) > 1e-4


LOST_MUTANTS = [
    ("q not renormalised", IID, "drafts, mass, width", "drafts, 1.0, width"),
    ("width by the parents lost, without replacement", WITHOUT, "if self.drafts == IID", "if True"),
    ("width by a draw", IID, "(len(drafts), mass)", "(1 + (layer.drawn[0] == 0), mass)"),
]


@pytest.mark.parametrize("name, kind, old, new", LOST_MUTANTS, ids=[m[0] for m in LOST_MUTANTS])
def test_the_test_of_lost_parents_notices(name, kind, old, new):
    groups = two_cells(DSBD(draft_beams=2, threshold=0.1, drafts=kind), mutant(DSBD.judge, old, new), 20_000)
    assert p_value(groups) < 1e-6


@pytest.mark.parametrize("kind, old, new", [(IID, ", mass, width", ", 1.0, width"), (WITHOUT, "self.drafts)", "IID)")])
def test_so_does_the_other(kind, old, new):
    assert (
        p_value(lost_parents(DSBD(draft_beams=4, width=2, drafts=kind), RUNS // 2, mutant(DSBD.judge, old, new))) < 1e-6
    )


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
        width, verdict = config.judge(p1, layer1, [0], config.entries, rng)
        live = toy.grown(root, p1, verdict.entries)
        first[spelled(p1, root, verdict.entries)] += 1
        p2 = toy.joint("target", live)
        if verdict.accepted < width:
            entries, width = pick(p2.probs, itertools.islice(rng, width)), -1  # of another round: drawn plainly
        else:
            place = {path: row for row, (path, _, _) in enumerate(heads)}
            width, verdict = config.judge(p2, layer2, [place[path] for path, _, _ in live], config.entries, rng)
            entries = verdict.entries
        counts, _ = second.setdefault((live, width), (Counter(), p2))
        counts[tuple(entries)] += 1
    groups = [(first, {spelled(p1, root, cells): p for cells, p in lists(p1.probs, len(next(iter(first)))).items()})]
    for counts, p2 in second.values():
        groups.append((counts, lists(p2.probs, len(next(iter(counts))))))
    return groups


@pytest.mark.parametrize(
    "kind, width, seed", [(IID, 2, 11), (IID, 0, 12), (WITHOUT, 2, 12), (WITHOUT, 0, 11), (DISTINCT, 0, 12)]
)
def test_two_levels_equal_beam_sampling(kind, width, seed):
    groups = two_levels(DSBD(draft_beams=3, width=width, threshold=0.7, drafts=kind), seed)
    assert len(groups) > 3 and p_value(groups) > 1e-4
