"""OLMo Hybrid: spellings of tensors, rotary embeddings or none, beams against fresh evaluations, what is refused."""

import pytest
import torch

from engine import Engine
from models.checkpoint.fields import Fields
from models.checkpoint.headers import Checkpoint
from models.errors import CheckpointError
from models.families.olmo_hybrid import OlmoHybrid
from search import Trie
from tests.models.copies import GOLDEN, changed

TEXT = [(7 * i * i + 3 * i) % 101 + 3 for i in range(70)]
TAPS = "linear_attn.conv1d.weight"


def respelled(tensors, rows, everywhere):
    """Taps in parts of so many rows (None: thirds); norms by other names, in all layers or in recurrent ones."""
    recurrent = {name.split("linear_attn")[0] for name in tensors if "linear_attn" in name}
    found = {}
    for name, tensor in tensors.items():
        layer, taps, _ = name.partition(TAPS)
        if taps:
            parts = tensor.split(rows) if rows else tensor.chunk(3)
            found |= {f"{layer}linear_attn.{x}_conv1d.weight": part for x, part in zip("qkv", parts, strict=True)}
            continue
        if everywhere or any(name.startswith(begin) for begin in recurrent):
            name = name.replace(".input_layernorm.", ".attention_layer_norm.")
            name = name.replace(".post_attention_layernorm.", ".feedforward_layer_norm.")
        found[name] = tensor
    return {name: tensor.contiguous() for name, tensor in found.items()}


@pytest.mark.parametrize(
    ("rows", "everywhere"), [([12, 12, 24], False), (None, True)], ids=["released", "saved by transformers"]
)
def test_other_spellings_are_the_same_model(tmp_path, rows, everywhere):
    """transformers 5.23 cuts taps into thirds when it saves a model, and renames the norms of all layers."""
    folder = changed(tmp_path, "olmo_hybrid/plain", {}, lambda tensors: respelled(tensors, rows, everywhere))
    assert len(Checkpoint.open(folder).tensors) == len(Checkpoint.open(GOLDEN / "olmo_hybrid/plain").tensors)
    plain, found = (Engine.load(path, dtype="float32") for path in (GOLDEN / "olmo_hybrid/plain", folder))
    assert found.logits(TEXT).equal(plain.logits(TEXT))


def test_beams_are_those_of_fresh_evaluations():
    """Branches of several blocks of 32 tokens."""
    engine = Engine.load(GOLDEN / "olmo_hybrid/plain", dtype="float32", kv_memory="4M")
    [result] = engine.generate([TEXT[:20]], Trie(beams=15), max_new_tokens=40, ignore_eos=True)
    for output in result.outputs:
        logp_TV = engine.logits([*TEXT[:20], *output.token_ids]).log_softmax(-1)[19:-1]
        exact = logp_TV.gather(1, torch.tensor(output.token_ids).unsqueeze(1)).sum()
        assert output.logprob == pytest.approx(exact.item(), abs=1e-3)


@pytest.mark.parametrize(
    ("rope", "base"),
    [
        ({"rope_parameters": {"rope_theta": None}}, None),
        ({"rope_parameters": {"rope_theta": None}, "rope_theta": 5.0}, None),
        ({"rope_theta": None}, None),
        ({"rope_parameters": {"rope_theta": 5.0}, "rope_theta": None}, 5.0),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2.0, "rope_theta": None}, "rope_theta": 5.0}, None),
        ({"rope_theta": 5.0}, 5.0),
        ({"rope_parameters": None}, 1e4),
        ({}, 1e4),
    ],
)
def test_a_base_of_null_means_no_rotation(rope, base):
    """An absent base does not: transformers 5.23 then takes 10,000."""
    config = Checkpoint.open(GOLDEN / "olmo_hybrid/plain").config
    config = {name: value for name, value in config.items() if name != "rope_parameters"} | rope
    found = OlmoHybrid.read(Fields(config, "config.json")).rope
    assert base == (found and found.theta)


def test_defaults_are_those_of_transformers():
    """A config with the sizes of the 7B model, and no others."""
    fields = {"hidden_size": 3840, "intermediate_size": 11008, "num_attention_heads": 30, "num_hidden_layers": 32}
    c = OlmoHybrid.read(Fields(fields | {"vocab_size": 100352}, "config.json"))
    assert c.recurrent is not None and c.recurrent.layers == (True, True, True, False) * 8
    kind = c.recurrent.kind
    assert (kind.key_heads, kind.value_heads, kind.key_size, kind.value_size, kind.taps) == (30, 30, 96, 192, 4)
    assert (c.recurrent.most, c.recurrent.eps, c.norm_eps, c.kv_heads) == (2.0, 1e-5, 1e-6, 30)
    assert (c.norms_of(0), c.norms_of(3)) == (("input",), ("output",))
    assert OlmoHybrid.read(Fields(fields | {"vocab_size": 9, "num_hidden_layers": 2}, "")).recurrent.layers == (
        True,
        False,
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layer_types": ["linear_attention"] * 2}, "layer_types: expected at least one layer of full_attention and"),
        ({"layer_types": ["full_attention"] * 2}, "layer_types: expected at least one layer of full_attention and"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types: expected 2 of full_attention and"),
        ({"linear_num_value_heads": 3}, "linear_num_value_heads: expected a multiple of linear_num_key_heads, 2"),
        ({"linear_num_key_heads": 4096, "linear_key_head_dim": None}, "linear_key_head_dim: expected"),
        ({"linear_allow_neg_eigval": 2}, "linear_allow_neg_eigval: expected true or false"),
        ({"linear_conv_kernel_dim": 65}, "linear_conv_kernel_dim: expected"),
        ({"linear_conv_kernel_dim": 3}, r"linear_attn.conv1d.weight in .*expected \[48, 1, 3\]"),
        ({"hidden_act": "gelu"}, "hidden_act: expected one of silu, swish"),
        ({"rope_parameters": {"rope_type": "su"}}, "rope_type: expected one of"),
    ],
)
def test_refusals_name_what_is_wrong(tmp_path, changes, message):
    with pytest.raises(CheckpointError, match=message):
        Engine.load(changed(tmp_path, "olmo_hybrid/plain", changes), dtype="float32")


def test_taps_that_do_not_fit_each_other_are_named(tmp_path):
    def cut(tensors):
        parts = respelled(tensors, [12, 12, 24], False)
        del parts["model.layers.0.linear_attn.k_conv1d.weight"]
        return parts

    with pytest.raises(CheckpointError, match=r"missing model.layers.0.linear_attn.conv1d.weight .*v_conv1d"):
        Engine.load(changed(tmp_path, "olmo_hybrid/plain", {}, cut), dtype="float32")
