"""Log-probabilities of prompts by the server: OpenAI's `echo`, vLLM's `prompt_logprobs`."""

import pytest

from engine import Engine
from engine.demo import demo_folder

pytest.importorskip("starlette", reason="needs the extra serve")
openai = pytest.importorskip("openai", reason="needs the extra test")

PROMPT = "Once upon a time there was a dog."
BODY = {"model": "demo", "prompt": PROMPT, "temperature": 0}


@pytest.fixture(scope="module")
def alone() -> Engine:
    return Engine.load(demo_folder(), dtype="float32", threads=1)


def post(server, **fields):
    return server.client.post("/completions", cast_to=object, body=BODY | fields)


def complete(server, **fields):
    return server.client.completions.create(**BODY | fields)


def expected(engine, prompt=PROMPT, top=0):
    ids = engine.encode(prompt) if isinstance(prompt, str) else prompt
    [score] = engine.score(ids[:1], [ids[1:]], top_logprobs=top)
    return ids, score


@pytest.mark.parametrize("alternatives", [0, 2])
def test_echo_without_new_tokens(server, alone, alternatives):
    reply = complete(server, echo=True, max_tokens=0, logprobs=alternatives)
    [choice], (ids, score) = reply.choices, expected(alone, top=alternatives)
    found = choice.logprobs
    assert choice.text == PROMPT and choice.finish_reason == "length"
    assert len(found.tokens) == len(ids) == reply.usage.prompt_tokens and reply.usage.completion_tokens == 0
    assert found.token_logprobs[0] is None and found.top_logprobs[0] is None
    assert found.token_logprobs[1:] == pytest.approx(score.token_logprobs, abs=1e-4)
    for token, logp, top in zip(found.tokens[1:], found.token_logprobs[1:], found.top_logprobs[1:], strict=True):
        assert top[token] == logp and len(top) - alternatives in (0, 1), "the token itself is there"
    if alternatives:  # as the harness of lm-eval finds out what is greedy
        pairs = zip(found.token_logprobs[1:], found.top_logprobs[1:], strict=True)
        greedy = [logp == max(top.values()) for logp, top in pairs]
        assert greedy == [token == top[0][0] for token, top in zip(ids[1:], score.top_logprobs, strict=True)]
        assert any(greedy) and not all(greedy)
    assert found.tokens[0] not in PROMPT, "the tokenizer adds it"
    assert found.text_offset == [0, *(sum(map(len, found.tokens[1:i])) for i in range(1, len(ids)))]
    for token, at in zip(found.tokens[1:], found.text_offset[1:], strict=True):
        assert PROMPT.startswith(token, at)


def test_offsets_after_parts_of_characters(server):
    [choice] = complete(server, prompt="a \U0001f600é x", echo=True, logprobs=0, max_tokens=0).choices
    found = choice.logprobs
    assert found.tokens[-1] == " x" and found.text_offset[-1] == len(choice.text) - 2
    assert all(choice.text.startswith(token, at) for token, at in zip(found.tokens, found.text_offset, strict=True)
               if token in choice.text)  # fmt: skip


def test_an_echo_has_all_choices(server):
    choices = complete(server, prompt=["x", "y"], echo=True, max_tokens=0, n=2).choices
    assert [(one.index, one.text) for one in choices] == [(0, "x"), (1, "x"), (2, "y"), (3, "y")]


def test_an_echo_of_token_ids_has_the_end_that_is_healed(server, alone):
    ids, extra = alone.encode("Once upon a ti"), {"heal": True}
    found, plain = (
        complete(server, prompt=prompt, echo=True, logprobs=0, max_tokens=4, extra_body=extra).choices[0]
        for prompt in (ids, "Once upon a ti")
    )
    assert found.text == plain.text and found.text.startswith("Once upon a time")
    assert found.logprobs.text_offset == plain.logprobs.text_offset


def test_an_echo_without_new_tokens_heals_nothing(server, alone):
    """Nothing is generated again, so the prompt's last tokens have log-probabilities too."""
    for prompt in ("Once upon a ti", alone.encode("Once upon a ti")):
        healed, plain = (
            complete(server, prompt=prompt, echo=True, logprobs=1, max_tokens=0, extra_body={"heal": heal}).choices[0]
            for heal in (True, False)
        )
        assert healed.text == plain.text and healed.logprobs == plain.logprobs


def test_echo_before_new_tokens(server, alone):
    plain = complete(server, max_tokens=5, logprobs=1).choices[0]
    echoed = complete(server, max_tokens=5, logprobs=1, echo=True).choices[0]
    bare = complete(server, max_tokens=5, echo=True).choices[0]
    assert echoed.text == bare.text == PROMPT + plain.text and bare.logprobs is None
    ids, score = expected(alone)
    assert echoed.logprobs.tokens[len(ids) :] == plain.logprobs.tokens
    assert echoed.logprobs.token_logprobs[len(ids) :] == pytest.approx(plain.logprobs.token_logprobs, abs=1e-4)
    assert echoed.logprobs.token_logprobs[1 : len(ids)] == pytest.approx(score.token_logprobs, abs=1e-4)


def test_an_echo_has_the_token_that_ends_the_output(server, alone):
    """Clients that ask for one token, as lm-evaluation-harness does, leave out the last: it is no token of theirs."""
    ids = alone.encode("<|begin|><|user|>What is the opposite of hot?<|end|><|assistant|>", parse_special=True)
    ids += alone.tokenizer.encode("Cold is the opposite of hot.", add_special=False)
    plain, echoed = (complete(server, prompt=ids, max_tokens=1, logprobs=1, echo=echo) for echo in (False, True))
    assert plain.choices[0].finish_reason == echoed.choices[0].finish_reason == "stop", "the prompt ends as a reply"
    found = echoed.choices[0].logprobs
    assert plain.choices[0].logprobs.tokens == [] and len(found.tokens) == len(found.token_logprobs) == len(ids) + 1
    assert found.text_offset[-1] == len(echoed.choices[0].text), "which control tokens are no part of"


def test_echo_in_a_stream(server):
    fields = {"max_tokens": 5, "n": 2, "extra_body": {"beams": 2}}
    plain, texts = complete(server, **fields).choices, ["", ""]
    for chunk in complete(server, **fields, echo=True, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert texts == [PROMPT + choice.text for choice in plain]


def test_several_prompts_as_ids(server, alone):
    ids = [alone.encode(text) for text in (PROMPT, "The cat", "A")]
    reply = complete(server, prompt=ids, echo=True, max_tokens=0, logprobs=1)
    assert [choice.index for choice in reply.choices] == [0, 1, 2]
    for one, choice in zip(ids, reply.choices, strict=True):
        _, score = expected(alone, one)
        assert choice.logprobs.token_logprobs[1:] == pytest.approx(score.token_logprobs, abs=1e-4)
        assert choice.text == alone.tokenizer.decode(one)


@pytest.mark.parametrize("tokens", [0, 3])
def test_prompt_logprobs(server, alone, tokens):
    [choice] = post(server, prompt_logprobs=2, max_tokens=tokens)["choices"]
    ids, score = expected(alone, top=2)
    found = choice["prompt_logprobs"]
    assert found[0] is None and len(found) == len(ids) and (choice["text"] != "") == (tokens > 0)
    logits_TV = alone.logits(ids)
    rows = zip(ids[1:], score.token_logprobs, score.top_logprobs, logits_TV, found[1:], strict=False)
    for token, logp, top, logits_V, told in rows:
        assert {int(key) for key in told} == {token, *(t for t, _ in top)}
        assert told[str(token)]["logprob"] == pytest.approx(logp, abs=1e-4)
        assert told[str(token)]["rank"] == int((logits_V > logits_V[token]).sum()) + 1
        assert [told[str(t)]["rank"] for t, _ in top] == [1, 2]


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"max_tokens": 0}, "0 needs echo: true or prompt_logprobs"),
        ({"prompt_logprobs": 21}, "prompt_logprobs: expected an integer from 0 to 20"),
        ({"prompt_logprobs": 1, "stream": True}, "stream: log-probabilities of the prompt"),
        ({"echo": True, "logprobs": 1, "stream": True}, "stream: log-probabilities of the prompt"),
        ({"echo": 1}, "echo: expected true or false"),
        ({"echo": True, "logprobs": 1, "suffix": "x"}, "echo: it cannot show log-probabilities of a prompt with a su"),
    ],
)
def test_errors(server, fields, says):
    with pytest.raises(openai.BadRequestError, match=says):
        post(server, **fields)


def test_a_chat_has_no_echo(server):
    body = {"model": "demo", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 2}
    assert server.client.post("/chat/completions", cast_to=object, body=body | {"echo": False})
    for field in ({"echo": True}, {"prompt_logprobs": 1}):
        with pytest.raises(openai.BadRequestError, match="it belongs to /v1/completions"):
            server.client.post("/chat/completions", cast_to=object, body=body | field)
