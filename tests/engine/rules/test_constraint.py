"""Constraints and processors: against transformers (golden files), brute force, and what must hold of every search."""

import functools
import json
import math
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from engine import Choices, Constraint, ConstraintError, Engine, Request, Session, UsageError
from engine.contract.trace import Trace
from engine.rules.processors import NoRepeatNGram, RepetitionPenalty
from search import ADED, DSBD, ULTS, BeamSample, BoN, Greedy, Sample, SBoN, Speculative, Trie

GOLDEN = Path(__file__).parents[2] / "golden"
CASES = json.loads((GOLDEN / "constraints.json").read_text())["cases"]
PROCESSED = json.loads((GOLDEN / "processors.json").read_text())["cases"]
EOS = 2


class Automaton(Constraint):
    """States are numbers; `kind` chooses the form in which allowed tokens are returned."""

    def __init__(self, states, kind="list", vocab=104):
        self.next = [dict(map(tuple, state)) for state in states]
        self.kind, self.vocab = kind, vocab
        self.advanced = 0

    def start(self, prompt):
        return 0

    def advance(self, state, token):
        self.advanced += 1
        return self.next[state][token]

    def allowed(self, states):
        return [self.form(sorted(self.next[state])) for state in states]

    def form(self, ids):
        if self.kind == "list":
            return ids
        if self.kind == "tensor":
            return torch.tensor(ids, dtype=torch.int64)
        words = [0] * -(-self.vocab // 32)
        for token in ids:
            words[token // 32] |= 1 << token % 32
        return torch.tensor([word - (1 << 32) * (word >> 31) for word in words], dtype=torch.int32)


def constraint_of(case, number=0):
    if "catalogue" in case:
        return Choices(case["catalogue"], [EOS])
    return Automaton(case["automaton"], ("list", "tensor", "mask")[number % 3])


@pytest.fixture(scope="module")
def engine():
    rewards = lambda prompt, texts: [float(len(text)) for text in texts]  # noqa: E731
    engine = Engine.load(GOLDEN / "llama/plain", dtype="float32", kv_memory="8M", reward=rewards)
    engine.add("draft", Engine.load(GOLDEN / "llama/gqa", dtype="float32", kv_memory="4M"))
    return engine


@pytest.fixture(autouse=True)
def exact_pool(engine):
    """All pages are free after every test."""
    yield
    for each in (engine, engine.companions["draft"]):
        assert each.pool.free_pages == each.pool.pages


def ask(engine, search, prompt=(5, 6, 7), new=6, **options):
    options.setdefault("eos_token_ids", [EOS])
    [result] = engine.generate([list(prompt)], search, max_new_tokens=new, **options)
    return result


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


@pytest.mark.parametrize("start", range(0, 60, 20))
def test_processors_are_those_of_transformers(engine, start):
    """Greedy search edits logits there, beam search log-probabilities."""
    for number, case in enumerate(PROCESSED[start : start + 20], start):
        beams, options = case["beams"], dict(case["processors"])
        if "bad_words_ids" in options:
            options["bad_words"] = options.pop("bad_words_ids")
        search = Trie(beams=beams, num_return_sequences=beams) if beams > 1 else Greedy()
        scores = "model" if beams > 1 else "renormalised"
        options |= {"constraint_scores": scores, "eos_token_ids": [case["eos"]]}
        result = ask(engine, search, case["prompt_ids"], case["max_new_tokens"], **options)
        expected = case["outputs"]
        assert [o.token_ids for o in result.outputs] == [o["token_ids"] for o in expected], number
        assert [o.score for o in result.outputs] == pytest.approx([o["score"] for o in expected], abs=1e-3), number


# --- against brute force ---

STATES = [[[10, 1], [11, 1], [12, 0]], [[10, 0], [20, 1], [EOS, 1]]]


def rows_of(engine, prompt, path):
    return engine.logits([*prompt, *path])[-1].double()


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

SEARCHES = [
    Greedy(), Sample(num_return_sequences=3), Trie(beams=3, num_return_sequences=3), BeamSample(beams=3), ADED(),
    ADED(temperature=0.8, seed=2), ULTS(prior="dirichlet"), BoN(n=4), SBoN(n=6, tau=2, alpha=0.5), DSBD(),
    DSBD(drafter="ngram"), Speculative(),
]  # fmt: skip
named = pytest.mark.parametrize("search", SEARCHES, ids=lambda search: type(search).__name__)
scored = pytest.mark.parametrize("scores", ["model", "renormalised"])
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


@named
@scored
def test_forced_tokens_and_limits(engine, search, scores):
    """One legal output; where rows add up to 1 its tokens are certain, and no row is evaluated."""
    options = {"choices": [[40, 41, 42, 43, 44]], "constraint_scores": scores}
    result = ask(engine, search, new=10, **options)
    assert result.outputs[0].token_ids == [40, 41, 42, 43, 44, EOS]
    if scores == "renormalised":
        assert result.stats["forward_passes"] == 0 and result.outputs[0].logprob == 0
    result = ask(engine, search, new=3, **options)
    assert result.outputs[0].token_ids == [40, 41, 42] and result.outputs[0].finish_reason == "length"


@pytest.mark.parametrize(("scores", "passes"), [("renormalised", 1), ("model", 3)])
def test_a_chain_of_forced_tokens_is_one_pass(engine, scores, passes):
    """Of the model's scores: a pass for the chain's own, one for the choice after it, one for the end."""
    options = {"choices": [[40, 41, 42, 43, 44], [40, 41, 42, 43, 45]], "constraint_scores": scores}
    result = ask(engine, Greedy(), new=10, **options)
    assert result.stats["forward_passes"] == passes and len(result.outputs[0].token_ids) == 6
    expected = sum(float(rows_of(engine, [5, 6, 7], [40, 41, 42, 43, 44][:i]).log_softmax(-1)[token])
                   for i, token in enumerate(result.outputs[0].token_ids[:4]))  # fmt: skip
    four = ask(engine, Greedy(), new=4, **options).outputs[0]
    assert scores == "renormalised" or four.logprob == pytest.approx(expected, abs=1e-4)


@named
@scored
def test_no_token_is_allowed(engine, search, scores):
    """At a dead end the output ends."""
    dead = Automaton([[[50, 1], [51, 2]], [[52, 3]], [[53, 3]], []])
    result = ask(engine, search, new=9, constraint=dead, constraint_scores=scores)
    for output in result.outputs:
        assert output.finish_reason == "constraint" and output.token_ids in ([50, 52], [51, 53])
        assert output.logprob is not None and -99 < output.logprob < 0.01
    nothing = ask(engine, search, constraint=Automaton([[]]), constraint_scores=scores)
    assert nothing.outputs[0].token_ids == [] and nothing.outputs[0].finish_reason == "constraint"
    endless = ask(engine, search, new=9, constraint=dead, constraint_scores=scores, ignore_eos=True)
    assert {tuple(o.token_ids) for o in endless.outputs} <= {(50, 52), (51, 53)}
    assert all(o.finish_reason == "constraint" for o in endless.outputs)


def test_a_living_beam_goes_before_a_dead_one(engine):
    [some] = ask(engine, Greedy(), new=1, constraint=Automaton([[[50, 0], [51, 0], [52, 0]]])).outputs[0].token_ids
    other = next(token for token in (50, 51, 52) if token != some)
    states = [sorted([[some, 1], [other, 2]]), [], [[60, 3]], [[EOS, 3]]]
    result = ask(engine, Trie(beams=2, num_return_sequences=2), new=9, constraint=Automaton(states))
    assert [o.finish_reason for o in result.outputs] == ["eos", "constraint"]
    assert result.outputs[0].token_ids == [other, 60, EOS] and result.outputs[1].token_ids == [some]


def test_endless_bans_are_an_error(engine):
    options = {"suppress_tokens": [*range(104)], "ignore_eos": True}
    with pytest.raises(ConstraintError, match="no token is allowed after 0 new tokens"):
        ask(engine, Greedy(), **options)
    [output] = ask(engine, Greedy(), suppress_tokens=[*range(104)]).outputs
    assert (output.token_ids, output.finish_reason) == ([], "constraint")


@scored
@pytest.mark.parametrize("case", [case for case in CASES if "automaton" in case][:6], ids=lambda _: "")
def test_drafts_change_nothing(engine, case, scores):
    """ADED gives the tokens of constrained greedy search and of constrained samples, in no more passes."""
    prompt = case["prompt_ids"] * 4
    for plain, drafted in ((Greedy(), ADED()), (Sample(seed=5), ADED(seed=5, temperature=1.0))):
        options = {"new": 24, "constraint_scores": scores}
        a = ask(engine, plain, prompt, constraint=constraint_of(case), **options)
        b = ask(engine, drafted, prompt, constraint=constraint_of(case), **options)
        assert a.outputs[0].token_ids == b.outputs[0].token_ids
        assert a.outputs[0].logprob == pytest.approx(b.outputs[0].logprob, abs=1e-3)
        assert b.stats["forward_passes"] <= a.stats["forward_passes"]


def test_rejected_utterances_are_those_of_samples(engine):
    options = {"constraint": Automaton(STATES), "new": 5}
    samples = {tuple(o.token_ids) for o in ask(engine, Sample(num_return_sequences=8, seed=1), **options).outputs}
    for search in (BoN(n=8, seed=1, num_return_sequences=8), SBoN(n=8, seed=1, tau=2, num_return_sequences=2)):
        assert {tuple(o.token_ids) for o in ask(engine, search, **options).outputs} <= samples


def test_states_are_computed_once_per_token(engine):
    constraint = Automaton([[[token, 0] for token in range(40, 60)]])
    ask(engine, Greedy(), new=30, constraint=constraint)
    assert constraint.advanced == 29  # the last token has no row
    constraint.advanced = 0
    result = ask(engine, Trie(beams=4), new=12, constraint=constraint)
    assert constraint.advanced == result.stats["nodes_evaluated"] - 1


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


def test_hooks(engine):
    """A hook sees edited rows and may edit them; what it does wrong is an error of its request."""
    seen = []

    def hook(ids_1L, scores_1V):
        seen.append((tuple(ids_1L[0].tolist()), int(scores_1V.isfinite().sum())))
        return scores_1V + torch.nn.functional.one_hot(torch.tensor([33]), 104) * 100

    result = ask(engine, Greedy(), new=3, logits_processor=hook, suppress_tokens=[1, 3])
    assert result.outputs[0].token_ids == [33, 33, 33]
    assert [ids for ids, _ in seen] == [(5, 6, 7), (5, 6, 7, 33), (5, 6, 7, 33, 33)] and seen[0][1] == 102
    for wrong, words in ((lambda ids, x: x[0], "a tensor"), (lambda ids, x: x * math.nan, "NaN"), (len, "TypeError")):
        with pytest.raises(ConstraintError, match=words):
            ask(engine, Trie(), logits_processor=wrong)


def test_prefix_functions(engine):
    def after(batch, ids_L):
        assert batch == 0 and ids_L.dtype == torch.int64
        return {3: [70, 71], 4: torch.tensor([72])}.get(len(ids_L), [EOS])

    result = ask(engine, Trie(beams=2, num_return_sequences=2), prefix_allowed_tokens_fn=after)
    assert sorted(o.token_ids for o in result.outputs) == [[70, 72, EOS], [71, 72, EOS]]


WRONG = [
    ({"constraint": 3}, "constraint: expected an engine.Constraint"),
    ({"constraint_scores": "both"}, "constraint_scores: expected model or renormalised"),
    ({"choices": [[1, 104]]}, "choices: expected token ids from 0 to 103, got 104"),
    ({"choices": "a"}, "choices: expected a list of texts"),
    ({"choices": [[]]}, "choices: expected texts and sequences of at least one token"),
    ({"choices": [[1]], "constraint": Automaton(STATES)}, "constraint and choices: expected at most one of"),
    ({"logit_bias": {"x": 1}}, "logit_bias: expected token ids"),
    ({"logit_bias": {104: 1}}, "logit_bias: expected token ids from 0 to 103"),
    ({"logit_bias": {5: "a"}}, "logit_bias: expected a number"),
    ({"logit_bias": [5]}, "logit_bias: expected an object"),
    ({"sequence_bias": [[5, 1.0]]}, "sequence_bias: expected a list of token ids"),
    ({"sequence_bias": [[[], 1.0]]}, "sequence_bias: expected sequences"),
    ({"sequence_bias": 5}, "sequence_bias: expected a list of"),
    ({"repetition_penalty": 0}, "repetition_penalty: expected a number"),
    ({"no_repeat_ngram_size": -1}, "no_repeat_ngram_size: expected an integer"),
    ({"min_new_tokens": 1.5}, "min_new_tokens: expected an integer"),
    ({"bad_words": "word"}, "bad_words: expected a list of texts"),
    ({"suppress_tokens": [-1]}, "suppress_tokens: expected token ids"),
    ({"begin_suppress_tokens": "5"}, "begin_suppress_tokens: expected a list of token ids"),
    ({"prefix_allowed_tokens_fn": 5}, "prefix_allowed_tokens_fn: expected a function"),
    ({"logits_processor": [len, 5]}, "logits_processor: expected a function"),
]


@pytest.mark.parametrize(("options", "words"), WRONG, ids=[words for _, words in WRONG])
def test_wrong_values_are_refused(engine, options, words):
    with pytest.raises(UsageError) as caught:
        ask(engine, Greedy(), **options)
    assert words in str(caught.value)


def test_a_raised_score_does_not_end_a_beam_search_early(engine):
    """Log-probabilities that a bias makes positive: a longer output may be the better one."""
    options = {"logit_bias": {EOS: 3.0, 33: 12.0}, "new": 12}
    result = ask(engine, Trie(beams=2, length_penalty=0.0, early_stopping="never"), **options)
    assert len(result.outputs[0].token_ids) == 12 and result.outputs[0].score > 0


# --- beside the rest of the engine ---


def test_constrained_requests_share_a_small_cache():
    """Preempted searches start again with their constraints, and drafts make room."""
    engine = Engine.load(GOLDEN / "llama/plain", dtype="float32", kv_memory=40 * 512, parallel=4)
    size = engine.pool.pages * engine.pool.page_size
    assert size < 120
    searches = [Trie(beams=3), Sample(num_return_sequences=3, seed=1), ADED(), ULTS(prior="dirichlet", k_max=2)]
    requests = [
        Request([5, 6, 7, i], search, max_new_tokens=12, eos_token_ids=[EOS], constraint=Automaton(STATES))
        for i, search in enumerate(searches * 2, 10)
    ]
    together = dict(engine.serve(requests))
    for i, request in enumerate(requests):
        [(_, alone)] = engine.serve([request])
        assert [o.token_ids for o in together[i].outputs] == [o.token_ids for o in alone.outputs]
    assert engine.pool.free_pages == engine.pool.pages


@scored
def test_sessions_and_traces(engine, scores):
    """Forced tokens that were never evaluated are evaluated with the next prompt."""
    options = {"choices": [[40, 41, 42, 43]], "constraint_scores": scores, "eos_token_ids": [EOS]}
    session, prompt = Session(engine), [5, 6, 7]
    for search in (Greedy(), ADED(), Trie(beams=2)):
        trace = Trace()
        *_, done = session.stream(prompt, search, trace=trace, **options)
        assert done.result.outputs[0].token_ids == [40, 41, 42, 43, EOS] and trace.record["end"] == "done"
        prompt = [*prompt, 40, 41, 42, 43, 8]
    *_, done = session.stream(prompt, Greedy(), max_new_tokens=5)
    [alone] = engine.generate([prompt], Greedy(), max_new_tokens=5)
    assert done.result.outputs[0].token_ids == alone.outputs[0].token_ids
    session.close()


# --- what steps do with the tokens that occurred ---


def grown(processor, prompt, seed):
    """States after paths of different lengths from a prompt, and the sequences."""
    generator = torch.Generator().manual_seed(seed)
    states, sequences = [], []
    for length in (0, 1, 2, 5, 9):
        path = torch.randint(0, 4, (length,), generator=generator).tolist()
        states.append(functools.reduce(processor.advance, path, processor.start(prompt)))
        sequences.append([*prompt, *path])
    return states, sequences


@pytest.mark.parametrize("prompt", [[1], [0, 1, 0, 2, 0, 1, 30], [3] * 20, [2, 30, 31]])
@pytest.mark.parametrize("size", [1, 2, 3, 6])
def test_ngrams_as_a_loop_finds_them(size, prompt):
    """Of rows of different lengths at once; a row has fewer tokens than ids occur."""
    states, sequences = grown(processor := NoRepeatNGram(size), prompt, size)
    rows_NV = torch.zeros(len(states), 31)
    processor.apply(rows_NV, states)
    for row, tokens in zip(rows_NV, sequences, strict=True):
        last = tokens[len(tokens) - size + 1 :] if size <= len(tokens) else None
        found = {tokens[i + size - 1] for i in range(len(tokens) - size + 1) if tokens[i : i + size - 1] == last}
        assert {*(row == -math.inf).nonzero().view(-1).tolist()} == found - {31}


@pytest.mark.parametrize("prompt", [[1], [3] * 20, [2, 30, 31]])
def test_penalties_as_a_loop_gives_them(prompt):
    states, sequences = grown(processor := RepetitionPenalty(2.0), prompt, 0)
    rows_NV = torch.linspace(-3, 3, 31).repeat(len(states), 1)
    plain, _ = rows_NV.clone(), processor.apply(rows_NV, states)
    for row, before, tokens in zip(rows_NV, plain, sequences, strict=True):
        for token in range(31):
            factor = (2.0 if before[token] < 0 else 0.5) if token in tokens else 1.0
            assert row[token] == before[token] * factor


def test_ngrams_of_a_long_prompt_take_linear_memory():
    """Each of a prompt's tokens is kept once, also where one n-gram occurs everywhere."""
    processor = NoRepeatNGram(2)
    processor.start([7] * 30_000)
    [(_, after)] = processor._prompt.items()
    assert len(after) == 29_999 and after.itemsize == 4
