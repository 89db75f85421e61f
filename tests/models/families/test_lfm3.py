"""LFM3: gates of heads against their meaning, spellings, defaults, what is refused."""

import json

import pytest
import torch

from engine import Engine
from models.checkpoint.fields import Fields
from models.errors import CheckpointError
from models.families.lfm3 import LFM3
from search import Trie
from tests.marks import IMPLS
from tests.models.copies import GOLDEN, changed

TEXT = [(7 * i * i + 3 * i) % 101 + 3 for i in range(40)]
GATE, OUT = "self_attn.gate_proj.weight", "self_attn.o_proj.weight"


def load(folder):
    return Engine.load(folder, dtype="float32", kv_memory="2M")


def gates_of(tensors):
    """The tensors with names of gates as the released files have them."""
    return {name.replace(".self_attn.g_proj.", ".self_attn.gate_proj."): x for name, x in tensors.items()}


def test_gates_have_two_names(tmp_path):
    found = load(changed(tmp_path, "lfm3/plain", {}, gates_of)).logits(TEXT)
    assert found.equal(load(GOLDEN / "lfm3/plain").logits(TEXT))


@pytest.mark.parametrize("impl", IMPLS)
def test_a_gate_scales_its_head(tmp_path, impl):
    """Closed gates let half of a head through: as half of what the last matrix makes of that head, and no gates."""

    def closed(tensors):
        return {name: torch.zeros_like(x) if name.endswith(GATE) else x for name, x in gates_of(tensors).items()}

    def without(tensors):
        kept = {name: x for name, x in gates_of(tensors).items() if not name.endswith(GATE)}
        return {name: x / 2 if name.endswith(OUT) else x for name, x in kept.items()}

    gated, plain = (
        load(changed(tmp_path / name, "lfm3/plain", {"use_attention_gate": bool(gates)}, tensors))
        for name, gates, tensors in (("gated", 1, closed), ("plain", 0, without))
    )
    gated.runner.impl = impl
    assert torch.allclose(gated.logits(TEXT), plain.logits(TEXT), atol=1e-4)


def test_beams_are_those_of_fresh_evaluations():
    engine = load(GOLDEN / "lfm3/plain")
    [result] = engine.generate([TEXT], Trie(beams=15), max_new_tokens=20, ignore_eos=True)
    for output in result.outputs:
        logp_TV = engine.logits([*TEXT, *output.token_ids]).log_softmax(-1)[39:-1]
        exact = logp_TV.gather(1, torch.tensor(output.token_ids).unsqueeze(1)).sum()
        assert output.logprob == pytest.approx(exact.item(), abs=1e-3)


def test_defaults_are_those_of_transformers():
    fields = {"vocab_size": 99, "hidden_size": 2048, "intermediate_size": 7680, "num_attention_heads": 16}
    c = LFM3.read(Fields(fields | {"num_hidden_layers": 24}, "config.json"))
    assert c.convs is not None and c.convs.taps == (7, 7, 0, 7, *(0, 7, 0, 7) * 5)
    assert c.windows == tuple(256 if i % 4 == 0 and i else None for i in range(24))
    windowed, full, none = c.ropes[4], c.ropes[2], c.ropes[0]
    assert windowed and full and none is None
    assert (windowed.theta, windowed.kind, full.theta, full.kind, full.turned) == (
        1e4,
        "default",
        1e6,
        "proportional",
        32,
    )
    assert (c.head_dim, c.kv_heads, c.tied, c.head_gates, c.norms) == (128, 4, True, True, ("input", "output"))
    assert not c.attention_bias and not c.convs.bias and c.norm_eps == 1e-5
    assert LFM3.read(Fields(fields | {"num_hidden_layers": 3, "rms_norm_eps": 0.1}, "")).norm_eps == 0.1


def test_the_activation_is_fixed(tmp_path):
    """The activation is fixed, as in transformers, which reads no field for it."""
    other = load(changed(tmp_path, "lfm3/plain", {"hidden_act": "gelu"}))
    assert other.logits(TEXT).equal(load(GOLDEN / "lfm3/plain").logits(TEXT))


def ropes(**changes):
    found = json.loads((GOLDEN / "lfm3/plain/config.json").read_text())["rope_parameters"]
    return {"rope_parameters": found | changes}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layer_types": ["conv", "linear_attention", "conv"]}, "layer_types: expected 3 of conv and full_attention"),
        ({"sliding_window": None}, "sliding_window: expected a window, as layer_types has layers of sliding"),
        ({"sliding_window": 0}, "sliding_window: expected a whole number"),
        (ropes(sliding_attention=None), "rope_parameters.sliding_attention: expected an object, as layer_types has"),
        ({"rope_parameters": {"rope_type": "default"}}, "rope_parameters.(full|sliding)_attention: expected an object"),
        (ropes(full_attention={"rope_type": "no"}), "rope_type: expected one of .*proportional"),
        ({"use_attention_gate": False}, "unknown model.layers.1.self_attn.gate_proj.weight"),
        ({"use_sandwich_norm": False}, "unknown model.layers.0.post_ffn_norm.weight"),
        ({"use_sandwich_norm": 1}, "use_sandwich_norm: expected true or false"),
        ({"conv_L_cache": 65}, "conv_L_cache: expected a whole number"),
        ({"num_key_value_heads": 3}, "num_key_value_heads: expected a divisor of num_attention_heads 4"),
    ],
)
def test_refusals_name_what_is_wrong(tmp_path, changes, message):
    with pytest.raises(CheckpointError, match=message):
        load(changed(tmp_path, "lfm3/plain", changes))
