"""The official client of OpenAI against the server: what it reads is what the engine computes."""

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from typing import Any

import pytest

from engine import Engine
from engine.text.prompting import chat_prompt
from search import Greedy, Sample, Trie
from search.base import make_search

pytest.importorskip("starlette", reason="needs the extra serve")
pytest.importorskip("uvicorn", reason="needs the extra serve")
openai = pytest.importorskip("openai", reason="needs the extra test")

from tests.engine.serve.test_limits import until  # noqa: E402

FOX = [{"role": "user", "content": "Tell me a story about a fox."}]
HOT = [{"role": "user", "content": "What is the opposite of hot?"}]


def texts(engine: Engine, search: Any, prompt: Any, tokens: int) -> list[str]:
    """The outputs of the engine alone."""
    options = {}
    if not isinstance(prompt, str):
        rendered = chat_prompt(engine, prompt)
        prompt, options = rendered.ids, {"eos_token_ids": rendered.eos_token_ids}
    with_engine = Engine(engine.model, parallel=1)
    with_engine.companions, with_engine.reward = engine.companions, engine.reward
    [result] = with_engine.generate([prompt], search, max_new_tokens=tokens, **options)
    return [output.text for output in result.outputs]


@pytest.fixture(scope="module")
def alone() -> Engine:
    """The same model in an engine of its own."""
    from engine.demo import demo_folder

    companions = {role: demo_folder(role) for role in ("draft", "reward")}
    return Engine.load(demo_folder(), dtype="float32", kv_memory="8M", threads=1, **companions)


def ask(server, messages=FOX, tokens=24, **fields):
    extra = {key: fields.pop(key) for key in [*fields] if key not in STANDARD}
    return server.client.chat.completions.create(
        model="demo", messages=messages, max_tokens=tokens, extra_body=extra, **fields
    )


STANDARD = (
    "logprobs",
    "top_logprobs",
    "stream",
    "stream_options",
    "n",
    "temperature",
    "top_p",
    "seed",
    "stop",
    "response_format",
    "logit_bias",
)


def test_models(server):
    [model] = server.client.models.list().data
    assert (model.id, model.object, model.owned_by) == ("demo", "model", "coppice")
    assert server.client.models.retrieve("demo").id == "demo"
    with pytest.raises(openai.NotFoundError, match="expected demo, got 'gpt-4'"):
        server.client.models.retrieve("gpt-4")


def test_chat(server, alone):
    reply = ask(server, HOT, temperature=0)
    [choice] = reply.choices
    assert [choice.message.content] == texts(alone, Greedy(), HOT, 24) == ["Cold is the opposite of hot."]
    assert (choice.index, choice.finish_reason, choice.message.role) == (0, "stop", "assistant")
    ids = chat_prompt(alone, HOT).ids
    assert reply.usage.prompt_tokens == len(ids) and reply.usage.completion_tokens == 10
    assert reply.usage.total_tokens == len(ids) + 10 and reply.id.startswith("chatcmpl-")
    assert reply.coppice["search"] == "sample" and reply.coppice["stats"][0]["new_tokens"] == 10


@pytest.mark.parametrize(
    ("fields", "search"),
    [
        ({"search": "trie", "beams": 4, "n": 3}, Trie(4, num_return_sequences=3)),
        ({"beams": 3}, Trie(3)),
        ({"beams": 3, "temperature": 0, "top_p": 0.9, "seed": 1}, Trie(3)),
        ({"search": "beam", "n": 2}, Trie(num_return_sequences=2)),
        ({"search": "greedy", "temperature": 0, "top_p": 0.9}, Greedy()),
        ({"use_beam_search": True, "n": 3, "temperature": 0}, Trie(3, num_return_sequences=3)),
        ({"beam_width": 5, "n": 2, "temperature": 1, "top_p": 1, "seed": 3}, Trie(5, num_return_sequences=2)),
        ({"seed": 7, "n": 2, "temperature": 0.8}, Sample(temperature=0.8, seed=7, num_return_sequences=2)),
        ({"top_p": 0, "seed": 7}, Greedy()),
        ({"top_p": 0.0, "temperature": 0, "seed": -1}, Greedy()),
        ({"top_k": -1, "seed": 7}, Sample(seed=7)),
        ({"search": "greedy", "top_k": -1}, Greedy()),
        ({"search": "ults", "ults_k_max": 4}, make_search("ults", {"ults_k_max": 4})),
        ({"search": "sbon", "sbon_n": 4, "seed": 1}, make_search("sbon", {"sbon_n": 4, "seed": 1})),
        ({"search": "speculative", "seed": 1}, make_search("speculative", {"seed": 1})),
    ],
)
def test_searches_and_their_other_names(server, alone, fields, search):
    reply = ask(server, **fields)
    assert [choice.message.content for choice in reply.choices] == texts(alone, search, FOX, 24)
    assert [choice.index for choice in reply.choices] == [*range(len(reply.choices))]


def test_a_seed_is_drawn_and_named(server, alone):
    replies = [ask(server, temperature=1.5, **fields) for fields in ({}, {"seed": -1})]  # as llama-server and vLLM
    seeds = [reply.coppice["seed"] for reply in replies]
    assert seeds[0] != seeds[1] and max(seeds) < 1 << 53, "JavaScript reads another number"
    search = Sample(temperature=1.5, seed=seeds[0])
    assert [replies[0].choices[0].message.content] == texts(alone, search, FOX, 24)


def test_a_stream_carries_settled_text_while_beams_compete(server, alone):
    chunks = [*ask(server, stream=True, n=2, beams=4, tokens=32, stream_options={"include_usage": True}, trace=True)]
    found = ["", ""]
    for chunk in chunks[:-1]:
        assert chunk.usage is None
        [choice] = chunk.choices
        found[choice.index] += choice.delta.content or ""
    assert found == texts(alone, Trie(4, num_return_sequences=2), FOX, 32)
    first = [chunk for chunk in chunks[:-1] if chunk.choices[0].index == 0]
    assert first[0].choices[0].delta.role == "assistant"
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1] if chunk.choices[0].finish_reason] == ["length"] * 2
    assert not chunks[-1].choices and chunks[-1].usage.completion_tokens == 64
    assert len({chunk.id for chunk in chunks}) == 1
    assert chunks[-1].coppice["traces"] == [f"/trace/{chunks[0].id}"]


def test_a_stream_carries_text_while_the_search_runs(start, monkeypatch):
    server = start()
    pack, passes, heard = server.engine.runner.pack, count(1), threading.Event()

    def paused(*args: Any, **options: Any) -> Any:
        assert next(passes) < 6 or heard.wait(60), "no text came of the first passes"
        return pack(*args, **options)

    monkeypatch.setattr(server.engine.runner, "pack", paused)
    found = []
    for chunk in ask(server, stream=True, tokens=16):
        if text := chunk.choices[0].delta.content:
            found.append(text)
            heard.set()
    assert len(found) > 1 and next(passes) > 6


@pytest.mark.parametrize("stream", [False, True])
def test_completions_of_texts_and_token_ids(server, alone, stream):
    ids = alone.tokenizer.encode("Once upon")
    for prompt, plain in {"The opposite of hot is": ["The opposite of hot is"], "ids": ["Once upon"]}.items():
        given = ids if prompt == "ids" else prompt
        expected = [text for p in plain for text in texts(alone, Greedy(), p, 6)]
        assert complete(server, given, stream) == expected
    expected = [text for p in ("Once upon", "The opposite") for text in texts(alone, Greedy(), p, 6)]
    assert complete(server, ["Once upon", "The opposite"], stream) == expected
    assert complete(server, [ids, alone.tokenizer.encode("The opposite")], stream) == expected


def test_control_tokens_in_a_completion(server, alone, start):
    prompt = "<|begin|><|user|>What is the opposite of hot?<|end|><|assistant|>"
    text, parsed = (alone.tokenizer.encode(prompt, parse_special=parse) for parse in (False, True))
    assert alone.tokenizer.bos_token_id in parsed and len(parsed) < len(text)
    other = start("--parse-special")
    expected = complete(server, parsed, False)
    assert complete(server, prompt, False, parse_special=True) == complete(other, prompt, False) == expected
    with pytest.warns(UserWarning, match="in a prompt is read as text"):
        assert complete(other, prompt, False, parse_special=False) == complete(server, text, False) != expected
    with pytest.raises(openai.BadRequestError, match="expected true or false"):
        complete(server, prompt, False, parse_special="yes")


def complete(server, prompt, stream: bool, **fields: Any) -> list[str]:
    reply = server.client.completions.create(
        model="demo", prompt=prompt, max_tokens=6, temperature=0, stream=stream, extra_body=fields
    )
    if not stream:
        return [choice.text for choice in reply.choices]
    found: dict[int, str] = {}
    for chunk in reply:
        for choice in chunk.choices:
            found[choice.index] = found.get(choice.index, "") + choice.text
    return [found[i] for i in sorted(found)]


def test_seeds_below_zero(server):
    first, second = (ask(server, temperature=1.5, seed=seed).choices[0].message.content for seed in (-5, -5))
    assert first == second != ask(server, temperature=1.5, seed=5).choices[0].message.content


def test_an_answer_that_a_budget_cuts_off_is_cut(server):
    [choice] = ask(server, search="ults", ults_children=1, ults_budget=5).choices
    assert choice.finish_reason == "length" and choice.coppice["finish_reason"] == "interrupted"
    assert ask(server, search="ults", tokens=1).choices[0].finish_reason == "length"


def test_stop_bias_and_rules(server):
    assert ask(server, search="aded", logit_bias={"30": 1e6, "31": 999_999}).choices[0].finish_reason == "length"
    assert ask(server, HOT, temperature=0, stop="opp").choices[0].message.content == "Cold is the "
    assert ask(server, HOT, temperature=0, stop=["zz", "is"]).choices[0].finish_reason == "stop"
    cold = server.engine.tokenizer.encode("Cold", add_special=False)[0]
    reply = ask(server, HOT, temperature=0, logit_bias={str(cold): -100})
    assert not reply.choices[0].message.content.startswith("Cold")
    assert ask(server, HOT, choices=["warm", "mild"], beams=2).choices[0].message.content in ("warm", "mild")


def test_requests_choose_their_drafts(server):
    found = {name: ask(server, HOT, beams=3, drafts=name) for name in ("off", "ngrams", "suffix", "model", False, True)}
    assert len({reply.choices[0].message.content for reply in found.values()}) == 1
    stats = {name: reply.coppice["stats"][0] for name, reply in found.items()}
    drafted = [name for name in found if "drafted_nodes" in stats[name]]
    assert drafted == ["ngrams", "suffix", "model"] and "draft_forward_passes" in stats["model"]
    text = server.client.completions.create(
        model="demo", prompt="The moon", max_tokens=6, temperature=0, extra_body={"drafts": "ngrams"}
    )
    assert "drafted_nodes" in text.coppice["stats"][0]


def test_json(server):
    pytest.importorskip("llguidance", reason="needs the extra grammar")
    schema = {
        "type": "object",
        "properties": {"a": {"enum": ["x", "y"]}},
        "required": ["a"],
        "additionalProperties": False,
    }
    form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, "strict": True}}
    for fields in ({"beams": 3}, {"temperature": 0}):
        text = ask(server, HOT, tokens=100, response_format=form, **fields).choices[0].message.content
        assert json.loads(text)["a"] in "xy"
    chunks = ask(server, HOT, tokens=100, response_format=form, beams=2, stream=True)
    assert json.loads("".join(chunk.choices[0].delta.content or "" for chunk in chunks))["a"] in "xy"
    reply = ask(server, HOT, response_format={"type": "json_object"}, temperature=0, tokens=60)
    assert reply.choices[0].message.content.lstrip().startswith("{")


def test_contents_in_parts_and_developers(server):
    parts = [{"type": "text", "text": "What is the opposite"}, {"type": "text", "text": " of hot?"}]
    messages: Any = [{"role": "user", "content": parts}]
    assert ask(server, messages, temperature=0).choices[0].message.content == "Cold is the opposite of hot."
    image = [{"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}]
    with pytest.raises(openai.BadRequestError, match=r"messages\[0\].content: expected parts of type text"):
        ask(server, [{"role": "user", "content": image}])


STOPPED = {"seed": 2, "ignore_eos": True, "stop": ["<|end|>"]}  # at the special token


@pytest.mark.parametrize("fields", [{"beams": 3}, {"seed": 2}, {"search": "ults"}, STOPPED])
def test_logprobs(server, fields):
    reply = ask(server, HOT, logprobs=True, top_logprobs=2, **fields)
    [choice] = reply.choices
    found = choice.logprobs.content
    assert "".join(one.token for one in found) == choice.message.content
    assert b"".join(bytes(one.bytes) for one in found).decode() == choice.message.content
    assert sum(one.logprob for one in found) >= choice.coppice["logprob"] - 1e-4, "the end counts, and is left out"
    assert all(len(one.top_logprobs) == 2 and one.logprob <= one.top_logprobs[0].logprob + 1e-5 for one in found)
    chunks = [*ask(server, HOT, logprobs=True, top_logprobs=2, stream=True, **fields)]
    [last] = [chunk for chunk in chunks if chunk.choices[0].logprobs is not None]
    assert last.choices[0].finish_reason == "stop" and last.choices[0].logprobs.content == found


def test_logprobs_of_completions(server):
    ids = {"model": "demo", "prompt": "The opposite of hot is", "max_tokens": 8, "temperature": 0}
    [choice] = server.client.completions.create(logprobs=3, **ids).choices
    found = choice.logprobs
    assert "".join(found.tokens) == choice.text and found.text_offset[:2] == [0, len(found.tokens[0])]
    assert len(found.token_logprobs) == len(found.top_logprobs) == len(found.tokens)
    assert found.top_logprobs[0][found.tokens[0]] == found.token_logprobs[0] == max(found.top_logprobs[0].values())
    assert server.client.completions.create(**ids).choices[0].logprobs is None


def test_offsets_after_control_tokens_that_are_no_part_of_the_text(server, alone):
    prompt = chat_prompt(alone, HOT)
    fields = {"max_tokens": 12, "temperature": 0, "logprobs": 0, "extra_body": {"ignore_eos": True}}
    [choice] = server.client.completions.create(model="demo", prompt=prompt.ids, **fields).choices
    tokens, offsets = choice.logprobs.tokens, choice.logprobs.text_offset
    assert "<|end|>" in tokens[:-1] and "<|end|>" not in choice.text
    ends = [*offsets[1:], len(choice.text)]
    texts = [choice.text[start:end] for start, end in zip(offsets, ends, strict=True)]
    assert texts == [token.replace("<|end|>", "") for token in tokens]


def test_offsets_after_bytes_that_are_no_characters(server, alone):
    """Each becomes a replacement character of the text, unless it begins a character that the next token completes."""
    of_byte = {bytes(data): token for token, data in enumerate(alone.tokenizer.data()) if len(data) == 1}
    whole = b"a\x80\xe6\x97b\xff\xe6\x97\xa5c\xf0"
    ids = [of_byte[whole[i : i + 1]] for i in range(len(whole))]
    fields = {"max_tokens": 0, "echo": True, "logprobs": 0}
    [choice] = server.client.completions.create(model="demo", prompt=ids, **fields).choices
    assert choice.text == "a\ufffd\ufffdb\ufffd\u65e5c\ufffd"
    assert choice.logprobs.text_offset == [0, 1, 2, 2, 3, 4, 5, 5, 5, 6, 7]


def test_offsets_after_a_healed_prompt(server):
    fields = {"max_tokens": 6, "temperature": 0, "logprobs": 0, "extra_body": {"heal": True}}
    [choice] = server.client.completions.create(model="demo", prompt="Once upon a ti", **fields).choices
    tokens, [first, *offsets] = choice.logprobs.tokens, choice.logprobs.text_offset
    assert (tokens[0], first) == (" time", 0) and choice.text.startswith("me")
    for token, at in zip(tokens[1:], offsets, strict=True):
        assert choice.text.startswith(token, at)


def test_penalties_of_tokens_that_occurred(server, alone):
    penalties, prompt = {"frequency_penalty": -2.0, "presence_penalty": -1.0}, chat_prompt(alone, FOX)
    options = {"eos_token_ids": prompt.eos_token_ids, "max_new_tokens": 80}
    [expected] = alone.generate([prompt.ids], Greedy(), **options, **penalties)
    plain, zero, penalised = (
        ask(server, FOX, 80, temperature=0, **fields).choices[0].message.content
        for fields in ({}, dict.fromkeys(penalties, 0.0), penalties)
    )
    assert plain == zero != penalised == expected.outputs[0].text


def test_xtc_and_dry_by_the_names_of_llama_server(server, alone):
    prompt = chat_prompt(alone, FOX)
    dry = {"dry_multiplier": 8.0, "dry_allowed_length": 1, "dry_sequence_breakers": ["\n"]}
    warp = {"seed": 5, "xtc_probability": 1.0, "xtc_threshold": 0.02}
    options = {"eos_token_ids": prompt.eos_token_ids, "max_new_tokens": 40}
    [expected] = alone.generate([prompt.ids], Sample(**warp), **options, **dry)
    plain, found = (ask(server, FOX, 40, **fields).choices[0].message.content for fields in ({"seed": 5}, warp | dry))
    assert plain != found == expected.outputs[0].text
    off = {"xtc_probability": 0, "xtc_threshold": 0.1, "dry_multiplier": 0, "dry_penalty_last_n": -1}  # sent always
    greedy, same = (ask(server, FOX, 20, beams=2, **f).choices[0].message.content for f in ({}, off))
    assert greedy == same


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"xtc_probability": 0.5, "beams": 2}, "xtc_probability", "has no such parameter"),
        ({"dry_base": 0.5}, "dry_base", "expected a number"),
        ({"distinct": "tokens"}, "distinct", "expected text or text-sum"),
        ({"drafts": "fast"}, "drafts", "expected off, auto, ngrams, suffix, model or mtp, or a Drafter, true or false"),
        ({"drafts": 1}, "drafts", "expected off, auto"),
        ({"n": 0}, "n", "n: expected an integer from 1"),
        ({"n": 3, "beams": 2}, "n", "n: expected an integer from 1 to 2, got 3"),
        ({"n": 2, "search": "greedy"}, "n", "'greedy' has no such parameter"),
        ({"beam": 2}, "beam", "did you mean beams"),
        ({"temperature": 0.7, "beams": 2}, "temperature", "has no such parameter"),
        ({"temperature": "hot"}, "temperature", "expected"),
        ({"frequency_penalty": 2.5}, "frequency_penalty", "from -2 to 2"),
        ({"echo": True}, "echo", "echo: it belongs to /v1/completions"),
        ({"best_of": 4}, "best_of", "belongs to /v1/completions"),
        ({"tool_choice": "required"}, "tool_choice", "it needs tools"),
        ({"prompt": "x"}, "prompt", "belongs to /v1/completions"),
        ({"parse_special": True}, "parse_special", "belongs to /v1/completions"),
        ({"stream_options": 3}, "stream_options", "expected an object"),
        (
            {"stream_options": {"include_usage": 3}},
            "stream_options.include_usage",
            "include_usage: expected true",
        ),
        ({"stream": "yes"}, "stream", "expected true or false"),
        ({"search": "ults", "ults_k_max": -1}, "ults_k_max", "ults_k_max: expected an integer from 0"),
        ({"search": "nope"}, "search", "search: expected one of sample"),
        ({"search": "os:system"}, "search", "search: expected one of sample"),
        ({"ults_prior": "secret.json", "search": "ults"}, "ults_prior", "command line only"),
        ({"aded_store": "secret", "search": "aded"}, "aded_store", "command line only"),
        ({"catalogue": "secret.cat"}, "catalogue", "without --catalogue"),
        ({"response_format": {"type": "xml"}}, "response_format", "expected type text"),
        ({"regex": "a", "choices": ["a"]}, None, "at most one of"),
        ({"beams": 17}, None, "keeps 17 sequences at once, this server at most 16"),
        ({"search": "bon", "bon_n": 100}, None, "keeps 100 sequences"),
        ({"max_tokens": 301}, "max_tokens", "expected at most 300"),
        ({"max_tokens": 5, "max_completion_tokens": 6}, "max_completion_tokens", "contradicts"),
        ({"stop": ["x"] * 257}, "stop", "expected at most 256 entries, got 257"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "from 0 to 20"),
        ({"logprobs": 3}, "logprobs", "expected true or false"),
        ({"top_logprobs": 3}, "top_logprobs", "needs logprobs"),
        ({"messages": []}, "messages", "at least one message"),
        ({"messages": [{"role": "user"}]}, "messages[0].content", "expected a string, got none"),
        ({"messages": [{"role": "user", "content": "a " * 3000}]}, None, "maximum context length is 512"),
        ({"template": {"nope": 1}}, None, "nope"),
    ],
)
def test_errors(server, fields, param, message):
    body = {"model": "demo", "messages": FOX} | fields
    with pytest.raises(openai.BadRequestError) as caught:
        server.client.post("/chat/completions", cast_to=object, body=body)
    error = caught.value.body
    assert message in error["message"] and error["type"] == "invalid_request_error", error
    code = "context_length_exceeded" if "maximum context length is" in message else "usage"
    assert error["param"] == param and error["code"] == code, error


def test_a_stream_refuses_before_it_begins(server):
    with pytest.raises(openai.BadRequestError, match="search: expected one of"):
        ask(server, stream=True, search="nope")
    with pytest.raises(openai.NotFoundError, match="model: expected demo"):
        server.client.chat.completions.create(model="other", messages=FOX)


def test_many_kinds_and_widths_share_passes_and_give_what_they_give_alone(server, alone, monkeypatch):
    asked = [
        ({"beams": 2 + i % 5}, Trie(2 + i % 5))
        if i % 3 == 0
        else ({"seed": i, "temperature": 0.9}, Sample(seed=i, temperature=0.9))
        if i % 3 == 1
        else ({"search": "ults", "ults_k_max": 3}, make_search("ults", {"ults_k_max": 3}))
        for i in range(12)
    ]
    lane, all_here = server.app.served["demo"].lane, threading.Event()
    before, step = lane.figures()["forward_passes"], lane.service.step

    def step_for_all():
        if not all_here.is_set():
            until(lambda: len(lane.open) == len(asked))
            all_here.set()
        step()

    monkeypatch.setattr(lane.service, "step", step_for_all)
    with ThreadPoolExecutor(12) as pool:
        replies = [*pool.map(lambda fields: ask(server, tokens=16, **fields), [fields for fields, _ in asked])]
    for reply, (_, search) in zip(replies, asked, strict=True):
        assert [reply.choices[0].message.content] == texts(alone, search, FOX, 16)
    passes = lane.figures()["forward_passes"] - before
    assert passes < sum(reply.coppice["stats"][0]["forward_passes"] for reply in replies) / 2
