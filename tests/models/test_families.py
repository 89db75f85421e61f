"""Families that are options of a decoder: what their configurations refuse, and defaults that no golden file shows."""

import re
from pathlib import Path

import pytest

from models import FAMILIES
from models.checkpoint.fields import Fields
from models.checkpoint.wrapped import TEXT_MODELS
from models.errors import CheckpointError

SIZES = {
    "vocab_size": 100,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
HYBRID = {"num_local_experts": 0, "layer_types": ["attention"] * 4}


def read(architecture, **changes):
    fields = {**SIZES, **changes, "architectures": [architecture]}
    return FAMILIES[architecture].read(Fields(fields, "config.json"))


@pytest.mark.parametrize(
    ("architecture", "field", "changes"),
    [
        ("StableLmForCausalLM", "qk_layernorm", {"qk_layernorm": True}),
        ("StableLmForCausalLM", "head_dim", {"head_dim": 16}),
        ("GraniteForCausalLM", "logits_scaling", {"logits_scaling": 0}),
        ("GraniteMoeHybridForCausalLM", "num_local_experts", {**HYBRID, "num_local_experts": 8}),
        ("GraniteMoeHybridForCausalLM", "num_local_experts", {"layer_types": ["attention"] * 4}),
        ("GraniteMoeHybridForCausalLM", "layer_types", {"num_local_experts": 0}),
        ("GraniteMoeHybridForCausalLM", "layer_types", {**HYBRID, "layer_types": ["attention", "mamba"] * 2}),
        ("SmolLM3ForCausalLM", "no_rope_layers", {"no_rope_layers": [1, 0]}),
        ("SmolLM3ForCausalLM", "no_rope_layers", {"no_rope_layers": [1, 0, 2, 1]}),
        ("SmolLM3ForCausalLM", "no_rope_layer_interval", {"no_rope_layer_interval": 0}),
        ("SmolLM3ForCausalLM", "sliding_window", {"layer_types": ["sliding_attention"] * 4}),
        ("MinistralForCausalLM", "sliding_window", {"layer_types": ["sliding_attention"] * 4, "sliding_window": None}),
        ("Ministral3ForCausalLM", "llama_4_scaling_beta", {"rope_parameters": {"rope_theta": 1e4}}),
        ("Olmo3ForCausalLM", "layer_types", {"layer_types": ["full_attention"]}),
        ("Qwen2ForCausalLM", "layer_types", {"layer_types": ["chunked_attention"] * 4}),
    ],
)
def test_refusals_name_the_field(architecture, field, changes):
    with pytest.raises(CheckpointError, match=field):
        read(architecture, **changes)


def test_defaults_of_transformers():
    ministral = read("Ministral3ForCausalLM", num_attention_heads=8).rope
    assert (ministral.kind, ministral.theta, ministral.growth, ministral.growth_length) == ("yarn", 1e6, 0.1, 16384)
    assert read("SmolLM3ForCausalLM").tied and read("SmolLM3ForCausalLM").ropes[0].theta == 2e6
    assert read("SmolLM3ForCausalLM").ropes[3] is None
    assert read("Olmo3ForCausalLM").windows == (4096, 4096, 4096, None)
    assert {rope.theta for rope in read("Olmo3ForCausalLM", rope_theta=1e4).ropes} == {1e4, 5e5}
    assert read("GraniteMoeHybridForCausalLM", **HYBRID).rope is None
    assert read("Qwen2ForCausalLM", use_sliding_window=True, max_window_layers=3).windows == (None, None, None, 4096)


def test_the_page_of_checkpoints_lists_every_architecture():
    page = (Path(__file__).parents[2] / "docs" / "checkpoints.md").read_text(encoding="utf-8")
    table, wrapped = re.search(r"## Architectures\n(.+?)\nOf a model(.+?decides.+?)\n\[Add", page, re.DOTALL).groups()
    assert {*re.findall(r"`(\w+For\w+|\w+HeadModel)`", table)} == {*FAMILIES}
    assert {*re.findall(r"`(\w+)`", wrapped.partition("`model_type` decides")[2])} == {*TEXT_MODELS}
