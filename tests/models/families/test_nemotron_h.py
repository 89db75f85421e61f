"""Nemotron-H and Apertus: int8 and int4 weights, adapters of their matrices, names of published files, one process of
several."""

import json

import pytest
import torch
from safetensors.torch import save_file

from engine import Engine
from engine.cache.pool import PagePool
from engine.load.loading import LoadedModel
from engine.step.graphs import GraphRunner
from models.errors import CheckpointError
from models.shard import Shard
from search import Trie
from tests.marks import needs_cpp, needs_int8, needs_interpreter
from tests.models.copies import GOLDEN, changed

TEXT = [(7 * i * i + 3 * i) % 101 + 3 for i in range(70)]

BETA = "model.layers.0.mlp.act_fn.beta"


def load(folder, **options):
    return Engine.load(folder, **{"dtype": "float32", "kv_memory": 1 << 24} | options)


@pytest.mark.parametrize("quant", [pytest.param("int8", marks=needs_int8), pytest.param("int4", marks=needs_cpp)])
@pytest.mark.parametrize("variant", ["nemotron_h/plain", "nemotron_h/bias", "nemotron_h/experts", "apertus/plain"])
def test_quantised_weights_are_near(variant, quant):
    exact, found = (load(GOLDEN / variant, quant=quant).logits(TEXT) for quant in ("none", quant))
    off = (found - exact).norm() / exact.norm()
    assert 0 < off < (0.1 if quant == "int8" else 0.5)  # the square of ReLU doubles what rounding leaves


@pytest.mark.parametrize("begin", ["base_model.model.model.", "base_model.model.backbone."])
@pytest.mark.parametrize(
    ("variant", "layer", "outs", "width"),
    [
        ("nemotron_h/plain", "layers.0.mixer.in_proj", 102, 24),
        ("nemotron_h/plain", "layers.1.mixer.up_proj", 40, 24),
        ("nemotron_h/plain", "layers.2.mixer.k_proj", 20, 24),
        ("nemotron_h/plain", "layers.3.mixer.down_proj", 24, 40),
        ("apertus/plain", "layers.1.mlp.up_proj", 40, 24),
    ],
)
def test_an_adapter_is_added_to_a_matrix(variant, layer, outs, width, begin, tmp_path):
    """The answers are those of the checkpoint whose matrix is the sum."""
    draw = torch.Generator().manual_seed(3)
    a, b = torch.randn(2, width, generator=draw) / 8, torch.randn(outs, 2, generator=draw) / 8
    folder = tmp_path / "adapter"
    folder.mkdir()
    factors = {f"{begin}{layer}.lora_{x}.weight": y for x, y in (("A", a), ("B", b))}
    save_file(factors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "bias": "none", "target_modules": [layer.split(".")[-1]]}
    (folder / "adapter_config.json").write_text(json.dumps(config))

    def summed(tensors):
        tensors[f"model.{layer}.weight"] = tensors[f"model.{layer}.weight"].float() + 2 * b @ a
        return tensors

    merged = load(changed(tmp_path / "merged", variant, {}, summed)).logits(TEXT)
    found = load(GOLDEN / variant, adapters=[folder]).logits(TEXT, "adapter")
    plain = load(GOLDEN / variant).logits(TEXT)
    assert (found - merged).abs().max() < 1e-4 < 1e-3 < (found - plain).abs().max()


@needs_interpreter
@pytest.mark.parametrize("variant", ["nemotron_h/experts", "apertus/plain"])
def test_answers_of_triton(variant):
    """Layers of one part keep their place in fused launches."""
    plain = load(GOLDEN / variant)
    pool = PagePool(plain.shape, 40, 16, torch.float32)
    runner = GraphRunner(plain.runner.model, pool, plain.runner.vocab_size, impl="triton", record=lambda run: run)
    engine = Engine(LoadedModel(runner, plain.shape, None, eos_token_ids=plain.eos_token_ids))
    options = {"max_new_tokens": 2, "ignore_eos": True, "logprobs": 1}
    (ours, theirs) = (each.generate([TEXT[:5]], Trie(beams=2), **options)[0].outputs for each in (engine, plain))
    for found, wanted in zip(ours, theirs, strict=True):
        assert found.token_ids == wanted.token_ids
        assert found.token_logprobs == pytest.approx(wanted.token_logprobs, abs=1e-4)


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
