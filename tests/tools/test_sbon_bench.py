"""`python -m tools.bench sbon`: on a tiny model, its figures against runs of the engine."""

import pytest

from engine import Engine
from search import BoN
from tests.tools.output import last_line
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
