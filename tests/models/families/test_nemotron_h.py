"""Nemotron-H and Apertus: int8 and int4 weights, names of published files, one process of
several."""

import pytest
import torch

from models.errors import CheckpointError
from models.shard import Shard
from tests.marks import needs_interpreter
from tests.models.answers import QUANTS, TEXT, check_quantised, check_triton, load
from tests.models.copies import GOLDEN, changed

BETA = "model.layers.0.mlp.act_fn.beta"


@QUANTS
@pytest.mark.parametrize(
    "variant", ["nemotron_h/plain", "nemotron_h/bias", "nemotron_h/experts", "nemotron_h/latent", "apertus/plain"]
)
def test_quantised_weights_are_near(variant, quant):
    check_quantised(variant, quant, 0.1 if quant == "int8" else 0.5)  # the square of ReLU doubles what rounding leaves


@needs_interpreter
@pytest.mark.parametrize("variant", ["nemotron_h/experts", "nemotron_h/latent", "apertus/plain"])
def test_answers_of_triton(variant):
    """Layers of one part keep their place in fused launches."""
    check_triton(variant)


def test_names_of_published_files(tmp_path):
    """Which begin with another word, and may hold a draft head."""

    def named(tensors):
        found = {name.replace("model.", "backbone."): x for name, x in tensors.items()}
        return found | {"mtp.layers.0.norm.weight": torch.ones(24)}

    variant, letters = "nemotron_h/plain", {"layers_block_type": None, "hybrid_override_pattern": "M-*-"}
    found = load(changed(tmp_path, variant, letters, named))
    assert found.logits(TEXT).equal(load(GOLDEN / variant).logits(TEXT))


def test_experts_of_published_files(tmp_path):
    """Each has matrices of its own."""

    def apart(tensors):
        found = {name.replace("model.", "backbone."): x for name, x in tensors.items() if ".experts." not in name}
        for name in tensors.keys() - {name.replace("backbone.", "model.") for name in found}:
            every = enumerate(tensors[name].unbind())
            own = name.replace("model.", "backbone.").replace("experts.", "experts.{}.") + ".weight"
            found |= {own.format(i): x.contiguous() for i, x in every}
        return found

    variant = "nemotron_h/experts"
    found = load(changed(tmp_path, variant, {}, apart)).logits(TEXT)
    assert found.equal(load(GOLDEN / variant).logits(TEXT))


def test_layers_that_are_mlps_keep_nothing():
    shape = load(GOLDEN / "nemotron_h/plain").runner.model.shape
    assert shape.kept[1] is shape.kept[3] is None
    assert shape.kv_bytes_per_token(torch.float32) == 2 * 4 * 2 * 10, "keys and values of the one layer of attention"


def test_what_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match="recurrent layers cannot be divided among processes"):
        load(GOLDEN / "nemotron_h/plain", shard=Shard(0, 2))
    with pytest.raises(CheckpointError, match=r"missing model.layers.0.mlp.act_fn.beta"):
        load(changed(tmp_path, "apertus/plain", {}, lambda x: {n: t for n, t in x.items() if n != BETA}))
