"""Int8 weights: how far off they are, independence of batch-mates, what loading holds, where they are refused."""

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

from engine import Engine, UsageError
from models.formats import floats, int8
from models.formats.int8 import Int8Linear, quantized
from search import Trie
from tests.marks import needs_int8
from tools.bench.measure import weight_bytes
from tools.random_checkpoint import make

ROOT = Path(__file__).parents[3]
GOLDEN = ROOT / "tests/golden"
CPU = torch.device("cpu")


def draw(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def layer(dtype=torch.float32, bias=True):
    weights = [draw(40, 64), draw(24, 64, seed=1) * 50]
    biases = [draw(40, seed=2), draw(24, seed=3)] if bias else None
    return (
        Int8Linear(weights, biases, dtype=dtype, device=CPU),
        torch.cat(weights),
        torch.cat(biases) if biases else None,
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("bias", [False, True])
@needs_int8
def test_a_product_is_off_by_no_more_than_its_steps(dtype, bias):
    linear, weight, b = layer(dtype, bias)
    x = draw(9, 64, seed=4).to(dtype)
    exact = F.linear(x.double(), weight.double(), None if b is None else b.double())
    found = linear(x)
    assert found.dtype == dtype
    # Half a step of 1/127 of the largest, in each weight and each activation.
    wide, tall = x.double().abs(), weight.double().abs()
    steps = (wide.amax(-1, keepdim=True) * tall.sum(-1) + wide.sum(-1, keepdim=True) * tall.amax(-1)) / 254
    rounding = 4 * torch.finfo(dtype).eps * (wide @ tall.T + 1)
    assert ((found.double() - exact).abs() <= 1.02 * steps + rounding).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@needs_int8
def test_a_token_does_not_depend_on_those_beside_it(dtype):
    linear, *_ = layer(dtype)
    x = draw(16, 64, seed=5).to(dtype)
    alone = torch.cat([linear(row.unsqueeze(0)) for row in x])
    x[3] *= 1000
    x[7] = 0
    beside = linear(x)
    same = [i for i in range(16) if i not in (3, 7)]
    assert torch.equal(beside[same], alone[same])
    assert torch.equal(beside[7], linear.bias)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@needs_int8
def test_what_is_not_finite_stays_so_and_stays_in_its_row(value):
    linear, *_ = layer()
    x = draw(3, 64)
    x[1, 5] = value
    assert linear(x).isfinite().all(-1).tolist() == [True, False, True]


def test_quantising_in_chunks_holds_no_float_matrix(monkeypatch):
    weights = [draw(50, 32).bfloat16(), draw(32, 30, seed=1).T]  # the second one as GPT-2 stores it

    def quantize():
        scale_O = torch.empty(80)
        return torch.cat([*quantized(weights, scale_O)]), scale_O

    whole = quantize()
    monkeypatch.setattr(floats, "CHUNK", 100)
    sizes, plain = [], torch.Tensor.float
    monkeypatch.setattr(torch.Tensor, "float", lambda x: sizes.append(x.numel()) or plain(x))
    assert all(torch.equal(a, b) for a, b in zip(whole, quantize(), strict=True))
    assert max(sizes) <= 100 and sum(sizes) == 80 * 32
    rows, scale = whole
    error = (rows * scale.unsqueeze(1) - torch.cat([w.float() for w in weights])).abs()
    assert (error <= scale.unsqueeze(1) * 0.5001).all() and rows.abs().amax(-1).eq(127).all()


@pytest.mark.parametrize("variant", ["llama/gqa", "opt/post_norm", "gpt2/plain", "phi/plain", "phi3/plain"])
@needs_int8
def test_every_family_stays_close_to_its_floats(variant):
    def logp(quant):
        engine = Engine.load(GOLDEN / variant, dtype="float32", quant=quant, kv_memory=1 << 22)
        return torch.log_softmax(engine.logits(list(range(3, 35))), -1)

    exact, rough = logp("none"), logp("int8")
    spread = exact.std()
    assert 0 < (exact - rough).abs().mean() < 0.1 * spread
    assert (exact - rough).abs().max() < 0.6 * spread


@needs_int8
def test_a_batch_is_its_lines_run_alone():
    engine = Engine.load(GOLDEN / "llama/gqa", dtype="float32", quant="int8", kv_memory=1 << 22)
    prompts, options = [[5, 6, 7], [9] * 12, [11, 12]], {"max_new_tokens": 8, "ignore_eos": True}
    together = engine.generate(prompts, Trie(beams=3), **options)
    for prompt, result in zip(prompts, together, strict=True):
        [alone] = engine.generate([prompt], Trie(beams=3), **options)
        assert alone.outputs[0].token_ids == result.outputs[0].token_ids
        assert alone.outputs[0].logprob == pytest.approx(result.outputs[0].logprob, abs=1e-3)


@needs_int8
def test_weights_are_a_quarter_of_float32(tmp_path):
    make(tmp_path, layers=2, width=256, mlp=512, heads=4, vocab=1000)
    held = {quant: weight_bytes(Engine.load(tmp_path, dtype="float32", quant=quant, kv_memory=1 << 22).runner.model)
            for quant in ("none", "int8")}  # fmt: skip
    assert held["int8"] <= 0.30 * held["none"]


def test_refusals(monkeypatch):
    with pytest.raises(UsageError, match="got 'int5'"):
        Engine.load(GOLDEN / "llama/gqa", quant="int5")
    monkeypatch.setattr(int8, "has_kernels", lambda *_: False)
    monkeypatch.setattr(torch.cpu, "_is_vnni_supported", lambda: False)
    with pytest.raises(UsageError, match="without C\\+\\+ kernels int8 needs a processor with"):
        Engine.load(GOLDEN / "llama/gqa", quant="int8")
    assert "need a CPU, or a GPU and the package triton, not meta" in str(Int8Linear.why_not(torch.device("meta")))


@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="ONEDNN_MAX_CPU_ISA is for x86-64")
def test_products_that_overflow_are_refused():
    """A processor with VNNI has them if its oneDNN is held to AVX2."""
    program = (
        "import torch; torch.cpu._is_vnni_supported = lambda: True; "
        "from models.formats.int8 import Int8Linear; print(Int8Linear.why_not(torch.device('cpu')))"
    )
    environment = os.environ | {"ONEDNN_MAX_CPU_ISA": "AVX2", "COPPICE_KERNELS": "off", "PYTHONPATH": str(ROOT)}
    told = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    assert "int8 products overflow here: is ONEDNN_MAX_CPU_ISA set" in told.stdout
