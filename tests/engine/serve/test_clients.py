"""Programs that people have between them and OpenAI, unchanged: LiteLLM, LangChain, instructor."""

import json
from collections.abc import Iterable
from typing import Any, Literal

import pytest

pytest.importorskip("starlette", reason="needs the extra serve")
pytest.importorskip("uvicorn", reason="needs the extra serve")
pytest.importorskip("openai", reason="needs the extra test")

from pydantic import BaseModel, ConfigDict

from tests.engine.serve.test_tools import CALL, TOOLS

pytestmark = pytest.mark.filterwarnings("ignore")  # theirs
HOT = [{"role": "user", "content": "What is the opposite of hot?"}]
COLD = "Cold is the opposite of hot."


class Answer(BaseModel):
    """The answer to a question."""

    model_config = ConfigDict(extra="forbid")  # the toy would add properties without end

    kind: Literal["cold", "warm"]
    sure: bool


# --- LiteLLM ---


@pytest.fixture
def litellm(server, monkeypatch):
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # no download
    found: Any = pytest.importorskip("litellm", reason="needs litellm, in an environment that has torch too")
    options = {"model": "openai/demo", "api_base": f"{server.url}/v1", "api_key": "none", "temperature": 0}
    return lambda **fields: found.completion(**{"messages": HOT, "max_tokens": 24} | options | fields)


@pytest.mark.parametrize("stream", [False, True])
def test_litellm(litellm, stream):
    reply = litellm(stream=stream, extra_body={"beams": 2}, user="me")
    text = reply.choices[0].message.content if not stream else ""
    for chunk in reply if stream else ():
        text += chunk.choices[0].delta.content or ""
    assert text == COLD


def test_litellm_calls_tools(litellm):
    reply = litellm(tools=TOOLS, extra_body={"choices": [CALL]}, max_tokens=250)
    [call] = reply.choices[0].message.tool_calls
    assert reply.choices[0].finish_reason == "tool_calls"
    assert call.function.name == "weather" and json.loads(call.function.arguments)["place"] == "Rome"
    chunks = [*litellm(tools=TOOLS, extra_body={"choices": [CALL]}, max_tokens=250, stream=True)]
    calls = [call for chunk in chunks for call in chunk.choices[0].delta.tool_calls or ()]
    assert "".join(call.function.arguments for call in calls) == '{"place": "Rome", "days": 2}'


def test_litellm_takes_a_schema(litellm):
    pytest.importorskip("llguidance", reason="needs the extra grammar")
    text = litellm(response_format=Answer, max_tokens=100).choices[0].message.content
    assert Answer.model_validate_json(text)


def test_litellm_knows_a_prompt_that_is_too_long(litellm):
    from litellm import ContextWindowExceededError  # type: ignore[import-not-found]

    with pytest.raises(ContextWindowExceededError):
        litellm(messages=[{"role": "user", "content": "a " * 600}])


# --- LangChain ---


@pytest.fixture
def chat(server):
    make = pytest.importorskip("langchain_openai", reason="needs langchain-openai").ChatOpenAI
    options = {"model": "demo", "base_url": f"{server.url}/v1", "api_key": "none", "temperature": 0}
    return lambda **fields: make(**options | {"max_tokens": 24} | fields)


def test_langchain(chat):
    assert chat().invoke("What is the opposite of hot?").content == COLD
    assert "".join(chunk.content for chunk in chat().stream("What is the opposite of hot?")) == COLD
    assert [reply.content for reply in chat().batch(["What is the opposite of hot?"] * 2)] == [COLD] * 2
    responses = chat(use_responses_api=True).invoke("What is the opposite of hot?")
    assert responses.text == COLD


def test_langchain_knows_a_prompt_that_is_too_long(chat):
    from langchain_core.exceptions import ContextOverflowError  # type: ignore[import-not-found]

    with pytest.raises(ContextOverflowError):
        chat().invoke("a " * 600)


def test_langchain_calls_tools(chat):
    bound = chat(max_tokens=250).bind_tools(TOOLS).bind(extra_body={"choices": [CALL]})
    [call] = (reply := bound.invoke("Rome?")).tool_calls
    assert (call["name"], call["args"]) == ("weather", {"place": "Rome", "days": 2})
    streamed = None
    for chunk in bound.stream("Rome?"):
        streamed = chunk if streamed is None else streamed + chunk
    assert streamed.tool_calls[0]["args"] == call["args"]
    messages = [("user", "Rome?"), reply, {"role": "tool", "content": "sunny", "tool_call_id": call["id"]}]
    assert chat(max_tokens=4).bind_tools(TOOLS).invoke(messages).type == "ai"


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_langchain_parses_outputs(chat, method):
    pytest.importorskip("llguidance", reason="needs the extra grammar")
    model = chat(max_tokens=250).with_structured_output(Answer, method=method)
    assert isinstance(model.invoke("What is the opposite of hot?"), Answer)


# --- instructor ---


@pytest.mark.parametrize("mode", ["TOOLS", "JSON_SCHEMA", "PARALLEL_TOOLS", "RESPONSES_TOOLS"])
def test_instructor(server, mode):
    instructor: Any = pytest.importorskip("instructor", reason="needs instructor")
    pytest.importorskip("llguidance", reason="needs the extra grammar")
    client = instructor.from_openai(server.client, mode=instructor.Mode[mode])
    options: Any = {"model": "demo", "messages": HOT, "temperature": 0, "max_tokens": 250, "max_retries": 0}
    if mode == "PARALLEL_TOOLS":
        text = '<tool_call>{"name": "Answer", "arguments": {"kind": "cold", "sure": true}}</tool_call>'
        options |= {"response_model": Iterable[Answer], "extra_body": {"choices": [text]}}
        assert [*client.chat.completions.create(**options)] == [Answer(kind="cold", sure=True)]
    else:
        assert isinstance(client.chat.completions.create(response_model=Answer, **options), Answer)


# --- lm-evaluation-harness ---


def test_the_harness(server):
    pytest.importorskip("transformers", reason="needs transformers, whose tokenizer the harness takes")
    api: Any = pytest.importorskip("lm_eval.models.openai_completions", reason="needs lm_eval[api]")
    from lm_eval.api.instance import Instance  # type: ignore[import-not-found]

    from engine.demo import demo_folder

    url = f"{server.url}/v1/completions"
    model = api.LocalCompletionsAPI(
        base_url=url, model="demo", tokenizer=str(demo_folder()), tokenizer_backend="huggingface", max_retries=1
    )
    pairs = [("The opposite of hot is", " cold"), ("The opposite of hot is", " warm"), ("Once", " upon a time")]
    pairs += [("A dog ran", " to the park."), ("What is the opposite of hot?<|end|>", "<|end|>")]
    found = model.loglikelihood([Instance("loglikelihood", {}, pair, i) for i, pair in enumerate(pairs)])
    for (context, continuation), (logprob, greedy) in zip(pairs, found, strict=True):
        ids, more = (model.tok_encode(text) for text in (context, context + continuation))
        [score] = server.engine.score(ids, [more[len(ids) :]])
        assert logprob == pytest.approx(score.logprob, abs=1e-4) and greedy == score.is_greedy
    asked = Instance("generate_until", {}, ("The opposite of hot is", {"until": ["."], "max_gen_toks": 8}), 0)
    [text] = model.generate_until([asked])
    ids: Any = model.tok_encode("The opposite of hot is")
    reply = server.client.completions.create(model="demo", prompt=ids, max_tokens=8, temperature=0, stop=["."])
    assert text == reply.choices[0].text
