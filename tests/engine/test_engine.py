"""Engine, end to end on a tiny random model: batches, limits, memory, streams, interruptions, sessions."""

import dataclasses
import json
import random
import re
import threading
from pathlib import Path
from typing import get_type_hints

import pytest
from safetensors.torch import load_file

from engine import Done, Engine, KVMemoryError, Prefill, Progress, Request, RequestOptions, Session, Text, UsageError
from engine.contract import SearchResult
from engine.conversation import Conversation
from engine.demo import demo_folder
from search import ULTS, Greedy, Sample, Trie
from tests.invariants import check_pool, check_tree
from tests.models.copies import changed
from tools.random_checkpoint import EOS, make

VOCAB = 260
GOLDEN = Path(__file__).parents[1] / "golden" / "llama"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("llama")
    make(folder, layers=2, width=32, mlp=48, heads=4, kv_heads=2, vocab=VOCAB, max_positions=200, seed=1, scale=0.7)
    return folder


@pytest.fixture(scope="module")
def engine(folder):
    return Engine.load(folder, kv_memory=1 << 22)


@pytest.fixture(autouse=True)
def the_pool_is_as_full_as_before(engine):
    before = engine.pool.used_pages
    yield
    check_pool(engine.pool)
    assert engine.pool.used_pages == before == 0


def small(folder, tokens, **options):
    """An engine whose pool holds this many tokens, rounded down to pages."""
    probe = Engine.load(folder, kv_memory=1 << 16)
    return Engine.load(folder, kv_memory=tokens * probe.pool.bytes_per_token, **options)


def prompts(count, seed=0):
    rng = random.Random(seed)
    return [[1] + [rng.randrange(3, VOCAB) for _ in range(rng.choice([1, 3, 8, 20, 60]))] for _ in range(count)]


SEARCHES = [
    Greedy(),
    Trie(beams=4),
    Sample(seed=5),
    Trie(beams=7, length_penalty=0.5, early_stopping=True, num_return_sequences=3),
    Sample(temperature=0.7, top_k=20, seed=9, num_return_sequences=4),
    Trie(beams=2, early_stopping="never", length_penalty=2.0),
    Sample(temperature=1.3, top_p=0.9, seed=2**40),
]


# --- batches ---


def requests(count=14):
    rng = random.Random(3)
    return [
        Request(p, SEARCHES[i % len(SEARCHES)], rng.randint(1, 24), eos_token_ids=rng.choice([None, [7, 30], range(9)]))
        for i, p in enumerate(prompts(count))
    ]


def same(a, b):
    assert [o.token_ids for o in a.outputs] == [o.token_ids for o in b.outputs]
    assert [o.text for o in a.outputs] == [o.text for o in b.outputs]
    assert [o.finish_reason for o in a.outputs] == [o.finish_reason for o in b.outputs]
    for x, y in zip(a.outputs, b.outputs, strict=True):
        assert x.logprob == pytest.approx(y.logprob, abs=1e-5) and x.score == pytest.approx(y.score, abs=1e-5)


def alone(engine, request):
    [(_, result)] = engine.serve([request])
    return result


@pytest.mark.parametrize("parallel", [1, 3, 16])
def test_a_batch_gives_what_its_lines_give_alone(engine, folder, parallel):
    crowd = Engine.load(folder, kv_memory=1 << 22, parallel=parallel)
    batch = requests()
    results = dict(crowd.serve(iter(batch)))
    assert sorted(results) == list(range(len(batch)))
    for i, request in enumerate(batch):
        same(results[i], alone(engine, request))
        assert results[i].stats["new_tokens"] == len(results[i].outputs[0].token_ids)
    check_pool(crowd.pool, [])


def test_a_batch_in_a_crowded_pool_gives_the_same(engine, folder):
    """Lines are sent back and start again; nobody notices."""
    crowd = small(folder, 16 * 16)
    batch = [dataclasses.replace(r, prompt=list(r.prompt)[:30]) for r in requests()]
    for i, result in crowd.serve(batch):
        same(result, alone(engine, batch[i]))
    check_pool(crowd.pool, [])


def test_a_line_is_reproduced_by_its_seed(engine):
    line = Request(prompts(1)[0], Sample(seed=77, num_return_sequences=3), 20)
    rng, first = random.Random(0), alone(engine, line)
    for _ in range(3):
        batch = requests(6)
        place = rng.randrange(7)
        batch.insert(place, line)
        same(dict(engine.serve(batch))[place], first)
    other = alone(engine, dataclasses.replace(line, search=Sample(seed=78, num_return_sequences=3)))
    assert other.outputs[0].token_ids != first.outputs[0].token_ids


def test_one_bad_line_does_not_disturb_the_others(engine):
    batch = requests(5)
    batch[1] = Request([], Greedy())
    batch[3] = UsageError("not JSON")
    results = dict(engine.serve(batch))
    assert isinstance(results[1], UsageError) and results[3] is batch[3]
    for i in (0, 2, 4):
        same(results[i], alone(engine, batch[i]))


def test_abandoning_a_batch_frees_its_pages(engine):
    stream = engine.serve(requests())
    next(stream)
    assert engine.pool.used_pages
    stream.close()

    class Stop(Exception):
        pass

    def stop(driver):
        raise Stop

    with pytest.raises(Stop):
        list(engine.serve(requests(), on_step=stop))


def test_results_agree_with_the_plain_forward(engine):
    for search in SEARCHES:
        prompt = prompts(3)[2]
        [result] = engine.generate([prompt], search, max_new_tokens=12)
        for output in result.outputs:
            logp_TV = engine.logits(prompt + output.token_ids).log_softmax(-1)
            told = sum(float(logp_TV[len(prompt) - 1 + i, t]) for i, t in enumerate(output.token_ids))
            assert output.logprob == pytest.approx(told, abs=1e-3)


# --- limits ---


def test_ends_of_sequence(engine):
    prompt = prompts(1)[0]
    free = engine.generate([prompt], Greedy(), max_new_tokens=20, ignore_eos=True)[0].outputs[0]
    assert len(free.token_ids) == 20 and free.finish_reason == "length"
    cut = free.token_ids[7]
    first = free.token_ids.index(cut)
    ended = engine.generate([prompt], Greedy(), max_new_tokens=20, eos_token_ids=[cut, 3])[0].outputs[0]
    assert ended.token_ids == free.token_ids[: first + 1] and ended.finish_reason == "eos"
    both = engine.generate([prompt], Greedy(), max_new_tokens=20, eos_token_ids=[cut], ignore_eos=True)[0].outputs[0]
    assert both.token_ids == free.token_ids
    assert engine.eos_token_ids == {EOS}
    none = engine.generate([prompt], Greedy(), max_new_tokens=20, eos_token_ids=[])[0].outputs[0]
    assert none.token_ids == free.token_ids
    for bad in ([-1], ["2"], [True]):
        with pytest.raises(UsageError, match="eos_token_ids"):
            engine.generate([prompt], Greedy(), eos_token_ids=bad)


def test_the_context_ends_the_answer(engine):
    """200 positions; the last token of an answer is never evaluated and needs none."""
    prompt = [1] + [5] * 189
    for search in (Greedy(), Trie(beams=3), Sample()):
        [result] = engine.generate([prompt], search, max_new_tokens=50, ignore_eos=True)
        assert len(result.outputs[0].token_ids) == 11 and result.outputs[0].finish_reason == "length"
    [result] = engine.generate([[1] * 200], Greedy(), ignore_eos=True)
    assert len(result.outputs[0].token_ids) == 1
    with pytest.raises(UsageError, match="201 tokens, this model's maximum context length is 200"):
        engine.generate([[1] * 201], Greedy())


def test_a_longer_context_than_the_checkpoints(tmp_path):
    """The logits are those that transformers computed, and a beam search is that of a checkpoint of this context."""
    golden = json.loads((GOLDEN / "plain" / "golden.json").read_text())
    expected = load_file(GOLDEN / "plain" / "golden.safetensors")
    folder = changed(tmp_path, "llama/plain", {"max_position_embeddings": 24})
    short, longer, own = (
        Engine.load(folder, dtype="float32"),
        Engine.load(folder, dtype="float32", context=64),
        Engine.load(GOLDEN / "plain", dtype="float32"),
    )
    assert "context 64: the checkpoint is made for 24 tokens" in longer.capabilities.warning
    assert not short.capabilities.warning
    for i, entry in enumerate(golden["logits"]):
        ids, rows = entry["prompt_ids"], entry["rows"]
        assert longer.logits(ids)[-rows:].allclose(expected[f"logits.{i}"], atol=1e-4)
    assert len(ids) == 60
    [one], [other] = (engine.generate([ids[:20]], Trie(beams=4), max_new_tokens=40) for engine in (longer, own))
    assert one.outputs == other.outputs
    with pytest.raises(UsageError, match="60 tokens, this model's maximum context length is 24"):
        short.generate([ids], Greedy())


def test_arguments_are_checked(engine):
    """Those that depend on the model; `test_arguments` has the others."""
    for prompt in ([], [VOCAB]):
        with pytest.raises(UsageError, match="prompt"):
            engine.generate([prompt], Greedy())
    with pytest.raises(UsageError, match="beams: at most"):
        engine.generate([[1]], Trie(beams=VOCAB))


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("max_tokens", "did you mean max_new_tokens?"),
        ("qqq", r"help\(engine.RequestOptions\) lists all"),
        ("beams", r"it is a parameter of the search: Trie\(beams=...\)"),
    ],
)
def test_an_option_that_does_not_exist_is_refused_with_a_hint(engine, name, hint):
    message = f"{name}: no such option\n{hint}"
    for prompts in ([[1, 2]], []):
        with pytest.raises(UsageError, match=message):
            engine.generate(prompts, Trie(), **{name: 3})
    for stream in (engine.stream, Session(engine).stream, Conversation(engine).stream):
        with pytest.raises(UsageError, match=message):
            list(stream("a", Trie(), **{name: 3}))


def test_control_tokens_in_a_prompt_are_text_unless_they_are_asked_for(folder):
    engine, prompt, options = Engine.load(folder, kv_memory=1 << 20), "a</s>b", {"max_new_tokens": 1}
    parsed = engine.tokenizer.encode(prompt, parse_special=True)
    plain = engine.tokenizer.encode(prompt)
    assert EOS in parsed and EOS not in plain

    def read(prompt, **options):
        return engine.service().check(Request(prompt, Greedy(), **options)).ids

    assert read(prompt, parse_special=True) == parsed and read(plain, parse_special=True) == plain
    assert read("ab") == engine.tokenizer.encode("ab")
    with pytest.warns(UserWarning, match="'</s>' in a prompt is read as text.*parse_special"):
        assert read(prompt) == plain
    assert read(prompt) == plain  # it is said once: a second warning would be an error here
    [result] = engine.generate([prompt], Greedy(), parse_special=True, **options)
    assert result.stats["prompt_tokens"] == len(parsed) < len(plain)
    for given in (prompt, plain):
        with pytest.raises(UsageError, match="parse_special: expected true or false, got 'yes'"):
            engine.generate([given], Greedy(), parse_special="yes")


def test_type_checkers_see_the_fields_of_a_request():
    own = {field.name: field.type for field in dataclasses.fields(Request) if field.name not in ("prompt", "search")}
    assert get_type_hints(RequestOptions) == own


# --- memory ---


@pytest.mark.parametrize("tokens", [64, 100, 160, 240])
@pytest.mark.parametrize(("prompt", "new"), [(5, 20), (40, 10), (30, 30)])
def test_the_advised_beam_counts_work(folder, tokens, prompt, new):
    engine = small(folder, tokens)
    with pytest.raises(KVMemoryError) as caught:
        engine.generate([[1] + [9] * (prompt - 1)], Trie(beams=250), max_new_tokens=new, ignore_eos=True)
    error = caught.value
    formula = f"(prompt {prompt} + new tokens {new} - 1 + branches 249) x {engine.pool.bytes_per_token} bytes"
    assert error.exit_code == 4 and formula in str(error) and "Trie needs at least" in str(error)
    advised = [int(n) for n in re.findall(r"--beams at most (\d+)|\((\d+) fit if", str(error)) for n in n if n]
    safe = advised[0] if "sure to fit" in str(error) else 0
    most = advised[-1] if advised else 0
    assert safe <= most < 250
    if safe:  # flat distributions: beams share next to nothing
        for search in (Trie(beams=safe), Sample(temperature=50.0, num_return_sequences=safe)):
            [result] = engine.generate([[1] + [9] * (prompt - 1)], search, max_new_tokens=new, ignore_eos=True)
            assert len(result.outputs[0].token_ids) == new
    if most:  # not refused before prefill; may still run out of memory later
        try:
            engine.generate([[1] + [9] * (prompt - 1)], Trie(beams=most), max_new_tokens=new, ignore_eos=True)
        except KVMemoryError as later:
            assert "the KV cache is full" in str(later)
    check_pool(engine.pool, [])


def test_the_advised_memory_works(folder):
    """Flat distributions: the least that is advised lets a beam search begin, the other number lets it end."""
    engine, options = small(folder, 64), {"max_new_tokens": 20, "ignore_eos": True}
    with pytest.raises(KVMemoryError) as caught:
        engine.generate([[1] + [9] * 29], Trie(beams=40), **options)
    for (size, unit), enough in zip(
        re.findall(r"([\d.]+) ([KM])B[ )]", caught.value.remedy), (False, True), strict=True
    ):
        given = Engine.load(folder, kv_memory=f"{size}{unit}")
        if enough:
            [result] = given.generate([[1] + [9] * 29], Trie(beams=40), **options)
            assert len(result.outputs[0].token_ids) == 20
        else:
            with pytest.raises(KVMemoryError, match="the KV cache is full"):
                given.generate([[1] + [9] * 29], Trie(beams=40), **options)


def test_refusal_with_several_sequences_to_return(folder):
    engine = small(folder, 64)
    with pytest.raises(KVMemoryError, match="--beams at most"):
        engine.generate([[1, 2, 3]], Trie(beams=200, num_return_sequences=200), max_new_tokens=10)


def test_the_advised_limit_of_new_tokens_works(folder):
    engine = small(folder, 64)
    with pytest.raises(KVMemoryError) as caught:
        engine.generate([[1] * 11], Greedy(), max_new_tokens=100)
    [limit] = re.findall(r"--max-new-tokens at most (\d+)", str(caught.value))
    [result] = engine.generate([[1] * 11], Greedy(), max_new_tokens=int(limit), ignore_eos=True)
    assert len(result.outputs[0].token_ids) == int(limit)
    with pytest.raises(KVMemoryError):
        engine.generate([[1] * 11], Greedy(), max_new_tokens=int(limit) + 1)


def test_a_prompt_beyond_memory_is_not_told_to_generate_less_than_nothing(folder):
    with pytest.raises(KVMemoryError) as caught:
        small(folder, 64).generate([[1] * 150], Greedy(), max_new_tokens=10)
    assert all(int(limit) > 0 for limit in re.findall(r"at most (-?\d+)", str(caught.value)))


@pytest.mark.parametrize("search", [Greedy(), Trie(beams=6)])
@pytest.mark.parametrize("with_draft", [False, True])
def test_the_advised_memory_is_enough_to_start(folder, search, with_draft):
    options = {"draft": folder} if with_draft else {}  # the draft's cache shares the memory
    engine = small(folder, 48, **options)
    unit = engine.pool.bytes_per_token
    with pytest.raises(KVMemoryError) as caught:
        engine.generate([[1] * 31], search, max_new_tokens=70, ignore_eos=True)
    [(number, size)] = re.findall(r"--kv-memory at least ([\d.]+) (bytes|KB|MB)", str(caught.value))
    given = int(float(number) * {"bytes": 1, "KB": 1 << 10, "MB": 1 << 20}[size])
    enough = Engine.load(folder, kv_memory=given, **options)
    assert enough.pool.bytes_per_token == unit
    try:
        enough.generate([[1] * 31], search, max_new_tokens=70, ignore_eos=True)
    except KVMemoryError as error:
        assert "needs at least" not in str(error), f"refused again: {error}"


def test_running_out_midway_fails_one_line_and_frees_its_pages(folder):
    engine = small(folder, 96)
    lines = [Request([1, 2, 3], Sample(temperature=50.0, num_return_sequences=8), 60, ignore_eos=True),
             Request([1, 2, 3], Greedy(), 10, ignore_eos=True)]  # fmt: skip
    results = dict(engine.serve(lines))
    assert isinstance(results[0], KVMemoryError) and len(results[1].outputs[0].token_ids) == 10
    check_pool(engine.pool, [])


def test_memory_of_less_than_a_page(folder):
    with pytest.raises(KVMemoryError, match="less than a page"):
        Engine.load(folder, kv_memory=100)


# --- streams ---


def follow(stream):
    """Text, event kinds and the result; checks the order of events."""
    text, result, last = "", None, 0
    for event in stream:
        assert result is None, "nothing comes after Done"
        if isinstance(event, Text):
            assert event.text
            text += event.text
        elif isinstance(event, Prefill):
            assert last <= event.done <= event.total and not text
            last = event.done
        elif isinstance(event, Progress):
            check_tree(event.tree)
            assert event.report.best is None or isinstance(list(event.report.best()), list)
        elif isinstance(event, Done):
            result = event.result
    return text, result


@pytest.mark.parametrize("search", SEARCHES, ids=lambda s: type(s).__name__)
def test_streamed_text_is_the_text(engine, search):
    for prompt in prompts(5, seed=4):
        text, result = follow(engine.stream(prompt, search, max_new_tokens=30))
        assert text == result.outputs[0].text
        same(result, alone(engine, Request(prompt, search, 30)))


def stop_strings_of(text, rng):
    """Strings that occur in a text: one character, some across tokens, one with a false start before it."""
    i = rng.randrange(len(text))
    return [text[i], text[i : i + 5], text[max(0, i - 3) : i + 1]]


@pytest.mark.parametrize("search", SEARCHES, ids=lambda s: type(s).__name__)
def test_stop_strings_end_the_text_wherever_tokens_end(engine, search):
    rng, stopped = random.Random(1), 0
    for prompt in prompts(4, seed=8):
        free = alone(engine, Request(prompt, search, 30, ignore_eos=True)).outputs[0].text
        for stop in stop_strings_of(free, rng):
            stops = [stop, "never to be seen"]
            text, result = follow(engine.stream(prompt, search, max_new_tokens=30, ignore_eos=True, stop=stops))
            best = result.outputs[0]
            assert text == best.text and stop not in text
            for output in result.outputs:
                whole = engine.tokenizer.decode(output.token_ids)
                assert (stop in whole) == (output.finish_reason == "stop")
                assert output.text == whole.split(stop)[0]
                if output.finish_reason == "stop":  # it ended as soon as the string was there
                    stopped += 1
                    assert stop not in engine.tokenizer.decode(output.token_ids[:-1])
            if not isinstance(search, Trie):
                assert result.outputs[0].finish_reason == "stop" or len(result.outputs) > 1
    assert stopped


@pytest.mark.parametrize("search", SEARCHES, ids=lambda s: type(s).__name__)
def test_the_spelling_of_a_special_token_stops_at_the_token(engine, search):
    """Other than in transformers, "<" alone does not stop there: the token has no text."""
    mark, stopped = engine.tokenizer.special_tokens["eos_token"], 0
    [end] = engine.tokenizer.encode(mark, add_special=False, parse_special=True)
    for prompt in prompts(4, seed=8):
        options = {"max_new_tokens": 30, "ignore_eos": True, "stop": ["never", mark], "logit_bias": {end: 6.0}}
        text, result = follow(engine.stream(prompt, search, **options))
        assert text == result.outputs[0].text
        for output in result.outputs:
            *before, last = output.token_ids
            assert end not in before and (last == end) == (output.finish_reason == "stop")
            assert output.text == engine.tokenizer.decode(output.token_ids)
            stopped += last == end
    assert stopped


@pytest.mark.parametrize("search", SEARCHES, ids=lambda s: type(s).__name__)
@pytest.mark.parametrize("steps", [1, 2, 5, 13])
def test_an_interrupted_stream_keeps_what_it_has(engine, search, steps):
    prompt, calls = prompts(1)[0], iter(range(1000))
    text, result = follow(
        engine.stream(prompt, search, max_new_tokens=30, ignore_eos=True, interrupted=lambda: next(calls) >= steps - 1)
    )
    [output] = result.outputs
    assert output.finish_reason == "interrupted" and output.logprob is None
    assert text == output.text == engine.tokenizer.decode(output.token_ids)
    assert 0 < len(output.token_ids) <= steps
    assert result.stats["new_tokens"] == len(output.token_ids)


@pytest.mark.parametrize("search", SEARCHES[:3], ids=lambda s: type(s).__name__)
def test_interrupted_while_the_prompt_is_read(engine, folder, search):
    slow = Engine.load(folder, kv_memory=1 << 20)
    slow.runner.budget = 10
    text, result = follow(slow.stream([1] + [9] * 80, search, max_new_tokens=5, interrupted=lambda: True))
    assert text == "" and result.outputs[0].token_ids == [] and result.outputs[0].finish_reason == "interrupted"
    stats = result.stats
    assert 0 <= stats["prefill_seconds"] < 60 and 0 <= stats["decode_seconds"] < 60
    assert stats["nodes_evaluated"] >= 0 and stats["prompt_tokens"] == 81
    check_pool(slow.pool, [])


@pytest.mark.parametrize("events", [1, 2, 3, 8])
def test_a_stream_left_alone_frees_its_pages(engine, events):
    for search in (Greedy(), Trie(beams=4), Sample(num_return_sequences=3)):
        stream = engine.stream(prompts(1)[0], search, max_new_tokens=40, ignore_eos=True)
        for _ in range(events):
            next(stream)
        stream.close()
        assert engine.pool.used_pages == 0


def test_prefill_is_told(engine, folder):
    slow = Engine.load(folder, kv_memory=1 << 20)
    slow.runner.budget = 10
    told = [e for e in slow.stream([1] + [9] * 80, Greedy(), max_new_tokens=3) if isinstance(e, Prefill)]
    assert [e.done for e in told] == list(range(10, 81, 10)) and {e.total for e in told} == {81}


# --- sessions ---


def chat(engine, search, turns=4, seed=0):
    """Turns of a session, each with the result of a fresh run beside it."""
    rng, session, prompt = random.Random(seed), Session(engine), [1]
    for turn in range(turns):
        prompt = prompt + [rng.randrange(3, engine.shape.vocab_size) for _ in range(rng.randint(1, 12))]
        _, result = follow(session.stream(prompt, search, max_new_tokens=10))
        yield turn, result, lambda prompt=prompt: alone(engine, Request(prompt, search, 10))
        prompt = prompt + result.outputs[0].token_ids
    session.close()
    assert engine.pool.used_pages == 0


@pytest.mark.parametrize("search", SEARCHES, ids=lambda s: type(s).__name__)
def test_a_session_says_what_fresh_runs_say(engine, search):
    reused = []
    for turn, result, fresh in chat(engine, search):
        same(result, fresh())
        reused.append(result.stats["reused_tokens"])
        assert turn == 0 or reused[-1] > 0
    assert reused[-1] > 10


@pytest.mark.parametrize("variant", ["dynamic", "yarn", "llama3"])
def test_a_session_on_stretched_positions_says_what_fresh_runs_say(variant):
    """Beyond the original length, `dynamic` turns keys by the length of the whole prompt: old ones no longer fit."""
    stretched = Engine.load(GOLDEN / variant, dtype="float32", kv_memory=1 << 20)
    for _, result, fresh in chat(stretched, Greedy(), turns=7):
        same(result, fresh())


def test_a_session_survives_refusals_interruptions_and_other_prompts(engine):
    session, calls = Session(engine), iter(range(100))
    prompt = prompts(1, seed=2)[0] + [9, 10, 11]
    options = {"max_new_tokens": 9, "ignore_eos": True}
    follow(session.stream(prompt, Trie(beams=3), interrupted=lambda: next(calls) > 4, **options))
    held = engine.pool.used_pages
    assert held
    with pytest.raises(UsageError):
        follow(session.stream([1] * 300, Greedy()))
    assert engine.pool.used_pages == held
    _, result = follow(session.stream([*prompt, 40, 41], Greedy(), max_new_tokens=8))
    assert result.stats["reused_tokens"] >= len(prompt)
    same(result, alone(engine, Request([*prompt, 40, 41], Greedy(), 8)))
    stream = session.stream([*prompt, 42], Trie(beams=3), max_new_tokens=20, ignore_eos=True)
    for _ in range(4):
        next(stream)
    stream.close()
    _, result = follow(session.stream([1, 200, 201], Sample(seed=3), max_new_tokens=8))
    same(result, alone(engine, Request([1, 200, 201], Sample(seed=3), 8)))
    session.close()
    session.close()


def test_the_end_of_a_session_returns_its_pages(engine):
    session = Session(engine)
    follow(session.stream([1, 5, 6, 7], Greedy(), max_new_tokens=3))
    stream = session.stream([1, 5, 6, 7, 8], Greedy(), max_new_tokens=9, ignore_eos=True)
    next(stream)
    assert engine.pool.used_pages
    del session
    assert engine.pool.used_pages  # the stream holds it
    del stream
    assert engine.pool.used_pages == 0
    check_pool(engine.pool, [])


def test_two_streams_of_a_session_at_once_lose_no_pages(engine):
    session, options = Session(engine), {"max_new_tokens": 4, "ignore_eos": True}
    first, second = (session.stream([1, 5, 6, last], Greedy(), **options) for last in (7, 8))
    next(first)
    follow(second)
    follow(first)
    assert session.trunk is not None
    check_pool(engine.pool, session.trunk.pages)
    session.close()
    check_pool(engine.pool, [])


def test_a_session_needs_an_engine():
    with pytest.raises(UsageError, match="engine: expected an Engine, got 'demo'"):
        Session("demo")  # type: ignore[arg-type]


def test_statistics(engine):
    prompt = prompts(1, seed=2)[0]
    for search in SEARCHES:
        [result] = engine.generate([prompt], search, max_new_tokens=12, ignore_eos=True)
        stats, new = result.stats, 12
        assert stats["prompt_tokens"] == len(prompt) and stats["new_tokens"] == new and stats["reused_tokens"] == 0
        assert stats["forward_passes"] == new
        low, high = search.slots(len(prompt), new)
        assert low <= stats["live_nodes_peak"] <= high
        assert stats["unshared_nodes_peak"] >= stats["live_nodes_peak"]
        assert stats["kv_bytes_per_token"] == engine.pool.bytes_per_token
        pages = stats["kv_bytes_peak"] / engine.pool.page_bytes
        assert stats["live_nodes_peak"] <= pages * engine.pool.page_size and pages == int(pages)


def test_peaks_of_trees_that_do_not_live_at_the_same_time_do_not_add_up(monkeypatch):
    monkeypatch.setattr("search.ults.prior.cache_file", lambda *_: None)  # its prior is gathered on a tree of its own
    engine, held = Engine.load(demo_folder(), dtype="float32", threads=1, kv_memory=60 * 3072), list[int]()
    search = ULTS(k_max=4, samples=50, num_return_sequences=3, budget=60)
    request = Request([5, 6, 7, 8, 9], search, max_new_tokens=12, ignore_eos=True)
    [(_, result)] = engine.serve([request], on_step=lambda _: held.append(engine.pool.used_pages))
    assert isinstance(result, SearchResult) and result.stats["prior"] == "gathered"
    assert max(held) <= result.stats["kv_bytes_peak"] / engine.pool.page_bytes <= engine.pool.pages


def test_engines_in_threads_do_not_disturb_each_other():
    engines = [Engine.load(demo_folder(), dtype="float32", threads=1, kv_memory="4M") for _ in range(2)]
    answers: list[list[int]] = []

    def work(engine: Engine) -> None:
        for _ in range(5):
            [result] = engine.generate(["Once upon a time"], Trie(beams=4), max_new_tokens=16)
            answers.append(result.outputs[0].token_ids)

    threads = [threading.Thread(target=work, args=(engine,)) for engine in engines]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(answers) == 10 and all(answer == answers[0] for answer in answers)
