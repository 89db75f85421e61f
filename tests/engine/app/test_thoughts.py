"""Thoughts, tools and template variables on the command lines, in conversations and in saved files."""

import io
import json
from dataclasses import dataclass

import pytest

from engine import Done, Engine, Text, UsageError
from engine.app import batch, transcript
from engine.app.cli.prompts import template_variable
from engine.app.dialog import Voice
from engine.app.terminal import Screen
from engine.contract import Evaluate, Output, Report, Search, SearchGenerator, SearchResult, Task
from engine.conversation import Conversation
from engine.text.prompting import TemplateOptions, chat_prompt
from engine.text.thinking import Thoughts
from search import Greedy, Sample, Trie
from tests.engine.app.typist import Terminal, make_templated
from tests.invariants import check_pool

# As Qwen 3's: earlier thoughts go; a switch, tools, and a variable that opens the thought in the prompt.
TEMPLATE = (
    "{{ bos_token }}{% if tools %}[tools]{{ tools | tojson }}{% endif %}"
    "{% for m in messages %}[{{ m.role }}]"
    "{% if m.role == 'assistant' and '</think>' in m.content %}{{ m.content.split('</think>')[-1] | trim }}"
    "{% else %}{{ m.content }}{% endif %}{% if m.role == 'assistant' %}{{ eos_token }}{% endif %}{{ '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% if open %}<think>\n{% endif %}"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
TOOL = {"type": "function", "function": {"name": "f"}}


@dataclass(frozen=True)
class Recite(Search):
    """Answers with a text, whatever the model says."""

    words: str

    def run(self, task: Task) -> SearchGenerator:
        assert task.tokenizer
        tokens: list[int] = []
        for token in task.tokenizer.encode(self.words, add_special=False):
            yield Evaluate(task.tree, [task.tree.root])
            tokens.append(token)
            yield Report([token], lambda: tokens)
            if task.finish_reason(tokens):
                break
            task.tree.keep(task.tree.grow([task.tree.root], [token]))
        return SearchResult([Output(tokens, 0.0, 0.0, task.finish_reason(tokens) or "length")])


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    return make_templated(tmp_path_factory.mktemp("thinking"), TEMPLATE)


@pytest.fixture(scope="module")
def engine(folder) -> Engine:
    return Engine.load(folder, kv_memory=1 << 20)


@pytest.fixture
def conversation(engine):
    conversation = Conversation(engine)
    yield conversation
    conversation.session.close()
    check_pool(engine.pool, [])


def say(conversation: Conversation, user: str, search: Search, **options) -> SearchResult:
    *events, done = conversation.stream(user, search, **options)
    assert isinstance(done, Done)
    text = "".join(event.text for event in events if isinstance(event, Text))
    assert text == done.result.outputs[0].text  # tags included
    return done.result


def test_thoughts_do_not_come_back(conversation, engine):
    say(conversation, "Sum?", Recite("<think>\nTwo and two.\n</think>\n\nFour."))
    turn = conversation.turns[0]
    assert (turn.reply, turn.reasoning) == ("Four.", "Two and two.")
    prompt = engine.tokenizer.decode(conversation.prompt_ids("More?"), skip_special=False)
    assert prompt == "<s>[user]Sum?\n[assistant]Four.</s>\n[user]More?\n[assistant]"
    # The cache of the thought is of no use; that of the prompt before it is.
    before = len(conversation.prompt_ids("Sum?", 1))
    stats = say(conversation, "More?", Recite("<think>No.</think>No.")).stats
    assert before - 1 <= stats["reused_tokens"] < before + 10
    fresh = Conversation(engine)
    fresh.restore(conversation.turns, None)
    assert fresh.prompt_ids("x") == conversation.prompt_ids("x")
    answers = [say(one, "x", Greedy(), max_new_tokens=9).outputs[0].token_ids for one in (fresh, conversation)]
    assert answers[0] == answers[1]
    conversation.undo()
    conversation.undo()
    assert len(conversation.turns) == 1
    fresh.session.close()


def test_a_thought_that_the_limit_cuts(conversation, engine):
    say(conversation, "Sum?", Recite("<think>\nTwo and two"), max_new_tokens=20)
    assert conversation.turns[0].reply == "" and conversation.turns[0].reasoning.startswith("Two")
    assert engine.tokenizer.decode(conversation.prompt_ids("x")).endswith("[assistant]\n[user]x\n[assistant]")


@pytest.mark.parametrize("search", [Greedy(), Trie(beams=3), Sample(temperature=1.0, num_return_sequences=2)])
def test_a_prompt_that_opens_the_thought(engine, search):
    conversation = Conversation(engine, options=TemplateOptions(variables={"open": True}))
    result = say(conversation, "Sum?", search, max_new_tokens=6, ignore_eos=True)
    assert conversation.thoughts.opened
    turn = conversation.turns[0]
    assert turn.reply == "" and turn.reasoning == result.outputs[0].text.strip()
    record = result.record(0, conversation.thoughts)
    assert all(output["text"] == "" and "reasoning" in output for output in record["outputs"])
    conversation.session.close()


def test_the_switch(conversation, engine):
    conversation.set_options(TemplateOptions(think="off"))
    assert engine.tokenizer.decode(conversation.prompt_ids("x")).endswith("[assistant]<think>\n\n</think>\n\n")
    say(conversation, "x", Recite("Four."))
    assert not conversation.thoughts.opened and conversation.turns[0].reasoning is None
    with pytest.raises(UsageError, match="has no variable mood"):
        conversation.set_options(TemplateOptions(variables={"mood": 1}))
    assert conversation.options.think == "off"
    with pytest.raises(UsageError, match="think: expected auto, on, off"):
        TemplateOptions(think="maybe")


def test_without_a_template(engine, monkeypatch):
    monkeypatch.setattr(engine, "template", None)
    with pytest.raises(UsageError, match="no chat template, which tools and thoughts need"):
        Conversation(engine, options=TemplateOptions(think="on"))
    with pytest.raises(UsageError, match="the model has no chat template"):
        chat_prompt(engine, [{"role": "user", "content": "x"}])
    conversation = Conversation(engine)
    say(conversation, "Sum?", Recite("<think>a</think>b"))
    assert conversation.turns[0].reply == "<think>a</think>b"
    conversation.session.close()


def test_the_token_that_the_template_writes_after_a_reply_ends_it(engine, monkeypatch):
    end = engine.tokenizer.eos_token_id
    monkeypatch.setattr(engine, "eos_token_ids", frozenset([7]))
    prompt = chat_prompt(engine, [{"role": "user", "content": "x"}])
    assert prompt.eos_token_ids == {7, end}
    monkeypatch.setattr(engine, "eos_token_ids", frozenset())
    assert chat_prompt(engine, [{"role": "user", "content": "x"}]).eos_token_ids == {end}


def test_a_saved_conversation_keeps_thoughts_apart(conversation, tmp_path):
    say(conversation, "Sum?", Recite("<think>Two.</think>Four."))
    say(conversation, "Hm?", Recite("Well."))
    path = transcript.save(tmp_path / "chat.json", conversation, {})
    turns = json.loads(path.read_text())["turns"]
    assert turns[0] == {"user": "Sum?", "reply": "Four.", "finish_reason": "length", "reasoning": "Two."}
    assert "reasoning" not in turns[1]
    assert transcript.load(path).turns == conversation.turns
    path.write_text(path.read_text().replace('"Two."', "3"))
    with pytest.raises(UsageError, match="turn 1: reasoning: expected a string, got 3"):
        transcript.load(path)


# --- the screen ---


@pytest.fixture
def colour(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)


@pytest.mark.parametrize("opened", [False, True])
def test_a_thought_is_dim_on_a_terminal_and_has_its_tags_elsewhere(colour, opened):
    words = ["<think>" * (not opened), "\nTwo ", "and two", ".\n</thi", "nk>\n\n", "Four", " <b"]
    screens = Screen(Terminal(), Terminal()), Screen(io.StringIO(), io.StringIO())
    for screen in screens:
        voice = Voice(screen, Thoughts("<think>", "</think>", opened))
        for text in filter(None, words):
            voice.say(text)
        voice.finish()
    shown = screens[0].out.getvalue()
    assert shown.replace("\x1b[0m\x1b[2m", "") == "\x1b[2mTwo and two.\x1b[0m\n\nFour <b"
    assert screens[1].out.getvalue() == "<think>\n" * opened + "".join(words)


def test_a_model_without_thoughts_is_printed_as_ever(colour):
    screen = Screen(Terminal(), Terminal())
    voice = Voice(screen, Thoughts())
    voice.say("<think> 1 </think>")
    voice.finish()
    assert screen.out.getvalue() == "<think> 1 </think>"


def test_a_steady_status_holds_dim_text_too(colour):
    screen = Screen(Terminal(), Terminal())
    screen._held = []
    screen.text("a", dim=True)
    screen.text("b")
    assert screen.out.getvalue() == ""
    screen._release()
    assert screen.out.getvalue() == "\x1b[2ma\x1b[0mb"


# --- the command lines ---


def test_flags_of_the_chat(command, folder, tmp_path):
    tools = tmp_path / "tools.json"
    tools.write_text(json.dumps([TOOL]))
    short = ["--model", folder, "--max-new-tokens", "4", "--ignore-eos", "-p", "Hi"]
    code, plain, _ = command(*short)
    assert code == 0 and "<think>" not in plain
    code, out, _ = command(*short, "--template-var", "open=true")
    assert code == 0 and out.startswith("<think>\n")
    code, out, _ = command(*short, "--template-var", "open=true", "--json")
    assert code == 0 and json.loads(out)["outputs"][0]["text"] == "" and "reasoning" in json.loads(out)["outputs"][0]
    code, out, _ = command(*short, "--tools", tools, "--think", "off", "--stats")
    assert code == 0 and out != plain
    for flags, message in [
        (["--template-var", "mood=3"], "the chat template has no variable mood"),
        (["--template-var", "mood"], "expected NAME=JSON"),
        (["--think", "maybe"], "invalid choice"),
        (["--tools", tmp_path / "none.json"], "cannot read the tools: No such file"),
        (["--chat-template", "none", "--think", "on"], "no chat template, which tools and thoughts need"),
    ]:
        code, out, err = command(*short, *flags)
        assert code == 2 and message in err and not out
    for text in ('{"a": 1}', "[1]", "[", '[], "more": 1', "\xff"):
        tools.write_bytes(text.encode("latin1"))
        code, _, err = command(*short, "--tools", tools)
        assert code == 2 and "cannot read the tools: " in err


@pytest.mark.parametrize(
    ("text", "value"), [("3", 3), ('{"a": [1]}', {"a": [1]}), ('1, "b": 2', '1, "b": 2'), ("1}", "1}"), ("a b", "a b")]
)
def test_values_of_template_variables(text, value):
    assert template_variable(f"x={text}") == ("x", value)


def test_the_command_think(command, folder):
    typed = "/think\n/think off\n/think\n/think maybe\n/help\n"
    code, _, err = command("--model", folder, typed=typed, tty=True)
    assert code == 0 and "auto\n" in err and "off\n" in err and "think: expected auto, on, off, got 'maybe'" in err
    assert "/think WHAT" in err


@pytest.fixture
def run(engine, monkeypatch):
    monkeypatch.setattr(batch, "load_engine", lambda args, shard=None: engine)

    def run(*lines, flags=()):
        out = io.BytesIO()
        data = "".join(json.dumps(line) + "\n" for line in lines).encode()
        batch.main(["--max-new-tokens", "6", *map(str, flags)], io.BytesIO(data), out)
        return [json.loads(line) for line in out.getvalue().splitlines()]

    return run


MESSAGES = [{"role": "user", "content": "Hi"}]


def test_batch_lines(run, engine, tmp_path):
    ignore = {"params": {"ignore_eos": True}}
    plain, opened, off, tooled = run(
        {"messages": MESSAGES} | ignore,
        {"messages": MESSAGES, "template": {"open": True}} | ignore,
        {"messages": MESSAGES, "think": "off"} | ignore,
        {"messages": MESSAGES, "tools": [TOOL]} | ignore,
    )
    assert [*plain["outputs"][0]] == ["text", "token_ids", "logprob", "score", "finish_reason"]
    assert [*opened["outputs"][0]][:2] == ["text", "reasoning"] and opened["outputs"][0]["text"] == ""
    for record, options in [
        (off, TemplateOptions(think="off")),
        (tooled, TemplateOptions([TOOL])),
        (opened, TemplateOptions(variables={"open": True})),
    ]:
        prompt = chat_prompt(engine, MESSAGES, options)
        [result] = engine.generate([prompt.ids], Greedy(), max_new_tokens=6, ignore_eos=True)
        assert record["outputs"][0]["token_ids"] == result.outputs[0].token_ids
    tools = tmp_path / "tools.json"
    tools.write_text(json.dumps([TOOL]))
    [same, none] = run({"messages": MESSAGES} | ignore, {"messages": MESSAGES, "tools": None} | ignore,
                       flags=["--tools", tools])  # fmt: skip
    assert same["outputs"][0]["token_ids"] == tooled["outputs"][0]["token_ids"]
    assert none["outputs"][0]["token_ids"] == plain["outputs"][0]["token_ids"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ({"prompt": "x", "tools": []}, "tools: only a line with messages has a chat template"),
        ({"prompt_ids": [5], "think": "on"}, "think: only a line with messages"),
        ({"messages": MESSAGES, "template": []}, "template: expected an object of variables, got []"),
        ({"messages": MESSAGES, "template": {"mood": 1}}, "the chat template has no variable mood"),
        ({"messages": MESSAGES, "tools": {}}, "tools: expected a list of objects"),
        ({"messages": MESSAGES, "tools": [3]}, "tools: expected a list of objects"),
        ({"messages": MESSAGES, "think": 1}, "think: expected auto, on, off, got 1"),
        ({"messages": MESSAGES, "think": []}, "think: expected auto, on, off, got []"),
    ],
)
def test_batch_lines_refused(run, line, message):
    [record] = run(line)
    assert message in record["error"]["message"] and record["error"]["code"] == "usage"
