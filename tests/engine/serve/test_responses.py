"""OpenAI's `/v1/responses` by the official client: what a chat answers, in the form of a response."""

import json
from typing import Any, Literal

import pytest

pytest.importorskip("starlette", reason="needs the extra serve")
pytest.importorskip("uvicorn", reason="needs the extra serve")
openai = pytest.importorskip("openai", reason="needs the extra test")

import httpx2  # noqa: E402
from pydantic import BaseModel  # noqa: E402

from tests.engine.serve.test_tools import CALL, HOT, WEATHER  # noqa: E402

OPTIONS: Any = {"model": "demo", "temperature": 0, "max_output_tokens": 24}
TOOL: Any = {"type": "function", **WEATHER["function"]}
OURS = "choices", "beams", "search", "ults_children", "ults_budget"
COLD = "Cold is the opposite of hot."


def ask(server, given: Any = "What is the opposite of hot?", **fields: Any) -> Any:
    extra = {key: fields.pop(key) for key in [*fields] if key in OURS}
    return server.client.responses.create(input=given, extra_body=extra, **OPTIONS | fields)


def test_a_response(server):
    reply = ask(server)
    assert reply.output_text == COLD and reply.status == "completed" and reply.id.startswith("resp_")
    assert reply.error is None and reply.incomplete_details is None and reply.store is False
    [item] = reply.output
    assert (item.type, item.role, item.status) == ("message", "assistant", "completed")
    chat = server.client.chat.completions.create(model="demo", messages=HOT, temperature=0, max_tokens=24)
    assert reply.usage.input_tokens == chat.usage.prompt_tokens
    assert reply.usage.output_tokens == chat.usage.completion_tokens
    assert reply.usage.total_tokens == reply.usage.input_tokens + reply.usage.output_tokens
    assert ask(server, beams=2).output_text == COLD


def test_inputs_in_other_forms(server):
    parts = [{"type": "input_text", "text": "What is the opposite"}, {"type": "input_text", "text": " of hot?"}]
    for given in (HOT, [{"type": "message", "role": "user", "content": parts}]):
        assert ask(server, given).output_text == COLD
    messages = [{"role": "system", "content": "Be brief."}, *HOT]
    expected = server.client.chat.completions.create(model="demo", messages=messages, temperature=0, max_tokens=24)
    assert ask(server, instructions="Be brief.").output_text == expected.choices[0].message.content
    first = ask(server)
    again = ask(server, [*HOT, *(item.model_dump() for item in first.output), *HOT])
    messages = [*HOT, {"role": "assistant", "content": COLD}, *HOT]
    expected = server.client.chat.completions.create(model="demo", messages=messages, temperature=0, max_tokens=24)
    assert again.output_text == expected.choices[0].message.content


def test_a_response_that_was_cut(server):
    reply = ask(server, max_output_tokens=3)
    assert reply.status == "incomplete" and reply.incomplete_details.reason == "max_output_tokens"
    assert reply.output[0].status == "incomplete" and reply.usage.output_tokens == 3
    *_, last = ask(server, max_output_tokens=3, stream=True)
    assert last.type == "response.incomplete" and last.response.output_text == reply.output_text


def test_a_response_that_a_budget_cuts_off(server):
    reply = ask(server, max_output_tokens=20, search="ults", ults_children=1, ults_budget=5)
    assert reply.status == "incomplete" and reply.output_text


def test_an_error_in_a_stream_is_an_event(start, slow):
    slow(server := start("--timeout", "0.2"))
    body = OPTIONS | {"input": "Hi", "stream": True, "beams": 40, "ignore_eos": True, "max_output_tokens": 300}
    text = httpx2.post(f"{server.url}/v1/responses", json=body, timeout=60).text
    kind, data = text.strip().split("\n\n")[-1].split("\n")
    found = json.loads(data.removeprefix("data: "))
    assert kind == "event: error" and found["type"] == "error" and found["code"] == "timeout"
    assert found["error"]["message"] == found["message"] and found["sequence_number"] > 0


def test_a_stream(server):
    events = [*ask(server, stream=True)]
    kinds = [event.type.removeprefix("response.") for event in events]
    assert kinds[:4] == ["created", "in_progress", "output_item.added", "content_part.added"]
    assert kinds[-4:] == ["output_text.done", "content_part.done", "output_item.done", "completed"]
    assert {*kinds[4:-4]} == {"output_text.delta"}
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == COLD
    assert [event.sequence_number for event in events] == [*range(len(events))]
    assert events[-1].response.output_text == COLD and events[-1].response.usage.output_tokens == 10
    assert events[0].response.status == "in_progress" and events[0].response.id == events[-1].response.id
    with server.client.responses.stream(input="What is the opposite of hot?", **OPTIONS) as stream:
        for _ in stream:
            pass
        assert stream.get_final_response().output_text == COLD


@pytest.mark.parametrize("stream", [False, True])
def test_calls(server, stream):
    fields: Any = {"tools": [TOOL], "choices": [f"I look.\n{CALL}"], "max_output_tokens": 250, "stream": stream}
    reply = ask(server, **fields)
    if stream:
        events = [*reply]
        [done] = [event for event in events if event.type == "response.function_call_arguments.done"]
        reply = events[-1].response
        assert json.loads(done.arguments) == {"place": "Rome", "days": 2}
    text, call = reply.output
    assert text.content[0].text == "I look." and (call.type, call.name) == ("function_call", "weather")
    output = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
    assert ask(server, [*HOT, *(item.model_dump() for item in reply.output), output], tools=[TOOL]).output


def test_a_forced_call_and_a_schema(server):
    pytest.importorskip("llguidance", reason="needs the extra grammar")
    forced: Any = {"type": "function", "name": "weather"}
    [call] = ask(server, tools=[TOOL], tool_choice=forced, max_output_tokens=250).output
    assert call.name == "weather" and json.loads(call.arguments)["place"] in ("Rome", "Oslo")
    allowed: Any = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "weather"}]}
    tools = [TOOL | {"name": "other"}, TOOL]
    [call] = ask(server, tools=tools, tool_choice=allowed, max_output_tokens=250).output
    assert call.name == "weather"

    class Answer(BaseModel):
        kind: Literal["cold", "warm"]

    parsed = server.client.responses.parse(
        input="What is the opposite of hot?", text_format=Answer, **OPTIONS | {"max_output_tokens": 60}
    )
    assert parsed.output_parsed in (Answer(kind="cold"), Answer(kind="warm"))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"previous_response_id": "resp_x"}, "keeps no responses"),
        ({"background": True}, "background: it cannot be served"),
        ({"input": []}, "input: expected a text, or a list of 1 to 4096 items"),
        ({"input": [{"type": "input_image"}]}, r"input\[0\]: expected a message or a call"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, r"input\[0\]: expected parts of text"),
        ({"input": [{"type": "function_call", "name": 3, "arguments": "{}", "call_id": "x"}]}, "with a name"),
        ({"input": 3}, "input: expected a text"),
        ({"input": [{"type": [], "role": {}, "content": []}]}, "input|messages"),
        ({"instructions": 3}, "messages"),
        ({"text": 3}, "text: expected an object"),
        ({"text": {"format": {"type": "x"}}}, "response_format"),
        ({"tools": [{"type": "web_search"}]}, "tools: expected a list of functions"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"max_output_tokens": 10**6}, "max_output_tokens: expected at most"),
        ({"messages": HOT}, "the field is input"),
        ({"input": [0] * 5000}, "1 to 4096 items"),
    ],
)
def test_errors(server, fields, message):
    with pytest.raises(openai.BadRequestError, match=message):
        server.client.post("/responses", cast_to=object, body=OPTIONS | {"input": "Hi"} | fields)


def test_what_clients_send_besides_is_fine(server):
    fields = {"reasoning": {"effort": "low"}, "include": ["x"], "truncation": "auto", "store": False, "user": "u"}
    fields |= {"text": {"format": None}}
    assert server.client.responses.create(input=HOT, **OPTIONS | fields).output_text == COLD
