"""Outputs that begin with given bytes, and healed prompts, beside brute force."""

import json
import random
from pathlib import Path

import pytest
import torch

from engine import Engine, Request, Text
from engine.app import batch
from engine.demo import demo_folder
from engine.errors import UsageError
from engine.rewards import Responses
from engine.rules.begin import Begin, Spellings, heal
from engine.text.stopping import StopStrings
from engine.text.tokenizer import Tokenizer
from search import BoN, Greedy, Sample, Trie

STORY = "Once upon a time there was a little dog. The dog ra"


@pytest.fixture(scope="module")
def engine() -> Engine:
    return Engine.load(demo_folder(), dtype="float32")


def random_spellings(rng: random.Random) -> Spellings:
    """Few bytes, so that spellings overlap; some tokens have none, and some have the same."""
    return Spellings(
        [bytes(rng.choices(b"ab\xff", k=rng.choice([0, 1, 1, 2, 3, 4]))) for _ in range(rng.randint(4, 12))]
    )


def test_allowed_tokens_equal_brute_force():
    """500 vocabularies and beginnings: a path is allowed if its bytes and the beginning agree as far as both go."""
    rng, cut = random.Random(0), 0
    for _ in range(500):
        known = random_spellings(rng)
        wanted = bytes(rng.choices(b"ab\xff", k=rng.randint(1, 5)))
        constraint = Begin(wanted, known)
        reached = [((), constraint.start([]))]
        for _ in range(3):
            following = []
            for path, state in reached:
                [allowed] = constraint.allowed([state])
                allowed = None if allowed is None else allowed.tolist()
                data = b"".join(known.data[token] for token in path)
                for token, spelling in enumerate(known.data):
                    whole = data + spelling
                    agrees = bool(spelling) and (wanted.startswith(whole) or whole.startswith(wanted))
                    assert (allowed is None or token in allowed) == (agrees or len(data) >= len(wanted)), (wanted, path)
                if allowed is not None:
                    assert allowed == sorted({*allowed})
                    cut += not allowed
                    following += [((*path, token), constraint.advance(state, token)) for token in allowed]
            reached = following
    assert cut > 100  # beginnings that cannot be spelled


def test_ends_that_have_a_text_wait_for_the_beginning():
    known = Spellings([b"a", b"ab", b"abc", b"b", b""])
    constraint = Begin(b"ab", known, [0, 1, 3, 4, 9])
    assert [x if x is None else x.tolist() for x in constraint.allowed([0, 1, 2])] == [[1, 2], [3], None]


def test_what_is_cut_equals_brute_force():
    """The longest end that one longer token begins with, whole characters only, and never the first token."""
    rng, cuts = random.Random(1), set()
    for _ in range(500):
        known = random_spellings(rng)
        ids = [rng.randrange(len(known.data)) for _ in range(rng.randint(1, 5))]
        best = 0
        for count in range(1, len(ids)):
            parts = [known.data[token] for token in ids[-count:]]
            data = b"".join(parts)
            longer = any(len(other) > len(data) and other.startswith(data) for other in known.data)
            if all(parts) and longer and b"\xff" not in data:
                best = count
        kept, data = heal(ids, known)
        assert kept == ids[: len(ids) - best] and data == b"".join(known.data[token] for token in ids[len(kept) :])
        cuts.add(best)
    assert cuts >= {0, 1, 2}


@pytest.mark.parametrize("search", [Greedy(), Trie(4, num_return_sequences=3), Sample(seed=2, num_return_sequences=3)])
def test_outputs_begin_with_a_text(engine, search):
    for begin in (" The cat", "Th", "é", b" lit"):
        [result] = engine.generate([STORY], search, begin=begin, max_new_tokens=12)
        data = engine.tokenizer.data()
        for output in result.outputs:
            written = b"".join(data[token] for token in output.token_ids)
            assert written.startswith(begin.encode() if isinstance(begin, str) else begin)


@pytest.mark.parametrize("begin", [b" run", b"tion", b" l"])
def test_the_best_outputs_equal_brute_force(engine, begin):
    """They are the best of all paths of two tokens that agree with it; the search has a beam per first token."""
    data, ids = engine.tokenizer.data(), engine.encode("The dog can")
    row_V, found = torch.log_softmax(engine.logits(ids)[-1], -1), []
    for one in [token for token, s in enumerate(data) if s and (s.startswith(begin) or begin.startswith(s))]:
        next_V, rest = row_V[one] + torch.log_softmax(engine.logits([*ids, one])[-1], -1), begin[len(data[one]) :]
        for two, logp in enumerate(next_V.tolist()):
            s = data[two]
            if not rest or (s and (s.startswith(rest) or rest.startswith(s))):
                found.append((logp, [one, two]))
    assert len({path[0] for _, path in found}) <= 64
    search = Trie(64, length_penalty=0.0, num_return_sequences=5)
    [result] = engine.generate([ids], search, begin=begin, max_new_tokens=2, ignore_eos=True)
    expected = sorted(found, key=lambda one: -one[0])[:5]
    assert [output.token_ids for output in result.outputs] == [path for _, path in expected]
    assert [output.logprob for output in result.outputs] == pytest.approx([logp for logp, _ in expected], abs=1e-4)


def test_a_prompt_that_ends_inside_a_word(engine):
    """Its output is that of the prompt without its end, among those that begin with the end."""
    spelt = engine.tokenizer.data()
    healed = 0
    for prompt in (STORY, "The opposite of hot is co", "Once upon a ti", "The do", "The dog."):
        ids = engine.encode(prompt)
        kept, cut = heal(ids, Spellings(spelt))
        healed += bool(cut)
        search = Trie(3, num_return_sequences=2)
        [result] = engine.generate([prompt], search, heal=True, max_new_tokens=8)
        options = {"begin": cut, "max_new_tokens": 8 + len(ids) - len(kept)} if cut else {"max_new_tokens": 8}
        [expected] = engine.generate([kept], search, **options)
        assert [o.token_ids for o in result.outputs] == [o.token_ids for o in expected.outputs]
        for output in result.outputs:
            assert output.text == engine.tokenizer.decode_continuation(kept, output.token_ids)[len(cut.decode()) :]
        events = engine.stream(prompt, search, heal=True, max_new_tokens=8)
        assert "".join(event.text for event in events if isinstance(event, Text)) == result.outputs[0].text
        [stopped] = engine.generate([prompt], Greedy(), heal=True, max_new_tokens=8, stop=[prompt[-1:]])
        assert prompt[-1:] not in stopped.outputs[0].text
    assert healed >= 3
    [plain], [mended] = (
        engine.generate(["The opposite of hot is co"], Greedy(), heal=on, max_new_tokens=4) for on in (False, True)
    )
    assert mended.outputs[0].text.startswith("ld") and mended.outputs[0].logprob is not None
    assert plain.stats["prompt_tokens"] > mended.stats["prompt_tokens"]


def test_a_stop_string_in_the_healed_text_ends_no_output(engine):
    data = engine.tokenizer.data()
    c, o, x = (data.index(letter) for letter in (b"c", b"o", b"x"))
    stops = StopStrings(engine.tokenizer, ["o"], "co")
    assert not any(stops([c, o, *[x] * more]) for more in range(60))
    assert all(stops([c, o, *[x] * more, o]) for more in range(60))


def test_the_shortest_output_does_not_count_the_healed_text(engine):
    for least, text in ((None, "ld."), (0, "ld."), (1, "ld."), (2, "ld.."), (3, "ld...")):
        options = {"heal": True, "min_new_tokens": least, "max_new_tokens": 6}
        [result] = engine.generate(["The opposite of hot is co"], Greedy(), **options)
        assert (result.outputs[0].text, result.outputs[0].finish_reason) == (text, "eos"), least
    with pytest.raises(UsageError, match="min_new_tokens: expected an integer"):
        engine.generate(["The opposite of hot is co"], Greedy(), heal=True, min_new_tokens="x")


@pytest.mark.parametrize("name", ["sp_bpe", "sp_unigram"])
def test_a_stop_string_that_begins_where_the_healed_text_ends(name):
    """A text that begins with "▁th" is decoded without its space, which the healed text has."""
    tokenizer = Tokenizer.load(Path("tests/golden/text") / name)
    healed, x = ([*tokenizer._encoder.pieces].index(piece) for piece in ("▁t", "x"))
    prompt = tokenizer.encode("a", add_special=False)
    assert StopStrings(tokenizer, ["x"], " t", prompt)([healed, x])
    assert not StopStrings(tokenizer, ["x", "tx", " t"], " t", prompt)([healed])


def test_a_reward_function_reads_the_outputs_of_a_healed_prompt(engine):
    """The texts are those of the outputs, the prompt has its end, and stop strings in that end are none."""
    read = []

    def reward(prompt, texts):
        read.append((prompt, *texts))
        return [float(text.count("a")) for text in texts]

    for prompt, given in ((text := "The opposite of hot is co", text), (engine.encode(text), text)):
        search = BoN(n=4, num_return_sequences=4, temperature=3)
        [result] = engine.generate([prompt], search, heal=True, max_new_tokens=6, stop=["o"], reward=reward)
        told, *texts = read.pop()
        assert told == given and sorted(texts) == sorted(output.text for output in result.outputs)
        assert len({*texts}) > 1 and not any("o" in text for text in texts)


def test_a_reward_model_reads_healed_tokens_with_a_stop_string(engine):
    prompt, healed = engine.encode("The opposite of hot is"), engine.tokenizer.encode(" co", add_special=False)
    rest = engine.tokenizer.encode("ld. No", add_special=False)
    stops = StopStrings(engine.tokenizer, ["o"], " co", prompt)
    responses = Responses(engine.tokenizer, prompt, stops=stops, healed=" co")
    cut = engine.tokenizer.encode("ld.", add_special=False)  # " No" is one token
    assert responses.before_stop([*healed, *rest]) == [*healed, *cut]


def test_a_beginning_after_a_healed_prompt(engine):
    [result] = engine.generate([STORY], Greedy(), heal=True, begin="in", max_new_tokens=6)
    assert result.outputs[0].text.startswith("in")


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"begin": 3}, "begin: expected a text"),
        ({"heal": 1}, "heal: expected true or false"),
        ({"heal": True, "choices": ["a"]}, "heal: it cannot be combined with choices"),
        ({"begin": "a", "choices": ["a"]}, "begin and choices: expected at most one"),
    ],
)
def test_what_cannot_be(engine, options, says):
    with pytest.raises(UsageError, match=says):
        engine.generate([STORY], Greedy(), **options)


def test_many_requests_together(engine):
    prompts = ["The do", STORY, "The opposite of hot is co"]
    alone = [engine.generate([prompt], Greedy(), heal=True, max_new_tokens=5)[0].outputs for prompt in prompts]
    results = dict(engine.serve(Request(prompt, Greedy(), 5, heal=True) for prompt in prompts))
    assert [results[i].outputs for i in range(3)] == alone
    assert len({outputs[0].text for outputs in alone}) == 3


def test_in_a_batch_line(engine, tmp_path):
    lines = [{"prompt": STORY, "params": {"heal": True}}, {"prompt": "The", "params": {"begin": " cat"}}]
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("".join(json.dumps(line) + "\n" for line in lines))
    argv = ["--input", str(source), "--output", str(target), "--dtype", "float32", "--max-new-tokens", "5", "-q"]
    assert batch.main(argv) == 0
    answers = [json.loads(line)["outputs"][0]["text"] for line in target.read_text().splitlines()]
    [healed] = engine.generate([STORY], Greedy(), heal=True, max_new_tokens=5)
    assert answers[0] == healed.outputs[0].text and answers[1].startswith(("cat", " cat"))
