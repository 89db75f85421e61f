"""Families that are an option or two from another one: OLMo 1, Youtu, MiniCPM3, HyperCLOVA X, CWM, nanochat, Granite
Swash, Jais 2, VaultGemma, Persimmon, GPT, GPT-Neo, CodeGen, BioGPT, XGLM, CTRL; with experts FlexOlmo, K-EXAONE,
Cohere, Hunyuan, Mellum 2, DBRX, Hy3, Flint, Kolibri 1; the text models of Phi-4-multimodal and Llama 3.2 Vision."""

from typing import Any

from tools.golden.base import ABSENT, VOCAB, variants
from tools.golden.llamas import named

CONFIG: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "pad_token_id": None, "tie_word_embeddings": True,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}  # fmt: skip
SLIDING, FULL = "sliding_attention", "full_attention"
V4 = {"rope_parameters": ABSENT, "rope_theta": 500000.0, "torch_dtype": "bfloat16"}
KINDS = {"sliding_window": 16, "layer_types": [SLIDING, FULL], "head_dim": 8}
LATENT = {
    "num_key_value_heads": 4, "kv_lora_rank": 12, "q_lora_rank": 10, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4,
    "v_head_dim": 8,
}  # fmt: skip
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2}
COHERE = EXPERTS | {"sliding_window": 16, "head_dim": 8, "num_shared_experts": 1, "logit_scale": 0.5}
FACTORS = {"embedding_multiplier": 1.7, "residual_multiplier": 0.7, "logits_scaling": 1.3}
LONG = {
    "type": "longrope", "short_factor": [1.0, 1.2], "long_factor": [1.5, 3.0], "original_max_position_embeddings": 128,
}  # fmt: skip
SWA = {"sliding_window": 16, "layer_types": [SLIDING, FULL], "layer_rope_theta": [5000.0, 0], "head_dim": ABSENT}
ROPES = {
    FULL: {"rope_type": "yarn", "rope_theta": 5e5, "factor": 4.0, "original_max_position_embeddings": 32},
    SLIDING: {"rope_type": "default", "rope_theta": 10000.0},
}
NOTHING = dict.fromkeys((*CONFIG,), ABSENT)
GPT = {"vocab_size": VOCAB, "n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": 128}
ALONE = {"num_key_value_heads": ABSENT, "rope_parameters": ABSENT}
APART = ALONE | {"tie_word_embeddings": False}
XGLM = {
    "vocab_size": VOCAB, "d_model": 16, "ffn_dim": 24, "num_layers": 2, "attention_heads": 4,
    "max_position_embeddings": 128,
}  # fmt: skip

PHI4: dict[str, Any] = {
    "vision_config": {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 2, "num_attention_heads": 1,
                      "image_size": 28, "crop_size": 28, "patch_size": 14},
    "audio_config": {"hidden_size": 8, "intermediate_size": 8, "num_blocks": 1, "num_attention_heads": 1,
                     "ext_pw_out_channel": 8, "depthwise_separable_out_channel": 8, "nemo_conv_channels": 8,
                     "input_size": 8},
}  # fmt: skip
DBRX: dict[str, Any] = NOTHING | named(
    "DbrxForCausalLM", "dbrx", vocab_size=VOCAB, d_model=16, n_heads=4, n_layers=2, max_seq_len=128,
    ffn_config={"ffn_hidden_size": 12, "moe_num_experts": 4, "moe_top_k": 2}, tie_word_embeddings=False)  # fmt: skip

CHANGES: dict[str, dict[str, Any]] = {
    "olmo": named("OlmoForCausalLM", "olmo", clip_qkv=None),
    "olmo_classifier": named("OlmoForSequenceClassification", "olmo", num_labels=1, attention_bias=True),
    "youtu": named("YoutuForCausalLM", "youtu", **LATENT, attention_bias=True, rms_norm_eps=1e-6),
    "minicpm3": named("MiniCPM3ForCausalLM", "minicpm3", **LATENT | {"v_head_dim": ABSENT}, dim_model_base=24,
                      scale_emb=2.5, tie_word_embeddings=False),
    "minicpm3_long": named("MiniCPM3ForCausalLM", "minicpm3", **LATENT | V4 | {"q_lora_rank": None}, rope_scaling=LONG,
                           scale_depth=None, dim_model_base=None, scale_emb=2, mlp_bias=True),
    "hyperclovax": named("HyperCLOVAXForCausalLM", "hyperclovax", **FACTORS, **V4, tie_word_embeddings=False),
    "iquest": named("IQuestCoderForCausalLM", "iquestcoder", **V4, head_dim=6, attention_bias=True, mlp_bias=True),
    "cwm": named("CwmForCausalLM", "cwm", **KINDS, mlp_bias=True, **V4),
    "nanochat": named("NanoChatForCausalLM", "nanochat", attention_bias=True),
    "granite_swa": named("GraniteSWAForCausalLM", "granite_swa", **SWA, **FACTORS, mlp_bias=True),
    "granite_moe_swa": named("GraniteMoeSWAForCausalLM", "granitemoe_swa", **SWA, num_local_experts=4,
                             num_experts_per_tok=2, shared_intermediate_size=20, attention_multiplier=0.4),
    "jais2": named("Jais2ForCausalLM", "jais2"),
    "vaultgemma": named("VaultGemmaForCausalLM", "vaultgemma", sliding_window=16, head_dim=6),
    "flex_olmo": named("FlexOlmoForCausalLM", "flex_olmo", **EXPERTS, **V4),
    "exaone_moe": named("ExaoneMoeForCausalLM", "exaone_moe", **KINDS, **EXPERTS, moe_intermediate_size=12),
    "cohere_moe": named("Cohere2MoeForCausalLM", "cohere2_moe", **COHERE | {"layer_types": [FULL, SLIDING]},
                        mlp_layer_types=["dense", "sparse"], attention_bias=True),
    "cohere_moe_sigmoid": named("Cohere2MoeForCausalLM", "cohere2_moe", **COHERE, num_hidden_layers=3,
                                first_k_dense_replace=1, sliding_window_pattern=2, expert_selection_fn="sigmoid",
                                shared_expert_combination_strategy="sum", rms_norm_eps=1e-5,
                                prefix_dense_intermediate_size=20),
    "hunyuan_moe": named("HunYuanMoEV1ForCausalLM", "hunyuan_v1_moe", num_experts=4, moe_topk=[2, 2], head_dim=8),
    "mellum": named("MellumForCausalLM", "mellum", **KINDS, **EXPERTS, moe_intermediate_size=12,
                    mlp_layer_types=["sparse", "dense"], rope_parameters=ROPES),
    "persimmon": named("PersimmonForCausalLM", "persimmon", num_key_value_heads=ABSENT, hidden_size=32),
    "gpt_neo": NOTHING | named("GPTNeoForCausalLM", "gpt_neo", vocab_size=VOCAB, hidden_size=16, num_layers=2,
                               num_heads=4, window_size=16, max_position_embeddings=128, intermediate_size=24,
                               attention_types=[[["global", "local"], 1]]),
    "codegen": NOTHING | named("CodeGenForCausalLM", "codegen", vocab_size=VOCAB, n_embd=32, n_layer=2, n_head=4,
                               n_positions=128, rotary_dim=4, n_inner=24),
    "dbrx": DBRX | {"attn_config": {"kv_n_heads": 2, "clip_qkv": 0.7, "rope_theta": 10000.0}},
    "dbrx_plain": DBRX | {
        "attn_config": {"kv_n_heads": 1, "clip_qkv": 8, "rope_theta": 500000.0}, "rope_theta": 500000.0, "d_model": 24,
        "ffn_config": DBRX["ffn_config"] | {
            "moe_normalize_expert_weights": None, "moe_top_k": 3, "ffn_act_fn": {"name": "gelu"}}},
    "olmo_clipped": named("OlmoForCausalLM", "olmo", clip_qkv=0.6),
    "olmoe_clipped": named("OlmoeForCausalLM", "olmoe", clip_qkv=1.1, **EXPERTS),
    "hy3": named("HYV3ForCausalLM", "hy_v3", **EXPERTS, moe_intermediate_size=12, head_dim=8, attention_bias=True,
                 num_hidden_layers=3),
    "hy3_kinds": named("HYV3ForCausalLM", "hy_v3", **EXPERTS, moe_intermediate_size=12, num_shared_experts=2,
                       router_scaling_factor=1.5, mlp_layer_types=["sparse", "dense"], head_dim=6,
                       rope_parameters=ABSENT),
    "flint": named("FlintForCausalLM", "flint", **EXPERTS, moe_intermediate_size=12, num_hidden_layers=4,
                   shared_expert_intermediate_size=20, head_dim=8, sliding_window=16),
    "flint_types": named("FlintForCausalLM", "flint", **EXPERTS | KINDS, moe_intermediate_size=12, norm_topk_prob=False,
                         attention_bias=True, mlp_only_layers=[], shared_expert_intermediate_size=20),
    "kolibri": named("Kolibri1ForCausalLM", "kolibri1", **EXPERTS | KINDS, moe_intermediate_size=12,
                     shared_expert_intermediate_size=20, norm_topk_prob=True),
    "kolibri_full": named("Kolibri1ForCausalLM", "kolibri1", **EXPERTS, moe_intermediate_size=12, head_dim=6,
                          shared_expert_intermediate_size=20, num_hidden_layers=5),
    "phi4": named("Phi4MultimodalForCausalLM", "phi4_multimodal", **PHI4, sliding_window=16, pad_token_id=0),
    "gpt": NOTHING | named("OpenAIGPTLMHeadModel", "openai-gpt", **GPT),
    "gpt_silu": NOTHING | named("OpenAIGPTLMHeadModel", "openai-gpt", **GPT, afn="silu", layer_norm_epsilon=0.03),
    "gpt_classifier": NOTHING | named("OpenAIGPTForSequenceClassification", "openai-gpt", **GPT, num_labels=1),
    "biogpt": named("BioGptForCausalLM", "biogpt", **APART, layer_norm_eps=0.03),
    "biogpt_unscaled": named("BioGptForCausalLM", "biogpt", **ALONE, scale_embedding=False, hidden_act="gelu_new"),
    "biogpt_classifier": named("BioGptForSequenceClassification", "biogpt", **APART, num_labels=1),
    "xglm": NOTHING | named("XGLMForCausalLM", "xglm", **XGLM, tie_word_embeddings=False),
    "xglm_unscaled": NOTHING | named("XGLMForCausalLM", "xglm", **XGLM | {"d_model": 15, "attention_heads": 3},
                                     scale_embedding=False, activation_function="relu"),
    "ctrl": NOTHING | named("CTRLLMHeadModel", "ctrl", vocab_size=VOCAB, n_embd=24, n_layer=2, n_head=4, dff=32,
                            n_positions=128, tie_word_embeddings=False),
    "mllama": named("MllamaForCausalLM", "mllama_text_model", cross_attention_layers=[0, 2], num_hidden_layers=4,
                    pad_token_id=0, tie_word_embeddings=False),
}  # fmt: skip
BORDER = {"logits": [(15, 4), (17, 4), (40, 4)], "prompts": (15, 16, 17, 5)}
VARIANTS = variants(CONFIG, CHANGES, dict.fromkeys(CHANGES, BORDER))
