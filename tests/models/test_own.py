"""Another distribution's package `kernels`, before ours on the path or written over it: one error that names both."""

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
    for name in ("engine", "kernels", "models", "search"):
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
