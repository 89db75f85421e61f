"""The dtype of a model and its reason, where people look; the same on processors with and without fast products."""

import io
import os
import resource
import subprocess
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from engine import Engine, UsageError
from engine.app import batch, chat
from engine.demo import demo_folder
from engine.load import capabilities, fastest, loading
from engine.load.capabilities import Capabilities, Precision, explicit_precision, pick_precision
from engine.load.pools import free_memory, total_memory
from models.formats import floats
from models.formats.int8 import Int8Linear

ROOT = Path(__file__).parents[3]
CPU, CUDA = torch.device("cpu"), torch.device("cuda")
GIB = 1 << 30


@pytest.fixture(autouse=True)
def nothing_is_pretended(monkeypatch) -> None:
    """These tests are about the processor, real or replaced."""
    monkeypatch.delenv(fastest.PRETEND, raising=False)


@pytest.fixture(params=[True, False], ids=["fast", "slow"])
def fast(request, monkeypatch) -> bool:
    """Whether the processor has products of half precision."""
    set_products(monkeypatch, request.param)
    return request.param


def set_products(monkeypatch, fast: bool) -> None:
    def has_products(dtype: torch.dtype, _device: torch.device) -> bool:
        return fast or dtype in (torch.float32, torch.float64)

    for module in (capabilities, fastest, loading):
        monkeypatch.setattr(module, "has_products", has_products)
    for module in (capabilities, fastest, floats):
        monkeypatch.setattr(module, "has_kernels", lambda *_: False)


@pytest.mark.parametrize("own", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("device", [CPU, CUDA])
def test_auto_never_picks_a_slow_dtype(own, device, fast):
    picked = pick_precision(own, device, GIB, 8 * GIB)
    assert (picked.dtype, picked.slow) == (own if fast else torch.float32, False)
    kind = "processor" if device == CPU else "GPU"
    name = str(own).removeprefix("torch.")
    assert picked.reason == ("" if fast else f"the checkpoint is {name}; this {kind} has no {name} products")


@pytest.mark.parametrize("own", [torch.bfloat16, torch.float16])
def test_with_kernels_half_precision_is_kept_and_computed_in_float32(own, fast, monkeypatch):
    monkeypatch.setattr(capabilities, "has_kernels", lambda _, device: device == CPU)
    picked, name = pick_precision(own, CPU, 7 * GIB, 8 * GIB), str(own).removeprefix("torch.")
    assert (picked.dtype, picked.slow) == (own if fast else torch.float32, False)
    assert picked.reason == (
        "" if fast else f"this processor has no {name} products; the {name} weights stay as they are"
    )
    assert explicit_precision(own, CPU) == Precision(own)


def test_float32_that_does_not_fit_is_not_picked(fast):
    picked = pick_precision(torch.bfloat16, CPU, 7 * GIB, 8 * GIB)
    assert (picked.dtype, picked.slow) == (torch.bfloat16, not fast)
    assert ("float32 weights would take 7.0 of 8.0 GiB of memory" in str(picked)) == (not fast)


def test_float32_and_float64_need_no_products(fast):
    assert str(pick_precision(torch.float32, CPU, GIB, 8 * GIB)) == "float32"
    assert str(pick_precision(torch.float64, CPU, GIB, 8 * GIB)) == "float32 (the checkpoint is float64)"
    assert str(explicit_precision(torch.float64, CPU)) == "float64"


def test_a_slow_dtype_that_was_asked_for_is_a_warning(fast):
    precision = explicit_precision(torch.bfloat16, CPU)
    told = Capabilities.of(None, precision, "none", CPU, "cpp")
    assert precision.dtype == torch.bfloat16 and bool(told.warning) == precision.slow == (not fast)
    assert "float32 is several times as fast" in told.warning or fast


def test_the_engine_says_what_it_computes_in(fast):
    engine = Engine.load(demo_folder(), threads=1, kv_memory=1 << 20)
    name = "bfloat16" if fast else "float32"
    assert engine.pool.cache.k_LGSD.dtype == getattr(torch, name)
    assert engine.capabilities.precision.startswith(name) and not engine.capabilities.warning
    told = chat.banner(engine, chat.Settings("greedy", {}, 256, False, ()), demo_folder())
    assert engine.capabilities.precision in told and engine.capabilities.paths in told


def test_the_command_lines_say_it(fast, monkeypatch, capsys, tmp_path):
    chosen = "bfloat16" if fast else "float32 (the checkpoint is bfloat16; this processor has no bfloat16 products)"
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"What is the opposite of hot?")))
    assert chat.main(["--threads", "1", "--stats", "--max-new-tokens", "2"]) == 0
    told = capsys.readouterr().err
    assert f"numbers  {chosen}\nmachine  " in told and "slow" not in told

    lines = tmp_path / "in"
    lines.write_text('{"prompt": "Once"}\n')
    files = ["--input", str(lines), "--max-new-tokens", "2", "--threads", "1"]
    assert batch.main(["-v", *files, "--output", str(tmp_path / "out")]) == 0
    assert f"\n{chosen}\n" in capsys.readouterr().err
    for i, quiet in enumerate((["-q"], [])):
        arguments = [*quiet, *files, "--dtype", "bfloat16", "--output", str(tmp_path / f"out{i}")]
        assert batch.main(arguments) == 0
        told = capsys.readouterr().err
        assert told == "" if quiet or fast else told.count("bfloat16 is slow") == 1


def test_advice_on_int8_does_not_lead_into_the_trap(fast, monkeypatch):
    monkeypatch.setattr(Int8Linear, "why_not", lambda _: "no int8 here")
    with pytest.raises(UsageError) as caught:
        loading.check_quant("int8", CPU)
    assert ("--dtype bfloat16" in str(caught.value)) == fast and ("--dtype float32" in str(caught.value)) != fast


@pytest.mark.parametrize(
    ("packs", "instructions", "level", "expected"),
    [
        (True, True, "", True),
        (True, True, "AVX512_CORE_AMX", True),
        (True, True, "avx512_core_vnni", False),  # oneDNN is held to what converts
        (True, False, "", False),  # AVX-512 alone
        (False, False, "", False),
    ],
)
def test_products_of_bfloat16_are_not_those_that_convert(monkeypatch, packs, instructions, level, expected):
    if not torch.backends.mkldnn.is_available():
        pytest.skip("this torch is built without oneDNN")
    monkeypatch.setattr(floats, "has_kernels", lambda *_: False)
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: packs)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: instructions)
    monkeypatch.setattr(floats.platform, "machine", lambda: "x86_64")
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", level)
    assert floats.has_products(torch.bfloat16, CPU) == expected


@pytest.mark.skipif(floats.platform.machine() != "x86_64", reason="oneDNN's levels are those of x86-64")
def test_a_processor_held_to_avx2_computes_in_float32():
    code = (
        "from engine import Engine; from engine.demo import demo_folder\n"
        "print(Engine.load(demo_folder(), kv_memory=1 << 20).capabilities.precision)"
    )
    environment = {**os.environ, "ONEDNN_MAX_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "avx2", "COPPICE_KERNELS": "off"}
    told = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert told.stdout.startswith("float32 (the checkpoint is bfloat16"), told.stderr


def test_paths_follow_the_model(monkeypatch):
    precision = explicit_precision(torch.float32, CPU)
    monkeypatch.setattr(capabilities.cpp, "why_not", lambda: "no C++ compiler was found")
    told = Capabilities.of(None, precision, "int8", CPU, "cpu")
    assert told.precision == "float32, int8 weights"
    assert "C++ kernels (no C++ compiler was found)" in told.paths.partition("not here: ")[2]
    monkeypatch.setattr(capabilities.cpp, "why_not", lambda: None)
    assert "C++ kernels" in Capabilities.of(None, precision, "none", CPU, "cpp").paths.partition("; not here")[0]
    assert "CUDA graphs" in Capabilities.of(None, precision, "none", CUDA, "triton").paths
    assert "CUDA graphs" not in Capabilities.of(None, precision, "none", CUDA, "triton", graphs=False).paths


@pytest.mark.parametrize("device", [CPU, CUDA], ids=str)
@pytest.mark.parametrize("missing", ["", "int4", "int8 int4"])
def test_the_banner_names_a_format_once(device, missing, monkeypatch):
    reasons = {name: "no" if name.partition("-")[0] in missing else None for name in capabilities.FORMATS}
    formats = {name: SimpleNamespace(why_not=lambda _, reason=reason: reason) for name, reason in reasons.items()}
    monkeypatch.setattr(capabilities, "FORMATS", formats)
    told = Capabilities.of(None, Precision(torch.float32), "none", device, "cpp").paths
    here, _, absent = told.partition("; not here: ")
    assert told.count("int8") == told.count("int4") == 1
    expected = {
        "": ("int8 and int4 weights", False),
        "int4": ("int8 weights", "int4 weights"),
        "int8 int4": (False, "int8 and int4 weights"),
    }[missing]
    assert tuple("int" in paths and paths.rpartition(", ")[2] for paths in (here, absent)) == expected


def test_free_memory_is_what_the_process_can_take(tmp_path, monkeypatch):
    """Copies of files fill most of a small machine's memory, and a container has less than its machine."""
    free, mib = tmp_path / "proc/meminfo", 1 << 20
    free.parent.mkdir()
    free.write_text("MemTotal:  1900000 kB\nMemFree:  60000 kB\nMemAvailable:  1500000 kB\n")
    assert free_memory(tmp_path) == 1500000 * 1024
    monkeypatch.setattr("engine.load.pools.memory_of_process", lambda: (900 * mib, 150 * mib))
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1700 * mib, resource.RLIM_INFINITY))
    assert free_memory(tmp_path) == 800 * mib
    (tmp_path / "proc/self").mkdir()
    maps = tmp_path / "proc/self/maps"
    maps.write_text(
        "00400000-00500000 r--p 00000000 00:00 0 [heap]\n"
        "7f0000000000-7f0030000000 r--p 00000000 fe:01 77   /data/a model.gguf\n"
        "7f0040000000-7f0080000000 r-xp 00000000 fe:01 78   /usr/lib/libc.so.6\n"
    )
    assert free_memory(tmp_path) == 1500000 * 1024 - 768 * mib  # matrices, which are copies of a file too
    maps.write_text(maps.read_text().replace("7f0030000000", "7f0130000000"))  # more than the machine's memory
    assert free_memory(tmp_path) == 1500000 * 1024 // 4
    maps.unlink()
    (tmp_path / "proc/self/cgroup").write_text("0::/\n")
    (tmp_path / "sys/fs/cgroup").mkdir(parents=True)
    for limit, left in (512 * mib, 362 * mib), (100 * mib, 0):
        (tmp_path / "sys/fs/cgroup/memory.max").write_text(str(limit))
        assert free_memory(tmp_path) == left


def test_memory_is_known_without_linux(tmp_path, monkeypatch):
    """macOS has no SC_AVPHYS_PAGES, other systems neither of them."""
    real, whole, free = os.sysconf, total_memory(), partial(free_memory, tmp_path)
    assert 0 < free_memory() <= whole

    def macos(name: str) -> int:
        if name == "SC_AVPHYS_PAGES":
            raise ValueError("unrecognized configuration name")
        return real(name)

    monkeypatch.setattr(os, "sysconf", macos)
    assert (total_memory(), free()) == (whole, whole // 2)
    assert Engine.load(demo_folder(), threads=1).pool.pages > 0
    monkeypatch.setattr(os, "sysconf", lambda _: -1)
    assert (total_memory(), free()) == (8 * GIB, 4 * GIB)
    monkeypatch.delattr(os, "sysconf")
    assert (total_memory(), free()) == (8 * GIB, 4 * GIB)
