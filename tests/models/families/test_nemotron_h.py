"""Nemotron-H and Apertus: int8 and int4 weights, names of published files, one process of
several."""

import pytest
import torch

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
