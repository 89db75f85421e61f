"""When beam search ends in a chat: by itself when its answer leads, before that when a person takes the answer."""

import os
import pty
import time

import pytest

from engine import Done, Engine, UsageError
from engine.app import chat, dialog
from engine.app.commands import assignments
from engine.app.dialog import Watch
from engine.app.terminal import enter_pressed
from engine.demo import demo_folder
from search import Trie

ASK = "Write me a story about a dog."


@pytest.fixture(scope="module")
def engine() -> Engine:
    return Engine.load(demo_folder(), dtype="float32")


def test_a_chat_ends_beam_search_when_its_answer_leads():
    settings = chat.Settings("trie", {"beams": 4}, 10, False, ())
    assert settings.shown()["early_stopping"] == "best"
    assert settings.changed(assignments("early_stopping=never")).shown()["early_stopping"] == "never"
    patient = settings.changed(assignments("patience=2"))
    assert (patient.shown()["early_stopping"], patient.shown()["patience"]) == (False, 2)
    with pytest.raises(UsageError, match="patience: it takes the place of early_stopping, which is never"):
        patient.changed(assignments("early_stopping=never"))
    assert Trie(beams=4).early_stopping is False  # the library's remains Hugging Face's


def test_an_answer_that_is_ready_is_taken(engine):
    """Under a rule that would go on; the label says so before."""
    ids = engine.encode("The dog")
    search = Trie(6, early_stopping="never")
    [whole] = engine.generate([ids], search, max_new_tokens=200)
    assert whole.stats["answer_step"] == len(whole.outputs[0].token_ids) < whole.stats["steps"]
    watch, labels = Watch(engine, search), []

    def taken() -> bool:
        labels.append(watch.label().remark)
        return len(labels) == 2

    for event in engine.stream(ids, search, max_new_tokens=200, taken=taken):
        watch.see(event)
    assert isinstance(event, Done)
    best = event.result.outputs[0]
    assert best.finish_reason == "eos" and best.score is not None
    assert event.result.stats["steps"] < whole.stats["steps"]
    tokens = len(best.token_ids)
    assert labels[1].startswith(f"[the answer of {tokens} tokens is ready, Enter takes it; 6 beams continue]")


def test_enter_takes_the_answer_of_a_chat(command, monkeypatch):
    argv = ["--beams", "6", "--early-stopping", "never", "--stats", "-p", ASK]
    argv += ["--dtype", "float32", "--kv-memory", "4M"]
    monkeypatch.setattr(dialog, "enter_pressed", lambda: True)
    code, out, err = command(*argv)
    assert code == 0 and out.strip()
    [line] = [line for line in err.splitlines() if line.startswith("steps")]
    complete, steps = (int(word) for word in line.split() if word.isdigit())
    assert line == f"steps    answer complete at step {complete} of {steps}" and complete <= steps
    monkeypatch.setattr(dialog, "enter_pressed", lambda: False)
    _, _, err = command(*argv)
    assert int(err.rpartition(" of ")[2].split()[0]) > steps


def test_an_empty_line_is_enter_and_anything_else_stays(monkeypatch):
    master, slave = pty.openpty()
    with os.fdopen(slave, "r") as terminal:
        monkeypatch.setattr("sys.stdin", terminal)
        assert not enter_pressed()
        os.write(master, b"\n")
        _until(enter_pressed)
        assert not enter_pressed()
        os.write(master, b"x")
        assert not enter_pressed()
        os.write(master, b"yz\n")
        time.sleep(0.05)
        assert not enter_pressed()
        assert terminal.readline() == "xyz\n"
    os.close(master)
    assert not enter_pressed()  # the terminal is closed


def _until(condition) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)
