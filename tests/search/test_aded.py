"""ADED: whatever is drafted, the tokens are those of plain decoding; and drafts that are right save passes.

Drafts are forced through a drafter of the test's own. Tables stand in for models; the golden checkpoints of every
family are next to last, and the distribution, counted, last.
"""

import functools
import json
import math
import random
from collections import Counter
from pathlib import Path

import pytest
import torch

from engine import Engine, Request
from engine.cache.pool import PagePool
from engine.cache.tree import TokenTree
from engine.contract import Task
from engine.contract.sampling import Warp
from engine.drafts import Draft
from engine.errors import KVMemoryError, UsageError
from search import ADED, Greedy, Sample
from search.picks import Picks
from tests.draws import draws
from tests.engine.contract.test_sampling import gumbels
from tests.search.drive import SHAPE, drive
from tools.bench.searches import run_alone

V, PROMPT = 8, [1, 2, 3]
WARPS = [None, {"seed": 4}, {"temperature": 0.5}, {"top_k": 3, "seed": 9}, {"top_p": 0.6, "seed": 1}, {"min_p": 0.3},
         {"typical_p": 0.6, "seed": 2}, {"top_n_sigma": 1.0}, {"epsilon_cutoff": 0.1},
         {"xtc_probability": 0.6, "xtc_threshold": 0.15, "seed": 3}]  # fmt: skip


def table(path):
    """A toy model of eight tokens, ties included, in which the token 0 is the likeliest as often as not."""
    return row_after(tuple(path))


@functools.cache
def row_after(path):
    generator = torch.Generator().manual_seed(hash(path) % 2**31)
    logits = torch.randn(V, generator=generator).mul(2).round()
    logits[0] = max(0.0, float(logits.max())) if len(path) % 2 else logits[0]
    return torch.log_softmax(logits, -1)


class Forced:
    """Drafts what a function of the text says; remembers what it was told."""

    curiosity = 0.05

    def __init__(self, guess):
        self.guess, self.text, self.told = guess, [], []

    def learn(self, tokens):
        self.text += tokens

    def draft(self, nodes, depth):
        draft = self.guess(self.text[len(PROMPT) :])
        return Draft(draft.tokens[:nodes], draft.parents[:nodes], draft.scores[:nodes])

    def observe(self, nodes, told):
        self.told += zip(nodes, told, strict=True)

    def distribution(self, ahead=()):
        return {}


def chains(*paths):
    """A draft of paths side by side, shared beginnings and all: nodes may be there twice."""
    draft = Draft()
    for path in paths:
        for i, token in enumerate(path):
            draft.parents.append(len(draft.tokens) - 1 if i else -1)
            draft.tokens.append(token)
            draft.scores.append(0.5**i)
    return draft


def run(configuration, max_new=25, eos=(), row_of=table, **options):
    """The search over a table; checks on the way. Gives the output, the stats, what was evaluated at each step."""
    done = drive(configuration, row_of, max_new, eos, prompt=PROMPT, **options)
    [output] = done.result.outputs
    assert done.settled == output.token_ids
    assert all(max(map(len, paths)) < max_new for paths in done.paths)
    steps = [[list(path[len(paths[0]) :]) for path in paths] for paths in done.paths]
    return output, done.result.stats, steps


def plain(warp, **options):
    return run(Greedy() if warp is None else Sample(**warp), **options)[0]


def drafting(guess, warp=None, nodes=64):
    return ADED(drafter=lambda: Forced(guess), nodes=nodes, **warp or {})


@pytest.mark.parametrize("warp", WARPS, ids=str)
@pytest.mark.parametrize("eos", [(), (5,), (0, 3)])
def test_no_draft_changes_the_output(warp, eos):
    truth = plain(warp, eos=eos)
    long = plain(warp, max_new=60).token_ids  # how it would go on past the end
    rng = random.Random(0)

    def noise(done):
        draft = Draft()
        for i in range(rng.randrange(20)):
            draft.parents.append(rng.randrange(-1, i))
            draft.tokens.append(rng.randrange(V))
            draft.scores.append(0.1)
        return draft

    guesses = {
        "empty": lambda done: Draft(),
        "wrong": lambda done: chains([(long[len(done)] + 1) % V, 4, 4]),
        "right": lambda done: chains(long[len(done) : len(done) + 5]),
        "right but the last": lambda done: chains([*long[len(done) : len(done) + 3], (long[len(done) + 3] + 1) % V]),
        "past the limit": lambda done: chains(long[len(done) : len(done) + 35]),
        "twice": lambda done: chains(*[long[len(done) : len(done) + 3]] * 3, [7], [7, 7]),
        "eos inside": lambda done: chains(*[[token, 1, 2] for token in eos], [*long[len(done) : len(done) + 2], *eos]),
        "everything": lambda done: chains(*[[a, b] for a in range(V) for b in range(V)]),
        "noise": noise,
    }
    for name, guess in guesses.items():
        output, stats, steps = run(drafting(guess, warp), eos=eos)
        assert (output.token_ids, output.finish_reason) == (truth.token_ids, truth.finish_reason), name
        assert output.logprob == output.score == pytest.approx(truth.logprob, abs=1e-5), name
        assert stats["steps"] == len(steps) and stats["draft_nodes"] == sum(len(paths) - 1 for paths in steps)
        assert stats["accept_length"] == len(output.token_ids) / len(steps) >= 1
        assert sum(stats["accepted_by_depth"]) == len(output.token_ids) - len(steps)
        drafted = {token for paths in steps for path in paths for token in path}
        assert not drafted & set(eos), name  # nothing can follow those
        if name in ("empty", "wrong"):
            assert stats["accept_length"] == 1


@pytest.mark.parametrize("warp", WARPS, ids=str)
@pytest.mark.parametrize("depth", [1, 2, 4, 7])
def test_a_right_chain_gives_a_token_more_than_its_depth(warp, depth):
    truth = plain(warp, max_new=8 * (depth + 1)).token_ids
    right = drafting(lambda done: chains(truth[len(done) : len(done) + depth]), warp)
    output, stats, steps = run(right, max_new=len(truth))
    assert output.token_ids == truth and stats["steps"] == 8 and stats["accepted_by_depth"] == [8] * depth
    assert all(len(paths) == depth + 1 for paths in steps)


def test_the_limit_a_stop_string_and_one_token():
    truth = plain(None, max_new=60).token_ids
    right = drafting(lambda done: chains(truth[len(done) : len(done) + 6]))
    for limit in range(1, 16):
        output, *_ = run(right, max_new=limit)
        assert output.token_ids == truth[:limit] and output.finish_reason == "length"
    for end in range(1, 16):
        output, *_ = run(right, stops=lambda tokens, end=end: len(tokens) >= end)
        assert output.token_ids == truth[:end] and output.finish_reason == "stop"


def test_a_full_pool_costs_the_draft_not_the_answer():
    truth = plain(None)
    wide = drafting(lambda done: chains(*[[a, b] for a in range(V) for b in range(V)]))
    room = len(PROMPT) + 25 - 1
    output, stats, _ = run(wide, pages=room)
    assert output.token_ids == truth.token_ids and stats["accept_length"] == 1
    assert wide.slots(len(PROMPT), 25) == (room, room + 64)
    with pytest.raises(KVMemoryError):
        run(wide, pages=len(PROMPT) + 5)


def test_a_draft_does_not_cross_the_switch_length():
    truth = plain(None).token_ids
    right = drafting(lambda done: chains(truth[len(done) : len(done) + 6]))
    output, _, steps = run(right, switch=10)
    assert output.token_ids == truth
    at = len(PROMPT) - 1
    for paths in steps:
        longest = max(map(len, paths))
        assert (at < 10) == (at + longest < 10)
        at += longest + 1


def test_what_a_drafter_is_told():
    """The prompt, the text, and after each evaluated node what the model holds for likely."""
    truth = plain(None).token_ids
    made = []

    def make():
        made.append(Forced(lambda done: chains(truth[len(done) : len(done) + 2], [7])))
        return made[-1]

    run(ADED(drafter=make, nodes=8), max_new=6)
    run(ADED(drafter=make, nodes=8), max_new=6)  # every request has its own
    first, second = made
    assert first.text == second.text == PROMPT + truth[:3]
    assert [node for node, _ in first.told[:4]] == [-1, 0, 1, 2]
    for (_, logps), path in zip(first.told, [[], truth[:1], truth[:2], [7]], strict=False):
        assert logps == {token: logp for token, logp in enumerate(table(path).tolist()) if math.exp(logp) > 0.05}


def test_biases_may_make_more_tokens_likely_than_are_read():
    rows = lambda path: torch.arange(32) / 32  # noqa: E731  # a row that adds up to 1 has at most 20 tokens of 0.05
    output, stats, _ = run(drafting(lambda done: chains([31, 31, 31])), row_of=rows, normalised=False)
    assert output == run(Greedy(), row_of=rows, normalised=False)[0] and output.token_ids == [31] * 25
    assert stats["steps"] < 25


def test_greedy_unless_anything_of_sampling_is_given():
    for given in ({"temperature": 1.0}, {"seed": 0}, {"top_k": 0}, {"top_p": 1.0}):
        assert run(ADED(**given))[0].token_ids == plain({}).token_ids
    assert run(ADED())[0].token_ids == run(ADED(temperature=0, seed=3))[0].token_ids == plain(None).token_ids


@pytest.mark.parametrize(
    "wrong",
    [{"drafter": "x"}, {"nodes": -1}, {"nodes": "many"}, {"nodes": True}, {"adapt": 1}, {"iterations": 0}, {"cap": -1},
     {"temperature": -1}, {"top_k": 1.5}, {"seed": -1}, {"seed": 1.0}, {"c2": 0}, {"store": 3}, {"c1": math.nan}],
    ids=str,
)  # fmt: skip
def test_configurations_are_checked(wrong):
    with pytest.raises(UsageError, match=f"{next(iter(wrong))}: expected"):
        ADED(**wrong)


# --- models ---

GOLDEN = Path(__file__).parent.parent / "golden"


class Unsteady(Forced):
    """Drafts a request's true continuation with errors in it, and false ends beside it."""

    def __init__(self, prompt, truth, seed):
        rng = random.Random(seed)

        def guess(done):
            path = [token if rng.random() < 0.8 else rng.randrange(100) for token in truth[len(done) :][:6]]
            return chains(path, [*path[:2], rng.randrange(100), 0], [0, 0])

        super().__init__(guess)
        self.skip = len(prompt)

    def draft(self, nodes, depth):
        return self.guess(self.text[self.skip :])


@pytest.mark.parametrize("variant", ["llama/gqa", "opt/plain", "gpt2/plain", "phi/partial", "phi3/longrope"])
def test_equal_to_plain_decoding_on_every_family(variant):
    """Over 200 prompts each: greedy, and every warper; ends of sequence among the common tokens."""
    engine = Engine.load(GOLDEN / variant, dtype="float32", parallel=32)
    vocabulary = json.loads((GOLDEN / variant / "config.json").read_text())["vocab_size"]
    rng = random.Random(variant)
    prompts = [[rng.randrange(vocabulary) for _ in range(rng.randrange(1, 12))] for _ in range(204)]
    warps = [None, None, {"seed": 4}, {"temperature": 0.5, "seed": 1}, {"top_k": 5}, {"top_p": 0.8, "seed": 7}]
    plain = [Greedy() if (w := warps[i % 6]) is None else Sample(**w) for i in range(len(prompts))]
    options = {"max_new_tokens": 14, "ignore_eos": True}

    def serve(searches, **options):
        requests = [Request(p, s, **options) for p, s in zip(prompts, searches, strict=True)]
        results = dict(engine.serve(requests))
        return [results[i] for i in range(len(prompts))]

    free = [result.outputs[0].token_ids for result in serve(plain, **options)]
    late = Counter(token for path in free for token in set(path[5:]) - set(path[:5]))
    common = [token for token, _ in late.most_common(2)]
    options = {"max_new_tokens": 14, "eos_token_ids": common}

    def cut(path):
        return path[: next((i + 1 for i, token in enumerate(path) if token in common), len(path))]

    drafted = [
        ADED(drafter=lambda p=p, t=t, i=i: Unsteady(p, t, i), nodes=24, **(warps[i % 6] or {}))
        for i, (p, t) in enumerate(zip(prompts, free, strict=True))
    ]
    results = serve(drafted, **options)
    assert [result.outputs[0].token_ids for result in results] == [cut(path) for path in free]
    assert any(r.outputs[0].finish_reason == "eos" and len(r.outputs[0].token_ids) > 5 for r in results)
    passes = sum(result.stats["steps"] for result in results)
    assert passes < 0.6 * sum(len(cut(path)) for path in free)  # drafts were really accepted
    own = [ADED(drafter=("backoff", "mcts")[i % 2], iterations=20, **(warps[i % 6] or {})) for i in range(len(prompts))]
    assert [r.outputs[0].token_ids for r in serve(own, **options)] == [cut(path) for path in free]
    assert engine.pool.used_pages == 0


# --- the distribution ---


def test_the_distribution_of_three_tokens(monkeypatch):
    """1e5 runs over a vocabulary of four against the exact joint distribution, p > 1e-4.

    The draft is the trap that REST falls into: several paths with the same first token, each of which would draw for
    itself. Noise is drawn for all runs at once; that it is the noise of `sample` is the other tests' business.
    """
    runs, v, options = draws(100_000), 4, {"temperature": 0.7, "top_k": 3}
    first, *later = [[0.5, 0.2, 0.2, 0.1], [0.3, 0.3, 0.2, 0.2], [0.1, 0.6, 0.1, 0.2], [0.25] * 4, [0.7, 0.1, 0.1, 0.1]]
    logp = {last: torch.log(torch.tensor(row)) for last, row in [((), first), *enumerate(later)]}
    warped = {last: Warp(**options)(row.unsqueeze(0))[0].double().exp().tolist() for last, row in logp.items()}
    drawn = {}  # (row, position) -> the token of every run
    for row in logp.values():
        for position in range(len(PROMPT), len(PROMPT) + 3):
            noise_RV = gumbels(0, range(runs), [position] * runs, v)
            drawn[id(row), position] = (Warp(**options)(row.unsqueeze(0)) + noise_RV).argmax(-1).tolist()
    monkeypatch.setattr(Picks, "token", lambda self, row, position: drawn[id(self._logp_NV[row]), position][self.seed])
    draft = chains([0, 1], [0, 2], [0, 3], [1, 1], [2])
    counts = Counter()

    class Quick(Forced):
        curiosity = 1.0

    class Rows(list):
        """Rows by place, as a tensor has them."""

        def __getitem__(self, place):
            row, token = place if isinstance(place, tuple) else (place, None)
            found = super().__getitem__(row)
            return found if token is None else rows_of[id(found)][token]

    rows_of = {id(row): row.tolist() for row in logp.values()}
    pool = PagePool(SHAPE, 40, 1)
    for seed in range(runs):
        tree = TokenTree(pool, PROMPT)
        search = ADED(seed=seed, drafter=lambda: Quick(lambda done: draft), nodes=9, **options)

        def answered(request, tree=tree):
            return Rows(logp[path[-1] if (path := tree.path(n)) else ()] for n in request.nodes), None

        _, result = run_alone(search, Task(tree, 3, frozenset(), v), answered)
        counts[tuple(result.outputs[0].token_ids)] += 1
        tree.release()
    exact = {
        (a, b, c): warped[()][a] * warped[a][b] * warped[b][c] for a in range(v) for b in range(v) for c in range(v)
    }
    cells = {cell: p for cell, p in exact.items() if p > 0}
    assert set(counts) <= set(cells)
    value = sum((counts[cell] - runs * p) ** 2 / (runs * p) for cell, p in cells.items())
    d = len(cells) - 1
    assert value < d * (1 - 2 / (9 * d) + 3.72 * math.sqrt(2 / (9 * d))) ** 3  # Wilson-Hilferty, 1e-4
