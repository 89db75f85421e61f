"""MiniMax-M3: names of published files, defaults, what is refused."""

import json
import re

import pytest
import torch

from engine import Engine, UsageError
from models.checkpoint.fields import Fields
from models.checkpoint.wrapped import text_config
from models.errors import CheckpointError
from models.families.minimax import MiniMaxM3
from search import Greedy
from tests.models.copies import GOLDEN, changed

SPARSE = "minimax_m3_sparse"
SIZES = {"vocab_size": 99, "hidden_size": 32, "num_attention_heads": 8, "num_hidden_layers": 3}


def read(**changes):
    return MiniMaxM3.read(Fields({**SIZES, **changes}, "config.json"))


def published(tensors):
    """Experts one by one, gate and up apart, indexers without a module of their own."""
    found = {}
    for name, x in tensors.items():
        name = re.sub(r"\.mlp\.(?=gate\.|experts\.|shared_experts\.)", ".block_sparse_moe.", name)
        name = name.replace(".block_sparse_moe.gate.e_score", ".block_sparse_moe.e_score")
        name = name.replace(".indexer.", ".index_")
        if name.endswith("experts.gate_up_proj"):
            for i, (gate, up) in enumerate(part.chunk(2) for part in x):
                own = name.replace("gate_up_proj", f"{i}.")
                found |= {f"{own}w1.weight": gate.clone(), f"{own}w3.weight": up.clone()}
        elif name.endswith("experts.down_proj"):
            found |= {name.replace("down_proj", f"{i}.w2.weight"): part.clone() for i, part in enumerate(x)}
        elif ".gate_up_proj." in name:
            halves = zip(("gate_proj", "up_proj"), x.chunk(2), strict=True)
            found |= {name.replace("gate_up_proj", half): part.clone() for half, part in halves}
        else:
            found[name] = x
    return found | {"mtp.layers.0.norm.weight": found["model.norm.weight"].clone()}


def test_published_files(tmp_path):
    folder = changed(tmp_path, "experts/minimax_three", tensors=published)
    expected, found = (
        Engine.load(each, dtype="float32").logits([*range(5, 30)])
        for each in (GOLDEN / "experts/minimax_three", folder)
    )
    assert found.equal(expected)


@pytest.mark.parametrize("stored", ["weight", "weight_packed"])
def test_a_quantised_matrix_of_gate_and_up_is_refused(stored, tmp_path):
    def coded(tensors):
        module = "model.layers.0.mlp.gate_up_proj"
        x = tensors.pop(f"{module}.weight")
        dtype = torch.int8 if stored == "weight" else torch.int32
        return tensors | {f"{module}.{stored}": x.to(dtype), f"{module}.weight_scale": torch.ones(len(x), 1)}

    weights = {"num_bits": 8, "type": "int", "strategy": "channel"}
    layout = "int-quantized" if stored == "weight" else "pack-quantized"
    groups = {"one": {"targets": ["re:.*gate_up_proj"], "weights": weights, "format": layout}}
    config = {"quantization_config": {"quant_method": "compressed-tensors", "config_groups": groups}}
    folder = changed(tmp_path, "experts/minimax_three", config, coded)
    with pytest.raises(CheckpointError, match="a quantised matrix of gate and up is not supported"):
        Engine.load(folder, dtype="float32")


def test_texts_of_more_blocks_than_an_indexer_selects_are_refused(tmp_path):
    folder = changed(tmp_path, "experts/minimax_three", {"index_block_size": 4, "index_topk_blocks": 5})
    engine = Engine.load(folder, dtype="float32")
    assert "in texts of more than 20 tokens: longer texts are refused" in engine.capabilities.warning
    with pytest.raises(UsageError, match="21 tokens, this model's maximum context length is 20"):
        engine.generate([[*range(5, 26)]], Greedy())
    with pytest.raises(UsageError, match="more than 20 tokens need this model's indexer"):
        Engine.load(folder, context=21)


def test_defaults_are_those_of_transformers():
    c = read()
    assert (c.selected, c.max_positions, c.mlp_width, c.kv_heads, c.head_dim) == (None, 524288, 12288, 4, 128)
    assert (c.rope.theta, c.rope.head_dim, c.norm_eps, c.plus_one, c.activation) == (
        5e6,
        128,
        1e-6,
        True,
        "clamped_swiglu",
    )
    mixed = c.experts
    assert (mixed.count, mixed.width, mixed.shared_width, mixed.layers) == (128, 3072, 3072, (True,) * 3)
    assert (mixed.routing.chosen, mixed.routing.scores, mixed.routing.scale) == (4, "sigmoid", 2.0)
    assert read(rotary_dim=64).rope.head_dim == 128, "as in transformers, which saves the field in every config"
    assert read(layer_types=[SPARSE] * 3).selected == 2048
    old = {"sparse_attention_freq": [0, 1, 1], "sparse_block_size": 64, "sparse_topk_blocks": 8}
    assert read(sparse_attention_config=old, hidden_act="swigluoai", moe_layer_freq=[0, 1, 1]).selected == 512
    assert read(moe_layer_freq=[0, True, 1]).experts.layers == (False, True, True)
    assert read(mlp_layer_types=["dense"] * 3).experts is None
    whole = {"architectures": ["MiniMaxM3SparseForConditionalGeneration"], "model_type": "minimax_m3_vl"}
    text = text_config(whole | {"text_config": {"model_type": "minimax_m3_vl_text"}}, "")
    assert (text["hidden_size"], text["num_hidden_layers"], text["vocab_size"]) == (6144, 60, 200064)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"swiglu_alpha": 1.0}, r"swiglu_alpha: expected 1\.702: other gates"),
        ({"swiglu_limit": 10.0}, "swiglu_limit: expected 7: other gates"),
        ({"moe_layer_freq": [0, 1]}, "moe_layer_freq: expected 3 of 0 and 1"),
        ({"moe_layer_freq": [0, 1, 1.0]}, "moe_layer_freq: expected 3 of 0 and 1"),
        ({"sparse_attention_config": {"sparse_attention_freq": 1}}, "sparse_attention_config.sparse_attention_freq"),
        ({"layer_types": ["sliding_attention"] * 3}, f"layer_types: expected 3 of full_attention and {SPARSE}"),
        ({"index_topk_blocks": 0}, "index_topk_blocks: expected a whole number"),
    ],
)
def test_refusals_name_the_field(changes, message):
    with pytest.raises(CheckpointError, match=message):
        read(**changes)


def test_spellings_of_the_golden_configs():
    """The older one also has a field that transformers does not read, `rotary_dim`."""
    variants = (GOLDEN / f"experts/minimax_three{end}/config.json" for end in ("", "_v4"))
    one, other = (MiniMaxM3.read(Fields(json.loads(file.read_text()), "")) for file in variants)
    assert one == other and one.selected == 64
