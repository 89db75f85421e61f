"""The registry of weight formats: one more is a class and an entry, and everybody knows it."""

import importlib.util
from pathlib import Path

import pytest
import torch

from engine import Engine, UsageError
from models.formats.floats import FloatLinear
from models.formats.linear import FORMATS

PLAIN = Path(__file__).parents[2] / "golden/llama/plain"
CPU, CUDA = torch.device("cpu"), torch.device("cuda")


class Rounded(FloatLinear):
    """Weights of three bits."""

    def __init__(self, weights, biases=None, *, dtype, device):
        super().__init__([(weight * 8).round() / 8 for weight in weights], biases, dtype=dtype, device=device)

    @staticmethod
    def why_not(device):
        return None if device.type == "cpu" else "rounded weights run on a CPU only"


def test_a_format_of_ones_own(monkeypatch):
    monkeypatch.setitem(FORMATS, "rounded", Rounded)
    plain, rounded = (Engine.load(PLAIN, dtype="float32", quant=quant) for quant in ("none", "rounded"))
    assert rounded.capabilities.precision == "float32, rounded weights"
    assert "rounded weights" in rounded.capabilities.paths.partition("; not here")[0]
    found, expected = (engine.logits([5, 6, 7]) for engine in (rounded, plain))
    assert found.isfinite().all() and not found.equal(expected)
    with pytest.raises(UsageError, match="rounded or auto, got 'int5'"):
        Engine.load(PLAIN, quant="int5")


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_has_what_the_engine_asks_for(name):
    kind = FORMATS[name]
    assert name == "none" or kind.why_not(torch.device("meta"))
    if importlib.util.find_spec("triton"):
        assert kind.why_not(CUDA) is None and kind.bytes(100, 64, {torch.float32}, torch.float16, CUDA) <= 100 * 128
    if kind.why_not(CPU):
        pytest.skip(str(kind.why_not(CPU)))
    weight_OI = torch.randn(6, 8)
    layer = kind([weight_OI[:2], weight_OI[2:]], None, dtype=torch.float32, device=CPU)
    assert layer(torch.ones(3, 8)).shape == (3, 6) and layer.bias is None
