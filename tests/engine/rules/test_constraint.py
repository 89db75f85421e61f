"""Constraints: against transformers (golden files), brute force, and what must hold of every search."""

import functools
import math
import random
from collections import Counter
from dataclasses import replace

import pytest
import torch

from engine import ConstraintError, Engine, Request, UsageError
from engine.rules.constraint import Allowed, joined, packed
from engine.rules.processors import mask
from search import ADED, DSBD, ULTS, BeamSample, BoN, Greedy, Sample, SBoN, Speculative, Trie
from tests.engine.rules.automata import (
    CASES,
    EOS,
    GOLDEN,
    STATES,
    Automaton,
    ask,
    constraint_of,
    named,
    rows_of,
    scored,
)

pytestmark = pytest.mark.usefixtures("exact_pool")

# --- against transformers ---


@pytest.mark.parametrize("start", range(0, len(CASES), 25))
def test_beam_search_is_that_of_transformers(engine, start):
    for number, case in enumerate(CASES[start : start + 25], start):
        beams, names = case["beams"], ("length_penalty", "early_stopping")
        search = Trie(beams=beams, num_return_sequences=min(beams, 8), **{name: case[name] for name in names})
        search = search if beams > 1 else Greedy()  # transformers takes one beam for it
        result = ask(engine, search, case["prompt_ids"], case["max_new_tokens"], constraint=constraint_of(case, number))
        expected = case["outputs"]
        assert [o.token_ids for o in result.outputs] == [o["token_ids"] for o in expected], number
        scores = [o.score for o in result.outputs]
        assert scores == pytest.approx([o["score"] for o in expected], abs=1e-3, rel=0), number


# --- against brute force ---


@functools.cache
def law(renormalised, new, prompt=(5, 6, 7)):
    """Every legal sequence -> its probability: of the model, or of the model with the mask before the softmax."""
    engine = Engine.load(GOLDEN / "llama/plain", dtype="float32", kv_memory="4M")
    found, live = {}, [((), 0, 0.0)]
    while live:
        path, state, logp = live.pop()
        nexts = dict(map(tuple, STATES[state]))
        row = rows_of(engine, prompt, path)
        if renormalised:
            mask = torch.full_like(row, -math.inf)
            mask[sorted(nexts)] = 0
            row = row + mask
        row = row.log_softmax(-1)
        for token, state in nexts.items():
            longer, sum_ = (*path, token), logp + float(row[token])
            if token == EOS or len(longer) == new:
                found[longer] = sum_
            else:
                live.append((longer, state, sum_))
    return found


@pytest.mark.parametrize("scores", ["model", "renormalised"])
@pytest.mark.parametrize("kind", ["list", "tensor", "mask"])
def test_wide_searches_find_every_sequence_with_its_score(engine, scores, kind):
    expected = sorted(law(scores == "renormalised", 4).items(), key=lambda item: -item[1])
    searches = [
        Trie(beams=100, num_return_sequences=100, length_penalty=0, early_stopping="never"),
        ULTS(k_max=0, epsilon=0, prior="dirichlet", num_return_sequences=200),
    ]
    for search in searches:
        options = {"constraint": Automaton(STATES, kind), "constraint_scores": scores}
        result = ask(engine, search, new=4, **options)
        found = {tuple(o.token_ids): o.logprob for o in result.outputs}
        assert found == pytest.approx(dict(expected[: len(found)]), abs=1e-3)
        assert len(found) == min(len(expected), search.num_return_sequences), search


def chi_square_holds(counts, probabilities):
    """Whether counts may come from a distribution: six standard deviations of the statistic, rare values merged."""
    total, statistic, bins, rest, rare = sum(counts.values()), 0.0, 0, 0.0, 0
    assert set(counts) <= set(probabilities)
    for value, p in probabilities.items():
        if p * total < 5:
            rest, rare = rest + p * total, rare + counts[value]
        else:
            statistic, bins = statistic + (counts[value] - p * total) ** 2 / (p * total), bins + 1
    if rest > 5:
        statistic, bins = statistic + (rare - rest) ** 2 / rest, bins + 1
    return statistic < bins + 6 * math.sqrt(2 * bins)


def normalised(logps):
    total = math.fsum(map(math.exp, logps.values()))
    return {value: math.exp(logp) / total for value, logp in logps.items()}


def stepwise(logps):
    """The law of drawing token by token from renormalised rows."""
    return {value: math.exp(logp) for value, logp in logps.items()}


@pytest.mark.parametrize("scores", ["model", "renormalised"])
def test_samples_have_the_constrained_law(engine, scores):
    """Draws renormalise each row, whatever scores are reported."""
    result = ask(engine, Sample(num_return_sequences=1500, seed=3), new=4, constraint=Automaton(STATES),
                 constraint_scores=scores)  # fmt: skip
    counts = Counter(tuple(o.token_ids) for o in result.outputs)
    assert chi_square_holds(counts, stepwise(law(True, 4)))
    expected = law(scores == "renormalised", 4)
    assert all(abs(o.logprob - expected[tuple(o.token_ids)]) < 1e-3 for o in result.outputs)


DRAFTED = [Speculative(gamma=2), DSBD(draft_beams=2, width=1, length_penalty=0), BeamSample(beams=1, length_penalty=0)]


@pytest.mark.parametrize(
    ("search", "scores"), [*zip(DRAFTED, ("model", "renormalised", "model"), strict=True)], ids=str
)
def test_drafted_draws_have_the_constrained_law(engine, search, scores):
    requests = (
        Request(
            [5, 6, 7],
            replace(search, seed=seed),
            max_new_tokens=4,
            eos_token_ids=[EOS],
            constraint=Automaton(STATES, "mask"),
            constraint_scores=scores,
        )
        for seed in range(150)
    )
    results = [result for _, result in engine.serve(requests)]
    counts = Counter(tuple(result.outputs[0].token_ids) for result in results)
    assert chi_square_holds(counts, stepwise(law(True, 4)))


# --- what must hold of every search ---

ITEMS = [[10, 11, 12, 13, 14, 15], [10, 11, 12, 20, 21], [30, 31, 32, 33], [30, 31]]


@named
@scored
def test_outputs_are_legal(engine, search, scores):
    for prompt in ([5, 6, 7], [9] * 20):
        result = ask(engine, search, prompt, 10, choices=ITEMS, constraint_scores=scores)
        for output in result.outputs:
            assert output.token_ids[:-1] in ITEMS and output.finish_reason == "eos"
        endless = ask(engine, search, prompt, 10, choices=ITEMS, constraint_scores=scores, ignore_eos=True)
        for output in endless.outputs:
            assert output.token_ids in ITEMS and output.finish_reason == "constraint"


def test_rejected_utterances_are_those_of_samples(engine):
    options = {"constraint": Automaton(STATES), "new": 5}
    samples = {tuple(o.token_ids) for o in ask(engine, Sample(num_return_sequences=8, seed=1), **options).outputs}
    for search in (BoN(n=8, seed=1, num_return_sequences=8), SBoN(n=8, seed=1, tau=2, num_return_sequences=2)):
        assert {tuple(o.token_ids) for o in ask(engine, search, **options).outputs} <= samples


# --- errors ---


class Faulty(Automaton):
    """Raises in a method, or returns wrong tokens, once there are two new tokens."""

    def __init__(self, fault):
        super().__init__([[[token, 0] for token in (10, 11, 12)]])
        self.fault = fault

    def start(self, prompt):
        if self.fault == "start":
            raise RuntimeError("at the start")
        return 0

    def advance(self, state, token):
        if self.fault == "advance" and state == 1:
            raise RuntimeError("in the middle")
        return state + 1

    def allowed(self, states):
        wrong = {"allowed": None, "few": [], "ids": [[10, 104]], "order": [[11, 10]], "text": ["ab"],
                 "mask": [torch.zeros(1, dtype=torch.int32)], "negative": [torch.tensor([-1, 4])]}  # fmt: skip
        if max(states) < 2 or self.fault not in wrong:
            return [[10, 11, 12]] * len(states)
        if self.fault == "allowed":
            raise KeyError("allowed")
        return wrong[self.fault] * len(states)


FAULTS = {
    "start": "RuntimeError: at the start", "advance": "RuntimeError: in the middle", "allowed": "KeyError: 'allowed'",
    "few": "an entry for each of", "ids": "token ids from 0 to 103, got 104", "order": "ascending order",
    "text": "expected a list of token ids", "mask": "a mask of 4 words", "negative": "from 0 to 103, got -1",
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("search", [Greedy(), Trie(beams=3), ADED()], ids=lambda search: type(search).__name__)
def test_a_constraint_that_fails_ends_its_request_alone(engine, search, fault):
    plain = Request([5, 6, 7], search, max_new_tokens=8)
    [expected] = [result for _, result in engine.serve([plain])]
    found = dict(engine.serve([plain, replace(plain, constraint=Faulty(fault)), plain]))
    assert isinstance(found[1], ConstraintError) and found[1].code == "constraint" and found[1].exit_code == 2
    assert FAULTS[fault] in str(found[1]) and "Faulty" in str(found[1])
    for i in (0, 2):
        assert found[i].outputs[0].token_ids == expected.outputs[0].token_ids


@pytest.mark.parametrize("method", ["advance_all", "items"])
def test_methods_for_many_states_must_answer_for_each(engine, method):
    constraint = Automaton(STATES)
    setattr(constraint, method, lambda *_: [])
    with pytest.raises(ConstraintError, match=f"{method}: expected an entry for each of"):
        ask(engine, Greedy(), constraint=constraint)


def test_prefix_functions(engine):
    def after(batch, ids_L):
        assert batch == 0 and ids_L.dtype == torch.int64
        return {3: [70, 71], 4: torch.tensor([72])}.get(len(ids_L), [EOS])

    result = ask(engine, Trie(beams=2, num_return_sequences=2), prefix_allowed_tokens_fn=after)
    assert sorted(o.token_ids for o in result.outputs) == [[70, 72, EOS], [71, 72, EOS]]


WRONG = [  # beside what `test_arguments` has of every field
    ({"choices": [[1, 104]]}, "choices: expected token ids from 0 to 103, got 104"),
    (
        {"choices": [[5, 8], [5, 7, 6]], "eos_token_ids": [7, 8]},
        "choices: an end-of-sequence token is inside the choice [5, 7, 6]",
    ),
    ({"constraint": Automaton(STATES), "choices": [[1]]}, "constraint and choices: expected at most one of"),
    ({"logit_bias": {104: 1}}, "logit_bias: expected token ids from 0 to 103"),
    ({"sequence_bias": [[[], 1.0]]}, "sequence_bias: expected sequences"),
    ({"logits_processor": [len, 5]}, "logits_processor: expected a function"),
]


@pytest.mark.parametrize(("options", "words"), WRONG, ids=[words for _, words in WRONG])
def test_wrong_values_are_refused(engine, options, words):
    with pytest.raises(UsageError) as caught:
        ask(engine, Greedy(), **options)
    assert words in str(caught.value)


def test_tokens_of_lists_and_tensors_are_listed_together():
    allowed = Allowed.of([[3, 5], torch.tensor([2, 9]), None, [], [7]], 10)
    assert allowed.token_M.tolist() == [3, 5, 2, 9, 7] and allowed.count_N.tolist() == [2, 2, 0, 0, 1]
    assert kept(allowed) == [[3, 5], [2, 9], [*range(10)], [], [7]]


def kept(allowed, vocab=10):
    """The tokens that a mask of rows leaves, and that each state is said to have."""
    rows_NV = torch.zeros(len(allowed), vocab)
    mask(rows_NV, allowed)
    found = [[i for i, x in enumerate(row) if x == 0] for row in rows_NV.tolist()]
    pairs = [(place, token) for place in range(len(allowed)) for token in range(vocab)]
    steps = [place << 32 | token for place, token in pairs]
    assert allowed.has(steps) == [token in found[place] for place, token in pairs]
    assert allowed.nothing == {i for i, tokens in enumerate(found) if not tokens}
    forced = {i: tokens[0] for i, tokens in enumerate(found) if len(tokens) == 1 and i not in allowed.masks}
    assert allowed.forced == forced
    return found


def test_states_are_chosen_and_joined_with_their_tokens():
    """Against lists, for random states that list tokens, have masks, allow everything or nothing."""
    rng = random.Random(3)
    for _ in range(30):
        sets = [sorted({rng.randrange(10) for _ in range(rng.choice((0, 1, 4)))}) for _ in range(rng.randint(1, 7))]
        kinds = [rng.choice((list, torch.tensor, masked, None)) for _ in sets]
        sets = [tokens if kind else [*range(10)] for tokens, kind in zip(sets, kinds, strict=True)]
        entries = [
            None if kind is None else torch.tensor(tokens, dtype=torch.int64) if kind is torch.tensor else kind(tokens)
            for tokens, kind in zip(sets, kinds, strict=True)
        ]
        allowed, places = Allowed.of(entries, 10), [rng.randrange(len(sets)) for _ in range(rng.randint(1, 9))]
        assert kept(allowed) == sets and kept(allowed.some(places)) == [sets[place] for place in places]
        assert kept(joined([allowed.some(places), allowed])) == [*(sets[place] for place in places), *sets]
        listed = allowed.some([i for i, kind in enumerate(kinds) if kind in (list, torch.tensor)] or [0])
        if not listed.masks:
            assert kept(listed.or_end(9)) == [tokens or [9] for tokens in kept(listed)]


def masked(tokens):
    flags_V = torch.zeros(10, dtype=torch.int64)
    flags_V[tokens] = 1
    return packed(flags_V)
