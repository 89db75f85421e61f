"""The benchmark of drafts on tiny shapes: every method runs, recites what was recorded, and equals the plain one."""

import json

from tools.bench.__main__ import main
from tools.bench.aded import break_even
from tools.random_checkpoint import make


def test_all_methods_write_the_same(tmp_path, capsys):
    for name, width, vocab in (("writer", 32, 300), ("reader", 64, 320)):
        make(tmp_path / name, layers=1, width=width, mlp=64, heads=2, vocab=vocab)
    short = ["--corpus-tokens", "600", "--prompts", "1", "--new-tokens", "10", "--runs", "1", "--iterations", "5", "9"]
    short += ["--noise-seconds", "0.01"]
    page = tmp_path / "page.md"
    assert main(["aded", "--model", str(tmp_path / "writer"), *short, "--sizes", "1x64", "--save", str(page)]) == 0
    own = json.loads(capsys.readouterr().out.splitlines()[-1])
    reader = ["--model", str(tmp_path / "reader"), "--recorded", str(tmp_path / "writer")]
    assert main(["aded", *reader, *short, "--save", str(page)]) == 0
    recited = json.loads(capsys.readouterr().out.splitlines()[-1])
    for found in (own, recited):
        rows = {(row["method"], row["text"]): row for row in found["results"]}
        assert {("mcts, 5 iterations", "own"), ("mcts, 9 iterations", "own"), ("backoff, auto", "noise")} <= set(rows)
        for (method, _), row in rows.items():
            assert row["same"] and row["accept_length"] >= 1 and row["tokens_per_second"]["min"] > 0
            assert method != "autoregressive" or row["accept_length"] == row["ratio"] == 1
        assert rows["backoff, 24", "own"]["nodes"] > 0
    assert [row["method"] for row in own["sizes"]] == ["autoregressive", "backoff, auto"]
    text = page.read_text()
    assert text.count("| greedy chain ") == 2 and "<!-- bench:aded-writer -->" in text and "bench:aded-reader" in text
    assert "Recited by models of these sizes: x of 1.1: from" in text


def test_where_drafts_begin_to_pay():
    auto, plain = "backoff, auto", "autoregressive"
    rows = [(auto, 30e6, 1.8), (plain, 1e6, 1), (auto, 8e6, 1.2), (auto, 1e6, 1.0)]
    sizes = [{"method": method, "parameters": count, "ratio": x} for method, count, x in rows]
    told = break_even(sizes)
    assert "x of 1.1: from 8.0M parameters on" in told and "x of 1.5: from 30.0M parameters on" in told
    assert "none of these" in break_even(sizes[1:])
