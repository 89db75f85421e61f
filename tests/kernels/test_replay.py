"""The C++ operators as other processors run them: recorded calls, replayed natively or in an emulator.

Each target is built as `python -m kernels.build` builds it (some with less optimization, as compilers take most of the
time), with all warnings, which are errors. A small program then calls the operators (replay/replay.cpp); it needs no
Python, so that an emulator can run it.
"""

import os
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from kernels import cpp, processor
from kernels.processor import TARGETS, Target
from tests.kernels.replay import cases
from tests.kernels.replay.recording import Expected, Recording

WARNINGS = "-Wall", "-Wextra", "-Werror"
ROOT = Path(__file__).parents[2]
CROSS = "aarch64-linux-gnu-g++"
V3 = replace(TARGETS["x86-64-v3"], flags=(*TARGETS["x86-64-v3"].flags, "-O1"))  # `make test-avx2` replays it as it is
BASELINE = Target("baseline", ("-march=x86-64", "-O1"), "x86_64", frozenset(), "plain.h")
EMULATOR = "qemu-aarch64-static", "-L", "/usr/aarch64-linux-gnu"
EMULATED = {  # processors without any instruction that the target may not use
    "aarch64": ("cortex-a72",),
    "aarch64-dotprod": ("cortex-a76", "-O1"),
    "aarch64-i8mm": ("max", "-O1"),
}
pytestmark = pytest.mark.skipif(cpp.compiler() is None, reason="no C++ compiler")


def driver(folder: Path, compiler: str) -> Path:
    """Returns the program that replays."""
    functions = " ".join(f"FUNCTION({name})" for name in cpp.OPERATORS.functions)
    options = ["-std=c++17", "-O1", *WARNINGS, f"-I{ROOT / 'kernels'}", f"-DFUNCTIONS={functions}"]
    made = folder / "replay"
    source = ROOT / "tests" / "kernels" / "replay" / "replay.cpp"
    subprocess.run([compiler, *options, source, "-o", made, "-ldl"], check=True)
    return made


@pytest.fixture(scope="module")
def recording() -> Recording:
    if cpp.why_not():
        pytest.skip(f"the recording's weights are packed by C++: {cpp.why_not()}")
    return cases.record()


def replay(folder: Path, library: Path, recording: Recording, compiler: str, run: Sequence[str] = ()) -> str:
    """Returns what the program prints: failed cases, and a line that counts them."""
    recording.save(folder / "recording")
    command = [*run, driver(folder, compiler), library, folder / "recording"]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "2"})
    return done.stdout + done.stderr


def build(monkeypatch: pytest.MonkeyPatch, folder: Path, target: Target) -> Path:
    """Returns the library for a target, unless the environment names kernels, which are all that is to be tested."""
    if os.environ.get(cpp.VARIABLE):
        pytest.skip(f"{cpp.VARIABLE} is set: other kernels are tested without it")
    monkeypatch.setattr(cpp, "FLAGS", (*cpp.FLAGS, *WARNINGS))
    cpp.build(folder, target.name, target, announce=f"for {target.name}")
    return folder / f"{target.name}.so"


def passes(said: str, recording: Recording) -> bool:
    return said == f"0 of {len(recording.cases)} cases failed\n"


def test_this_machine(tmp_path, recording):
    said = replay(tmp_path, cpp.find().path, recording, cpp.compiler())
    assert passes(said, recording), said


@pytest.mark.full
@pytest.mark.parametrize("target", [V3, BASELINE], ids=lambda target: target.name)
def test_x86_64(monkeypatch, tmp_path, recording, target):
    if reason := target.why_not():
        pytest.skip(f"{target.name}: {reason}")
    if target is V3 and os.environ.get("CI"):
        pytest.skip("CI builds this target for `make test-avx2`, with all warnings, and replays it there")
    said = replay(tmp_path, build(monkeypatch, tmp_path, target), recording, cpp.compiler())
    assert passes(said, recording), said


@pytest.mark.full
@pytest.mark.parametrize("name", EMULATED)
def test_aarch64(monkeypatch, tmp_path, recording, name):
    target, (emulated, *flags) = TARGETS[name], EMULATED[name]
    if processor.machine() == target.machine:
        pytest.skip("this is an aarch64 processor, of which the other tests are")
    for program in (CROSS, EMULATOR[0]):
        if shutil.which(program) is None:
            pytest.skip(f"{program} is not installed (Debian: g++-aarch64-linux-gnu, qemu-user-static)")
    monkeypatch.setenv("CXX", CROSS)
    library = build(monkeypatch, tmp_path, replace(target, flags=(*target.flags, *flags)))
    said = replay(tmp_path, library, recording, CROSS, [*EMULATOR, "-cpu", emulated])
    assert passes(said, recording), said


LIBRARY = """
#include "../operators.h"
void coppice_kv_copy(int64_t, char* k, char* v, const int64_t*, const int64_t*, int64_t row, int64_t, int64_t,
                     int64_t, int64_t) {
    ((float*)k)[row] = 2;
    v[0] = 3;
}
"""


def test_a_fault_is_named(tmp_path):
    """Wrong numbers, bytes that change, and writing in front of a buffer and behind it."""
    (tmp_path / "kernels" / "any").mkdir(parents=True)
    source = tmp_path / "kernels" / "any" / "native.cpp"
    source.write_text(LIBRARY)
    shutil.copy(ROOT / "kernels" / "operators.h", source.parents[1])
    table = tmp_path / "table.cpp"
    table.write_text(cpp.OPERATORS.table())
    library = tmp_path / "library.so"
    subprocess.run([cpp.compiler(), "-fPIC", "-shared", "-o", library, source, table], check=True)
    k, v, slots = torch.zeros(4), torch.zeros(1, dtype=torch.uint8), torch.zeros(1, dtype=torch.int64)
    three = Expected(v, v + 3)

    def add(name: str, k: Expected | torch.Tensor, v: Expected | torch.Tensor, row: int) -> None:
        recording.add(name, "kv_copy", 1, k, v, slots, slots, row, 1, 1, 1, 0)

    recording = Recording()
    after = torch.tensor([0, 2.1, 0, 0], dtype=torch.float64)
    add("right", Expected(k, after, 0.2), three, 1)
    add("wrong", Expected(k, after, 0.01, 0.01), three, 1)
    add("changed", Expected(k, after, 0.2), v, 1)
    add("in front", k, three, -1)
    assert replay(tmp_path, library, recording, cpp.compiler()).splitlines() == [
        "kv_copy: wrong: buffer 0, element 1: expected 2.1, got 2 (allowed: 0.01 + 0.01 of it)",
        "kv_copy: changed: buffer 1, byte 0: expected 0, got 3",
        "kv_copy: in front: buffer 0, bytes in front of it were written",
        "3 of 4 cases failed",
    ]
    add("behind", k, three, 4)
    assert replay(tmp_path, library, recording, cpp.compiler()).endswith("replay: crashed in kv_copy: behind\n")
