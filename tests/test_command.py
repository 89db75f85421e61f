"""The command `coppice`: the same as `python -m engine.chat` and so on, wherever it is started."""

import ast
import importlib
import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

import coppice
from engine.demo import demo_folder
from engine.version import __version__

ROOT = Path(__file__).parent.parent
SCRIPT = f"#!{sys.executable}\nimport sys\nfrom coppice import main\nif __name__ == '__main__':\n    sys.exit(main())\n"
PLAN = ["plan", str(demo_folder("draft")), "--dtype", "float32"]


@pytest.fixture
def script(tmp_path: Path) -> Path:
    """The script that pip makes of the entry point, in a folder that has modules of our names too."""
    scripts = tmp_path / "bin"
    scripts.mkdir()
    (scripts / "models.py").write_text("raise SystemExit('of the scripts')")
    (scripts / "coppice").write_text(SCRIPT)
    return scripts / "coppice"


@pytest.fixture
def crowded(tmp_path: Path) -> Path:
    """A user's folder with modules of our names."""
    folder = tmp_path / "user"
    for name in ("search", "tools", "kernels"):
        (folder / name).mkdir(parents=True)
        (folder / name / "__init__.py").write_text("raise SystemExit('of the user')")
    for name in ("models", "engine", "coppice"):
        (folder / f"{name}.py").write_text("raise SystemExit('of the user')")
    return folder


def run(script: Path, folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, script, *words]
    return subprocess.run(command, capture_output=True, text=True, cwd=folder, env=environment, input="", timeout=120)


def test_it_runs_where_a_user_has_modules_of_our_names(script: Path, crowded: Path):
    done = run(script, crowded, "chat", "-p", "2+2", "-q", "--dtype", "float32")
    assert (done.returncode, done.stdout, done.stderr) == (0, "2 + 2 = 4.\n", "")
    done = run(script, crowded, *PLAN)
    assert done.returncode == 0 and done.stdout.startswith("draft: float32") and not done.stderr
    done = run(script, crowded, "tree", "--hlep")
    assert done.returncode == 2 and "coppice tree --help lists the options" in done.stderr
    assert "usage: coppice kernels " in run(script, crowded, "kernels", "--help").stdout


def test_it_starts_as_python_m_does(script: Path, tmp_path: Path):
    """Ctrl-C while torch is imported ends it without a traceback, and torch leaves out what only its compiler needs."""
    (tmp_path / "sitecustomize.py").write_text(
        "import atexit, sys\n"
        "def tell():\n"
        "    from engine.load import startup\n"
        "    print(startup.starting, startup.command, 'torch' in sys.modules, startup.METAS in sys.modules)\n"
        "atexit.register(tell)\n"
    )
    environment = os.environ | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    told = []
    for command in ([script, *PLAN], ["-P", "-m", "engine.chat", "--plan", *PLAN[1:]]):
        command = [sys.executable, *command]
        done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment, timeout=120)
        told.append(done.stdout.splitlines()[-1])
    assert told == ["True True True False"] * 2


def test_help_and_version_import_nothing(script: Path, crowded: Path, capsys: pytest.CaptureFixture[str]):
    allowed = {node.names[0].name for node in ast.walk(ast.parse(Path(coppice.__file__).read_text()))
               if isinstance(node, ast.Import)}  # fmt: skip
    assert allowed <= sys.stdlib_module_names
    code = "import sys, coppice; coppice.main(['--help']); coppice.main(['--version']); coppice.main(['plan', '-h'])\n"
    code += "sys.exit(not {'torch', 'engine', 'models'}.isdisjoint(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=120)
    assert done.returncode == 0, done.stderr
    assert f"coppice {__version__}\n" in done.stdout and all(f"\n  {name} " in done.stdout for name in coppice.COMMANDS)
    assert coppice.main([]) == 0 and capsys.readouterr().out in done.stdout


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["srve"], "the nearest: serve; coppice --help lists all"),
        (["xyzzy"], "there is no command 'xyzzy'\ncoppice --help lists all"),
        (["--model"], "there is no command '--model'"),
        (["plan"], "usage: coppice plan MODEL"),
        (["plan", "--dtype", "int8"], "usage: coppice plan MODEL"),
    ],
)
def test_usage(words: list[str], told: str, capsys: pytest.CaptureFixture[str]):
    assert coppice.main(words) == 2
    said = capsys.readouterr()
    assert told in said.err and not said.out


@pytest.mark.parametrize("name", coppice.COMMANDS)
def test_every_command_is_there(name: str):
    module = coppice.COMMANDS[name][0]
    spec = find_spec(module)
    assert spec is not None
    if spec.submodule_search_locations:
        module = f"{module}.__main__"
    assert callable(importlib.import_module(module).main)


@pytest.mark.parametrize(
    ("words", "unbuffered"),
    [
        *((f"coppice {words}", more)
          for words in ("--help", "plan --help", "chat --help all", "batch --search list", "kernels --list")
          for more in ("", "1")),
        ("kernels.build --list", "1"),
        *((f"{module} --help", "") for module in ("kernels.build", "tools.bench", "tools.pack", "tools.wheel")),
    ],
)  # fmt: skip
def test_a_closed_pipe_is_no_error(words: str, unbuffered: str):
    reading, writing = os.pipe()
    os.close(reading)
    environment = os.environ | {"PYTHONUNBUFFERED": unbuffered}
    command = [sys.executable, "-m", *words.split()]
    done = subprocess.run(command, cwd=ROOT, env=environment, stdout=writing, stderr=subprocess.PIPE, timeout=120)
    os.close(writing)
    assert (done.returncode, done.stderr) == (141, b"")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
@pytest.mark.parametrize(
    "words",
    ["engine.batch --help", "coppice --help", "coppice kernels --list", "kernels.build --list", "tools.convert -h"],
)
def test_help_that_a_full_disk_does_not_take(words: str):
    options = {"cwd": ROOT, "env": os.environ | {"PYTHONUNBUFFERED": ""}, "text": True, "timeout": 120}
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-m", *words.split()]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, **options)
    assert (done.returncode, done.stderr) == (2, "error: the output cannot be written: No space left on device\n")


def test_every_command_line_ends_alike():
    """Scripts of the oracle are run by their paths, without our packages; sandbox and worker answer another process."""
    others = re.compile(r"tools/(make_golden\w*|golden_text|bench/worker)\.py|engine/text/sandbox\.py")
    files = [
        path for name in ("engine", "kernels", "models", "search", "tools") for path in (ROOT / name).rglob("*.py")
    ]
    texts = {str(path): path.read_text() for path in files if not others.fullmatch(path.relative_to(ROOT).as_posix())}
    entries = {path: text for path, text in texts.items() if 'if __name__ == "__main__":' in text}
    assert len(entries) > 20
    assert [path for path, text in entries.items() if not text.endswith("ended(main))\n")] == []
