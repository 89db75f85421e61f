"""torchao's tensors in safetensors: every integer by the definition, metadata, and every fault an error that names it.

The golden model has each subclass but tiles; torchao 0.18 restores the same floats from its file, of Int4Tensor none.
"""

import json
import shutil
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from engine import Engine
from kernels.linear.reference import unpacked
from models.checkpoint.headers import Checkpoint
from models.errors import CheckpointError
from models.formats.floats import has_kernels
from models.formats.grouped import GroupedLinear
from models.quantized.parts import EMBEDDING, LINEAR, TRANSPOSED, Source
from models.quantized.torchao import TorchAO
from tests.models.copies import changed
from tools.golden import storage

GOLDEN = Path(__file__).parents[2] / "golden" / "quantized" / "torchao"
Q_PROJ, GATE, DOWN = (f"model.layers.0.{name}" for name in ("self_attn.q_proj", "mlp.gate_proj", "mlp.down_proj"))
CPU = torch.device("cpu")


def told(subclass, block=(1, 8), names=("qdata", "scale"), **data):
    data["block_size"] = block and [*block]
    return {"_type": subclass, "_data": data, "_tensor_data_names": [*names]}


def config_of(**entries):
    metadata = {name: json.dumps(entry) for name, entry in entries.items()} | {"tensor_names": json.dumps([*entries])}
    return TorchAO().with_types(metadata, "model.safetensors")


def scheme_of(*given, **data):
    return config_of(**{"a.weight": told(*given, **data)}).scheme("a", LINEAR)


def weight_of(scheme, parts, outs, width):
    for suffix, part in scheme.parts(outs, width).items():
        found = parts.get(suffix)
        assert part.optional if found is None else tuple(found.shape) in part.shapes and found.dtype in part.dtypes
    return scheme.weight(outs, width, Source(parts.get, AssertionError))


@given(st.integers(1, 8), st.sampled_from([(1, 8), (1, 16), (3, 8), (6, 48), (1, 48)]), st.booleans(), st.booleans())
def test_every_integer(bits, block, zeros, int8):
    """(q - zero) * scale, one element at a time; some rows; the packed matrix."""
    generator = torch.Generator().manual_seed(bits)
    half, grid = 2 ** (7 if int8 else bits - 1), (6 // block[0], 48 // block[1])
    q = torch.randint(-half, half, (6, 48), generator=generator).to(torch.int8)
    zero = torch.randint(-half, half, grid, generator=generator).to(torch.int8)
    scale = torch.randn(grid, generator=generator)
    parts = {"_weight_qdata": q, "_weight_scale": scale}
    parts |= {"_weight_zero_point": zero} if zeros or not int8 else {}
    dtype = {"_type": "torch.dtype", "_data": f"int{bits}"}
    scheme = (
        scheme_of("Int8Tensor", block) if int8 else scheme_of("IntxUnpackedToInt8Tensor", block, target_dtype=dtype)
    )
    weight = weight_of(scheme, parts, 6, 48)
    expected = torch.empty(6, 48)
    for o in range(6):
        for i in range(48):
            place = o // block[0], i // block[1]
            expected[o, i] = (int(q[o, i]) - (int(zero[place]) if len(parts) > 2 else 0)) * scale[place]
    assert torch.equal(weight.floats(), expected) and torch.equal(weight.floats(2, 5), expected[2:5])
    few = "int2" if bits < 3 and block[1] % 16 == 0 else "int4"
    assert weight.kind == (few if bits < 5 and not int8 else "int8")
    if has_kernels(torch.float32, CPU):
        packed = GroupedLinear([weight], dtype=torch.float32, device=CPU).packed
        assert torch.equal(unpacked(packed), expected)


def test_four_bits_with_minimums():
    """q * scale + zero; signed integers, the even one in the low half; scales lie transposed."""
    q = torch.arange(-8, 8).repeat(2, 1).flip(1).contiguous()
    scale, zero = torch.tensor([[0.5, 2.0], [0.25, 3.0]]), torch.tensor([[1.0, -4.0], [0.0, 7.0]])
    octets = (q[:, ::2] & 15 | (q[:, 1::2] & 15) << 4).to(torch.uint8).view(torch.int8)
    parts = {"_weight_qdata": octets, "_weight_scale": scale, "_weight_zero_point": zero}
    weight = weight_of(scheme_of("Int4Tensor"), parts, 2, 16)
    expected = [[float(q[o, i] * scale[i // 8, o] + zero[i // 8, o]) for i in range(16)] for o in range(2)]
    assert weight.floats().tolist() == expected and weight.floats(1, 2).tolist() == expected[1:]


@pytest.mark.parametrize(("outs", "padded"), [(13, 16), (24, 24)])
def test_four_bits_in_tiles(outs, padded):
    """(q - 8) * scale + zero. Words as PyTorch's CUDA kernel packs bytes of two integers, the even in the high half."""
    generator, width = torch.Generator().manual_seed(outs), 96
    q = torch.randint(0, 16, (padded, 1024), generator=generator)
    octets = q[:, ::2] << 4 | q[:, 1::2]
    words = torch.zeros(padded // 8, 8, 32, 4, dtype=torch.int64)
    for tile in range(padded // 8):
        for outer in range(8):
            for lane in range(32):
                for inner in range(0, 8, 2):
                    base = (outer * 8 + inner) * 8
                    v = [int(octets[tile * 8 + lane // 4, base + i + lane % 4]) for i in (0, 4, 8, 12)]
                    places = [(v[i] & 15) << 16 + 4 * i | v[i] >> 4 << 4 * i for i in range(4)]
                    words[tile, outer, lane, inner // 2] = sum(places)
    values = torch.randn(32, padded, 2, generator=generator).bfloat16()
    parts = {"_weight_qdata": words.to(torch.int32), "_weight_scale_and_zero": values}
    weight = weight_of(scheme_of("Int4TilePackedTo4dTensor", (1, 32)), parts, outs, width)
    scale, zero = (values[:3, :outs, i].T.float().repeat_interleave(32, 1) for i in (0, 1))
    expected = (q[:outs, :width] - 8) * scale + zero
    assert torch.equal(weight.floats(), expected) and torch.equal(weight.floats(3, 12), expected[3:12])


@pytest.mark.parametrize(("block", "shape"), [((1, 16), (4, 1)), ((4, 16), (1, 1)), ((2, 8), (2, 2)), (None, (1, 1))])
def test_float8(block, shape):
    generator = torch.Generator().manual_seed(2)
    q, scale = torch.randn(4, 16, generator=generator).to(torch.float8_e4m3fn), torch.rand(shape, generator=generator)
    weight = weight_of(scheme_of("Float8Tensor", block), {"_weight_qdata": q, "_weight_scale": scale}, 4, 16)
    spread = scale.repeat_interleave(4 // shape[0], 0).repeat_interleave(16 // shape[1], 1)
    assert torch.equal(weight.floats(), q.float() * spread)


def test_only_linear_layers_and_embeddings_are_meant():
    config = config_of(**{"a.weight": told("Int8Tensor"), "b.weight": {"_type": "Tensor"}})
    assert config.scheme("a", EMBEDDING) and not config.scheme("a", TRANSPOSED)
    assert not config.scheme("b", LINEAR) and not config.scheme("c", LINEAR)
    for entry in (told("Int4Tensor"), told("Int8Tensor", (4, 8)), told("Float8Tensor", None)):
        with pytest.raises(CheckpointError, match="the embedding a without scales of each row"):
            config_of(**{"a.weight": entry}).scheme("a", EMBEDDING)


def copied(tmp_path, changes=None, **tensors):
    """The golden folder with other metadata (None: without an entry) and tensors."""
    folder = tmp_path / "torchao"
    shutil.copytree(GOLDEN, folder)
    with safe_open(GOLDEN / "model.safetensors", framework="pt") as file:
        metadata = file.metadata() | {name: json.dumps(entry) for name, entry in (changes or {}).items() if entry}
    metadata = {name: entry for name, entry in metadata.items() if name not in (changes or {}) or changes[name]}
    found = {name: t.clone() for name, t in load_file(GOLDEN / "model.safetensors").items()} | tensors
    (folder / "model.safetensors").unlink()
    save_file(
        {name: t.contiguous() for name, t in found.items() if t is not None}, folder / "model.safetensors", metadata
    )
    return folder


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tensor_names": None}, "do not list torchao's tensors"),
        ({"tensor_names": {"a": 1}}, "do not list torchao's tensors"),
        ({f"{Q_PROJ}.weight": None}, rf"do not describe .*{Q_PROJ}\.weight"),
        ({f"{Q_PROJ}.weight": [3]}, rf"do not describe .*{Q_PROJ}\.weight"),
        ({f"{Q_PROJ}.weight": {"_data": {}}}, "_type: expected a value"),
        ({f"{Q_PROJ}.weight": told("MXTensor")}, r"_type 'MXTensor' \(read: Int8Tensor, .*Float8Tensor\)"),
        ({f"{Q_PROJ}.weight": told("Int8Tensor", names=["qdata", "act_pre_scale"])}, "Int8Tensor with act_pre_scale"),
        ({f"{Q_PROJ}.weight": told("Int8Tensor", names=["act_quant_scale"])}, "Int8Tensor with act_quant_scale"),
        (
            {f"{Q_PROJ}.weight": told("Int8Tensor") | {"_tensor_data_names": 3}},
            "_tensor_data_names: expected a list of names",
        ),
        ({f"{Q_PROJ}.weight": told("Int8Tensor", (1, 0))}, "block_size: expected a list of two"),
        ({f"{Q_PROJ}.weight": told("Int4Tensor", (2, 8))}, r"Int4Tensor with block_size \[2, 8\]"),
        ({f"{Q_PROJ}.weight": told("IntxUnpackedToInt8Tensor")}, "target_dtype._data: expected a value"),
        ({"tensor_names": ["a.gate_up"], "a.gate_up": told("Int8Tensor")}, "that are no weights of modules"),
    ],
)
def test_faults_of_metadata(tmp_path, changes, message):
    with pytest.raises(CheckpointError, match=message) as caught:
        Checkpoint.open(copied(tmp_path, changes))
    assert caught.value.exit_code == 3 and "model.safetensors" in caught.value.where


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        (f"{Q_PROJ}._weight_scale", lambda _: None, "missing .*q_proj._weight_scale"),
        (f"{Q_PROJ}._weight_scale", lambda t: t[:3], r"_weight_scale .*expected \[64, 1\] or \[64\] of floats"),
        (f"{Q_PROJ}._weight_zero_point", lambda t: t.float(), "_weight_zero_point .*of int8, got .* of float32"),
        (f"{Q_PROJ}._weight_act_pre_scale", lambda _: torch.ones(64), "unknown .*_weight_act_pre_scale"),
        (f"{Q_PROJ}._weight_scale", lambda t: t / 0, "_weight_scale has values that are not finite"),
        (f"{GATE}._weight_qdata", lambda t: t + 1, "gate_proj: _weight_qdata has integers of more than 4 bits"),
    ],
)
def test_faults_of_tensors(tmp_path, name, change, message):
    found = load_file(GOLDEN / "model.safetensors").get(name)
    with pytest.raises(CheckpointError, match=message):
        Engine.load(copied(tmp_path, **{name: change(found)}), kv_memory="1M")


def test_rows_of_the_embedding_are_those_of_the_matrix():
    checkpoint = Checkpoint.open(GOLDEN)
    name, shape = "model.embed_tokens.weight", (104, 64)
    matrix = checkpoint.grouped(name, name, shape, EMBEDDING, biased=False).floats()
    assert torch.equal(checkpoint.rows(name, name, shape)([5, 103, 5]), matrix[[5, 103, 5]])


def test_the_text_model_of_several_modalities(tmp_path):
    """Metadata name tensors as the file does."""
    folder = copied(tmp_path)
    tensors = load_file(folder / "model.safetensors")
    with safe_open(GOLDEN / "model.safetensors", framework="pt") as file:
        metadata = file.metadata()

    def renamed(name):
        return name.replace("model.", "model.language_model.")

    names = json.loads(metadata.pop("tensor_names"))
    metadata = {renamed(name): entry for name, entry in metadata.items()}
    metadata["tensor_names"] = json.dumps([*map(renamed, names)])
    (folder / "model.safetensors").unlink()
    save_file({renamed(name): t for name, t in tensors.items()}, folder / "model.safetensors", metadata)
    text = json.loads((folder / "config.json").read_text())
    config = {"architectures": ["LlavaForConditionalGeneration"], "model_type": "llava", "vision_config": {}}
    config["quantization_config"] = text.pop("quantization_config")
    (folder / "config.json").write_text(json.dumps(config | {"text_config": text}))
    for name, shape in ((f"{Q_PROJ}.weight", (64, 64)), (f"{DOWN}.weight", (64, 96))):
        found, expected = (
            of.grouped(name, name, shape, LINEAR, biased=False).floats()
            for of in map(Checkpoint.open, (folder, GOLDEN))
        )
        assert torch.equal(found, expected)


@pytest.mark.parametrize(
    ("variant", "stored", "named"),
    [
        ("wrapped/gemma3", "language_model.model.layers.0", "model.language_model.layers.0"),
        ("wrapped/mistral3", "language_model.model.layers.0", "model.language_model.layers.0"),
        ("experts/mixtral", "model.layers.0", "model.layers.0"),
    ],
)
def test_metadata_may_have_other_names_than_the_file(variant, stored, named, tmp_path):
    """In files of transformers 5, modules of multimodal models have other names than their tensors."""
    module, method = "self_attn.q_proj", storage.torchao("Int8Tensor")

    def logits(folder, tensors, metadata, config):
        copy = changed(folder, variant, config)
        whole = load_file(copy / "model.safetensors")
        weight = whole.pop(f"{stored}.{module}.weight").float()
        entry = {f"{named}.{module}.weight": json.dumps(method.told(weight))}
        metadata |= {"tensor_names": json.dumps([*entry])} | entry if metadata else {}
        made = {f"{stored}.{module}.{suffix}": x for suffix, x in tensors(method.store(weight)).items()}
        (copy / "model.safetensors").unlink()
        save_file(whole | made, copy / "model.safetensors", metadata)
        return Engine.load(copy, dtype="float32", kv_memory="4M", threads=1).logits([5, 9, 7])

    config = {"quantization_config": {"quant_method": "torchao", "quant_type": {"default": {}}}}
    found = logits(tmp_path / "coded", dict, {"format": "pt"}, config)
    want = logits(tmp_path / "floats", lambda parts: {"weight": method.restore(parts)}, {}, {})
    assert (found - want).norm() < 1e-5 * want.norm()
