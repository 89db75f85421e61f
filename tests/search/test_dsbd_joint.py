"""Joint distributions over beams and tokens against the plain warp of all cells; DSBD on real models."""

import itertools
import math
import random
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from engine import Engine
from engine.contract.sampling import Warp, uniforms
from engine.engine import Request, Session
from engine.errors import UsageError
from search import DSBD, BeamSample, Greedy, Speculative
from search.dsbd import copies
from search.dsbd.joint import Beam, Joint, Reader, Row, block_size, pick
from search.dsbd.verify import KINDS, Drafted, acceptances, draw, verify_layer
from tests.draws import draws
from tests.invariants import check_pool
from tools.random_checkpoint import make

GOLDEN = Path(__file__).parents[1] / "golden"
WARPS = [Warp(*w) for w in itertools.product((1.0, 0.7, 1.5), (0, 1, 7, 40), (1.0, 0.9, 0.4))] + [Warp(0), Warp(1e-6)]


def rows_of(n, vocab, seed, sharp=2.0, width=None):
    logits = torch.randn(n, vocab, generator=torch.Generator().manual_seed(seed)) * sharp
    padded = torch.full((n, width or vocab), float("-inf"))
    padded[:, :vocab] = logits
    return torch.log_softmax(padded, -1)


def p_beam(logp_NV, nodes, logprobs, warp, vocab, counts=None):
    """The p_beam of the nodes 0, 1, ..., as a search makes it from an answer."""
    reader = Reader(warp, vocab)
    rows = dict(enumerate(reader.rows(logp_NV, reader.read(logp_NV))))
    return reader.p_beam(rows, [*map(Beam, nodes, logprobs, counts or [1] * len(nodes))])


def plainly(logp_NV, logprobs, warp, vocab):
    """Probabilities of all cells of as many entries, by the definition."""
    scores = (logp_NV[:, :vocab].double() + torch.tensor(logprobs, dtype=torch.float64).unsqueeze(1)).view(1, -1)
    return torch.log_softmax(warp(scores)[0], -1).exp()


def in_full(joint, nodes):
    full = torch.zeros(len(nodes) * joint.vocab, dtype=torch.float64)
    probs = torch.as_tensor(joint.probs, dtype=torch.float64)
    for i in range(len(probs)) if joint.cells is not None else probs.nonzero().view(-1).tolist():
        node, token = joint.cell(i)
        full[nodes.index(node) * joint.vocab + token] = probs[i]
    return full


@pytest.mark.parametrize("vocab, width", [(640, 640), (640, 704), (641, 641), (20, 20), (3000, 3100)])
@pytest.mark.parametrize("sharp", [0.3, 3.0])
def test_p_beam(vocab, width, sharp):
    for warp in WARPS:
        logp_NV, weights, nodes = rows_of(4, vocab, vocab, sharp, width), [-3.0, -1.5, -40.0], [2, 0, 3]
        joint = p_beam(logp_NV, nodes, weights, warp, vocab)
        expected = plainly(logp_NV[nodes], weights, warp, vocab)
        found = in_full(joint, nodes)
        assert float((found - expected).abs().max()) < 1e-6 and float(found.sum()) == pytest.approx(1)
        for i in pick(joint.probs, itertools.islice(uniforms(1, 2, 3), 3)):
            node, token = joint.cell(i)
            assert joint.find(node, token) == i
            assert float(joint.logps[i]) == float(logp_NV[node, token])


@pytest.mark.parametrize("vocab, width", [(20, 20), (64, 70), (300, 300), (3000, 3100)])
@pytest.mark.parametrize("sharp", [0.3, 3.0])
def test_warps_act_on_every_entry(vocab, width, sharp):
    """Beams of several entries against the same entries one by one, warped as one row of W x V numbers."""
    apart = 0.0
    for warp in WARPS:
        logp_NV, logprobs, nodes, counts = (
            rows_of(4, vocab, vocab, sharp, width),
            [-0.4, -0.1, -1.3],
            [2, 0, 3],
            [3, 1, 5],
        )
        joint = p_beam(logp_NV, nodes, logprobs, warp, vocab, counts)
        owner = [i for i, n in enumerate(counts) for _ in range(n)]
        entries = plainly(logp_NV[[nodes[i] for i in owner]], [logprobs[i] for i in owner], warp, vocab)
        expected = torch.zeros(3, vocab, dtype=torch.float64)
        expected.index_add_(0, torch.tensor(owner), entries.view(-1, vocab))
        if warp.temperature:  # at zero the first of equals is drawn, whichever copy it is
            assert float((in_full(joint, nodes) - expected.view(-1)).abs().max()) < 1e-6
        assert joint.cells is None or list(joint.cells) == sorted(joint.cells)
        weights = [x + math.log(n) for x, n in zip(logprobs, counts, strict=True)]
        folded = plainly(logp_NV[nodes], weights, warp, vocab)
        apart = max(apart, float((folded - expected.view(-1)).abs().sum()) / 2)
    assert apart > 0.1  # to fold equal entries first is another distribution


def test_copies_at_the_borders_of_warps():
    """A token of a beam of n entries takes n places; one whose copies straddle the border of top-k stays whole, as
    equals do, and of one that straddles that of top-p some copies stay."""
    logp_NV = torch.tensor([[0.5, 0.3, 0.2], [0.6, 0.4, 0.0]]).log()
    logprobs, counts = [0.0, 0.0], [2, 1]  # copies: 0.6, 0.5, 0.5, 0.4, 0.3, 0.3, 0.2, 0.2
    for top_k, expected in ((1, {3: 0.6}), (2, {3: 0.6, 0: 1.0}), (3, {3: 0.6, 0: 1.0}),
                            (5, {3: 0.6, 0: 1.0, 4: 0.4, 1: 0.6})):  # fmt: skip
        joint = p_beam(logp_NV, [0, 1], logprobs, Warp(top_k=top_k), 3, counts)
        total = sum(expected.values())
        assert dict(zip(joint.cells, joint.probs, strict=True)) == pytest.approx(
            {c: m / total for c, m in expected.items()}
        )
    for share, expected in (
        (0.65, {3: 0.6, 0: 0.5}),
        (1.15, {3: 0.6, 0: 1.0}),
        (2.25, {3: 0.6, 0: 1.0, 4: 0.4, 1: 0.3}),
    ):
        joint = p_beam(logp_NV, [0, 1], logprobs, Warp(top_p=share / 3), 3, counts)
        total = sum(expected.values())
        assert dict(zip(joint.cells, joint.probs, strict=True)) == pytest.approx(
            {c: m / total for c, m in expected.items()}
        )


def test_ties_at_the_border_of_top_k_stay():
    logp_NV = torch.full((2, 1024), -20.0)
    logp_NV[0, [5, 300, 900]] = logp_NV[1, 7] = -1.0
    for width in (1024, 1023):  # with and without a divisor
        joint = p_beam(logp_NV[:, :width], [0, 1], [0.0, 0.0], Warp(top_k=2), 1024)
        assert sorted(joint.cells) == [5, 300, 900, 1024 + 7] and joint.probs == pytest.approx([0.25] * 4)
        assert p_beam(logp_NV[:, :width], [0, 1], [0.0, 0.0], Warp(0), 1024).cells[0] == 5
        assert p_beam(logp_NV[:, :width], [1, 0], [0.0, -1.0], Warp(0), 1024).cells[0] == 1024 + 7


@pytest.mark.parametrize("step", [0, 0.5, 100])
def test_borders_are_found_in_histograms(monkeypatch, step):
    """In many levels of a few bins and rows, among equals and without; a step of 100 makes all cells of a row equal."""
    for name, value in {"BINS": 8, "FEW": 5, "BLOCK": 3000, "FEW_MASSES": 0}.items():
        monkeypatch.setattr(copies, name, value)
    logits = torch.randn(4, 3000, generator=torch.Generator().manual_seed(5))
    logits[:, ::5] = -math.inf
    logp_NV = torch.log_softmax((logits / step).round() * step if step else logits, -1)
    logprobs, nodes = [-0.5, -0.25, -1.5], [2, 0, 3]
    for temperature, top_k, top_p, min_p in itertools.product((0.7, 1e6), (0, 300, 3000), (1, 0.97, 0.3), (0, 0.1)):
        warp = Warp(temperature, top_k, top_p, min_p)
        if top_k or top_p < 1 or min_p:
            joint = p_beam(logp_NV, nodes, logprobs, warp, 3000)
            expected = plainly(logp_NV[nodes], logprobs, warp, 3000)
            assert float((in_full(joint, nodes) - expected).abs().max()) < 1e-7, warp


def test_rows_of_few_tokens():
    """Rows as n-grams know them: few tokens of each, and nothing else is possible; also with many cells."""
    rows = {3: Row([-0.1, -2.4], [8, 2], True), 5: Row([-0.7, -0.8, -1.9], [1, 9, 0], True)}
    joint = Reader(Warp(0.8, 0, 0.95), 10).p_beam(rows, [Beam(3, -1.0), Beam(5, -0.2)])
    masses = [
        math.exp((offset + logp) / 0.8) for offset, logp in ((-1.0, -0.1), (-0.2, -1.9), (-0.2, -0.7), (-0.2, -0.8))
    ]
    assert list(joint.cells) == [38, 50, 51, 59]
    assert list(joint.probs) == pytest.approx([mass / sum(masses) for mass in masses])
    rows = {node: Row([-math.log(9)] * 9, [*range(9)], True) for node in range(200)}
    joint = Reader(Warp(), 5000).p_beam(rows, [Beam(node, -1.0) for node in range(200)])
    assert len(joint.cells) == 1800 and list(joint.probs) == pytest.approx([1 / 1800] * 1800)


def test_the_large_cells_are_found_without_the_others(monkeypatch):
    """The way through block maxima is taken, and all cells are not."""
    logp_NV, warps = rows_of(5, 32000, 1, 4.0), (Warp(1, 20), Warp(1, 0, 0.5), Warp(0.7, 20, 0.9), Warp(0))
    expected = [plainly(logp_NV, [0.0] * 5, warp, 32000) for warp in warps]
    monkeypatch.setattr(Reader, "_of_all", lambda *_: pytest.fail("all cells were warped"))
    for warp, full in zip(warps, expected, strict=True):
        assert sorted(p_beam(logp_NV, range(5), [0.0] * 5, warp, 32000).cells) == full.nonzero().view(-1).tolist()


def test_block_sizes():
    assert block_size(160_000) == 400 and block_size(50257) == 0


def test_lists_and_tensors_are_the_same():
    """A layer over all cells of a vocabulary, as tensors, and the same as lists: equal decisions."""
    p, q = (p_beam(rows_of(2, 800, seed), [0, 1], [0.0, -0.5], Warp(), 800) for seed in (1, 2))
    assert p.cells is None and isinstance(p.probs, torch.Tensor)
    few = [Joint(800, x.probs.tolist(), x.logps.tolist(), list(range(1600))) for x in (p, q)]
    mixed = Joint(800, p.probs.view(2, 800).flip(0).reshape(-1), p.logps, None, [1, 0])
    for other, mine in itertools.product((q, few[1]), (p, few[0], mixed)):
        assert other.of_nodes([1]) == pytest.approx(float(q.probs[800:].sum()))
        again = torch.as_tensor(other.at(mine), dtype=torch.float64)
        expected = torch.cat([q.probs[800:], q.probs[:800]]) if mine is mixed else q.probs
        assert again.allclose(expected.double())
    for kind, seed in itertools.product(KINDS, range(20)):
        drawn = draw(q.probs, 4, kind, uniforms(seed, 0, 0))
        assert draw(few[1].probs, 4, kind, uniforms(seed, 0, 0)) == drawn
        drafts = [Drafted(j, float(q.probs[j])) for j in drawn]
        verdicts = [
            verify_layer(x.probs, y.probs, drafts, 1.0, 3, uniforms(seed, 1, 0), kind) for x, y in ((p, q), few)
        ]
        assert verdicts[0] == verdicts[1]
    alphas = [acceptances(x.probs, y.probs, 3, 1.0) for x, y in ((p, q), few)]
    assert alphas[0] == pytest.approx(alphas[1], abs=1e-6)


def test_pick():
    numbers = [0.0001, 0.2999, 0.3001, 0.9999]
    assert pick([0.0, 0.3, 0.0, 0.7, 0.0], numbers) == [1, 1, 3, 3]
    assert pick(torch.tensor([0.0, 0.3, 0.0, 0.7, 0.0]), numbers) == [1, 1, 3, 3]
    probs = torch.rand(4096, generator=torch.Generator().manual_seed(0)) ** 8 + 1e-6
    probs[100:3000] = 0
    numbers = [1e-10, *itertools.islice(uniforms(1, 2, 3), 500), 1 - 1e-10]
    found = pick(probs, numbers)  # by blocks
    assert found == pick(probs.tolist(), numbers) and not any(100 <= i < 3000 for i in found)


# --- real models ---


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    folder = tmp_path_factory.mktemp("dsbd")
    shapes = {"target": {"layers": 2, "width": 48, "seed": 1}, "draft": {"layers": 1, "width": 32, "seed": 2}}
    for name, shape in shapes.items():
        make(folder / name, mlp=64, heads=4, vocab=320, scale=0.6, **shape)
    make(folder / "other", layers=1, width=32, mlp=64, heads=4, vocab=300)
    return folder


@pytest.fixture(scope="module")
def engine(folders):
    return Engine.load(folders / "target", draft=folders / "draft", dtype="float32", kv_memory=1 << 22)


SEARCHES = [
    BeamSample(beams=3, num_return_sequences=3),
    DSBD(num_return_sequences=3),
    DSBD(draft_beams=3, width=3, drafts="iid", top_k=12),
    DSBD(draft_beams=3, short="end", keep=1, top_p=0.8),
    DSBD(drafter="ngram", gamma=2),
    Speculative(temperature=0.8),
]


def forced(engine, prompt, tokens):
    """The log-probability of tokens after a prompt."""
    logp = torch.log_softmax(engine.logits([*prompt, *tokens]), -1).double()
    return sum(float(logp[len(prompt) - 1 + i, t]) for i, t in enumerate(tokens))


@pytest.mark.parametrize("search", SEARCHES, ids=str)
def test_teacher_forcing(engine, search):
    prompts = [[1, *random.Random(i).choices(range(3, 320), k=5 + i)] for i in range(4)]
    results = engine.generate(prompts, search, max_new_tokens=24)
    for prompt, result in zip(prompts, results, strict=True):
        for output in result.outputs:
            assert output.logprob == pytest.approx(forced(engine, prompt, output.token_ids), abs=1e-4)
        alone = engine.generate([prompt], search, max_new_tokens=24)[0]
        assert [o.token_ids for o in alone.outputs] == [o.token_ids for o in result.outputs]
    for part in (engine, engine.companions["draft"]):
        check_pool(part.pool, [])


def test_drafted_figures(engine):
    [result] = engine.generate([[1, 5, 9]], DSBD(), max_new_tokens=30, ignore_eos=True)
    stats = result.stats
    assert stats["forward_passes"] == stats["rounds"] and stats["draft_forward_passes"] >= stats["rounds"] - 1
    assert stats["target_seconds"] > 0 and stats["draft_seconds"] > 0 and stats["steps"] == 30 == stats["new_tokens"]
    assert stats["prefill_seconds"] > 0 and stats["prefill_seconds"] + stats["decode_seconds"] > stats["target_seconds"]


def test_greedy_by_speculation(engine):
    [greedy] = engine.generate([[1, 5, 9]], Greedy(), max_new_tokens=40)
    [drafted] = engine.generate([[1, 5, 9]], Speculative(temperature=0), max_new_tokens=40)
    assert drafted.outputs[0].token_ids == greedy.outputs[0].token_ids


@pytest.mark.parametrize("family", ["gpt2", "opt", "phi", "phi3"])
def test_a_draft_of_another_family(family):
    """All that it must share with the target, a Llama, is the tokenizer."""
    engine = Engine.load(GOLDEN / "llama/plain", draft=GOLDEN / family / "plain", dtype="float32", kv_memory=1 << 22)
    prompts, options = [[1, 5, 9], [1, *range(20, 32)]], {"max_new_tokens": 24, "ignore_eos": True}
    for search in (DSBD(num_return_sequences=3), DSBD(draft_beams=3, top_k=12, top_p=0.9), Speculative(top_p=0.9)):
        for prompt, result in zip(prompts, engine.generate(prompts, search, **options), strict=True):
            assert result.stats["draft_forward_passes"] > 0
            for output in result.outputs:
                assert output.logprob == pytest.approx(forced(engine, prompt, output.token_ids), abs=1e-4)
    greedy = [result.outputs[0].token_ids for result in engine.generate(prompts, Greedy(), **options)]
    for search in (Speculative(temperature=1e-4), DSBD(temperature=1e-4), DSBD(temperature=0, drafts="iid")):
        assert [result.outputs[0].token_ids for result in engine.generate(prompts, search, **options)] == greedy

    prompt, runs = prompts[0], draws(600)  # the first of two tokens is drafted
    results = engine.serve(Request(prompt, Speculative(seed=seed), 2, ignore_eos=True) for seed in range(runs))
    counts = Counter(result.outputs[0].token_ids[0] for _, result in results)
    for token, p in enumerate(torch.softmax(engine.logits(prompt)[-1], -1).tolist()):
        assert abs(counts[token] - runs * p) < 1 + 5 * math.sqrt(runs * p * (1 - p))


def test_interrupted(engine):
    events = engine.stream([1, 5, 9], DSBD(), max_new_tokens=60, interrupted=lambda: next(steps) > 5)
    steps = itertools.count()
    done = list(events)[-1]
    assert done.result.outputs[0].finish_reason == "interrupted"
    for part in (engine, engine.companions["draft"]):
        check_pool(part.pool, [])


def test_little_memory_makes_others_wait(engine, folders):
    """Four requests in pools that hold little more than one of them: the same answers."""
    prompts, search = [[1, 5 + i, 9] for i in range(4)], DSBD(draft_beams=3)
    room = 90 * sum(part.pool.bytes_per_token for part in (engine, engine.companions["draft"]))
    small = Engine.load(folders / "target", draft=folders / "draft", dtype="float32", kv_memory=room)
    tight, wide = (e.generate(prompts, search, max_new_tokens=30) for e in (small, engine))
    assert [r.outputs[0].token_ids for r in tight] == [r.outputs[0].token_ids for r in wide]
    check_pool(small.pool, [])


def small_engine(tokens, folder=GOLDEN / "llama/gqa"):
    """A model that drafts for itself, with room for so many tokens."""
    probe = Engine.load(folder, draft=folder, dtype="float32", kv_memory=1 << 20)
    room = tokens * sum(part.pool.bytes_per_token for part in (probe, probe.companions["draft"]))
    return Engine.load(folder, draft=folder, dtype="float32", kv_memory=room)


def test_a_cache_that_holds_some_forests_only():
    """With four slots a forest of one draft fits and one of two does not, and a draft that ends needs no slot: what is
    drawn must not depend on that. A right implementation under fresh seeds fails with a probability of 1e-4."""
    engine, prompt, runs = small_engine(4), [1, 5, 9], draws(400)
    best = torch.topk(torch.log_softmax(engine.logits(prompt)[-1], -1), 5)
    eos = int(best.indices[1])
    search = DSBD(draft_beams=2, gamma=1, width=1, top_k=5)
    requests = (Request(prompt, replace(search, seed=seed), 2, eos_token_ids=[eos]) for seed in range(runs))
    counts = Counter(result.outputs[0].token_ids[0] for _, result in engine.serve(requests))
    expected = [runs * p for p in torch.softmax(best.values, -1).tolist()]
    assert sum(counts.values()) == sum(counts[token] for token in best.indices.tolist()) == runs
    chi_square = sum((counts[t] - e) ** 2 / e for t, e in zip(best.indices.tolist(), expected, strict=True))
    assert math.exp(-chi_square / 2) * (1 + chi_square / 2) > 1e-4  # four degrees of freedom


def test_little_room_gives_the_same_answers_alone_and_in_company():
    """How many layers are drafted depends on the pool, not on what other searches hold of it just now."""
    engine, prompts = small_engine(22), [[1, 5 + i, 9] for i in range(4)]
    search = DSBD(draft_beams=3, width=1, gamma=3, seed=3)
    together = engine.generate(prompts, search, max_new_tokens=12, ignore_eos=True)
    alone = [engine.generate([prompt], search, max_new_tokens=12, ignore_eos=True)[0] for prompt in prompts]
    assert [r.outputs for r in together] == [r.outputs for r in alone]
    assert any(r.stats["rounds_per_layer"][2] < r.stats["rounds_per_layer"][0] for r in alone)


def test_what_a_conversation_holds_is_not_counted_on():
    """Pages of a session between its turns cannot be had: fewer layers are drafted, and nothing fails."""
    engine = small_engine(30)
    session = Session(engine)
    list(session.stream([1, *range(20, 34)], Greedy(), max_new_tokens=2, ignore_eos=True))
    assert engine.pool.used_pages >= 14
    for seed in range(10):
        search = DSBD(draft_beams=3, width=1, gamma=3, seed=seed)
        [result] = engine.generate([[1, 5, 9]], search, max_new_tokens=8, ignore_eos=True)
        assert len(result.outputs[0].token_ids) == 8
    session.close()
    check_pool(engine.pool, [])


def test_other_tokenizers_are_refused(folders):
    with pytest.raises(UsageError, match="another tokenizer"):
        Engine.load(folders / "target", draft=folders / "other")
    plain = Engine.load(folders / "target")
    with pytest.raises(UsageError, match="needs a draft model"):
        plain.generate([[1, 2]], DSBD())
    assert plain.generate([[1, 2]], DSBD(drafter="ngram"), max_new_tokens=3)[0].outputs
