"""DeepSeek-V2, V3 and V3.2, GLM-4.7-Flash, GLM-5, A.X-K1: sizes of published models, defaults, what is refused."""

import json

import pytest
import torch

from engine import Engine, UsageError
from engine.load.budget import table
from engine.load.options import LoadOptions
from models.checkpoint.fields import Fields
from models.errors import CheckpointError
from models.families import FAMILIES, family_of
from models.shape import ModelShape
from search import Greedy, Trie
from tests.models.copies import GOLDEN, changed
from tools.golden.base import ABSENT

YARN = {"type": "yarn", "factor": 40, "original_max_position_embeddings": 4096, "beta_fast": 32, "beta_slow": 1}
LITE = {
    "hidden_size": 2048, "intermediate_size": 10944, "moe_intermediate_size": 1408, "num_hidden_layers": 27,
    "num_attention_heads": 16, "num_key_value_heads": 16, "vocab_size": 102400, "max_position_embeddings": 163840,
    "q_lora_rank": None, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
    "n_routed_experts": 64, "n_shared_experts": 2, "num_experts_per_tok": 6, "first_k_dense_replace": 1,
    "topk_method": "greedy", "n_group": 1, "topk_group": 1, "norm_topk_prob": False, "scoring_func": "softmax",
    "rope_theta": 10000, "rope_scaling": YARN | {"mscale": 0.707, "mscale_all_dim": 0.707}, "hidden_act": "silu",
}  # fmt: skip


def read(architecture, config):
    return family_of(architecture, "here").read(Fields(config, "config.json"))


def test_the_shape_of_deepseek_v2_lite():
    config = read("DeepseekV2ForCausalLM", LITE)
    shape = ModelShape.of(config)
    assert shape.kv_bytes_per_token(torch.bfloat16) == 27 * 576 * 2
    assert (config.kv_heads, config.head_dim, shape.max_positions) == (1, 576, 163840)
    assert config.scale(0) == pytest.approx(192**-0.5 * (1 + 0.1 * 0.707 * 3.68887945) ** 2)
    assert config.rope is not None and config.rope.attention_factor == 1.0
    names = FAMILIES["DeepseekV2ForCausalLM"].names.tensors(config)
    assert names["model.layers.0.self_attn.kv_b_proj.weight"] == (4096, 512)
    assert names["model.layers.1.mlp.shared_experts.up_proj.weight"] == (2816, 2048)
    assert "model.layers.0.mlp.gate.weight" not in names and "model.layers.26.mlp.gate.weight" in names


def test_published_files_of_axk1(tmp_path):
    """They have no biases of choices, and norms of experts also in layers without experts."""
    biases = ".mlp.gate.e_score_correction_bias"

    def published(tensors):
        norm = tensors["model.layers.2.post_mlp_layernorm.weight"]
        kept = {name: x for name, x in tensors.items() if not name.endswith(biases)}
        return kept | {"model.layers.0.post_mlp_layernorm.weight": norm.clone()}

    def zeros(tensors):
        return {name: x.zero_() if name.endswith(biases) else x for name, x in tensors.items()}

    folders = [changed(tmp_path / f.__name__, "deepseek/axk1", tensors=f) for f in (zeros, published)]
    expected, found = (Engine.load(folder, dtype="float32").logits([*range(5, 30)]) for folder in folders)
    assert found.equal(expected)


@pytest.mark.parametrize("variant", ["deepseek/sparse", "deepseek/glm_sparse"])
def test_texts_that_an_indexer_selects_from_are_refused(tmp_path, variant):
    """Up to `index_topk` tokens it selects all; golden searches end there."""
    folder = changed(tmp_path, variant, {"index_topk": 20})
    engine = Engine.load(folder, dtype="float32")
    assert engine.shape.max_positions == 20
    assert "the indexer is not loaded, which selects what attention reads in texts of more than 20 tokens" in (
        engine.capabilities.warning
    )
    with pytest.raises(UsageError, match=r"21 tokens, this model's maximum context length is 20\nshorten it$"):
        engine.generate([[*range(5, 26)]], Greedy())
    for search in (Greedy(), Trie(beams=4)):
        [result] = engine.generate([[*range(5, 20)]], search, max_new_tokens=40, ignore_eos=True)
        assert [(len(output.token_ids), output.finish_reason) for output in result.outputs] == [(6, "length")]
    with pytest.raises(UsageError, match=r"more than 20 tokens need this model's indexer, .* got 21"):
        Engine.load(folder, context=21)
    with pytest.raises(UsageError, match=r"more than 20 tokens need this model's indexer, .* got 21"):
        table(LoadOptions(folder, context=21), lambda beams: Trie(beams), 5)
    shorter = Engine.load(folder, context=7)
    with pytest.raises(
        UsageError, match=r"maximum context length is 7\nshorten it; .* takes more with a larger --context"
    ):
        shorter.generate([[*range(5, 15)]], Greedy())
    assert Engine.load(GOLDEN / variant).shape.max_positions == 64, "max_position_embeddings is 128"


def test_indexers_of_quantised_files_are_left_out(tmp_path):
    """Published files of DeepSeek-V3.2 have matrices of 8 bits with their scales, those of indexers too."""
    sizes = {"quant_method": "fp8", "weight_block_size": [128, 128]}

    def coded(name, x):
        kept = (
            x.dim() != 2
            or name.endswith("weights_proj.weight")
            or any(part in name for part in ("embed_tokens", "lm_head", "norm", ".mlp.gate.", ".experts."))
        )
        return {} if kept else {name: x.float().to(torch.float8_e4m3fn), f"{name}_scale_inv": torch.ones(1, 1)}

    def quantised(tensors):
        return {new: y for name, x in tensors.items() for new, y in (coded(name, x) or {name: x}).items()}

    def floats(tensors):
        return {name: coded(name, x).get(name, x).to(x.dtype) for name, x in tensors.items()}

    plain = changed(tmp_path / "floats", "deepseek/sparse", tensors=floats)
    ignored = {"modules_to_not_convert": [f"model.layers.{i}.mlp.experts" for i in (1, 2)]}
    folder = changed(tmp_path / "coded", "deepseek/sparse", {"quantization_config": sizes | ignored}, quantised)
    expected, found = (Engine.load(each, dtype="float32").logits([*range(5, 30)]) for each in (plain, folder))
    assert torch.allclose(found, expected, atol=1e-4)


def test_defaults_are_those_of_transformers():
    few = {"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 5, "vocab_size": 99}
    two = read("DeepseekV2ForCausalLM", few | {"num_experts_per_tok": 2})
    three, glm = read("DeepseekV3ForCausalLM", few), read("Glm4MoeLiteForCausalLM", few)
    axk1 = read("AXK1ForCausalLM", few)
    assert (axk1.max_positions, axk1.mlp_width, axk1.latent) == (32768, 18432, three.latent)
    assert (axk1.experts.count, axk1.experts.routing, axk1.experts.layers[:2]) == (
        192,
        three.experts.routing,
        (False, True),
    )
    sparse = [read(name, few) for name in ("DeepseekV32ForCausalLM", "GlmMoeDsaForCausalLM")]
    assert [c.max_positions for c in sparse] == [163840, 202752] and {c.selected for c in sparse} == {2048}
    assert [c.mlp_width for c in sparse] == [18432, 12288] and [c.norm_eps for c in sparse] == [1e-6, 1e-5]
    assert sparse[0].latent == three.latent and sparse[0].experts == three.experts
    assert (sparse[1].latent.query_rank, sparse[1].latent.plain, sparse[1].latent.value) == (2048, 192, 256)
    assert sparse[1].experts.routing == three.experts.routing._replace(groups=1, kept=1)
    sizes = [
        (c.latent.query_rank, c.latent.rank, c.latent.plain, c.latent.rotated, c.latent.value)
        for c in (two, three, glm)
    ]
    assert sizes == [(1536, 512, 128, 64, 128)] * 2 + [(768, 512, 192, 64, 256)]
    assert [c.mlp_width for c in (two, three, glm)] == [11008, 18432, 10240]
    assert [c.norm_eps for c in (two, three, glm)] == [1e-6, 1e-6, 1e-5]
    assert [c.max_positions for c in (two, three, glm)] == [2048, 4096, 202752]
    experts = [c.experts for c in (two, three, glm)]
    assert [(e.count, e.width, e.shared_width) for e in experts] == [
        (64, 1407, 2814),
        (256, 2048, 2048),
        (64, 1536, 1536),
    ]
    assert [sum(e.layers) for e in experts] == [5, 2, 4]
    rules = [e.routing for e in experts]
    assert [(r.chosen, r.scores, r.normalized, r.scale, r.groups, r.kept) for r in rules] == [
        (2, "softmax", False, 1.0, 1, 1), (8, "sigmoid", True, 2.5, 8, 4), (4, "sigmoid", True, 1.8, 1, 1)]  # fmt: skip


FAULTS = [
    ("groups", {"mlp_bias": True}, "mlp_bias: expected false"),
    ("groups", {"topk_method": "noaux_tc"}, "topk_method: expected one of greedy, group_limited_greedy"),
    ("groups", {"n_group": 3}, "n_group: expected a divisor of n_routed_experts, 8"),
    ("groups", {"n_group": None}, "n_group: expected a value"),
    ("groups", {"topk_group": 5}, "topk_group: expected at most n_group, which is 4"),
    ("groups", {"topk_group": 1}, "num_experts_per_tok: expected at most the 2 experts of topk_group groups"),
    (
        "three",
        {"n_group": 8, "topk_group": 4},
        "n_group: expected a divisor of n_routed_experts, 8, that leaves groups",
    ),
    ("plain", {"num_experts_per_tok": ABSENT}, "num_experts_per_tok: expected a value"),
    ("plain", {"num_experts_per_tok": 7}, "num_experts_per_tok: expected at most n_routed_experts, which is 6"),
    ("plain", {"num_key_value_heads": 2}, "num_key_value_heads: expected num_attention_heads, which is 4"),
    ("plain", {"qk_rope_head_dim": 7}, "qk_rope_head_dim: expected an even number"),
    ("plain", {"q_lora_rank": "14"}, "q_lora_rank: expected a whole number"),
    ("plain", {"kv_lora_rank": 0}, "kv_lora_rank: expected a whole number"),
    ("plain", {"n_shared_experts": 0}, "n_shared_experts: expected a whole number from 1"),
    ("three", {"rope_interleave": 1}, "rope_interleave: expected true or false"),
    ("sparse", {"q_lora_rank": None}, "q_lora_rank: expected a whole number from 1"),
    ("sparse", {"index_topk": 0}, "index_topk: expected a whole number from 1"),
    ("glm_sparse", {"mlp_layer_types": ["dense"]}, "mlp_layer_types: expected 3 of dense and sparse"),
    ("glm", {"mlp_layer_types": ["dense", "sparse"]}, "mlp_layer_types: expected 3 of dense and sparse"),
]


@pytest.mark.parametrize(("variant", "changes", "message"), FAULTS)
def test_refusals_name_the_field(variant, changes, message):
    config = json.loads((GOLDEN / "deepseek" / variant / "config.json").read_text()) | changes
    config = {name: value for name, value in config.items() if value is not ABSENT}
    with pytest.raises(CheckpointError, match=message):
        read(config["architectures"][0], config)
