"""Families that are options of a decoder: what their configurations refuse, and defaults that no golden file shows."""

import json
import math
import re
from pathlib import Path

import pytest
import torch

from engine import Engine
from kernels.experts.routing import Routing
from kernels.layout import CacheKind, ChannelKind, DeltaKind, ScanKind
from models import FAMILIES
from models.checkpoint.fields import Fields
from models.checkpoint.wrapped import TEXT_MODELS
from models.config import FULL, SLIDING, Recurrent, SharedBlocks
from models.errors import CheckpointError
from models.shape import ModelShape
from search import Trie
from tests.models.copies import GOLDEN, changed

SIZES = {
    "vocab_size": 100,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
ATTENTION = {"layer_types": ["full_attention"] * 4}
HYBRID = {"num_local_experts": 0, "layer_types": ["attention"] * 4}
SCANS = {"layer_types": ["mamba", "attention"] * 2, "mamba_n_heads": 8}

HEADS = {"num_key_value_heads": 4}
SHARED = {"layers_block_type": ["mamba", "hybrid"] * 2}
PLAIN = {"rope_type": "default", "rope_theta": 1e4}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16}
COMPASS = {"layer_types": ["sliding_attention"] * 4, "rope_parameters": {"sliding_attention": PLAIN}}
GPT_NEO = {"num_heads": 4, "num_layers": 4}
BLOOM = {"n_head": 4, "n_layer": 4}
MPT = {"d_model": 32, "n_heads": 4, "n_layers": 4}


def read(architecture, **changes):
    fields = {**SIZES, **changes, "architectures": [architecture]}
    return FAMILIES[architecture].read(Fields(fields, "config.json"))


@pytest.mark.parametrize(
    ("architecture", "field", "changes"),
    [
        ("StableLmForCausalLM", "head_dim", {"head_dim": 16}),
        ("HeliumForCausalLM", "head_dim", {"head_dim": 16}),
        ("GPTNeoXForCausalLM", "head_dim", {"head_dim": 16}),
        ("GPTNeoXJapaneseForCausalLM", "head_dim", {"head_dim": 16}),
        ("PersimmonForCausalLM", "head_dim", {"head_dim": 16}),
        ("BloomForCausalLM", "hidden_size: expected a multiple", {**BLOOM, "n_embed": 30}),
        ("MptForCausalLM", r"attn_config\.alibi: expected true", {**MPT, "attn_config": {"alibi": False}}),
        ("MptForCausalLM", r"attn_config\.qk_ln: expected false", {**MPT, "attn_config": {"qk_ln": True}}),
        ("MptForCausalLM", r"attn_config\.attn_type", {**MPT, "attn_config": {"attn_type": "multiquery_attention"}}),
        ("MptForCausalLM", "no_bias", {**MPT, "no_bias": False}),
        ("MptForCausalLM", "logit_scale", {**MPT, "logit_scale": "inv_sqrt_d_model"}),
        ("XGLMForCausalLM", "add_cross_attention", {"add_cross_attention": True}),
        ("MllamaForCausalLM", "cross_attention_layers", {"cross_attention_layers": [1.5]}),
        ("AriaTextForCausalLM", "hidden_act: expected silu", {"hidden_act": "gelu"}),
        ("AriaTextForCausalLM", "mlp_bias", {"mlp_bias": True}),
        ("XGLMForCausalLM", "pad_token_id", {"pad_token_id": 2}),
        ("XGLMForCausalLM", "d_model", {"hidden_size": 2}),
        ("CTRLLMHeadModel", "layer_norm_epsilon", {"layer_norm_epsilon": 1e-5}),
        ("CTRLLMHeadModel", "n_embd", {"hidden_size": 33}),
        ("OpenAIGPTLMHeadModel", "afn", {"n_embd": 32, "n_head": 4, "n_layer": 1, "afn": "gelu_new"}),
        ("InternLM3ForCausalLM", "qkv_bias", {"qkv_bias": True}),
        ("AfmoeForCausalLM", "attention_bias", {"attention_bias": True}),
        ("Ernie4_5_MoeForCausalLM", "use_bias", {"use_bias": True}),
        ("Ernie4_5_MoeForCausalLM", "moe_norm_min", {"moe_norm_min": 0.1}),
        ("Exaone4ForCausalLM", "sliding_window_pattern", {"sliding_window_pattern": "LLLG"}),
        ("Cohere2ForCausalLM", "sliding_window", {"sliding_window": None}),
        ("GPTJForCausalLM", "rotary_dim", {"n_embd": 32, "n_head": 4, "n_layer": 1, "rotary_dim": None}),
        ("GPTJForCausalLM", "rotary_dim", {"n_embd": 32, "n_head": 4, "n_layer": 1, "rotary_dim": 3}),
        ("Dots1ForCausalLM", "n_routed_experts", {}),
        ("GraniteForCausalLM", "logits_scaling", {"logits_scaling": 0}),
        ("GraniteMoeHybridForCausalLM", "num_experts_per_tok", {**HYBRID, "num_local_experts": 1}),
        ("GraniteMoeHybridForCausalLM", "layer_types", {"layer_types": ["attention", "sliding_attention"] * 2}),
        ("GraniteMoeHybridForCausalLM", "hidden_act", {**SCANS, "hidden_act": "gelu"}),
        ("GraniteMoeHybridForCausalLM", "mamba_n_heads", {**SCANS, "mamba_n_heads": 24}),
        ("GraniteMoeHybridForCausalLM", "mamba_d_head", {**SCANS, "mamba_d_head": 4}),
        ("GraniteMoeHybridForCausalLM", "mamba_n_groups", {**SCANS, "mamba_n_groups": 3}),
        ("GraniteMoeHybridForCausalLM", "mamba_d_conv", {**SCANS, "mamba_d_conv": 65}),
        ("GraniteMoeHybridForCausalLM", "time_step_limit", {**SCANS, "time_step_limit": None}),
        ("GraniteMoeHybridForCausalLM", "time_step_limit", {**SCANS, "time_step_limit": [0.5, 0.1]}),
        ("GraniteMoeHybridForCausalLM", "time_step_limit", {**SCANS, "time_step_limit": [0.5, "inf"]}),
        ("ApertusForCausalLM", "hidden_act", {"hidden_act": "mish"}),
        ("FalconH1ForCausalLM", "mamba_norm_before_gate", {"mamba_rms_norm": True}),
        ("FalconH1ForCausalLM", "projectors_bias", {"projectors_bias": True}),
        ("FalconH1ForCausalLM", "mlp_multipliers: expected 2 numbers", {"mlp_multipliers": [1.0]}),
        ("FalconH1ForCausalLM", "mlp_multipliers: expected numbers other", {"mlp_multipliers": [0.0, 1.0]}),
        ("FalconH1ForCausalLM", "mlp_multipliers: expected 1 as", {"mlp_multipliers": [0.5, 1.0], "mlp_bias": True}),
        ("FalconH1ForCausalLM", "ssm_multipliers", {"ssm_multipliers": [1.0] * 4 + ["1"]}),
        ("FalconH1ForCausalLM", "lm_head_multiplier", {"lm_head_multiplier": 0.0}),
        ("FalconH1ForCausalLM", "attention_in_multiplier", {"attention_in_multiplier": 2.0, "attention_bias": True}),
        (
            "FalconH1ForCausalLM",
            "ssm_in_multiplier",
            {"ssm_in_multiplier": 2.0, "mamba_proj_bias": True, "projectors_bias": True},
        ),
        ("FalconH1ForCausalLM", "a divisor of mamba_d_ssm 1024", {"mamba_n_heads": 24}),
        ("BambaForCausalLM", "attn_layer_indices", {"attn_layer_indices": "1"}),
        ("Mamba2ForCausalLM", "num_heads: expected expand .*, which is 1,", {"expand": 2}),
        ("Mamba2ForCausalLM", "n_groups", {"head_dim": 16, "num_heads": 4}),
        ("Mamba2ForCausalLM", "hidden_act", {"hidden_act": "gelu"}),
        ("MambaForCausalLM", "hidden_act: expected one of silu, swish, got", {"hidden_act": "mish"}),
        ("MambaForCausalLM", "time_step_rank", {"time_step_rank": 0}),
        ("FalconMambaForCausalLM", "mixer_rms_eps", {"mixer_rms_eps": -1.0}),
        ("JambaForCausalLM", "attn_layer_offset: expected below attn_layer_period 8", {"attn_layer_offset": 8}),
        ("JambaForCausalLM", "attn_layer_offset: .* a layer of attention", {}),
        ("JambaForCausalLM", "expert_layer_offset", {"attn_layer_offset": 1, "expert_layer_offset": 2}),
        ("JambaForCausalLM", "num_experts_per_tok", {"attn_layer_offset": 1, "num_experts_per_tok": 17}),
        (
            "NemotronHForCausalLM",
            "moe_latent_size",
            {"layers_block_type": ["moe", "attention"], "moe_latent_size": "8"},
        ),
        ("NemotronHForCausalLM", "mlp_bias", {"layers_block_type": ["moe", "attention"], "mlp_bias": True}),
        ("NemotronHForCausalLM", "hybrid_override_pattern: expected a list", {"hybrid_override_pattern": "M-*x"}),
        ("NemotronHForCausalLM", "layers_block_type: expected a list", {"layers_block_type": 3}),
        ("NemotronHForCausalLM", "n_groups", {"mamba_num_heads": 12}),
        ("NemotronHForCausalLM", "n_groups", {"hybrid_override_pattern": "M*", "mamba_num_heads": 12}),
        ("NemotronHForCausalLM", "mamba_hidden_act", {"hybrid_override_pattern": "M*", "mamba_hidden_act": "gelu"}),
        ("SmolLM3ForCausalLM", "no_rope_layers", {"no_rope_layers": [1, 0]}),
        ("SmolLM3ForCausalLM", "no_rope_layers", {"no_rope_layers": [1, 0, 2, 1]}),
        ("SmolLM3ForCausalLM", "no_rope_layer_interval", {"no_rope_layer_interval": 0}),
        ("SmolLM3ForCausalLM", "sliding_window", {"layer_types": ["sliding_attention"] * 4}),
        ("MinistralForCausalLM", "sliding_window", {"layer_types": ["sliding_attention"] * 4, "sliding_window": None}),
        ("Ministral3ForCausalLM", "llama_4_scaling_beta", {"rope_parameters": {"rope_theta": 1e4}}),
        ("Mistral4ForCausalLM", "rope_parameters: expected a kind of stretching", {**HEADS, "rope_parameters": PLAIN}),
        ("Mistral4ForCausalLM", "rope_parameters.llama_4_scaling_beta", {**HEADS, "rope_parameters": YARN}),
        ("Glm4MoeLiteForCausalLM", "partial_rotary_factor", {**HEADS, "partial_rotary_factor": 0.5}),
        ("Mistral4ForCausalLM", "q_lora_rank", {**HEADS, "q_lora_rank": 7}),
        ("Mistral4ForCausalLM", "q_lora_rank", {**HEADS, "q_lora_rank": None}),
        ("Mistral4ForCausalLM", "n_group", {**HEADS, "n_group": 2}),
        (
            "Mistral4ForCausalLM",
            r"partial_rotary_factor: expected 0\.5",
            {**HEADS, "rope_parameters": {**YARN, "llama_4_scaling_beta": 0.1, "partial_rotary_factor": 0.25}},
        ),
        ("ModernBertDecoderForCausalLM", "rope_scaling", {"rope_scaling": {"type": "linear", "factor": 2.0}}),
        ("ModernBertDecoderForCausalLM", "local_attention", {"local_attention": 1}),
        ("ModernBertDecoderForCausalLM", "classifier_activation", {"classifier_activation": "elu"}),
        ("LagunaForCausalLM", "gating", {"gating": "per-layer"}),
        ("LagunaForCausalLM", "sliding_window", {"sliding_window": 0, "layer_types": [SLIDING] * 4}),
        ("LagunaForCausalLM", "gating", {"gating": False}),
        ("LagunaForCausalLM", "moe_router_logit_softcapping", {"moe_router_logit_softcapping": 3.0}),
        ("LagunaForCausalLM", "moe_apply_router_weight", {"moe_apply_router_weight_on_input": True}),
        ("LagunaForCausalLM", "num_attention_heads_per_layer", {"num_attention_heads_per_layer": [4, 3, 4, 4]}),
        ("LagunaForCausalLM", "num_attention_heads_per_layer", {"num_attention_heads_per_layer": [4]}),
        ("LagunaForCausalLM", "rope_parameters", {"rope_parameters": PLAIN}),
        ("LagunaForCausalLM", "mlp_layer_types", {"mlp_layer_types": ["sparse"]}),
        ("IQuestCoderForCausalLM", "clip_qkv", {"clip_qkv": 8.0}),
        ("IQuestCoderForCausalLM", "use_sliding_window", {"use_sliding_window": True}),
        ("CohereCompassForCausalLM", "rope_parameters: expected the parameters of full_attention", {}),
        ("CohereCompassForCausalLM", "rope_parameters: .* full_attention", {"rope_parameters": PLAIN}),
        ("CohereCompassForCausalLM", "rope_theta", {"rope_parameters": {"full_attention": {}}}),
        ("CohereCompassForCausalLM", "sliding_window", {**COMPASS, "sliding_window": None}),
        ("CohereCompassTextForSequenceClassification", "pooling", {"pooling": "mean"}),
        ("Olmo3ForCausalLM", "layer_types", {"layer_types": ["full_attention"]}),
        ("Qwen2ForCausalLM", "layer_types", {"layer_types": ["chunked_attention"] * 4}),
        ("OlmoForCausalLM", "clip_qkv", {"clip_qkv": -8.0}),
        ("DbrxForCausalLM", "moe_normalize_expert_weights", {"ffn_config": {"moe_normalize_expert_weights": 2.0}}),
        ("DbrxForCausalLM", "attn_config.clip_qkv", {"attn_config": {"clip_qkv": "8"}}),
        ("Llama4ForCausalLM", "attention_chunk_size", {"attention_chunk_size": None}),
        ("Llama4ForCausalLM", "attn_temperature_tuning", {"attn_temperature_tuning": "true"}),
        ("Llama4ForCausalLM", "moe_layers", {"moe_layers": [4]}),
        ("YoutuForCausalLM", "num_key_value_heads", {}),
        ("MiniCPMForCausalLM", "sparse_config", {"sparse_config": {"dense_len": 8192}}),
        ("MiniCPMForCausalLM", "num_experts", {"num_experts": 8}),
        ("BailingMoeV2ForCausalLM", "norm_head", {"norm_head": True}),
        ("BailingMoeV2ForCausalLM", "score_function", {"score_function": "softmax"}),
        ("KimiLinearForCausalLM", "num_key_value_heads", {}),
        ("KimiLinearForCausalLM", "mla_use_nope: expected true", {**HEADS, "mla_use_nope": False}),
        ("KimiLinearForCausalLM", "moe_router_activation_func", {**HEADS, "moe_router_activation_func": "softmax"}),
        ("KimiLinearForCausalLM", "moe_layer_freq", {**HEADS, "moe_layer_freq": 2}),
        ("KimiLinearForCausalLM", "mla_use_output_gate", {**HEADS, "mla_use_output_gate": True}),
        ("KimiLinearForCausalLM", "attn_res_block_size", {**HEADS, "attn_res_block_size": 3}),
        ("KimiLinearForCausalLM", "hidden_act", {**HEADS, "hidden_act": "gelu"}),
        (
            "KimiLinearForCausalLM",
            "linear_attn_config.gate_lower_bound",
            {**HEADS, "linear_attn_config": {"gate_lower_bound": -5.0}},
        ),
        ("KimiLinearForCausalLM", "linear_attn_config.num_heads", {**HEADS, "linear_attn_config": {"num_heads": 0}}),
        ("KimiLinearForCausalLM", "layer_types", {**HEADS, "layer_types": ["sliding_attention"] * 4}),
        ("BailingHybridForCausalLM", "num_key_value_heads", {}),
        ("BailingHybridForCausalLM", "kda_lower_bound: expected a number below 0", {**HEADS, "kda_lower_bound": 0}),
        ("BailingHybridForCausalLM", "kda_safe_gate", {**HEADS, "kda_safe_gate": "yes"}),
        ("BailingHybridForCausalLM", "n_group", {**HEADS, "num_experts": 9}),
        ("Zamba2ForCausalLM", "layers_block_type: expected 4 of linear_attention and hybrid", {}),
        ("Zamba2ForCausalLM", "layers_block_type", {"layers_block_type": ["hybrid", "attention"] * 2}),
        ("Zamba2ForCausalLM", "layer_types", {**SHARED, "layer_types": ["hybrid"] * 4}),
        ("Zamba2ForCausalLM", "hybrid_layer_ids", {**SHARED, "hybrid_layer_ids": [0, 1]}),
        ("Zamba2ForCausalLM", "attention_hidden_size: expected 2", {**SHARED, "attention_hidden_size": 32}),
        ("Zamba2ForCausalLM", "n_mamba_heads", {**SHARED, "n_mamba_heads": 7}),
        ("Zamba2ForCausalLM", "n_mamba_heads", {**SHARED, "mamba_headdim": 16}),
        ("Zamba2ForCausalLM", "mamba_ngroups", {**SHARED, "mamba_ngroups": 3}),
        ("Zamba2ForCausalLM", "num_mem_blocks", {**SHARED, "num_mem_blocks": 0}),
        ("Zamba2ForCausalLM", "use_shared_attention_adapter", {**SHARED, "use_shared_attention_adapter": True}),
        ("Zamba2ForCausalLM", "time_step_min", {**SHARED, "time_step_min": -1.0}),
        ("MiniCPM3ForCausalLM", "qk_rope_head_dim", {"num_key_value_heads": 4, "qk_rope_head_dim": 5}),
        ("GraniteSWAForCausalLM", "layer_rope_theta", {"layer_rope_theta": [1e4, 0]}),
        ("GraniteMoeSWAForCausalLM", "layer_rope_theta", {"layer_rope_theta": [1e4, 0, -1, 0]}),
        ("GraniteSWAForCausalLM", "sliding_window", {"sliding_window": None}),
        ("CwmForCausalLM", "sliding_window", {"sliding_window": 0}),
        ("ExaoneMoeForCausalLM", "mlp_layer_types", {"mlp_layer_types": ["sparse"]}),
        ("ExaoneMoeForCausalLM", "sliding_window_pattern", {"sliding_window_pattern": "LLLG"}),
        ("Cohere2MoeForCausalLM", "rope_scaling", {"rope_scaling": {"type": "linear", "factor": 2.0}}),
        ("Cohere2MoeForCausalLM", "expert_selection_fn", {"expert_selection_fn": "top"}),
        ("Cohere2MoeForCausalLM", "shared_expert_combination", {"shared_expert_combination_strategy": "max"}),
        ("HunYuanMoEV1ForCausalLM", "num_experts", {"num_experts": [4, 4, 4, 8]}),
        ("HunYuanMoEV1ForCausalLM", "moe_topk", {"num_experts": 4, "moe_topk": [2, 2]}),
        ("MellumForCausalLM", "mlp_layer_types", {"mlp_layer_types": ["sparse", "none"] * 2}),
        ("MellumForCausalLM", "rope_parameters", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}),
        ("MellumForCausalLM", "rope_parameters", {"rope_scaling": {"type": "linear", "factor": 2.0}}),
        ("Gemma3ForCausalLM", r"rope_scaling\.type", {"rope_scaling": {"type": "linear", "factor": 2.0}}),
        ("Gemma3nForCausalLM", r"rope_scaling\.type", {"rope_scaling": {"type": "linear", "factor": 2.0}}),
        ("Olmo3ForCausalLM", r"rope_scaling\.type", {"rope_scaling": {"type": "yarn", "factor": 2.0}}),
        ("GPTNeoForCausalLM", "attention_types", GPT_NEO),
        ("GPTNeoForCausalLM", "attention_types", {**GPT_NEO, "attention_types": [["global", "local"], 2]}),
        ("GPTNeoForCausalLM", "attention_types", {**GPT_NEO, "attention_types": [[["global", "sparse"], 2]]}),
        ("GPTNeoForCausalLM", "attention_layers", {**GPT_NEO, "attention_layers": ["local"] * 3}),
        ("GPTNeoForCausalLM", "hidden_size", {**GPT_NEO, "num_attention_heads": 3}),
        ("CodeGenForCausalLM", "n_head", {"hidden_size": 48, "num_attention_heads": 6, "rotary_dim": 4}),
        ("OlmoeForCausalLM", "head_dim", {"head_dim": 16}),
        ("MixtralForCausalLM", "num_experts_per_tok", {"num_experts_per_tok": 9}),
        ("Qwen2MoeForCausalLM", "sliding_window", {"layer_types": ["sliding_attention"] * 4}),
        ("PhimoeForCausalLM", "num_experts_per_tok", {"num_experts_per_tok": 3}),
        ("GPTJForCausalLM", "rotary_dim", {"n_embd": 32, "n_layer": 1, "n_head": 4}),
        ("Glm4MoeForCausalLM", "topk_group", {"n_routed_experts": 8, "topk_group": 2}),
        ("PhimoeForCausalLM", "short_mscale", {"rope_scaling": {"type": "longrope"}}),
        ("PhimoeForCausalLM", "long_mscale", {"rope_scaling": {"type": "su", "short_mscale": 1, "long_mscale": 2}}),
        ("Lfm2MoeForCausalLM", "layer_types", {}),
        ("Qwen3NextForCausalLM", "linear_num_value_heads", {"linear_num_value_heads": 24}),
        ("Qwen3_5MoeForCausalLM", "num_experts_per_tok", {**ATTENTION, "num_experts": 4}),
        ("Qwen3NextForCausalLM", "mlp_only_layers", {**ATTENTION, "mlp_only_layers": 1}),
        (
            "Qwen3NextForCausalLM",
            "shared_expert_intermediate_size",
            {**ATTENTION, "shared_expert_intermediate_size": 0},
        ),
    ],
)
def test_refusals_name_the_field(architecture, field, changes):
    with pytest.raises(CheckpointError, match=field) as error:
        read(architecture, **changes)
    assert ",," not in str(error.value)


@pytest.mark.parametrize(
    ("own", "field"),
    [({"rms_norm_eps": 1e-3}, "1.rms_norm_eps"), ({"skip": ["mlp"]}, "1.skip"), ({"head_dim": 16}, "1.head_dim"),
     ([8], "1: expected an object")],
)  # fmt: skip
def test_fields_of_single_layers_are_not_ignored(own, field, tmp_path):
    """transformers has `per_layer_config` for any model."""
    folder = changed(tmp_path, "llama/gqa", {"per_layer_config": {"1": own}})
    with pytest.raises(CheckpointError, match=re.escape(f"per_layer_config.{field}")):
        Engine.load(folder, device="cpu")


def test_layers_whose_own_fields_are_those_of_all(tmp_path):
    folder = changed(tmp_path, "llama/gqa", {"per_layer_config": {"0": {}, "01": {"hidden_size": 32, "skip": []}}})
    assert Engine.load(folder, device="cpu", kv_memory="1M").logits([3]).isfinite().all()


def test_defaults_of_transformers():
    ministral = read("Ministral3ForCausalLM", num_attention_heads=8).rope
    assert (ministral.kind, ministral.theta, ministral.growth, ministral.growth_length) == ("yarn", 1e6, 0.1, 16384)
    four = read("Mistral4ForCausalLM", num_key_value_heads=4)
    assert (four.rope.factor, four.latent.growth.growth, four.latent.growth.growth_length) == (128.0, 0.1, 8192)
    assert (four.experts.count, four.experts.routing.chosen, four.latent.query_rank) == (128, 4, 1024)
    ettin = read("ModernBertDecoderForCausalLM")
    assert (ettin.windows, ettin.head_dense, ettin.head_bias, ettin.tied) == ((None, 64, 64, None), "gelu", True, True)
    assert [rope.theta for rope in ettin.ropes] == [160000.0, 10000.0, 10000.0, 160000.0]
    kimi = read("KimiLinearForCausalLM", **HEADS, num_hidden_layers=9)
    kind = DeltaKind(32, 32, 128, 128, 4, key_decays=True)
    recurs = tuple(i not in (4, 8) for i in range(9))
    assert kimi.recurrent == Recurrent(kind, recurs, sigmoid=True, rank=128)
    assert (kimi.norm_eps, kimi.max_positions, kimi.rope, kimi.latent.query_rank) == (1e-5, 1048576, None, 0)
    assert kimi.experts.layers == (False,) + (True,) * 8 and (kimi.experts.count, kimi.experts.width) == (256, 1024)
    assert kimi.experts.routing == Routing(8, "sigmoid", normalized=True, epsilon=1e-20, scale=2.446, best=2)
    ling = read("BailingHybridForCausalLM", **HEADS, num_hidden_layers=12)
    kind = DeltaKind(4, 4, 128, 128, 4, key_decays=True)
    assert ling.recurrent == Recurrent(kind, ((True,) * 5 + (False,)) * 2, sigmoid=True, bound=-5.0)
    assert (ling.rope.theta, ling.max_positions, ling.head_gates, ling.norm_eps) == (6e6, 262144, True, 1e-6)
    assert ling.experts.layers == (False,) * 2 + (True,) * 10 and ling.experts.routing.groups == 8
    assert read("BailingHybridForCausalLM", **HEADS, kda_safe_gate=False, kda_lower_bound=1).recurrent.bound == 0
    zamba = read("Zamba2ForCausalLM", **HEADS, num_hidden_layers=54, intermediate_size=None, time_step_min=0.25)
    kind, steps = ScanKind(1, 8, 64, 8, 4), (0.25, math.inf)
    assert zamba.recurrent == Recurrent(kind, (True,) * 54, conv_bias=True, steps=steps, eps=1e-5)
    assert [i for i in range(54) if zamba.attends(i)] == [6, 12, 18, 24, 30, 36, 42, 47, 51]
    assert zamba.shared == SharedBlocks(tuple(6 if zamba.attends(i) else None for i in range(54)), 128)
    assert (zamba.mlp_width, zamba.head_dim, zamba.scale(6), zamba.activation) == (128, 16, 8**-0.5, "gelu")
    assert (zamba.tied, zamba.max_positions, zamba.rope, zamba.norm_eps) == (True, 4096, None, 1e-5)
    twice = read("Zamba2ForCausalLM", **SHARED, num_mem_blocks=2, use_mem_rope=True, use_long_context=True)
    assert (twice.shared.owners, twice.max_positions) == ((None, 1, None, 3), 16384)
    laguna = read("LagunaForCausalLM", head_dim=None)
    assert (laguna.experts.count, laguna.experts.routing.chosen, laguna.experts.layers[:2]) == (256, 8, (False, True))
    assert (laguna.ropes[0].theta, laguna.ropes[0].head_dim, laguna.head_gates) == (5e5, 4, "softplus")
    quest = read("IQuestCoderForCausalLM", num_key_value_heads=None, num_attention_heads=16)
    assert (quest.kv_heads, quest.head_dim, quest.norm_eps, quest.max_positions) == (16, 128, 1e-5, 131072)
    unified = read("Gemma4UnifiedForCausalLM", enable_moe_block=True, hidden_size_per_layer_input=8)
    assert (unified.windows, unified.max_positions) == ((1024, 1024, 1024, None), 262144)
    assert unified.experts is None and unified.layer_inputs is None
    assert read("SmolLM3ForCausalLM").tied and read("SmolLM3ForCausalLM").ropes[0].theta == 2e6
    assert read("SmolLM3ForCausalLM").ropes[3] is None
    assert read("Olmo3ForCausalLM").windows == (4096, 4096, 4096, None)
    assert {rope.theta for rope in read("Olmo3ForCausalLM", rope_theta=1e4).ropes} == {1e4, 5e5}
    assert read("GraniteMoeHybridForCausalLM", **HYBRID).rope is None
    scans = read("GraniteMoeHybridForCausalLM", **SCANS)
    kind = ScanKind(key_heads=1, value_heads=8, key_size=256, value_size=8, taps=4)
    assert scans.recurrent == Recurrent(kind, (True, False) * 2, conv_bias=True)
    assert (scans.experts.count, scans.experts.routing.chosen, scans.experts.shared_width) == (8, 2, 1024)
    limit = [0.25, {"__float__": "Infinity"}]
    assert read("GraniteMoeHybridForCausalLM", **SCANS, time_step_limit=limit).recurrent.steps == (0.25, math.inf)
    nemotron = read("NemotronHForCausalLM", hybrid_override_pattern="M-*")
    kind = ScanKind(key_heads=8, value_heads=128, key_size=128, value_size=64, taps=4)
    assert nemotron.recurrent == Recurrent(kind, (True, False, False), conv_bias=True)
    assert (nemotron.head_dim, nemotron.kv_heads, nemotron.alone) == (128, 2, ("attention", "mlp", "attention"))
    falcon = read("FalconH1ForCausalLM")
    kind = ScanKind(key_heads=1, value_heads=128, key_size=256, value_size=8, taps=4)
    assert falcon.recurrent == Recurrent(kind, (True,) * 4, conv_bias=True, beside=True, normed=False)
    wide = read("FalconH1ForCausalLM", mamba_d_ssm=None, mamba_n_heads=8).recurrent.kind
    assert wide.value_size == 8, "mamba_expand * hidden_size / mamba_n_heads"
    bamba = read("BambaForCausalLM", attn_layer_indices=[1], partial_rotary_factor=0.25, mamba_n_heads=8)
    assert bamba.rope.head_dim == bamba.head_dim // 2, "whatever the config says"
    assert bamba.recurrent.layers == (True, False, True, True)
    mamba = read("Mamba2ForCausalLM", hidden_size=None)
    assert mamba.width == 4096 and mamba.recurrent.kind == ScanKind(8, 128, 128, 64, 4)
    assert read("MambaForCausalLM", hidden_size=40).recurrent.rank == 3, "a 16th, rounded up"
    falcon = read("FalconMambaForCausalLM").recurrent
    assert falcon == Recurrent(
        ChannelKind(1, 1, 16, 64, 4), (True,) * 4, conv_bias=True, rank=2, part_norms="plain", eps=1e-6
    )
    jamba = read("JambaForCausalLM", num_hidden_layers=8)
    assert jamba.recurrent.layers == (True, True, True, True, False, True, True, True)
    assert jamba.experts.layers == (False, True) * 4 and jamba.experts.count == 16
    assert read("JambaForCausalLM", num_hidden_layers=8, num_experts=1).experts is None
    apertus = read("ApertusForCausalLM", rope_theta=5e5)
    assert (apertus.activation, apertus.rope.kind, apertus.rope.theta) == ("xielu", "llama3", 12e6)
    assert read("ApertusForCausalLM", rope_theta=5e5, rope_scaling={"type": "linear", "factor": 2.0}).rope.theta == 5e5
    assert read("CwmForCausalLM").windows == (None, 8192, 8192, 8192)
    assert (read("CwmForCausalLM").rope.kind, read("CwmForCausalLM", rope_theta=5e5).rope.theta) == ("llama3", 1e6)
    assert read("VaultGemmaForCausalLM").windows == (4096, None) * 2
    swa = read("GraniteSWAForCausalLM", layer_rope_theta=[0, 1e5, 0, 500])
    assert [rope and rope.theta for rope in swa.ropes] == [None, 1e5, None, 500.0]
    assert (swa.windows, swa.tied, swa.sinks) == ((None, 128, 128, 128), True, True)
    clova = read("HyperCLOVAXForCausalLM", logits_scaling=0.5, head_dim=16)
    assert (clova.scale(0), clova.logit_divisor, clova.norms) == (0.25, 2.0, ("input", "output"))
    small = read("MiniCPMForCausalLM")
    assert (small.tied, small.embedding_scale, small.residual_scale, small.norm_eps) == (True, 1.0, 0.5, 1e-6)
    assert (small.logit_divisor, small.max_positions) == (small.width, 2048)
    exaone = read("ExaoneForCausalLM", num_layers=3, intermediate_size=None)
    assert (exaone.tied, exaone.layers, exaone.mlp_width, exaone.norm_eps) == (True, 3, 4 * exaone.width, 1e-5)
    assert read("ExaoneForCausalLM", num_hidden_layers=5).layers == 5
    assert (read("InternLM2ForCausalLM").attention_bias, read("InternLM2ForCausalLM").tied) == (True, False)
    ling = read("BailingMoeV2ForCausalLM", moe_intermediate_size=8, num_experts_per_tok=1, head_dim=8, rotary_dim=4)
    assert (ling.rope.head_dim, ling.experts.routing.normalized, ling.experts.shared_width) == (4, False, 0)
    minicpm = read("MiniCPM3ForCausalLM", num_key_value_heads=4)
    assert (minicpm.latent.rank, minicpm.latent.query_rank, minicpm.latent.value) == (256, 768, 8)
    assert (minicpm.embedding_scale, minicpm.residual_scale, minicpm.logit_divisor) == (12.0, 0.7, 0.125)
    youtu = read("YoutuForCausalLM", num_key_value_heads=4)
    assert (youtu.latent.rank, youtu.latent.query_rank, youtu.latent.interleaved, youtu.tied) == (512, 1536, True, True)
    neo = read("GPTNeoForCausalLM", num_hidden_layers=24)
    assert (neo.windows, neo.scale(1), neo.mlp_width) == ((None, 256) * 12, 1.0, 40)
    assert read("OPTForCausalLM").mlp_width == 3072, "ffn_dim, which is absent"
    saved = {"attention_bias": True, "mlp_bias": True}
    assert read("InternLM3ForCausalLM", **saved) == read("InternLM3ForCausalLM", qkv_bias=True, bias=True)
    assert [read("GlmForCausalLM", **given).head_dim for given in ({}, {"head_dim": None})] == [128, 8]
    nano = read("NanoChatForCausalLM")
    assert (nano.logit_cap, nano.rope.backwards, nano.affine, nano.embedding_norm) == (15.0, True, False, True)
    assert read("NanoChatForCausalLM", final_logit_softcapping=None).logit_cap is None
    assert read("Qwen2ForCausalLM", use_sliding_window=True, max_window_layers=3).windows == (None, None, None, 4096)
    assert read("Qwen2ForCausalLM", use_sliding_window=False, sliding_window=0).windows == (None,) * 4


def test_layers_that_only_images_use_keep_nothing():
    c = read("MllamaForCausalLM", cross_attention_layers=[0, 3])
    kept = CacheKind(2, 8)
    assert [c.kept(i) for i in range(4)] == [None, kept, kept, None]
    assert ModelShape.of(c).kv_bytes_per_token(torch.bfloat16) == 2 * kept.bytes(torch.bfloat16)
    assert read("MllamaForCausalLM", num_hidden_layers=10).alone == ("both",) * 3 + (
        "none",
        *["both"] * 4,
        "none",
        "both",
    )
    assert read("MllamaForCausalLM").rope.theta == 5e5


@pytest.mark.parametrize("null", [{}, {"norm_topk_prob": None, "rope_interleave": None, "mamba_conv_bias": None}])
def test_null_is_false_where_transformers_takes_it_for_false(null):
    experts = {
        "num_key_value_heads": 4,
        "q_lora_rank": None,
        "num_experts_per_tok": 2,
        "n_routed_experts": 8,
        "n_group": 1,
        "topk_group": 1,
    }
    deepseek = read("DeepseekV3ForCausalLM", **experts, **null)
    assert deepseek.experts.routing.normalized is deepseek.latent.interleaved is not bool(null)
    assert read("GraniteMoeHybridForCausalLM", **SCANS, **null).recurrent.conv_bias is not bool(null)
    yarn = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0} | ({"truncate": None} if null else {})
    assert read("LlamaForCausalLM", rope_parameters=yarn).rope.truncate is not bool(null)


def test_a_stored_window_counts_more_than_the_field_it_was_made_of():
    read_windows = {
        read("ModernBertDecoderForCausalLM", local_attention=32, **more).windows[1]
        for more in ({"sliding_window": 5}, {})
    }
    assert read_windows == {5, 16}


def test_defaults_of_mixtures():
    qwen2, qwen3 = (read(f"Qwen{i}MoeForCausalLM").experts for i in (2, 3))
    assert (qwen2.count, qwen2.routing.chosen, qwen2.width, qwen2.shared_width) == (60, 4, 1408, 5632)
    assert (qwen3.count, qwen3.routing.chosen, qwen3.width, qwen3.shared_width) == (128, 8, 768, 0)
    aria = read("AriaTextForCausalLM").experts
    assert (aria.count, aria.routing.chosen, aria.width, aria.shared_width) == (8, 2, 40, 80)
    exaone, flex, hunyuan = (read(f"{name}ForCausalLM").experts for name in ("ExaoneMoe", "FlexOlmo", "HunYuanMoEV1"))
    assert (exaone.count, exaone.routing.chosen, exaone.width, exaone.shared_width) == (64, 8, 1024, 1024)
    assert (exaone.routing.scale, exaone.routing.normalized, exaone.layers) == (2.5, True, (False, True, True, True))
    assert (flex.count, flex.routing.chosen, flex.routing.normalized) == (7, 5, False)
    assert (hunyuan.count, hunyuan.routing.chosen, hunyuan.shared_width) == (1, 1, 40)
    cohere, mellum = read("Cohere2MoeForCausalLM", num_shared_experts=2), read("MellumForCausalLM")
    assert (cohere.experts.factor, cohere.experts.shared_width, cohere.head_dim) == (0.5, 80, 128)
    assert (cohere.experts.routing.scores, cohere.windows) == ("softmax_of_chosen", (4096, 4096, 4096, None))
    assert (mellum.experts.count, mellum.experts.routing.normalized, mellum.ropes[0].theta) == (64, True, 5e5)
    assert read("Qwen3MoeForCausalLM", num_experts=None, num_local_experts=8).experts.count == 8
    assert read("Qwen3MoeForCausalLM", decoder_sparse_step=2, mlp_only_layers=[1]).experts.layers == (0, 0, 0, 1)
    assert read("Qwen3MoeForCausalLM", decoder_sparse_step=5).experts is None
    for name in ("num_experts", "num_local_experts"):
        assert read("Qwen3MoeForCausalLM", **{name: 0}).experts is None
    windows = {"use_sliding_window": True, "sliding_window": 8}
    assert read("Qwen2MoeForCausalLM", **windows).windows == (8, None, 8, None)
    assert read("Qwen2MoeForCausalLM", **windows, max_window_layers=1).windows == (8, None, None, None)
    assert read("Qwen3MoeForCausalLM", **windows).windows == (8,) * 4
    assert read("Qwen3MoeForCausalLM", sliding_window=8).windows == (None,) * 4
    mixtral, phi = read("MixtralForCausalLM"), read("PhimoeForCausalLM")
    assert mixtral.rope.theta == phi.rope.theta == 1e6 and phi.experts.routing.jitter == 0.01
    assert mixtral.experts.routing.normalized and read("OlmoeForCausalLM").experts.count == 64
    lfm2 = read("Lfm2MoeForCausalLM", layer_types=["conv", "full_attention"] * 2)
    assert lfm2.experts.layers == (0, 0, 1, 1) and lfm2.experts.choice_bias and lfm2.tied and lfm2.mlp_width == 40
    moe, following = (
        read(f"{name}ForCausalLM", **ATTENTION, mlp_only_layers=[1]) for name in ("Qwen3_5Moe", "Qwen3Next")
    )
    assert (moe.kv_heads, moe.head_dim, moe.experts.count, moe.experts.routing.chosen) == (2, 256, 256, 8)
    assert (following.experts.count, following.experts.routing.chosen) == (512, 10)
    assert moe.experts.width == moe.experts.shared_width == following.experts.width == 512
    assert moe.experts.layers == (1, 1, 1, 1) and following.experts.layers == (1, 0, 1, 1)
    assert moe.experts.routing.normalized and following.experts.routing.normalized and moe.rope.head_dim == 64
    assert read("GraniteMoeForCausalLM", shared_intermediate_size=8).experts.shared_width == 0
    assert read("GraniteMoeSharedForCausalLM", shared_intermediate_size=8).experts.shared_width == 8


def test_paddings_of_scalar_heads():
    """By `config_class().get_text_config().pad_token_id` of transformers 5.24; None for all others."""
    found = {name.removesuffix("ForSequenceClassification"): family.default_pad_token_id
             for name, family in FAMILIES.items() if name.endswith("ForSequenceClassification")}  # fmt: skip
    assert len(found) > 40 and {name: pad for name, pad in found.items() if pad is not None} == {
        "Gemma": 0, "Gemma2": 0, "Gemma3Text": 0, "Glm": 151329, "Glm4": 151329, "Helium": 3, "HunYuanDenseV1": 0,
        "HunYuanMoEV1": 0, "Ministral3": 11, "Mistral4": 11, "CohereCompassText": 0, "OPT": 1,
        "Olmo": 1, "Olmo2": 1, "Olmo3": 1, "Phi3": 32000, "SeedOss": 1,
        "SmolLM3": 128004, "Jamba": 0, "BioGpt": 1, "Zamba2": 0,
    }  # fmt: skip


def test_the_page_of_checkpoints_lists_every_architecture():
    page = " ".join((Path(__file__).parents[2] / "docs" / "checkpoints.md").read_text(encoding="utf-8").split())
    table, wrapped = re.search(r"## Architectures (.+?) In a model .+? decides: (.+?) The same holds", page).groups()
    assert {*re.findall(r"`(\w+For\w+|\w+HeadModel)`", table)} == {*FAMILIES}
    assert {*re.findall(r"`(\w+)`", wrapped)} == {*TEXT_MODELS}


def test_the_base_of_dbrx():
    """Published files give it beside the heads; where transformers reads one, that counts."""
    sizes = {"d_model": 32, "n_heads": 4, "n_layers": 1, "attn_config": {"rope_theta": 5e5}}
    assert read("DbrxForCausalLM", **sizes).rope.theta == 5e5
    for given in ({"rope_theta": 3e4}, {"rope_parameters": {"rope_type": "default", "rope_theta": 3e4}}):
        assert read("DbrxForCausalLM", **sizes, **given).rope.theta == 3e4


@pytest.mark.parametrize(
    ("variant", "field", "kinds"),
    [
        ("gemma4/plain", "rope_theta", (SLIDING, FULL)),
        ("gemma4/plain", "partial_rotary_factor", (FULL,)),
        ("lfm3/plain", "partial_rotary_factor", (FULL,)),
        ("relatives/mellum", "partial_rotary_factor", (SLIDING, FULL)),
        ("laguna/bias", "rope_theta", (SLIDING, FULL)),
        ("laguna/bias", "partial_rotary_factor", (SLIDING, FULL)),
        ("relatives/mellum", "rope_theta", (SLIDING, FULL)),
    ],
)
def test_the_top_level_completes_rotary_parameters_of_kinds(variant, field, kinds):
    """transformers 5.24 does the same. What a kind has itself counts more."""
    fields = json.loads((GOLDEN / variant / "config.json").read_text())
    family, value = FAMILIES[fields["architectures"][0]], 321.0 if field == "rope_theta" else 0.25
    ropes = {kind: dict(own) for kind, own in fields["rope_parameters"].items()}

    def config_with(inner, **outer):
        return family.read(Fields({**fields, "rope_parameters": ropes | inner, **outer}, "config.json"))

    bare = {kind: {name: x for name, x in ropes[kind].items() if name != field} for kind in kinds}
    inside = config_with({kind: own | {field: value} for kind, own in bare.items()})
    assert config_with(bare, **{field: value}) == inside != config_with({})
    assert config_with({kind: own | {field: value} for kind, own in bare.items()}, **{field: value * 2}) == inside


def test_the_defaults_of_llama_4():
    c = read("Llama4ForCausalLM", no_rope_layers=[], attn_temperature_tuning=4)
    assert c.windows == (8192, 8192, 8192, None) and c.chunks and c.normed == (True, True, True, False)
    assert c.experts.layers == (True,) * 4 and (c.experts.count, c.experts.routing.chosen) == (16, 1)
    assert (c.ropes[3].growth, c.ropes[3].growth_length, c.ropes[3].growth_start) == (0.1, 8192, 1)
    assert (c.mlp_width, c.experts.width, c.head_dim) == (16384, 40, 128)


@pytest.mark.parametrize(
    ("architecture", "names"),
    [
        ("GPT2LMHeadModel", "n_embd n_head n_layer n_positions"),
        ("OpenAIGPTLMHeadModel", "n_embd n_head n_layer n_positions"),
        ("GPTBigCodeForCausalLM", "n_embd n_head n_layer n_positions"),
        ("GPTJForCausalLM", "n_embd n_head n_layer n_positions"),
        ("CodeGenForCausalLM", "n_embd n_head n_layer n_positions"),
        ("CTRLLMHeadModel", "n_embd n_head n_layer n_positions"),
        ("GPTNeoForCausalLM", "hidden_size num_heads num_layers max_position_embeddings"),
        ("MptForCausalLM", "d_model n_heads n_layers max_seq_len"),
        ("XGLMForCausalLM", "d_model attention_heads num_layers max_position_embeddings"),
        ("BloomForCausalLM", "hidden_size n_head n_layer seq_length"),
    ],
)
def test_usual_names_of_sizes(architecture, names):
    """Transformers reads them in these families as well, and prefers them; but not for the lengths of MPT and BLOOM."""
    fields = {"vocab_size": 100, "rotary_dim": 4, "attention_types": [[["global"], 2]], "architectures": [architecture]}
    length = names.split()[-1]
    usual = ["hidden_size", "num_attention_heads", "num_hidden_layers", "max_position_embeddings"]
    usual[3] = length if "seq" in length else usual[3]
    sizes = 24, 4, 2, 77

    def read_as(*each):
        given = {name: size for names in each for name, size in zip(names, sizes, strict=True)}
        return FAMILIES[architecture].read(Fields(fields | given, "config.json"))

    c = read_as(names.split())
    assert (c.width, c.heads, c.layers, c.max_positions) == sizes and read_as(usual) == c
    wrong = dict.fromkeys(["max_position_embeddings", *names.split()], 8)
    both = Fields(fields | wrong | dict(zip(usual, sizes, strict=True)), "config.json")
    assert FAMILIES[architecture].read(both) == c


def test_slopes_of_alibi():
    """Those of the paper; if heads are no power of 2, some of the next power's. Falcon's become bfloat16."""
    eight = [2.0**-i for i in range(1, 9)]
    bloom, mpt = read("BloomForCausalLM", num_attention_heads=8, n_layer=2), read("MptForCausalLM", **MPT)
    assert list(bloom.slopes) == eight and not bloom.coarse_slopes and bloom.max_positions == 2048
    twelve = read("BloomForCausalLM", hidden_size=36, num_attention_heads=12, n_layer=2).slopes
    assert list(twelve) == pytest.approx(eight + [2.0**-i for i in (0.5, 1.5, 2.5, 3.5)])
    assert mpt.slopes == (2.0**-2, 2.0**-4, 2.0**-6, 2.0**-8) and mpt.clip is None
    longer = read("MptForCausalLM", **MPT, attn_config={"alibi_bias_max": 16, "clip_qkv": 6})
    assert longer.slopes == (2.0**-4, 2.0**-8, 2.0**-12, 2.0**-16) and longer.clip == 6.0
    falcon = read("FalconForCausalLM", alibi=True)
    assert falcon.coarse_slopes and falcon.rope is None and falcon.slopes == mpt.slopes


@pytest.mark.parametrize(
    ("variant", "kept", "changes", "logits"),
    [
        ("lfm2/plain", [0, 2], {"layer_types": ["conv"] * 2}, [-3.557697, 2.2301104, 1.0511690, -2.7860444]),
        ("qwen3_5/recurrent_interval", [0, 1], {}, [7.3208103, 0.6042348, 4.1451740, 4.3393350]),
    ],
)
def test_a_model_without_attention(variant, kept, changes, logits, tmp_path):
    """Layers of a golden model that have none; transformers computed the logits, without a cache."""

    def some(tensors):
        named = {name: re.match(r"model\.layers\.(\d+)\.", name) for name in tensors}
        layers = {name: int(found[1]) for name, found in named.items() if found}
        return {
            re.sub(r"layers\.\d+", f"layers.{kept.index(layers[name])}", name) if name in layers else name: tensor
            for name, tensor in tensors.items()
            if layers.get(name, kept[0]) in kept
        }

    folder = changed(tmp_path, variant, {"num_hidden_layers": 2, **changes}, some)
    engine = Engine.load(folder, dtype="float32", kv_memory="16M", threads=1)
    ids = [(7 * i * i + 3 * i) % 101 + 3 for i in range(40)]
    assert engine.logits(ids)[-1, :4].tolist() == pytest.approx(logits, abs=1e-4)
    for output in engine.generate([ids], Trie(beams=3, num_return_sequences=3), max_new_tokens=9, logprobs=0)[
        0
    ].outputs:
        rows = torch.log_softmax(engine.logits(ids + output.token_ids), -1)[len(ids) - 1 :]
        expected = [rows[i, token].item() for i, token in enumerate(output.token_ids)]
        assert output.token_logprobs == pytest.approx(expected, abs=1e-4)


def test_the_version_in_files_of_opt_belongs_to_no_head(tmp_path):
    def with_version(tensors):
        return tensors | {"decoder.version": torch.tensor([3.0])}

    folder = changed(tmp_path, "opt/base_prefix", {}, with_version)
    found, plain = (Engine.load(each, dtype="float32") for each in (folder, GOLDEN / "opt/base_prefix"))
    assert found.logits([5, 9, 4]).equal(plain.logits([5, 9, 4]))
