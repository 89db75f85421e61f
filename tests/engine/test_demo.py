"""The bundled demo: whole, in the wheel, the default everywhere, and the same answers from every search."""

import hashlib
import importlib.util
import io
import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from engine import Engine, UsageError
from engine.app import batch, chat
from engine.conversation import Conversation
from engine.demo import BANNER, ROLES, demo_folder, with_defaults
from search import REGISTRY, Greedy, Sample, Trie
from tools.demo import golden
from tools.random_checkpoint import make

ROOT = Path(__file__).parents[2]
FOLDER = demo_folder().parent
GOLDEN = json.loads((ROOT / "tests/golden/demo.json").read_text(encoding="utf-8"))
LIMIT = 8_000_000  # bytes of the three models together


@pytest.fixture(scope="module")
def engine() -> Engine:
    return golden.load("float32")


# --- files ---


def test_checksums_and_size():
    sums = dict(reversed(line.split("  ")) for line in (FOLDER / "SHA256SUMS").read_text().splitlines())  # type: ignore[misc]
    files = [file for role in ROLES for file in (FOLDER / role).iterdir()]
    assert sums == {f.relative_to(FOLDER).as_posix(): hashlib.sha256(f.read_bytes()).hexdigest() for f in files}
    assert sum(file.stat().st_size for file in files) <= LIMIT
    assert len({(FOLDER / role / "tokenizer.json").read_bytes() for role in ROLES}) == 1


def test_there_are_three():
    assert [demo_folder(role).name for role in ROLES] == ["target", "draft", "reward"]
    with pytest.raises(UsageError, match="role: expected one of target, draft, reward, got 'teacher'"):
        demo_folder("teacher")


def test_the_wheel_has_them_and_answers(tmp_path: Path):
    """Built from a copy, as a build leaves files in its folder; unpacked, it answers from another directory."""
    for name in ("engine", "kernels", "models", "search", "tools"):
        shutil.copytree(ROOT / name, tmp_path / "source" / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path / "source" / name)
    here = [] if importlib.util.find_spec("setuptools") is None else ["--no-build-isolation"]
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--disable-pip-version-check", "--no-deps", *here]
    built = subprocess.run([*pip, "-w", str(tmp_path), str(tmp_path / "source")], capture_output=True, text=True)
    if built.returncode and not here:
        pytest.skip(f"neither setuptools here nor a network to get it from: {built.stderr[-200:]}")
    assert built.returncode == 0, built.stderr
    [wheel] = tmp_path.glob("*.whl")
    zipfile.ZipFile(wheel).extractall(tmp_path / "installed")
    bundled = {file.relative_to(ROOT) for file in FOLDER.rglob("*") if file.is_file()}
    assert not [file for file in bundled if not (tmp_path / "installed" / file).is_file()]
    away = tmp_path / "elsewhere"
    away.mkdir()
    told = subprocess.run(
        [sys.executable, "-m", "engine.chat", "--dtype", "float32", "-q", "-p", "-"],
        input="What is the opposite of hot?", cwd=away, capture_output=True, text=True,
        env={**os.environ, "PYTHONPATH": str(tmp_path / "installed")},
    )  # fmt: skip
    assert (told.returncode, "cold" in told.stdout.lower()) == (0, True), told.stderr


# --- default everywhere ---


def test_what_is_the_default_for_what(tmp_path: Path):
    own = tuple(demo_folder(role) for role in ROLES)
    assert with_defaults(None, None, None) == own
    assert with_defaults(str(own[0]), None, None)[1:] == own[1:]
    assert with_defaults(None, "mine", None) == (own[0], "mine", own[2])
    assert with_defaults(tmp_path, None, "judge") == (tmp_path, None, "judge")


def test_one_reply_without_a_model(monkeypatch, capsys):
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"What is the opposite of hot?")))
    assert chat.main(["--search", "trie", "--dtype", "float32"]) == 0
    assert "cold" in capsys.readouterr().out.lower()


def test_a_batch_without_a_model():
    lines = [
        {"messages": [{"role": "user", "content": "What day comes after Monday?"}]},
        {"prompt": "Once upon a time"},
    ]
    lines[0]["params"] = {"search": "sbon", "sbon_n": 3}
    out = io.BytesIO()
    asked = io.BytesIO("\n".join(map(json.dumps, lines)).encode())
    assert batch.main(["-q", "--dtype", "float32", "--max-new-tokens", "30"], asked, out) == 0
    answers = [json.loads(line)["outputs"][0]["text"] for line in out.getvalue().splitlines()]
    assert len(answers) == 2 and "Tuesday" in answers[0] and "there was a" in answers[1]


def test_the_banner_says_what_it_is(engine: Engine, tmp_path: Path):
    settings = chat.Settings("greedy", {}, 256, False, ())
    told = chat.banner(engine, settings, demo_folder())
    assert BANNER in told and "toy" in told and "--model DIR" in told and " · demo: 2.66M parameters" in told
    make(tmp_path, layers=1, width=32, mlp=48, heads=2, vocab=260, max_positions=64)
    assert BANNER not in chat.banner(Engine.load(tmp_path, kv_memory=1 << 20), settings, tmp_path)


@pytest.mark.parametrize("name", [name for name, kind in REGISTRY.items() if kind().models])
def test_another_model_needs_its_own_companions(name: str, tmp_path: Path, monkeypatch, capsys):
    make(tmp_path, layers=1, width=32, mlp=48, heads=2, vocab=260, max_positions=64)
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"Hello")))
    assert chat.main(["--model", str(tmp_path), "--search", name]) == 2
    role = REGISTRY[name]().models[0]
    kind = {"draft": "a smaller one of the same tokenizer", "reward": "one with a scalar head"}[role]
    assert f"needs a {role} model\ngive --{role} DIR, {kind}" in capsys.readouterr().err


# --- answers ---


@pytest.mark.parametrize("search", [Greedy(), Trie(beams=4), Sample(temperature=0.5, seed=3)])
@pytest.mark.parametrize(
    ("told", "asked", "answer"),
    [
        ("My name is Anna.", "What is my name?", "Anna"),
        ("Hello, I am Peter and I live in Oslo.", "Where do I live?", "Oslo"),
        ("My favourite colour is green.", "Which colour do I like?", "green"),
    ],
)
def test_the_second_turn_knows_the_first(engine: Engine, search, told: str, asked: str, answer: str):
    conversation = Conversation(engine)
    for text in (told, asked):
        for _ in conversation.stream(text, search, max_new_tokens=60):
            pass
    assert re.search(rf"\b{answer}\b", conversation.turns[1].reply), conversation.turns
    assert conversation.turns[1].finish_reason == "eos"
    conversation.session.close()


def test_every_search_has_golden_answers():
    assert {*GOLDEN} == {*REGISTRY}, "python -m tools.demo.golden makes them"


@pytest.mark.parametrize("name", sorted(GOLDEN))
def test_golden_answers(engine: Engine, name: str):
    for case in GOLDEN[name]:
        for _ in range(2):  # same seed, same bytes
            result = golden.answer(engine, name, case["params"], case["texts"])
            assert golden.tokens(result) == [output["token_ids"] for output in case["outputs"]], case["texts"]
            for output, wanted in zip(result.outputs, case["outputs"], strict=True):
                assert (output.text, output.finish_reason) == (wanted["text"], wanted["end"])
                assert output.logprob == pytest.approx(wanted["logprob"], abs=1e-3)
                assert output.score == pytest.approx(wanted["score"], abs=1e-3)
