"""`tools.bench drafts`: the figures agree with each other, and llama.cpp's program is read right."""

import argparse
from pathlib import Path

import pytest

from engine import Engine
from engine.demo import demo_folder
from engine.errors import UsageError
from tests.tools.output import last_line
from tools.bench import drafts
from tools.bench.__main__ import main

LOOKUP = """#!/bin/sh
echo "$@" >> {log}
echo "encoded    9 tokens in    0.100 seconds, speed:   90.000 t/s" >&2
echo "decoded   12 tokens in    {seconds} seconds, speed:   24.000 t/s" >&2
"""


def test_the_command(capsys: pytest.CaptureFixture[str], tmp_path: Path):
    shape = ["--kinds", "copying", "--searches", "greedy", "5 beams", "--prompts", "2", "--new-tokens", "12"]
    page = tmp_path / "page.md"
    rest = ["--runs", "1", "--threads", "1", "--store-tokens", "70000", "--save", str(page)]
    assert main(["drafts", *shape, *rest]) == 0
    found = last_line(capsys)
    rows, store = found["results"], found["store"]
    assert [(row["search"], row["drafter"]) for row in rows] == [
        (search, drafter) for search in ("greedy", "5 beams") for drafter in drafts.DRAFTERS
    ]
    assert all(row["same"] for row in rows)
    assert all(row["nodes"] == 0 and row["gain"] == 1 for row in rows if row["drafter"] == "off")
    assert all(row["passes"] <= rows[i // 3 * 3]["passes"] for i, row in enumerate(rows))
    assert store["add_us"] > 0 and 4 * 70_000 <= store["file_bytes"] < 4 * 71_100
    assert len(found["compared"]) == 4 + 3 and "| 5 beams" in page.read_text("utf-8")


def test_drafts_of_a_model(capsys: pytest.CaptureFixture[str]):
    shape = ["--kinds", "copying", "--searches", "greedy", "--prompts", "1", "--new-tokens", "12", "--runs", "1"]
    rest = ["--draft", str(demo_folder("draft")), "--threads", "1", "--store-tokens", "0"]
    assert main(["drafts", *shape, *rest]) == 0
    rows = last_line(capsys)["results"]
    assert [row["drafter"] for row in rows] == [*drafts.DRAFTERS, "model"] and all(row["same"] for row in rows)


def test_lookup_of_llama_cpp(tmp_path: Path):
    program = tmp_path / "lookup"
    program.write_text(LOOKUP.format(log=tmp_path / "log", seconds="0.500"))
    program.chmod(0o700)
    engine = Engine.load(demo_folder(), threads=1)
    asked = drafts.chats(engine, 2)
    args = argparse.Namespace(llama_lookup=program, threads=1, new_tokens=7, runs=1)
    found = drafts.compare_lookup(engine, asked, args, tmp_path / "model.gguf", tmp_path)
    assert found == {"plain": 24.0, "lookup": 24.0, "ratio": 1.0}
    told = (tmp_path / "log").read_text().splitlines()
    assert [line.split()[-1] for line in told] == ["0", "0", "16", "16"] and all("-n 7 " in line for line in told)
    assert (tmp_path / "prompt-0").read_text("utf-8") == engine.tokenizer.decode(asked[0].ids)
    program.write_text("#!/bin/sh\necho no such model >&2; exit 1\n")
    with pytest.raises(UsageError, match="no such model"):
        drafts.compare_lookup(engine, asked, args, tmp_path / "model.gguf", tmp_path)


def test_lookup_needs_a_gguf_file(capsys: pytest.CaptureFixture[str]):
    asked = ["drafts", "--model", str(demo_folder()), "--llama-lookup", "x", "--store-tokens", "0"]
    assert main(asked) == 2
    assert "GGUF" in capsys.readouterr().err
