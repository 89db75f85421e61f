"""Checkpoints that are quantised already: values bit for bit, configs, and every fault an error that names it.

The golden models of `tests/test_golden.py` compare logits and searches with transformers.
"""

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from engine import Engine
from engine.errors import UsageError
from engine.load.loading import pick_dtype, pick_quant
from kernels.linear import Steps
from kernels.linear.reference import unpacked
from models import FAMILIES
from models.checkpoint.fields import Fields
from models.checkpoint.headers import Checkpoint
from models.errors import CheckpointError
from models.formats.floats import has_kernels
from models.formats.grouped import GroupedLinear, GroupedRows, GroupedWeight
from models.quantized import mlx, quantization
from models.quantized.parts import EMBEDDING, LINEAR, TRANSPOSED, Grid, Source
from tests.models.copies import changed as golden_copy
from tools.golden import quantized as recipes
from tools.golden import storage

GOLDEN = Path(__file__).parents[1] / "golden" / "quantized"
CPU = torch.device("cpu")
Q_PROJ = "model.layers.0.self_attn.q_proj"


def copied(tmp_path, variant, config=None, **changes):
    """The folder of a golden variant with other tensors (None: without them) and fields of `quantization_config`."""
    folder = tmp_path / variant
    shutil.copytree(GOLDEN / variant, folder)
    tensors = {name: tensor.clone() for name, tensor in load_file(folder / "model.safetensors").items()}
    tensors |= changes
    (folder / "model.safetensors").unlink()
    save_file({name: t.contiguous() for name, t in tensors.items() if t is not None}, folder / "model.safetensors")
    whole = json.loads((folder / "config.json").read_text())
    whole["quantization_config"] |= config or {}
    (folder / "config.json").write_text(json.dumps(whole))
    return folder


def weights(folder):
    """The quantised weights of a folder by name, as a model asks for them."""
    checkpoint = Checkpoint.open(folder)
    family = FAMILIES[checkpoint.architecture]
    c, names = family.read(checkpoint.fields), family.names
    shapes, kinds = names.tensors(c), names.kinds(c)
    tied = {"lm_head.weight": f"{names.embedding}.weight"} if c.tied else {}
    stored = checkpoint.check(shapes, ignore=family.ignored, tied=tied, base=family.base, kinds=kinds)
    found = {}
    for name, kind in kinds.items():
        biased = name.replace(".weight", ".bias") in shapes
        weight = checkpoint.grouped(name, stored.get(name, name), shapes[name], kind, biased=biased)
        if weight is not None:
            found[name] = weight.floats()
    return found


def refused(folder, message):
    with pytest.raises(CheckpointError, match=message) as caught:
        weights(folder)
    assert caught.value.exit_code == 3 and str(folder) in caught.value.where and caught.value.remedy
    return caught.value


def stored(variant, suffix, module=Q_PROJ):
    return load_file(GOLDEN / variant / "model.safetensors")[f"{module}.{suffix}"]


def changed(tensor, *place, value):
    tensor = tensor.clone()
    tensor[place] = value
    return tensor


def config_of(**fields):
    return quantization(Fields({"quantization_config": fields}, "config.json"))


@given(st.data())
@settings(max_examples=60)
def test_values_are_those_of_the_definition(data):
    """Any shape: groups, blocks and words that outputs or columns do not fill; any piece of the rows."""
    methods = {
        "gptq": (recipes.gptq(4, 16, False, False), {"quant_method": "gptq", "bits": 4, "group_size": 16}),
        "gptq8": (recipes.gptq(8, 12, True, True, ordered=True), {"quant_method": "gptq", "bits": 8, "group_size": 12}),
        "gptq2": (recipes.gptq(2, 16, False, True), {"quant_method": "gptq", "bits": 2, "group_size": 16}),
        "gptq3": (recipes.gptq(3, 8, False, False, ordered=True), {"quant_method": "gptq", "bits": 3, "group_size": 8}),
        "awq": (recipes.awq(16), {"quant_method": "awq", "bits": 4, "group_size": 16}),
        "fp8": (recipes.float8((24, 16)), {"quant_method": "fp8", "weight_block_size": [24, 16]}),
    }
    name = data.draw(st.sampled_from(sorted(methods)))
    method, config = methods[name]
    config = config | ({"checkpoint_format": "gptq_v2"} if name in ("gptq", "gptq3") else {})
    outs, width = data.draw(st.integers(1, 70)), data.draw(st.integers(1, 90))
    if name == "awq":
        outs, width = -(-outs // 8) * 8, -(-width // 16) * 16  # as the package demands
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    parts = method.store(torch.randn(outs, width, generator=generator))
    scheme = config_of(**config).scheme("any", LINEAR)
    for suffix, part in scheme.parts(outs, width).items():
        assert part.optional or (tuple(parts[suffix].shape) in part.shapes and parts[suffix].dtype in part.dtypes)
    weight = scheme.weight(outs, width, Source(parts.get, AssertionError))
    expected = method.restore(parts)
    assert torch.equal(weight.floats(), expected)
    first = data.draw(st.integers(0, outs - 1))
    last = data.draw(st.integers(first + 1, outs))
    assert torch.equal(weight.floats(first, last), expected[first:last])


MLX_MODES = {"mxfp4": (4, 32), "nvfp4": (4, 16), "mxfp8": (8, 32)}


@pytest.mark.parametrize("mode", [*mlx.KINDS, *MLX_MODES])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_every_code_of_mlx(mode, dtype):
    """Words drawn at random hold all codes at all places; values, whole and of some rows, and the packed matrix's."""
    bits, group = MLX_MODES.get(mode, (mode, 64))
    generator = torch.Generator().manual_seed(bits)
    octets = torch.randint(0, 256, (24, 192 * bits // 8), generator=generator, dtype=torch.uint8)
    if mode == "mxfp8":
        octets[octets & 127 == 127] = 0  # no numbers
    parts = {"weight": octets.view(torch.uint32)}
    config = {"group_size": group, "bits": bits}
    if mode in MLX_MODES:
        config["mode"], method = mode, recipes.mlx_floats(mode)
        parts["scales"] = torch.randint(1, 100 if mode == "nvfp4" else 255, (24, 192 // group), generator=generator)
        parts["scales"] = parts["scales"].to(torch.uint8)
    else:
        method = recipes.mlx(bits, group)
        for name, size in (("scales", 1 / 2**bits), ("biases", 1)):
            parts[name] = (torch.randn(24, 3, generator=generator) * size).to(dtype)
    scheme = config_of(quant_method="mlx", **config).scheme("any", LINEAR)
    for suffix, part in scheme.parts(24, 192).items():
        assert tuple(parts[suffix].shape) in part.shapes and parts[suffix].dtype in part.dtypes
    weight, expected = scheme.weight(24, 192, Source(parts.get, AssertionError)), method.restore(parts)
    assert torch.equal(weight.floats(), expected) and torch.equal(weight.floats(5, 17), expected[5:17])
    if has_kernels(torch.float32, CPU):
        packed = GroupedLinear([weight], dtype=torch.float32, device=CPU).packed
        assert torch.equal(unpacked(packed), expected)
        kept = (packed.panels, packed.groups.scale, packed.groups.least)
        assert scheme.form(192).packed_bytes(24, 192) == sum(x.nbytes for x in kept if x is not None)


@pytest.mark.parametrize(("strategy", "shape"), [("channel", (6, 1)), ("tensor", (1,)), ("group", (6, 3))])
@pytest.mark.parametrize("layout", ["int-quantized", "naive-quantized", "pack-quantized"])
def test_integers_with_zero_points(layout, strategy, shape):
    """Every layout of compressed-tensors beside those of the golden models: q, zeros and scales of any sign."""
    if (layout, strategy) == ("pack-quantized", "tensor"):
        shape = ()
    args = {"num_bits": 8, "symmetric": False, "strategy": strategy, "group_size": 8 if strategy == "group" else None}
    groups = {"g": {"targets": ["Linear"], "weights": args}}
    config = config_of(quant_method="compressed-tensors", format=layout, config_groups=groups)
    generator = torch.Generator().manual_seed(1)
    q = torch.randint(-128, 128, (6, 20), generator=generator, dtype=torch.int8)
    zero = torch.randint(-128, 128, shape, generator=generator, dtype=torch.int8)
    parts = {"weight_scale": torch.randn(shape, generator=generator), "weight_zero_point": zero, "weight": q}
    if layout == "pack-quantized":
        parts["weight_packed"] = (q ^ -128).view(torch.int32)  # in this machine's order of bytes: the lowest first
        if strategy != "tensor":
            columns = torch.nn.functional.pad(zero ^ -128, (0, 0, 0, 2))
            parts["weight_zero_point"] = columns.T.clone(memory_format=torch.contiguous_format).view(torch.int32).T
    scheme = config.scheme("any", LINEAR)
    for suffix, part in scheme.parts(6, 20).items():
        assert part.optional or (tuple(parts[suffix].shape) in part.shapes and parts[suffix].dtype in part.dtypes)
    found = scheme.weight(6, 20, Source(parts.get, AssertionError)).floats()
    spread = [x.expand(6, -1).repeat_interleave(8 if strategy == "group" else 20, 1)[:, :20] if x.dim() else x
              for x in (zero.float(), parts["weight_scale"])]  # fmt: skip
    assert torch.equal(found, (q.float() - spread[0]) * spread[1])


@given(st.integers(1, 8), st.integers(1, 9), st.sampled_from([(40, 8), (64, 32), (96, 96), (50, 50)]), st.booleans())
def test_integers_of_any_bits(bits, outs, sizes, zeros):
    """Bit by bit, of codes and zeros that cross words; the packed matrix."""
    width, group = sizes
    args = {"num_bits": bits, "symmetric": not zeros, "strategy": "group", "group_size": group}
    groups = {"g": {"targets": ["Linear"], "weights": args}}
    config = config_of(quant_method="compressed-tensors", format="pack-quantized", config_groups=groups)
    generator = torch.Generator().manual_seed(outs * width + bits)
    q = torch.randint(0, 2**bits, (outs, width), generator=generator)
    zero = torch.randint(0, 2**bits, (outs, -(-width // group)), generator=generator)
    scale, scheme = torch.rand(zero.shape, generator=generator), config.scheme("any", LINEAR)
    parts = {"weight_packed": words(q, bits), "weight_scale": scale, "weight_zero_point": words(zero.T, bits).T}
    for suffix, part in scheme.parts(outs, width).items():
        assert part.optional or (tuple(parts[suffix].shape) in part.shapes and parts[suffix].dtype in part.dtypes)
    weight = scheme.weight(outs, width, Source(parts.get, AssertionError))
    zero = zero if zeros else torch.full_like(zero, 2 ** (bits - 1))
    spread = [x.repeat_interleave(group, 1)[:, :width] for x in (zero, scale)]
    assert torch.equal(weight.floats(), (q - spread[0]) * spread[1])
    if has_kernels(torch.float32, CPU):
        packed = GroupedLinear([weight], dtype=torch.float32, device=CPU).packed
        assert torch.equal(unpacked(packed), weight.floats())


def words(rows, bits):
    """Rows as streams of bits in words of 32, lowest first."""
    stream = (rows.unsqueeze(-1) >> torch.arange(bits) & 1).flatten(1)
    stream = torch.nn.functional.pad(stream, (0, -stream.shape[1] % 32)).unflatten(1, (-1, 32))
    return storage.to_int32((stream << torch.arange(32)).sum(-1))


def test_an_embedding_needs_scales_for_each_row(tmp_path):
    """It is read row by row: one scale for all would be that of its first row."""
    whole = json.loads((GOLDEN / "pack_bits" / "config.json").read_text())["quantization_config"]
    group = next(x for x in whole["config_groups"].values() if x["targets"] == ["Embedding"])
    group["weights"] |= {"strategy": "tensor", "group_size": None}
    folder = copied(tmp_path, "pack_bits", whole, **{"model.embed_tokens.weight_scale": torch.ones(1)})
    with pytest.raises(CheckpointError, match=r"an embedding is read row by row, expected 104 rows, got \[1\]"):
        Engine.load(folder, device="cpu", kv_memory="1M")


def test_an_embedding_with_packed_zeros_is_refused_for_them(tmp_path):
    """Several rows share a word of zeros."""
    whole = json.loads((GOLDEN / "pack_bits" / "config.json").read_text())["quantization_config"]
    group = next(x for x in whole["config_groups"].values() if x["targets"] == ["Embedding"])
    group["weights"] |= {"symmetric": False}
    zeros = {"model.embed_tokens.weight_zero_point": torch.zeros(13, 4, dtype=torch.int32)}
    with pytest.raises(CheckpointError, match=r"weight_zero_point: .*expected 104 rows, got \[13, 4\]") as refused:
        Engine.load(copied(tmp_path, "pack_bits", whole, **zeros), device="cpu", kv_memory="1M")
    assert "no packed zeros" in refused.value.remedy


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"input_scale": torch.tensor([-0.1])}, r"q_proj: input_scale is -0.1.*, expected a positive number"),
        ({"output_scale": torch.tensor([0.0])}, r"q_proj: output_scale is 0.0, expected a positive number"),
        ({"input_zero_point": torch.tensor([3], dtype=torch.int8)}, "and no zero point"),
        ({"output_scale": None}, r"missing .*q_proj\.output_scale"),
        ({"input_scale": torch.ones(2)}, r"input_scale .*expected \[\] or \[1\] of floats, got \[2\]"),
    ],
)
def test_static_steps_that_are_none(changes, message, tmp_path):
    refused(copied(tmp_path, "static", **{f"{Q_PROJ}.{name}": tensor for name, tensor in changes.items()}), message)


def test_zero_points_of_zero_are_none(tmp_path):
    zeros = {f"{Q_PROJ}.{name}_zero_point": torch.zeros(1, dtype=torch.int8) for name in ("input", "output")}
    expected = weights(GOLDEN / "static")
    assert all(weight.equal(expected[name]) for name, weight in weights(copied(tmp_path, "static", **zeros)).items())


@pytest.mark.parametrize("activations", [{"num_bits": 8, "dynamic": True}, {"num_bits": 8, "type": "float"}])
def test_outputs_that_are_not_rounded_to_static_steps(activations):
    config = pack()
    config["config_groups"]["g"]["output_activations"] = activations
    with pytest.raises(CheckpointError, match="output_activations other than int of 8 bits, symmetric"):
        config_of(quant_method="compressed-tensors", format="pack-quantized", **config)


def test_rounded_outputs_are_not_divided_among_processes():
    checkpoint = Checkpoint.open(GOLDEN / "static")
    weight = checkpoint.grouped(f"{Q_PROJ}.weight", f"{Q_PROJ}.weight", (64, 64), LINEAR, biased=False)
    assert weight.part(range(8, 24), None).steps == weight.steps and min(weight.steps) > 0
    with pytest.raises(ValueError, match="its outputs are rounded"):
        weight.part(None, range(32))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_steps_of_results_come_after_the_bias(dtype):
    eye = GroupedRows(torch.eye(16).byte() + 8, torch.ones(16, 1))
    weight = GroupedWeight("int4", (16, 16), 16, lambda first, last: eye, steps=Steps(after=1.0))
    layer = GroupedLinear([weight], [torch.full((16,), 0.4)], dtype=dtype, device=CPU)
    assert layer(torch.full((3, 16), 0.4, dtype=dtype)).eq(1).all()


def test_processes_have_whole_steps_of_a_row():
    """Where a scale belongs to a whole row; rows in groups are divided between groups."""
    config = pack(num_bits=2, strategy="channel", group_size=None)
    scheme = config_of(quant_method="compressed-tensors", format="pack-quantized", **config).scheme("any", LINEAR)
    q = torch.randint(0, 4, (4, 96))
    parts = {"weight_packed": words(q, 2), "weight_scale": torch.ones(4, 1)}
    weight = scheme.weight(4, 96, Source(parts.get, AssertionError))
    assert weight.part(None, range(48, 96)).floats().equal(q[:, 48:] - 2.0)
    with pytest.raises(ValueError, match="24 inputs are no whole steps of 16 codes"):
        weight.part(None, range(24))


FAULTS = {  # variant, tensors, message
    "no scales": ("pack4_group", {"weight_scale": None}, r"missing .*q_proj\.weight_scale"),
    "no words": ("gptq_v1", {"qweight": None}, r"missing .*q_proj\.qweight"),
    "no zeros": ("pack4_zeros", {"weight_zero_point": None}, r"missing .*q_proj\.weight_zero_point"),
    "no order": ("pack4_g_idx", {"weight_g_idx": None}, r"missing .*q_proj\.weight_g_idx"),
    "groups": ("pack4_group", {"weight_scale": lambda t: t[:, :-1]}, r"weight_scale .*expected \[64, 4\] of floats"),
    "groups, awq": ("awq", {"scales": lambda t: t[:1]}, r"scales .*expected \[2, 64\] of floats, got \[1, 64\]"),
    "blocks": ("fp8_block", {"weight_scale_inv": lambda t: t[:, :1]},
               r"expected \[2, 2\] of floats or uint8 or float8_e8m0fnu, got \[2, 1\]"),
    "words": ("gptq_v1", {"qweight": lambda t: t[:-1]}, r"qweight .*expected \[8, 64\] of int32, got \[7, 64\]"),
    "transposed": ("awq", {"qweight": lambda t: t.T}, r"qweight .*expected \[64, 8\] of int32, got \[8, 64\]"),
    "dtype": ("gptq_v1", {"qweight": lambda t: t.long()}, "qweight .*of int32, got .* of int64"),
    "scales, dtype": ("awq", {"scales": lambda t: t.int()}, "scales .*of floats, got .* of int32"),
    "zeros, dtype": ("gptq_v1", {"qzeros": lambda t: t.float()}, "qzeros .*of int32, got .* of float32"),
    "int8 as uint8": ("int8_token", {"weight": lambda t: t.view(torch.uint8)}, "weight .*of int8, got .* of uint8"),
    "e5m2": ("fp8_block", {"weight": lambda t: t.to(torch.float8_e5m2)}, "float8_e4m3fn, got .* of float8_e5m2"),
    "shape": ("pack4_group", {"weight_shape": lambda t: t * 2**40}, "q_proj: weight_shape is .*, expected .64, 64."),
    "g_idx beyond": ("gptq_v1", {"g_idx": lambda t: changed(t, 3, value=9)}, "q_proj: g_idx: groups from 0 to 9"),
    "g_idx below": ("gptq_v1", {"g_idx": lambda t: changed(t, 3, value=-1)}, "groups from -1 to 3, expected 0 to 3"),
    "g_idx uneven": ("pack4_g_idx", {"weight_g_idx": lambda t: t * 0}, "groups of unequal sizes, expected 16"),
    "NaN": ("fp8_block", {"weight": lambda t: changed(t.view(torch.uint8), 5, 6, value=255).view(t.dtype)}, "not numb"),
    "scale": ("awq", {"scales": lambda t: changed(t, 1, 2, value=float("inf"))}, "scales has values that are not fin"),
    "bias": ("gptq_v1", {"bias": lambda t: t + 1}, "it has a bias, and the model has none"),
    "mlx, no minimums": ("mlx", {"biases": None}, r"missing .*q_proj\.biases"),
    "mlx, bits": ("mlx", {"weight": lambda t: t[:, :2]}, r"weight .*expected \[64, 4\] of uint32, got \[64, 2\]"),
    "mlx, words": ("mlx", {"weight": lambda t: t.view(torch.int32)}, "of uint32, got .* of int32"),
    "mlx, groups": ("mlx", {"scales": lambda t: t[:, :1]}, r"scales .*expected \[64, 2\] of floats, got \[64, 1\]"),
    "mlx, scale": ("mlx", {"scales": lambda t: changed(t, 3, 1, value=float("nan"))}, "scales has values that are not"),
    "mlx, minimum": ("mlx", {"biases": lambda t: changed(t, 3, 1, value=float("inf"))}, "biases has values that are n"),
    "mlx, exponent": ("mlx_floats", {"scales": lambda t: changed(t, 3, 1, value=255)}, "scales has values that are no"),
    "mlx, mode": ("mlx_floats", {"biases": lambda _: torch.ones(64, 2)}, r"unknown .*q_proj\.biases"),
    "unknown": ("awq", {"weight_scale": lambda _: torch.ones(1)}, r"unknown .*q_proj\.weight_scale"),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_faults(tmp_path, fault):
    variant, changes, message = FAULTS[fault]
    tensors = load_file(GOLDEN / variant / "model.safetensors")
    made = {}
    for suffix, change in changes.items():
        name = f"{Q_PROJ}.{suffix}"
        made[name] = change(tensors.get(name)) if change else None
    refused(copied(tmp_path, variant, **made), message)


@pytest.mark.parametrize(
    ("variant", "module", "targets"),
    [
        ("llama/tied", "model.embed_tokens", ["Embedding"]),
        ("llama/tied", "model.embed_tokens", ["re:.*embed_tokens"]),
        ("opt/base_prefix", "decoder.layers.1.fc1", ["decoder.layers.1.fc1"]),
        ("published/internlm2", "output", ["output"]),
        ("modernbert/biases", "decoder", ["re:decoder"]),
    ],
)
def test_names_are_those_of_the_file(variant, module, targets, tmp_path):
    """A tied head is stored as the embedding is, and a file of a base model has shorter names."""
    weights = {"num_bits": 8, "type": "int", "strategy": "channel"}
    groups = {
        "one": {"targets": targets, "weights": weights, "format": "int-quantized"},
        "others": {"targets": ["Linear"], "weights": weights | {"num_bits": 4}, "format": "pack-quantized"},
    }
    config = {"quant_method": "compressed-tensors", "config_groups": groups, "ignore": ["lm_head"]}
    weight = load_file(GOLDEN.parent / variant / "model.safetensors")[f"{module}.weight"].float()
    scale = weight.abs().amax(1, keepdim=True) / 127
    codes = (weight / scale).round()
    coded = {f"{module}.weight": codes.to(torch.int8), f"{module}.weight_scale": scale}
    one = golden_copy(tmp_path / "one", variant, {"quantization_config": config}, lambda x: x | coded)
    other = golden_copy(tmp_path / "other", variant, {}, lambda x: x | {f"{module}.weight": codes * scale})
    found, want = (
        Engine.load(folder, dtype="float32", kv_memory="4M", threads=1).logits([5, 9, 7]) for folder in (one, other)
    )
    assert (found - want).norm() < 1e-5 * want.norm()


def test_codes_are_not_read_as_floats_where_a_head_is_tied(tmp_path):
    """This method has no embeddings, so the head's form says nothing about them."""

    def coded(tensors):
        codes = tensors["model.embed_tokens.weight"].to(torch.float8_e4m3fn)
        return tensors | {"model.embed_tokens.weight": codes, "model.embed_tokens.weight_scale_inv": torch.ones(1, 1)}

    config = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
    refused(golden_copy(tmp_path, "llama/tied", config, coded), r"embed_tokens\.weight .*of floats, got .*float8_e4")


def test_groups_that_no_kernel_reads_are_no_damage(tmp_path):
    stored = load_file(GOLDEN / "pack4_group" / "model.safetensors")
    scales = {name: x.repeat_interleave(4, 1) for name, x in stored.items() if name.endswith(".weight_scale")}
    error = refused(copied(tmp_path, "pack4_group", pack(group_size=4), **scales), "groups of 4 elements are not")
    assert "docs/quantised.md" in error.remedy


def test_groups_in_any_order_need_to_be_named(tmp_path):
    """With `desc_act` the file must say which group a column is of, unless there is one alone."""
    order = {f"{Q_PROJ}.g_idx": None}
    refused(
        copied(tmp_path, "gptq_v1", {"desc_act": True}, **order), rf"1 tensors at fault.*\s.*missing {Q_PROJ}.g_idx"
    )
    one = config_of(quant_method="gptq", bits=4, group_size=-1, desc_act=True).scheme("any", LINEAR)
    assert one.parts(64, 64)["g_idx"].optional


def test_scales_of_caches_are_not_used(tmp_path):
    """Keys and values are not rounded by the checkpoint's scales, wherever these lie."""
    names = ("k_scale", "v_scale", "k_proj.k_scale", "v_proj.v_scale", "kv_scale")
    scales = {f"model.layers.0.self_attn.{name}": torch.ones(1) for name in names}
    folder = copied(tmp_path, "float8_tensor", {"kv_cache_scheme": {"num_bits": 8, "type": "float"}}, **scales)
    expected = weights(GOLDEN / "float8_tensor")
    assert all(torch.equal(weight, expected[name]) for name, weight in weights(folder).items())
    refused(copied(tmp_path / "b", "awq", **{"model.layers.0.mlp.k_scale": torch.ones(1)}), "unknown .*mlp.k_scale")


def test_faults_of_headers_are_found_before_data_is_read(tmp_path, monkeypatch):
    folder = copied(tmp_path, "awq", **{f"{Q_PROJ}.qzeros": torch.zeros(3, 8, dtype=torch.int32)})
    monkeypatch.setattr(Checkpoint, "read", None)
    refused(folder, "qzeros")


def pack(**weights):
    return {"config_groups": {"g": {"targets": ["Linear"], "weights": {"num_bits": 4, "group_size": 16} | weights}}}


MLX = {"quant_method": "mlx", "group_size": 64, "bits": 4}
UNREAD = {
    "bitsandbytes with neither or both": {"quant_method": "bitsandbytes", "load_in_4bit": False},
    "quanto without quanto_qmap.json": {"quant_method": "quanto"},
    "nvfp4": {"quant_method": "nvfp4"},
    "eetq": {"quant_method": "eetq"},
    "''": {"bits": 4},
    "nvfp4-pack-quantized": {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"} | pack(),
    "marlin-24": {"quant_method": "compressed-tensors", "format": "marlin-24"} | pack(),
    "sparse-24-bitmask": {"quant_method": "compressed-tensors", "sparsity_config": {"format": "sparse-24-bitmask"}},
    "transform_config": {"quant_method": "compressed-tensors", "transform_config": {"config_groups": {}}},
    "rounds activations of ['re:.*self_attn$'] alone": {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "config_groups": {"g": {"targets": ["re:.*self_attn$"], "input_activations": {"num_bits": 8, "type": "float"}}},
    },
    "9 bits": {"quant_method": "compressed-tensors", "format": "pack-quantized"} | pack(num_bits=9),
    "float": {"quant_method": "compressed-tensors", "format": "pack-quantized"} | pack(type="float"),
    "tensor_group": {"quant_method": "compressed-tensors", "format": "pack-quantized"} | pack(strategy="tensor_group"),
    "gptq with 3 bits and sym false in the format 'gptq'": {"quant_method": "gptq", "bits": 3, "sym": False},
    "with 5 bits": {"quant_method": "gptq", "bits": 4, "group_size": 128, "dynamic": {".*": {"bits": 5}}},
    "marlin": {"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"},
    "the format 'marlin'": {"quant_method": "gptq", "bits": 4, "is_marlin_format": True},
    "gptq_p": {"quant_method": "gptq", "bits": 4, "format": "gptq_p"},
    "int64": {"quant_method": "gptq", "bits": 4, "pack_dtype": "int64"},
    "gptq with rotation 'hadamard'": {"quant_method": "gptq", "bits": 4, "rotation": "hadamard"},
    "gemv": {"quant_method": "awq", "bits": 4, "checkpoint_format": "gemv"},
    "llm-awq": {"quant_method": "awq", "bits": 4, "version": "gemm", "backend": "llm-awq"},
    "gptq with 5 bits": {"quant_method": "auto-round", "bits": 5, "group_size": 128},
    "auto-round with 3 bits": {"quant_method": "auto-round", "bits": 3, "packing_format": "auto_round"},
    "awq of version 'gemm' with 8": {"quant_method": "auto-round", "bits": 8, "packing_format": "auto_round:auto_awq"},
    "auto_round:llm_compressor": {
        "quant_method": "auto-round",
        "bits": 4,
        "packing_format": "auto_round:llm_compressor",
    },
    "mx_fp": {"quant_method": "auto-round", "bits": 4, "data_type": "mx_fp"},
    "activations rounded": {"quant_method": "auto-round", "bits": 4, "act_bits": 8},
    "rotation_config": {"quant_method": "auto-round", "bits": 4, "rotation_config": {"a": 1}},
    "MIXED_PRECISION": {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION"},
    "fp8 of kind 'float8_e5m2'": {
        "quant_method": "fp8",
        "weight_scale_semantics": "inverse",
        "format": "float8_e5m2",
    },
    "blocks of [128, 128]": {"quant_method": "mxfp8", "weight_block_size": [128, 128]},
    "metal: bits 3": {"quant_method": "metal", "bits": 3},
    "mlx: bits 7 of the mode affine": MLX | {"bits": 7},
    "mlx: group_size 16 of the mode affine": MLX | {"group_size": 16},
    "mlx: group_size 64 of the mode mxfp4": MLX | {"mode": "mxfp4"},
    "mlx: mode 'int4'": MLX | {"mode": "int4"},
    "mlx: model.layers.0.mlp.gate.bits 9": MLX | {"model.layers.0.mlp.gate": {"bits": 9}},
    "GEMV": {"quant_method": "awq", "bits": 4, "version": "GEMV"},
    "8 bits": {"quant_method": "awq", "bits": 8, "version": "gemm"},
    "e5m2": {"quant_method": "fp8", "fmt": "e5m2"},
    "use_rms_norm": {"quant_method": "bitnet", "use_rms_norm": True},
}


@pytest.mark.parametrize("named", UNREAD)
def test_what_is_not_read_is_refused_by_name(named):
    with pytest.raises(CheckpointError, match=re.escape(named)) as caught:
        config_of(**UNREAD[named])
    assert caught.value.where == "config.json" and "docs/quantised.md" in caught.value.remedy


@pytest.mark.parametrize(
    "inputs",
    [
        {"num_bits": 8, "type": "int", "strategy": "tensor", "dynamic": False, "symmetric": False},
        {"num_bits": 4, "type": "int", "strategy": "tensor", "dynamic": False},
        {"num_bits": 8, "type": "int", "strategy": "tensor", "dynamic": True},
        {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True, "symmetric": False},
        {"num_bits": 4, "type": "int", "strategy": "token", "dynamic": True},
        {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False},
        {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 16, "dynamic": True},
    ],
)
def test_activations_that_are_not_read(inputs):
    config = pack(num_bits=8, strategy="channel", group_size=None)
    config["config_groups"]["g"]["input_activations"] = inputs
    with pytest.raises(CheckpointError, match="input_activations other than"):
        config_of(quant_method="compressed-tensors", format="int-quantized", **config)


@pytest.mark.parametrize("bits", range(1, 9))
@pytest.mark.parametrize("layout", ["int-quantized", "naive-quantized"])
def test_integers_of_few_bits_in_bytes(layout, bits):
    """The package stores weights of all its presets with rounded activations, W2A8 to W8A8, like this."""
    config = config_of(quant_method="compressed-tensors", format=layout, **pack(num_bits=bits))
    q = torch.arange(64).view(2, 32) % 2**bits - 2 ** (bits - 1)
    scale = torch.tensor([[0.5, 2], [0.25, 3]])
    parts = {"weight": q.to(torch.int8), "weight_scale": scale}
    found = config.scheme(Q_PROJ, LINEAR).weight(2, 32, Source(parts.get, AssertionError))
    assert torch.equal(found.floats(), q * scale.repeat_interleave(16, 1))


@pytest.mark.parametrize("layout", ["int-quantized", "pack-quantized"])
@pytest.mark.parametrize("sharing", [{"strategy": "token"}, {"strategy": "group", "group_size": 128}])
def test_dynamic_float8_activations_of_integers(layout, sharing):
    """The package's preset W4AFP8 has integers as weights."""
    config = pack()
    plain = config_of(quant_method="compressed-tensors", format=layout, **config)
    config["config_groups"]["g"]["input_activations"] = {"num_bits": 8, "type": "float", "dynamic": True} | sharing
    found = config_of(quant_method="compressed-tensors", format=layout, **config)
    assert found.scheme(Q_PROJ, LINEAR) == plain.scheme(Q_PROJ, LINEAR)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ("awq", "quantization_config: expected an object"),
        ({"quant_method": 4}, "quant_method: expected a string"),
        ({"quant_method": "awq", "group_size": 0}, "group_size: expected a whole number of columns"),
        ({"quant_method": "awq", "group_size": "128"}, "group_size: expected a whole number"),
        ({"quant_method": "awq", "modules_to_not_convert": "lm_head"}, "modules_to_not_convert: expected a list"),
        ({"quant_method": "gptq"}, "bits: expected a value"),
        (
            {"quant_method": "bitnet", "linear_class": "linear"},
            "linear_class: expected one of autobitlinear, bitlinear",
        ),
        (
            {"quant_method": "bitnet", "quantization_mode": "static"},
            "quantization_mode: expected one of offline, online",
        ),
        ({"quant_method": "bitnet", "modules_to_not_convert": "x"}, "modules_to_not_convert: expected a list"),
        ({"quant_method": "bitnet", "modules_to_not_convert": ["(a+)+b"]}, "it repeats too much"),
        ({"quant_method": "gptq", "bits": 4, "dynamic": {"a": 3}}, "dynamic.a: expected an object"),
        ({"quant_method": "gptq", "bits": 4, "dynamic": {"(": {}}}, "regular expression '\\('"),
        ({"quant_method": "gptq", "bits": 4, "dynamic": {"(a+)+b": {}}}, "it repeats too much"),
        (MLX | {"bits": "4"}, "bits: expected a whole number"),
        ({"quant_method": "mlx", "quant_algo": "FP8"}, "group_size: expected a value"),
        (MLX | {"lm_head": {"group_size": 0}}, "lm_head.group_size: expected a whole number"),
        (MLX | {"mode": 4}, "mode: expected a string"),
        ({"quant_method": "fp8", "weight_block_size": [128]}, "weight_block_size: expected a list of two"),
        ({"quant_method": "fp8", "weight_block_size": [128, 0]}, "weight_block_size: expected a list of two"),
        ({"quant_method": "fp8", "activation_scheme": "none"}, "activation_scheme: expected one of"),
        ({"quant_method": "compressed-tensors"}, "config_groups: expected an object"),
        ({"quant_method": "compressed-tensors", "config_groups": {"W4A16": ["Linear"]}}, "W4A16: expected an object"),
        ({"quant_method": "compressed-tensors", "config_groups": {"g": {"targets": []}}}, "an object with targets"),
        ({"quant_method": "compressed-tensors", "format": "pack-quantized", "ignore": ["re:*"]} | pack(), "repeat"),
    ],
)
def test_bad_configs(config, message):
    with pytest.raises(CheckpointError, match=message) as caught:
        quantization(Fields({"quantization_config": config}, "config.json"))
    assert caught.value.exit_code == 3 and caught.value.where == "config.json"


def test_targets_are_tried_as_the_package_does():
    """A name before an expression before a class; what is ignored has no scheme, and only `Linear` layers have one."""
    sizes = {"Linear": 128, "re:.*mlp.*": 64, "model.layers.0.mlp.up_proj": 32, "re:model[.]layers[.]1[.].*": 16}
    groups = {
        f"g{i}": {"targets": [target], "weights": {"num_bits": 4, "strategy": "group", "group_size": size}}
        for i, (target, size) in enumerate(sizes.items())
    }
    ignore = ["lm_head", "re:.*k_proj"]
    config = config_of(quant_method="compressed-tensors", format="pack-quantized", config_groups=groups, ignore=ignore)

    def size(module, kind=LINEAR):
        scheme = config.scheme(module, kind)
        return scheme and scheme.grid.ins

    assert size("model.layers.0.self_attn.q_proj") == 128 and size("model.layers.0.mlp.down_proj") == 64
    assert size("model.layers.0.mlp.up_proj") == 32 and size("model.layers.1.self_attn.q_proj") == 16
    assert size("model.layers.1.mlp.up_proj") == 64  # expressions in the order of their text
    assert size("lm_head") is None and size("model.layers.1.self_attn.k_proj") is None
    assert size("transformer.h.0.attn.c_attn", TRANSPOSED) is None


E2M1 = [0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6]
FLOAT_GROUP = {"g": {"targets": ["Linear"], "weights": {"num_bits": 4, "type": "float", "group_size": 16}}}
MX8 = {"g": {"targets": ["Linear"], "weights": {"num_bits": 8, "type": "float", "group_size": 32}}}
PACKAGE = {"quant_method": "compressed-tensors", "config_groups": FLOAT_GROUP}
SMALL = {  # config; names of numbers, of scales and of the whole's scale; elements of a group; bits
    "nvfp4": (
        PACKAGE | {"format": "nvfp4-pack-quantized"}, ("weight_packed", "weight_scale", "weight_global_scale"), 16, 4),
    "modelopt": (
        {"quant_method": "modelopt", "quant_algo": "NVFP4"}, ("weight", "weight_scale", "weight_scale_2"), 16, 4),
    "mxfp4": (PACKAGE | {"format": "mxfp4-pack-quantized"}, ("weight_packed", "weight_scale", ""), 32, 4),
    "mxfp8": ({"quant_method": "mxfp8"}, ("weight", "weight_scale_inv", ""), 32, 8),
    "mxfp8-quantized": (
        PACKAGE | {"format": "mxfp8-quantized", "config_groups": MX8}, ("weight", "weight_scale", ""), 32, 8),
}  # fmt: skip


@pytest.mark.parametrize("method", SMALL)
def test_floats_of_8_and_4_bits_in_groups(method):
    """Every number, by the formats' tables."""
    config, (packed, scale, whole), group, bits = SMALL[method]
    generator = torch.Generator().manual_seed(3)
    codes = torch.randint(0, 256 if bits == 8 else 16, (6, 64), generator=generator)
    codes[codes & 127 == 127] = 0  # no numbers
    numbers = codes.to(torch.uint8).view(torch.float8_e4m3fn).float() if bits == 8 else torch.tensor(E2M1)[codes]
    octets = codes if bits == 8 else codes[:, ::2] + 16 * codes[:, 1::2]
    parts = {packed: octets.to(torch.uint8).view(torch.float8_e4m3fn) if bits == 8 else octets.to(torch.uint8)}
    exponents = torch.randint(100, 140, (6, 64 // group), generator=generator)
    parts[scale], scales = exponents.to(torch.uint8), torch.exp2(exponents - 127.0)
    if whole:
        parts[scale] = torch.rand(6, 64 // group, generator=generator).to(torch.float8_e4m3fn)
        parts[whole] = torch.tensor([3.0]) if method == "nvfp4" else torch.tensor(1 / 3)
        scales = parts[scale].float() / parts[whole] if method == "nvfp4" else parts[scale].float() * parts[whole]
    scheme = config_of(**config).scheme("any", LINEAR)
    for suffix, part in scheme.parts(6, 64).items():
        assert part.optional or (tuple(parts[suffix].shape) in part.shapes and parts[suffix].dtype in part.dtypes)
    found = scheme.weight(6, 64, Source(parts.get, AssertionError))
    assert torch.equal(found.floats(), numbers * scales.repeat_interleave(group, 1))
    assert torch.equal(found.floats(2, 5), found.floats()[2:5])
    if not whole:
        parts[scale][1, 1] = 255
        with pytest.raises(AssertionError, match="no numbers"):
            scheme.weight(6, 64, Source(parts.get, AssertionError))


def test_int8_of_bitsandbytes():
    q = torch.randint(-127, 128, (5, 12), generator=torch.Generator().manual_seed(1)).to(torch.int8)
    parts = {"weight": q, "SCB": torch.rand(5), "weight_format": torch.tensor(0, dtype=torch.uint8)}
    scheme = config_of(quant_method="bitsandbytes", load_in_8bit=True).scheme("any", LINEAR)
    found = scheme.weight(5, 12, Source(parts.get, AssertionError)).floats()
    assert torch.allclose(found, q * parts["SCB"][:, None] / 127, rtol=1e-6, atol=0)
    parts["weight_format"] = torch.tensor(1, dtype=torch.uint8)
    with pytest.raises(AssertionError, match="weight_format is 1"):
        scheme.weight(5, 12, Source(parts.get, AssertionError))


@pytest.mark.parametrize(
    ("config", "scale", "shapes"),
    [
        ({"quant_method": "fp8", "activation_scheme": "static"}, "weight_scale", ((1, 1), (1,), ())),
        ({"quant_method": "fp8", "weight_block_size": None}, "weight_scale_inv", ((1, 1), (1,), ())),
        ({"quant_method": "modelopt", "quant_algo": "FP8"}, "weight_scale", ((1, 1), (1,), ())),
        ({"quant_method": "fbgemm_fp8"}, "weight_scale", ((6, 1), (6,))),
    ],
)
def test_scales_of_float8_by_their_writers(config, scale, shapes):
    parts = config_of(**config).scheme("any", LINEAR).parts(6, 8)
    assert parts[scale].shapes == shapes and {name for name, part in parts.items() if not part.optional} == {
        "weight",
        scale,
    }


def test_rules_of_auto_round():
    """Names before expressions; zeros are stored minus one where the layout's name says GPTQ."""
    extra = {"layers.0.q_proj": {"group_size": 64}, ".*q_proj": {"bits": 8}, r"layers\.1\.": {"bits": 16}}
    layouts = {"auto_round:auto_gptq": True, "auto_round:gptq:exllamav2": True, "auto_round": False,
               "auto_round:gptqmodel": False, "auto_round:exllamav2": False}  # fmt: skip
    for layout, first in layouts.items():
        config = config_of(quant_method="auto-round", bits=4, group_size=32, packing_format=layout, extra_config=extra)
        own, other, none, common = (config.scheme(f"layers.{name}", LINEAR)
                                    for name in ("0.q_proj", "1.q_proj", "1.k_proj", "0.k_proj"))  # fmt: skip
        assert (own.bits, own.grid.ins) == (4, 64) and (other.bits, other.grid.ins) == (8, 32) and none is None
        assert (common.bits, common.grid.ins, common.first) == (4, 32, first)
    config = config_of(quant_method="auto-round", bits=4, group_size=32, packing_format="auto_round:auto_awq")
    assert {*config.scheme("any", LINEAR).parts(8, 32)} == {"qweight", "qzeros", "scales"}


@pytest.mark.parametrize("fields, other", [
    ({"data_type": "fp", "bits": 8, "group_size": [128, 64]}, {"quant_method": "fp8", "weight_block_size": [128, 64]}),
    ({"data_type": "fp", "bits": 8, "group_size": -1, "act_bits": 8}, {"quant_method": "fbgemm_fp8"}),
    ({"data_type": "fp", "bits": 8, "group_size": 0}, {"quant_method": "fp8"}),
    *(({"data_type": name, "bits": bits, "group_size": size, "act_bits": bits},
       {"quant_method": "compressed-tensors", "format": f"{layout}-quantized", "config_groups": {
           "group_0": {"targets": ["Linear"], "weights": {"num_bits": bits, "type": "float"}}}})
      for name, bits, size, layout in (("mx_fp", 4, 32, "mxfp4-pack"), ("mx_fp", 8, 32, "mxfp8"),
                                       ("nv_fp", 4, 16, "nvfp4-pack"))),
])  # fmt: skip
def test_floats_of_auto_round_are_those_of_other_methods(fields, other):
    """AutoRound 0.16.1 writes these files."""
    ours = config_of(quant_method="auto-round", packing_format="auto_round:llm_compressor", **fields)
    assert ours.scheme(Q_PROJ, LINEAR) == config_of(**other).scheme(Q_PROJ, LINEAR)
    with pytest.raises(CheckpointError, match=r"read: auto_round.* fp, mx_fp and nv_fp of 8 and 4 bits"):
        config_of(quant_method="auto-round", **fields | {"fmt": "e5m2"})


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float8_e8m0fnu])
def test_exponents_of_float8(dtype, tmp_path):
    """transformers writes scales as exponents of 2 if `scale_fmt` is ue8m0, and reads their bytes as well."""
    module = "model.layers.0.self_attn.k_proj"
    name = f"{module}.weight_scale_inv"
    bits, q = torch.tensor([[0, 254]], dtype=torch.uint8), stored("fp8_block", "weight", module).float()
    folder = copied(tmp_path, "fp8_block", {"scale_fmt": "ue8m0"}, **{name: bits.view(dtype)})
    expected = q * torch.tensor([2.0**-127, 2.0**127]).repeat_interleave(32)
    assert torch.equal(weights(folder)[f"{module}.weight"], expected)
    copied(tmp_path / "none", "fp8_block", **{name: (bits | 255).view(dtype)})
    refused(tmp_path / "none" / "fp8_block", "weight_scale_inv has values that are no numbers")


@pytest.mark.parametrize("lower, upper", [
    ({"quant_method": "fp8", "activation_scheme": "dynamic"}, {"quant_method": "fp8", "activation_scheme": "Dynamic"}),
    *((pack(type="int", num_bits=8, strategy=sharing, **size) | form, pack(type="INT", num_bits=8,
                                                                       strategy=sharing.upper(), **size) | form)
      for sharing, size in (("channel", {}), ("group", {"group_size": 32}))
      for form in ({"quant_method": "compressed-tensors", "format": "pack-quantized"},)),
])  # fmt: skip
def test_the_case_of_names_as_in_the_packages(lower, upper):
    """compressed-tensors lower-cases types and strategies, transformers the scheme of float8's activations."""
    assert config_of(**upper).scheme(Q_PROJ, LINEAR) == config_of(**lower).scheme(Q_PROJ, LINEAR)


@pytest.mark.parametrize("method, size", [("block", [24, 16]), ("row", None), ("tensor", None)])
def test_inverse_scales_of_gptqmodel(method, size):
    """It divides by what others multiply by, under the same name."""
    fields = {"weight_scale_semantics": "inverse", "weight_scale_method": method, "weight_block_size": size}
    scheme = config_of(quant_method="fp8", format="float8_e4m3fn", **fields).scheme("any", LINEAR)
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(48, 32, generator=generator).to(torch.float8_e4m3fn)
    inverse = 1 + torch.rand({"block": (2, 2), "row": (48,), "tensor": ()}[method], generator=generator)
    spread = inverse.repeat_interleave(24, 0).repeat_interleave(16, 1) if method == "block" else inverse
    expected = q.float() / (spread.unsqueeze(1) if method == "row" else spread)
    parts = {"weight": q, "weight_scale_inv": inverse}
    found = scheme.weight(48, 32, Source(parts.get, AssertionError)).floats()
    assert torch.allclose(found, expected, rtol=1e-6, atol=0)
    parts["weight_scale_inv"] = torch.zeros_like(inverse)
    with pytest.raises(AssertionError, match="weight_scale_inv has zeros"):
        scheme.weight(48, 32, Source(parts.get, AssertionError))


def test_scales_of_activations_beside_mxfp4_are_not_used():
    """Quark's `mxfp4_fp8` has one for each matrix."""
    weight = {"dtype": "fp4", "qscheme": "per_group", "group_size": 32, "scale_format": "e8m0", "ch_axis": -1}
    inputs = {"dtype": "fp8_e4m3", "qscheme": "per_tensor", "is_dynamic": False}
    layers = {"weight": weight, "input_tensors": inputs}
    parts = config_of(quant_method="quark", export={"pack_method": "reorder"}, global_quant_config=layers)
    found = parts.scheme(Q_PROJ, LINEAR).parts(6, 64)
    assert {name for name, part in found.items() if not part.optional} == {"weight", "weight_scale"}
    assert found["input_scale"].optional and torch.bfloat16 in found["input_scale"].dtypes


def test_groups_without_weights_are_floats():
    groups = pack()["config_groups"] | {"floats": {"targets": ["re:.*mlp.*"], "weights": None}}
    config = config_of(quant_method="compressed-tensors", format="pack-quantized", config_groups=groups)
    assert config.scheme("model.layers.0.mlp.up_proj", LINEAR) is None and config.scheme(Q_PROJ, LINEAR) is not None


def test_no_groups_are_floats():
    """The package writes such a config if only keys and values are quantised."""
    cache = {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True, "dynamic": False}
    config = config_of(quant_method="compressed-tensors", format="dense", config_groups={}, kv_cache_scheme=cache)
    assert config.scheme(Q_PROJ, LINEAR) is None


@pytest.mark.parametrize("prefix", ["model.language_model.", "language_model.model."])
def test_a_config_names_the_modules_of_the_whole(prefix, tmp_path):
    """The text model of several modalities: expressions are for the names in the file."""
    text = json.loads((GOLDEN / "pack4_group" / "config.json").read_text())
    config = {"architectures": ["LlavaForConditionalGeneration"], "model_type": "llava", "vision_config": {}}
    config["quantization_config"] = text.pop("quantization_config")
    config["quantization_config"]["config_groups"]["group_0"]["targets"] = [f"re:{re.escape(prefix)}.*_proj"]
    (tmp_path / "config.json").write_text(json.dumps(config | {"text_config": text}))
    tensors = load_file(GOLDEN / "pack4_group" / "model.safetensors")
    save_file({name.replace("model.", prefix): t for name, t in tensors.items()}, tmp_path / "model.safetensors")
    expected = weights(GOLDEN / "pack4_group")
    found = weights(tmp_path)
    assert found.keys() == expected.keys() and all(found[name].equal(expected[name]) for name in expected)


def test_settings_of_mlx_are_by_the_names_of_the_file():
    own = {"lm_head": {"bits": 8, "group_size": 32}, "a": False, "b": True, "c": {"mode": "nvfp4"}}
    config = config_of(**MLX | {"bits": 6}, **own)
    found = {name: config.scheme(name, EMBEDDING) for name in (*own, "d")}
    common = mlx.MLXScheme("affine", 6, 64)
    expected = (mlx.MLXScheme("affine", 8, 32), None, common, mlx.MLXScheme("nvfp4", 4, 16), common)
    assert tuple(found.values()) == expected and config.scheme("lm_head", TRANSPOSED) is None


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_metal_is_affine(bits):
    """transformers' own method has the codes of MLX, and another name for the minimums."""
    config = config_of(quant_method="metal", bits=bits, group_size=32, modules_to_not_convert=None)
    q = torch.arange(64).view(1, 64) % 2**bits
    words = (q.view(-1, 32 // bits) << torch.arange(0, 32, bits)).sum(1).view(1, -1)
    scale, least = torch.tensor([[0.5, 2]]), torch.tensor([[-3, 0.25]])
    parts = {"weight": words.to(torch.uint32), "scales": scale, "qbiases": least}
    assert {*parts} == {*config.scheme(Q_PROJ, LINEAR).parts(1, 64)}
    found = config.scheme(Q_PROJ, LINEAR).weight(1, 64, Source(parts.get, AssertionError)).floats()
    assert torch.equal(found, q * scale.repeat_interleave(32, 1) + least.repeat_interleave(32, 1))


def test_numbers_of_mlx_that_are_none():
    """They are refused, in weights and in scales of e4m3; so are rows that are no whole groups."""
    for mode, bits, group, name in (("mxfp8", 8, 32, "weight"), ("nvfp4", 4, 16, "scales")):
        scheme = mlx.MLXScheme(mode, bits, group)
        parts = {
            "weight": torch.zeros(2, 32 * bits // 8, dtype=torch.uint8),
            "scales": torch.ones(2, 32 // group).byte(),
        }
        parts[name][1, 0] = 255
        parts["weight"] = parts["weight"].view(torch.uint32)
        with pytest.raises(AssertionError, match=f"{name} has values that are not numbers"):
            scheme.weight(2, 32, Source(parts.get, AssertionError)).rows(0, 2)
        with pytest.raises(AssertionError, match="expected a width that is a multiple, got 24"):
            scheme.weight(2, 24, Source(parts.get, AssertionError))


def test_rules_of_gptq_are_tried_in_their_order():
    rules = {"-:.*lm_head": {}, r".*\.0\..*": {"group_size": 64}, r"+:.*q_proj": {"bits": 8}}
    config = config_of(quant_method="gptq", bits=4, group_size=32, dynamic=rules)
    first, second, other = (config.scheme(f"layers.{name}", LINEAR) for name in ("0.q_proj", "1.q_proj", "1.k_proj"))
    assert (first.bits, first.grid.ins) == (4, 64) and (second.bits, second.grid.ins) == (8, 32)
    assert (other.bits, other.grid.ins) == (4, 32) and config.scheme("lm_head", LINEAR) is None


def test_scales_of_one_value_may_have_any_of_their_shapes():
    assert Grid(1, None).shapes(5, 8) == ((5, 1), (5,)) and Grid(None, None).shapes(5, 8) == ((1, 1), (1,), ())
    assert Grid(1, 128).shapes(5, 64) == ((5, 1), (5,)) and Grid(2, 3).shapes(5, 8) == ((3, 3),)


def test_zeros_of_the_first_version_are_whole_words_minus_one():
    """A zero of 0 borrows from its neighbour; the addition gives it back."""
    method = recipes.gptq(4, 8, False, True)
    weight = torch.arange(64).float().view(8, 8) / 7  # no negative number: zeros of 0
    parts = method.store(weight)
    scheme = config_of(quant_method="gptq", bits=4, group_size=8, sym=False).scheme("any", LINEAR)
    found = scheme.weight(8, 8, Source(parts.get, AssertionError)).rows(0, 8)
    assert found.zero_OG.eq(0).all() and parts["qzeros"].ne(-1).any()
    assert torch.equal(scheme.weight(8, 8, Source(parts.get, AssertionError)).floats(), method.restore(parts))


@pytest.mark.parametrize("outs", [32, 64, 40])
def test_zeros_of_symmetric_weights_of_3_bits(outs):
    """They are 4. AutoGPTQ and GPTQModel 7.7 store 3 in each field; versions before subtract other numbers of words."""
    weight = torch.randn(outs, 64, generator=torch.Generator().manual_seed(outs))
    method = recipes.gptq(3, 16, True, False)
    parts = method.store(weight)
    expected = method.restore(parts)
    scheme = config_of(quant_method="gptq", bits=3, group_size=16, sym=True).scheme("any", LINEAR)
    threes = sum(3 << 3 * i for i in range(outs))
    words = torch.tensor([threes >> 32 * i & 0xFFFFFFFF for i in range(parts["qzeros"].shape[1])])
    constants = (0b00100100100100100100100100100100, 0b10010010010010010010010010010010,
                 0b01001001001001001001001001001001)  # fmt: skip
    old = parts["qzeros"].long() - torch.tensor([constants[i % 3] for i in range(len(words))])
    for stored in (words.repeat(4, 1), old):
        own = parts | {"qzeros": stored.to(torch.int32)}
        assert torch.equal(scheme.weight(outs, 64, Source(own.get, AssertionError)).floats(), expected)
    for stored in (parts["qzeros"], changed(old.to(torch.int32), 1, 1, value=5)):
        own = parts | {"qzeros": stored}
        with pytest.raises(AssertionError, match="qzeros of 3 bits are not those of symmetric weights"):
            scheme.weight(outs, 64, Source(own.get, AssertionError))


def test_the_order_of_old_files_that_order_nothing(tmp_path):
    name = f"{Q_PROJ}.weight_g_idx"
    config = {"config_groups": recipes.package("", [recipes.group("", recipes.W4)])["config_groups"]}
    folder = copied(tmp_path, "pack4_group", config, **{name: torch.full((64,), -1, dtype=torch.int32)})
    expected = weights(GOLDEN / "pack4_group")
    assert all(torch.equal(weight, expected[name]) for name, weight in weights(folder).items())


def test_quantising_again_is_refused():
    with pytest.raises(UsageError, match="quantised already"):
        pick_quant("int8", Checkpoint.open(GOLDEN / "awq"), torch.float32, CPU)


def test_the_dtype_is_float32():
    assert pick_dtype("auto", Checkpoint.open(GOLDEN / "awq"), CPU).dtype == torch.float32
