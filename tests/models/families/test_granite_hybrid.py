"""Granite 4: int8 and int4 weights, limits of steps, what is refused."""

import pytest
import torch

from models.errors import CheckpointError
from models.shard import Shard
from tests.models.answers import QUANTS, TEXT, load
from tests.models.copies import GOLDEN, changed

MAMBA = "model.layers.0.mamba."


@QUANTS
@pytest.mark.parametrize("variant", ["scans", "scans_experts"])
def test_quantised_weights_are_near(variant, quant):
    exact, found = (load(GOLDEN / "granite" / variant, quant=quant) for quant in ("none", quant))
    matrices = [engine.runner.model.layers[0].attention.into for engine in (exact, found)]
    assert len({*map(type, matrices)}) == 2
    exact = exact.logits(TEXT)
    off = (found.logits(TEXT) - exact).norm() / exact.norm()
    assert 0 < off < (0.05 if quant == "int8" else 0.5)


def test_steps_are_clamped(tmp_path):
    """All to one step: as if the inputs of steps, and their biases, were those of that step."""
    step = torch.tensor(0.3)

    def constant(tensors):
        H = len(tensors[f"{MAMBA}D"])
        tensors[f"{MAMBA}in_proj.weight"][-H:] = 0
        tensors[f"{MAMBA}dt_bias"] = torch.full([H], step.expm1().log().item())
        return tensors

    clamped = load(changed(tmp_path / "clamped", "granite/scans", {"time_step_limit": [0.3, 0.3]})).logits(TEXT)
    same = load(changed(tmp_path / "constant", "granite/scans", {}, constant)).logits(TEXT)
    assert torch.allclose(clamped, same, atol=1e-4)
    assert not torch.allclose(clamped, load(GOLDEN / "granite/scans").logits(TEXT), atol=1e-2)


def test_names_of_published_files(tmp_path):
    """Which call the layers "mamba", and have all experts of a layer in one tensor."""
    published = {"experts.gate_up_proj": "input_linear.weight", "experts.down_proj": "output_linear.weight"}
    published["router.weight"] = "router.layer.weight"

    def named(tensors):
        for one, other in published.items():
            one, other = f"block_sparse_moe.{one}", f"block_sparse_moe.{other}"
            tensors = {name.replace(one, other): x for name, x in tensors.items()}
        return tensors

    variant, types = "granite/scans_experts", {"layer_types": ["mamba", "attention", "mamba"]}
    found = load(changed(tmp_path, variant, types | {"position_embedding_type": "nope"}, named))
    assert found.logits(TEXT).equal(load(GOLDEN / variant).logits(TEXT))


def test_what_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match="recurrent layers cannot be divided among processes"):
        load(GOLDEN / "granite/scans", shard=Shard(0, 2))
    biases = {"mamba_conv_bias": False}
    with pytest.raises(CheckpointError, match=r"unknown model.layers.0.mamba.conv1d.bias"):
        load(changed(tmp_path, "granite/scans", biases))
