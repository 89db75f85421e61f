"""bitsandbytes' four bits: values by their definition, one element at a time; every fault an error that names it."""

import json
import math
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine import Engine
from models.checkpoint import four_bits
from models.checkpoint.headers import Checkpoint
from models.errors import CheckpointError
from search import Trie

GOLDEN = Path(__file__).parents[2] / "golden"
Q_PROJ = "model.layers.0.self_attn.q_proj.weight"
BYTES = {"dtype": torch.uint8}


def quantised(shape, kind="nf4", block=64, nested=0, dtype=torch.bfloat16, seed=0):
    """Random tensors of a matrix by the ends of their names, and the matrix that they stand for."""
    generator = torch.Generator().manual_seed(seed)
    count = math.prod(shape)
    blocks = -(-count // block)
    codes = torch.randint(0, 16, (count + count % 2,), generator=generator)
    numbers = torch.rand(16, generator=generator) * 2 - 1
    parts = {"": (codes[::2] * 16 + codes[1::2]).to(torch.uint8).view(-1, 1), ".quant_map": numbers}
    state = {"quant_type": kind, "blocksize": block, "dtype": str(dtype)[6:], "shape": [*shape]}
    largest = torch.rand(blocks, generator=generator) / 8
    if nested:
        own = torch.randint(0, 256, (blocks,), generator=generator)
        map_of, scales = torch.rand(256, generator=generator), torch.rand(-(-blocks // nested), generator=generator)
        largest = torch.stack([map_of[own[i]] * scales[i // nested] + 0.25 for i in range(blocks)])
        parts |= {".absmax": own.to(torch.uint8), ".nested_absmax": scales, ".nested_quant_map": map_of}
        state |= {"nested_blocksize": nested, "nested_dtype": "float32", "nested_offset": 0.25}
    else:
        parts[".absmax"] = largest
    parts[f".quant_state.bitsandbytes__{kind}"] = torch.tensor([*json.dumps(state).encode()], **BYTES)
    matrix = torch.tensor([float(numbers[codes[i]] * largest[i // block]) for i in range(count)]).to(dtype)
    return parts, matrix.view(shape)


def folder_of(tmp_path, floats, tensors, config):
    """A copy of a folder with other tensors."""
    shutil.copytree(floats, tmp_path)
    (tmp_path / "model.safetensors").unlink()
    half = len(tensors) // 2  # the tensors of a matrix may lie in two files
    parts = dict([*tensors.items()][:half]), dict([*tensors.items()][half:])
    files = {name: f"model-{i + 1}.safetensors" for i, part in enumerate(parts) for name in part}
    for i, part in enumerate(parts):
        save_file({name: tensor.contiguous() for name, tensor in part.items()}, tmp_path / f"model-{i + 1}.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    whole = json.loads((tmp_path / "config.json").read_text()) | {"quantization_config": config}
    (tmp_path / "config.json").write_text(json.dumps(whole))
    return tmp_path


def one(tmp_path, changes=None, **how):
    """A folder in which one matrix has four bits, some of its tensors changed (None: without them); and the matrix."""
    floats = load_file(GOLDEN / "llama/gqa" / "model.safetensors")
    parts, matrix = quantised(tuple(floats[Q_PROJ].shape), **how)
    parts = {end: x for end, x in (parts | (changes or {})).items() if x is not None}
    tensors = {name: x for name, x in floats.items() if name != Q_PROJ} | {Q_PROJ + end: x for end, x in parts.items()}
    return folder_of(tmp_path / "folder", GOLDEN / "llama/gqa", tensors, {"load_in_4bit": True}), matrix


@pytest.mark.parametrize("shape", [(8, 24), (5, 7), (33, 63)])
@pytest.mark.parametrize("how", [{}, {"nested": 4, "block": 32}, {"kind": "fp4", "dtype": torch.float16, "block": 8}])
def test_values_are_those_of_the_definition(shape, how, tmp_path, monkeypatch):
    monkeypatch.setattr(four_bits, "CHUNK", 200)  # several, of which one is smaller
    parts, expected = quantised(shape, **how)
    save_file({f"m.weight{end}": x for end, x in parts.items()}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": {"load_in_4bit": True}}))
    checkpoint = Checkpoint.open(tmp_path)
    assert checkpoint.quantization is None and [*checkpoint.tensors] == ["m.weight"]
    assert (checkpoint.tensors["m.weight"].shape, checkpoint.tensors["m.weight"].dtype) == (shape, expected.dtype)
    assert torch.equal(checkpoint.read(["m.weight"])["m.weight"], expected)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("part", ["attn.c_proj", "mlp.c_fc"])  # one that is square, and one that is not
def test_layers_of_gpt2_are_stored_as_linear_ones(part, bits, tmp_path):
    """transformers turns the weights of Conv1D around before bitsandbytes quantises them."""
    variant, name = GOLDEN / "gpt2/plain", f"transformer.h.1.{part}.weight"
    floats = load_file(variant / "model.safetensors")
    shape = tuple(floats.pop(name).T.shape)
    draw = torch.Generator().manual_seed(1)
    largest = torch.rand(shape[0], generator=draw)
    if bits == 4:
        parts, matrix = quantised(shape)
    else:
        codes = torch.randint(-127, 128, shape, generator=draw, dtype=torch.int8)
        parts, matrix = {"": codes}, codes * largest[:, None] / 127
    coded = floats | {name + end: x for end, x in parts.items()}
    coded |= {name.replace("weight", "SCB"): largest} if bits == 8 else {}
    folder = folder_of(tmp_path / "coded", variant, coded, {"quant_method": "bitsandbytes", f"load_in_{bits}bit": True})
    plain = folder_of(tmp_path / "plain", variant, floats | {name: matrix.float().T}, None)
    found, want = (
        Engine.load(each, dtype="float32", kv_memory="4M", threads=1).logits([5, 9, 7]) for each in (folder, plain)
    )
    assert (found - want).norm() < 1e-5 * want.norm()


def test_codes_may_be_stored_as_the_bytes_of_floats(tmp_path):
    """`bnb_4bit_quant_storage`."""
    codes = quantised((32, 32))[0][""].flatten().view(torch.bfloat16)
    folder, matrix = one(tmp_path / "a", {"": codes.view(-1, 1)})
    found = Checkpoint.open(folder).read([Q_PROJ])[Q_PROJ]
    expected = Checkpoint.open(one(tmp_path / "b")[0]).read([Q_PROJ])[Q_PROJ]
    assert torch.equal(found.view(torch.int16), expected.view(torch.int16)) and found.shape == matrix.shape


def test_a_model_is_that_of_its_floats(tmp_path):
    """Every matrix but embedding and head in four bits: the same bits as a checkpoint of the dequantised matrices."""
    source = GOLDEN / "llama/gqa"
    floats, tensors = load_file(source / "model.safetensors"), {}
    for i, (name, tensor) in enumerate([*floats.items()]):
        if tensor.dim() == 2 and "embed" not in name and "head" not in name:
            parts, matrix = quantised(tuple(tensor.shape), nested=16, seed=i)
            tensors |= {name + end: x for end, x in parts.items()}
            floats[name] = matrix
        else:
            tensors[name] = tensor
    config = {"quant_method": "bitsandbytes", "load_in_4bit": True, "load_in_8bit": False}
    packed = folder_of(tmp_path / "four", source, tensors, config)
    plain = folder_of(tmp_path / "floats", source, floats, None)
    found, expected = (Engine.load(folder, dtype="float32", cache="off") for folder in (packed, plain))
    assert torch.equal(found.logits([5, 6, 7]), expected.logits([5, 6, 7]))
    [[one], [other]] = (engine.generate([[5, 6, 7]], Trie(beams=4), max_new_tokens=4) for engine in (found, expected))
    assert one.outputs[0].token_ids == other.outputs[0].token_ids


def state(**changes):
    own = {"quant_type": "nf4", "blocksize": 64, "dtype": "bfloat16", "shape": [32, 32]} | changes
    return {".quant_state.bitsandbytes__nf4": torch.tensor([*json.dumps(own).encode()], **BYTES)}


FAULTS = {
    "no magnitudes": ({".absmax": None}, {}, r"missing .*q_proj\.weight\.absmax"),
    "no numbers": ({".quant_map": None}, {}, r"missing .*q_proj\.weight\.quant_map"),
    "no codes": ({"": None}, {}, r"missing .*q_proj\.weight"),
    "no nested": ({".nested_absmax": None}, {"nested": 4}, r"missing .*weight\.nested_absmax"),
    "short codes": ({"": torch.zeros(9, 1, **BYTES)}, {}, r"q_proj\.weight: expected 512 bytes for the shape"),
    "short magnitudes": ({".absmax": torch.zeros(15)}, {}, r"weight\.absmax: expected 16 floats .*got \[15\]"),
    "magnitudes of bytes": ({".absmax": torch.zeros(16, **BYTES)}, {}, "expected 16 floats .*got .* of uint8"),
    "numbers": ({".quant_map": torch.zeros(15)}, {}, r"weight\.quant_map: expected 16 floats"),
    "not finite": ({".absmax": torch.full((16,), math.inf)}, {}, "q_proj.weight: its magnitudes are not finite"),
    "no shape": (state(shape=None), {}, "shape: expected a list of two whole numbers"),
    "shape": (state(shape=[32, 32, 1]), {}, "shape: expected a list of two whole numbers"),
    "dtype": (state(dtype="int8"), {}, "dtype: expected one of"),
    "blocks": (state(blocksize=0), {}, "blocksize: expected a whole number"),
    "no JSON": ({".quant_state.bitsandbytes__nf4": torch.full((9,), 123, **BYTES)}, {}, "not valid JSON"),
    "a long state": ({".quant_state.bitsandbytes__nf4": torch.zeros(1 << 13, **BYTES)}, {}, "a short JSON object"),
    "another matrix": (state(shape=[16, 64]), {}, r"q_proj\.weight .*expected \[32, 32\] of floats, got \[16, 64\]"),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_faults(tmp_path, fault):
    changes, how, message = FAULTS[fault]
    folder, _ = one(tmp_path, changes, **how)
    with pytest.raises(CheckpointError, match=message) as caught:
        Engine.load(folder, dtype="float32", cache="off")
    assert str(folder) in caught.value.where and caught.value.remedy
