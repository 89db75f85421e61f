"""Gemma 3n: configs refused, absent fields, and what the cache keeps."""

import json
from pathlib import Path

import pytest
import torch

from engine import Engine
from kernels import same_bits
from kernels.layout import CacheKind
from models.checkpoint.fields import Fields
from models.checkpoint.headers import Checkpoint
from models.config import Streams
from models.errors import CheckpointError
from models.families import load_model
from models.families.gemma3n import Gemma3n
from models.shape import ModelShape
from models.shard import Shard
from models.sharding import Partition
from tests.models.copies import changed

GOLDEN = Path(__file__).parents[2] / "golden/gemma3n"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"intermediate_size": [40] * 5}, "intermediate_size: expected a number, or 6 of them"),
        ({"intermediate_size": [40] * 5 + [0]}, "intermediate_size: expected a number, or 6 of them"),
        ({"activation_sparsity_pattern": [0.5] * 5}, "activation_sparsity_pattern: expected 6 numbers"),
        ({"activation_sparsity_pattern": 0.5}, "activation_sparsity_pattern: expected 6 numbers"),
        ({"activation_sparsity_pattern": [1] * 6}, "from 0 to less than 1"),
        ({"altup_num_inputs": 1}, "altup_num_inputs: expected a whole number from 2 to 16"),
        ({"altup_active_idx": 4}, "altup_active_idx: expected a whole number from 0 to 3"),
        ({"laurel_rank": 0}, "laurel_rank: expected a whole number from 1"),
        ({"hidden_size_per_layer_input": 0}, "hidden_size_per_layer_input: expected a whole number from 1"),
        ({"num_kv_shared_layers": 4}, "num_kv_shared_layers: expected a layer of each kind"),
    ],
)
def test_refusals_name_what_is_wrong(tmp_path, changes, message):
    with pytest.raises(CheckpointError, match=message):
        Engine.load(changed(tmp_path, "gemma3n/plain", changes), dtype="float32")


def test_several_processes_are_refused_by_name():
    config = Gemma3n.read(Checkpoint.open(GOLDEN / "plain").fields)
    with pytest.raises(CheckpointError, match=r"layers that differ, share keys .* cannot be divided among processes"):
        Partition.of(config, Shard(0, 2), "here")


def test_the_same_bits_on_a_gpu_are_refused_by_name():
    checkpoint = Checkpoint.open(GOLDEN / "plain")
    with same_bits.asking("on"), pytest.raises(CheckpointError, match="several residual streams does not give"):
        load_model(checkpoint, torch.float32, torch.device("meta"))


def test_absent_fields():
    sizes = {"vocab_size": 300000, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 20}
    config = Gemma3n.read(Fields(sizes | {"num_attention_heads": 4}, "config.json"))
    assert config.uneven.kv_sizes == ((2, 256),) * 20 and config.windows == ((512,) * 4 + (None,)) * 4
    assert config.uneven.keys_from == (0, 1, 2, 3, 4, *(3, 3, 3, 3, 4) * 3)
    assert config.streams == Streams(4, 0, scaled=True) and config.laurel == 64 and config.logit_cap == 30
    assert config.layer_inputs.width == 256 and config.layer_inputs.vocab_size == 262144
    assert config.sparsity == (pytest.approx(1.6448536, rel=1e-6),) * 10 + (None,) * 10
    assert [config.ropes[i].theta for i in (0, 4)] == [1e4, 1e6] and config.max_positions == 32768
    few = {"num_attention_heads": 4, "num_hidden_layers": 10, "num_kv_shared_layers": 0}
    assert Gemma3n.read(Fields(sizes | few, "config.json")).sparsity == (None,) * 10


def test_quantiles_of_shares_are_those_of_torch(tmp_path):
    shares = [0.95, 0.6, 0.001, 0.3, 0.5, 0.999]
    folder = changed(tmp_path, "gemma3n/plain", {"activation_sparsity_pattern": shares})
    theirs = (torch.distributions.Normal(0, 1).icdf(torch.tensor(share)).item() for share in shares)
    assert Gemma3n.read(Checkpoint.open(folder).fields).sparsity == tuple(theirs)


def test_layers_that_share_keys_keep_none_of_their_own():
    config = Gemma3n.read(Checkpoint.open(GOLDEN / "plain").fields)
    assert config.uneven.keys_from == (0, 1, 2, 1, 2, 1)
    assert ModelShape.of(config).groups == {CacheKind(2, 8): 3}


def test_tensors_that_are_not_used_are_left_alone(tmp_path):
    """Published checkpoints have keys and values of layers that read those of others."""

    def more(tensors):
        names = (f"model.layers.5.self_attn.{name}.weight" for name in ("k_proj", "v_proj", "k_norm"))
        return tensors | {name: torch.full((1,), float("nan")) for name in names}

    folder = changed(tmp_path, "gemma3n/plain", tensors=more)
    found = [Engine.load(path, dtype="float32").logits([5, 6, 7]) for path in (folder, GOLDEN / "plain")]
    assert found[0].equal(found[1])


def test_a_whole_gemma_3n_caps_its_logits(tmp_path):
    text = json.loads((GOLDEN / "../wrapped/gemma3n/config.json").read_text())["text_config"]
    folder = changed(tmp_path, "wrapped/gemma3n", {"text_config": text | {"final_logit_softcapping": 0.1}})
    assert Engine.load(folder, dtype="float32").logits([5, 6, 7]).abs().max() <= 0.1


def test_the_clip_of_weights_is_for_training(tmp_path):
    """The golden checkpoint has one that would change everything."""
    folder = changed(tmp_path, "gemma3n/plain", {"altup_coef_clip": 120.0})
    found = [Engine.load(path, dtype="float32").logits([5, 6, 7]) for path in (folder, GOLDEN / "plain")]
    assert found[0].equal(found[1])
