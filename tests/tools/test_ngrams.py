"""Counting texts from the command line."""

import io
from pathlib import Path

import pytest

from engine.text.tokenizer import Tokenizer
from search.aded.ngrams import count, merge, open_store
from tools import ngrams

MODEL = Path(__file__).parent.parent / "golden/llama/plain"
LINES = ["the cat sat on the mat\n", "the cat sat on the hat\n", "a cat and the other cat\n"] * 30


def run(*words):
    return ngrams.main(["--model", str(MODEL), *map(str, words)])


def entries(path):
    store = open_store(path)
    return store.keys.tolist(), store.counts.tolist()


def test_counts_of_a_text_are_the_tokenizers(tmp_path, capsys):
    text, out = tmp_path / "t", tmp_path / "s"
    text.write_text("".join(LINES))
    assert run("--input", text, "--output", out) == 0
    tokenizer = Tokenizer.load(MODEL)
    [(keys, counts)] = merge([count(tokenizer.encode("".join(LINES), add_special=False))])
    assert entries(out) == (keys.tolist(), counts.tolist())
    open_store(out).check(tokenizer.size, tokenizer.fingerprint)
    told = capsys.readouterr()
    assert "tokens" in told.err and "\x1b" not in told.err and not told.out
    assert run("--input", text, "--output", out, "-q") == 0 and not capsys.readouterr().err


def test_portions_and_files_on_the_way_change_nothing(tmp_path, monkeypatch):
    parts = []
    for i in range(3):
        parts.append(tmp_path / f"t{i}")
        parts[-1].write_text("".join(LINES[i * 30 : i * 30 + 30]))
    assert run("--input", *parts, "--output", tmp_path / "one") == 0
    monkeypatch.setattr(ngrams, "HELD", 20)  # everything goes to files
    assert run("--input", *parts, "--output", tmp_path / "two") == 0
    assert entries(tmp_path / "one") == entries(tmp_path / "two")
    assert {path.name for path in tmp_path.iterdir()} == {"t0", "t1", "t2", "one", "two"}
    run("--input", parts[0], "--output", tmp_path / "s")
    assert run("--input", tmp_path / "s", *parts[1:], "--output", tmp_path / "three") == 0  # a store is added
    assert entries(tmp_path / "one") == entries(tmp_path / "three")


def test_pieces_end_with_lines(tmp_path, monkeypatch):
    (tmp_path / "t").write_text("".join(LINES) + "x" * 500)
    monkeypatch.setattr(ngrams, "PIECE", 64)
    pieces = list(ngrams.pieces(str(tmp_path / "t")))
    assert "".join(pieces) == (tmp_path / "t").read_text() and max(map(len, pieces)) <= 128
    assert all(piece.endswith("\n") for piece in pieces[:20])


def test_stdin(tmp_path, monkeypatch):
    (tmp_path / "t").write_text("".join(LINES))
    with open(tmp_path / "t", "rb") as file:
        monkeypatch.setattr(ngrams, "open", lambda *args, **kw: io.TextIOWrapper(file, "utf-8"), raising=False)
        assert "".join(ngrams.pieces("-")) == "".join(LINES)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--input", "absent", "--output", "s"], "No such file"),
        (["--input", "latin", "--output", "s"], "not valid UTF-8"),
        (["--input", "t", "--output", "no/s"], "there is no such folder"),
        (["--input", "t", "--output", "."], "this is a folder"),
        (["--input", "t", "--output", "s", "--successors", "3"], "expected 0 or an integer >= 4"),
        (["--input", "foreign", "--output", "s"], "another model's tokenizer"),
        (["--input", "torn", "--output", "s"], "damaged"),
        (["--input", "empty", "--output", "s"], "no text has that many"),
    ],
    ids=str,
)
def test_errors(tmp_path, monkeypatch, capsys, words, told):
    model = MODEL.resolve()
    monkeypatch.chdir(tmp_path)
    Path("t").write_text("abc" * 10)
    Path("empty").touch()
    Path("latin").write_bytes(b"caf\xe9 " * 10)
    ngrams.write_store("foreign", [count([1, 2, 3])], 10, "ab" * 32)
    Path("torn").write_bytes(Path("foreign").read_bytes()[:-2])
    try:
        code = ngrams.main(["--model", str(model), *words])
    except SystemExit as end:  # of argparse
        code = end.code
    assert code == 2
    assert told in capsys.readouterr().err
    assert not Path("s").exists()
