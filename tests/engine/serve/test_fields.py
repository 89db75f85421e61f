"""Fields that other servers have: ignored by a header, refused, `best_of`, `suffix`, and what clients send."""

import pytest

pytest.importorskip("starlette", reason="needs the extra serve")
pytest.importorskip("uvicorn", reason="needs the extra serve")
openai = pytest.importorskip("openai", reason="needs the extra test")

from engine.serve.names import header_of, without_unknown  # noqa: E402
from engine.text import prompting  # noqa: E402

SEED = 7  # whose samples have other ranks by sums than by means
HOT = [{"role": "user", "content": "What is the opposite of hot?"}]
BODY = {"model": "demo", "messages": HOT, "temperature": 0, "max_tokens": 24}
HARMLESS = {"reasoning_effort": "low", "verbosity": "low", "prediction": {"type": "content", "content": "x" * 9000}}


def raw(server, path="/chat/completions", **fields):
    """The reply as bytes and headers, by the official client."""
    return server.client.post(path, cast_to=openai._legacy_response.HttpxBinaryResponseContent, body=fields).response


def contents(reply):
    return [choice["message"]["content"] for choice in reply.json()["choices"]]


@pytest.mark.parametrize("stream", [False, True])
def test_unknown_fields_are_ignored_and_named(server, stream):
    given = BODY | HARMLESS | {"stream": stream, "odd\nname": 1}
    reply = raw(server, **given)
    assert reply.headers["x-coppice-ignored"] == "reasoning_effort, verbosity, prediction, odd?name"
    plain = raw(server, **BODY)
    assert "x-coppice-ignored" not in plain.headers
    assert reply.status_code == 200 and (stream or contents(reply) == contents(plain))


@pytest.mark.parametrize("name", ["beam", "temprature", "max_token", "tool_choise", "stop_token_ids"])
def test_a_misspelling_is_refused_with_the_name_that_was_meant(server, name):
    with pytest.raises(openai.BadRequestError, match="did you mean"):
        raw(server, **BODY | {name: 1})


@pytest.mark.parametrize(
    ("search", "name", "meant"),
    [("diverse", "groups", "diverse_groups"), ("ults", "k_max", "ults_k_max"), ("sbon", "tau", "sbon_tau")],
)
def test_a_parameter_needs_the_name_of_its_search(server, search, name, meant):
    with pytest.raises(openai.BadRequestError, match=f"{name}: no such key; did you mean {meant}"):
        raw(server, **BODY | {"search": search, name: 2})
    assert raw(server, **BODY | {name: 2}).headers["x-coppice-ignored"] == name  # of a search that lacks it


@pytest.mark.parametrize("name", ["guided_json", "chat_template", "extra_body", "continue_final_message"])
def test_what_would_change_the_reply_is_refused_with_a_remedy(server, name):
    with pytest.raises(openai.BadRequestError, match=f"{name}: .*; "):
        raw(server, **BODY | {name: {"x": 1}})


def test_a_strict_server_refuses_every_unknown_field(start):
    server = start("--strict")
    for name, value in HARMLESS.items():
        with pytest.raises(openai.BadRequestError, match=f"{name}: no such key"):
            raw(server, **BODY | {name: value})
    assert raw(server, **BODY | {"user": "me", "store": False, "metadata": {}}).status_code == 200


def test_many_unknown_fields_are_refused_before_they_are_compared(server):
    with pytest.raises(openai.BadRequestError, match="33 unknown fields, this server takes 32"):
        raw(server, **BODY | {f"unknown_{i}": 1 for i in range(33)})


def test_the_header_has_no_characters_of_its_own_meaning():
    kept, ignored = without_unknown({"a: b\r\nset-cookie": 1, "model": "x", "é" * 100: 2}, False)
    assert kept == {"model": "x"}
    assert header_of(ignored) == {"x-coppice-ignored": f"a??b??set-cookie, {'?' * 64}"}


def test_what_clients_send_that_changes_no_token(server):
    plain = contents(raw(server, **BODY))
    fields = {
        "user": "u",
        "store": False,
        "metadata": {"a": "b"},
        "service_tier": "auto",
        "stop": ["zz", "qq"],
        "n": 1,
        "best_of": 1,
    }
    reply = raw(server, **BODY | fields | {"logit_bias": {"5": 0.0}, "frequency_penalty": 0, "tool_choice": "none"})
    assert contents(reply) == plain and "x-coppice-ignored" not in reply.headers


def complete(server, **fields):
    options = {
        "model": "demo",
        "prompt": "Once upon a time",
        "max_tokens": 60,
        "stop": ["One", "day", "with"],
        "seed": SEED,
    }
    extra = {"return_token_ids": True}
    return server.client.completions.create(**options | fields, extra_body=extra)


def test_best_of(server):
    every = complete(server, n=5).choices
    means = {c.text: c.coppice["logprob"] / len(c.coppice["token_ids"]) for c in every}
    best = sorted(means, key=means.__getitem__, reverse=True)
    reply = complete(server, n=2, best_of=5)
    assert [choice.text for choice in reply.choices] == best[:2] != [choice.text for choice in every[:2]]
    assert [choice.index for choice in reply.choices] == [0, 1]
    assert reply.usage.completion_tokens == sum(len(choice.coppice["token_ids"]) for choice in every)
    assert [choice.text for choice in complete(server, best_of=5).choices] == best[:1]
    assert [c.text for c in complete(server, n=5, best_of=5).choices] == best or len(best) == 5
    two = complete(server, prompt=["Once upon a time", "A dog"], best_of=3).choices
    assert [choice.index for choice in two] == [0, 1]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"n": 3, "best_of": 2}, "best_of: expected at least n, 3"),
        ({"best_of": 0}, "best_of: expected an integer >= 1"),
        ({"best_of": "3"}, "best_of: expected an integer"),
        ({"best_of": 2, "stream": True}, "best_of: which outputs are the best"),
        ({"best_of": 100}, "keeps 100 sequences"),
        ({"best_of": 10_000}, "best_of: expected an integer from 1 to 4096"),
    ],
)
def test_best_of_refused(server, fields, message):
    with pytest.raises(openai.BadRequestError, match=message):
        complete(server, **fields)


LONE = "\\ud800"  # in JSON, half of a character
NOT_TEXT = [
    ("completions", f'"prompt": "{LONE}"', "prompt"),
    ("completions", f'"prompt": ["a", "{LONE}"]', "prompt"),
    ("completions", f'"prompt": "a", "stop": "{LONE}"', "stop"),
    ("completions", f'"prompt": "a", "begin": "{LONE}"', "begin"),
    ("completions", f'"prompt": "a", "choices": ["{LONE}"]', "choices"),
    ("completions", f'"prompt": "a", "bad_words": ["{LONE}"]', "bad_words"),
    ("chat/completions", f'"messages": [{{"role": "user", "content": "{LONE}"}}]', "messages"),
    ("embeddings", f'"input": ["a", "{LONE}"]', "input[1]"),
    ("completions", '"prompt": []', "prompt"),
    ("completions", '"prompt": [[1], []]', "prompt"),
]


@pytest.mark.parametrize(("path", "fields", "param"), NOT_TEXT, ids=[fields for _, fields, _ in NOT_TEXT])
def test_an_error_of_a_text_names_its_field(server, path, fields, param):
    options = {"headers": {"Content-Type": "application/json"}}
    with pytest.raises(openai.BadRequestError) as caught:
        server.client.post(f"/{path}", cast_to=object, content=f"{{{fields}}}".encode(), options=options)
    assert caught.value.body["param"] == param


def test_suffix_of_a_model_without_infill_tokens(server):
    with pytest.raises(openai.BadRequestError, match="suffix: the model has no tokens for filling in"):
        complete(server, suffix="the end")
    assert complete(server, suffix="").choices[0].text == complete(server).choices[0].text


def test_suffix(server, monkeypatch):
    """The demo has no such tokens: others stand for them."""
    form = prompting._Infill("<|system|>", "<|user|>", "<|assistant|>", ("<|end|>",))
    monkeypatch.setattr(prompting, "FORMS", (form,))
    engine = server.engine
    spans = [("<|system|>", True), ("One <|end|>", False), ("<|user|>", True), ("two", False), ("<|assistant|>", True)]
    ids = engine.tokenizer.encode("") + engine.tokenizer.encode_rendered(spans)
    expected = complete(server, prompt=ids, temperature=0).choices[0].coppice["token_ids"]
    reply = complete(server, prompt="One <|end|>", suffix="two", temperature=0)
    assert reply.choices[0].coppice["token_ids"] == expected and reply.usage.prompt_tokens == len(ids)
    assert complete(server, prompt="One ", suffix="two", echo=True).choices[0].text.startswith("One ")
    for fields in ({"prompt": [1, 2]}, {"suffix": 3}, {"suffix": "a " * 40_000}):
        with pytest.raises(openai.BadRequestError):
            complete(server, **{"suffix": "two"} | fields)
