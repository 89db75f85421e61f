"""--draft-store: the texts of a run are in the file at its end, and the next run begins with them."""

import io
import json
import warnings
from pathlib import Path

import pytest

from engine import Engine
from engine.app import batch, chat
from engine.demo import demo_folder
from engine.drafts.suffixes import SuffixStore
from engine.serve import command

LINES = [{"prompt": "What is the opposite of hot?"}, {"prompt": "Once upon a time", "params": {"max_new_tokens": 5}}]


def run(*flags: str, lines: list[dict] = LINES) -> tuple[int, list[dict]]:
    taken, given = io.BytesIO("\n".join(map(json.dumps, lines)).encode()), io.BytesIO()
    argv = ["-q", "--threads", "1", "--max-new-tokens", "12", *flags]
    return batch.main(argv, taken, given), [json.loads(line) for line in given.getvalue().splitlines()]


def texts(file: Path) -> SuffixStore:
    engine = Engine.load(demo_folder(), threads=1)
    store = SuffixStore(engine.runner.vocab_size, engine.tokenizer.fingerprint)
    store.load(file)
    return store


def test_batch(tmp_path: Path):
    file = tmp_path / "texts"
    code, first = run("--drafts", "suffix", "--draft-store", str(file))
    assert code == 0 and file.stat().st_mode & 0o077 == 0
    held = len(texts(file))
    assert held == sum(1 + r["stats"]["prompt_tokens"] + len(r["outputs"][0]["token_ids"]) for r in first)
    code, again = run("--drafts", "suffix", "--draft-store", str(file))
    assert (code, len(texts(file))) == (0, held)  # what is there is not added again
    assert [r["outputs"] for r in again] == [r["outputs"] for r in first] == [r["outputs"] for r in run()[1]]
    assert run("--drafts", "suffix", "--draft-store", str(file), lines=[{"prompt": "The moon"}])[0] == 0
    assert len(texts(file)) > held


def test_an_interrupted_run_keeps_its_texts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("engine.app.batch.Meter.count", interrupted)
    assert run("--drafts", "suffix", "--draft-store", str(tmp_path / "texts"))[0] == 130
    assert len(texts(tmp_path / "texts")) > 0


def test_a_store_that_cannot_be_written_hides_no_interrupt(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    def interrupted(*_: object) -> None:
        (tmp_path / "folder").rename(tmp_path / "elsewhere")
        raise KeyboardInterrupt

    (tmp_path / "folder").mkdir()
    monkeypatch.setattr("engine.app.batch.Meter.count", interrupted)
    flags = ["--threads", "1", "--drafts", "suffix", "--draft-store", str(tmp_path / "folder" / "texts")]
    with warnings.catch_warnings():
        warnings.simplefilter("default")
        assert batch.main(flags, io.BytesIO(json.dumps(LINES[0]).encode()), io.BytesIO()) == 130
    told = capsys.readouterr().err
    assert "warning: the suffix store cannot be written" in told and told.endswith("interrupted\n")


def test_chat(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO()))
    flags = ["--threads", "1", "--drafts", "suffix", "--draft-store", str(tmp_path / "texts")]
    assert chat.main(["-q", *flags, "-p", "What is the opposite of hot?"]) == 0
    assert capsys.readouterr().out == "Cold is the opposite of hot.\n"
    assert len(texts(tmp_path / "texts")) > 0


@pytest.mark.parametrize("drafts", ["off", "ngrams"])
def test_other_drafters_are_refused(tmp_path: Path, drafts: str, capsys: pytest.CaptureFixture[str]):
    assert run("--drafts", drafts, "--draft-store", str(tmp_path / "texts"))[0] == 2
    assert "add --drafts suffix" in capsys.readouterr().err and not (tmp_path / "texts").exists()


def test_a_file_that_cannot_be_read_or_written_is_refused_first(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "texts").write_bytes(b"something else")
    for file, said in ((tmp_path / "texts", "no suffix store"), (tmp_path / "no" / "texts", "no such folder")):
        code, answers = run("--drafts", "suffix", "--draft-store", str(file))
        assert (code, answers) == (2, []) and said in capsys.readouterr().err
    assert (tmp_path / "texts").read_bytes() == b"something else"


def test_a_server_of_several_models_has_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    flags = ["--model", "a", "--model", "b", "--drafts", "suffix", "--draft-store", str(tmp_path / "texts")]
    assert command.main([*flags, "--port", "0"]) == 2
    assert "--draft-store is for one model" in capsys.readouterr().err
