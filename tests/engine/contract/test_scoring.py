"""Scores of continuations beside the logits of whole sequences; tokens at the border; memory; passes."""

import json
import math
import random
import re
from itertools import takewhile
from pathlib import Path

import pytest
import torch

from engine import ContinuationScore, Engine
from engine.app import batch
from engine.contract import scoring
from engine.contract.scoring import ROWS, Scoring
from engine.demo import demo_folder
from engine.errors import UsageError
from engine.request import score_request
from kernels.rows import reference
from search import Greedy
from tests.search.drive import drive
from tests.search.test_trie import Table

STORY = "Once upon a time there was a little dog. The dog"
GOLDEN = Path("tests/golden")


@pytest.fixture(scope="module")
def engine():
    return Engine.load(demo_folder(), dtype="float32", prefix_cache="on")


def by_logits(engine, prompt, continuation):
    """(log-probabilities, is_greedy) by a pass over the whole sequence."""
    ids = [*prompt, *continuation]
    logp_TV = torch.log_softmax(engine.logits(ids[:-1] if continuation else ids).double(), -1)
    places = range(len(prompt) - 1, len(ids) - 1)
    logps = [float(logp_TV[place, token]) for place, token in zip(places, continuation, strict=True)]
    return logps, all(int(logp_TV[p].argmax()) == token for p, token in zip(places, continuation, strict=True))


def check(engine, prompt, continuations, scores):
    for continuation, score in zip(continuations, scores, strict=True):
        logps, greedy = by_logits(engine, prompt, continuation)
        assert score.token_ids == list(continuation)
        assert score.token_logprobs == pytest.approx(logps, abs=1e-4)
        assert score.logprob == pytest.approx(sum(logps), abs=1e-4)
        assert score.is_greedy == greedy


def random_continuations(rng, vocab, count):
    """With shared beginnings, equal ones and empty ones."""
    pool = [[rng.randrange(vocab) for _ in range(rng.randint(1, 6))] for _ in range(5)]
    return [rng.choice(pool)[: rng.randint(0, 6)] + [rng.randrange(vocab)] * rng.randint(0, 2) for _ in range(count)]


def test_equals_logits_in_any_order_with_and_without_the_cache(engine):
    rng = random.Random(0)
    prompt = engine.encode(STORY)
    greedy = engine.generate([prompt], Greedy(), max_new_tokens=5)[0].outputs[0].token_ids
    continuations = [*random_continuations(rng, engine.shape.vocab_size, 40), [], greedy, greedy[:2]]
    scores = engine.score(prompt, continuations)
    check(engine, prompt, continuations, scores)
    assert scores[-1].is_greedy and scores[-2].is_greedy and not scores[0].is_greedy
    assert (scores[-3].logprob, scores[-3].token_logprobs, scores[-3].is_greedy) == (0.0, [], True)
    order = rng.sample(range(len(continuations)), len(continuations))
    for salt in ("", None):
        assert engine.score(prompt, [continuations[i] for i in order], cache_salt=salt) == [scores[i] for i in order]
    alone = [engine.score(prompt, [one])[0] for one in continuations]
    for one, score in zip(alone, scores, strict=True):
        assert one.token_logprobs == pytest.approx(score.token_logprobs, abs=1e-4)


@pytest.mark.parametrize("top", [0, 2])
def test_the_lower_of_equal_tokens_is_greedy_whichever_the_operator_lists_first(monkeypatch, top):
    monkeypatch.setattr(scoring, "top_k", reference.top_k)  # it takes any of them
    rows = lambda path: torch.where(torch.arange(300) % 7 == 3, 0.0, -9.0).log_softmax(0)  # noqa: E731
    scores = drive(Scoring(((3, 3), (3, 10), (10,), (4,)), top=top), rows).result.scores
    assert [score.is_greedy for score in scores] == [True, False, False, False]


@pytest.mark.parametrize("folder", sorted({path.parent.parent for path in GOLDEN.glob("*/*/golden.json")}))
def test_equals_logits_of_every_family(folder):
    name = next(path.parent for path in sorted(folder.glob("*/golden.json")) if "logits" in path.read_text())
    engine, rng = Engine.load(name, dtype="float32", quant="none"), random.Random(1)
    if engine.shape.scores:
        return
    prompt = [rng.randrange(engine.runner.vocab_size) for _ in range(9)]
    continuations = random_continuations(rng, engine.runner.vocab_size, 12)
    check(engine, prompt, continuations, engine.score(prompt, continuations))


def test_a_token_that_reaches_over_the_border_belongs_to_the_continuation(engine):
    crossing = 0
    pairs = [("Once upon a ti", "me there"), (STORY, " ran"), ("The li", "ttle dog"), ("The ", "dog"), ("A", "")]
    for prompt, text in pairs:
        [score] = engine.score(prompt, [text])
        own, whole = engine.encode(prompt), engine.encode(prompt + text)
        shared = len([*takewhile(lambda pair: pair[0] == pair[1], zip(own, whole, strict=False))])
        crossing += shared < len(own)
        assert score.token_ids == whole[shared:]
        assert score.token_logprobs == pytest.approx(by_logits(engine, whole[:shared], whole[shared:])[0], abs=1e-4)
    assert crossing >= 2


def test_continuations_that_share_different_parts_of_the_prompt(engine):
    texts = ["ttle dog", "", " cat", "on", "me"]
    together = engine.score("The dog and the li", texts)
    for text, score in zip(texts, together, strict=True):
        [alone] = engine.score("The dog and the li", [text])
        assert score.token_ids == alone.token_ids and score.is_greedy == alone.is_greedy
        assert score.token_logprobs == pytest.approx(alone.token_logprobs, abs=1e-4)


def test_alternatives(engine):
    [score] = engine.score(STORY, [" ran to the park."], top_logprobs=3)
    assert score.top_logprobs is not None
    for logp, top in zip(score.token_logprobs, score.top_logprobs, strict=True):
        assert [x for _, x in top] == sorted([x for _, x in top], reverse=True) and len(top) == 3
        assert top[0][1] >= logp
    assert score.is_greedy == all(t == top[0][0] for t, top in zip(score.token_ids, score.top_logprobs, strict=True))


def test_many_continuations_read_the_prompt_once():
    engine = Engine.load(demo_folder(), dtype="float32")
    rng = random.Random(2)
    prompt = [rng.randrange(3, 1536) for _ in range(400)]
    continuations = [[rng.randrange(3, 1536) for _ in range(5)] for _ in range(300)]
    [(_, result)] = engine.serve([score_request(engine.model, prompt, continuations)])
    places = {tuple(one[:n]) for one in continuations for n in range(5)}
    assert result.stats["nodes_evaluated"] == len(places)
    assert result.stats["forward_passes"] <= 2 + -(-len(places) // ROWS)
    assert result.stats["live_nodes_peak"] <= len(prompt) + 5 + ROWS
    check(engine, prompt, continuations[:3], result.scores[:3])


@pytest.mark.parametrize("pages", [400, 30, 12])
def test_any_number_fits_any_cache(pages):
    """The cache holds the prompt, the longest path, and at times little more; each place is evaluated once."""
    table, rng = Table(9, 3), random.Random(3)
    continuations = tuple(tuple(rng.randrange(9) for _ in range(rng.randint(0, 7))) for _ in range(150))
    run = drive(Scoring(continuations, top=2), table, 8, pages=pages, page_size=1)
    assert run.result is not None and run.result.scores is not None
    for tokens, score in zip(continuations, run.result.scores, strict=True):
        assert score.token_logprobs == pytest.approx([float(table(tokens[:i])[t]) for i, t in enumerate(tokens)])
        assert score.is_greedy == all(int(table(tokens[:i]).argmax()) == t for i, t in enumerate(tokens))
    assert run.evaluated == len({tokens[:i] for tokens in continuations for i in range(len(tokens))})
    assert (run.full > 0) == (pages < 400)
    assert run.trees["target"].peak_live <= 3 + 8 + ROWS


def test_a_long_continuation_moves_into_the_trunk():
    table, tokens = Table(9, 4), tuple(random.Random(4).randrange(9) for _ in range(200))
    run = drive(Scoring((tokens,)), table, 200, pages=210, page_size=1)
    expected = [float(table(tokens[:i])[token]) for i, token in enumerate(tokens)]
    assert run.result.scores[0].token_logprobs == pytest.approx(expected)
    assert len(run.passes) == -(-200 // ROWS)


@pytest.mark.parametrize(
    ("prompt", "continuations", "says"),
    [
        (STORY, "text", "continuations: expected a list"),
        (STORY, [3], r"continuations\[0\]: expected a text or token ids, got 3"),
        (STORY, [[1], [1 << 20]], r"continuations\[1\]: expected token ids"),
        (STORY, [[5] * 600], "the prompt with its continuation has"),
        ([], [[1]], "the prompt is empty"),
        ([-1], [[1]], "expected token ids"),
    ],
)
def test_what_cannot_be_scored(engine, prompt, continuations, says):
    with pytest.raises(UsageError, match=says):
        engine.score(prompt, continuations)


def test_nothing_to_score(engine):
    assert engine.score(STORY, []) == []
    assert [score.logprob for score in engine.score(STORY, ["", []])] == [0.0, 0.0]


def test_batch(engine, tmp_path):
    lines = [
        {"prompt": STORY, "score": [" ran", " sat.", "", [5, 6]]},
        {"prompt": "Hello", "params": {"max_new_tokens": 2}},
        {"id": "ids", "prompt_ids": [1, 5, 9], "score": [[7, 8]]},
        {"prompt": STORY, "score": []},
        {"prompt": STORY, "score": "text"},
        {"prompt": STORY, "score": [3]},
        {"messages": [], "score": ["a"]},
        {"prompt": STORY, "score": ["a"], "params": {"beams": 3}},
        {"prompt": 3, "score": ["a"]},
    ]
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("".join(json.dumps(line) + "\n" for line in lines))
    argv = ["--input", str(source), "--output", str(target), "--dtype", "float32", "-q"]
    assert batch.main([*argv, "--trace", str(tmp_path / "page.html")]) == 2
    answers = [json.loads(line) for line in target.read_text().splitlines()]
    assert [*answers[0]] == ["id", "scores", "stats", "record", "flags"]
    assert answers[2]["id"] == "ids" and "outputs" in answers[1]
    for one, score in zip(answers[0]["scores"], engine.score(STORY, lines[0]["score"]), strict=True):
        assert one["token_ids"] == score.token_ids and one["is_greedy"] == score.is_greedy
        assert one["token_logprobs"] == pytest.approx(score.token_logprobs, abs=1e-4)
        assert one["logprob"] == pytest.approx(score.logprob, abs=1e-4)
    assert answers[3]["scores"] == []
    says = ["a list", "expected a text or token ids", "prompt or prompt_ids", "nothing is generated", "a string"]
    for answer, words in zip(answers[4:], says, strict=True):
        assert words in answer["error"]["message"]
    assert batch.main([*argv, "--resume"]) == 2
    assert [json.loads(line) for line in target.read_text().splitlines()] == answers


def test_a_token_that_cannot_be_has_null():
    score = ContinuationScore([3, 4], [-math.inf, -1.0], -math.inf, False)
    assert score.record() == {"logprob": None, "is_greedy": False, "token_ids": [3, 4], "token_logprobs": [None, -1.0]}


def test_the_page(capsys):
    """The snippets of docs/scoring.md print what it shows."""
    page, names = Path("docs/scoring.md").read_text(), {}
    for code, shown in re.findall(r"^```python\n(.*?)^```\n\n```text\n(.*?)^```", page, re.M | re.S):
        exec(compile(code, "docs/scoring.md", "exec"), names)
        assert capsys.readouterr().out == shown
    assert page.count("```python") == page.count("```text") > 2
