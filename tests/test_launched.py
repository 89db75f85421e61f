"""Triton's own launcher, on a driver that runs nothing (`libcuda.c`) but refuses what a driver refuses."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from kernels import cpp
from tests.marks import needs_compiler, needs_interpreter

ROOT = Path(__file__).parents[1]
MODELS = ("llama/plain", "gpt_oss/plain", "qwen3_5/plain")  # dense; with sinks, windows, experts; recurrent


@pytest.fixture
def launched(tmp_path):
    """Runs `tests.launched` with the driver; returns its output, and the launches."""
    import triton.backends.nvidia as backend

    include = Path(backend.__file__).parent / "include"
    build = [cpp.compiler(), "-x", "c", "-shared", "-fPIC", "-O1", f"-I{include}", "-Wl,-soname,libcuda.so.1"]
    subprocess.run([*build, "-o", tmp_path / "libcuda.so.1", ROOT / "tests/libcuda.c"], check=True)
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path]), "COPPICE_PDL": "on"}
    environment |= {"TRITON_LIBCUDA_PATH": str(tmp_path), "LD_LIBRARY_PATH": str(tmp_path)}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path / "cache"), "LAUNCHES": str(tmp_path / "launches")}

    def run(*words):
        command = [sys.executable, "-m", "tests.launched", *words]
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout.splitlines(), {*(tmp_path / "launches").read_text().splitlines()}

    return run


@pytest.mark.full  # two minutes of the compiler
@needs_compiler
@needs_interpreter
def test_models_are_launched_as_they_were_compiled(launched):
    """Requests need no kernel that was not compiled when the model was loaded, and graphs replay the launches. Kernels
    that may begin early are launched so."""
    lines, launches = launched(*(ROOT / "tests/golden" / model for model in MODELS))
    for line, model in zip(lines, MODELS, strict=True):
        name, replays, later = line.split()
        assert name == model.partition("/")[0] and int(replays) and later == "0", line
    assert {"_attend early", "_activate early", "merge early"} <= launches, launches
    assert not launches & {"_attend", "_activate", "merge"}


@pytest.mark.full  # likewise
@needs_compiler
@needs_interpreter
def test_kernels_of_the_first_stage_are_launched_as_they_were_compiled(launched):
    """The benchmark's stage smoke: all kernels are compiled ahead, and the driver takes each launch."""
    [line], launches = launched("smoke")
    name, ahead, later = line.split()
    assert name == "smoke" and int(ahead) > 80 and later == "0", line
    assert {"_attend early", "_join_shares early", "_mix", "_turn early"} <= launches, launches
