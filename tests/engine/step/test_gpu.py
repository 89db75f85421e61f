"""The requirements of a GPU, checked before weights are read; errors say what to do. The GPU is pretended."""

import contextlib
import importlib.util
import os
import shutil
import subprocess
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from engine import Engine, UsageError
from engine.cache.pool import PagePool
from engine.load import compiling
from engine.load.loading import LoadedModel, pick_device
from engine.step.gpu import compile_ahead, usual_passes
from engine.step.graphs import GraphRunner
from kernels import cpp
from search import Trie
from tests.marks import needs_interpreter

ROOT = Path(__file__).parents[3]
GOLDEN = ROOT / "tests/golden"
needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton")


@pytest.fixture
def gpu(monkeypatch):
    """Pretends a GPU of the given capability."""

    def pretend(capability):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Tesla T4")

    return pretend


def set_driver(monkeypatch, build) -> None:
    """Triton's driver, which builds a module when it is first asked for."""
    driver = type("Driver", (), {"active": property(lambda self: build())})()
    monkeypatch.setattr("triton.runtime.driver", driver)


@pytest.mark.parametrize("name", ["auto", "cuda"])
def test_an_old_gpu_is_refused(gpu, name):
    gpu((7, 5))
    with pytest.raises(UsageError, match=r"(?s)Tesla T4 has compute capability 7\.5.*8\.0 \(Ampere\).*--device cpu"):
        pick_device(name)
    with pytest.raises(UsageError, match="too old"):
        Engine.load("no/such/folder", device=name)  # before anything is read
    assert pick_device("cpu") == torch.device("cpu")


class Recorded:
    """Kernels and constants of launches, which happen if they are to."""

    def __init__(self, happen):
        self.happen, self.found = happen, set()

    def __call__(self, kernel, grid):
        def launch(*arguments, **constants):
            self.found.add((kernel.fn.__name__, *sorted(constants.items())))
            if self.happen:
                kernel[grid](*arguments, **constants)

        return launch


@needs_interpreter
@pytest.mark.parametrize("variant", ["llama/gqa", "gemma/two", "lfm2/bias"])
def test_usual_passes_have_the_kernels_of_a_search(variant):
    from kernels.gpu import launching_by

    engine = Engine.load(GOLDEN / variant, dtype="float32", device="cpu", kv_memory=1 << 22)
    pool, options = PagePool(engine.shape, 200, 16), {"impl": "triton", "record": lambda run: run}
    runner = GraphRunner(engine.runner.model, pool, engine.runner.vocab_size, **options)
    runner.asynchronous = True
    ahead = Engine(LoadedModel(runner, engine.shape, engine.model.tokenizer, eos_token_ids=frozenset([2])))
    with launching_by(usual := Recorded(happen=False)):
        compile_ahead(runner)  # nothing: what is interpreted is not compiled
        assert not usual.found
        usual_passes(runner)
    assert runner.pool.free_pages == 200
    with launching_by(needed := Recorded(happen=True)):
        for beams in (1, 4):
            ahead.generate([[5, 7, 9]], Trie(beams=beams), max_new_tokens=3, ignore_eos=True)
    assert needed.found <= usual.found and {"_attend", "_top_sums"} < {name for name, *_ in needed.found}


@needs_triton
def test_kernels_that_wait_are_launched_early_where_that_is_asked_for(monkeypatch):
    from kernels import gpu

    def launched(names):
        kernel = SimpleNamespace(arg_names=names)
        with gpu.launching_by(lambda kernel, grid: lambda *arguments, **options: options):
            return gpu.launch(kernel, 1)(M=16)

    plain = {"M": 16, "enable_fp_fusion": True}
    assert not gpu.early_launches() and launched(["M", "EARLY"]) == plain
    monkeypatch.setattr(gpu, "INTERPRETED", False)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    for asked, version, wanted in (("off", 12_030, False), ("on", 12_030, True), ("on", 12_020, False)):
        monkeypatch.setenv("COPPICE_PDL", asked)
        monkeypatch.setattr(gpu, "driver_version", lambda version=version: version)
        assert gpu.early_launches.__wrapped__() == wanted
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 9))
    assert not gpu.early_launches.__wrapped__()
    monkeypatch.setattr(gpu, "early_launches", lambda: True)
    assert launched(["M", "EARLY"]) == plain | {"EARLY": True, "launch_pdl": True} and launched(["M"]) == plain


@needs_triton
@pytest.mark.skipif(shutil.which("gcc") is None, reason="needs gcc")
def test_the_driver_tells_its_version(tmp_path):
    from kernels.gpu import driver_version

    for code, failed in ((0, False), (3, True)):
        source, library = tmp_path / f"{code}.c", tmp_path / f"{code}.so"
        source.write_text(f"int cuDriverGetVersion(int *version) {{ *version = 12080; return {code}; }}")
        subprocess.run(["gcc", "-shared", "-fPIC", source, "-o", library], check=True)
        with pytest.raises(OSError, match="failed with error 3") if failed else contextlib.nullcontext():
            assert driver_version(str(library)) == 12_080


@needs_triton
def test_a_kernel_that_a_thread_compiles():
    """Triton 3.6 does not pass on what is asked of the thread's result; 3.9 forgets the thread."""
    from concurrent.futures import Future
    from inspect import signature

    from triton import FutureKernel

    from kernels.gpu import ready

    def begun(future):  # since 3.9 a function to call after a failure comes before the future
        return FutureKernel(*[found.append] * (len(signature(FutureKernel).parameters) - 1), future)

    made, future, found = object(), Future(), []
    kernel = begun(future)
    assert ready(kernel) is None
    future.set_result(made)
    assert ready(kernel) is ready(kernel) is made and ready(made) is made and found == [made]
    failed = Future()
    failed.set_exception(RuntimeError("ptxas"))
    with pytest.raises(RuntimeError, match="ptxas"):
        ready(begun(failed))


@needs_triton
def test_a_model_loads_although_nothing_could_be_compiled_ahead(monkeypatch):
    from kernels import gpu

    def fail(runner):
        raise RuntimeError("no room\nfor it")

    monkeypatch.setattr(gpu, "INTERPRETED", SimpleNamespace(value=False))
    monkeypatch.setattr("engine.step.gpu.usual_passes", fail)
    with pytest.warns(UserWarning, match=r"because compiling them ahead failed: RuntimeError: no room$"):
        compile_ahead(SimpleNamespace(impl="triton"))
    assert gpu._launcher is None


@needs_triton
def test_kernels_are_compiled_in_threads_and_told_of(tmp_path):
    """To machine code, for a device that is pretended."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    script = ROOT / "tests/engine/step/compiled_ahead.py"
    first, second = (
        subprocess.run([sys.executable, script], env=environment, capture_output=True, text=True) for _ in range(2)
    )
    assert first.returncode == second.returncode == 0, first.stderr + second.stderr
    assert first.stdout == second.stdout == "_write _write_rows, then nothing\n"
    assert first.stderr.endswith("s\n") and "kernels compiled for this GPU" in first.stderr
    assert len([*tmp_path.glob("*/*.cubin")]) == 2 and not second.stderr


@needs_triton
def test_what_triton_builds_with(gpu, monkeypatch, tmp_path):
    gpu((9, 0))
    set_driver(monkeypatch, lambda: SimpleNamespace(get_current_target=lambda: 0))
    assert pick_device("auto") == pick_device("cuda") == torch.device("cuda")

    def fail():
        raise RuntimeError("Failed to find C compiler. Please specify via CC")

    set_driver(monkeypatch, fail)
    monkeypatch.setattr("sysconfig.get_paths", lambda: {"include": str(tmp_path)})
    with pytest.raises(UsageError, match=r"(?s)there is no .*Python\.h.*install a C compiler.*python3-dev"):
        pick_device("cuda")
    (tmp_path / "Python.h").touch()
    with pytest.raises(UsageError, match=r"(?s)Failed to find C compiler.*name one in CC"):
        pick_device("cuda")


def test_no_triton(gpu, monkeypatch):
    gpu((9, 0))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UsageError, match=r"(?s)needs the package triton.*pip install triton"):
        pick_device("cuda")


@pytest.mark.skipif(cpp.compiler() is None, reason="no C++ compiler")
def test_warnings_of_tf32_are_no_errors(monkeypatch):
    """Under `-W error`, as in these tests, inductor's advice would end the compilation."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "unused")
    assert compiling.prepare()
    warnings.warn(
        "TensorFloat32 tensor cores for float32 matrix multiplication available but not enabled", stacklevel=1
    )
