"""HQQ: values by the definition, one element at a time, as codes and as floats; settings; every fault an error.

The golden model has 2, 3, 4 and 8 bits, along rows and across them.
"""

import json
import shutil
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from kernels.linear.reference import unpacked
from models.checkpoint.headers import Checkpoint
from models.checkpoint.hqq import Across, with_hqq
from models.checkpoint.tensor_files import read_header
from models.errors import CheckpointError
from models.formats.floats import has_kernels
from models.formats.grouped import GroupedLinear
from models.quantized import hqq
from models.quantized.parts import EMBEDDING, LINEAR, Form, Source

GOLDEN = Path(__file__).parents[2] / "golden" / "quantized" / "hqq"
Q_PROJ, DOWN = "model.layers.0.self_attn.q_proj", "model.layers.1.mlp.down_proj"
CPU = torch.device("cpu")
NAMES = {8: "8bit_u8", 4: "4bit_u8", 3: "3bit_32", 2: "2bit_u8", 1: "1bit_u8"}
FIELDS = {8: 1, 4: 2, 3: 10, 2: 4, 1: 8}


def quantised(outs, width, bits, group, axis=1, dtype=torch.float32, viewed=False, seed=0):
    """Random tensors of a module by the ends of their names, and the matrix that they stand for."""
    generator = torch.Generator().manual_seed(seed)
    rows, columns = (outs * width // group, group) if axis else (group, outs * width // group)
    q = torch.randint(0, 2**bits, (rows, columns), generator=generator)
    across = (rows, 1) if axis else (1, columns)
    scale = torch.randn(across, generator=generator).to(dtype)
    zero = (torch.rand(across, generator=generator) * 2**bits).to(dtype)
    step = -(-rows // FIELDS[bits])
    packed = torch.zeros(step, columns, dtype=torch.int64)
    for row in range(rows):
        packed[row % step] |= q[row] << bits * (FIELDS[bits] - 1 - row // step)
    packed = packed.to(torch.int32 if bits == 3 else torch.uint8)
    texts = {"packing": NAMES[bits], "compute_dtype": str(dtype), "unpack_view_dtype": str(packed.dtype)}
    numbers = {"nbits": bits, "group_size": group, "axis": axis, "view_as_float": viewed, "quant_scale": 0}
    parts = {
        "W_q": packed.view(dtype) if viewed else packed, "scale": scale, "zero": zero,
        "shape": torch.tensor([outs, width]),
        **{name: torch.tensor([*text.encode()], dtype=torch.uint8) for name, text in texts.items()},
        **{name: torch.tensor(int(number), dtype=torch.int32) for name, number in numbers.items()},
    }  # fmt: skip
    return parts, ((q.to(dtype) - zero) * scale).view(outs, width)


def written(parts, tmp_path, module="a"):
    file = tmp_path / "model.safetensors"
    save_file({f"{module}.{name}": t.contiguous() for name, t in parts.items() if t is not None}, file)
    return read_header(file)


@given(st.data())
@settings(max_examples=60)
def test_codes_are_those_of_the_definition(data):
    """Groups along rows; some rows; the packed matrix and its size."""
    bits, group = data.draw(st.sampled_from(sorted(NAMES))), data.draw(st.sampled_from([8, 16, 24]))
    outs, width = data.draw(st.integers(1, 5)) * 8, group * data.draw(st.integers(1, 4))
    viewed, dtype = data.draw(st.booleans()), torch.float32
    parts, expected = quantised(outs, width, bits, group, dtype=dtype, viewed=viewed, seed=data.draw(st.integers(0, 9)))
    scheme = hqq.HQQScheme(NAMES[bits], group)
    for suffix, part in scheme.parts(outs, width).items():
        found = parts.get(suffix)
        assert part.optional if found is None else tuple(found.shape) in part.shapes and found.dtype in part.dtypes
    weight = scheme.weight(outs, width, Source(parts.get, AssertionError))
    assert torch.equal(weight.floats(), expected)
    first = data.draw(st.integers(0, outs - 1))
    last = data.draw(st.integers(first + 1, outs))
    assert torch.equal(weight.floats(first, last), expected[first:last])
    if has_kernels(torch.float32, CPU):
        packed = GroupedLinear([weight], dtype=torch.float32, device=CPU).packed
        assert torch.equal(unpacked(packed), expected)
        form, kept = scheme.form(width), (packed.panels, packed.groups.scale, packed.groups.zero)
        assert form._replace(each=4).packed_bytes(outs, width) == sum(x.nbytes for x in kept)  # scales are no float16


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("bits", NAMES)
@pytest.mark.parametrize("viewed", [False, True])
def test_groups_across_rows_become_floats(bits, dtype, viewed, tmp_path):
    """Computed in `compute_dtype`, as in the package; also groups of one and a half rows."""
    for outs, width, group, axis in ((16, 40, 8, 0), (16, 16, 64, 0), (48, 16, 24, 1)):
        parts, expected = quantised(outs, width, bits, group, axis, dtype, viewed)
        tensors, settings = with_hqq(written(parts, tmp_path))
        assert tensors.keys() == {"a.weight"} and settings.schemes == {}
        info = tensors["a.weight"]
        assert isinstance(info, Across) and info.shape == (outs, width) and info.dtype == dtype
        assert torch.equal(info.read(), expected)


def test_modules_that_are_meant(tmp_path):
    parts, _ = quantised(16, 32, 4, 16)
    _, settings = with_hqq(written(parts, tmp_path))
    assert settings.scheme("a", LINEAR) == hqq.HQQScheme("4bit_u8", 16)
    assert settings.scheme("b", LINEAR) is None and settings.scheme("a", EMBEDDING) is None
    assert settings.scheme("a", LINEAR).form(32) == Form("int4", 16, zeros=True)
    assert with_hqq({}) == ({}, None)


def text(value):
    return torch.tensor([*value.encode()], dtype=torch.uint8)


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"group_size": None}, "missing a.group_size, a setting of HQQ"),
        ({"packing": None}, "missing a.packing, a setting of HQQ"),
        ({"packing": text("5bit_u8")}, r"a.packing '5bit_u8' \(read: 8bit_u8, 4bit_u8"),
        ({"packing": text("4" * 40)}, "a.packing: expected a setting of HQQ, got 40 elements"),
        ({"axis": torch.tensor(2)}, r"a.axis 2 \(read: 0, 1\)"),
        ({"quant_scale": torch.tensor(1)}, "a.quant_scale, quantized scales or zeros"),
        ({"quant_zero": torch.tensor(1)}, "a.quant_zero, quantized scales or zeros"),
        ({"group_size": torch.tensor(0)}, r"a.shape \[16, 32\] with a.group_size 0"),
        ({"group_size": torch.tensor(17)}, r"a.shape \[16, 32\] with a.group_size 17"),
        ({"shape": torch.tensor([16])}, r"a.shape \[16\] with"),
        ({"shape": torch.tensor([-16, 32])}, r"a.shape \[-16, 32\] with"),
        ({"axis": torch.tensor(float("nan"))}, "a.axis: expected a whole number, got torch.float32"),
        ({"shape": torch.tensor([float("nan"), 32])}, r"a.shape \[nan, 32.0\] with"),
        ({"zero": None}, "missing a.zero"),
    ],
)
def test_faults_of_settings(axis, changes, message, tmp_path):
    parts, _ = quantised(16, 32, 4, 16, axis)
    with pytest.raises(CheckpointError, match=message) as caught:
        with_hqq(written(parts | changes, tmp_path))
    assert caught.value.exit_code == 3 and "model.safetensors" in caught.value.where


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"W_q": torch.zeros(7, 32, dtype=torch.uint8)},
            r"a: W_q: expected \[8, 32\] of uint8, got \[7, 32\] of uint8",
        ),
        ({"W_q": torch.zeros(8, 32, dtype=torch.int16)}, r"a: W_q: expected .* got \[8, 32\] of int16"),
        ({"scale": torch.ones(32, 1)}, r"a: scale: expected \[1, 32\] of floats, got \[32, 1\] of float32"),
        ({"zero": torch.ones(1, 32).int()}, r"a: zero: expected \[1, 32\] of floats, got \[1, 32\] of int32"),
    ],
)
def test_faults_of_floats(changes, message, tmp_path):
    parts, _ = quantised(16, 32, 4, 16, 0)
    with pytest.raises(CheckpointError, match=message):
        with_hqq(written(parts | changes, tmp_path))


def test_values_that_are_not_finite(tmp_path):
    parts, _ = quantised(16, 32, 4, 16, 0)
    parts["zero"][0, 3] = float("inf")
    with pytest.raises(CheckpointError, match="a: scale or zero has values that are not finite"):
        with_hqq(written(parts, tmp_path))[0]["a.weight"].read()
    parts, _ = quantised(16, 32, 4, 16)
    parts["scale"][3] = float("nan")
    with pytest.raises(AssertionError, match="scale has values that are not finite"):
        hqq.HQQScheme("4bit_u8", 16).weight(16, 32, Source(parts.get, AssertionError))


def test_a_config_is_not_needed(tmp_path):
    """hqq's `save_to_safetensors` writes none; of another shape than the config's a matrix is refused."""
    shutil.copytree(GOLDEN, tmp_path / "model")
    config = json.loads((GOLDEN / "config.json").read_text())
    del config["quantization_config"]
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    for folder in (GOLDEN, tmp_path / "model"):
        checkpoint = Checkpoint.open(folder)
        name = f"{Q_PROJ}.weight"
        assert checkpoint.grouped(name, name, (64, 64), LINEAR, biased=False).kind == "int8"
        assert checkpoint.read([f"{DOWN}.weight"])[f"{DOWN}.weight"].shape == (64, 96)
    tensors = load_file(GOLDEN / "model.safetensors")
    tensors[f"{Q_PROJ}.shape"] = torch.tensor([32, 128])
    (tmp_path / "model" / "model.safetensors").unlink()
    save_file(tensors, tmp_path / "model" / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"q_proj: shape is \[32, 128\], expected \[64, 64\]"):
        Checkpoint.open(tmp_path / "model").grouped(name, name, (64, 64), LINEAR, biased=False)
