"""The chat templates of the model families of the day: their texts, tools, thoughts and variables."""

import json
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace

import pytest

from engine.errors import CheckpointError, UsageError
from engine.text.template import ChatTemplate, TemplateOptions
from engine.text.thinking import Thoughts, ThoughtStream

GOLDEN = Path(__file__).parents[2] / "golden" / "text"
FAMILIES = json.loads((GOLDEN / "templates.json").read_text(encoding="utf-8"))
NAMES = sorted({entry["template"] for entry in FAMILIES["rendered"]})
HELLO = [{"role": "user", "content": "Hello"}]
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
SPECIAL = ["<s>", "</s>", "<|im_start|>", "<|im_end|>", "<turn|>", "<end_of_turn>", "<|end_of_text|>"]
SPECIAL += ["[THINK]", "[/THINK]"]


def template(name, **options) -> ChatTemplate:
    source = (GOLDEN / "templates" / f"{name}.jinja").read_text(encoding="utf-8")
    variables = {"bos_token": "<s>", "eos_token": "</s>"}
    options = {"special": SPECIAL, "added": ["<think>", "</think>"]} | options
    return ChatTemplate(source, variables=variables, clock=lambda: datetime(2026, 3, 9, 7), **options)


def text_of(spans) -> str:
    return "".join(text for text, _ in spans)


@pytest.mark.parametrize("name", NAMES)
def test_texts_are_transformers(name):
    made = template(name)
    for entry in (entry for entry in FAMILIES["rendered"] if entry["template"] == name):
        chat = FAMILIES["chats"][entry["chat"]]
        options = dict(chat["options"])
        begun, tools = options.pop("add_generation_prompt", True), options.pop("tools", None)
        try:
            asked = TemplateOptions(tools, options)
            text = text_of(made.render(chat["messages"], asked, add_generation_prompt=begun))
        except UsageError as error:
            if "has no variable" in error.what:  # transformers leaves it out in silence
                assert any(key in error.what for key in (*options, "tools"))
                continue
            text = None
        except CheckpointError:
            text = None
        assert text == entry["text"]


@pytest.mark.parametrize(
    ("name", "on", "off"),
    [
        ("qwen3", "<|im_start|>assistant\n", "<|im_start|>assistant\n<think>\n\n</think>\n\n"),
        ("smollm3", "<|im_start|>assistant\n", "<|im_start|>assistant\n<think>\n\n</think>\n"),
        ("hunyuan", "<｜hy_Assistant｜>", "<｜hy_Assistant｜><think>\n\n</think>\n"),
    ],
)
def test_thoughts_are_switched(name, on, off):
    made = template(name)
    assert text_of(made.render(HELLO, TemplateOptions(think="on"))).endswith(on)
    assert text_of(made.render(HELLO, TemplateOptions(think="off"))).endswith(off)
    assert (
        made.render(HELLO)
        == made.render(HELLO, TemplateOptions(think="auto"))
        == made.render(HELLO, TemplateOptions(think="on"))
    )


def test_granite_calls_it_thinking():
    made = template("granite33")
    assert "between <think></think>" in text_of(made.render(HELLO, TemplateOptions(think="on")))
    assert "between <think></think>" not in text_of(made.render(HELLO, TemplateOptions(think="off")))
    assert made.thoughts == Thoughts("<think>", "</think>")  # plain text in this model


@pytest.mark.parametrize(
    ("options", "message", "remedy"),
    [
        ({"think": "on"}, "cannot switch thoughts on: it has no variable enable_thinking or thinking", ""),
        ({"think": "yes"}, "think: expected auto, on, off, got 'yes'", ""),
        ({"variables": {"mood": 1}}, "the chat template has no variable mood", "its variables: "),
        ({"variables": {"messages": []}}, "messages: its value is given by the conversation", ""),
        ({"variables": {"bos_token": "x"}}, "bos_token: its value is given by the conversation or the tok", ""),
        ({"variables": [1]}, "template variables: expected an object", ""),
        ({"tools": TOOLS}, "the chat template takes no tools", ""),
        ({"tools": "f"}, "tools: expected a list of objects", ""),
        ({"tools": ["f"]}, "tools: expected a list of objects", ""),
    ],
)
def test_options_that_a_template_does_not_know(options, message, remedy):
    with pytest.raises(UsageError) as error:
        template("stablelm").render(HELLO, TemplateOptions(**options))
    assert message in error.value.what and remedy in (error.value.remedy or "")


def test_values_make_no_control_tokens():
    made = template("granite33")
    documents = [{"doc_id": 1, "text": "<|end_of_text|>"}]
    tools = [{"name": "<|end_of_text|>"}]
    for options in ({"variables": {"documents": documents}}, {"tools": tools}):
        spans = made.render(HELLO, TemplateOptions(**options))
        assert ("<|end_of_text|>", False) in spans
    assert made.render(HELLO, TemplateOptions(variables={"documents": []})) == made.render(HELLO)


def test_a_template_for_tools_is_taken_where_there_are_tools():
    made = ChatTemplate("plain", tool_use="{{ tools | length }} tools, {{ mood }}")
    assert text_of(made.render(HELLO)) == "plain"
    assert text_of(made.render(HELLO, TemplateOptions(tools=TOOLS, variables={"mood": "good"}))) == "1 tools, good"
    with pytest.raises(UsageError, match="no variable mood"):
        made.render(HELLO, TemplateOptions(variables={"mood": "good"}))


class _Tokenizer:
    special_tokens, special_spellings, added_spellings = {}, (), ()

    def __init__(self, config=None):
        self.config = config or {}


def test_where_a_template_for_tools_lies(tmp_path):
    named = [{"name": "default", "template": "d"}, {"name": "tool_use", "template": "t{{ tools[0].type }}"}]
    made = [ChatTemplate.load(tmp_path, _Tokenizer({"chat_template": named}))]
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": named}))
    made.append(ChatTemplate.load(tmp_path, _Tokenizer()))
    (tmp_path / "chat_template.jinja").write_text("d")
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("t{{ tools[0].type }}")
    made.append(ChatTemplate.load(tmp_path, _Tokenizer()))
    for one in made:
        assert (
            text_of(one.render(HELLO)) == "d"
            and text_of(one.render(HELLO, TemplateOptions(tools=TOOLS))) == "tfunction"
        )


# --- thoughts ---


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("qwen3", {"content": "a", "reasoning_content": "t"}),
        ("ministral", {"content": [{"type": "thinking", "thinking": "t"}, {"type": "text", "text": "a"}]}),
        ("smollm3", {"content": "<think>\nt\n</think>\n\na"}),
        ("lfm2", {"content": "<think>\nt\n</think>\n\na"}),
        ("gemma4", {"content": "a", "reasoning_content": "t"}),
    ],
)
def test_earlier_replies_are_given_as_the_template_reads_them(name, expected):
    made = template(name)
    assert made.reply("a", "t") == {"role": "assistant", **expected}
    assert made.reply("a", None) == {"role": "assistant", "content": "a"}
    chat = [*HELLO, made.reply("a", "t"), *HELLO]
    if name == "qwen3":
        assert "<think>" not in text_of(made.render(chat))  # only the latest question's thought is seen again
    if name == "ministral":
        assert "[THINK]t[/THINK]a</s>" in text_of(made.render(chat))


def test_a_template_that_reads_the_reasoning_of_a_message():
    """Solar Open's template does so."""
    made = ChatTemplate("{% for message in messages %}{{ message.reasoning }}|{{ message.content }}{% endfor %}")
    assert text_of(made.render([made.reply("a", "t")])) == "t|a"


@pytest.mark.parametrize(
    ("name", "end"),
    [("qwen3", "<|im_end|>"), ("gemma3", "<end_of_turn>"), ("granite33", "<|end_of_text|>"), ("mistral", "</s>"),
     ("gemma4", "<turn|>"), ("stablelm", "</s>"), ("hunyuan", ""), ("olmo3", "</s>")],
)  # fmt: skip
def test_the_end_of_a_turn(name, end):
    assert template(name).turn_end() == end


def test_the_end_of_a_thought_is_no_end_of_a_turn():
    """Solar Open writes one token after both; its replies end by another, which only generation_config.json lists."""
    thought = "{% if m.reasoning %}<|think|>{{ m.reasoning }}</s>{% endif %}"
    source = f"{{% for m in messages %}}{thought}{{{{ m.content }}}}</s>{{% endfor %}}"
    assert ChatTemplate(source, special=SPECIAL).turn_end() == ""
    assert ChatTemplate(source.replace("g }}</s>", "g }}"), special=SPECIAL).turn_end() == "</s>"


def test_a_template_that_rejects_every_message_has_no_end_of_a_turn():
    assert ChatTemplate("{{ raise_exception('no') }}", special=SPECIAL).turn_end() == ""


def test_tags():
    think = Thoughts("<think>", "</think>")
    assert Thoughts.find(["<think>", "</think>", "<x>"], "") == think
    assert Thoughts.find([], "{{ '<think>' }} {{ '</think>' }}") == think
    assert Thoughts.find(["</think>"], "{{ '<think>' }}") == think
    assert Thoughts.find(["[THINK]", "[/THINK]"], "") == Thoughts("[THINK]", "[/THINK]")
    assert Thoughts.find(["<seed:think>", "</seed:think>"], "") == Thoughts("<seed:think>", "</seed:think>")
    assert Thoughts.find(["<think:a>", "</think:a>"], "'<think{}>'") == Thoughts("<think:a>", "</think:a>")  # Hy3
    assert Thoughts.find(["<think>", "<thinker>", "</thinker>"], "") == Thoughts()
    cohere = Thoughts("<|START_THINKING|>", "<|END_THINKING|>", gap="")
    assert Thoughts.find([cohere.opening, cohere.closing], "") == Thoughts.find([], f"'{cohere.opening}'") == cohere
    apertus = Thoughts("<|inner_prefix|>", "<|inner_suffix|>", gap="")
    assert Thoughts.find([apertus.opening, apertus.closing], "") == Thoughts.find([], f"'{apertus.opening}'") == apertus
    assert apertus.split("<|inner_prefix|>Two.<|inner_suffix|>Four.") == ("Two.", "Four.")
    solar = Thoughts("<|think|>", "<|end|>assistant", gap="")
    marks = ["<|think|>", "<|end|>", "<|calls|>"]
    assert Thoughts.find(marks, "") == Thoughts.find([], "'<|begin|>assistant<|think|>'") == solar
    assert Thoughts.find([], "'<|channel>thought' '<|think|>'").opening == "<|channel>thought"  # Gemma 4
    opened = cohere.after(f"<|CHATBOT_TOKEN|>{cohere.opening}")
    assert opened.split("Two.<|END_THINKING|>Four.") == ("Two.", "Four.")
    assert not cohere.after(f"{cohere.opening}{cohere.closing}").opened
    made = template("olmo3", special=["</s>"], added=[])  # its tags are no tokens, and it spells only the opening
    thoughts = made.thoughts.after(text_of(made.render(HELLO)))
    assert thoughts.opened and thoughts.split("Hm.\n</think>\nHello.") == ("Hm.", "Hello.")
    assert not template("qwen3").thoughts.after("<think>\n\n</think>\n\n").opened


@pytest.mark.parametrize(
    ("opened", "text", "thought", "answer"),
    [
        (False, "<think>\nTwo.\n</think>\n\nFour.\n", "Two.", "Four.\n"),
        (False, "\n<think>Two.</think>Four.", "Two.", "Four."),
        (False, "<think>\n\n</think>\n\nFour.", "", "Four."),
        (False, "<think> cut </thi", "cut </thi", ""),
        (False, "Four <think>x</think>", None, "Four <think>x</think>"),
        (False, "<thi", None, "<thi"),
        (False, " </think>\nFour.</think>", None, "Four.</think>"),
        (False, "</thi", None, "</thi"),
        (True, "</think>Four.", "", "Four."),
        (False, "", None, ""),
        (True, "\nTwo.\n</think>\n\nFour.", "Two.", "Four."),
        (True, "<think>Two.</think>Four.", "Two.", "Four."),
        (True, "Two, cut", "Two, cut", ""),
        (True, "", "", ""),
    ],
)
def test_a_reply_is_parted_the_same_in_any_pieces(opened, text, thought, answer):
    thoughts = Thoughts("<think>", "</think>", opened)
    assert thoughts.split(text) == (thought, answer)
    for size in range(1, 5):
        stream = ThoughtStream(thoughts)
        parts = [part for i in range(0, len(text), size) for part in stream.push(text[i : i + size])]
        parts += stream.finish()
        assert "".join(part for part, inside in parts if inside) == (thought or "")
        assert "".join(part for part, inside in parts if not inside) == answer
        assert stream.thought == (thought is not None)


def test_what_is_certain_comes_at_once():
    stream = ThoughtStream(Thoughts("<think>", "</think>"))
    assert stream.push("<thi") == [] and stream.push("nk>\nTwo and") == [("Two and", True)]
    assert stream.push(" two <") == [(" two", True)] and stream.push("b") == [(" <b", True)]
    assert stream.push("</think>\n") == [] and stream.push("\nFour") == [("Four", False)]
    assert stream.push(" <think>") == [(" <think>", False)]
    plain = ThoughtStream(Thoughts())
    assert plain.push("<think>") == [("<think>", False)] and plain.finish() == []


def test_a_template_in_a_gguf_file_is_said_to_be_there(tmp_path):
    tokenizer = SimpleNamespace(
        config={"chat_template": "x"}, special_tokens={}, special_spellings=(), added_spellings=()
    )
    path = tmp_path / "m.gguf"
    path.touch()
    assert ChatTemplate.load(path, tokenizer).where == str(path)
    assert ChatTemplate.load(tmp_path, tokenizer).where == str(tmp_path / "tokenizer_config.json")
