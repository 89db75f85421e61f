"""The engine on a CUDA device gives what it gives on the CPU. Run by `make gpu`."""

import gc
import warnings
from pathlib import Path

import pytest
import torch

from engine import Engine
from engine.step.graphs import GraphRunner
from search import Greedy, Sample, Trie
from tests.invariants import check_pool

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
GOLDEN = Path(__file__).parent / "golden" / "llama"
FAMILIES = [  # of each a variant with windows, layers without rotation, or whatever else is its own
    *("gemma/one", "gemma/two", "gemma/three", "gpt2/plain", "granite/plain", "hunyuan/plain", "lfm2/bias"),
    *(
        "mistral/ministral3",
        "olmo/olmo3",
        "opt/plain",
        "phi/plain",
        "phi3/plain",
        "qwen2/windows",
        "qwen3/windows",
        "qwen3_5/bias",
    ),
    *("smollm3/windows", "stablelm/parallel"),
    *("qwen3_5/recurrent", "qwen3_5/recurrent_interval", "granite/hybrid", "granite/scans_groups"),
    *("falcon_h1/plain", "falcon_h1/norm", "falcon_h1/bamba", "mamba2/plain"),
    *("experts/qwen3_5_recurrent", "experts/qwen3_next_recurrent", "granite/scans_experts", "kimi_linear/plain"),
    *("kimi_linear/kinds", "bailing_hybrid/plain", "bailing_hybrid/unbounded", "zamba2/plain", "zamba2/bias"),
    *("deepseek/dense", "deepseek/groups", "deepseek/three", "deepseek/three_halves", "deepseek/glm"),
    *("mistral/mistral4", "laguna/plain", "laguna/elements"),
    *("llama4/plain", "llama4/steps", "relatives/dbrx", "relatives/kolibri"),
    *("experts/lfm2", "experts/phi", "experts/qwen2_windows", "gpt_oss/mxfp4", "gpt_oss/plain"),
]


@pytest.mark.parametrize("variant", ["gqa", "dynamic", "llama3"])
def test_cuda_equals_cpu(variant):
    cpu = Engine.load(GOLDEN / variant, dtype="float32", device="cpu")
    cuda = Engine.load(GOLDEN / variant, dtype="float32", device="cuda")
    prompts = [[7, 20, 33], list(range(5, 60)), [9]]
    for ids in prompts:
        torch.testing.assert_close(cuda.logits(ids).cpu(), cpu.logits(ids), atol=1e-3, rtol=1e-3)
    for search in (Greedy(), Trie(beams=4), Sample(seed=3, num_return_sequences=3)):
        want = cpu.generate(prompts, search, max_new_tokens=20)
        got = cuda.generate(prompts, search, max_new_tokens=20)
        assert [[o.token_ids for o in r.outputs] for r in got] == [[o.token_ids for o in r.outputs] for r in want]
    check_pool(cuda.pool, [])


@pytest.mark.parametrize("variant", FAMILIES)
def test_families_equal_cpu(variant):
    """Logits of a prompt, and a search in graphs."""
    folder, ids = GOLDEN.parent / variant, [5 + i % 50 for i in range(41)]
    cpu, cuda = (Engine.load(folder, dtype="float32", device=device) for device in ("cpu", "cuda"))
    torch.testing.assert_close(cuda.logits(ids).cpu(), cpu.logits(ids), atol=1e-3, rtol=1e-3)
    [want], [got] = (e.generate([ids], Trie(beams=3), max_new_tokens=6, ignore_eos=True) for e in (cpu, cuda))
    assert got.outputs[0].logprob == pytest.approx(want.outputs[0].logprob, abs=1e-2)


def test_an_int8_cache_equals_that_of_a_cpu():
    cpu, cuda = (Engine.load(GOLDEN / "gqa", dtype="float32", kv_dtype="int8", device=d) for d in ("cpu", "cuda"))
    ids = list(range(5, 60))
    torch.testing.assert_close(cuda.logits(ids).cpu(), cpu.logits(ids), atol=5e-3, rtol=5e-3)


def test_an_fp8_cache_is_near_floats():
    """A CPU has none: divergence from float32 of the log-probabilities, and a search in graphs."""
    plain, fp8 = (Engine.load(GOLDEN / "gqa", dtype="float32", kv_dtype=d, device="cuda") for d in ("auto", "fp8"))
    ids = list(range(5, 60))
    exact_NV, near_NV = (torch.log_softmax(engine.logits(ids), -1) for engine in (plain, fp8))
    assert 0 < (exact_NV.exp() * (exact_NV - near_NV)).sum(-1).mean() < 0.05
    [result] = fp8.generate([ids], Trie(beams=4), max_new_tokens=12, ignore_eos=True)
    assert len(result.outputs[0].token_ids) == 12 and any(step.replay for step in fp8.runner._steps.values())
    check_pool(fp8.pool, [])


def test_many_trees_and_wide_beams_equal_cpu():
    """Passes of 20 trees, and one of 64 beams, which take other buckets and other tiles."""
    cpu, cuda = (Engine.load(GOLDEN / "gqa", dtype="float32", device=d, parallel=20) for d in ("cpu", "cuda"))
    for prompts, beams in (([[5 + i, 9, 20 + i] for i in range(20)], 3), ([list(range(5, 60))], 64)):
        want, got = (e.generate(prompts, Trie(beams=beams), max_new_tokens=10, ignore_eos=True) for e in (cpu, cuda))
        assert [r.outputs[0].token_ids for r in got] == [r.outputs[0].token_ids for r in want]
    assert {trees for _, _, trees in cuda.runner._steps} >= {1, 32}


def test_steps_come_from_graphs():
    engine = Engine.load(GOLDEN / "gqa", dtype="float32", device="cuda")
    assert isinstance(engine.runner, GraphRunner) and engine.runner.impl == "triton" and engine.pool.page_size == 16
    prompts = [list(range(5, 60)), [9], [7, 20, 33]]
    first = engine.generate(prompts, Trie(beams=4), max_new_tokens=20, ignore_eos=True)
    steps = engine.runner._steps
    assert any(step.replay for step in steps.values())
    again = engine.generate(prompts, Trie(beams=4), max_new_tokens=20, ignore_eos=True)
    assert [r.outputs[0].token_ids for r in again] == [r.outputs[0].token_ids for r in first]
    assert len(steps) <= 12


def test_graphs_outlive_those_of_another_engine():
    """Each recorder has a stream of its own, and so a workspace of cuBLAS that goes with its graphs alone."""
    first, second = (Engine.load(GOLDEN / "gqa", dtype="float32", device="cuda", kv_memory=1 << 24) for _ in range(2))
    options = {"max_new_tokens": 8, "ignore_eos": True}
    [want] = second.generate([[7, 20, 33]], Trie(beams=4), **options)
    first.generate([[7, 20, 33]], Trie(beams=4), **options)
    del first
    gc.collect()
    second.generate([[7, 20, 33]], Trie(beams=9), **options)  # recording begins with giving memory back
    [got] = second.generate([[7, 20, 33]], Trie(beams=4), **options)
    assert got.outputs[0].token_ids == want.outputs[0].token_ids
    assert got.outputs[0].logprob == want.outputs[0].logprob


def test_what_a_step_waits_for():
    """One transfer to the host: whether all is finite, and the best candidates. Nothing else stops the GPU."""
    engine = Engine.load(GOLDEN / "gqa", dtype="float32", device="cuda")

    def ask(new_tokens):
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            try:
                engine.generate([[7, 20, 33]], Trie(beams=4), max_new_tokens=new_tokens, ignore_eos=True)
            finally:
                torch.cuda.set_sync_debug_mode("default")
        return sum("synchroniz" in str(w.message) for w in told)

    for _ in range(3):  # until every graph is recorded
        ask(40)
    assert ask(40) - ask(20) <= 20


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_low_precision_is_near(dtype):
    exact = Engine.load(GOLDEN / "gqa", dtype="float64", device="cpu").logits(list(range(5, 80)))
    errors = {}
    for device in ("cpu", "cuda"):
        logits = Engine.load(GOLDEN / "gqa", dtype=dtype, device=device).logits(list(range(5, 80)))
        errors[device] = float((logits.cpu() - exact).pow(2).mean().sqrt())
    assert errors["cuda"] <= 2 * errors["cpu"]


def test_compiled_operators_in_graphs():
    eager = Engine.load(GOLDEN / "gqa", dtype="float32", device="cuda")
    compiled = Engine.load(GOLDEN / "gqa", dtype="float32", device="cuda", compile="on")
    prompts = [list(range(5, 60)), [9]]
    torch._dynamo.utils.counters.clear()
    for _ in range(2):
        want = eager.generate(prompts, Trie(beams=4), max_new_tokens=12)
        got = compiled.generate(prompts, Trie(beams=4), max_new_tokens=12)
        assert [r.outputs[0].token_ids for r in got] == [r.outputs[0].token_ids for r in want]
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 0  # loading compiled all there is


def test_cached_prefixes_in_pages_of_16_tokens():
    warm, cold = (Engine.load(GOLDEN / "gqa", dtype="float32", device="cuda", prefix_cache=x) for x in ("on", "off"))
    stem = [5 + i % 50 for i in range(41)]
    for length in (41, 20, 33, 41):
        prompt = [*stem[:length], 3, length]
        results = [e.generate([prompt], Trie(beams=3), max_new_tokens=8, logprobs=2)[0] for e in (warm, cold)]
        assert [r.outputs[0].token_ids for r in results] == [results[1].outputs[0].token_ids] * 2
        assert sum(results[0].outputs[0].token_logprobs) == pytest.approx(results[1].outputs[0].logprob, abs=1e-2)
    assert results[0].stats["reused_tokens"] == 42
    check_pool(warm.pool, [])
