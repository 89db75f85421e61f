"""Gemma 4 in GGUF files: the numbers of its checkpoints, and what is refused."""

import json

import numpy as np
import pytest
from safetensors.torch import load_file, save_file

from engine import CheckpointError, Engine
from engine.text.tokenizer import encoder_of
from models.checkpoint.headers import Checkpoint
from tests.models.gguf.files import GOLDEN, File, gguf
from tests.models.gguf.test_models import same


@pytest.mark.parametrize("variant", ["plain", "inputs", "experts", "everything"])
def test_floats_are_those_of_the_checkpoint(variant, tmp_path):
    same(File(GOLDEN / "gemma4" / variant).write(tmp_path / "file.gguf"), GOLDEN / "gemma4" / variant, 1e-5)


def test_gates_and_ups_in_one_tensor_or_two(tmp_path):
    file = File(GOLDEN / "gemma4/experts")
    together = Engine.load(file.write(tmp_path / "one.gguf"), dtype="float32", kv_memory=1 << 22).logits([5, 6, 7])
    for layer in range(3):
        both = file.tensors.pop(f"blk.{layer}.ffn_gate_up_exps.weight")
        for part, half in zip(("gate", "up"), np.split(both, 2, axis=1), strict=True):
            file.add(f"blk.{layer}.ffn_{part}_exps.weight", half)
        scale = file.tensors.pop(f"blk.{layer}.ffn_down_exps.scale")
        file.add(f"blk.{layer}.ffn_gate_inp.per_expert_scale", scale)  # as the first converters named it
    apart = Engine.load(file.write(tmp_path / "two.gguf"), dtype="float32", kv_memory=1 << 22).logits([5, 6, 7])
    assert apart.equal(together)


def test_quantised_tables_of_inputs_are_read_row_by_row(tmp_path):
    """The package dequantises the same values."""
    source = tmp_path / "source"
    source.mkdir()
    for path in (GOLDEN / "gemma4/inputs").glob("*.json"):
        config = json.loads(path.read_text()) | ({"hidden_size_per_layer_input": 32} if path.stem == "config" else {})
        (source / path.name).write_text(json.dumps(config))
    shapes = {"embed_tokens_per_layer": (107, 192), "per_layer_model_projection": (192, 24)}
    shapes |= {"per_layer_projection_norm": (32,), "per_layer_input_gate": (32, 24), "per_layer_projection": (24, 32)}
    tensors = load_file(GOLDEN / "gemma4/inputs/model.safetensors")
    for name, x in tensors.items():
        if shape := shapes.get(name.split(".")[-2]):
            repeats = [-(-size // own) for size, own in zip(shape, x.shape, strict=True)]
            tensors[name] = x.repeat(*repeats)[tuple(map(slice, shape))].contiguous()
    save_file(tensors, source / "model.safetensors")
    name = "per_layer_token_embd.weight"
    file = File(source, formats={name: gguf.GGMLQuantizationType.Q8_0})
    found = [Engine.load(file.write(tmp_path / "blocks.gguf"), dtype="float32", kv_memory=1 << 22).logits([5, 6, 7])]
    values, file.formats = file.floats(name).numpy(), {}
    file.add(name, values)
    found.append(
        Engine.load(file.write(tmp_path / "floats.gguf"), dtype="float32", kv_memory=1 << 22).logits([5, 6, 7])
    )
    assert found[0].equal(found[1])


@pytest.mark.parametrize("factors", [[1.0, 8.0], [1e30, 1.0]])
def test_factors_of_other_angles(factors, tmp_path):
    file = File(GOLDEN / "gemma4/plain")
    file.add("rope_freqs.weight", np.array(factors * 5, np.float32))
    with pytest.raises(CheckpointError, match="expected ones and then factors of 1e\\+29 or more"):
        Checkpoint.open(file.write(tmp_path / "file.gguf"))


def test_its_vocabulary_has_merges_of_characters_and_bytes(tmp_path):
    file = File(GOLDEN / "gemma4/plain")
    tokens = ["<pad>", "<eos>", "<bos>", "<unk>", "<turn|>", *(f"<0x{i:02X}>" for i in range(256))]
    tokens += ["\u2581", "a", "b", "\n", "ab", "\u2581a", "\n\n", "\u2581ab"]
    types = [3] * 5 + [6] * 256 + [1] * 8
    merges = ["a b", "\u2581 a", "\n \n", "\u2581 ab"]
    given = {"model": "gemma4", "tokens": tokens, "token_type": types, "merges": merges, "add_space_prefix": False}
    given |= {"scores": [-1000.0] * len(tokens), "add_bos_token": True, "bos_token_id": 2, "eos_token_id": 1}
    given |= {"unknown_token_id": 3, "padding_token_id": 0}
    file.keys = {key: value for key, value in file.keys.items() if not key.startswith("tokenizer.")}
    file.keys |= {f"tokenizer.ggml.{key}": value for key, value in given.items()}
    vocabulary = Checkpoint.open(file.write(tmp_path / "file.gguf")).vocabulary
    encoder, _, _ = encoder_of(vocabulary)
    ids = encoder.encode(["ab ab\n\n\u00e9"], True)
    assert [tokens[i] for i in ids] == ["<bos>", "ab", "\u2581ab", "\n\n", "<0xC3>", "<0xA9>"]
    assert encoder.decode([tokens[i] for i in ids[1:]]) == "ab ab\n\n\u00e9"
    assert vocabulary.ends() == [1, 4]
