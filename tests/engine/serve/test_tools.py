"""Tool calls over the interface, by the official client and its helpers: read from replies, forced, in streams."""

import json
from typing import Any, Literal

import pytest

pytest.importorskip("starlette", reason="needs the extra serve")
pytest.importorskip("uvicorn", reason="needs the extra serve")
openai = pytest.importorskip("openai", reason="needs the extra test")

from pydantic import BaseModel  # noqa: E402  the client needs it

from engine.serve.calls import template_messages  # noqa: E402
from engine.text.prompting import TemplateOptions, chat_prompt  # noqa: E402

HOT = [{"role": "user", "content": "What is the opposite of hot?"}]
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a place",
        "parameters": {
            "type": "object",
            "properties": {"place": {"enum": ["Rome", "Oslo"]}, "days": {"$ref": "#/$defs/few"}},
            "required": ["place", "days"],
            "$defs": {"few": {"type": "integer", "minimum": 1, "maximum": 3}},
        },
    },
}
CLOCK = {"type": "function", "function": {"name": "clock", "parameters": {"type": "object", "properties": {}}}}
TOOLS: Any = [WEATHER, CLOCK]
BAD = {"function": {"name": "f", "arguments": "["}}
NO_SUCH = {"type": "function", "function": {"name": "x"}}
FORCED = {"tool_choice": "required", "parallel_tool_calls": False}
TIME = '<tool_call>{"name": "clock"}</tool_call>'
CALL = '<tool_call>\n{"name": "weather", "arguments": {"place": "Rome", "days": 2}}\n</tool_call>'


def ask(server, **fields: Any) -> Any:
    extra = {key: fields.pop(key) for key in ("choices", "beams", "search", "think") if key in fields}
    options = {"messages": HOT, "temperature": 0, "max_tokens": 300} | fields
    return server.client.chat.completions.create(model="demo", extra_body=extra, **options)


def joined(chunks: Any) -> tuple[str, list[dict], list[str]]:
    """The content, the calls and the reasons to finish of a stream."""
    content, calls, reasons = "", [], []
    for chunk in chunks:
        for choice in chunk.choices:
            content += choice.delta.content or ""
            reasons += [choice.finish_reason] if choice.finish_reason else []
            for call in choice.delta.tool_calls or ():
                assert call.index == len(calls) and call.id and call.type == "function"
                calls.append({"name": call.function.name, "arguments": json.loads(call.function.arguments)})
    return content, calls, reasons


@pytest.mark.parametrize("beams", [1, 2])
def test_calls_are_read_from_a_reply(server, beams):
    fields = {"choices": [f"I look.\n{CALL}\n{TIME}"], "tools": TOOLS} | ({"beams": beams} if beams > 1 else {})
    [choice] = ask(server, **fields).choices
    assert choice.finish_reason == "tool_calls" and choice.message.content == "I look."
    assert [call.function.name for call in choice.message.tool_calls] == ["weather", "clock"]
    assert json.loads(choice.message.tool_calls[0].function.arguments) == {"place": "Rome", "days": 2}
    assert len({call.id for call in choice.message.tool_calls}) == 2
    content, calls, reasons = joined(ask(server, stream=True, **fields))
    assert content == "I look." and reasons == ["tool_calls"]
    assert calls == [{"name": "weather", "arguments": {"place": "Rome", "days": 2}}, {"name": "clock", "arguments": {}}]
    [choice] = ask(server, parallel_tool_calls=False, **fields).choices
    assert len(choice.message.tool_calls) == 1


def test_a_call_alone_has_no_content_and_without_tools_it_is_text(server):
    [choice] = ask(server, choices=[CALL], tools=TOOLS).choices
    assert choice.message.content is None and choice.message.tool_calls
    for fields in ({}, {"tools": TOOLS, "tool_choice": "none"}):
        [choice] = ask(server, choices=[CALL], **fields).choices
        assert choice.message.content == CALL and choice.message.tool_calls is None
    [choice] = ask(server, tools=TOOLS).choices
    assert choice.message.tool_calls is None and choice.finish_reason in ("stop", "length")


@pytest.mark.parametrize("fields", [{"temperature": 0}, {"temperature": 1, "seed": 3}, {"beams": 3}])
@pytest.mark.parametrize("stream", [False, True])
def test_a_forced_call_fits_its_schema(server, fields, stream):
    pytest.importorskip("llguidance", reason="needs the extra grammar")
    response: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "integer"}}}  # of a text
    for choice, names in {
        "required": {"weather", "clock"},
        "weather": {"weather"},
        "clock": {"clock"},
        "allowed": {"clock"},
    }.items():
        clock = {"type": "function", "function": {"name": "clock"}}
        given: Any = {
            "required": "required",
            "allowed": {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [clock]}},
        }.get(choice, {"type": "function", "function": {"name": choice}})
        reply = ask(
            server,
            tools=TOOLS,
            tool_choice=given,
            stream=stream,
            parallel_tool_calls=False,
            response_format=response,
            **fields,
        )
        if stream:
            content, calls, reasons = joined(reply)
        else:
            message = reply.choices[0].message
            content, reasons = message.content or "", [reply.choices[0].finish_reason]
            functions = [call.function for call in message.tool_calls]
            calls = [{"name": one.name, "arguments": json.loads(one.arguments)} for one in functions]
        [call] = calls
        assert content == "" and reasons == ["tool_calls"] and call["name"] in names
        expected = {"place", "days"} if call["name"] == "weather" else set()
        assert {*call["arguments"]} == expected
        assert call["arguments"].get("place", "Rome") in ("Rome", "Oslo") and 1 <= call["arguments"].get("days", 1) <= 3


@pytest.mark.parametrize("stream", [False, True])
def test_json_of_a_schema_is_no_call(server, stream):
    pytest.importorskip("llguidance", reason="needs the extra grammar")
    schema = {"const": {"name": "clock", "arguments": {}}}
    response: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    for fields in ({"response_format": response}, {"extra_body": {"json_schema": schema}}):
        reply = server.client.chat.completions.create(
            model="demo", messages=HOT, tools=TOOLS, stream=stream, temperature=0, max_tokens=99, **fields
        )
        if stream:
            content, calls, reasons = joined(reply)
        else:
            message, reasons = reply.choices[0].message, [reply.choices[0].finish_reason]
            content, calls = message.content, message.tool_calls or []
        assert json.loads(content) == schema["const"] and not calls and reasons == ["stop"]


def test_the_helpers_of_the_client(server):
    pytest.importorskip("llguidance", reason="needs the extra grammar")

    class Answer(BaseModel):
        """An answer."""

        kind: Literal["cold", "warm"]
        sure: bool

    tools: Any = [openai.pydantic_function_tool(Answer)]
    options: Any = {"model": "demo", "messages": HOT, "tools": tools, "tool_choice": "required", "max_tokens": 150}
    options |= {"parallel_tool_calls": False, "temperature": 0}
    [call] = server.client.chat.completions.parse(**options).choices[0].message.tool_calls
    assert isinstance(call.function.parsed_arguments, Answer)
    with server.client.chat.completions.stream(**options) as stream:
        kinds = [event.type for event in stream]
        [again] = stream.get_final_completion().choices[0].message.tool_calls
    assert "tool_calls.function.arguments.done" in kinds
    assert again.function.parsed_arguments == call.function.parsed_arguments
    parsed = server.client.chat.completions.parse(
        model="demo", messages=HOT, response_format=Answer, max_tokens=150, temperature=0
    )
    assert isinstance(parsed.choices[0].message.parsed, Answer)


QWEN = """{%- if tools %}{% for tool in tools %}{{ tool | tojson }}{% endfor %}{% endif %}
{%- for message in messages %}{{ '<|user|>' + message.role + ':' }}
{%- if message.tool_calls %}{% for call in message.tool_calls %}<tool_call>{{ call.function.name }}
{{- call.function.arguments.place }}</tool_call>{% endfor %}{% else %}{{ message.content }}{% endif %}
{%- endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"""


def conversation(reply: Any) -> list[Any]:
    [call] = reply.choices[0].message.tool_calls
    answered = {"role": "tool", "tool_call_id": call.id, "content": "sunny"}
    return [*HOT, reply.choices[0].message.model_dump(exclude_none=True), answered]


def test_a_conversation_goes_on_after_a_call(server, start, tmp_path):
    pytest.importorskip("llguidance", reason="needs the extra grammar")
    (path := tmp_path / "template.jinja").write_text(QWEN)
    weather: Any = {"type": "function", "function": {"name": "weather"}}
    for one in (server, start("--chat-template", str(path))):
        messages = conversation(ask(one, tools=TOOLS, tool_choice=weather))
        assert ask(one, messages=messages, tools=TOOLS).choices[0].message.role == "assistant"
        template = one.engine.template
        found, described = template_messages(messages, TOOLS, template)
        text = one.engine.tokenizer.decode(chat_prompt(one.engine, found).ids, skip_special=False)
        place = json.loads(messages[1]["tool_calls"][0]["function"]["arguments"])["place"]
        if one is server:  # the template has no place for any of this
            assert described and found[0]["role"] == "system" and '"name": "clock"' in text
            assert f'"place": "{place}"' in found[2]["content"]
            assert found[3] == {"role": "user", "content": "<tool_response>\nsunny\n</tool_response>"}
        else:
            assert not described and f"<tool_call>weather{place}</tool_call>" in text and "tool:sunny" in text


def test_a_forced_call_closes_a_thought_that_the_template_has_opened(start, tmp_path):
    pytest.importorskip("llguidance", reason="needs the extra grammar")
    source = QWEN.replace("<|assistant|>", "<|assistant|><think>\\n") + "{# </think> #}"
    (path := tmp_path / "template.jinja").write_text(source)
    server = start("--chat-template", str(path))
    message = ask(server, tools=TOOLS, **FORCED).choices[0].message
    assert message.tool_calls and message.content is None and not hasattr(message, "reasoning_content")
    rendered = chat_prompt(server.engine, HOT, TemplateOptions(lead="<tool_call>\n"))
    assert server.engine.tokenizer.decode(rendered.ids).endswith("<think>\n</think>\n\n<tool_call>\n")


@pytest.mark.parametrize(
    ("source", "opening", "key"),
    [
        ("[AVAILABLE_TOOLS]", "[TOOL_CALLS]", "arguments"),
        ("<|tool_list_start|>", "<|tool_call_start|>", "arguments"),
        ('<|python_tag|>"parameters": dictionary', "", "parameters"),
        ("<|tool_call>call:", "<|tool_call>call:weather", ""),
        ("<functions>", "<function_calls>", "arguments"),
        ("<|tools_prefix|>", "<|tools_prefix|>", "arguments"),
        ("to=self<|message|><atem:function_calls>", "<atem:function_calls>", "arguments"),
    ],
)
def test_other_formats(start, tmp_path, source, opening, key):
    pytest.importorskip("llguidance", reason="needs the extra grammar")
    rest = QWEN.replace("tool_call>", "call>")
    (path := tmp_path / "template.jinja").write_text(f"{{# {source} #}}{rest}")
    server = start("--chat-template", str(path))
    text = f'{{"name": "weather", "{key}": {{"place": "Oslo", "days": 1}}}}'
    text = f"{opening}[{text}]" if opening else text
    text = text if key else f'{opening}{{days:1,place:<|"|>Oslo<|"|>}}'
    for fields in ({"choices": [text]}, FORCED | {"seed": 5, "temperature": 1.0}):
        content, calls, reasons = joined(ask(server, tools=[WEATHER], stream=True, **fields))
        assert content == "" and reasons == ["tool_calls"] and calls[0]["name"] == "weather"
        reply = ask(server, tools=[WEATHER], **fields)
        [call, *_] = reply.choices[0].message.tool_calls
        assert (len(call.id) == 9 and call.id.isalnum()) == (opening == "[TOOL_CALLS]")
    if not key:  # the name stands there without quotes
        for name in ('a"b', "a\\b", "a b", "a{b"):
            odd: Any = {"type": "function", "function": {"name": name}}
            with pytest.raises(openai.BadRequestError, match="names without quotes"):
                ask(server, tools=[WEATHER, odd], tool_choice="required")
            assert ask(server, tools=[odd], choices=["no"]).choices[0].message.content == "no"


def test_channels_have_the_name_before_the_call(start, tmp_path):
    pytest.importorskip("llguidance", reason="needs the extra grammar")
    source = f"{{# <|channel|>analysis<|message|> #}}{QWEN}".replace("tool_call>", "call>")
    (path := tmp_path / "template.jinja").write_text(source)
    server = start("--chat-template", str(path))
    text = "<|channel|>analysis<|message|>Hm.<|end|>"
    text += "<|start|>assistant<|channel|>commentary to=functions.clock<|message|>{}"
    message = ask(server, tools=TOOLS, choices=[text]).choices[0].message
    assert message.content is None and message.reasoning_content == "Hm."
    assert [call.function.name for call in message.tool_calls] == ["clock"]
    one = {"tool_choice": {"type": "function", "function": {"name": "weather"}}}
    for fields in (one, one | {"seed": 5, "temperature": 1.0}):
        [call] = ask(server, tools=TOOLS, **fields).choices[0].message.tool_calls
        assert call.function.name == "weather" and "place" in json.loads(call.function.arguments)
    with pytest.raises(openai.BadRequestError, match="name the one that is to be called"):
        ask(server, tools=TOOLS, tool_choice="required")
    odd = {"type": "function", "function": {"name": "<|end|>"}}
    with pytest.raises(openai.BadRequestError, match="name the one that is to be called"):
        ask(server, tools=[odd], tool_choice="required")


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"tools": 3}, "tools", "expected a list of functions"),
        ({"tools": [{}]}, "tools[0]", "expected a function with a name"),
        ({"tools": TOOLS, "tool_choice": "maybe"}, "tool_choice", "expected none, auto, required"),
        ({"tools": TOOLS, "tool_choice": NO_SUCH}, "tool_choice", "there is no function x"),
        ({"tool_choice": "required"}, "tool_choice", "needs tools"),
        ({"tools": TOOLS, "tool_choice": "required", "regex": "a"}, "tool_choice", "cannot be combined with regex"),
        ({"tools": TOOLS, "parallel_tool_calls": 1}, "parallel_tool_calls", "true or false"),
        ({"messages": [{"role": "user", "content": "x", "tool_calls": []}]}, "messages[0].tool_calls",
         "in a message of the assistant"),
        ({"messages": [{"role": "assistant", "tool_calls": [BAD]}]}, "messages[0].tool_calls[0].arguments",
         "expected an object as JSON"),
    ],
)  # fmt: skip
def test_errors(server, fields, param, message):
    body = {"model": "demo", "messages": HOT} | fields
    with pytest.raises(openai.BadRequestError, match=message) as caught:
        server.client.post("/chat/completions", cast_to=object, body=body)
    assert caught.value.body["param"] == param


def test_a_schema_that_cannot_be_a_grammar_is_an_error_of_tools(server):
    pytest.importorskip("llguidance", reason="needs the extra grammar")
    bad = {"type": "function", "function": {"name": "f", "parameters": {"type": "nope"}}}
    with pytest.raises(openai.BadRequestError, match="tools: ") as caught:
        ask(server, tools=[bad], tool_choice="required")
    assert caught.value.body["param"] == "tools"
