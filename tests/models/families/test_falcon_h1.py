"""Falcon-H1 and Bamba: what each factor multiplies, int8 and int4 weights, Triton, what is kept, what is
refused."""

import json

import pytest
import torch

from models.errors import CheckpointError
from models.shard import Shard
from tests.marks import needs_interpreter
from tests.models.answers import QUANTS, TEXT, check_quantised, check_triton, load
from tests.models.copies import GOLDEN, changed


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


@QUANTS
@pytest.mark.parametrize("variant", ["falcon_h1/plain", "falcon_h1/norm", "falcon_h1/bamba"])
def test_quantised_weights_are_near(variant, quant):
    check_quantised(variant, quant, 0.1 if quant == "int8" else 0.5)


@needs_interpreter
@pytest.mark.parametrize("variant", ["falcon_h1/plain", "falcon_h1/norm", "falcon_h1/bamba"])
def test_answers_of_triton(variant):
    """Sums of two outputs of a layer, each with its factor, keep their place in fused launches."""
    check_triton(variant)


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
