"""Quark: every integer by the definition, the choice of a layer's config, and configs that are refused.

The golden models have groups and rows of integers in both orders of fields, and MXFP4; amd-quark 0.13 restores the same
floats from their files.
"""

import re
import shutil
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from kernels.linear.reference import unpacked
from models.checkpoint.fields import Fields
from models.checkpoint.headers import Checkpoint
from models.errors import CheckpointError
from models.formats.floats import has_kernels
from models.formats.grouped import GroupedLinear
from models.quantized import quantization
from models.quantized.float8 import Float8
from models.quantized.mxfp4 import Mxfp4
from models.quantized.parts import EMBEDDING, LINEAR, TRANSPOSED, Grid, Source
from models.quantized.quark import QuarkIntegers
from tools.golden import storage
from tools.golden.quantized import own_quark

GOLDEN = Path(__file__).parents[2] / "golden" / "quantized"
EXPORT = {"pack_method": "reorder"}
CPU = torch.device("cpu")


def config_of(layer, **fields):
    config = {"quant_method": "quark", "global_quant_config": layer, "export": EXPORT} | fields
    return quantization(Fields({"quantization_config": config}, "config.json"))


@given(st.data())
def test_values_are_those_of_the_definition(data):
    """Any outputs, so that words are partly filled; some rows; the packed matrix."""
    dtype, group, reorder = (
        data.draw(st.sampled_from(of)) for of in (("int4", "uint4", "int8", "uint8"), (0, 8, 16), (True, False))
    )
    outs, width = data.draw(st.integers(1, 40)), 8 * data.draw(st.integers(1, 5)) * (2 if group == 16 else 1)
    method = storage.quark(dtype, group, reorder)
    config = config_of(own_quark(dtype, group), export={"pack_method": "reorder" if reorder else "order"})
    scheme = config.scheme("any", LINEAR)
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    parts = method.store(torch.randn(outs, width, generator=generator))
    for suffix, part in scheme.parts(outs, width).items():
        assert tuple(parts[suffix].shape) in part.shapes and parts[suffix].dtype in part.dtypes
    weight, expected = scheme.weight(outs, width, Source(parts.get, AssertionError)), method.restore(parts)
    assert torch.equal(weight.floats(), expected)
    first = data.draw(st.integers(0, outs - 1))
    last = data.draw(st.integers(first + 1, outs))
    assert torch.equal(weight.floats(first, last), expected[first:last])
    if has_kernels(torch.float32, CPU):
        assert torch.equal(unpacked(GroupedLinear([weight], dtype=torch.float32, device=CPU).packed), expected)


@pytest.mark.parametrize(("dtype", "zero"), [("int4", -3), ("uint4", 5), ("int8", -100), ("uint8", 200)])
@pytest.mark.parametrize("reorder", [True, False])
def test_one_scale_of_a_matrix(dtype, zero, reorder):
    """The zero point is then a number, not fields of a word."""
    stored = storage.quark(dtype, 0, reorder).store(torch.randn(5, 16, generator=torch.Generator().manual_seed(1)))
    bits = int(dtype[-1])
    kind = torch.int32 if bits == 4 else stored["weight"].dtype
    parts = {"weight": stored["weight"], "weight_scale": torch.tensor(0.37),
             "weight_zero_point": torch.tensor(zero).to(kind)}  # fmt: skip
    layer = own_quark(dtype)
    layer["weight"]["qscheme"] = "per_tensor"
    scheme = config_of(layer, export={"pack_method": "reorder" if reorder else "order"}).scheme("any", LINEAR)
    for suffix, part in scheme.parts(5, 16).items():
        assert tuple(parts[suffix].shape) in part.shapes and parts[suffix].dtype in part.dtypes
    plain = storage.quark(dtype, 0, reorder).restore(
        {"weight": stored["weight"], "weight_scale": torch.ones(5), "weight_zero_point": torch.zeros(1, dtype=kind)}
    )
    found = scheme.weight(5, 16, Source(parts.get, AssertionError))
    assert torch.equal(found.floats(), (plain - zero) * parts["weight_scale"])


def test_layers_are_chosen_as_the_package_does():
    """A name, then the first pattern that matches, then the class, then the config of all."""
    layers = {"*q_proj": own_quark("int8"), "*.0.*": own_quark("uint4"), "a.0.k_proj": {"weight": None}}
    config = config_of(own_quark("int4"), layer_quant_config=layers)

    def kind(name):
        scheme = config.scheme(name, LINEAR)
        return scheme and (scheme.bits, scheme.signed)

    assert kind("a.0.q_proj") == (8, True) and kind("a.0.v_proj") == (4, False) and kind("a.1.v_proj") == (4, True)
    assert kind("a.0.k_proj") is None
    assert config.scheme("a.0.v_proj", TRANSPOSED) is None and config.scheme("a", EMBEDDING) is None
    types = {"Linear": own_quark("uint8"), "Conv2d": own_quark("int4")}
    config = config_of(own_quark("int4"), layer_type_quant_config=types)
    assert kind("a") == (8, False)


def layer(**weight):
    return {"weight": own_quark("fp8_e4m3")["weight"] | weight}


def test_floats():
    tensor, channel, block, small = (
        config_of(of).scheme("any", LINEAR)
        for of in (
            layer(qscheme="per_tensor"), layer(), layer(qscheme="per_block", block_size=[128, 64]),
            layer(dtype="fp4", qscheme="per_group", group_size=32, scale_format="e8m0"),
        )
    )  # fmt: skip
    assert [x.grid for x in (tensor, channel, block)] == [Grid(None, None), Grid(1, None), Grid(128, 64)]
    assert all(isinstance(x, Float8) and x.scale == "weight_scale" for x in (tensor, channel, block))
    assert isinstance(small, Mxfp4)


def test_caches_of_floats_are_not_rounded(tmp_path):
    """Outputs of keys and values may have scales; those of other layers are refused."""
    rounded = own_quark("uint4") | {"output_tensors": {"dtype": "fp8_e4m3", "qscheme": "per_tensor"}}
    assert isinstance(config_of({}, layer_quant_config={"*k_proj": rounded}).scheme("a.k_proj", LINEAR), QuarkIntegers)
    with pytest.raises(CheckpointError, match=r"layer_quant_config\.\*q_proj\.output_tensors other than fp8 of k_proj"):
        config_of({}, layer_quant_config={"*q_proj": rounded})
    shutil.copytree(GOLDEN / "quark_order", tmp_path / "model")
    tensors = {name: t.clone() for name, t in load_file(tmp_path / "model" / "model.safetensors").items()}
    (tmp_path / "model" / "model.safetensors").unlink()
    scales = {f"model.layers.0.self_attn.{name}_proj.output_scale": torch.tensor(0.1) for name in "kv"}
    save_file(tensors | scales, tmp_path / "model" / "model.safetensors")
    name, shape = "model.layers.0.self_attn.k_proj.weight", (32, 64)
    found, expected = (
        Checkpoint.open(folder).grouped(name, name, shape, LINEAR, biased=False).floats()
        for folder in (tmp_path / "model", GOLDEN / "quark_order")
    )
    assert torch.equal(found, expected)


STATIC, ASYMMETRIC = {"dtype": "int8", "is_dynamic": False}, {"dtype": "int8", "is_dynamic": True, "symmetric": False}
REFUSED = {
    "global_quant_config.weight.dtype 'int3'": layer(dtype="int3"),
    "dtype 'fp6_e2m3' with scale_format 'e8m0'": layer(dtype="fp6_e2m3", scale_format="e8m0"),
    "dtype 'fp4' with scale_format 'float32'": layer(dtype="fp4", scale_format="float32", qscheme="per_group"),
    "qscheme 'per_channel' of int8 along ch_axis 1": layer(dtype="int8", ch_axis=1),
    "qscheme 'per_group' of int8 along ch_axis 0": layer(dtype="int8", qscheme="per_group", group_size=8),
    "qscheme 'per_group' of fp8_e4m3": layer(qscheme="per_group", ch_axis=1, group_size=8),
    "weight that is dynamic": layer(is_dynamic=True),
    "zero points of float32": layer(zero_point_type="float32"),
    "weight of several stages": {"weight": [layer()["weight"], layer()["weight"]]},
    "global_quant_config.bias": layer() | {"bias": {"dtype": "int8"}},
    "input_tensors of integers, static": layer(dtype="int8") | {"input_tensors": STATIC},
    "input_tensors of integers, static or asymmetric": layer(dtype="int8") | {"input_tensors": ASYMMETRIC},
    "output_tensors": layer() | {"output_tensors": {"dtype": "int8"}},
}


@pytest.mark.parametrize("named", REFUSED)
def test_what_is_not_read_is_refused_by_name(named):
    with pytest.raises(CheckpointError, match=re.escape(named)) as caught:
        config_of(REFUSED[named])
    assert caught.value.where == "config.json" and "docs/quantised.md" in caught.value.remedy


def test_configs_before_version_1():
    """They do not tell how they were exported; groups were stored in another way."""
    assert config_of(layer(), export=None).scheme("any", LINEAR)
    with pytest.raises(CheckpointError, match=r"qscheme 'per_group' of int4 .*without export"):
        config_of(own_quark("int4", 8), export=None)
    with pytest.raises(CheckpointError, match="softmax_quant_spec"):
        config_of(layer(), softmax_quant_spec={"dtype": "int8"})
    with pytest.raises(CheckpointError, match=r"export.pack_method: expected one of order, reorder"):
        config_of(layer(), export={"pack_method": "sorted"})


def test_faults_of_tensors(tmp_path):
    name = "model.layers.0.mlp.down_proj"
    parts = {f"{name}.weight": torch.zeros(64, 11, dtype=torch.int32), f"{name}.weight_scale": None}
    tensors = load_file(GOLDEN / "quark_order" / "model.safetensors") | parts
    shutil.copytree(GOLDEN / "quark_order", tmp_path / "model")
    (tmp_path / "model" / "model.safetensors").unlink()
    save_file({name: t for name, t in tensors.items() if t is not None}, tmp_path / "model" / "model.safetensors")
    from models.families import FAMILIES

    checkpoint = Checkpoint.open(tmp_path / "model")
    family = FAMILIES[checkpoint.architecture]
    c = family.read(checkpoint.fields)
    with pytest.raises(CheckpointError, match=r"(?s)missing .*down_proj.weight_scale.*expected \[64, 12\] of int32"):
        checkpoint.check(family.names.tensors(c), kinds=family.names.kinds(c))
