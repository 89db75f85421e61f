"""Gemma 4: configs refused, fields that mean nothing, and what the cache keeps."""

import json
import math
from pathlib import Path

import pytest
import torch

from engine import Engine
from kernels import same_bits
from kernels.layout import CacheKind
from models.checkpoint.headers import Checkpoint
from models.checkpoint.sizes import measure
from models.errors import CheckpointError
from models.families import load_model
from models.families.gemma4 import Gemma4
from models.shape import ModelShape
from models.shard import Shard
from models.sharding import Partition
from tests.models.copies import changed

GOLDEN = Path(__file__).parents[2] / "golden/gemma4"


@pytest.mark.parametrize(
    ("variant", "changes", "message"),
    [
        ("plain", {"use_bidirectional_attention": "all"}, "use_bidirectional_attention: expected null"),
        (
            "plain",
            {"per_layer_config": {"1": {"intermediate_size": 7}}},
            "per_layer_config.1.intermediate_size: expect",
        ),
        (
            "plain",
            {"per_layer_config": {"1": {"num_key_value_heads": 3}}},
            "a divisor of num_attention_heads, which is 4",
        ),
        ("plain", {"per_layer_config": {"1": {"head_dim": 7}}}, "per_layer_config: expected heads of an even size"),
        ("plain", {"rope_parameters": {"full_attention": {"rope_type": "cubic"}}}, "rope_type: expected one of"),
        ("plain", {"hidden_size_per_layer_input": -1}, "hidden_size_per_layer_input: expected a whole number from 0"),
        ("inputs", {"num_kv_shared_layers": 6}, "num_kv_shared_layers: expected a whole number from 0 to 5"),
        ("inputs", {"num_kv_shared_layers": 4}, "num_kv_shared_layers: expected a layer of each kind"),
        ("inputs", {"vocab_size_per_layer_input": 9}, "vocab_size_per_layer_input: expected vocab_size, 104, or more"),
        ("experts", {"top_k_experts": 7}, "top_k_experts: expected at most num_experts, which is 6"),
        ("experts", {"moe_intermediate_size": None}, "moe_intermediate_size: expected a value"),
    ],
)
def test_refusals_name_what_is_wrong(tmp_path, variant, changes, message):
    with pytest.raises(CheckpointError, match=message):
        Engine.load(changed(tmp_path, f"gemma4/{variant}", changes), dtype="float32")


def test_the_same_bits_of_wide_heads_are_refused_by_name():
    checkpoint = Checkpoint.open(GOLDEN / "defaults")
    with same_bits.asking("on"), pytest.raises(CheckpointError, match="heads of more than 256 elements does not give"):
        load_model(checkpoint, torch.bfloat16, torch.device("meta"))


@pytest.mark.parametrize("variant", ["plain", "inputs"])
def test_several_processes_are_refused_by_name(variant):
    config = Gemma4.read(Checkpoint.open(GOLDEN / variant).fields)
    with pytest.raises(CheckpointError, match=r"layers that differ, share keys .* cannot be divided among processes"):
        Partition.of(config, Shard(0, 2), "here")


def test_the_last_layer_has_no_window_whatever_the_config_says():
    config = Gemma4.read(Checkpoint.open(GOLDEN / "inputs").fields)
    assert config.windows == (16, 16, None, 16, None, None)


def test_numbers_of_layers_may_begin_with_zeros():
    """Transformers 5.23 saves the layers of a model of more than ten so."""
    fields = Checkpoint.open(GOLDEN / "plain").fields
    padded = {number.zfill(2): own for number, own in fields.config["per_layer_config"].items()}
    assert {*padded} == {"01", "02"}
    assert Gemma4.read(fields.changed({"per_layer_config": padded})) == Gemma4.read(fields)


def test_layers_that_share_keys_keep_none_of_their_own():
    config = Gemma4.read(Checkpoint.open(GOLDEN / "inputs").fields)
    shape, local, full = ModelShape.of(config), CacheKind(2, 8), CacheKind(2, 20)
    assert config.uneven.keys_from == (0, 1, 2, 1, 2, 2) and shape.groups == {local: 2, full: 1}
    assert shape.kv_bytes_per_token(torch.float32) == 2 * 4 * (2 * 2 * 8 + 2 * 20)
    layers = Engine.load(GOLDEN / "inputs", dtype="float32", kv_memory=1 << 22).pool.cache.layers
    assert [k.shape[-1] for k, _ in layers] == [8, 8, 20, 8, 20, 20]
    places = [k.data_ptr() for k, _ in layers]
    assert places[3] == places[1] and places[5] == places[4] == places[2] and len({*places}) == 3


def test_matrices_that_layers_do_not_use_are_left_alone(tmp_path):
    """Published checkpoints have keys and values of layers that read those of others."""

    def more(tensors):
        names = (f"model.layers.5.self_attn.{name}.weight" for name in ("k_proj", "v_proj", "k_norm"))
        return tensors | {name: torch.full((1,), float("nan")) for name in names}

    folder = changed(tmp_path, "gemma4/inputs", tensors=more)
    found = [Engine.load(path, dtype="float32").logits([5, 6, 7]) for path in (folder, GOLDEN / "inputs")]
    assert found[0].equal(found[1])


def test_a_whole_gemma_4_caps_its_logits(tmp_path):
    """Unlike a whole Gemma 3, in transformers too."""
    text = json.loads((GOLDEN / "../wrapped/gemma4/config.json").read_text())["text_config"]
    folder = changed(tmp_path, "wrapped/gemma4", {"text_config": text | {"final_logit_softcapping": 0.1}})
    assert Engine.load(folder, dtype="float32").logits([5, 6, 7]).abs().max() <= 0.1


def test_tables_of_inputs_take_no_memory_but_a_gpus():
    checkpoint = Checkpoint.open(GOLDEN / "inputs")
    sizes = measure(checkpoint, torch.float32, torch.device("cpu"))
    floats = {name: math.prod(info.shape) for name, info in checkpoint.tensors.items()}
    table = floats["model.embed_tokens_per_layer.weight"]
    assert sizes.vectors < 4 * table < 4 * sum(floats.values()) - sizes.vectors
    device = measure(checkpoint, torch.float32, torch.device("meta"))
    assert device.vectors == sizes.vectors + 4 * table  # the embedding is the head


def test_absent_fields():
    config = Gemma4.read(Checkpoint.open(GOLDEN / "defaults").fields)
    assert config.uneven.kv_sizes == ((4, 8),) * 5 + ((4, 512),) and config.windows == (512,) * 5 + (None,)
    assert config.ropes[-1].turned == 64 and config.ropes[0].theta == 1e4 and config.logit_cap is None
