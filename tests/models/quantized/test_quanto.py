"""optimum-quanto: every code by the definition, the map of modules, and what is refused.

optimum-quanto 0.2.7 dequantises the same floats from models of all four types.
"""

import json
import math
import shutil
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from engine import Engine
from kernels.linear.reference import unpacked
from models.checkpoint.fields import Fields
from models.checkpoint.headers import Checkpoint
from models.errors import CheckpointError
from models.formats.floats import has_kernels
from models.formats.grouped import GroupedLinear
from models.quantized import quantization
from models.quantized.parts import LINEAR, TRANSPOSED, Source
from models.quantized.quanto import QuantoScheme

GOLDEN = Path(__file__).parents[2] / "golden"
CPU = torch.device("cpu")


def stored(outs, width, kind, group, seed=0):
    """Random tensors of a module by the ends of their names, and the matrix that they stand for."""
    generator = torch.Generator().manual_seed(seed)
    parts = {name: torch.tensor(1.0) for name in ("input_scale", "output_scale")}
    if kind in ("qint8", "qfloat8_e4m3fn"):
        q = torch.randint(-128, 128, (outs, width), generator=generator).to(torch.int8)
        if kind != "qint8":
            q = torch.randn(outs, width, generator=generator).to(torch.float8_e4m3fn)
        scale = torch.rand(outs, 1, generator=generator)
        return parts | {"weight._data": q, "weight._scale": scale}, q.float() * scale
    bits = int(kind[-1])
    rows, fields = outs * width // group, 8 // bits
    q = torch.randint(0, 2**bits, (rows, group), generator=generator)
    scale, shift = torch.rand(rows, 1, generator=generator), torch.randn(rows, 1, generator=generator)
    step = math.ceil(rows / fields)
    packed = torch.zeros(step, group, dtype=torch.int64)
    for row in range(rows):
        packed[row % step] |= q[row] << bits * (row // step)
    parts |= {"weight._data._data": packed.to(torch.uint8), "weight._scale": scale, "weight._shift": shift}
    return parts, (q * scale - shift).view(outs, width)


GROUPS = {64: 64, 128: 128, 256: 128, 192: 96, 320: 64, 160: 32, 136: 136}  # widths -> what the package chooses


@given(
    st.sampled_from(["qint2", "qint4", "qint8", "qfloat8_e4m3fn"]), st.integers(1, 9), st.sampled_from(sorted(GROUPS))
)
def test_values_are_those_of_the_definition(kind, outs, width):
    """Words that groups do not fill; some rows; the packed matrix."""
    parts, expected = stored(outs, width, kind, GROUPS[width], seed=outs)
    scheme = QuantoScheme(kind)
    for suffix, part in scheme.parts(outs, width).items():
        assert tuple(parts[suffix].shape) in part.shapes and parts[suffix].dtype in part.dtypes
    weight = scheme.weight(outs, width, Source(parts.get, AssertionError))
    assert torch.equal(weight.floats(), expected)
    assert torch.equal(weight.floats(outs // 2, outs // 2 + 1), expected[outs // 2 : outs // 2 + 1])
    if has_kernels(torch.float32, CPU):
        assert torch.equal(unpacked(GroupedLinear([weight], dtype=torch.float32, device=CPU).packed), expected)


def test_numbers_that_are_none():
    parts, _ = stored(4, 64, "qfloat8_e4m3fn", 64)
    parts["weight._data"].view(torch.uint8)[2, 5] = 255
    with pytest.raises(AssertionError, match=r"weight\._data has values that are not numbers"):
        QuantoScheme("qfloat8_e4m3fn").weight(4, 64, Source(parts.get, AssertionError)).floats()


def test_a_folder(tmp_path):
    """The types are those of `quanto_qmap.json`; the model equals that of its floats."""
    floats, folder = GOLDEN / "llama" / "gqa", tmp_path / "model"
    shutil.copytree(floats, folder)
    tensors, listed, plain = {}, {}, {}
    kinds = {"q_proj": "qint8", "gate_proj": "qint4", "down_proj": "qint2", "o_proj": "qfloat8_e4m3fn"}
    for name, tensor in load_file(floats / "model.safetensors").items():
        module = name.removesuffix(".weight")
        if (kind := kinds.get(module.rpartition(".")[2])) is None:
            tensors[name] = plain[name] = tensor
            continue
        parts, matrix = stored(*tensor.shape, kind, tensor.shape[1])
        tensors |= {f"{module}.{suffix}": (part / 50 if "_s" in suffix and part.dim() else part).contiguous()
                    for suffix, part in parts.items()}  # fmt: skip
        plain[name] = matrix / 50
        listed[module] = {"weights": kind, "activations": "none"}
    for path, found in ((folder, tensors), (tmp_path / "floats", plain)):
        shutil.copytree(floats, path, dirs_exist_ok=True)
        (path / "model.safetensors").unlink()
        save_file(found, path / "model.safetensors")
    with pytest.raises(CheckpointError, match="unknown"):
        Engine.load(folder, dtype="float32", device="cpu", kv_memory="1M")
    (folder / "quanto_qmap.json").write_text(json.dumps(listed))
    ids = [3, 5, 7, 11, 13]
    found, expected = (
        Engine.load(path, dtype="float32", device="cpu", kv_memory="1M").logits(ids)
        for path in (folder, tmp_path / "floats")
    )
    assert (found - expected).abs().max() < 1e-5 * (expected.max() - expected.min())
    quantized = Checkpoint.open(folder).quantization
    assert quantized.scheme("model.layers.0.self_attn.q_proj", TRANSPOSED) is None
    assert quantized.scheme("lm_head", LINEAR) is None


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        (
            {"weights": "qfloat8_e5m2"},
            "quanto: a with weights 'qfloat8_e5m2' and activations 'none' .read: qint2, qint4",
        ),
        ({"weights": "qint8", "activations": "qint8"}, "quanto: a with weights 'qint8' and activations 'qint8'"),
        ({"weights": 8}, "modules.a.weights: expected a string"),
        ("qint8", "modules.a: expected an object"),
    ],
)
def test_what_is_refused(entry, message):
    config = {"quantization_config": {"quant_method": "quanto", "modules": {"a": entry}}}
    with pytest.raises(CheckpointError, match=message):
        quantization(Fields(config, "config.json"))
