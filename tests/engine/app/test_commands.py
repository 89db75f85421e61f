"""The chat's commands: turns taken back, answered again, saved, dropped when the context is full; live candidates."""

import contextlib
import errno
import json
import os
import re
import stat
import tempfile
import threading
import time
from functools import partial
from itertools import pairwise
from pathlib import Path
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine import Engine, UsageError
from engine.app import chat, transcript
from engine.app.commands import ALIASES, COMMANDS
from engine.app.dialog import Dialog, Watch
from engine.app.terminal import Interrupt, Label, Quit, Screen, state_folder
from engine.conversation import Conversation, Dropped, Turn
from engine.demo import demo_folder
from engine.engine import Done, Progress, Text
from engine.errors import CoppiceError
from models.checkpoint import files
from search import Greedy, Sample, Trie
from tests.engine.app.typist import CHAT, SHAPE, Terminal, Typist, make_templated
from tests.invariants import check_pool
from tools.random_checkpoint import make

ROOT = Path(__file__).parents[3]
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{% if m['content'] == 'forbidden' %}{{ raise_exception('no') }}{% endif %}"
    "[{{ m['role'] }}]{{ m['content'] }}\n{% endfor %}[assistant]"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    return make_templated(tmp_path_factory.mktemp("templated"), TEMPLATE)


@pytest.fixture(scope="module")
def engine(folder) -> Engine:
    return Engine.load(folder, kv_memory=1 << 20)


@pytest.fixture
def conversation(engine):
    conversation = Conversation(engine)
    yield conversation
    check(conversation)
    conversation.reset()
    check_pool(engine.pool, [])


def check(conversation: Conversation) -> None:
    trunk = conversation.session.trunk
    check_pool(conversation.engine.pool, trunk.pages if trunk else [])


def say(conversation: Conversation, user: str, search=None, **options) -> tuple[Done, int]:
    """The end of the answer, and how many turns were dropped for it."""
    events = list(conversation.stream(user, search or Greedy(), **({"max_new_tokens": 8} | options)))
    check(conversation)
    assert isinstance(events[-1], Done)
    return events[-1], sum(e.turns for e in events if isinstance(e, Dropped))


class Typing:
    """A dialog in this process, obeying line by line."""

    def __init__(self, conversation: Conversation, search: str = "greedy", file: Path | None = None, **options):
        params = {key: options.pop(key) for key in ("beams", "temperature", "seed") if key in options}
        self.screen = Screen(Terminal(), Terminal())
        values = chat.Settings(search, params, options.pop("max_new_tokens", 8), True, ())
        args = chat.parser().parse_args([] if file is None else ["--save", str(file)])
        self.dialog = Dialog(
            conversation, values, self.screen, Interrupt(), args, commands=COMMANDS, aliases=ALIASES, **options
        )

    def __call__(self, line: str, quoted: bool = False) -> tuple[str, str]:
        """(stdout, stderr) of one line."""
        out, err = len(self.screen.out.getvalue()), len(self.screen.err.getvalue())
        self.dialog._obey(line, quoted)
        return self.screen.out.getvalue()[out:], self.screen.err.getvalue()[err:]


@pytest.fixture
def command(command, folder):
    return partial(command, "--model", folder, "--max-new-tokens", "8")


# --- taking back, answering again ---


def test_undo_gives_back_the_turn_and_its_cache(conversation):
    typing = Typing(conversation)
    typing("One")
    trunk = conversation.session.trunk
    cached, pages = trunk.cached, list(trunk.pages)
    second = typing("Two")
    assert "Two; 1 turn left" in typing("/undo")[1]
    trunk = conversation.session.trunk
    assert trunk.cached == cached and trunk.pages == pages
    assert [page for first, count in trunk.runs for page in range(first, first + count)] == pages
    assert typing("Two") == second
    typing("/undo")
    typing("/undo")
    assert not conversation.turns and conversation.engine.pool.used_pages == 0
    assert "0 of 512 tokens cached, 0 turns" in typing("/show mem")[1]
    for line in ("/undo", "/regen"):
        with pytest.raises(UsageError, match="no turn"):
            typing(line)
    for line in ("/undo 2", "/beams 4"):  # no number is silently ignored
        with pytest.raises(UsageError, match=f"got '{line[-1]}'"):
            typing(line)


def test_regenerating_without_chance_says_so(conversation):
    typing = Typing(conversation)
    first, _ = typing("One")
    again, told = typing("/regen")
    assert again == first and "the same answer" in told and len(conversation.turns) == 1
    assert conversation.session.trunk.cached >= typing.dialog.last.stats["reused_tokens"] > 10
    longer, told = typing("/regen max_new_tokens=12")
    assert longer.startswith(first.rstrip("\n")) and "the same" not in told
    assert typing.dialog.settings.max_new_tokens == 8  # for one answer only
    assert "the same" not in typing("/regen")[1] and "the same" in typing("/regen")[1]
    typing("/system Be brief")
    assert "the same" not in typing("/regen")[1]
    assert "the same" not in typing("/regen search=trie beams=3")[1]
    assert "seed" not in typing("/regen search=sample temperature=0")[1]


def test_regenerating_a_sample_takes_the_next_seed(conversation, engine):
    typing = Typing(conversation, "sample", seed=5)
    typing("Zero")
    typing("One")
    ids = typing.dialog.conversation.prompt_ids
    for line, seed in (("/regen", 6), ("/regen", 7), ("/regen seed=2", 2), ("/regen", 3), ("/regen temperature=2", 4)):
        assert f"[seed {seed}]" in typing(line)[1] and len(conversation.turns) == 2
        turn = conversation.turns.pop()
        warm = 2.0 if "temperature" in line else 1.0
        [result] = engine.generate([ids("One")], Sample(warm, seed=seed), max_new_tokens=8, ignore_eos=True)
        conversation.turns.append(turn)
        assert turn.reply == result.outputs[0].text
    typing("Two")
    assert typing.dialog.made[1].shown()["seed"] == 5
    typing("/undo")
    assert "[seed 6]" in typing("/regen")[1]  # not the last reply's turn: the settings' seed is where it starts


def test_set_chooses_the_search_that_parameters_mean(conversation):
    typing = Typing(conversation)

    def chosen():
        return typing.dialog.settings.configuration()  # every change makes other settings

    assert typing("/set temperature=0 seed=1") == ("", "") and chosen() == Greedy()
    assert "[search trie]" in typing("/set beams=5")[1] and chosen() == Trie(5, early_stopping="best")
    assert typing("/set beams=4 temperature=0") == ("", "") and chosen() == Trie(4, early_stopping="best")
    with pytest.raises(UsageError, match="searches that have all of the parameters: beam-sample"):
        typing("/set beams=3 temperature=0.7")
    assert chosen() == Trie(4, early_stopping="best")
    assert "[search beam-sample]" in typing("/set search=beam-sample beams=3 temperature=0.7")[1]
    assert typing("/set beams=2") == ("", "") and typing.dialog.settings.search == "beam-sample"
    typing("/set search=beam")
    assert typing.dialog.settings.search == "trie" and chosen() == Trie(2, early_stopping="best")
    with pytest.raises(UsageError, match="beams: the search 'greedy' has no such parameter"):
        typing("/set search=greedy beams=3")
    with pytest.raises(UsageError, match="needs a draft model\ngive --draft DIR"):
        typing("/set search=dsbd")


def test_a_failed_answer_leaves_the_turn(conversation, monkeypatch):
    typing = Typing(conversation)
    typing("One")
    turn = conversation.turns[0]
    for line in ("/regen early_stopping=true", "/regen search=trie beams=900", "/regen stop=a=b=c beams"):
        with pytest.raises(UsageError):
            typing(line)
        assert conversation.turns == [turn]
    monkeypatch.setattr(type(conversation), "stream", lambda *_, **__: (_ for _ in [(1 / 0)]))
    with pytest.raises(ZeroDivisionError):
        typing("/regen")
    assert conversation.turns == [turn]


# --- the system message ---


def test_system_message(conversation, engine):
    typing = Typing(conversation)
    assert "no system message" in typing("/system")[1]
    typing("One")
    assert "again" in typing("/system Be  brief")[1] and "Be  brief" in typing("/system")[1]
    typing("Two")
    ids = conversation.session.trunk.tokens
    assert "[system]Be  brief\n[user]One" in engine.tokenizer.decode(ids) and len(conversation.turns) == 2
    for wrong in ("/system forbidden", "/system \udcff"):
        with pytest.raises(CoppiceError):
            typing(wrong)
        assert conversation.system == "Be  brief"
    typing('/system ""')
    assert conversation.system is None


def test_system_needs_a_template(tmp_path):
    plain = Conversation(Engine.load(make(tmp_path, **SHAPE)["path"], kv_memory=1 << 20))
    for change in (lambda: plain.set_system("x"), lambda: plain.restore([], "x")):
        with pytest.raises(UsageError, match="no chat template"):
            change()
    assert "plain completion" in Typing(plain)("/show template")[1]


# --- a full context ---


def test_the_oldest_turns_go_and_the_system_message_stays(conversation, engine):
    conversation.set_system("Be brief")
    dropped = 0
    for i in range(12):
        before = conversation.first
        done, now = say(conversation, f"number {i} " + "word " * 12, max_new_tokens=64, ignore_eos=True)
        dropped += now
        assert conversation.first == dropped == before + now and len(conversation.turns) == i + 1
        ids = conversation.session.trunk.tokens
        text = engine.tokenizer.decode(ids)
        assert text.startswith(f"[system]Be brief\n[user]number {dropped} ") and len(ids) <= 512
        assert len(done.result.outputs[0].token_ids) == 64  # room for a whole answer was made
    assert dropped >= 5
    while len(conversation.turns) > 3:
        conversation.undo()
    assert conversation.first == 0  # what had been dropped for later turns is seen again
    assert engine.pool.used_pages == 0  # the cache was of a prompt that began elsewhere


def test_a_full_context_is_halved_at_once(conversation):
    """Then the turns to come reuse what was read: dropped one by one, each would read the whole window afresh."""
    conversation.set_system("Be brief")
    afresh, room = [], 512 - 8
    for i in range(40):
        user = f"number {i} " + "w" * (i % 7)
        events = list(conversation.stream(user, Greedy(), max_new_tokens=8, ignore_eos=True))
        stats, first = events[-1].result.stats, conversation.first
        if isinstance(events[0], Dropped):
            afresh.append(i)
            turn = conversation.turns.pop()
            alone, size, larger = (len(conversation.prompt_ids(user, n)) for n in (i, first, first - 1))
            assert events[0].left == i - first > 3 and size == stats["prompt_tokens"]
            assert alone + 2 * (size - alone) <= room  # the history could double
            assert alone + 2 * (larger - alone) > room  # and no more went than that takes
            # Again: the same turns are dropped, and what was read is still there.
            again = list(conversation.stream(user, Greedy(), max_new_tokens=8, ignore_eos=True))
            assert again[0] == events[0] and conversation.turns[i] == turn
            assert again[-1].result.stats["reused_tokens"] == size - 1
        elif i:
            assert stats["reused_tokens"] > stats["prompt_tokens"] - 60
    assert 2 <= len(afresh) < 6 and min(b - a for a, b in pairwise(afresh)) >= 5


def test_the_latest_turn_stays_if_it_fits(conversation):
    say(conversation, "a" * 100)
    assert say(conversation, "b" * 380)[1] == 0
    assert say(conversation, "c" * 400)[1] == 1 and conversation.first == 1  # it is more than half, and all there is
    assert say(conversation, "d" * 600)[1] == 2 and conversation.first == 3


def test_a_long_chat_on_the_demo_reuses_most_of_its_prompts():
    engine = Engine.load(demo_folder(), kv_memory=16 << 20)
    conversation = Conversation(engine)
    prompt = reused = 0
    questions = ("What is 3 + {}?", "What is the opposite of hot?", "My name is Ann.", "What is my name?",
                 "What day comes after Monday?", "Tell me a story about a cat and {} mice.")  # fmt: skip
    draw = Random(0)
    for user in (draw.choice(questions).format(draw.randrange(10)) for _ in range(40)):
        stats = say(conversation, user, max_new_tokens=24)[0].result.stats
        prompt, reused = prompt + stats["prompt_tokens"], reused + stats["reused_tokens"]
    assert conversation.first > 12 and reused > 0.75 * prompt
    conversation.reset()
    check_pool(engine.pool, [])


def test_what_fits_is_seen(conversation):
    for i in range(3):
        say(conversation, f"number {i}")
    say(conversation, "x" * 465)
    assert conversation.first == 3
    conversation.undo()
    assert say(conversation, "short")[1] == 0 and conversation.first == 0


def test_a_message_that_is_too_long_alone(conversation):
    with pytest.raises(UsageError, match=r"prompt has \d+ tokens, this model's maximum context length is 512"):
        say(conversation, "x" * 600)
    say(conversation, "short")
    turns = list(conversation.turns)
    with pytest.raises(UsageError, match=r"without any turn before it there are 6\d\d tokens, .* length is 512"):
        say(conversation, "x" * 600)
    assert conversation.turns == turns
    assert say(conversation, "short")[0].result.stats["reused_tokens"] > 5
    conversation.set_system("x" * 600)
    with pytest.raises(UsageError, match="shorten it or the system message"):
        say(conversation, "short")


def test_a_small_cache_drops_turns_too(folder):
    conversation = Conversation(Engine.load(folder, kv_memory=64 << 10))
    tokens = conversation.engine.pool.pages * conversation.engine.pool.page_size
    assert tokens < 300
    for _ in range(8):
        say(conversation, "word " * 8, Trie(beams=4), max_new_tokens=20, ignore_eos=True)
    assert 0 < conversation.first < 8
    conversation.reset()


def test_overflow_on_the_command_line(command):
    lines = "".join(f"number {i} {'word ' * 25}\n" for i in range(6))
    code, _, err = command("--ignore-eos", typed=lines, tty=True)
    assert code == 0 and "no longer sees the oldest 2 turns, only the last 1]" in err and "error" not in err
    assert "no longer sees" not in command("--ignore-eos", "-q", typed=lines, tty=True)[2]
    code, _, err = command("--ignore-eos", "--on-overflow", "error", typed=lines, tty=True)
    assert code == 0 and "the conversation is full: with this turn it has" in err
    assert command("--on-overflow", "what", "-p", "x")[0] == 2


@pytest.mark.parametrize("seed", range(2))
def test_whatever_is_done_the_pool_is_exact(conversation, seed):
    random, typing = Random(seed), Typing(conversation, "trie", beams=4, max_new_tokens=30)
    lines = ["Hello", "word " * 20, "x" * 700, "/undo", "/regen", "/regen search=sample", "/regen beams=999"]
    lines += ["/system Be brief", '/system ""', "/system forbidden", "/set search=greedy", "/set search=trie", "/reset"]
    for line in random.choices(lines, [12, 16, *[2] * (len(lines) - 3), 1], k=40):
        turns = list(conversation.turns)
        try:
            typing(line)
        except CoppiceError:
            assert conversation.turns == turns
        check(conversation)
        trunk = conversation.session.trunk
        assert not trunk or len(trunk.pages) == -(-trunk.cached // conversation.engine.pool.page_size)
        assert all(turn.first <= i for i, turn in enumerate(conversation.turns))


# --- files ---


def test_a_saved_conversation_goes_on_as_if_it_had_not_ended(conversation, engine, tmp_path):
    file = tmp_path / "a chat.json"
    typing = Typing(conversation, "trie", beams=3)
    typing("/system Be brief")
    typing("Größe 日本 🙂\u2028")
    typing("One\nmore", quoted=True)
    assert "2 turns saved" in typing(f"/save {file}")[1] and stat.S_IMODE(file.stat().st_mode) == 0o600
    saved = transcript.load(file)
    plain = [Turn(t.user, t.reply, t.finish_reason) for t in conversation.turns]
    assert list(saved.turns) == plain and saved.system == "Be brief" and saved.model == engine.name
    assert saved.settings["beams"] == 3
    third = typing("Three")
    other = Conversation(engine)
    elsewhere = Typing(other, "trie", beams=3)
    elsewhere("Something else")
    assert "2 turns loaded" in elsewhere(f"/load {file}")[1]
    assert elsewhere("Three") == third and other.turns == conversation.turns
    assert "search=trie" in Typing(other)(f"/load {file}")[1]  # made with other settings
    other.reset()


def test_dropped_turns_are_saved_and_stay_dropped(conversation, tmp_path):
    for i in range(9):
        say(conversation, f"number {i} " + "word " * 12, max_new_tokens=64, ignore_eos=True)
    transcript.save(tmp_path / "x", conversation, {})
    saved = transcript.load(tmp_path / "x")
    assert len(saved.turns) == 9 and saved.turns[-1].first == conversation.first > 0
    conversation.restore(saved.turns, None)
    assert conversation.engine.pool.used_pages == 0
    say(conversation, "more")


@pytest.mark.parametrize("failing", ["write", "fsync", "replace"])
def test_a_failed_save_leaves_the_old_file(conversation, tmp_path, monkeypatch, failing):
    file = tmp_path / "chat.json"
    typing = Typing(conversation, file=file)
    typing("One")
    file.chmod(0o640)
    before = file.read_bytes()

    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def broken(path, mode="r", **options):
        return full() if "w" in mode else open(path, mode, **options)

    if failing == "write":
        monkeypatch.setattr(files, "open", broken, raising=False)
    else:
        monkeypatch.setattr(os, failing, full)
    for line in ("Two", "/save", "/regen"):
        with pytest.raises(UsageError, match="cannot save the conversation: No space left"):
            typing(line)
    assert len(conversation.turns) == 2 and file.read_bytes() == before and os.listdir(tmp_path) == ["chat.json"]
    monkeypatch.undo()
    typing("/save")
    assert len(transcript.load(file).turns) == 2 and stat.S_IMODE(file.stat().st_mode) == 0o640
    typing("/undo")
    assert len(transcript.load(file).turns) == 1
    assert f"replaces what {file} holds" in typing("/reset")[1] and len(transcript.load(file).turns) == 1


@pytest.fixture
def state(monkeypatch, tmp_path) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path / "state" / "coppice"


def users(file: Path) -> list[str]:
    return [turn.user for turn in transcript.load(file).turns]


def test_what_is_in_no_file_is_rescued(conversation, state, tmp_path):
    typing = Typing(conversation)
    dialog, err = typing.dialog, typing.screen.err
    dialog.rescue()
    assert not state.exists() and not err.getvalue()  # nothing was said
    typing("One")
    dialog.rescue()
    [file] = state.iterdir()
    assert users(file) == ["One"] and mode(file) == 0o600 and f"--load {file}" in err.getvalue()
    file.unlink()
    saved = tmp_path / "saved.json"
    typing(f"/save {saved}")
    dialog.rescue()
    typing("/reset")
    dialog.rescue()
    typing(f"/load {saved}")
    dialog.rescue()
    assert not list(state.iterdir())
    typing("Two")
    dialog.rescue()
    [file] = state.iterdir()
    assert users(file) == ["One", "Two"] and users(saved) == ["One"]


def test_a_rescue_goes_where_it_can(conversation, state, tmp_path, monkeypatch):
    file = tmp_path / "chat.json"
    typing = Typing(conversation, file=file)
    typing("One")
    typing.dialog._cut = Turn("Two", "a beg", "interrupted")
    typing.dialog.rescue()
    assert users(file) == ["One", "Two"] and not state.exists()
    file.unlink()
    file.mkdir()  # the file of --save cannot be written any more
    with pytest.raises(UsageError, match="cannot save"):
        typing("Three")
    typing.dialog.rescue()
    [rescued] = state.iterdir()
    assert users(rescued) == ["One", "Two", "Three"]
    monkeypatch.setenv("XDG_STATE_HOME", str(rescued))  # no folder
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "t"))
    (tmp_path / "t").mkdir()
    typing.dialog.rescue()
    assert not [*(tmp_path / "t").iterdir()]  # nothing is new
    conversation.turns.append(Turn("Four", "a", "eos"))
    typing.dialog.rescue()
    [folder] = (tmp_path / "t").iterdir()
    assert len(list(folder.iterdir())) == 1 and mode(folder) == 0o700
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "none"))
    conversation.turns.append(Turn("Five", "a", "eos"))
    typing.dialog.rescue()
    assert "error: the conversation is lost: " in typing.screen.err.getvalue()


@pytest.mark.parametrize("end", ["/exit\n", ""])
def test_leaving_after_a_failed_save_keeps_the_conversation(command, state, tmp_path, monkeypatch, end):
    file, replace = tmp_path / "chat.json", os.replace

    def full(source, target):
        if Path(target) == file:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        replace(source, target)

    monkeypatch.setattr(os, "replace", full)
    code, _, err = command("--save", file, typed=f"One\n{end}", tty=True)
    [rescued] = state.iterdir()
    assert code == 0 and users(rescued) == ["One"] and f"--load {rescued}" in err and not file.exists()


@pytest.mark.parametrize("line", ["Two", "/regen"])
def test_leaving_within_a_reply_keeps_what_there_is(conversation, state, monkeypatch, line):
    typing = Typing(conversation)
    typing("One")
    turn = conversation.turns[0]

    def left(*_, **__):
        yield Text("a beg")
        raise Quit

    monkeypatch.setattr(type(conversation), "stream", left)
    with pytest.raises(Quit):
        typing(line)
    typing.dialog.rescue()
    [file] = state.iterdir()
    turns = list(transcript.load(file).turns)
    assert turns == ([turn] if line == "/regen" else [turn, Turn("Two", "a beg", "interrupted")])


def test_save_leaves_other_files_alone(conversation, tmp_path):
    other = tmp_path / "thesis.txt"
    other.write_text("years of work")
    for path in (other, tmp_path, "/dev/null", tmp_path / "none" / "x", "a\0b"):
        with pytest.raises(UsageError):
            transcript.save(path, conversation, {})
    assert other.read_text() == "years of work" and os.listdir(tmp_path) == ["thesis.txt"]
    real, link = tmp_path / "real", tmp_path / "link"
    link.symlink_to(real)
    transcript.save(link, conversation, {})
    assert link.is_symlink() and real.is_file()


WHOLE = {
    "format": "coppice-chat",
    "version": 1,
    "model": "m",
    "settings": {},
    "system": None,
    "forgotten": 0,
    "turns": [{"user": "u", "reply": "r", "finish_reason": "eos"}],
}


@pytest.mark.parametrize(
    "content, words",
    [
        (b"", "malformed JSON"),
        (b"\xff", "UTF-8"),
        (b"[" * 100_000, "nested|malformed"),
        (b'{"format": "coppice-chat"', "malformed JSON: .* line 1"),
        (b"[]", "expected a JSON object"),
        ({"format": "x"}, "expected an object"),
        ({"version": True}, "version"),
        ({"version": 2}, "knows up to 1"),
        ({"turns": {}}, "turns: expected a list"),
        ({"turns": [1]}, "turn 1: expected an object, got 1"),
        ({"turns": [{"user": 1, "reply": "", "finish_reason": "eos"}]}, "turn 1: user"),
        ({"turns": [{"user": "", "reply": "", "finish_reason": "x"}]}, "finish_reason"),
        ({"turns": [{"user": "\ud800", "reply": "", "finish_reason": "eos"}]}, "surrogate"),
        ({"system": []}, "system"),
        ({"settings": 3}, "settings"),
        ({"forgotten": 1}, "forgotten"),
        (b'{"format": "coppice-chat", "version": ' + b"9" * 5000 + b"}", "out of range"),
    ],
)
def test_damaged_files_are_refused(conversation, tmp_path, content, words):
    file = tmp_path / "x"
    file.write_bytes(content if isinstance(content, bytes) else json.dumps(WHOLE | content).encode())
    say(conversation, "One")
    turns = list(conversation.turns)
    with pytest.raises(UsageError, match=words) as raised:
        Typing(conversation)(f"/load {file}")
    assert str(file) in str(raised.value) and conversation.turns == turns


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 9) | st.floats() | st.text(max_size=3) | st.just("eos"),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from([*WHOLE, *WHOLE["turns"][0]]), inner),
    max_leaves=8,
)


@settings(max_examples=150, deadline=None)
@given(st.dictionaries(st.sampled_from([*WHOLE]), JSON, max_size=3), JSON)
def test_any_file_loads_or_is_refused(tmp_path_factory, changes, turn):
    file = tmp_path_factory.getbasetemp() / "fuzzed.json"
    for record in (WHOLE | changes, WHOLE | {"turns": [turn]}):
        file.write_text(json.dumps(record))
        with contextlib.suppress(UsageError):
            saved = transcript.load(file)
            assert all(isinstance(t.user + t.reply, str) and t.first <= i for i, t in enumerate(saved.turns))


def test_two_chats_that_save_to_one_file(conversation, tmp_path):
    file = tmp_path / "chat.json"
    one, two = (Typing(Conversation(conversation.engine), file=file) for _ in range(2))
    one("One")
    with pytest.raises(UsageError, match="another program has changed the file in the meantime") as raised:
        two("Two")
    assert str(file) in str(raised.value) and "/save FILE" in str(raised.value)
    assert [t.user for t in transcript.load(file).turns] == ["One"]
    assert [t.user for t in two.dialog.conversation.turns] == ["Two"]  # it goes on
    two(f"/save {tmp_path / 'other'}")
    with pytest.raises(UsageError, match="in the meantime"):
        two("/save")
    one("Three")  # nothing has changed for this one
    two(f"/load {file}")
    two("Four")
    assert [t.user for t in transcript.load(file).turns] == ["One", "Three", "Four"]
    with pytest.raises(UsageError, match="in the meantime"):
        one("Five")
    one(f"/save {file}")  # said in so many words
    one("Six")
    assert [t.user for t in transcript.load(file).turns] == ["One", "Three", "Five", "Six"]
    assert sorted(os.listdir(tmp_path)) == ["chat.json", "other"]
    for typing in (one, two):
        typing.dialog.conversation.session.close()


def test_load_and_save_flags(command, tmp_path):
    file = tmp_path / "chat.json"
    code, first, err = command("--save", file, "-p", "One")
    assert (code, err) == (0, "") and [t.user for t in transcript.load(file).turns] == ["One"]
    code, out, err = command("--save", file, "-p", "Two")
    assert (code, out) == (2, "") and f"--load {file} continues it" in err
    assert command("--load", file, "--save", file, "-p", "Two")[0] == 0
    assert [t.user for t in transcript.load(file).turns] == ["One", "Two"]
    assert transcript.load(file).turns[0].reply == first.removesuffix("\n")
    code, _, err = command("--load", file, "--system", "Be brief", typed="/system\n/stats\n", tty=True)
    assert code == 0 and "[2 turns loaded]" in err and "Be brief" in err and "2 turns" in err
    assert len(transcript.load(file).turns) == 2  # not asked to save
    for argv in (["--load", tmp_path / "none"], ["--save", tmp_path / "none" / "x"], ["--save", tmp_path]):
        code, out, err = command(*argv, "-p", "x")
        assert (code, out) == (2, "") and str(tmp_path) in err and "Traceback" not in err


def test_prompts_from_files(command, tmp_path, folder):
    file = tmp_path / "prompt.txt"
    file.write_bytes("\ufeffGröße\nund mehr\r\n".encode())
    engine = Engine.load(folder, kv_memory=1 << 20)
    done, _ = say(Conversation(engine), "Größe\nund mehr")
    text = done.result.outputs[0].text + "\n"
    assert command("--prompt-file", file) == (0, text, "")
    assert command("--prompt-file", file, piped=b"") == (0, text, "")
    assert command("-p", "-", piped="Größe\nund mehr\n".encode()) == (0, text, "")
    assert text in command(typed=f"/read {file}\n", tty=True)[1]
    (tmp_path / "empty").write_text("\n")
    (tmp_path / "bytes").write_bytes(b"caf\xe9")
    for name, words in (("none", "No such file"), ("empty", "empty"), ("bytes", "byte 3: 0xe9"), (".", "directory")):
        code, out, err = command("--prompt-file", tmp_path / name)
        assert (code, out) == (2, "") and words in err
        assert words in command(typed=f"/read {tmp_path / name}\n", tty=True)[2]
    os.mkfifo(tmp_path / "fifo")
    assert "not a regular file" in command(typed=f"/read {tmp_path / 'fifo'}\n", tty=True)[2]
    writer = threading.Thread(target=lambda: (tmp_path / "fifo").write_bytes(file.read_bytes()), daemon=True)
    writer.start()
    assert command("--prompt-file", tmp_path / "fifo") == (0, text, "")  # as of --prompt-file <(command)
    assert command("--prompt-file", file, "-p", "x")[0] == 2
    assert command("-p", "-", piped=b"")[0] == 2


def test_several_lines_between_quotes(command, tmp_path):
    file = tmp_path / "chat.json"
    lines = ['"""', "One", "", "/help", '"""', '"""two"""', '  """three', 'four"""', '""""""', '"""never ended', ""]
    code, out, err = command("--save", file, typed="\n".join(lines), tty=True)
    assert code == 0 and out.count("... ") == 6 and "this list" not in err
    assert [t.user for t in transcript.load(file).turns] == ["One\n\n/help", "two", "three\nfour"]


def test_commands_say_what_they_expect(conversation):
    typing = Typing(conversation)
    for line in ("/show", "/show it", "/save", "/load", "/read", "/beams", "/set beams", "/load /none", "/nothing"):
        with pytest.raises(UsageError):
            typing(line)
    assert "vocab_size" in typing("/show config")[1] and "raise_exception" in typing("/show template")[1]
    words = " ".join(typing("/help")[1].split())  # lines break between words
    assert "show config (the model's), mem (the memory), template (the chat's) or settings" in words
    assert typing("/show settings") == typing("/set") and "max_new_tokens" in typing("/set")[1]
    assert "tokens of" not in typing("/stats")[1] and not conversation.turns


# --- candidates ---


@pytest.mark.parametrize("search", [Trie(beams=5), Trie(beams=3, length_penalty=0.5), Sample(num_return_sequences=4)])
def test_reports_tell_the_candidates(engine, search):
    settled, steps = [], 0
    for event in engine.stream("Once upon a time", search, max_new_tokens=12):
        if isinstance(event, Progress):
            settled += event.report.settled
            beams = event.report.beams()
            scores, tokens = [s for s, _ in beams], [list(t) for _, t in beams]
            assert scores == sorted(scores, reverse=True) and len(beams) >= 3
            assert all(t[: len(settled)] == settled for t in tokens)
            if isinstance(search, Trie):
                assert tokens[0] == list(event.report.best())
            steps += 1
        elif isinstance(event, Done) and not isinstance(search, Trie):
            assert [o.score for o in event.result.outputs] == sorted(
                (o.score for o in event.result.outputs), reverse=True
            )
    assert steps > 5


def test_beams_command(conversation):
    typing = Typing(conversation, "trie", beams=4)
    typing("One")
    told = typing("/beams")[1]
    assert "1 output returned" in told and conversation.turns[0].reply.split("\n")[0] in told and "(length)" in told
    watch = Watch(conversation.engine, Trie(beams=4))
    assert watch.stop() and watch.candidates == ()
    steps = iter(range(100))

    class Pressed(Interrupt):
        pressed = property(lambda _: next(steps) == 5, lambda *_: None)

    typing.dialog.interrupt = Pressed()
    typing("Two")
    told = typing("/beams")[1]
    assert "4 candidates when the search was interrupted" in told and len(typing.dialog.candidates) == 4
    assert len(typing.dialog.candidates[0][1]) == len(typing.dialog.last.outputs[0].token_ids) > 2


@pytest.fixture
def screen(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setenv("LINES", "6")
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setattr(Screen, "TICK", 0.005)
    return Screen(Terminal(), Terminal())


def test_the_panel_stands_under_the_text_and_goes(screen):
    label = Label("tail", "[remark]", ["  -1.0  a\nb\x1b[2J" + "x" * 80, *map(str, range(20))])
    with screen.status(lambda: label, steady=True):
        for i in range(50):
            screen.text(f"{i} ")
            deadline = time.monotonic() + 60
            while i % 10 == 9 and screen._held and time.monotonic() < deadline:  # until the next frame
                time.sleep(0.005)
    screen.end_line()
    err = screen.err.getvalue()
    assert screen.out.getvalue() == "".join(f"{i} " for i in range(50)) + "\n"
    assert "\r\n\x1b[2m[remark]\x1b[0m\r\n\x1b[2m  -1.0  a⏎b␛[2J" in err and "tail" not in err
    assert all(f"\x1b[2m{i}\x1b[0m" in err for i in range(3)) and "\x1b[2m3\x1b[0m" not in err  # as high as fits
    assert max(len(line) for line in re.findall(r"\x1b\[2m(.*?)\x1b\[0m", err)) == 39
    assert err.endswith("\x1b[J") and err.count("\x1b7") == err.count("\x1b8") < 50


def test_panel_of_a_search(engine, monkeypatch):
    monkeypatch.setattr(Watch, "PERIOD", 0)
    watch = Watch(engine, Trie(beams=12), beams=True)
    rows = 0
    for event in engine.stream("Once upon a time", watch.search, max_new_tokens=20, ignore_eos=True):
        watch.see(event)
        tail, remark, lines = watch.label()
        if lines:
            rows = max(rows, len(lines))
            assert not tail and "12 beams" in remark and all(re.match(r" *-\d+\.\d{4}  ", line) for line in lines)
    assert rows == 8
    assert not Watch(engine, Greedy(), beams=True).beams


def test_show_beams_without_a_terminal(command):
    argv = ["--search", "trie", "-p", "Hello"]
    code, out, err = command(*argv, "--show-beams")
    assert code == 0 and out == command(*argv)[1] and err == "--show-beams is for terminals: ignored here\n"
    assert command(*argv, "--show-beams", "-q") == (0, out, "")


# --- the history ---


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_the_state_folder_is_made_and_private(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "my" / "state"))
    assert state_folder() == tmp_path / "my" / "state" / "coppice"
    assert [mode(tmp_path / part) for part in ("my", "my/state", "my/state/coppice")] == [0o700] * 3
    monkeypatch.setenv("XDG_STATE_HOME", "relative")
    home = tmp_path / "home"
    monkeypatch.setenv("HOME", str(home))
    with pytest.raises(OSError, match="no home"):  # an account without one: it is not made
        state_folder()
    home.mkdir(mode=0o755)
    assert state_folder() == home / ".local/state/coppice" == state_folder()
    assert mode(home / ".local") == 0o700
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError):
        state_folder()


def test_a_chat_says_once_that_lines_are_not_remembered(long, tmp_path):
    (tmp_path / "file").write_text("")
    with Typist(*CHAT, "--model", long, "--max-new-tokens", "4", XDG_STATE_HOME=str(tmp_path / "file")) as typist:
        before = typist.wait_for(r"> ")
        assert "[typed lines will not be remembered: Not a directory: " in before
        typist.type("Once\n")
        assert "remembered" not in typist.wait_for(r"max_new_tokens 4.*> ")
        typist.type("\x04")
        assert typist.process.wait(120) == 0


def test_live_candidates_and_history_at_a_terminal(long, tmp_path):
    argv = ["--model", long, "--search", "trie", "--beams", "4", "--ignore-eos", "--max-new-tokens", "50000"]
    with Typist(*CHAT, *argv, "--show-beams", XDG_STATE_HOME=str(tmp_path)) as typist:
        typist.wait_for(r"> ")
        typist.type("Once upon a time\n")
        typist.wait_for(r"4 beams, \d+ undecided.*\r\n\x1b\[2m *-\d\.\d{4}  .*\x1b8.*4 beams")
        typist.interrupt()
        typist.wait_for(r"\x1b\[J.*\[interrupted\].*> ")
        typist.type("/bea\t\n")
        typist.wait_for(r"/beams .*candidates when the search was interrupted.*-\d\.\d{4} .*> ")
        typist.type("/exit\n")
        assert typist.process.wait(120) == 0
    history = tmp_path / "coppice" / "history"
    assert history.read_text().splitlines() == ["Once upon a time", "/beams ", "/exit"]
    assert stat.S_IMODE(history.stat().st_mode) == 0o600 and stat.S_IMODE(history.parent.stat().st_mode) == 0o700
    with Typist(*CHAT, *argv, XDG_STATE_HOME=str(tmp_path)) as typist:
        typist.wait_for(r"> ")
        typist.type("\x1b[A\x1b[A\x1b[A\x01x \x04\x05\x15")  # up thrice, edit, clear
        typist.wait_for("Once upon a time")
        typist.type("\x04")
        assert typist.process.wait(120) == 0
