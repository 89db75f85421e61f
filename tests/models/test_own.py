"""Another package in the place of ours, before it on the path or written over it: one error that names both."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
THEIRS = "raise SystemExit('code of another package ran')\n"


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """The packages as an installation has them, side by side, away from the checkout."""
    site = tmp_path_factory.mktemp("site")
    for name in ("engine", "kernels", "models", "search", "tools"):
        shutil.copytree(ROOT / name, site / name, ignore=shutil.ignore_patterns("__pycache__", "demo"))
    return site


def run(tmp_path, path, *words):
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, path))}
    return subprocess.run([sys.executable, *words], cwd=tmp_path, env=environment, capture_output=True, text=True)


@pytest.fixture
def theirs(tmp_path):
    folder = tmp_path / "other" / "kernels"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text(THEIRS)
    return folder / "__init__.py"


@pytest.mark.parametrize("package", ["engine", "models", "search"])
def test_another_kernels_comes_first(tmp_path, installed, theirs, package):
    done = run(tmp_path, [theirs.parents[1], installed], "-c", f"import {package}")
    last = done.stderr[done.stderr.rindex("models.own.ShadowedError: ") :]
    assert done.returncode == 1 and f"another package kernels: {theirs}" in last
    assert f"Coppice needs {installed}/kernels/__init__.py" in last and "an environment of its own" in last


@pytest.mark.parametrize("command", ["chat", "batch"])
def test_a_command_line_says_so_without_a_traceback(tmp_path, installed, theirs, command):
    done = run(tmp_path, [theirs.parents[1], installed], "-m", f"engine.{command}", "--help")
    assert done.returncode == 2 and not done.stdout
    assert done.stderr.startswith("error: Python finds another package kernels: ")
    assert len(done.stderr.splitlines()) == 3


@pytest.mark.parametrize(
    ("name", "form"), [("kernels", "kernels.py"), ("models", "models.py"), ("search", "search/__init__.py")]
)
def test_a_module_of_the_current_folder(tmp_path, installed, name, form):
    (tmp_path / form).parent.mkdir(exist_ok=True)
    (tmp_path / form).write_text(THEIRS)
    done = run(tmp_path, [installed], "-m", "engine.chat", "--version")
    lines = done.stderr.splitlines()
    assert done.returncode == 2 and not done.stdout and len(lines) == 3
    assert lines[0] == f"error: Python finds another package {name}: {tmp_path / form}"
    assert lines[1] == f"Coppice needs {installed}/{name}/__init__.py" and "python -P" in lines[2]


@pytest.mark.parametrize("flags", [["-P"], []])
def test_a_safe_path_ignores_the_current_folder(tmp_path, installed, flags, monkeypatch):
    for name in ("engine", "kernels", "models", "search", "tools"):
        (tmp_path / f"{name}.py").write_text(THEIRS)
    if not flags:
        monkeypatch.setenv("PYTHONSAFEPATH", "1")
    done = run(tmp_path, [installed], *flags, "-m", "engine.chat", "--version")
    assert (done.returncode, done.stderr) == (0, "") and done.stdout.startswith("coppice ")


def test_folders_of_data_and_tools_do_no_harm(tmp_path, installed):
    for name in ("kernels", "models", "search"):
        (tmp_path / name).mkdir()  # no package: ours comes later on the path, and wins
    (tmp_path / "tools.py").write_text(THEIRS)  # the engine needs none
    done = run(tmp_path, [installed], "-m", "engine.chat", "--version")
    assert (done.returncode, done.stderr) == (0, "") and done.stdout.startswith("coppice ")


@pytest.mark.parametrize("name", ["engine", "models"])
def test_the_tools_say_so_too(tmp_path, installed, name):
    (tmp_path / f"{name}.py").write_text(THEIRS)
    done = run(tmp_path, [installed], "-m", "tools.kernels", "--print-template")
    assert done.returncode == 2 and not done.stdout and len(done.stderr.splitlines()) == 3
    assert done.stderr.startswith(f"error: Python finds another package {name}: {tmp_path / name}.py\n")


def test_programs_may_have_a_module_search(tmp_path, installed):
    (tmp_path / "search.py").write_text("mine = 1\n")
    done = run(tmp_path, [installed], "-c", "import engine, search; print(search.mine)")
    assert (done.returncode, done.stdout, done.stderr) == (0, "1\n", "")


def test_another_kernels_is_imported_already(tmp_path, installed, theirs):
    theirs.write_text("")
    code = f"import kernels, sys; sys.path.insert(0, {str(installed)!r}); import engine"
    done = run(tmp_path, [theirs.parents[1]], "-c", code)
    assert f"ShadowedError: Python finds another package kernels: {theirs}" in done.stderr


@pytest.mark.parametrize("spoil", ["overwritten", "a file is gone", "no __init__.py", "gone"])
def test_ours_is_written_over(tmp_path, installed, spoil):
    site = shutil.copytree(installed, tmp_path / "site")
    ours = site / "kernels" / "__init__.py"
    if spoil == "overwritten":
        ours.write_text(THEIRS)
    elif spoil == "a file is gone":
        (site / "kernels" / "layout.py").unlink()
    elif spoil == "no __init__.py":
        ours.unlink()
    else:
        shutil.rmtree(site / "kernels")
    done = run(tmp_path, [site], "-c", "import engine")
    last = done.stderr[done.stderr.rindex("models.own.ShadowedError: ") :]
    assert f"Coppice needs {ours}" in last and "code of another" not in done.stderr
    if spoil in ("overwritten", "a file is gone"):
        assert f"{ours} is not Coppice's" in last


def test_it_is_an_import_error_for_programs():
    from models.own import ShadowedError, check

    assert issubclass(ShadowedError, ImportError)
    check()
