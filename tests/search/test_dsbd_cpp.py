"""The C++ of DSBD's layers against their definition in Python, on many random layers."""

import itertools
import math
import random
from array import array

import pytest
import torch

import kernels.beams
import search.dsbd.joint
from engine.sampling import Uniforms, Warp
from kernels.beams import DENSE
from kernels.cpp import why_not
from kernels.rows.reference import peaks
from search import DSBD
from search.dsbd.beams import Beam
from search.dsbd.forest import Layer
from search.dsbd.joint import Joint, Rated, Reader, Told
from search.dsbd.verify import IID, KINDS, draw

pytestmark = pytest.mark.skipif(why_not() is not None, reason=f"no C++: {why_not()}")
WARPS = [Warp(*w) for w in itertools.product((1.0, 0.7, 1e-6), (0, 1, 7, 40), (1.0, 0.9, 0.3))] + [Warp(0)]


def rows_of(n, vocab, seed, coarse):
    """Log-probabilities; coarse ones have equals."""
    logits = torch.randn(n, vocab, generator=torch.Generator().manual_seed(seed)) * 3
    return torch.log_softmax(logits.round() if coarse else logits, -1)


def reader_without_cpp(monkeypatch, *args):
    with monkeypatch.context() as patch:
        patch.setattr(search.dsbd.joint, "why_not", lambda: "as if there was none")
        return Reader(*args)


@pytest.mark.parametrize("coarse", [False, True])
@pytest.mark.parametrize("vocab", [5, 64, 700, 5000])
def test_leaders(vocab, coarse, monkeypatch):
    """The same cells in the same order, whether the host was told numbers of the rows, or C++ looks at them."""
    found = missed = 0
    for (seed, warp), (padding, counts) in itertools.product(enumerate(WARPS), ((0, [1, 1, 1]), (3, [2, 1, 5]))):
        reader, logp_NV = Reader(warp, vocab), rows_of(4, vocab, seed, coarse)
        logp_NV = torch.nn.functional.pad(logp_NV, (0, padding), value=-torch.inf)
        nodes, logprobs = [9, 4, 7], [-0.5, -0.5, -2.0]
        without = reader_without_cpp(monkeypatch, warp, vocab)
        plain = without.rows(logp_NV, without.read(logp_NV))
        dense = [reader.rows(logp_NV, reader.read(logp_NV, known)) for known in (None, peaks(logp_NV))]
        assert plain[0][0].kind & DENSE == 0 != dense[0][0][0].kind & DENSE
        given = sorted(zip(nodes, logprobs, counts, plain, strict=False))
        beams = [Rated(node, logprob + 0.5, n, row) for node, logprob, n, row in given]
        expected, everything = without._leaders(beams), without._all(beams)
        told = [reader.p_beam(dict(zip(nodes, rows, strict=False)), nodes, logprobs, counts)
                for rows in (plain, *dense)]  # fmt: skip
        assert list(told[1].probs) == list(told[2].probs) and told[1].cells == told[2].cells
        for joint in told:  # dense rows may tell where the others do not
            assert in_full(joint, nodes).sub(in_full(everything, nodes)).abs().max() < 1e-6
            assert joint.cells is None or list(joint.cells) == sorted(joint.cells)
        if expected is None:
            missed += 1
            assert told[0].compact is None
            continue
        found += 1
        for joint in told:
            assert list(joint.cells) == list(expected.cells) and list(joint.logps) == list(expected.logps)
            assert list(joint.probs) == pytest.approx(list(expected.probs), rel=1e-15)
    assert found and (missed or vocab <= 64)


def in_full(joint, nodes):
    full = torch.zeros(len(nodes), joint.vocab, dtype=torch.float64)
    probs = torch.as_tensor(joint.probs, dtype=torch.float64)
    for i in range(len(probs)) if joint.cells is not None else probs.nonzero().view(-1).tolist():
        node, token = joint.cell(i)
        full[nodes.index(node), token] = probs[i]
    return full


def test_rows_without_order():
    """All tokens alike: whatever is drawn, everything may be."""
    reader, logp_NV = Reader(Warp(1.0, 7), 5000), torch.full((2, 5000), -math.log(5000))
    joint = reader.p_beam(dict(enumerate(reader.rows(logp_NV, reader.read(logp_NV)))), [0, 1], [0.0, 0.0])
    assert joint.compact is None and torch.as_tensor(joint.probs).allclose(torch.tensor(1e-4))


def test_rows_of_different_lengths():
    """What n-grams know: few tokens of each row, and nothing else is possible."""
    known = {3: Told.all([-0.1, -2.4], [8, 2]), 5: Told.all([-0.7, -0.8, -1.9], [1, 9, 0])}
    reader, weights = Reader(Warp(0.8, 0, 0.95), 10), [-1.0, -0.2]
    beams = [Rated(3, -0.8, 1, known[3]), Rated(5, 0.0, 1, known[5])]
    told, expected = reader.p_beam(known, [3, 5], weights), reader._leaders(beams)
    assert list(told.cells) == list(expected.cells) == [38, 50, 51, 59]
    assert list(told.probs) == pytest.approx(list(expected.probs), rel=1e-15)


def compact(vocab, probs, logps, cells):
    return Joint(vocab, probs, logps, cells, compact=(cells, probs))


def random_joint(chance, nodes, vocab, size):
    cells = sorted(chance.sample([node * vocab + token for node in nodes for token in range(vocab)], size))
    masses = [chance.choice((0.0, 1e-12, 0.3, 1.0, 1.0, 20.0)) * chance.random() + 1e-300 for _ in cells]
    total = sum(masses)
    return compact(vocab, array("d", [mass / total for mass in masses]), masses, array("q", cells))


@pytest.mark.parametrize("kind", KINDS)
def test_draws(kind):
    chance = random.Random(1)
    for i in range(2000):
        probs = random_joint(chance, [3], 40, chance.choice((1, 2, 3, 40))).probs
        n, key = chance.randint(1, 8), (chance.randrange(2**63), i, chance.randrange(2**40))
        drawn = kernels.beams.draw(probs, n, iid=kind == IID, key=key)
        assert drawn == draw(probs, n, kind, Uniforms(*key))
        if kind == IID:
            assert drawn == compact(40, probs, probs, array("q", range(len(probs)))).draw(n, Uniforms(*key))


@pytest.mark.parametrize("kind", KINDS)
def test_verdicts(kind):
    """Widths, accepted drafts and entries, whatever p and q have in common and whichever parents are gone."""
    chance, accepted, short = random.Random(2), 0, 0
    for i in range(3000):
        heads = chance.sample(range(20), chance.randint(1, 4))
        parents, vocab = chance.sample(heads, chance.randint(1, len(heads))), chance.choice((2, 5, 30))
        q = random_joint(chance, heads, vocab, chance.randint(1, len(heads) * vocab))
        p = random_joint(chance, parents, vocab, chance.randint(1, len(parents) * vocab))
        if chance.random() < 0.3:
            common = [mass if cell // vocab in parents else 0.0 for cell, mass in zip(q.cells, q.probs, strict=True)]
            if total := sum(common):
                p = compact(vocab, array("d", [mass / total for mass in common]), q.logps, q.cells)
        config = DSBD(
            draft_beams=chance.randint(1, 6),
            width=chance.choice((0, 0, 1, 3)),
            min_width=chance.randint(1, 3),
            threshold=chance.choice((0.0, 0.5, 0.9, 1.0)),
            drafts=kind,
        )
        layer = Layer(
            [Beam(node, 0.0) for node in heads], q, draw(q.probs, config.draft_beams, kind, Uniforms(i, 1, 0))
        )
        options = p, layer, parents, chance.randint(1, config.entries)
        expected = config.judge(*options, Uniforms(i, 0, 7))
        assert config._judge(*options, Uniforms(i, 0, 7)) == expected
        accepted += expected[1].accepted
        short += expected[1].accepted < expected[0]
    assert accepted > 1000 and short > 500
