"""Help, lists, the version, wrong flags and wrong paths need no torch, and are there at once."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import engine
import models
from engine.app.cli import described
from tools import search_flags

ROOT = Path(__file__).parent.parent
BLOCKER = """
import sys
class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "numpy", "tokenizers", "jinja2", "huggingface_hub"):
            raise RuntimeError(f"{name} is imported")
sys.meta_path.insert(0, Blocker())
"""
COMMANDS = ("-m engine.chat", "-m engine.batch", "-m engine.serve")
NO_SUCH_FOLDER, NO_SUCH_FLAG = "there is no such folder", "did you mean --model?"


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        ("--help", 0, "--help all shows every flag"),
        ("--help all", 0, "--ults-"),
        ("--search list", 0, "(also: beam)"),
        ("--search ults --help", 0, "--ults-"),
        ("--version", 0, "coppice "),
        ("--model /no/such", 3, NO_SUCH_FOLDER),
        ("--model /no/such.gguf", 3, "cannot be read: No such file or directory"),
        ("--modle x", 2, NO_SUCH_FLAG),
        ("--search tire", 2, "did you mean trie?"),
    ],
)
@pytest.mark.parametrize("command", [*COMMANDS, *(f"coppice.py {name}" for name in ("chat", "batch", "serve"))])
def test_no_torch(command: str, words: str, code: int, said: str, tmp_path: Path):
    (tmp_path / "sitecustomize.py").write_text(BLOCKER)
    environment = os.environ | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}", "COLUMNS": "100"}
    line = [sys.executable, *command.split(), *words.split()]
    done = subprocess.run(line, capture_output=True, text=True, cwd=ROOT, env=environment, input="", timeout=120)
    assert (done.returncode, said in done.stdout + done.stderr, "is imported" in done.stderr) == (code, True, False)


def test_the_blocker_blocks(tmp_path: Path):
    (tmp_path / "sitecustomize.py").write_text(BLOCKER)
    environment = os.environ | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    line = [sys.executable, "-m", "engine.chat", "-p", "2+2"]
    done = subprocess.run(line, capture_output=True, text=True, cwd=ROOT, env=environment, input="", timeout=120)
    assert done.returncode == 1 and "torch is imported" in done.stderr


def test_the_searches_are_described_as_they_are():
    """After a change of a search's parameters: python -m tools.search_flags."""
    assert described.FILE.read_text("utf-8") == search_flags.text()
    assert {name: described.describe(name) for name in described.own()} == described.own()


@pytest.mark.parametrize("package", [engine, models])
def test_packages_have_the_names_that_they_list(package: object):
    for name in package.__all__:  # type: ignore[attr-defined]
        assert getattr(package, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        package.Nothing  # type: ignore[attr-defined]  # noqa: B018
