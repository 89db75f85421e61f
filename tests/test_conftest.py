"""Every file that CI runs exists, and a run with other kernels than this processor's own really runs those."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from engine.load.capabilities import pick_precision

ROOT = Path(__file__).parent.parent


def test_kernels_that_cannot_be_loaded_are_not_replaced_by_others(tmp_path):
    command = [sys.executable, "-m", "pytest", "--collect-only", "-p", "no:cacheprovider", "tests/test_traps.py"]
    done = subprocess.run(
        command, cwd=ROOT, env=os.environ | {"COPPICE_KERNELS": str(tmp_path)}, capture_output=True, text=True
    )
    assert done.returncode == 4 and f"ERROR: COPPICE_KERNELS={tmp_path}, but" in done.stderr


@pytest.mark.full
def test_what_only_a_full_run_has_is_left_out_and_counted():
    """The processes of xdist leave it out; the one that started them says so."""
    command = [sys.executable, "-m", "pytest", "-q", "-n", "1", "tests/search/test_dsbd_verify.py", "-k", "notices"]
    done = subprocess.run([*command, "-p", "no:cacheprovider"], cwd=ROOT, capture_output=True, text=True)
    assert "left out: 12 of the tests and three quarters of the random draws" in done.stdout


ILLEGAL = """
import pytest, torch
lost = []
def synchronize():
    if lost:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")
torch.cuda.is_available, torch.cuda.synchronize = lambda: True, synchronize
pytestmark = pytest.mark.gpu
def test_right(): pass
def test_wrong(): assert False
def test_illegal(): lost.append(1); synchronize()
def test_after(): synchronize()
"""


@pytest.mark.full
@pytest.mark.parametrize(("processes", "counts"), [("0", "2 failed, 1 passed"), ("1", "3 failed, 2 passed")])
def test_tests_after_an_illegal_access_have_another_process(processes, counts, tmp_path):
    """The test is reported, and once more as the one in which a process of xdist ended."""
    (tmp_path / "test_illegal.py").write_text(ILLEGAL)
    command = [sys.executable, "-m", "pytest", "-q", "-n", processes, "-m", "gpu", "-p", "tests.conftest"]
    command += ["-p", "no:cacheprovider"]
    own = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_XDIST")}
    environment = own | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([*command, "--rootdir", ".", "-c", "/dev/null", "test_illegal.py"], cwd=tmp_path,
                          env=environment, capture_output=True, text=True)  # fmt: skip
    assert counts in done.stdout, done.stdout + done.stderr
    assert "illegal memory access was encountered" in done.stdout
    at_once, _, summary = done.stdout.partition(" FAILURES ")
    assert " failed: test_illegal.py::test_wrong\nE " in at_once and summary


def header(pretence: str) -> subprocess.CompletedProcess[str]:
    """The output of pytest when it collects, and where it fails."""
    command = [sys.executable, "-m", "pytest", "--collect-only", "-p", "no:cacheprovider", "tests/test_traps.py"]
    environment = os.environ | {"COPPICE_PRETEND": pretence}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)


def test_the_other_choices_are_those_that_this_processor_does_not_make(monkeypatch):
    monkeypatch.delenv("COPPICE_PRETEND", raising=False)
    own = pick_precision(torch.bfloat16, torch.device("cpu"), 0, 1).dtype
    [pretence] = re.findall(r"COPPICE_PRETEND=(.*)", header("other").stdout)
    monkeypatch.setenv("COPPICE_PRETEND", pretence)
    assert {own, pick_precision(torch.bfloat16, torch.device("cpu"), 0, 1).dtype} == {torch.bfloat16, torch.float32}


def test_an_unknown_pretence_is_refused():
    done = header("avx2")
    assert done.returncode == 4 and "COPPICE_PRETEND: expected bf16 or no-bf16, got 'avx2'" in done.stderr


def test_ci_runs_targets_that_help_lists():
    steps = re.findall(r"step make ([\w-]+)", (ROOT / ".ci/run").read_text("utf-8"))
    makefile = (ROOT / "Makefile").read_text("utf-8")
    assert {"test-all", "test-pretend", "test-avx2", "test-portable", "check"} == {*steps}
    assert all(f'@echo "make {step} ' in makefile and f"\n{step}:" in makefile for step in steps)


def test_the_tests_of_a_gpu_are_in_the_files_that_make_names():
    """Marks come from pytest or from `tests.marks`; to collect all other files takes a minute of nine."""
    root = Path(__file__).parents[1]
    pattern = re.search(
        r"grep -rlE --include='test_\*\.py' '(.*?)' tests", (root / "Makefile").read_text(encoding="utf-8")
    )
    assert pattern is not None
    texts = {file: file.read_text(encoding="utf-8") for file in (ROOT / "tests").rglob("test_*.py")}
    named = {file for file, text in texts.items() if re.search(pattern[1], text)}
    marked = {file for file, text in texts.items() if re.search(r"mark\.gpu|\b(on_gpu|TRITON|DEVICES)\b", text)}
    assert marked <= named and ROOT / "tests/kernels/test_tree_attention.py" in marked
