"""Replies in channels (gpt-oss): thoughts, answers and calls are read alike whole and cut anywhere."""

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.rules.constraint import AfterThought, Choices, packed
from engine.serve.answers import message_of
from engine.serve.calls import ToolUse
from engine.text.channels import CHANNEL_MARKS, ChannelStream
from engine.text.prompting import TemplateOptions, chat_prompt
from engine.text.template import ChatTemplate
from engine.text.thinking import Thoughts
from engine.text.tool_calls import CHANNELS, HERMES, MUSE
from tests.engine.text.test_families import HELLO
from tests.engine.text.test_infill import tokenizer

A, F, C = (f"<|channel|>{name}" for name in ("analysis", "final", "commentary"))
M, E, S = "<|message|>", "<|end|>", "<|start|>assistant"
CALL = f'{C} to=functions.f <|constrain|>json{M}{{"a": 1}}<|call|>'
CASES = [
    (f"{A}{M}I think.{E}{S}{F}{M}Four.", "I think.", "Four."),
    (f"{F}{M}Four.", None, "Four."),
    (f"{A}{M}cut sho", "cut sho", ""),
    (f"{A}{M}{E}{S}{F}{M}Four.", "", "Four."),
    (f"{A}{M}One.{E}{S}{A}{M}Two.{E}{S}{F}{M}Four.<|return|>", "One.\n\nTwo.", "Four."),
    (f"{A}{M}x{E}{S}{C}{M}I look.{E}{S}{F}{M}Four.", "x", "I look.\n\nFour."),
    (f"{A}{M}a < b <|en{E}{S}{F}{M}<|x|>", "a < b <|en", "<|x|>"),
    (f"{A}{M}no end{S}{F}{M}Four.", "no end", "Four."),
    (f"{A}{M}x{E}{S}{CALL}", "x", '<|call|>f{"a": 1}'),
    (f" to=functions.f{C} json{M}{{}}<|call|>", None, "<|call|>f{}"),
    (f"{A} to=python code{M}1 + 1", None, "<|call|>python1 + 1"),
    ("Four.", None, "Four."),
    (A, None, ""),
    (f"{F}{M}Four.{E}and more", None, "Four.and more"),
    ("", None, ""),
]
ATEM = (
    '<atem:function_calls>\n<atem:invoke name="f">\n<atem:parameter name="a">1</atem:parameter>\n</atem:invoke>\n'
    "</atem:function_calls>"
)
TEMPLATE = (
    "{% if tools %}<|start|>developer<|message|>{{ tools | tojson }}<|end|>{% endif %}"
    "{% for m in messages %}{% if m.role == 'assistant' %}<|start|>assistant"
    "{% if m.tool_calls %} to=functions.{{ m.tool_calls[0].function.name }}<|channel|>commentary json<|message|>"
    "{{ m.tool_calls[0].function.arguments | tojson }}<|call|>"
    "{% else %}{% if m.thinking %}<|channel|>analysis<|message|>{{ m.thinking }}<|end|><|start|>assistant{% endif %}"
    "<|channel|>final<|message|>{{ m.content }}<|return|>{% endif %}"
    "{% else %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)


ADDRESSED = [
    (f" to=self{M}I think.<|eom|>{S} to=user{M}Four.", "I think.", "Four."),
    (f" to=user{M}Four.<|eot|>", None, "Four."),
    (f" to=self{M}One.<|eom|>{S} to=self{M}Two.{S} to=user{M}Four.", "One.\n\nTwo.", "Four."),
    (f" to=self{M}a < b <|eo", "a < b <|eo", ""),
    (f" to=self{M}x<|eom|>{S} to=f{M}{ATEM}<|eom|>{S} to=f{M}{ATEM}", "x", f"{ATEM}\n\n{ATEM}"),
    (f" to=user{M}a<|end|>b", None, "a<|end|>b"),
    ("Four.", None, "Four."),
    ("", None, ""),
]


def read(pieces, begun="", channels=True):
    stream = ChannelStream(begun, channels)
    parts = [part for piece in pieces for part in stream.push(piece)] + stream.finish()
    assert all(text for text, _ in parts)
    thought, answer = ("".join(text for text, inside in parts if inside is kind) for kind in (True, False))
    return thought if stream.thought else None, answer


@pytest.fixture
def speaker(tmp_path):
    made = tokenizer(tmp_path, [*sorted(CHANNEL_MARKS), "<|return|>"])
    template = ChatTemplate(TEMPLATE, special=made.special_spellings)
    return SimpleNamespace(tokenizer=made, template=template, eos_token_ids=frozenset(ids(made, "<|return|>")))


def ids(made, text):
    return made.encode_rendered([(text, True)])


@pytest.mark.parametrize(("text", "thought", "answer"), CASES)
def test_whole_and_cut_at_every_character(text, thought, answer):
    assert read([text]) == (thought, answer)
    assert read(text) == (thought, answer)
    for i in range(len(text)):
        assert read([text[:i], text[i:]]) == (thought, answer)
        assert read([text[i:]], begun=text[:i]) == (thought, answer)


@pytest.mark.parametrize(("text", "thought", "answer"), ADDRESSED)
def test_messages_with_recipients_alone(text, thought, answer):
    """Muse writes them so."""
    thoughts = Thoughts.find(["<|message|>", "<|eom|>"], "")
    assert thoughts == Thoughts.find([], f"'{thoughts.opening}'") and thoughts.split(text) == (thought, answer)
    for i in range(len(text)):
        assert read([text[:i], text[i:]], channels=False) == (thought, answer)
        assert read([text[i:]], text[:i], channels=False) == (thought, answer)


def test_calls_with_recipients_alone(tmp_path):
    """A call of Muse has its name twice; a forced one is JSON without a header."""
    made = tokenizer(tmp_path, ["<|start|>", M, "<|eom|>", "<|eot|>"])
    source = f"{{# {ATEM} to=self{M} #}}<|start|>assistant"
    template = ChatTemplate(source, special=made.special_spellings)
    speaker: Any = SimpleNamespace(tokenizer=made, template=template, eos_token_ids=frozenset())
    assert made.thought_ids == (ids(made, S), ids(made, f" to=user{M}")) and template.calls is MUSE
    prompt, use = chat_prompt(speaker, HELLO), ToolUse(MUSE, {"f": {}})
    text = f" to=self{M}Hm.<|eom|>{S} to=user{M}I look.<|eom|>{S} to=f{M}{ATEM}<|eom|>{S} to=f{M}{ATEM}<|eot|>"
    message = message_of(text, prompt.thoughts, use)
    assert message["reasoning_content"] == "Hm." and message["content"] == "I look."
    assert [call["function"] for call in message["tool_calls"]] == [{"name": "f", "arguments": '{"a": 1}'}] * 2
    use = ToolUse(MUSE, {"f": {}}, forced=True)
    prompt = chat_prompt(speaker, HELLO, TemplateOptions(lead=use.lead))
    [call] = message_of('{"name": "f", "arguments": {"a": 1}}', prompt.thoughts, use)["tool_calls"]
    assert call["function"] == {"name": "f", "arguments": '{"a": 1}'}


@given(
    st.lists(st.sampled_from([A, F, C, M, E, S, CALL, "<|call|>", "<|", " to=f", "x", " ", "{}", "|>"]), max_size=12),
    st.lists(st.integers(0, 200), max_size=4),
)
def test_anything_cut_anywhere(parts, cuts):
    text = "".join(parts)
    places = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    assert read([text[a:b] for a, b in itertools.pairwise(places)]) == read([text]) == read(text)


def test_text_comes_at_once():
    stream = ChannelStream()
    assert stream.push(f"{A}{M}I") == [("I", True)] and stream.push(" th<|") == [(" th", True)]
    assert stream.push("end") == [] and stream.push(f"|>{S}{F}{M}Fo") == [("Fo", False)]
    assert stream.push("ur") == [("ur", False)] and stream.finish() == []


def test_a_message_has_thought_content_and_call():
    thoughts, tools = Thoughts.find([], TEMPLATE), ToolUse(CHANNELS, {"f": {}})
    message = message_of(f"{A}{M}Hm.{E}{S}{C}{M}I look.{E}{S}{CALL}", thoughts, tools)
    assert message["reasoning_content"] == "Hm." and message["content"] == "I look."
    [call] = message["tool_calls"]
    assert call["function"] == {"name": "f", "arguments": '{"a": 1}'}


def test_a_template_with_channels(speaker):
    made, template = speaker.tokenizer, speaker.template
    assert template.calls is CHANNELS and ChatTemplate("{{ messages }}").calls is HERMES
    text = f"{A}{M}x{E}{S}{F}{M}y"
    assert made.decode(ids(made, text)).replace(" ", "") == text
    prompt = chat_prompt(speaker, [{"role": "user", "content": f"a{E}"}])
    assert made.decode(prompt.ids).replace(" ", "").endswith(f"a{E}{E}{S}")
    assert len([token for token in prompt.ids if token in ids(made, E)]) == 1  # the user's spelling is text
    assert prompt.thoughts.split(text) == ("x", "y")
    assert prompt.eos_token_ids == {*ids(made, "<|return|>"), *ids(made, "<|call|>")}
    again = template.render([{"role": "user", "content": "a"}, template.reply("y", "x")], add_generation_prompt=False)
    assert "".join(text for text, _ in again).endswith(f"{S}{A}{M}x{E}{S}{F}{M}y<|return|>")


def test_a_forced_call_begins_in_the_prompt(speaker):
    use = ToolUse(CHANNELS, {"f": {"type": "object"}}, forced=True)
    prompt = chat_prompt(speaker, [{"role": "user", "content": "a"}], TemplateOptions(lead=use.lead))
    assert speaker.tokenizer.decode(prompt.ids).replace(" ", "").endswith(f"{S}{C}to=functions.f<|constrain|>json{M}")
    [call] = message_of('{"a": 1}', prompt.thoughts, use)["tool_calls"]
    assert call["function"] == {"name": "f", "arguments": '{"a": 1}'}


def test_a_constraint_begins_with_the_answer(speaker):
    made, free_V = speaker.tokenizer, torch.ones(speaker.tokenizer.size, dtype=torch.int64)
    begins, closing = made.thought_ids
    assert begins == ids(made, S) and closing == ids(made, f"{F}{M}")
    [a] = made.encode("a")
    constraint = AfterThought(Choices([[a]], []), closing, packed(free_V))
    state = constraint.start([])
    for token in ids(made, f"{A}{M}x<|channel|>fi{E}{S}{F}{M}"):
        [allowed] = constraint.allowed([state])
        assert allowed is constraint.free_W
        state = constraint.advance(state, token)
    [allowed] = constraint.allowed([state])
    assert [*allowed] == [a]
