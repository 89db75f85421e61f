"""--compile on: the same results, code kept on disk, a warning where there is no compiler."""

import os
import shutil
import subprocess
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from engine import Engine
from engine.cache.pool import PagePool
from engine.load.loading import LoadedModel
from engine.step import compiling
from engine.step.graphs import GraphRunner
from kernels import cpp, rows
from models.sharding import Shard
from search import Greedy, Sample, Trie

ROOT = Path(__file__).parents[3]
GOLDEN = ROOT / "tests/golden"
MODEL = GOLDEN / "llama/gqa"
SCRIPT = """
import sys
from engine import Engine
from search import Trie
eager, compiled = (Engine.load(sys.argv[1], dtype="float32", compile=c, kv_memory=1 << 22) for c in ("off", "on"))
for prompt, beams, new in (([5], 1, 4), (list(range(3, 40)), 3, 40)):
    [[a], [b]] = [e.generate([prompt], Trie(beams=beams), max_new_tokens=new, ignore_eos=True)
                  for e in (eager, compiled)]
    assert a.outputs[0].token_ids == b.outputs[0].token_ids
    assert abs(a.outputs[0].logprob - b.outputs[0].logprob) < 1e-3
import torch
print("graphs", torch._dynamo.utils.counters["stats"]["unique_graphs"])
"""


@pytest.mark.full
@pytest.mark.skipif(cpp.compiler() is None, reason="no C++ compiler")
def test_one_graph_for_all_sizes_with_the_results_of_eager(tmp_path):
    environment = os.environ | {"XDG_CACHE_HOME": str(tmp_path), "PYTHONPATH": str(ROOT)}
    environment.pop("TORCHINDUCTOR_CACHE_DIR", None)
    if (built := cpp.cache_folder() / "kernels").is_dir():  # spares another build
        shutil.copytree(built, tmp_path / "coppice" / "kernels")
    done = subprocess.run([sys.executable, "-c", SCRIPT, str(MODEL)], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[-2:] == ["graphs", "1"]
    assert any((tmp_path / "coppice" / "compiled").iterdir())


@pytest.fixture
def fresh(monkeypatch):
    """No library loaded yet, before and after, and the choice of kernels left to the cache folder."""
    monkeypatch.delenv("COPPICE_KERNELS", raising=False)
    cpp._load.cache_clear()
    cpp.function.cache_clear()
    yield
    cpp._load.cache_clear()
    cpp.function.cache_clear()


def test_without_a_compiler_it_warns_and_runs(monkeypatch, fresh, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(cpp.shutil, "which", lambda name: None)
    with pytest.warns(UserWarning) as warned:
        engine = Engine.load(MODEL, dtype="float32", compile="on", kv_memory=1 << 22)
    assert [str(w.message) for w in warned] == [
        "no C++ compiler was found: --compile on has no effect",
        "the kernels in PyTorch run, slower than those in C++: no C++ compiler was found",
    ]
    assert engine.runner.token_buckets is None and engine.runner.impl == "torch"
    assert engine.generate([[5, 6]], Trie(beams=2), max_new_tokens=2)


def test_without_kernels_it_warns_and_runs(monkeypatch, fresh, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    broken = tmp_path / "c++"
    broken.write_text("#!/bin/sh\necho 'fatal error: out of luck' >&2\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setenv("CXX", str(broken))
    with pytest.warns(UserWarning, match="the kernels in PyTorch run.*out of luck"):
        assert Engine.load(MODEL, dtype="float32", kv_memory=1 << 22).runner.impl == "torch"


def test_kernels_switched_off_are_no_reason_to_warn(monkeypatch, fresh):
    monkeypatch.setenv("COPPICE_KERNELS", "off")
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        assert Engine.load(MODEL, dtype="float32", kv_memory=1 << 22).runner.impl == "torch"
    assert not warned and cpp.why_not() == "COPPICE_KERNELS=off"


@pytest.mark.skipif(cpp.compiler() is None, reason="no C++ compiler")
def test_code_is_not_compiled_into_a_folder_that_others_may_write(monkeypatch, tmp_path):
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = tmp_path / "coppice" / "compiled"
    folder.mkdir(parents=True)
    folder.chmod(0o777)
    with pytest.warns(UserWarning, match=f"--compile on has no effect: other users may write to {folder}"):
        assert not compiling.compile_model(torch.nn.Module())
    assert "TORCHINDUCTOR_CACHE_DIR" not in os.environ


def test_a_compiler_that_fails_is_warned_of_and_left_out():
    layer = torch.nn.Linear(2, 2)
    model = torch.nn.Module()
    model.layers = torch.nn.ModuleList([layer])
    layer._compiled_call_impl = lambda x: pytest.fail("still compiled")
    model.stack = SimpleNamespace(idle=True)

    def fail():
        raise torch._dynamo.exc.BackendCompilerFailed(lambda: None, RuntimeError("exit 1"), None)

    with pytest.warns(UserWarning, match="--compile on has no effect"):
        compiling.warm_up(model, fail)
    assert layer(torch.ones(2)).shape == (2,) and not model.stack.idle


@pytest.fixture
def counted(monkeypatch):
    """Compilations so far, by a compiler that leaves what it gets as it is."""
    real = torch.compile
    monkeypatch.setattr(torch, "compile", lambda run, **options: real(run, backend="eager", **options))
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    rows.compiled.cache_clear()
    yield lambda: torch._dynamo.utils.counters["stats"]["unique_graphs"]
    rows.compiled.cache_clear()


@pytest.mark.parametrize(
    ("model", "operators"),
    [
        ("llama/gqa", 3),  # norm, rotary, gated activation
        pytest.param("qwen3/defaults", 4, marks=pytest.mark.full),  # norms of heads have other dimensions
        pytest.param("opt/plain", 2, marks=pytest.mark.full),
    ],
)
def test_on_a_gpu_operators_on_rows_are_compiled_once(model, operators, counted):
    """Whatever passes come, as the runner of a GPU makes them: prompts, graphs of all buckets, several trees."""
    plain = Engine.load(GOLDEN / model, dtype="float32", device="cpu", kv_memory=1 << 22)
    assert compiling.compile_model(plain.runner.model, torch.device("cuda"))
    pool, options = PagePool(plain.shape, 400, 16), {"rows": "compiled", "token_buckets": compiling.LEAST_SIZES}
    source = plain.runner
    runner = GraphRunner(source.model, pool, source.vocab_size, impl="reference", record=lambda run: run, **options)
    compiled = Engine(LoadedModel(runner, plain.shape, eos_token_ids=plain.eos_token_ids))
    for prompts, search, new in (
        ([list(range(5, 45))], Greedy(), 3),
        ([[9]], Greedy(), 3),
        ([list(range(5, 45)), [9], [7, 20, 33]], Trie(beams=4), 8),
        ([[5, 6]], Trie(beams=9), 8),
        ([list(range(5, 22))], Sample(num_return_sequences=3, seed=1), 6),
    ):
        options = {"max_new_tokens": new, "ignore_eos": True}
        want, got = (engine.generate(prompts, search, **options) for engine in (plain, compiled))
        assert [[o.token_ids for o in r.outputs] for r in got] == [[o.token_ids for o in r.outputs] for r in want]
        assert counted() == operators
    assert min(tokens for tokens, _, _ in runner._steps) == 2


def test_on_a_gpu_a_compiler_that_fails_is_left_out(monkeypatch):
    """As on a CPU; the runner then takes the operators as they are."""
    from engine.load import loading

    def make_runner(*_, compiled, **options):
        rows = "compiled" if compiled else None
        return SimpleNamespace(rows=rows, impl="triton", device=torch.device("cuda"), logits=fails)

    monkeypatch.setattr(loading, "make_runner", make_runner)

    def fails(ids):
        raise torch._dynamo.exc.BackendCompilerFailed(lambda: None, RuntimeError("exit 1"), None)

    monkeypatch.setattr(loading._Weights, "_capabilities", lambda *_: None)
    monkeypatch.setattr(loading, "compile_model", lambda *_: True)
    device = torch.device("cpu")
    weights = loading._Weights.load(MODEL, "float32", device, None, "none", "on", "auto", Shard())
    with pytest.warns(UserWarning, match="--compile on has no effect"):
        assert weights.with_pool(None, True).runner.rows is None
