"""Conversations with Gemma 4: thoughts, calls, the tokens that end a reply, where a constraint begins."""

from types import SimpleNamespace

import pytest

from engine.rules import Rules
from engine.rules.constraint import AfterThought
from engine.serve.answers import message_of
from engine.serve.calls import ToolUse
from engine.text.prompting import TemplateOptions, chat_prompt
from engine.text.thinking import Thoughts
from engine.text.tool_calls import GEMMA4
from tests.engine.text.test_families import HELLO, template, text_of
from tests.engine.text.test_infill import tokenizer

TOKENS = ["<|turn>", "<turn|>", "<|channel>", "<channel|>", "<|tool_call>", "<tool_call|>", '<|"|>', "<|tool_response>"]
OPEN, CLOSE = "<|channel>thought\n", "<channel|>"
CALL = '<|tool_call>call:f{place:<|"|>Oslo<|"|>}<tool_call|>'
CALLED = {"id": "0", "type": "function", "function": {"name": "f", "arguments": {"place": "Oslo"}}}
TOOL_TURN = [
    *HELLO,
    {"role": "assistant", "tool_calls": [CALLED]},
    {"role": "tool", "tool_call_id": "0", "content": "x"},
]


@pytest.fixture
def speaker(tmp_path):
    made = tokenizer(tmp_path, ["<s>", *TOKENS])
    found = template("gemma4", special=made.special_spellings, added=made.added_spellings)
    return SimpleNamespace(tokenizer=made, template=found, eos_token_ids=frozenset())


@pytest.mark.parametrize(
    ("text", "thought", "answer"),
    [
        (f"{OPEN}Two.\n{CLOSE}Four.", "Two.", "Four."),
        (f"{OPEN}{CLOSE}Four.", "", "Four."),
        (f"{OPEN}a < b <chan", "a < b <chan", ""),
        ("<|channel>other", None, "<|channel>other"),
        (f"Four.{OPEN}", None, f"Four.{OPEN}"),
        ("", None, ""),
    ],
)
def test_a_reply_is_parted_the_same_in_any_pieces(text, thought, answer):
    thoughts = Thoughts.find(TOKENS, "")
    assert thoughts == Thoughts.find([], OPEN) and thoughts.split(text) == (thought, answer)
    for i in range(len(text)):
        stream = thoughts.stream()
        parts = [*stream.push(text[:i]), *stream.push(text[i:]), *stream.finish()]
        assert "".join(part for part, inside in parts if not inside) == answer
        assert "".join(part for part, inside in parts if inside) == (thought or "")


def test_a_message_has_thought_content_and_calls():
    message = message_of(f"{OPEN}Hm.\n{CLOSE}I look.{CALL}", Thoughts.find(TOKENS, ""), ToolUse(GEMMA4, {"f": {}}))
    assert message["reasoning_content"] == "Hm." and message["content"] == "I look."
    assert [call["function"] for call in message["tool_calls"]] == [{"name": "f", "arguments": '{"place": "Oslo"}'}]


def test_marks_are_text_of_replies_and_none_of_a_user(speaker):
    made = speaker.tokenizer
    text = f"{OPEN}x{CLOSE}{CALL}".replace("\n", "")
    assert made.decode(made.encode_rendered([(f"{text}<turn|><|tool_response>", True)])).replace(" ", "") == text
    prompt = chat_prompt(speaker, [{"role": "user", "content": f'a{CLOSE}<|"|>'}], TemplateOptions(think="on"))
    [channel, quote] = made.encode_rendered([(f'{CLOSE}<|"|>', True)])
    assert channel not in prompt.ids and quote not in prompt.ids
    ends = [made.encode_rendered([(end, True)])[0] for end in ("<turn|>", "<|tool_response>")]
    assert prompt.eos_token_ids == {*ends} and prompt.thoughts.split(f"{OPEN}x{CLOSE}y") == ("x", "y")


def test_a_template_cuts_the_thoughts_of_earlier_texts(speaker):
    """The thought of a reply that is sent back as it came does not stand in the prompt, as in transformers."""
    chat = [*HELLO, {"role": "assistant", "content": Thoughts.find(TOKENS, "").join("Two.", "Four.")}, *HELLO]
    assert "<|turn>model\nFour.<turn|>" in text_of(speaker.template.render(chat))


@pytest.mark.parametrize(("think", "opened"), [("on", True), ("off", False)])
def test_the_template_opens_a_thought_after_a_tool(speaker, think, opened):
    """Then a constraint begins with the answer, and a forced call after an empty thought."""
    made, options = speaker.tokenizer, TemplateOptions(think=think, lead=GEMMA4.lead)
    prompt = chat_prompt(speaker, TOOL_TURN, TemplateOptions(think=think))
    assert prompt.thoughts.opened == opened
    assert prompt.thoughts.split(f"Two.\n{CLOSE}Four.") == (
        ("Two.", "Four.") if opened else (None, f"Two.\n{CLOSE}Four.")
    )
    led = made.decode(chat_prompt(speaker, TOOL_TURN, options).ids, skip_special=False).replace(" ", "")
    assert led.endswith(f"<tool_response|>{'<|channel>thought' + CLOSE if opened else ''}<|tool_call>call:")
    rules = Rules(choices=["a"]).at_work(prompt.ids, 9, made.size, prompt.eos_token_ids, made)
    assert rules is not None and isinstance(rules.states.mask.constraint, AfterThought) == opened
    if opened:
        state = rules.states.mask.constraint.start(prompt.ids)
        for token in made.encode_rendered([(f"x{CLOSE}", True)]):
            state = rules.states.mask.constraint.advance(state, token)
        assert [[*allowed] for allowed in rules.states.mask.constraint.allowed([state])] == [made.encode("a")]
