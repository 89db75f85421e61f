"""docs/write-a-search.md: its code is complete, its commands run, from the chat and from a batch."""

import json
import os
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs/write-a-search.md").read_text(encoding="utf-8")
SEARCH, PYTHON = re.findall(r"^```python\n(.*?)^```", PAGE, re.M | re.S)
COMMANDS = re.findall(r"^```\n(python .*?)^```", PAGE, re.M | re.S)[0].splitlines()
LIMIT = ["--max-new-tokens", "6", "--kv-memory", "4M", "--threads", "1"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "cot_decoding.py").write_text(SEARCH, encoding="utf-8")
    return tmp_path


def run(folder: Path, *argv: str, piped: str = "") -> str:
    """The output of a program that ends without an error."""
    done = subprocess.run(
        [sys.executable, *argv],
        cwd=folder,
        input=piped,
        capture_output=True,
        text=True,
        timeout=600,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_search_is_short():
    assert "`cot_decoding.py`" in PAGE and len(SEARCH.splitlines()) <= 48


def test_the_commands_run(folder: Path):
    chat, help, batch = COMMANDS
    words = shlex.split(chat)
    assert words[:3] == ["python", "-m", "engine.chat"] and "--cot-branches" in words
    assert run(folder, *words[1:], *LIMIT).strip()
    assert "--cot-branches N" in run(folder, *shlex.split(help)[1:])
    echo, pipe = batch.split(" | ")
    [line] = run(folder, *shlex.split(pipe)[1:], *LIMIT, piped=shlex.split(echo)[1] + "\n").splitlines()
    record = json.loads(line)
    assert record["stats"]["branches_tried"] == 2 and len(record["outputs"]) == 1
    assert 0 < record["outputs"][0]["score"] <= 1


def test_the_tools_are_where_the_page_says():
    imports = re.findall(r"\| `(from [\w.]+ import \w+)` \|", PAGE)
    assert len(imports) == 7
    for line in imports:
        exec(line)


def test_python(folder: Path):
    run(folder, "-c", PYTHON + "\nassert len(result.outputs) == 1 and result.stats['branches_tried'] == 4")


def test_its_answers_are_greedy_ones_after_each_first_token(folder: Path, monkeypatch: pytest.MonkeyPatch):
    from engine import Engine
    from engine.demo import demo_folder
    from search import REGISTRY, Greedy

    monkeypatch.syspath_prepend(folder)
    registered = dict(REGISTRY)
    try:
        from cot_decoding import CoTDecoding  # type: ignore[import-not-found]
    finally:
        REGISTRY.clear()
        REGISTRY.update(registered)
        sys.modules.pop("cot_decoding", None)
    engine = Engine.load(demo_folder(), dtype="float32", threads=1, kv_memory=4 << 20)
    prompt = engine.tokenizer.encode("Once upon a time")
    search = CoTDecoding(branches=3, num_return_sequences=3)
    [result] = engine.generate([prompt], search, max_new_tokens=6)
    firsts = [output.token_ids[0] for output in result.outputs]
    assert len({*firsts}) == 3 and sorted(o.score for o in result.outputs)[::-1] == [o.score for o in result.outputs]
    for output in result.outputs:
        [rest] = engine.generate([[*prompt, output.token_ids[0]]], Greedy(), max_new_tokens=5)
        assert output.token_ids[1:] == rest.outputs[0].token_ids or output.finish_reason == "eos"
    best = engine.logits(prompt)[-1].log_softmax(-1).topk(3).indices.tolist()
    assert sorted(firsts) == sorted(best)


def test_the_entry_point_names_the_class():
    [text] = re.findall(r"^```toml\n(.*?)^```", PAGE, re.M | re.S)
    assert tomllib.loads(text)["project"]["entry-points"]["coppice.searches"] == {"cot": "cot_decoding:CoTDecoding"}
