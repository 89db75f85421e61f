"""Models whose matrices stay in 8 or 4 bits on a GPU, through Triton's interpreter: the golden logits, and tokens."""

import importlib.util
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch.nn import functional as F

from engine import Engine
from engine.load.fastest import fastest_format
from engine.load.loading import LoadedModel
from engine.step.runner import Runner
from kernels import cpp
from kernels.linear.codes import unpacked
from models.formats import coded, grouped
from models.formats.coded import CodedLinear, of_int8, of_packed
from models.formats.floats import FloatLinear, PackedLinear
from models.formats.grouped import GroupedLinear, GroupedWeight
from models.formats.int4 import Int4
from models.formats.int8 import quantized
from search import Trie
from tests.marks import needs_interpreter

GOLDEN = Path(__file__).parents[2] / "golden"
CPU, CUDA = torch.device("cpu"), torch.device("cuda")
needs_kernels = pytest.mark.skipif(bool(cpp.why_not()), reason=f"no C++ kernels: {cpp.why_not()}")


def on_triton(engine):
    """The engine with Triton's kernels for everything."""
    source = engine.runner
    source.model.stack = None
    runner = Runner(source.model, engine.pool, source.vocab_size, impl="triton", dtype=source.dtype)
    return Engine(LoadedModel(runner, engine.shape, eos_token_ids=engine.eos_token_ids))


@pytest.fixture
def as_on_a_gpu(monkeypatch):
    """Weights in groups take the way of a GPU; returns the layers that were made so."""
    made = []

    def of(weights, biases=None, *, dtype, device):
        layer = GroupedLinear([], None, dtype=dtype, device=torch.device("meta"))
        layer.whole = grouped._on_device(weights, biases, dtype, device)
        layer.levels = next((weight.levels for weight in weights if weight.by_row), None)
        made.append(layer.whole)
        return layer

    monkeypatch.setattr("models.checkpoint.weights.GroupedLinear", of)
    monkeypatch.setattr(grouped, "has_codes", lambda *_: True)
    return made


@needs_interpreter
@pytest.mark.parametrize(
    "variant", ["awq", "bitnet_auto", "fp8_block", "gptq_conv1d", "pack4_zeros", "pack8_zeros", "gemma"]
)
def test_quantised_checkpoints_compute_the_golden_logits(variant, as_on_a_gpu):
    folder = GOLDEN / "quantized" / variant
    engine = on_triton(Engine.load(folder, dtype="float32", device="cpu", kv_memory=1 << 22))
    entry = json.loads((folder / "golden.json").read_text())["logits"][0]
    expected_TV = load_file(folder / "golden.safetensors")[entry["tensor"]]
    error_T = (engine.logits(entry["prompt_ids"])[-entry["rows"] :] - expected_TV).abs().amax(-1)
    assert (error_T / (expected_TV.amax(-1) - expected_TV.amin(-1))).max() < 1e-5
    assert any(isinstance(part, CodedLinear) for layer in as_on_a_gpu for part in layer.modules())


@needs_interpreter
@needs_kernels
@pytest.mark.parametrize("quant", ["int8", "int4"])
def test_tokens_are_those_of_the_weights_as_floats(quant):
    """Made of the matrices that were packed for a CPU; the floats are what these stand for."""
    found, exact = (Engine.load(GOLDEN / "llama/gqa", dtype="float32", quant=quant, kv_memory=1 << 22) for _ in "12")
    for engine in (found, exact):
        for name, layer in [*engine.runner.model.named_modules()]:
            if isinstance(layer, PackedLinear) and layer.packed is not None and layer.packed.dtype == torch.int8:
                codes = of_packed(layer.packed, CPU)
                bias = None if layer.bias is None else [layer.bias]
                other = CodedLinear([codes], bias, dtype=torch.float32, device=CPU)
                if engine is exact:
                    other = FloatLinear([unpacked(codes)], bias, dtype=torch.float32, device=CPU)
                parent = engine.runner.model.get_submodule(name.rpartition(".")[0])
                setattr(parent, name.rpartition(".")[2], other)
        engine.runner.model.stack = None
    ids, options = [7, 20, 33, 4], {"max_new_tokens": 2, "ignore_eos": True}
    found = on_triton(found)
    torch.testing.assert_close(found.logits(ids), exact.logits(ids), rtol=1e-4, atol=1e-4)
    [got], [want] = (engine.generate([ids], Trie(beams=2), **options) for engine in (found, exact))
    assert [o.token_ids for o in got.outputs] == [o.token_ids for o in want.outputs]


def test_int8_codes_are_the_rows_and_their_scales():
    weights, scale_O = [torch.randn(5, 40), torch.randn(9, 40)], torch.empty(14)
    codes = of_int8(quantized(weights, scale_O), scale_O, 14, 40, CPU)
    exact = torch.cat(weights)
    assert ((unpacked(codes) - exact).abs() <= exact.abs().amax(1, keepdim=True) / 127 * 0.501).all()


@needs_kernels
@pytest.mark.parametrize("zeros", [False, True])
def test_what_was_packed_for_a_cpu(zeros):
    weight = Int4(32, zeros=zeros).weight(torch.randn(70, 96))
    layer = GroupedLinear([weight], dtype=torch.float32, device=CPU)
    torch.testing.assert_close(unpacked(of_packed(layer.packed, CPU)), weight.floats())
    assert of_packed(FloatLinear([weight.floats()], dtype=torch.float32, device=CPU).packed, CPU) is None


def test_groups_without_a_product_become_floats_and_a_warning(monkeypatch):
    monkeypatch.setattr(grouped, "has_codes", lambda *_: True)
    weight = Int4(32).weight(torch.randn(8, 96))
    odd = GroupedWeight("int4", (8, 96), 24, Int4(24).weight(torch.randn(8, 96)).rows)
    assert isinstance(grouped._on_device([weight], None, torch.float32, CPU), CodedLinear)
    with pytest.warns(UserWarning, match="int4 weights in groups of 24 have no product on a GPU: they become float32"):
        layer = grouped._on_device([weight, odd], None, torch.float32, CPU)
    x = torch.randn(2, 96)
    wanted = torch.cat([F.linear(x, w.floats()) for w in (weight, odd)], -1)
    torch.testing.assert_close(layer(x), wanted, rtol=1e-4, atol=1e-4)


def test_which_devices_have_products():
    assert not coded.has_codes(torch.float16, CPU) and not coded.has_codes(torch.float64, CUDA)
    assert "not meta" in str(coded.why_not(torch.device("meta")))
    assert coded.has_codes(torch.bfloat16, CUDA) == (importlib.util.find_spec("triton") is not None)
    assert fastest_format(torch.bfloat16, torch.bfloat16, CUDA).name == "none"  # and nothing is measured
    assert coded.code_bytes("int4", 10, 100, 8) == 10 * (64 + 8)
