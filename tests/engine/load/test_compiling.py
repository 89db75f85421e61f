"""torch.compile: a whole model is one graph; --compile on is refused on a CPU, and warns where there is no compiler."""

import os
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from engine import Engine
from engine.cache.pool import PagePool
from engine.errors import UsageError
from engine.load import compiling
from engine.load.loading import LoadedModel
from engine.load.options import LoadOptions
from engine.step.graphs import LEAST_COMPILED, GraphRunner
from kernels import cpp, same_bits
from kernels.tracing import compiled
from search import Greedy, Sample, Trie
from tests.marks import needs_interpreter
from tools.bench.traced import trace

GOLDEN = Path(__file__).parents[2] / "golden"
MODEL = GOLDEN / "llama/gqa"


OTHERS = "lfm2/bias", "gemma/two", "phi/plain", "opt/plain"


@pytest.mark.full(unless=lambda variant: variant not in OTHERS)
@pytest.mark.parametrize("variant", ["llama/gqa", *OTHERS])
def test_a_whole_model_is_one_graph(variant):
    """Whatever the trees, their sizes and ancestry: without a break, which is an error, or another compilation."""
    engine = Engine.load(GOLDEN / variant, dtype="float32", device="cpu", kv_memory=1 << 24)
    found = trace(engine)
    assert (found.passes, found.graphs) == (10, 1) and found.error < 1e-4
    assert engine.runner.model.embedding.rows is not None


@pytest.mark.full
@pytest.mark.parametrize(
    ("impl", "backend"),
    [("torch", "eager"), ("cpp", "aot_eager"), pytest.param("triton", "eager", marks=needs_interpreter)],
)
def test_any_implementation_is_one_graph(impl, backend):
    engine = Engine.load(GOLDEN / "llama/gqa", dtype="float32", device="cpu", kv_memory=1 << 24)
    found = trace(engine, impl=impl, backend=backend)
    assert found.graphs == 1 and found.error < 1e-4


def test_what_concerns_compilers_is_in_two_files():
    """But for the flag itself."""
    root, words = GOLDEN.parents[1], ("is_compiling", "torch.compile(", "custom_op", "substitute_in_graph")
    files = [file for package in ("kernels", "models", "engine", "search") for file in (root / package).rglob("*.py")]
    found = {str(f.relative_to(root)) for f in files if any(word in f.read_text(encoding="utf-8") for word in words)}
    assert found == {"kernels/tracing.py", "kernels/whole_graph.py"}


def test_on_a_cpu_it_is_refused():
    with pytest.raises(UsageError, match="compile: on a CPU a compiled model is slower") as refused:
        Engine.load(MODEL, dtype="float32", device="cpu", compile="on", kv_memory=1 << 22)
    assert refused.value.remedy == "leave out --compile on: it is for a GPU"


def test_where_rows_are_to_have_the_same_bits_it_is_refused(monkeypatch):
    monkeypatch.delenv(same_bits.NAME, raising=False)
    gpu = torch.device("cuda")
    compiling.check_compile("on", gpu)
    with same_bits.asking("on"):
        compiling.check_compile("off", gpu)
        with pytest.raises(UsageError, match="in an order that depends on the number of rows"):
            compiling.check_compile("on", gpu)
        with same_bits.asking("off"):
            compiling.check_compile("on", gpu)
        assert same_bits.asked()


@pytest.mark.parametrize("value", ["maybe", "ON", "1"])
def test_settings_of_same_bits_without_a_meaning_are_refused(monkeypatch, value):
    monkeypatch.setenv(same_bits.NAME, value)
    with pytest.raises(UsageError, match=f"COPPICE_SAME_BITS: expected on or off, got '{value}'"):
        Engine.load(MODEL, dtype="float32", device="cpu", kv_memory=1 << 22)
    for known in ("on", "off", ""):
        monkeypatch.setenv(same_bits.NAME, known)
        compiling.check_same_bits()
    assert not same_bits.asked()


@pytest.fixture
def fresh(monkeypatch):
    """No library loaded yet, before and after, and the choice of kernels left to the cache folder."""
    monkeypatch.delenv("COPPICE_KERNELS", raising=False)
    cpp._load.cache_clear()
    cpp.function.cache_clear()
    yield
    cpp._load.cache_clear()
    cpp.function.cache_clear()


def test_without_a_compiler_it_warns(monkeypatch):
    monkeypatch.setattr(cpp.shutil, "which", lambda name: None)
    with pytest.warns(UserWarning, match="no C\\+\\+ compiler was found: --compile on has no effect"):
        assert not compiling.prepare()


def test_without_a_compiler_the_kernels_in_pytorch_run(monkeypatch, fresh, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(cpp.shutil, "which", lambda name: None)
    with pytest.warns(UserWarning, match="the kernels in PyTorch run.*no C.* compiler was found"):
        engine = Engine.load(MODEL, dtype="float32", kv_memory=1 << 22)
    assert engine.runner.impl == "torch"
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
        assert not compiling.prepare()
    assert "TORCHINDUCTOR_CACHE_DIR" not in os.environ


@pytest.fixture
def counted(monkeypatch):
    """Compilations so far, by a compiler that leaves what it gets as it is."""
    real = torch.compile
    monkeypatch.setattr(torch, "compile", lambda run, **options: real(run, backend="eager", **options))
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    compiled.cache_clear()
    yield lambda: torch._dynamo.utils.counters["stats"]["unique_graphs"]
    compiled.cache_clear()


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
    assert compiling.prepare()
    pool, options = PagePool(plain.shape, 400, 16), {"rows": "compiled", "token_buckets": LEAST_COMPILED}
    source = plain.runner
    runner = GraphRunner(source.model, pool, source.vocab_size, impl="reference", record=lambda run: run, **options)
    other = Engine(LoadedModel(runner, plain.shape, eos_token_ids=plain.eos_token_ids))
    for prompts, search, new in (
        ([list(range(5, 45))], Greedy(), 3),
        ([[9]], Greedy(), 3),
        ([list(range(5, 45)), [9], [7, 20, 33]], Trie(beams=4), 8),
        ([[5, 6]], Trie(beams=9), 8),
        ([list(range(5, 22))], Sample(num_return_sequences=3, seed=1), 6),
    ):
        options = {"max_new_tokens": new, "ignore_eos": True}
        want, got = (engine.generate(prompts, search, **options) for engine in (plain, other))
        assert [[o.token_ids for o in r.outputs] for r in got] == [[o.token_ids for o in r.outputs] for r in want]
        assert counted() == operators
    assert min(tokens for tokens, _, _ in runner._steps) == 2


def test_on_a_gpu_a_compiler_that_fails_is_left_out(monkeypatch):
    """The runner then takes the operators as they are."""
    from engine.load import loading

    def make_runner(*_, compiled, **options):
        rows = "compiled" if compiled else None
        return SimpleNamespace(rows=rows, impl="triton", device=torch.device("cuda"), logits=fails)

    monkeypatch.setattr(loading, "make_runner", make_runner)

    def fails(ids):
        raise torch._dynamo.exc.BackendCompilerFailed(lambda: None, RuntimeError("exit 1"), None)

    monkeypatch.setattr(loading._Weights, "_capabilities", lambda *_: None)
    monkeypatch.setattr(loading, "prepare", lambda: True)
    options = LoadOptions(MODEL, dtype="float32", compile="on")
    weights = loading._Weights.load(MODEL, options, torch.device("cpu"))
    with pytest.warns(UserWarning, match="--compile on has no effect"):
        assert weights.with_pool(None, True).runner.rows is None
