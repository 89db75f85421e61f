"""Qwen3.5: configs refused, tensors left out, gates of queries against their formula, int8 and int4 weights."""

import pytest
import torch
from safetensors.torch import load_file

from engine import Engine
from models.errors import CheckpointError
from tests.marks import IMPLS
from tests.models.answers import QUANTS, check_quantised
from tests.models.copies import GOLDEN, changed

RECURRENT = {"layer_types": ["linear_attention", "full_attention"]}
TEXT = [(7 * i * i + 3 * i) % 101 + 3 for i in range(40)]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layer_types": None}, "missing model.layers.0.linear_attn.A_log"),
        ({"layer_types": ["linear_attention", "full_attention"]}, "missing model.layers.0.linear_attn.A_log"),
        (
            RECURRENT | {"linear_num_key_heads": 3},
            "linear_num_value_heads: expected a multiple of",
        ),
        (RECURRENT | {"linear_conv_kernel_dim": 65}, "linear_conv_kernel_dim: expected"),
        (RECURRENT | {"hidden_act": "gelu"}, "hidden_act: expected one of silu, swish"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types: expected 2 of full_attention and"),
        ({"layer_types": None, "full_attention_interval": 0}, "full_attention_interval: expected"),
        ({"num_key_value_heads": 3}, "num_key_value_heads: expected a divisor of num_attention_heads 4"),
        ({"head_dim": 8, "rope_parameters": {"partial_rotary_factor": 0.1}}, "0 of 8 dims cannot be rotated in pairs"),
        ({"attention_bias": True}, "missing model.layers.0.self_attn.q_proj.bias"),
        ({"head_dim": 8}, r"q_proj.weight in .*expected \[64, 24\]"),
    ],
)
def test_refusals_name_what_is_wrong(tmp_path, changes, message):
    with pytest.raises(CheckpointError, match=message):
        Engine.load(changed(tmp_path, "qwen3_5/plain", changes), dtype="float32")


def test_draft_layers_and_encoders_are_left_out(tmp_path):
    more = {"mtp.layers.0.mlp.up_proj.weight": (8, 8), "mtp.norm.weight": (8,), "model.visual.merger.norm.weight": (8,)}

    def beside(tensors):
        return tensors | {name: torch.ones(shape) for name, shape in more.items()}

    found = Engine.load(changed(tmp_path, "qwen3_5/plain", {}, beside), dtype="float32").logits(TEXT)
    assert found.equal(Engine.load(GOLDEN / "qwen3_5/plain", dtype="float32").logits(TEXT))


@pytest.mark.parametrize("impl", IMPLS)
def test_gates_let_attention_through(tmp_path, impl):
    """Gates of 0 let half of it through, whatever the implementation: as without them and half the last matrix."""
    size = 16

    def without(tensors):
        for name, x in tensors.items():
            if name.endswith("q_proj.weight"):
                tensors[name] = x.view(-1, 2, size, x.shape[1])[:, 0].flatten(0, 1).contiguous()
            elif name.endswith("o_proj.weight"):
                tensors[name] = x / 2
            elif name.endswith("norm.weight"):
                tensors[name] = x.float() + 1
        return tensors

    def closed(tensors):
        for name, x in tensors.items():
            if name.endswith("q_proj.weight"):
                x.view(-1, 2, size, x.shape[1])[:, 1] = 0
        return tensors

    rope = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 1.0}}
    plain = changed(
        tmp_path / "plain",
        "qwen3_5/plain",
        rope | {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"},
        without,
    )
    gated = changed(tmp_path / "gated", "qwen3_5/plain", rope, closed)
    assert len(load_file(plain / "model.safetensors")) == len(load_file(gated / "model.safetensors"))
    ours, theirs = (Engine.load(folder, dtype="float32") for folder in (gated, plain))
    ours.runner.impl = impl
    assert torch.allclose(ours.logits(TEXT), theirs.logits(TEXT), atol=1e-4)


@QUANTS
@pytest.mark.parametrize("variant", ["plain", "bias"])
def test_quantised_weights_are_near(variant, quant):
    """Rows of the matrix of queries change places before they are rounded; a wrong order is off by more than 1."""
    check_quantised(f"qwen3_5/{variant}", quant, 0.05 if quant == "int8" else 0.5)
