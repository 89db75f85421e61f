"""The chat: one reply for pipes, a conversation for terminals, and nothing lost whatever happens in between."""

import contextlib
import io
import json
import os
import pty
import re
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from engine import Done, Engine, Text, UsageError
from engine.app import chat, transcript
from engine.app.commands import assignments
from engine.app.dialog import Watch, plural
from engine.app.terminal import Interrupt, Label, Quit, Screen, cells, clip, folded
from engine.conversation import Conversation
from engine.errors import CoppiceError
from engine.step.driver import Driver
from search import Greedy, Trie
from tests.engine.app.typist import CHAT, REPLY, SHAPE, Terminal, Typist, make_templated, spawn
from tests.invariants import check_pool
from tools.random_checkpoint import make

ROOT = Path(__file__).parents[3]
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> str:
    """A model without chat template and with a context that is soon full."""
    return make(tmp_path_factory.mktemp("base"), max_positions=128, **SHAPE)["path"]


@pytest.fixture(scope="module")
def templated(tmp_path_factory) -> str:
    return make_templated(tmp_path_factory.mktemp("templated"), TEMPLATE)


@pytest.fixture(scope="module")
def engine(templated) -> Engine:
    return Engine.load(templated, kv_memory=1 << 20)


@pytest.fixture(autouse=True)
def no_pages_left(request):
    yield
    if "engine" in request.fixturenames:
        pool = request.getfixturevalue("engine").pool
        check_pool(pool, [])


def held(conversation: Conversation) -> list[int]:
    trunk = conversation.session.trunk
    return trunk.pages if trunk else []


def say(conversation: Conversation, user: str, search=None, **options) -> Done:
    *_, done = conversation.stream(user, search or Greedy(), **({"max_new_tokens": 8} | options))
    assert isinstance(done, Done)
    check_pool(conversation.engine.pool, held(conversation))
    return done


# --- one reply ---


def test_piped_reply_is_all_of_stdout(command, base):
    [result] = Engine.load(base).generate(["Once upon"], Trie(beams=4), max_new_tokens=12)
    argv = ["--model", base, "--search", "trie", "--max-new-tokens", "12"]
    assert command(*argv, piped=b"Once upon\n") == (0, result.outputs[0].text + "\n", "")
    assert command(*argv, "-p", "Once upon") == (0, result.outputs[0].text + "\n", "")


def test_beams_mean_beam_search_and_temperature_0_means_greedy(command, base):
    def reply(*flags):
        return command("--model", base, "--max-new-tokens", "12", *flags, piped=b"Hello")

    trie, greedy = reply("--search", "trie", "--beams", "3"), reply()
    assert trie[0] == greedy[0] == 0 and trie != greedy
    assert trie == reply("--beams", "3") == reply("--search", "beam", "--beams", "3")
    assert trie == reply("--beams", "3", "--temperature", "0")
    assert greedy == reply("--temperature", "0") == reply("--temperature", "0", "--top-p", "0.9", "--seed", "1")
    assert greedy == reply("--search", "sample", "--temperature", "0")
    code, out, err = reply("--beams", "3", "--temperature", "0.7")
    assert (code, out) == (2, "") and "temperature: the search 'trie' has no such parameter" in err
    assert "searches that have all of the parameters: beam-sample" in err


def test_flag_and_pipe_are_one_prompt(monkeypatch):
    args = chat.parser().parse_args(["-p", "Summarise:"])
    for data, prompt in ((b"a\nb\n", "Summarise:\na\nb"), (b"", "Summarise:"), (b"a\r\n", "Summarise:\na")):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))
        assert chat.one_shot(args) == prompt


@pytest.mark.parametrize("piped, words", [(b"", "empty"), (b" \n", "empty"), (b"caf\xe9", "byte 3: 0xe9")])
def test_bad_input_is_a_usage_error(command, base, piped, words):
    code, out, err = command("--model", base, piped=piped)
    assert (code, out) == (2, "") and words in err


def test_json_has_the_batch_form(command, base):
    [result] = Engine.load(base).generate(["Hello"], Trie(beams=3, num_return_sequences=2), max_new_tokens=5)
    argv = ["--search", "trie", "--beams", "3", "--num-return-sequences", "2", "--max-new-tokens", "5", "--json"]
    code, out, err = command("--model", base, *argv, piped=b"Hello")
    [line] = out.splitlines()
    reply = json.loads(line)
    assert (code, err) == (0, "") and set(reply) == {"id", "outputs", "stats"}
    assert [o["token_ids"] for o in reply["outputs"]] == [o.token_ids for o in result.outputs]
    assert list(reply["outputs"][0]) == ["text", "token_ids", "logprob", "score", "finish_reason"]
    assert {"prompt_tokens", "reused_tokens", "unshared_nodes_peak"} < set(reply["stats"])


def test_stats_go_to_stderr(command, base):
    code, out, err = command("--model", base, "--max-new-tokens", "4", "--stats", piped=b"Hello")
    assert code == 0 and "forward passes" in err and "forward passes" not in out


def test_a_prefix_in_a_file(command, base, tmp_path):
    file, argv = str(tmp_path / "prefix"), ["--max-new-tokens", "4", "--json"]
    code, _, err = command("--model", base, *argv, "--save-prefix", file, "--prefix-cache", "on", piped=b"Hello there")
    assert (code, err) == (0, "")
    code, warm, err = command("--model", base, *argv, "--load-prefix", file, piped=b"Hello there you")
    assert (code, err) == (0, "") and json.loads(warm)["stats"]["reused_tokens"] >= 8
    code, _, err = command("--model", base, *argv, "--load-prefix", file, "--prefix-cache", "off", piped=b"Hello")
    assert code == 2 and "prefixes are not kept" in err
    code, _, err = command("--model", base, "--load-prefix", f"{base}/config.json", piped=b"Hello")
    assert code == 2 and "no prefix" in err


def test_log_probabilities_go_to_stderr(command, base):
    code, out, err = command(
        "--model", base, "--max-new-tokens", "4", "--logprobs", "2", "--ignore-eos", piped=b"Hello"
    )
    assert code == 0 and len(err.splitlines()) == 4 and all(line.count("-") >= 3 for line in err.splitlines())
    code, out, err = command("--model", base, "--max-new-tokens", "4", "--logprobs", "2", "--json", piped=b"Hello")
    assert code == 0 and "top_logprobs" in json.loads(out)["outputs"][0] and not err


def test_log_probabilities_spell_special_tokens(command):
    options = "--logprobs", "1", "--search", "greedy", "-q", "--kv-memory", "2M"
    code, out, err = command(*options, piped=b"What is the opposite of hot?")
    assert code == 0 and out == "Cold is the opposite of hot.\n"
    assert err.splitlines()[-1].count('"<|end|>"') == 2 and "<|" not in "".join(err.splitlines()[:-1])


@pytest.mark.parametrize(
    "argv, code, words",
    [
        (["--search", "greedy", "--beams", "4"], 2, "no such parameter"),
        (["--logprobs", "-1"], 2, "logprobs: expected an integer from 0 to 1024"),
        (["--max-new-tokens", "0"], 2, "max-new-tokens"),
        (["--system", "Be brief"], 2, "no chat template"),
        (["--search", "trie", "--beams", "999"], 2, "beams"),
        (["-p", "x" * 400], 2, "maximum context length is 128"),
        (["--model", "/nowhere"], 3, "/nowhere"),
    ],
)
def test_exit_codes(command, base, argv, code, words):
    got, out, err = command("--model", base, *argv, piped=b"Hello")
    assert (got, out) == (code, "") and words in err and "Traceback" not in err


def test_memory_and_numerics_have_their_codes(monkeypatch, base, tmp_path):
    monkeypatch.setattr(sys, "stdin", Terminal())
    assert chat.main(["--model", base, "--kv-memory", "8K", "-p", "x" * 60]) == 4
    make(tmp_path, **SHAPE)
    data = bytearray((tmp_path / "model.safetensors").read_bytes())
    data[-4:] = b"\x00\x00\xc0\x7f"  # the last weight: NaN
    (tmp_path / "model.safetensors").write_bytes(data)
    assert chat.main(["--model", str(tmp_path), "-p", "x"]) == 5


# --- conversations ---


def test_turns_reuse_the_cache_and_change_nothing(engine):
    conversation = Conversation(engine, "Be brief")
    try:
        for i, (user, search) in enumerate([("Hello", Greedy()), ("And", Trie(beams=5)), ("so on", Greedy())]):
            ids = conversation.prompt_ids(user)
            trunk = conversation.session.trunk
            cached = trunk.tokens[: trunk.cached] if trunk else []
            same = next((k for k, (a, b) in enumerate(zip(cached, ids, strict=False)) if a != b), len(cached))
            done = say(conversation, user, search)
            assert done.result.stats["reused_tokens"] == same and (same > 20 or i == 0)
            [fresh] = engine.generate([ids], search, max_new_tokens=8)
            assert done.result.outputs[0].token_ids == fresh.outputs[0].token_ids
        assert [t.user for t in conversation.turns] == ["Hello", "And", "so on"]
        text = "".join(span for span, _ in engine.template.render(conversation_messages(conversation)))
        assert text.startswith("<s>[system]Be brief\n[user]Hello\n[assistant]")
    finally:
        conversation.reset()
    assert not conversation.turns and not held(conversation)


def conversation_messages(conversation: Conversation) -> list[dict]:
    messages = [{"role": "system", "content": conversation.system}]
    for turn in conversation.turns:
        messages += [{"role": "user", "content": turn.user}, {"role": "assistant", "content": turn.reply}]
    return messages


def test_plain_completion_continues_the_text(base):
    engine = Engine.load(base, kv_memory=1 << 20)
    conversation = Conversation(engine)
    first = say(conversation, "Once")
    assert conversation.text("upon") == "Once" + first.result.outputs[0].text + "\nupon"
    assert conversation.text(" upon") == "Once" + first.result.outputs[0].text + " upon"
    assert say(conversation, "upon").result.stats["reused_tokens"] >= 3
    conversation.reset()


@pytest.mark.parametrize("search", [Greedy(), Trie(beams=6)], ids=["greedy", "trie"])
def test_interrupted_anywhere_keeps_the_partial_turn(engine, monkeypatch, search):
    monkeypatch.setattr(engine.runner, "budget", 16)  # several chunks of prompt
    for step in range(1, 16):
        conversation = Conversation(engine)
        asked = iter(range(1, 1000))
        options = {"interrupted": lambda asked=asked, step=step: next(asked) == step, "ignore_eos": True}
        events = list(conversation.stream("Tell me a long story, please", search, max_new_tokens=64, **options))
        result = events[-1].result
        text = "".join(e.text for e in events if isinstance(e, Text))
        assert text == result.outputs[0].text == conversation.turns[0].reply
        assert conversation.turns[0].finish_reason == result.outputs[0].finish_reason == "interrupted"
        assert all(value >= 0 for value in result.stats.values())
        cached = conversation.session.trunk.cached
        assert len(held(conversation)) == -(-cached // engine.pool.page_size)  # no branches left
        check_pool(engine.pool, held(conversation))
        assert say(conversation, "Go on").result.stats["reused_tokens"] >= min(cached, 30)
        conversation.reset()


def test_errors_withdraw_the_turn(engine, monkeypatch):
    conversation = Conversation(engine)
    say(conversation, "Hello")
    before, pages = list(conversation.turns), list(held(conversation))
    with pytest.raises(UsageError, match="maximum context length is 512"):
        say(conversation, "x" * 500)
    with pytest.raises(UsageError, match="beams"):
        say(conversation, "x", Trie(beams=500))
    with pytest.raises(UsageError):
        say(conversation, "\udcff")
    assert conversation.turns == before and held(conversation) == pages
    run = Driver._run

    def of_nan(self, batch):
        rows_NV, finite_N = run(self, batch)
        return rows_NV, [False] * len(finite_N)

    monkeypatch.setattr(Driver, "_run", of_nan)
    with pytest.raises(CoppiceError, match="NaN"):
        say(conversation, "x")
    monkeypatch.undo()
    check_pool(engine.pool, held(conversation))
    assert conversation.turns == before
    say(conversation, "still there?")
    conversation.reset()


def test_a_full_context_says_so_with_numbers(engine):
    conversation = Conversation(engine, on_overflow="error")
    with pytest.raises(
        UsageError, match=r"has \d+ tokens, this model's maximum context length is 512\nan answer needs room for 32"
    ):
        for _ in range(20):
            say(conversation, "word " * 10, max_new_tokens=64, ignore_eos=True)
    assert 2 <= len(conversation.turns) < 10
    conversation.reset()


# --- the screen ---


def test_a_terminal_conversation(command, templated):
    lines = ["Hello", "/set", "/set early-stopping=true", "/set search=trie beams=3 max-new-tokens=5"]
    lines += ["/set beams=0 seed=1", "/set temperature=2", "/set", "/foo", "//foo", "", "/stats", "/help", "/reset"]
    lines += ["/stats", "/clear now"]
    code, out, err = command("--model", templated, typed="\n".join([*lines, "Bye", ""]), tty=True)
    assert code == 0 and out.count("> ") == 17
    assert "parameters, float32" in err and "/help lists the commands" in err and "plain completion" not in err
    assert "early_stopping: the search 'greedy' has no such parameter" in err
    assert "seed: the search 'trie' has no such parameter" in err
    assert re.search(r"beams +3\n", err) and re.search(r"max_new_tokens +5\n", err)
    assert "/foo: no such command" in err and "prompt " in err
    assert "2 turns" in err and "0 turns" in err and re.search(r" 0 of \d+ pages", err)


def test_a_reply_that_fills_the_context_says_how_large_it_is(command, base):
    argv = ["--model", base, "--context", "24", "--ignore-eos"]
    code, _, err = command(*argv, typed="Once upon\n", tty=True)
    assert code == 0 and "[stopped: the context of 24 tokens is full]" in err


def test_constraints_are_settings():
    settings = chat.Settings("greedy", {}, 10, False, ()).changed({"bad_words": "x", "min_new_tokens": 3})
    assert settings.limits()["bad_words"] == ["x"] and settings.shown()["min_new_tokens"] == 3
    assert settings.changed({"bad_words": ""}).limits()["bad_words"] == []
    with pytest.raises(UsageError, match="repetition_penalty: expected a number"):
        settings.changed({"repetition_penalty": "x"})


def test_a_choice_takes_the_place_of_another_constraint():
    settings = chat.Settings("greedy", {}, 10, False, (), {"json_schema": {}, "min_length": 3})
    assert settings.changed({"choices": "x"}).rules == {"min_length": 3, "choices": ["x"]}


def test_settings_change_all_or_nothing():
    settings = chat.Settings("trie", {"beams": 4}, 10, False, ())
    other = settings.changed(assignments('search=sample seed=3 stop="\\n\\n" ignore_eos=true'))
    assert other.shown()["seed"] == 3 and other.ignore_eos and "beams" not in other.shown()
    assert other.changed({"search": "trie"}).shown()["beams"] == 4
    assert settings.changed(assignments("""stop='["a", "b"]' early-stopping=never""")).stop == ("a", "b")
    assert other.stop == ("\n\n",)
    assert settings.changed(assignments("stop=")).stop == ()
    sample = chat.Settings("sample", {}, 10, False, ())
    for text, stop in [
        ('["a", "b c"] seed=1', ("a", "b c")),
        ('["a\'"]', ("a'",)),
        ("[a]", ("[a]",)),
        ("a=b", ("a=b",)),
        ("'a b'  ", ("a b",)),
        ("'\"a\"'", ("a",)),
        ("3", ("3",)),
        ('"a"b', ("ab",)),
    ]:
        assert sample.changed(assignments(f"stop={text}")).stop == stop
    for wrong in ("beams=0", "beams=2.5", "max_new_tokens=0", "max_new_tokens=x", "ignore_eos=1", "seed=1", "what=1",
                  "search=none", "search=[]", "beams", "=3", "'"):  # fmt: skip
        with pytest.raises(UsageError):
            settings.changed(assignments(wrong))


def test_other_sequences_are_numbered_on_a_terminal(command, base):
    argv = ["--model", base, "--search", "trie", "--num-return-sequences", "2", "--max-new-tokens", "4", "-p", "Hello"]
    assert "2. " in command(*argv, tty=True)[2]
    assert command(*argv)[2] == "" and "2. " not in command(*argv, "-q", tty=True)[2]


@pytest.fixture
def screen(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setattr(Screen, "TICK", 0.005)
    return lambda **options: Screen(Terminal(), Terminal(), **options)


def drawn(screen: Screen) -> str:
    with screen.status(lambda: Label("undecided text", "[… 3 tokens]"), 0.0):
        screen.text("settled ")
        deadline = time.monotonic() + 60
        while screen.lively and not screen._drawn and time.monotonic() < deadline:
            time.sleep(0.005)
        screen.text("text")
    screen.end_line()
    return screen.err.getvalue()


def test_the_status_is_transient_and_on_stderr(screen, monkeypatch):
    shown = screen()
    assert "\x1b[2mundecided text [… 3 tokens]\x1b[0m" in drawn(shown)
    assert shown.err.getvalue().endswith("\x1b[J") and shown.out.getvalue() == "settled text\n"
    assert not drawn(screen(quiet=True))
    monkeypatch.setenv("NO_COLOR", "1")
    assert "[… 3 tokens]" in (plain := drawn(screen())) and "undecided" not in plain and "\x1b[2m" not in plain
    monkeypatch.setenv("TERM", "dumb")
    assert not drawn(screen())


def test_status_is_silent_when_all_is_quick(screen):
    shown = screen()
    with shown.status(lambda: Label("", "[loading]"), 60.0):
        time.sleep(0.05)
    assert not shown.err.getvalue()


def test_a_model_cannot_drive_the_terminal(screen):
    shown = screen()
    shown.text("a\x1b[2Jb\x7f\x9bc\r\n\té")
    assert shown.out.getvalue() == "a␛[2Jb␡�c␍\n\té"
    pipe = Screen(io.StringIO(), io.StringIO())
    pipe.text("a\x1b[2J")
    assert pipe.out.getvalue() == "a\x1b[2J"


def test_columns(screen):
    assert [cells(c) for c in "a日\u0301é"] == [1, 2, 0, 1]
    assert clip("日本語", 6) == "日本語" and clip("日本語", 5) == "日本…" and clip("abc", 0) == ""
    assert clip("abe\u0301d", 3) == "ab…" and clip("abe\u0301", 3) == "abe\u0301"
    table = "stop  日本 語の 👍👍 e\u0301e\u0301 x\n日本  aa bb cc"
    assert folded(table, 10).split("\n") == ["stop  日本", "語の 👍👍", "e\u0301e\u0301 x", "日本  aa", "bb cc"]
    rows = ["stop  日本", "      語の", "      👍👍", "      e\u0301e\u0301 x", "日本  aa bb", "      cc"]
    assert folded(table, 12).split("\n") == rows
    shown = screen()
    for text, column in (("x" * 40, 40), ("y", 1), ("\n", 0), ("x" * 39 + "日", 2)):
        shown.text(text)
        assert shown.column == column


def test_long_notes_break_between_words(screen):
    shown, rows = screen(), "steps    answer complete at step 8 of 8, twice\n/a" + "b" * 40 + " c\n\nend"
    shown.note(rows, fold=True)
    assert shown.err.getvalue() == (
        "steps    answer complete at step 8 of 8,\n         twice\n/a" + "b" * 40 + "\nc\n\nend\n"
    )
    for whole in (shown, Screen(io.StringIO(), io.StringIO())):
        whole.note(rows, fold=whole is not shown)
        assert whole.err.getvalue().endswith(rows + "\n")


def test_the_label_shows_what_beams_agree_on(engine):
    watch = Watch(engine, Trie(beams=4))
    assert watch.label() == ("", "[reading the prompt]", ())
    for event in engine.stream("Once upon a time", watch.search, max_new_tokens=20, ignore_eos=True):
        watch.see(event)
        tail, remark, _ = watch.label()
        if watch.best:
            assert (
                remark
                == f"[… {plural(len(watch.best), 'token')}, 4 beams, {len(watch.best) - watch.settled} undecided]"
            )
            assert engine.tokenizer.decode(watch.best) == watch.text + tail or not tail


# --- Ctrl-C ---


def press() -> None:
    signal.raise_signal(signal.SIGINT)


def test_interrupt_is_a_flag_and_a_second_one_leaves_while_the_reply_goes_on():
    before = signal.getsignal(signal.SIGINT)
    with Interrupt() as interrupt:
        for _ in range(3):  # at the prompt, right after a reply that was stopped, and again
            with pytest.raises(KeyboardInterrupt) as raised, interrupt.prompting():
                press()
            assert not isinstance(raised.value, Quit) and not interrupt.pressed
            press()
            assert interrupt.pressed
        interrupt.pressed = False
        press()
        assert interrupt.pressed
        with pytest.raises(Quit) as left:
            press()
        assert left.value.exit_code == 130
        press()  # while the conversation is saved
        with pytest.raises(KeyboardInterrupt), interrupt.prompting():  # the Quit was lost: all is as before
            press()
    assert signal.getsignal(signal.SIGINT) is before


def test_two_interrupts_at_once_at_the_prompt_are_one():
    """`input` may call the handler of the second while the exception of the first is set."""
    with Interrupt() as interrupt:
        with pytest.raises(KeyboardInterrupt), interrupt.prompting():
            raise SystemError("returned a result with an exception set") from KeyboardInterrupt()
        with pytest.raises(SystemError), interrupt.prompting():
            raise SystemError


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGTERM])
def test_a_closed_terminal_and_a_termination_leave_from_anywhere(number):
    before = signal.getsignal(number)
    for prompting in (True, False):
        with (
            Interrupt() as interrupt,
            pytest.raises(Quit) as left,
            interrupt.prompting() if prompting else contextlib.nullcontext(),
        ):
            signal.raise_signal(number)
        assert left.value.exit_code == 128 + number and signal.getsignal(number) is before
    signal.signal(number, signal.SIG_IGN)  # nohup
    try:
        with Interrupt():
            signal.raise_signal(number)
    finally:
        signal.signal(number, before)


@pytest.mark.parametrize("begun", [True, False])
def test_no_alarm_outlives_an_interrupt(monkeypatch, begun):
    """When the interpreter ends it would kill the process."""
    setitimer = signal.setitimer

    def interrupted(*setting: float) -> None:
        """Right after the alarm was set, or right before it is taken back."""
        monkeypatch.undo()
        if begun:
            setitimer(*setting)
        press()

    with pytest.raises(KeyboardInterrupt), Interrupt() as interrupt:
        if begun:
            monkeypatch.setattr(signal, "setitimer", interrupted)
        with interrupt.prompting():
            monkeypatch.setattr(signal, "setitimer", interrupted)
    assert signal.getitimer(signal.ITIMER_REAL) == (0, 0)


def test_an_ignored_interrupt_stays_ignored():
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with Interrupt() as interrupt:
            press()
            assert not interrupt.pressed
    finally:
        signal.signal(signal.SIGINT, before)


# --- as processes ---


@pytest.mark.parametrize("term", ["dumb", ""])
def test_a_dumb_terminal_gets_no_escape_sequences(long, term):
    with Typist(*CHAT, "--model", long, "--max-new-tokens", "4", TERM=term) as typist:
        typist.wait_for(r"> ")
        shown = typist.before
        typist.type("Once\n")
        typist.wait_for(r"\n> ")
        assert "\x1b" not in shown + typist.before


def test_a_person_at_a_terminal(long):
    argv = ["--model", long, "--search", "trie", "--beams", "4", "--ignore-eos", "--max-new-tokens", "50000"]
    with Typist(*CHAT, *argv) as typist:
        typist.wait_for(r"> ")
        typist.type("half a line")
        typist.wait_for("half a line")
        typist.interrupt()  # clears the line
        typist.wait_for(r"> ")
        assert "leaves" not in typist.before
        typist.interrupt()
        typist.wait_for(r"\[Ctrl-D or /exit leaves\].*> ")
        typist.type("Once upon a time\n")
        typist.wait_for(r"time\r\n" + REPLY)
        typist.type("/sta")  # not shown before the prompt is back
        time.sleep(0.2)
        typist.interrupt()
        typist.wait_for(r"\[interrupted\].*> ")
        assert "/sta" not in typist.before
        typist.interrupt()  # at once: it leaves neither right after the reply that was stopped
        typist.wait_for(r"> ")
        typist.type("/stats\n")
        typist.wait_for(r"tokens \(interrupted\).*1 turn.*> ")
        typist.interrupt()  # nor after a command in between
        typist.wait_for(r"> ")
        typist.type("/stats\n")
        typist.wait_for(r"1 turn.*> ")
        typist.type("\x04")
        assert typist.process.wait(120) == 0


SECOND_REPLY = """
import os, sys, time
from engine.app import chat
from engine.app.terminal import Interrupt
from engine.step.driver import Driver
submit, step, drivers = Driver.submit, Driver.step, []
def submitting(driver, run):
    drivers.append(driver)
    driver.steps = 0
    return submit(driver, run)
def stepping(driver):
    step(driver)
    driver.steps += 1
    if len(drivers) == 2 and driver.steps > 5:
        sys.stderr.write("(now)")
        sys.stderr.flush()
        for _ in range(600):  # a signal right before a long sleep would be noticed at its end
            time.sleep(0.1) if sys.argv[1] == "hangs" else 1 / 0
handle = Interrupt._handle
def handling(self, number, frame):
    handle(self, number, frame)
    os.write(2, b"(heard)")
Driver.submit, Driver.step, Interrupt._handle = submitting, stepping, handling
sys.exit(chat.main(sys.argv[2:]))
"""


@pytest.mark.parametrize(
    "reply, ended_by, code",
    [("hangs", "two Ctrl-C", 130), ("hangs", "SIGHUP", 129), ("hangs", "SIGTERM", 143), ("fails", "an error", 1)],
)
def test_a_conversation_is_saved_whatever_ends_the_chat(long, tmp_path, command, reply, ended_by, code):
    argv = [sys.executable, "-c", SECOND_REPLY, reply, "--kv-memory", "64M", "--model", long]
    argv += ["--ignore-eos", "--max-new-tokens", "12"]
    with Typist(*argv, XDG_STATE_HOME=str(tmp_path / "state")) as typist:
        typist.wait_for(r"plain completion.*> ")
        typist.type("One\n")
        typist.wait_for(r"One.*max_new_tokens 12\].*> ")
        typist.type("Two\n")
        typist.wait_for(r"\(now\)")
        if ended_by == "two Ctrl-C":
            typist.interrupt()
            typist.wait_for(r"\(heard\)")  # two at once would be one
            typist.interrupt()
        elif ended_by != "an error":
            typist.process.send_signal(getattr(signal, ended_by))
        typist.wait_for(r"the conversation is saved; to continue it: --load \S+\.json")
        [file] = (tmp_path / "state" / "coppice").glob("chat-*.json")
        assert str(file) in typist.matched
        assert typist.process.wait(120) == code
    turns = transcript.load(file).turns
    assert [t.user for t in turns] == ["One", "Two"][: len(turns)]
    if ended_by != "an error":
        assert turns[1].finish_reason == "interrupted" and turns[1].reply  # as far as it had come
    assert stat.S_IMODE(file.stat().st_mode) == 0o600 and stat.S_IMODE(file.parent.stat().st_mode) == 0o700
    code, out, _ = command("--model", long, "--load", file, "-p", "Three")
    assert code == 0 and out


def test_a_conversation_is_saved_when_the_terminal_is_closed(long, tmp_path):
    argv = ["--model", long, "--ignore-eos", "--max-new-tokens", "12"]
    with Typist(*CHAT, *argv, XDG_STATE_HOME=str(tmp_path / "state"), TMPDIR=str(tmp_path)) as typist:
        typist.wait_for(r"plain completion.*> ")
        typist.type("One\n")
        typist.wait_for(r"One.*max_new_tokens 12\].*> ")
        typist.hang_up()
        typist.process.wait(120)
        [file] = tmp_path.rglob("chat-*.json")  # once, although notes cannot be written either
        assert [t.user for t in transcript.load(file).turns] == ["One"]


def test_an_overlooked_interrupt_is_seen_at_the_prompt(tmp_path):
    overlooked = "threading.Timer(0.5, _thread.interrupt_main).start()"  # as if it came right before readline waits
    make = "from engine.app.terminal import *; i = Interrupt().__enter__(); e = LineEditor()"
    ask = f"with i.prompting(): {overlooked}; e.ask('> ')"
    master, slave = pty.openpty()
    with subprocess.Popen(
        [sys.executable, "-c", f"import _thread, threading; {make}\n{ask}"],
        cwd=ROOT, stdin=slave, stdout=slave, stderr=subprocess.PIPE, start_new_session=True,
        env=os.environ | {"XDG_STATE_HOME": str(tmp_path)},
    ) as process:  # fmt: skip
        try:
            assert b"KeyboardInterrupt" in process.communicate(timeout=120)[1]
        finally:
            process.kill()
            os.close(master)
            os.close(slave)


def test_an_interrupted_pipe_gets_the_partial_text(long):
    with spawn(*CHAT, "--model", long, "-p", "Hello", "--ignore-eos", "--max-new-tokens", "50000",
               stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:  # fmt: skip
        assert process.stdout and process.stdout.read(10)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=120)
    assert process.returncode == 130 and out.endswith(b"\n") and b"Traceback" not in err


def test_a_closed_pipe_is_quiet(long):
    with spawn(*CHAT, "--model", long, "-p", "Hello", "--ignore-eos", "--max-new-tokens", "50000",
               stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:  # fmt: skip
        assert process.stdout and process.stdout.read(10)
        process.stdout.close()
        assert process.stderr and process.stderr.read() == b""
    assert process.wait(120) == 141


def test_utf8_in_any_locale(base):
    argv = ["--model", base, "--max-new-tokens", "30", "--ignore-eos"]
    environment = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "PYTHONIOENCODING": ""}
    with spawn(*CHAT, *argv, environment=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        out, _ = process.communicate("Café 日本".encode(), timeout=120)
    [result] = Engine.load(base).generate(["Café 日本"], Greedy(), max_new_tokens=30, ignore_eos=True)
    assert out.decode() == result.outputs[0].text + "\n" and not out.isascii()


def test_a_chat_changes_its_adapter(command):
    golden = Path(__file__).parents[2] / "golden"
    flags = ["--model", golden / "llama" / "gqa", "--dtype", "float32", "--max-new-tokens", "4", "--ignore-eos"]
    flags += [f"--adapter={golden / 'adapters' / name}" for name in ("llama_all", "llama_some")]
    lines = ["ab", "/reset", "/set adapter=none", "ab", "/reset", "/set adapter=llama_some", "ab", "/set adapter=other"]
    code, out, err = command(*flags, typed="\n".join([*lines, "/set", ""]), tty=True)
    assert code == 0 and "adapter llama_all; /set adapter changes it: llama_some, none" in err
    assert "adapter: expected one of none, llama_all, llama_some, got 'other'" in err
    assert re.search(r"adapter +'?llama_some", err)
    replies = [line for line in out.splitlines() if line.strip()]
    assert len({*replies[-3:]}) == 3
