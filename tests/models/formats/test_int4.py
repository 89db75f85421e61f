"""Int4 weights: how far off they are, what they hold, what does not depend on what, where they are refused."""

import re
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

from engine import Engine, UsageError
from models.formats import int4
from models.formats.int4 import Int4
from models.formats.linear import FORMATS, format_of
from search import Trie
from tools.bench.measure import weight_bytes
from tools.random_checkpoint import make

GOLDEN = Path(__file__).parents[2] / "golden"
CPU = torch.device("cpu")
FOUR = [name for name, format in FORMATS.items() if isinstance(format, Int4)]
needs_kernels = pytest.mark.skipif(bool(Int4().why_not(CPU)), reason=str(Int4().why_not(CPU)))


def draw(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def floats(format, weight_OI, candidates=None):
    codes_OI, scale_OG, zero_OG, _ = format.quantized(weight_OI, candidates)
    size, width = format.group(weight_OI.shape[1]), weight_OI.shape[1]
    zero = 8 if zero_OG is None else zero_OG.repeat_interleave(size, 1)[:, :width]
    return (codes_OI.float() - zero) * scale_OG.repeat_interleave(size, 1)[:, :width]


@pytest.mark.parametrize("name", FOUR)
@pytest.mark.parametrize("width", [256, 100, 24, 5])
def test_the_rule_is_better_than_plain_rounding(name, width):
    format, weight_OI = FORMATS[name], draw(300, width) * 0.02
    weight_OI[3], weight_OI[4, :3] = 0, 1.0
    weight_OI[5] = weight_OI[5].abs() + 0.1
    off = (floats(format, weight_OI) - weight_OI).square()
    plain = (floats(format, weight_OI, (15.0 if format.zeros else 8.0,)) - weight_OI).square()
    assert off.mean() < plain.mean() if width > 8 else off.mean() <= plain.mean()
    assert off[3].eq(0).all()
    assert off.mean() < 0.012 * weight_OI.square().mean()


@pytest.mark.parametrize("scale", [1e-9, 1e-5, 1.0, 1e6])
def test_weights_of_any_size(scale):
    """Scales that float16 has no bits for stay float32."""
    weight_OI = draw(64, 64) * scale
    assert (floats(Int4(), weight_OI) - weight_OI).square().mean() < 0.01 * scale**2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("name", FOUR)
@needs_kernels
def test_a_product_is_that_of_its_weights_and_rounded_rows(name, dtype):
    weights, biases = [draw(40, 72), draw(24, 72, seed=1) * 50], [draw(40, seed=2), draw(24, seed=3)]
    layer = FORMATS[name](iter(weights), biases, dtype=dtype, device=CPU)
    x = draw(9, 72, seed=4).to(dtype)
    weight_OI = torch.cat([floats(FORMATS[name], weight) for weight in weights]).double()
    exact = F.linear(x.double(), weight_OI, torch.cat(biases).to(dtype).double())
    steps = x.double().abs().amax(-1, keepdim=True) * weight_OI.abs().sum(-1) / 254
    assert ((layer(x).double() - exact).abs() <= steps + 8 * torch.finfo(dtype).eps * (exact.abs() + 20)).all()
    assert layer(x).dtype == dtype and layer(x)[2:3].equal(layer(x[2:3]))


@pytest.mark.parametrize("variant", ["llama/gqa", "opt/plain", "gpt2/wide", "phi/plain", "phi3/gqa", "qwen3/plain"])
@needs_kernels
def test_every_family_runs_on_the_stack(variant):
    engine = Engine.load(GOLDEN / variant, quant="int4")
    assert engine.runner.model.stack is not None
    assert engine.generate([[1, 2, 3]], Trie(beams=4), max_new_tokens=4)


@needs_kernels
def test_weights_take_a_seventh_of_float32(tmp_path):
    make(tmp_path / "model", layers=4, width=384, mlp=1024, heads=6, vocab=320)
    held = {
        quant: weight_bytes(Engine.load(tmp_path / "model", dtype="float32", quant=quant).runner.model)
        for quant in ("none", "int4")
    }
    assert held["int4"] <= 0.16 * held["none"]


def test_the_matrix_that_makes_logits_takes_8_bits():
    assert format_of("int4-64", 1000, head=True) == "int8" and format_of("int4-64", 1000) == "int4-64"
    assert format_of("int4", 1) == "none" and format_of("none", 1000, head=True) == "none"
    assert format_of("int4-head", 1000, head=True) == format_of("int4-head", 1000) == "int4-head"
    assert format_of("int4-head", 1, head=True) == "none"


@needs_kernels
def test_the_matrix_that_makes_logits_in_4_bits(tmp_path):
    make(tmp_path / "model", layers=1, width=64, heads=2, vocab=3000)
    sizes = {}
    for quant in ("int4", "int4-head"):
        model = Engine.load(tmp_path / "model", quant=quant).runner.model
        sizes[quant] = weight_bytes(model.head)
    assert sizes["int4-head"] < 0.6 * sizes["int4"]


@needs_kernels
def test_threads_and_pieces_of_a_matrix_do_not_change_it(monkeypatch):
    weight_OI, threads = draw(700, 96, seed=9), torch.get_num_threads()
    whole = Int4().quantized(weight_OI)
    monkeypatch.setattr(int4, "CHUNK", 96 * 50)
    for count in (1, 3):
        torch.set_num_threads(count)
        try:
            rows = Int4().weight(weight_OI).rows(0, 700)
            assert torch.get_num_threads() == count
        finally:
            torch.set_num_threads(threads)
        assert rows.codes_OI.equal(whole.codes_OI) and rows.scale_OG.equal(whole.scale_OG)


def test_refusals(monkeypatch):
    with pytest.raises(UsageError, match=re.escape("int4-zeros-64")):
        Engine.load(GOLDEN / "llama/gqa", quant="int4-16")
    assert "need a CPU, or a GPU and the package triton, not meta" in str(Int4().why_not(torch.device("meta")))
    monkeypatch.setattr(int4, "has_kernels", lambda *_: False)
    with pytest.raises(UsageError, match=r"int4 weights need the C\+\+ kernels"):
        Engine.load(GOLDEN / "llama/gqa", quant="int4")
