"""DSBD, speculative sampling and beam sampling as searches, over tables: distribution, bookkeeping, ends, memory."""

import itertools
import math
import random
from collections import Counter
from dataclasses import replace
from functools import cache

import pytest
import torch

from engine.contract.sampling import Warp, uniforms
from engine.errors import KVMemoryError, UsageError
from search import DSBD, BeamSample, Greedy, Speculative, make_search
from search.dsbd.joint import Beam, Reader, pick
from tests.draws import draws
from tests.search.drive import drive

PROMPT = (1, 2, 0)


def table(seed, vocab, agree=None, width=None):
    """A toy model: float32 log-probabilities after a path; near another model's if it is to agree with that."""

    @cache
    def row(path):
        rng = random.Random(f"{seed} {path}")
        logits = torch.tensor([rng.gauss(0, 1.2) for _ in range(vocab)])
        if agree is not None:
            logits = agree(path)[:vocab] + 0.3 * logits
        padded = torch.full((width or vocab,), float("-inf"))
        padded[:vocab] = logits
        return torch.log_softmax(padded, -1)

    return row


def over(target, draft=None, vocab=5, **room):
    """Run searches over these tables."""

    def run(search, max_new, eos=(), **options):
        rows = {"target": target, "draft": draft or target}
        return drive(search, rows, max_new, eos, prompt=PROMPT, vocab=vocab, **room, **options)

    return run


def passes(run, model):
    return [len(one.paths) for one in run.passes if one.model == model]


def teacher(model, tokens):
    """The log-probability of a sequence."""
    return sum(float(model(tuple(tokens[:i]))[t]) for i, t in enumerate(tokens))


TARGET = table("t", 5)
NEAR = table("n", 5, agree=TARGET)
FAR = table("f", 5)
SEARCHES = [
    BeamSample(beams=3, num_return_sequences=3),
    DSBD(draft_beams=3, num_return_sequences=3),
    DSBD(draft_beams=3, width=2, drafts="iid", gamma=4),
    DSBD(draft_beams=4, min_width=2, threshold=0.9, short="end", num_return_sequences=4),
    DSBD(draft_beams=3, keep=1),
    DSBD(draft_beams=3, width=2, drafter="ngram"),
    DSBD(draft_beams=3, width=3, bonus_width=1, top_k=6, gamma=1),
    DSBD(draft_beams=3, top_p=0.8, temperature=0.7, length_penalty=0, bonus_width=2),
    Speculative(),
    Speculative(gamma=2, top_k=2),
]


@pytest.mark.parametrize("search", SEARCHES, ids=str)
def test_outputs_are_what_they_say(search):
    for draft, eos, stops in itertools.product(
        (NEAR, FAR), ((), (4,), (0, 2, 4)), (None, lambda path: path[-2:] == [1, 3])
    ):
        for seed, max_new in ((1, 1), (2, 2), (3, 7), (4, 20)):
            search = replace(search, seed=seed)
            run = over(TARGET, draft)(search, max_new, eos, stops=stops)
            outputs = run.result.outputs
            assert run.settled == outputs[0].token_ids
            for scores in ([score for score, _ in one.beams] for one in run.told):
                assert scores == sorted(scores, reverse=True)
            assert len(outputs) <= getattr(search, "num_return_sequences", 1)
            assert len({tuple(o.token_ids) for o in outputs}) == len(outputs)
            assert [o.score for o in outputs] == sorted((o.score for o in outputs), reverse=True)
            penalty = getattr(search, "length_penalty", 0)
            for o in outputs:
                assert o.logprob == pytest.approx(teacher(TARGET, o.token_ids), abs=1e-5)
                assert o.score == pytest.approx(o.logprob / len(o.token_ids) ** penalty)
                ends = [
                    t in eos or (stops is not None and stops(o.token_ids[: i + 1])) for i, t in enumerate(o.token_ids)
                ]
                assert not any(ends[:-1]) and len(o.token_ids) <= max_new
                last = "eos" if o.token_ids[-1] in eos else "stop" if ends[-1] else "length"
                assert o.finish_reason == last and (last != "length" or len(o.token_ids) == max_new)


def p_beam(rows, logprobs, counts, warp, vocab):
    """The p_beam of the nodes 0, 1, ..., as a search makes it from an answer."""
    reader, logp_NV = Reader(warp, vocab), torch.stack(rows)
    known = dict(enumerate(reader.rows(logp_NV, reader.read(logp_NV))))
    return reader.p_beam(known, [*map(Beam, range(len(rows)), logprobs, counts)])


def by_hand(search, max_new, eos, prompt=3):
    """Beam sampling straight from its definition, on paths, with the keyed numbers of the search."""
    live, done, left = {(): 0.0}, [], search.beams
    entries = {(): 1}
    for step in range(max_new):
        paths = list(live)
        warp = search.warp()
        rows, counts = [TARGET(path) for path in paths], [entries[path] for path in paths]
        joint = p_beam(rows, list(live.values()), counts, warp, 5)
        drawn = pick(joint.probs, itertools.islice(uniforms(search.seed, 0, prompt + step), left))
        cells = [joint.cell(i) for i in drawn]
        grown = Counter((*paths[row], token) for row, token in cells)
        live, entries = {}, {}
        for path, count in grown.items():
            if path[-1] in eos or len(path) == max_new:
                done.append(path)
                left -= count
            else:
                live[path], entries[path] = teacher(TARGET, path), count
        if not live:
            break
    return sorted(done, key=lambda path: -teacher(TARGET, path) / len(path) ** search.length_penalty)


@pytest.mark.parametrize("options", [{}, {"top_k": 4}, {"top_p": 0.7}, {"temperature": 0.5}], ids=str)
def test_beam_sampling_by_hand(options):
    for seed in range(10):
        search = BeamSample(beams=4, seed=seed, num_return_sequences=4, **options)
        run = over(TARGET)(search, 8, (4,))
        assert [*map(tuple, run.outputs)] == by_hand(search, 8, (4,))
        assert run.result.stats["steps"] == max(map(len, run.outputs))


# --- the distribution of whole searches ---


def chi_square_holds(counts, probabilities):
    """At an error rate of 1e-4; cells that expect fewer than five are taken together."""
    total = sum(counts.values())
    assert all(probabilities.get(cell, 0) > 0 for cell in counts)
    large = {cell: p * total for cell, p in probabilities.items() if p * total >= 5}
    pairs = [(counts[cell], expected) for cell, expected in large.items()]
    pairs.append((total - sum(n for n, _ in pairs), total - sum(e for _, e in pairs)))
    if pairs[-1][1] < 5:
        (n, e), pairs = pairs[-1], pairs[:-1]
        pairs[-1] = (pairs[-1][0] + n, pairs[-1][1] + e)
    d = len(pairs) - 1
    assert d
    bound = d * (1 - 2 / (9 * d) + 3.72 * math.sqrt(2 / (9 * d))) ** 3  # Wilson-Hilferty
    return sum((n - e) ** 2 / e for n, e in pairs) < bound


SMALL, SMALL_NEAR, SMALL_FAR = table("s", 3), table("sn", 3, agree=table("s", 3)), table("sf", 3)


def unfolded(model, beams, warp):
    """Equation (1) by its letter: W x V numbers, one for each entry of the list and token, warped as one row.

    Args:
        beams: (path, entries) pairs.
    """
    entries = [path for path, n in beams for _ in range(n)]
    rows = [teacher(model, path) + model(path).double() for path in entries]
    probs = torch.softmax(warp(torch.cat(rows).unsqueeze(0))[0], 0).view(len(rows), -1)
    law = Counter()
    for path, row in zip(entries, probs.tolist(), strict=True):
        law.update({(*path, token): p for token, p in enumerate(row) if p})
    return law


def folded(model, beams, warp):
    """Another distribution, for comparison: that of beams, n times as heavy where they are n entries."""
    rows = [teacher(model, path) + math.log(n) + model(path).double() for path, n in beams]
    probs = torch.softmax(warp(torch.cat(rows).unsqueeze(0))[0], 0).view(len(rows), -1)
    return {(*path, token): p for (path, _), row in zip(beams, probs.tolist(), strict=True)
            for token, p in enumerate(row) if p}  # fmt: skip


def exact(width, max_new, eos, model=SMALL, warp=Warp(), law_of_next=unfolded, outputs=1):  # noqa: B008
    """The law of beam sampling's best outputs: all lists of draws, step by step."""
    law = Counter()

    def step(beams, done, left, probability):
        if not beams:
            ranked = sorted(done, key=lambda path: -teacher(model, path) / len(path))
            law[tuple(ranked[:outputs]) if outputs > 1 else ranked[0]] += probability
            return
        joint = law_of_next(model, beams, warp)
        for drawn in itertools.combinations_with_replacement(joint, left):
            grown = Counter(drawn)
            ways = math.factorial(left) / math.prod(map(math.factorial, grown.values()))
            over = {p: n for p, n in grown.items() if p[-1] in eos or len(p) == max_new}
            going = [(p, n) for p, n in grown.items() if p not in over]
            step(
                going,
                [*done, *over],
                left - sum(over.values()),
                probability * ways * math.prod(joint[path] for path in drawn),
            )

    step([((), 1)], [], width, 1.0)
    return law


RUNS = draws(2000)


@pytest.mark.parametrize(
    "search, draft",
    [
        (BeamSample(beams=2), SMALL_NEAR),
        (DSBD(draft_beams=3, width=2, gamma=2), SMALL_NEAR),
        (DSBD(draft_beams=2, width=2, gamma=3, drafts="iid"), SMALL_FAR),
        (DSBD(draft_beams=2, width=2, gamma=2, short="end"), SMALL_NEAR),
        (DSBD(draft_beams=2, width=2, gamma=2, drafter="ngram"), None),
    ],
    ids=lambda value: None if callable(value) else str(value),  # functions have other addresses in each process
)
def test_whole_searches_have_the_law_of_beam_sampling(search, draft):
    law, counts = exact(2, 3, (2,)), Counter()
    assert sum(law.values()) == pytest.approx(1)
    run = over(SMALL, draft, 3, pages=60)
    for seed in range(RUNS):
        [tokens] = run(replace(search, seed=seed), 3, (2,)).outputs
        counts[tuple(tokens)] += 1
    assert chi_square_holds(counts, law)


def counts_of(search, run, max_new, eos, runs=1000):
    """The results of so many runs, or of a quarter of them."""
    found = Counter()
    for seed in range(draws(runs)):
        paths = [*map(tuple, run(replace(search, seed=seed), max_new, eos).outputs)]
        found[paths[0] if getattr(search, "num_return_sequences", 1) == 1 else tuple(paths)] += 1
    return found


WARPED = [({"top_k": 4}, 3), ({"temperature": 0.6, "top_k": 4}, 3), ({"temperature": 0.5}, 2), ({"top_p": 0.6}, 3),
          ({"min_p": 0.4}, 3)]  # fmt: skip
EVEN = table("s3", 3)
EVEN_NEAR = table("s3n", 3, agree=EVEN)


@pytest.mark.full(unless=lambda options, **_: options != {"temperature": 0.5})  # the laws are near each other there
@pytest.mark.parametrize("options, max_new", WARPED, ids=str)
@pytest.mark.parametrize(
    "search, draft",
    [
        (BeamSample(beams=3, num_return_sequences=3), None),
        (DSBD(draft_beams=3, width=3, gamma=2, num_return_sequences=3), EVEN_NEAR),
        (DSBD(draft_beams=3, width=3, gamma=2, num_return_sequences=3, drafter="ngram", drafts="iid"), None),
    ],
    ids=lambda value: None if callable(value) else str(value),
)
def test_warps_act_on_entries(search, draft, options, max_new):
    """The law of a search under a warp is that of the W x V numbers; nothing else would do."""
    laws = [exact(3, max_new, (), EVEN, Warp(**options), law, 3) for law in (unfolded, folded)]
    counts = counts_of(replace(search, **options), over(EVEN, draft, 3, pages=60), max_new, ())
    assert sum(laws[0].values()) == pytest.approx(1) and chi_square_holds(counts, laws[0])
    assert not (set(counts) <= set(laws[1]) and chi_square_holds(counts, laws[1]))


@pytest.mark.parametrize("draft", [SMALL_NEAR, SMALL_FAR])
@pytest.mark.parametrize("options", [{}, {"top_p": 0.9}, {"min_p": 0.05}], ids=str)
def test_speculative_sampling_has_the_law_of_sampling(draft, options):
    warp, law, counts = Warp(**options), Counter(), Counter()
    for path in itertools.product(range(3), repeat=3):
        logp = sum(float(warp(SMALL(path[:i]).unsqueeze(0))[0, t]) for i, t in enumerate(path))
        law[path] = math.exp(logp)
    run = over(SMALL, draft, 3, pages=60)
    for seed in range(RUNS):
        [tokens] = run(Speculative(seed=seed, gamma=2, **options), 3).outputs
        counts[tuple(tokens)] += 1
    assert chi_square_holds(counts, law)


# --- what must hold of every run ---


@pytest.mark.parametrize("draft", [NEAR, FAR])
def test_temperature_zero_is_greedy(draft):
    """T = top-1: one repeated beam, whatever is drafted."""
    run = over(TARGET, draft)
    greedy = run(Greedy(), 15, (4,)).outputs
    for search in (Speculative(temperature=0), BeamSample(beams=3, temperature=0), DSBD(temperature=0, width=3),
                   DSBD(temperature=0, drafts="iid"), DSBD(top_k=1, keep=1)):  # fmt: skip
        assert run(search, 15, (4,)).outputs == greedy


def test_a_draft_that_is_the_target_is_accepted_whole():
    for gamma in (1, 3, 6):
        run = over(TARGET, TARGET)(DSBD(draft_beams=3, drafts="iid", gamma=gamma), 4 * (gamma + 1))
        told = run.result.stats
        assert len(passes(run, "target")) == told["rounds"] == 4
        assert told["layers_accepted"] == 4 * gamma and told["tokens_per_target_forward"] == gamma + 1
        assert told["acceptance_per_layer"] == [1.0] * gamma
        assert told["width_per_layer"] == [3.0] * (gamma + 1)
        assert told["rounds_per_layer"] == [4] * (gamma + 1)
    run = over(TARGET, TARGET)(Speculative(gamma=3), 16)
    assert len(passes(run, "target")) == 4 and run.result.stats["layers_accepted"] == 12


def test_a_layer_that_falls_short_may_go_on():
    """Without replacement p's favourite cannot be accepted twice, but it was drafted."""
    figures = {"end": 0.0, "go-on": 0.0}
    for short, seed in itertools.product(figures, range(5)):
        told = over(TARGET, TARGET)(DSBD(draft_beams=4, width=3, short=short, seed=seed), 60).result.stats
        figures[short] += told["tokens_per_target_forward"] / 5
        assert told["layers_accepted"] == 60 - told["rounds"]
    assert figures["end"] < 2 and figures["go-on"] > figures["end"] + 0.5


def test_figures_of_a_bad_draft():
    opposite = table("opposite", 5, agree=lambda path: -3 * TARGET(path))
    run = over(TARGET, opposite)(DSBD(draft_beams=2, width=2), 24)
    told = run.result.stats
    assert len(passes(run, "target")) == told["rounds"] and told["steps"] == 24
    assert told["layers_accepted"] == 24 - told["rounds"]
    assert told["tokens_per_target_forward"] == 24 / told["rounds"] < 2
    seen = told["rounds_per_layer"]
    assert seen[0] >= told["rounds"] - 1 and seen == sorted(seen[:-1], reverse=True) + seen[-1:]
    assert all(w in (2.0, None) for w in told["width_per_layer"]) and told["acceptance_per_layer"][0] < 0.5


def test_drafts_do_not_depend_on_what_else_runs():
    """Keyed numbers: the same run twice, and after others, is the same; another seed is not."""
    run = over(TARGET, NEAR)
    outputs = [run(DSBD(seed=s, draft_beams=3), 20).result.outputs for s in (5, 6, 5, 2**63 - 1)]
    assert outputs[0] == outputs[2] and len({tuple(o[0].token_ids) for o in outputs}) == 3


def test_the_one_beam_mode_keeps_one_path():
    run = over(TARGET, NEAR)
    assert run(DSBD(draft_beams=4, keep=1, gamma=2), 30).trees["target"].peak_live <= 3 + 30 + 2 * 4
    assert max(passes(run(DSBD(draft_beams=4, width=4, gamma=2, temperature=1.5), 30), "target")) <= 4 + 2 * 4


def test_the_one_beam_kept_is_the_most_probable_of_the_round():
    for seed in range(10):
        several, one = (
            over(TARGET, NEAR)(DSBD(draft_beams=4, width=4, seed=seed, keep=keep), 12, close_after=1).told[0].beams
            for keep in ("all", 1)
        )
        assert one == [max(several, key=lambda candidate: candidate[0])]


def test_padded_vocabularies_of_different_widths():
    wide = table("t", 5, width=9)
    narrow = table("n", 4, agree=TARGET)
    for seed in range(5):
        plain = over(TARGET, NEAR)(DSBD(seed=seed), 12).result.outputs
        padded = over(wide, table("n", 5, agree=TARGET, width=7))(DSBD(seed=seed), 12).result.outputs
        assert [(o.token_ids, o.finish_reason) for o in padded] == [(o.token_ids, o.finish_reason) for o in plain]
        # Sums over rows of another width may round otherwise.
        assert [o.logprob for o in padded] == pytest.approx([o.logprob for o in plain], abs=1e-5)
        for output in over(wide, narrow)(DSBD(seed=seed, draft_beams=3), 12).result.outputs:  # never drafts token 4
            assert output.logprob == pytest.approx(teacher(TARGET, output.token_ids), abs=1e-5)


@pytest.mark.parametrize(
    "warp", [{}, {"top_k": 3}, {"top_p": 0.7}, {"min_p": 0.2, "temperature": 2.0}, {"temperature": 0}], ids=str
)
@pytest.mark.parametrize("vocab", [5, 70])
def test_tokens_that_only_the_draft_has_are_not_drafted(vocab, warp):
    """The draft gives them most of its probability; the tokens are those with a draft that lacks them."""
    target, draft = table("t", vocab), table("n", vocab)

    def wide(path):
        return torch.log_softmax(torch.cat([draft(path), torch.full((3,), 2.0)]), -1)

    for seed, search in itertools.product(range(5), (DSBD(draft_beams=3, **warp), Speculative(**warp))):
        expected, found = (
            over(target, rows, vocab)(replace(search, seed=seed), 12).result.outputs for rows in (draft, wide)
        )
        assert [output.token_ids for output in found] == [output.token_ids for output in expected]


# --- memory, interruption ---


@pytest.mark.parametrize("search", [DSBD(draft_beams=4, width=1), Speculative(gamma=5)], ids=str)
def test_a_full_pool_costs_drafts_not_the_search(search):
    """The pool holds one path and no more: rounds that do not fit are made without drafts."""
    least, _ = search.slots(3, 12)
    output = over(TARGET, NEAR, pages=least)(search, 12).result.outputs[0]
    assert len(output.token_ids) == 12
    assert output.logprob == pytest.approx(teacher(TARGET, output.token_ids), abs=1e-5)


IN_LITTLE_ROOM = [
    (DSBD(draft_beams=2, gamma=1, width=1), 2, (4, 5)),
    (DSBD(draft_beams=2, gamma=2, width=1), 3, (5, 6)),
    (DSBD(draft_beams=3, gamma=2, width=1, drafts="iid"), 3, (5,)),
    (DSBD(draft_beams=2, gamma=2, width=1, drafter="ngram"), 3, (6,)),
]


@pytest.mark.parametrize("search, max_new, pages", IN_LITTLE_ROOM, ids=str)
def test_what_is_drawn_does_not_depend_on_room(search, max_new, pages):
    """Pools that hold some forests and not others: to leave out those that do not fit would be a selection.

    A right implementation under fresh seeds fails each of these comparisons with a probability of 1e-4.
    """
    law = exact(1, max_new, (2,), EVEN)
    for n in pages:
        assert chi_square_holds(counts_of(search, over(EVEN, EVEN_NEAR, 3, pages=n), max_new, (2,), 1500), law)


@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize("drafts", ["iid", "without-replacement"])
def test_layers_are_counted_before_anything_is_drawn(drafts, page_size):
    """There are as many as fit if all drafts differ, whatever is drawn; so each round fits."""
    for pages in range(3 // page_size + 1, 20 // page_size):
        counted = 3 if page_size == 1 else 4  # slots of the prompt's pages
        expected = min(3, (pages * page_size - counted) // 4)
        for seed in range(6):
            run = over(TARGET, FAR, pages=pages, page_size=page_size)
            search = DSBD(draft_beams=4, gamma=3, width=1, seed=seed, drafts=drafts)
            first = run(search, 6, (0,), close_after=1)  # without drafts that end, the draft is asked once a layer
            asked = len(passes(first, "draft"))
            assert asked == expected or first.trees["draft"].peak_live < 3 + 4 * (expected - 1)
            assert asked <= expected and not first.full
            if pages * page_size >= 8 + 2 * (page_size - 1):  # the path of six tokens, trunk and branches in own pages
                assert run(search, 6, (0,)).result.outputs[0].finish_reason in ("eos", "length")


def test_beams_that_do_not_fit_are_an_error():
    with pytest.raises(KVMemoryError):
        over(TARGET, NEAR, pages=8)(DSBD(draft_beams=4, width=4, temperature=2.0), 20)
    with pytest.raises(KVMemoryError):
        over(TARGET, NEAR, pages=8)(BeamSample(beams=4), 20)


@pytest.mark.parametrize("after", [1, 2, 3])
def test_interrupted(after):
    assert over(TARGET, NEAR)(DSBD(), 20, close_after=after).result is None  # `drive` checks the pools


def test_slots():
    assert BeamSample(beams=3).slots(10, 5) == (14, 22)
    assert DSBD(draft_beams=4, gamma=2).slots(10, 5) == (14, 34)
    assert Speculative(gamma=3).slots(10, 5) == (14, 17)
    for search in SEARCHES:
        assert over(TARGET, FAR)(search, 15).trees["target"].peak_live <= search.slots(3, 15)[1]


# --- configuration ---


def test_configurations_are_checked():
    wrong = {
        "draft_beams": [0, True, 1.5, 257],
        "gamma": [0, 65, "3"],
        "width": [-1, None],
        "min_width": [0],
        "bonus_width": [-1],
        "threshold": [-0.1, 1.1, "x", math.nan, True],
        "drafts": ["with", "distinct", None, 1],
        "short": ["stop", None, True],
        "drafter": ["backoff", None],
        "store": ["a file", 3],
        "keep": [2, 0, True, 1.0, "one", None],
        "seed": [-1, 2**64],
        "top_p": [0],
        "length_penalty": [21, "1", math.nan],
        "num_return_sequences": [0, 5],
    }
    for name, value in [(name, value) for name, values in wrong.items() for value in values]:
        with pytest.raises(UsageError, match=f"{name}: expected"):
            DSBD(**{name: value})
    for name, value in (
        ("beams", 0),
        ("num_return_sequences", 5),
        ("seed", -1),
        ("top_k", -1),
        ("length_penalty", None),
    ):
        with pytest.raises(UsageError, match=f"{name}: expected"):
            BeamSample(**{name: value})
    for name, value in (("gamma", 0), ("temperature", -1), ("seed", -1)):
        with pytest.raises(UsageError, match=f"{name}: expected"):
            Speculative(**{name: value})


def test_ngrams_are_a_draft(tmp_path):
    """Text that repeats itself is drafted from what has been said; no draft model is needed."""
    target = table("loop", 5, agree=lambda path: 12.0 * torch.nn.functional.one_hot(torch.tensor(len(path) % 4), 5))
    run = over(target, pages=600)(DSBD(draft_beams=2, drafter="ngram", drafts="iid"), 80)
    assert set(run.trees) == {"target"} and DSBD(drafter="ngram").models == ()
    assert run.result.stats["tokens_per_target_forward"] > 2 and run.result.stats["layers_accepted"] > 30
    with pytest.raises(UsageError, match="n-gram store"):
        DSBD(drafter="ngram", store=str(tmp_path / "absent"))


def test_made_by_name():
    params = {"dsbd_draft_beams": 5, "dsbd_keep": 1, "dsbd_drafts": "iid", "top_k": 10}
    assert make_search("dsbd", params) == DSBD(draft_beams=5, keep=1, drafts="iid", top_k=10)
    assert make_search("speculative", {"speculative_gamma": 2}) == Speculative(gamma=2)
    assert make_search("beam-sample", {"beams": 3}) == BeamSample(beams=3)
    assert DSBD().models == Speculative().models == ("draft",)
