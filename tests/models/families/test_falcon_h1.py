"""Falcon-H1 and Bamba: what each factor multiplies, int8 and int4 weights, Triton, what is kept, what is
refused."""

import json

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


def load(folder, **options):
    return Engine.load(folder, **{"dtype": "float32", "kv_memory": 1 << 24} | options)


def fields(variant):
    return json.loads((GOLDEN / variant / "config.json").read_text())


@pytest.mark.parametrize("variant", ["plain", "norm"])
def test_factors_multiply_the_outputs_of_matrices(variant, tmp_path):
    """The logits equal those of a model whose matrices are multiplied by the factors, as in files of llama.cpp."""
    c = fields(f"falcon_h1/{variant}")
    into, key, (gate, down) = c["attention_in_multiplier"], c["key_multiplier"], c["mlp_multipliers"]
    factors = {
        **{"q_proj": into, "k_proj": into * key, "v_proj": into, "o_proj": c["attention_out_multiplier"]},
        **{"gate_proj": gate, "down_proj": down, "out_proj": c["ssm_out_multiplier"]},
        **{"embed_tokens": c["embedding_multiplier"], "lm_head": c["lm_head_multiplier"]},
    }
    keys, ones = c["mamba_n_groups"] * c["mamba_d_state"], {name: None for name in c if "_multiplier" in name}
    sizes = c["mamba_d_ssm"], c["mamba_d_ssm"], keys, keys, c["mamba_n_heads"]

    def multiplied(tensors):
        for name, x in tensors.items():
            part = name.split(".")[-2]
            if part == "in_proj":
                parts = zip(x.float().split(sizes), c["ssm_multipliers"], strict=True)
                tensors[name] = torch.cat([y * factor for y, factor in parts]) * c["ssm_in_multiplier"]
            elif part in factors:
                tensors[name] = x.float() * factors[part]
        return tensors

    found = load(changed(tmp_path, f"falcon_h1/{variant}", ones, multiplied)).logits(TEXT)
    expected = load(GOLDEN / "falcon_h1" / variant).logits(TEXT)
    assert (found - expected).abs().max() < 2e-5 * expected.std()


@pytest.mark.parametrize("quant", [pytest.param("int8", marks=needs_int8), pytest.param("int4", marks=needs_cpp)])
@pytest.mark.parametrize("variant", ["falcon_h1/plain", "falcon_h1/norm", "falcon_h1/bamba"])
def test_quantised_weights_are_near(variant, quant):
    exact, found = (load(GOLDEN / variant, quant=quant).logits(TEXT) for quant in ("none", quant))
    off = (found - exact).norm() / exact.norm()
    assert 0 < off < (0.1 if quant == "int8" else 0.5)


@needs_interpreter
@pytest.mark.parametrize("variant", ["falcon_h1/plain", "falcon_h1/norm", "falcon_h1/bamba"])
def test_answers_of_triton(variant):
    """Sums of two outputs of a layer, each with its factor, keep their place in fused launches."""
    plain = load(GOLDEN / variant)
    pool = PagePool(plain.shape, 40, 16, torch.float32)
    runner = GraphRunner(plain.runner.model, pool, plain.runner.vocab_size, impl="triton", record=lambda run: run)
    engine = Engine(LoadedModel(runner, plain.shape, None, eos_token_ids=plain.eos_token_ids))
    options = {"max_new_tokens": 2, "ignore_eos": True, "logprobs": 1}
    (ours, theirs) = (each.generate([TEXT[:5]], Trie(beams=2), **options)[0].outputs for each in (engine, plain))
    for found, wanted in zip(ours, theirs, strict=True):
        assert found.token_ids == wanted.token_ids
        assert found.token_logprobs == pytest.approx(wanted.token_logprobs, abs=1e-4)


def test_a_layer_keeps_keys_and_a_state():
    shape = load(GOLDEN / "falcon_h1/plain").runner.model.shape
    assert len(shape.kept) == 2 * shape.layers and shape.kept[2] == shape.kept[3] == shape.delta
    assert shape.kv_bytes_per_token(torch.float32) == 2 * 2 * 4 * 2 * 10, "keys and values of both layers"
    assert shape.state_bytes == 2 * 4 * 8 * 9 * 5


def test_half_precision_is_near():
    exact, found = (load(GOLDEN / "falcon_h1/plain", dtype=dtype).logits(TEXT) for dtype in ("float32", "bfloat16"))
    assert (found - exact).norm() < 0.02 * exact.norm()


def test_what_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match="recurrent layers cannot be divided among processes"):
        load(GOLDEN / "falcon_h1/plain", shard=Shard(0, 2))
    with pytest.raises(CheckpointError, match=r"missing model.layers.0.mamba.norm.weight"):
        load(changed(tmp_path, "falcon_h1/plain", {"mamba_rms_norm": True}))
