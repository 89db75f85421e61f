"""Drafters and the size of drafts: what is counted, what is guessed, when guessing pays; each request on its own."""

import functools
import itertools
import math
import random
from collections import Counter

import pytest
import torch

from engine.cache.pool import PagePool
from engine.cache.tree import TokenTree
from engine.contract import Task
from engine.drafts import Draft
from engine.drafts.backoff import Backoff
from engine.drafts.size import DraftSize
from engine.errors import UsageError
from search import ADED
from search.aded.drafters import MCTS
from search.aded.ngrams import BITS, count, merge, open_store, write_store
from search.base import likely, likely_tokens
from tests.search.drive import SHAPE, drive

TEXT = [1, 2, 3, 1, 2, 4, 1, 2, 3, 5, 2, 3, 1, 2, 3]


@pytest.fixture(scope="module")
def corpus():
    rng, text = random.Random(3), [0]
    for _ in range(4000):  # a language in which some things follow others
        text.append((text[-1] * 3 + rng.choice([0, 0, 0, 1, 7, rng.randrange(40)])) % 40)
    return text


@pytest.fixture(scope="module")
def store(corpus, tmp_path_factory):
    path = tmp_path_factory.mktemp("store") / "s"
    write_store(path, merge([count(corpus)]), 40, "")
    return open_store(path)


def observe(drafter, told):
    """Tell a drafter log-probabilities after nodes of its last draft."""
    drafter.observe([*told], [*told.values()])


def check(draft, nodes, depth):
    """A draft is a tree, parents first and never less likely, at most so large and so deep."""
    assert len(draft.tokens) == len(draft.parents) == len(draft.scores) <= nodes
    level = {-1: 0}
    for i, parent in enumerate(draft.parents):
        assert parent < i
        level[i] = level[parent] + 1
        assert 0 < draft.scores[i] <= (draft.scores[parent] if parent >= 0 else 1)
    assert max(level.values()) <= depth
    assert draft.scores == sorted(draft.scores, reverse=True)
    edges = list(zip(draft.parents, draft.tokens, strict=True))
    assert len(edges) == len(set(edges))


@pytest.mark.parametrize("make", [Backoff, MCTS])
@pytest.mark.parametrize("adapt", [True, False])
def test_drafts_are_trees_and_the_same_every_time(make, adapt, corpus, store):
    before = store.keys.tolist(), store.counts.tolist()
    told = []
    for _ in range(2):
        drafter, rng, drafts = make(store, adapt), random.Random(1), []
        drafter.learn(corpus[:50])
        for at in range(50, 90):
            nodes, depth = rng.choice([(1, 1), (24, 3), (64, 9)])
            drafts.append(drafter.draft(nodes, depth))
            check(drafts[-1], nodes, depth)
            observe(drafter, {node: {7: -0.5, 9: -1.6} for node in range(-1, len(drafts[-1].tokens), 3)})
            drafter.learn(corpus[at : at + 1])
            chances = drafter.distribution([7, 1])
            assert sum(chances.values()) == pytest.approx(1) or not chances
        told.append(drafts)
    assert told[0] == told[1] and any(draft.tokens for draft in told[0])
    assert (store.keys.tolist(), store.counts.tolist()) == before  # what a request learns is its own


@pytest.mark.parametrize("make", [Backoff, MCTS])
def test_nothing_known_nothing_drafted(make):
    assert make().draft(24, 4) == Draft() and make().distribution() == {}
    drafter = make(adapt=False)
    drafter.learn(TEXT)
    assert drafter.draft(24, 4) == Draft()
    drafter = make()
    drafter.learn([5])
    assert drafter.draft(24, 4) == Draft()


def test_backoff_counts_every_gram_once_and_tries_the_longest_first():
    drafter = Backoff()
    drafter.learn(TEXT)
    d = Backoff.DOUBT
    # Followed 1 2 3 so far: 1 once, 5 once; 2 3 and 3: 1 twice, 5 once.
    share4, share3 = 1 / (2 + 3 * d), (1 - 2 / (2 + 3 * d)) / (3 + 3 * d)
    share2 = (1 - 2 * share4 - 3 * share3) / (3 + 3 * d)
    chances = drafter._mix(drafter.context)
    assert chances == pytest.approx({1: share4 + 2 * share3 + 2 * share2, 5: share4 + share3 + share2})
    draft = drafter.draft(2, 3)
    assert draft.tokens == [1, 2] and draft.parents == [-1, 0]  # the likeliest path
    assert drafter.distribution([1, 2])[3] > drafter.distribution([1, 2])[4]


def test_of_contexts_of_equal_length_the_text_comes_before_the_store(tmp_path):
    write_store(tmp_path / "s", merge([count([1, 2, 3] * 20)]), 40, "")
    drafter = Backoff(open_store(tmp_path / "s"))
    drafter.learn([9, 2, 8, 1, 2])
    d = Backoff.DOUBT
    # After 1 2 the store knows 3, 20 times; after 2 the text knows 8, once, and the store 3, as 19 tri-grams begin so.
    pair, text, single = 20 / (20 + 2 * d), 1 / (1 + 2 * d), 19 / (19 + 2 * d)
    expected = {3: pair + (1 - pair) * (1 - text) * single, 8: (1 - pair) * text}
    total = sum(expected.values())
    assert drafter.distribution() == pytest.approx({token: p / total for token, p in expected.items()})
    drafter.learn([8, 1, 2])  # now the text has something to say of 1 2, and it comes first
    assert drafter.distribution()[8] > drafter.distribution()[3]


def test_backoff_learns_from_what_the_model_thinks():
    drafter = Backoff()
    drafter.learn([1, 2, 3])
    assert drafter.draft(4, 4) == Draft()
    observe(drafter, {-1: {8: math.log(0.6), 9: math.log(0.3)}})
    drafter.learn([9])
    drafter.learn([1, 2, 3])
    draft = drafter.draft(9, 1)
    assert draft.tokens[:2] == [9, 8]


def test_the_matrix_is_eq_1_then_strengthened(corpus, store):
    drafter = MCTS(store, window=3)
    pairs, triples = (
        Counter(itertools.pairwise(corpus[:-1])),
        Counter(zip(corpus, corpus[1:], corpus[2:], strict=False)),
    )
    for (a, b), n in list(pairs.items())[:200]:
        expected = sorted(((-m / n, c) for (x, y, c), m in triples.items() if (x, y) == (a, b)))[:12]
        assert drafter._row(a, b) == [(c, pytest.approx(-p)) for p, c in expected]
    a, b, c = corpus[:3]
    p = dict(drafter._row(a, b))[c]
    for _ in range(2):
        drafter.learn([a, b, c])
    assert dict(drafter._row(a, b))[c] == pytest.approx(p + 0.08)
    for _ in range(100):
        drafter.learn([a, b, c])
    assert dict(drafter._row(a, b))[c] == 3.0
    assert dict(MCTS(store)._row(a, b))[c] == p


@pytest.mark.parametrize("options", [{"increment": 0}, {"cap": 0}], ids=str)
def test_mcts_drafts_nothing_without_weight(options):
    drafter = MCTS(**options)
    drafter.learn([1, 2, 3, 1, 2, 3, 1, 2])
    assert drafter.draft(8, 4).tokens == [] and drafter.distribution() == {}


def test_mcts_visits_what_is_likely_and_cuts_at_64(store, corpus):
    drafter = MCTS(store, candidates=64, iterations=600)
    drafter.learn(corpus[:40])
    draft = drafter.draft(1000, 4)
    assert len(draft.tokens) == 64
    likely = [token for token, _ in drafter._row(*corpus[38:40])]
    first = [token for token, parent in zip(draft.tokens, draft.parents, strict=True) if parent < 0]
    assert first[0] == likely[0] and set(first) <= set(likely)
    drafter = MCTS(candidates=1)
    drafter.learn([1, 2, 3, 4, 5, 1, 2, 3, 4, 5, 1, 2])
    draft = drafter.draft(8, 4)
    assert (draft.tokens, draft.parents) == ([3, 4], [-1, 0])  # the candidate, and its likeliest successor (A4)
    assert drafter.draft(8, 1).tokens == [3]


def test_likely():
    generator = torch.Generator().manual_seed(0)
    for V in (5, 100, 128, 300, 1000, 4096, 5003):
        logits_NV = torch.randn(9, V, generator=generator) * 5
        logits_NV[3, 2:], logits_NV[4], logits_NV[5, ::3] = -torch.inf, 0, logits_NV[5].max()  # ties
        logits_NV[6], logits_NV[6, -4:] = -20, 0
        logp_NV = torch.log_softmax(logits_NV, -1)
        for least in (1e-6, 0.012, 0.13, 0.2, 0.9):
            bound = torch.tensor(math.log(least)).item()
            for row, tokens in zip(logp_NV.tolist(), likely_tokens(likely(logp_NV, least), 9), strict=True):
                assert list(tokens.items()) == [(t, logp) for t, logp in enumerate(row) if logp >= bound]


def test_the_likeliest_nodes_are_drafted(corpus, store):
    """However few are asked for, they are the first of a draft that left nothing out."""
    drafter = Backoff(store)
    for at in range(60, 110):
        drafter.learn(corpus[at - 60 if at == 60 else at - 1 : at])
        draft = drafter.draft(40, 5)
        expected, paths = {(): 1.0}, [()]
        for path in paths:  # every path above the least of those drafted
            for token, p in drafter._mix(functools.reduce(joined, path, drafter.context)).items():
                if len(path) < 5 and expected[path] * p >= draft.scores[-1]:
                    expected[*path, token] = expected[path] * p
                    paths.append((*path, token))
        best = sorted(expected.values(), reverse=True)[1 : 1 + len(draft.scores)]
        assert draft.scores == pytest.approx(best)
        assert drafter.draft(7, 5).scores == draft.scores[:7]


def joined(context, token):
    """The context one token on."""
    return (context << BITS | token + 1) & Backoff.ORDERS[0]


# --- how much of a draft ---


def play(truth, right, cost, host=0.0, steps=400):
    """Seconds per token, where plain decoding takes 1, of a text whose guesses come true with a chance of their own."""
    rng, size = random.Random(0), DraftSize(lambda tokens: 1 + cost * (tokens - 1))
    seconds, tokens, nodes = 0.0, 0, 0
    for _ in range(steps):
        draft = Draft()
        if wanted := size.wanted():
            draft = Draft([1] * wanted, list(range(-1, wanted - 1)), [truth ** (i + 1) for i in range(wanted)])
        n = size.choose(draft) if wanted else 0
        came = 0
        while rng.random() < right:
            came += 1
        path = [1] * min(came, n) + [1 if came > n else 2]
        took = host * len(draft.tokens)
        seconds += 1 + cost * n + took
        tokens += len(path)
        nodes += n
        if wanted:
            size.learn(draft, path)
            size.settle(took, n, len(path))
        else:
            size.plain(0.0)
    return seconds / tokens, nodes / steps


@pytest.mark.parametrize("claim", [0.9, 0.5, 0.2])
@pytest.mark.parametrize("cost", [0.02, 0.1, 1.0])
@pytest.mark.parametrize("host", [0.0, 0.02])
def test_drafts_that_never_come_true_cost_less_than_5_percent(claim, cost, host):
    for steps in (100, 400, 2000):
        assert play(claim, 0.0, cost, host, steps)[0] < 1.05


def replay(text, store, size, cost, host=0.02):
    """Seconds in which a text is decoded where a pass takes 1, and `cost` more for each node."""
    drafter, seconds, done = Backoff(store), 0.0, 0
    while done < len(text):
        reach = len(text) - done - 1
        wanted = size.wanted() if reach else 0
        draft = drafter.draft(wanted, reach) if wanted else Draft()
        n = size.choose(draft)
        at = {edge: i for i, edge in enumerate(zip(draft.parents[:n], draft.tokens, strict=False))}
        node, came = -1, 0
        while (node, text[done + came]) in at and came < reach:
            node, came = at[node, text[done + came]], came + 1
        fresh = text[done : done + came + 1]
        drafter.learn(fresh)
        if wanted:
            size.learn(draft, fresh)
            size.settle(host, n, len(fresh))
        else:
            size.plain(0.0)
        seconds, done = seconds + 1 + cost * n + (host if wanted else 0.0), done + len(fresh)
    return seconds


@pytest.mark.parametrize("cost", [0.01, 0.03, 0.1])
@pytest.mark.parametrize("counted", [True, False])
def test_the_size_is_about_as_good_as_the_best_fixed_one(cost, counted, corpus, store):
    """On texts of a hundred tokens, which leave little time to find out."""
    known = store if counted else None
    texts = [corpus[at : at + 100] for at in range(1000, 3000, 200)]
    fixed = [sum(replay(text, known, DraftSize(None, n), cost) for text in texts) for n in (0, 2, 4, 8, 16, 32)]
    own = sum(replay(text, known, DraftSize(lambda tokens: 1 + cost * (tokens - 1)), cost) for text in texts)
    assert own < 1.1 * min(fixed)


def test_drafts_that_come_true_pay():
    assert play(0.9, 0.9, 0.02)[0] < 0.25 and play(0.5, 0.9, 0.02)[0] < 0.25  # too shy, found out
    assert play(0.9, 0.5, 0.02)[0] < 0.62
    assert play(0.9, 0.5, 2.0)[1] < 0.1  # never worth it
    wide, narrow = play(0.8, 0.8, 0.01)[1], play(0.8, 0.8, 0.2)[1]
    assert wide > 2 * narrow > 0


def test_what_drafts_saved_covers_some_misses_in_a_row_but_no_more():
    size, draft = DraftSize(lambda tokens: 1 + 0.02 * (tokens - 1)), Draft([1] * 8, [*range(-1, 7)], [0.9] * 8)
    for _ in range(30):
        assert size.wanted()
        size.settle(0.02, size.choose(draft), 4)
    for _ in range(5):
        assert size.wanted()
        size.settle(0.02, 63, 1)
    steps = 0
    while size.wanted():  # the text has changed for good, and the search insists
        size.settle(0.02, 63, 1)
        steps += 1
    assert 5 < steps < 30


def test_without_a_clock_everything_is_evaluated():
    size = DraftSize(None, 24)
    draft = Draft([1] * 24, [-1] * 24, [0.01] * 24)
    for _ in range(50):
        assert size.wanted() == 24 and size.choose(draft) == 24
        size.learn(draft, [2])
        size.settle(1.0, 24, 1)


# --- the search with its own drafters ---


def decode(configuration, text, tokenizer=None):
    """Greedy decoding of a model that recites `text`."""

    def row(path):
        row_V = torch.full((40,), -torch.inf)
        row_V[text[2 + len(path)]] = 0.0
        return row_V

    options = {"prompt": text[:2], "tokenizer": tokenizer, "seconds": lambda tokens: 1.0}
    return drive(configuration, row, 60, **options)


def test_reports_stay_as_they_were_told(corpus, store, monkeypatch):
    turns = iter(range(1000))
    monkeypatch.setattr(DraftSize, "wanted", lambda self: 24 * (next(turns) % 2))  # with a draft and without, in turn
    text = corpus[2000:2100]
    reports = [one.report for one in decode(ADED(store=store.path), text).told]
    assert [token for report in reports for token in report.settled] == text[2:62]
    told = [1 + report.info["accepted"] for report in reports]
    assert [len(report.settled) for report in reports] == told and max(told) > 1


@pytest.mark.parametrize("drafter", ["backoff", "mcts"])
def test_a_store_saves_passes_and_requests_do_not_feel_each_other(drafter, corpus, store):
    text = corpus[2000:2100]
    names = ("steps", "accept_length", "accepted_by_depth", "draft_nodes")
    runs = [decode(ADED(drafter=drafter, store=store.path, nodes=24), text) for _ in range(2)]
    other = decode(ADED(drafter=drafter, nodes=24), text)
    again = decode(ADED(drafter=drafter, store=store.path, nodes=24), text)
    assert all(run.outputs == [text[2:62]] for run in (*runs, other, again))
    seen = [[run.result.stats[name] for name in names] for run in (*runs, again)]
    assert seen[0] == seen[1] == seen[2]
    stats = runs[0].result.stats
    assert stats["accept_length"] > other.result.stats["accept_length"]
    assert stats["draft_ms"] > 0 and stats["verify_ms"] > 0


def test_answers_are_saved_and_used(corpus, tmp_path):
    text, path = corpus[100:200], tmp_path / "learnt"
    both = ADED(store=path, save=path, nodes=24)  # nothing there yet: starts empty
    first = decode(both, text)
    assert open_store(path).run()[0].tolist() == count(text[:62])[0].tolist()
    second = decode(both, text)
    assert second.result.stats["steps"] < first.result.stats["steps"]
    assert sum(open_store(path).counts) == 2 * 60
    with pytest.raises(UsageError, match="another model's tokenizer"):

        class Other:
            fingerprint = "ab" * 32

        decode(both, text, Other())
    with pytest.raises(UsageError, match="cannot be read"):
        ADED(store=tmp_path / "absent")
    assert ADED(store=str(tmp_path / "new"), save=tmp_path / "new")
    with pytest.raises(UsageError, match="save: expected a file in a folder"):
        ADED(save=tmp_path / "absent" / "learnt")
    path.write_bytes(path.read_bytes()[:-1])
    steps = ADED(save=path).run(Task(TokenTree(PagePool(SHAPE, 9, 1), [1, 2]), 5, frozenset(), 40))
    with pytest.raises(UsageError, match="damaged"):  # before anything is evaluated
        next(steps)
