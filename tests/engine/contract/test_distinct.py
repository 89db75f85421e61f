"""Outputs of distinct texts, beside brute force over all token sequences of a small vocabulary."""

import json
import math
import random
from collections import defaultdict

import pytest
import torch

from engine import Engine, Request, Text, UsageError
from engine.app import batch
from engine.contract import Output
from engine.contract.distinct import distinct
from engine.demo import demo_folder
from search import BeamSample, Diverse, Greedy, Sample, SBoN, Trie

PROMPT = "The little girl saw"


@pytest.fixture(scope="module")
def engine() -> Engine:
    return Engine.load(demo_folder(), dtype="float32", kv_memory="64M")


def few_tokens(engine, rng, size):
    """Some tokens whose spellings overlap, and the end of a text."""
    spelt = engine.tokenizer.data()
    letters = [spelt.index(letter) for letter in (b"t", b"h", b"e")]
    longer = [token for token, data in enumerate(spelt) if len(data) > 1 and {*data} <= {*b"the"}]
    return [*letters, *rng.sample(longer, size), min(engine.eos_token_ids)]


def all_sequences(engine, ids, allowed, end, longest):
    """Every sequence of a few tokens that ends, and its log-probability."""
    found, open_paths = {}, {(): 0.0}
    for length in range(1, longest + 1):
        rows = {path: torch.log_softmax(engine.logits([*ids, *path])[-1], -1) for path in open_paths}
        longer = {(*path, token): open_paths[path] + float(rows[path][token]) for path in rows for token in allowed}
        ended = {path: logp for path, logp in longer.items() if path[-1] == end or length == longest}
        found |= ended
        open_paths = {path: logp for path, logp in longer.items() if path not in ended}
    return found


def add(numbers):
    return math.log(math.fsum(map(math.exp, numbers)))


@pytest.mark.parametrize("case", range(40))
def test_beams_equal_brute_force(engine, case):
    """A beam per sequence finds them all, so the distinct texts are those of the whole distribution."""
    rng, penalty = random.Random(case), case % 2 / 2
    allowed = few_tokens(engine, rng, 2)
    end, ids = allowed[-1], engine.encode(PROMPT)
    texts = defaultdict(list)
    for path, logp in all_sequences(engine, ids, allowed, end, 3).items():
        texts[engine.tokenizer.decode(path)].append((logp / len(path) ** penalty, logp, [*path]))
    assert max(map(len, texts.values())) > 1
    best = sorted((max(each) for each in texts.values()), reverse=True)
    sums = [(*(add([spelling[i] for spelling in each]) for i in range(2)), max(each)[2]) for each in texts.values()]
    sums.sort(reverse=True)
    search = Trie(160, length_penalty=penalty, early_stopping="never", num_return_sequences=6)
    others = [token for token in range(engine.shape.vocab_size) if token not in allowed]
    options = {"max_new_tokens": 3, "eos_token_ids": [end], "suppress_tokens": others}
    for how, expected in (("text", best), ("text-sum", sums)):
        [result] = engine.generate([ids], search, distinct=how, **options)
        assert [output.token_ids for output in result.outputs] == [path for _, _, path in expected[:6]]
        assert [output.score for output in result.outputs] == pytest.approx([s for s, _, _ in expected[:6]], abs=1e-4)
        assert [output.logprob for output in result.outputs] == pytest.approx([x for _, x, _ in expected[:6]], abs=1e-4)
        assert len({output.text for output in result.outputs}) == 6
        assert result.stats["distinct_texts"] == len(texts)
        assert result.stats["outputs_found"] == sum(map(len, texts.values()))


SEARCHES = [
    Trie(6, num_return_sequences=2),
    Trie(6, num_return_sequences=2, early_stopping="best"),
    Diverse(6, groups=3, num_return_sequences=2),
    BeamSample(beams=6, num_return_sequences=2, seed=3),
    Sample(num_return_sequences=6, seed=3),
    Greedy(),
]


@pytest.mark.parametrize("search", SEARCHES, ids=lambda search: type(search).__name__)
def test_searches_of_several_outputs(engine, search):
    """They are the first distinct texts of all that the search finds; token log-probabilities are of their tokens."""
    allowed = few_tokens(engine, random.Random(5), 3)
    others = [token for token in range(engine.shape.vocab_size) if token not in allowed]
    options = {"max_new_tokens": 3, "suppress_tokens": others}
    [whole] = engine.generate([PROMPT], search.with_all_outputs(), **options)
    wanted = {output.text: output.token_ids for output in reversed(whole.outputs)}
    [result] = engine.generate([PROMPT], search, distinct="text", logprobs=0, **options)
    n = getattr(search, "num_return_sequences", 1)
    firsts = list(dict.fromkeys(output.text for output in whole.outputs))[:n]
    assert [output.text for output in result.outputs] == firsts
    assert [output.token_ids for output in result.outputs] == [wanted[text] for text in firsts]
    for output in result.outputs:
        assert sum(output.token_logprobs) == pytest.approx(output.logprob, abs=1e-4)


def test_samples_of_one_sequence_count_once():
    one, two = Output([1, 2], -1.0, -0.5, "eos", "ab"), Output([3], -2.0, -2.0, "eos", "ab")
    third, stuck = Output([4], -0.9, -0.9, "eos", "c"), Output([5], -9.0, None, "constraint", "d")
    [first, second, last] = distinct([one, third, one, two, stuck], "text-sum")
    assert first.token_ids == [1, 2] and first.logprob == pytest.approx(add([-1, -2]))
    assert first.score == pytest.approx(add([-0.5, -2])) and second == third and last == stuck
    assert distinct([one, third, one, two, stuck], "text") == [one, third, stuck]
    assert distinct([third, one, two], "text-sum")[0].text == "ab"  # together they are likelier


def test_a_stream_ends_with_the_text_that_the_sums_rank_first(engine):
    allowed = few_tokens(engine, random.Random(2), 3)
    others = [token for token in range(engine.shape.vocab_size) if token not in allowed]
    options = {"max_new_tokens": 3, "suppress_tokens": others, "distinct": "text-sum"}
    events = [*engine.stream(PROMPT, Trie(40), **options)]
    text = "".join(event.text for event in events if isinstance(event, Text))
    assert text == events[-1].result.outputs[0].text


def test_what_cannot_be(engine, tmp_path, capsys):
    ranked = Request(PROMPT, SBoN(n=4), distinct="text-sum", reward=lambda prompt, texts: [0.0] * len(texts))
    for request, message in (
        (ranked, "distinct: rewards of one text cannot be added"),
        (Request(PROMPT, Greedy(), distinct="tokens"), "distinct: expected text or text-sum, got 'tokens'"),
    ):
        [(_, error)] = engine.serve([request])
        assert isinstance(error, UsageError) and str(error).startswith(message)
    params = {"beams": 4, "num_return_sequences": 3}
    (path := tmp_path / "lines").write_text(json.dumps({"prompt": PROMPT, "params": params}))
    for how in ("text", "text-sum"):
        assert batch.main(["--input", str(path), "--distinct", how, "--max-new-tokens", "4"]) == 0
        outputs = json.loads(capsys.readouterr().out)["outputs"]
        assert len({output["text"] for output in outputs}) == len(outputs) == 3
