"""`python -m tools.bench sbon`: both parts on a tiny model, their figures against runs of the engine."""

import itertools
import json

import pytest

from engine import Engine
from search import BoN
from tools.bench.__main__ import main

MODEL, REWARD = "tests/golden/llama/plain", "tests/golden/llama/classifier"
COMMON = [
    "--model",
    MODEL,
    "--reward",
    REWARD,
    "--max-new-tokens",
    "16",
    "--dtype",
    "float32",
    "--seed",
    "4",
    "--temperature",
    "1",
]


@pytest.fixture
def source(tmp_path):
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "ab"}\n{"prompt": "c d"}\n{"prompt": "not asked"}\n')
    return ["--input", str(file), "--prompts", "2"]


def last_line(capsys):
    return json.loads(capsys.readouterr().out.splitlines()[-1])


def test_table(source, capsys):
    assert main(["sbon", "table", *COMMON, *source, "--n", "12", "--tau", "4", "--alpha", "0.75"]) == 0
    rows = last_line(capsys)["rows"]
    *names, last = [row["search"] for row in rows]
    assert names == ["Bo12", "SBoN", "Bo3", "SBoN, the paper's rule"] and last.startswith("BoM, M = ")
    whole, ours, fewer, faithful, _ = rows
    assert faithful["score"] <= ours["score"] and faithful["tokens"] == ours["tokens"]
    assert whole["speedup"] == 1 and whole["score"] == 100 and whole["kept"] == whole["tokens"] == 1
    assert 0 < ours["tokens"] < 1 and ours["score"] <= 100 and fewer["score"] <= 100 and ours["bytes"] <= whole["bytes"]
    engine = Engine.load(MODEL, reward=REWARD, dtype="float32", kv_memory=1 << 22)
    results = engine.generate(["ab", "c d"], BoN(n=12, seed=4), max_new_tokens=16)
    assert whole["reward"] == pytest.approx(sum(r.outputs[0].score for r in results) / 2, abs=1e-5)


def test_memory(source, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    page = tmp_path / "page.md"
    words = ["sbon", "memory", *COMMON, *source, "--started", "20", "--kept", "4", "--seeds", "1", "--save", str(page),
             "--tau", "3", "--schedule", "2:0.6,4:0.5"]  # fmt: skip
    assert main(words) == 0
    told = last_line(capsys)
    rows = told["rows"]
    assert [row["search"] for row in rows] == [
        "Bo4", "SBoN 20 -> 4 at 3", "SBoN 20 at 2:0.6,4:0.5", "SBoN 20 -> 4 when full", "SBoN 20, halved when full",
        "Bo8*", "Bo16*",
    ]  # fmt: skip
    assert rows[0]["gain"] == rows[0]["gain_se"] == 0 and rows[0]["time"] == 1
    rewards = [row["reward"] for row in rows if row["search"].startswith("Bo")]
    assert rewards == sorted(rewards)  # on keyed draws more utterances are never worse
    for name in [row["search"] for row in rows[:5]]:
        assert max(held for held, _ in told["timelines"][name]) <= told["room"]
    assert max(held for held, _ in told["timelines"]["Bo100"]) > told["room"]
    held = [tokens for tokens, _ in told["timelines"]["SBoN 20 -> 4 at 3"]]
    assert min(b - a for a, b in itertools.pairwise(held)) <= -16 * 2  # what the decision freed
    assert "sbon_memory.svg" in page.read_text() and (tmp_path / "sbon_memory.svg").stat().st_size > 1000
