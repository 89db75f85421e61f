"""Processors: against transformers (golden files), loops that do the same, and hooks of a caller."""

import json
import math
from collections import Counter
from functools import reduce

import pytest
import torch

from engine import ConstraintError
from engine.rules.processors import NoRepeatNGram, OccurrencePenalty, RepetitionPenalty
from search import Greedy, Sample, Trie
from search.options import DRAWS
from tests.draws import chi_square, chi_square_bound
from tests.engine.rules.automata import (
    EOS,
    GOLDEN,
    ask,
)

pytestmark = pytest.mark.usefixtures("exact_pool")


PROCESSED = json.loads((GOLDEN / "processors.json").read_text())["cases"]
DRAWN = json.loads((GOLDEN / "draws.json").read_text())


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


@pytest.mark.parametrize("number", range(len(DRAWN["cases"])))
def test_draws_have_the_law_of_transformers(engine, number):
    """Processors, then warpers: counts of continuations against the probabilities that it gives them (error 1e-4)."""
    case = DRAWN["cases"][number]
    rules = dict(case["options"])
    warp = {name: rules.pop(name) for name in DRAWS if name in rules}
    if "bad_words_ids" in rules:
        rules["bad_words"] = rules.pop("bad_words_ids")
    rules |= {"constraint_scores": "renormalised", "eos_token_ids": [DRAWN["eos"]]}
    sample = Sample(**warp, seed=number, num_return_sequences=4096)
    result = ask(engine, sample, DRAWN["prompt_ids"], DRAWN["max_new_tokens"], **rules)
    law = {tuple(path): p for path, p in case["law"]}
    counts = Counter(tuple(output.token_ids) for output in result.outputs)
    assert set(counts) <= set(law)
    cell = {path: path if p * 4096 >= 5 else () for path, p in law.items()}  # rare ones are one cell
    merged, expected = Counter[tuple[int, ...]](), Counter[tuple[int, ...]]()
    for path, p in law.items():
        merged[cell[path]] += counts[path]
        expected[cell[path]] += p
    value, cells = chi_square(merged, expected)
    assert value < chi_square_bound(cells)


def test_least_tokens_as_in_transformers(engine):
    """Its `min_new_tokens`, even if it is 0, replaces `min_length`."""
    [first] = ask(engine, Greedy(), new=1).outputs[0].token_ids
    for rules, ends in {(3, None): True, (4, None): False, (4, 0): True, (3, 1): False, (0, 0): True}.items():
        options = dict(zip(("min_length", "min_new_tokens"), rules, strict=True))
        output = ask(engine, Greedy(), eos_token_ids=[first], **options).outputs[0]
        assert (output.token_ids == [first]) == ends, rules


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


def test_a_raised_score_does_not_end_a_beam_search_early(engine):
    """Log-probabilities that a bias makes positive: a longer output may be the better one."""
    options = {"logit_bias": {EOS: 3.0, 33: 12.0}, "new": 12}
    result = ask(engine, Trie(beams=2, length_penalty=0.0, early_stopping="never"), **options)
    assert len(result.outputs[0].token_ids) == 12 and result.outputs[0].score > 0


def grown(processor, prompt, seed):
    """States after paths of different lengths from a prompt, and the sequences."""
    generator = torch.Generator().manual_seed(seed)
    states, sequences = [], []
    for length in (0, 1, 2, 5, 9):
        path = torch.randint(0, 4, (length,), generator=generator).tolist()
        states.append(reduce(processor.advance, path, processor.start(prompt)))
        sequences.append([*prompt, *path])
    return states, sequences


@pytest.mark.parametrize("prompt", [[1], [0, 1, 0, 2, 0, 1, 30], [3] * 20, [2, 30, 31]])
@pytest.mark.parametrize("size", [1, 2, 3, 6])
def test_ngrams_as_a_loop_finds_them(size, prompt):
    """For rows of different lengths at once; a row has fewer tokens than ids occur."""
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


@pytest.mark.parametrize("frequency", [0.0, 0.5, -1.0])
@pytest.mark.parametrize("presence", [0.0, 0.75, -0.25])
def test_penalties_of_occurrences_as_a_loop_gives_them(frequency, presence):
    """OpenAI's formula: mu[j] -= c[j] * frequency + (c[j] > 0) * presence; c counts the new tokens."""
    prompt = [3, 3, 5]
    states, sequences = grown(processor := OccurrencePenalty(frequency, presence), prompt, 0)
    rows_NV = torch.linspace(-3, 3, 31).repeat(len(states), 1)
    plain, _ = rows_NV.clone(), processor.apply(rows_NV, states)
    for row, before, tokens in zip(rows_NV, plain, sequences, strict=True):
        for token in range(31):
            count = tokens[len(prompt) :].count(token)
            assert row[token] == pytest.approx(float(before[token]) - count * frequency - (count > 0) * presence)
    assert processor.raises == any(frequency * n + presence < 0 for n in range(1, 9))


def test_ngrams_of_a_long_prompt_take_linear_memory():
    """Each of a prompt's tokens is kept once, also where one n-gram occurs everywhere."""
    processor = NoRepeatNGram(2)
    processor.start([7] * 30_000)
    [(_, after)] = processor._prompt.items()
    assert len(after) == 29_999 and after.itemsize == 4
