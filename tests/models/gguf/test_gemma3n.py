"""Gemma 3n in GGUF files: the numbers of its checkpoints, what first converters left out, and what is refused."""

import pytest

from engine import CheckpointError
from models.checkpoint.headers import Checkpoint
from models.families.gemma3n import Gemma3n
from tests.models.gguf.files import GOLDEN, File
from tests.models.gguf.test_models import same


def test_floats_are_those_of_the_checkpoint(tmp_path):
    """The matrices of streams lie in one tensor, and gates have quantiles."""
    file = File(GOLDEN / "gemma3n/plain")
    assert file.tensors["altup_proj.weight"].shape == file.tensors["altup_unembd_proj.weight"].shape == (3, 24, 24)
    path = file.write(tmp_path / "file.gguf")
    same(path, GOLDEN / "gemma3n/plain", 1e-5)
    ours, theirs = (Gemma3n.read(Checkpoint.open(path).fields) for path in (path, GOLDEN / "gemma3n/plain"))
    assert ours == theirs


def test_keys_that_first_converters_left_out(tmp_path):
    file = File(GOLDEN / "gemma3n/plain")
    for key in ("activation_sparsity_scale", "final_logit_softcapping", "rope.freq_base_swa"):
        del file.keys[f"gemma3n.{key}"]
    config = Gemma3n.read(Checkpoint.open(file.write(tmp_path / "file.gguf")).fields)
    assert config.logit_cap == 30 and config.ropes[0].theta == 1e4 and config.sparsity == (None,) * 6


@pytest.mark.parametrize("given", [3.0, [float("inf")] * 6, [float("nan")] * 6, [1] * 6, [0.1] * 5])
def test_quantiles_that_are_none(given, tmp_path):
    file = File(GOLDEN / "gemma3n/plain")
    file.keys["gemma3n.activation_sparsity_scale"] = given
    with pytest.raises(CheckpointError, match=r"activation_sparsity_(scale|pattern): expected"):
        Gemma3n.read(Checkpoint.open(file.write(tmp_path / "file.gguf")).fields)
