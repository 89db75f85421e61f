"""DRY against its definition, written down again as loops, in searches and on rows."""

import random
from functools import reduce
from itertools import pairwise

import pytest
import torch

from engine import UsageError
from engine.rules import Rules
from engine.rules.dry import BREAKERS, DryPenalty, common_beginnings
from engine.text.thinking import Thoughts
from search import ADED, Greedy, Trie
from tests.engine.rules.automata import ask

pytestmark = pytest.mark.usefixtures("exact_pool")

TEXTS = [b"a", b"b", b"c", b"\n", b"a\n", b"bc", b": ", b""]  # of tokens 0 to 7


def free_tokens(tokens, breakers):
    """How many tokens stand after the last one in which a breaker ends, by all occurrences in the whole text."""
    text, ends = b"", []
    for token in tokens:
        text += TEXTS[token]
        ends.append(len(text))
    occurrences = [i + len(b) for b in breakers for i in range(len(text)) if text[i:].startswith(b)]
    last = max(occurrences, default=0)
    begins = [end - len(TEXTS[token]) for end, token in zip(ends, tokens, strict=True)]
    return sum(begin >= last for begin in begins) if last else len(tokens)


def penalties(tokens, multiplier, base, allowed, last_n, breakers):
    """Token -> penalty, from the definition of text-generation-webui and llama.cpp: every earlier place is compared
    with the end of the sequence, backwards; a breaker stops that."""
    seen, longest = tokens[-last_n:] if last_n > 0 else tokens, {}
    limit = free_tokens(tokens, breakers)
    for end in range(len(seen) - 1):
        length = 0
        while length < limit and length <= end and seen[end - length] == seen[len(seen) - 1 - length]:
            length += 1
        after = seen[end + 1]
        if length >= allowed and not any(breaker in TEXTS[after] for breaker in breakers):
            longest[after] = max(longest.get(after, 0), length)
    return {token: min(1e6, multiplier * base ** (length - allowed)) for token, length in longest.items()}


def test_penalties_as_a_loop_gives_them():
    """200 random sequences, split anywhere into prompt and new tokens, many rows at once."""
    rng, penalised, broken = random.Random(0), 0, 0
    for i in range(200):
        multiplier, base = rng.choice((0.5, 0.8, 2.0)), rng.choice((1.0, 1.2, 1.75))
        allowed, last_n = rng.randint(1, 4), rng.choice((-1, -1, 5, 12, 100))
        breakers = rng.choice(([], [b"\n"], [b"\n", b":"], [b"ca"], [b"cb", b"\n"], [b"bcc"]))
        reach = last_n if last_n > 0 else None
        processor = DryPenalty(multiplier, base, allowed, reach, breakers, TEXTS)
        tokens = rng.choices(range(8), [6, 6, 4, 1, 1, 2, 1, 1], k=rng.randint(1, 60))
        if i % 4 == 0:
            tokens = [tokens[0]] * 20 + tokens[:3] * rng.randint(1, 12)
        prompt = tokens[: rng.randint(1, len(tokens))]
        start, states = processor.start(prompt), []
        for end in range(len(prompt), len(tokens) + 1):
            states.append(reduce(processor.advance, tokens[len(prompt) : end], start))
        rows_NV = torch.linspace(-3, 3, 8).repeat(len(states), 1)
        processor.apply(rows_NV, states)
        for row, end in zip(rows_NV, range(len(prompt), len(tokens) + 1), strict=True):
            expected = penalties(tokens[:end], multiplier, base, allowed, last_n, breakers)
            wanted = torch.linspace(-3, 3, 8) - torch.tensor([expected.get(token, 0.0) for token in range(8)])
            torch.testing.assert_close(row, wanted, rtol=1e-5, atol=1e-5)
            penalised += bool(expected)
            broken += expected != penalties(tokens[:end], multiplier, base, allowed, last_n, [])
    assert penalised > 1000 and broken > 300


def test_common_beginnings():
    rng = random.Random(1)
    for _ in range(100):
        tokens = rng.choices(range(2), k=rng.randint(0, 20))
        ends = range(len(tokens) + 1)
        plain = [max(n for n in ends[: len(tokens) - i + 1] if tokens[i : i + n] == tokens[:n]) for i in ends[:-1]]
        assert common_beginnings(tokens) == plain


def test_a_long_prompt_of_one_token_takes_linear_time():
    """Both ways to count give the same; 100,000 tokens would take hours otherwise."""
    processor = DryPenalty(1e-3, 1.0001, 2, None, [], [])
    state, rows_NV = processor.start([3] * 100_000), torch.zeros(1, 5)
    processor.apply(rows_NV, [state])
    assert rows_NV[0, 3] == pytest.approx(-1e-3 * 1.0001 ** (99_999 - 2), rel=1e-3) and rows_NV.count_nonzero() == 1
    huge_NV, huge = torch.zeros(1, 5), DryPenalty(1e6, 1e6, 2, None, [], [])
    huge.apply(huge_NV, [huge.start([3] * 100_000)])
    assert huge_NV[0, 3] == -1e6


def test_searches_with_it(engine):
    """Greedy repeats itself; with DRY it does not, and a beam search and drafting see the same rows."""
    plain = ask(engine, Greedy(), new=40).outputs[0].token_ids
    options = {"new": 40, "dry_multiplier": 50.0, "dry_allowed_length": 1, "dry_sequence_breakers": []}
    greedy = ask(engine, Greedy(), **options).outputs[0].token_ids
    assert greedy != plain
    sequence = [5, 6, 7, *greedy]
    assert len({*pairwise(sequence)}) == len(sequence) - 1
    for search in (ADED(nodes=8), Trie(beams=1, length_penalty=0.0)):
        assert ask(engine, search, **options).outputs[0].token_ids == greedy
    off = options | {"dry_penalty_last_n": 0}
    assert ask(engine, Greedy(), **off).outputs[0].token_ids == plain


def test_breakers_need_a_tokenizer():
    rules = Rules(dry_multiplier=1.0)
    [made] = rules._processors([1], 10, [], None, Thoughts())
    assert made.breakers == [] and rules.dry_sequence_breakers is BREAKERS
    with pytest.raises(UsageError, match="dry_sequence_breakers: this checkpoint has no tokenizer"):
        Rules(dry_multiplier=1.0, dry_sequence_breakers=["."])._processors([1], 10, [], None, Thoughts())

    class OfWords:
        def data(self):
            raise UsageError("this tokenizer has no bytes for each token")

    with pytest.raises(UsageError, match="dry_sequence_breakers: this tokenizer has no bytes"):
        rules._processors([1], 10, [], OfWords(), Thoughts())
    assert Rules(dry_multiplier=1.0, dry_sequence_breakers=())._processors([1], 10, [], OfWords(), Thoughts())
