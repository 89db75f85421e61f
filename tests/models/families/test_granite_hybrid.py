"""Granite 4: int8 and int4 weights, adapters of its matrices, limits of steps, what is refused."""

import json

import pytest
import torch
from safetensors.torch import save_file

from engine import Engine
from models.errors import CheckpointError
from models.shard import Shard
from tests.marks import needs_cpp, needs_int8
from tests.models.copies import GOLDEN, changed

TEXT = [(7 * i * i + 3 * i) % 101 + 3 for i in range(70)]
MAMBA = "model.layers.0.mamba."


def load(folder, **options):
    return Engine.load(folder, **{"dtype": "float32", "kv_memory": 1 << 24} | options)


@pytest.mark.parametrize("quant", [pytest.param("int8", marks=needs_int8), pytest.param("int4", marks=needs_cpp)])
@pytest.mark.parametrize("variant", ["scans", "scans_experts"])
def test_quantised_weights_are_near(variant, quant):
    exact, found = (load(GOLDEN / "granite" / variant, quant=quant) for quant in ("none", quant))
    matrices = [engine.runner.model.layers[0].attention.into for engine in (exact, found)]
    assert len({*map(type, matrices)}) == 2
    exact = exact.logits(TEXT)
    off = (found.logits(TEXT) - exact).norm() / exact.norm()
    assert 0 < off < (0.05 if quant == "int8" else 0.5)


@pytest.mark.parametrize(("module", "outs", "width"), [("mamba.in_proj", 124, 24), ("mamba.out_proj", 24, 48)])
def test_an_adapter_is_added_to_a_matrix(module, outs, width, tmp_path):
    """The answers are those of the checkpoint whose matrix is the sum."""
    draw = torch.Generator().manual_seed(3)
    a, b = torch.randn(2, width, generator=draw) / 8, torch.randn(outs, 2, generator=draw) / 8
    folder, name = tmp_path / "adapter", f"model.layers.0.{module}"
    folder.mkdir()
    save_file(
        {f"base_model.model.{name}.lora_{x}.weight": y for x, y in (("A", a), ("B", b))},
        folder / "adapter_model.safetensors",
    )
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": [module.split(".")[1]], "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(config))

    def summed(tensors):
        tensors[f"{name}.weight"] = tensors[f"{name}.weight"].float() + 2 * b @ a
        return tensors

    merged = load(changed(tmp_path / "merged", "granite/scans", {}, summed)).logits(TEXT)
    engine = load(GOLDEN / "granite/scans", adapters=[folder])
    found, plain = engine.logits(TEXT, "adapter"), load(GOLDEN / "granite/scans").logits(TEXT)
    assert (found - merged).abs().max() < 1e-4 < 1e-2 < (found - plain).abs().max()


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
