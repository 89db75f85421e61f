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
        ("--model /no/such.gguf", 3, "the file cannot be read: No such file or directory"),
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


TOOLS = """
import contextlib, importlib, io, re, sys
sys.argv, sys.orig_argv, modules = ["-m"], ["python", "-m", sys.argv[1]], sys.argv[1:]
def code(name, *words):
    sys.argv, said = [name], io.StringIO()
    try:
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            importlib.import_module(name).main([*words])
    except SystemExit as end:
        return end.code, said.getvalue()
import tools  # as `python -m` does, before it sets sys.argv
for name in modules:
    found, text = code(name, "--help")
    assert found == 0 and "usage: " in text, (name, text)
    assert code(name, "--no-such-flag")[0] == 2, name
commands = re.findall(r"^    (\\w+) ", code("tools.bench.__main__", "--help")[1], re.MULTILINE)
for command in commands:
    assert code("tools.bench.__main__", command, "--help")[0] == 0, command
from models.later import Later
def captured(value, place):
    parts = {}
    if isinstance(value, dict):
        parts = value
    elif isinstance(value, (list, tuple)):
        parts = dict(enumerate(value))
    elif isinstance(value, type) and value.__module__.startswith("tools."):
        parts = {name: each for name, each in vars(value).items() if name != "__annotations__"}
    elif hasattr(value, "__defaults__"):
        parts = {"default": value.__defaults__ or value.__kwdefaults__}
    for name, part in parts.items():
        if isinstance(part, Later):
            yield f"{place}.{name}"
        else:
            yield from captured(part, f"{place}.{name}")
for name, module in [*sys.modules.items()]:
    if name.startswith("tools."):
        found = [*captured([each for each in vars(module).values() if not isinstance(each, Later)], name)]
        assert not found, found
print(len(commands))
"""


def test_tools_need_no_torch(tmp_path: Path):
    """Their help and their wrong flags; and nothing but the names of modules waits for its import."""
    (tmp_path / "sitecustomize.py").write_text(BLOCKER)
    environment = os.environ | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    files = [file for file in (ROOT / "tools").rglob("*.py") if "def main(argv" in file.read_text("utf-8")]
    names = [".".join(file.relative_to(ROOT).with_suffix("").parts) for file in files]
    line = [sys.executable, "-c", TOOLS, *names]
    done = subprocess.run(line, capture_output=True, text=True, cwd=ROOT, env=environment, timeout=120)
    assert len(names) >= 16 and done.returncode == 0 and int(done.stdout) >= 12, done.stderr


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


def test_the_fleet_starts_as_a_command(tmp_path: Path):
    line = [sys.executable, "-m", "tools.fleet", "--input", "/no/such", "--output", str(tmp_path / "out")]
    done = subprocess.run(line, capture_output=True, text=True, cwd=ROOT, timeout=120)
    assert done.returncode == 2 and done.stderr.startswith("error: cannot read the input")
