"""Nemotron-H: orders of layers and their spellings, biases, groups, heads that fill the width and do not."""

from typing import Any

from tools.golden.base import ABSENT, BLOCKS, VOCAB, variants

MAMBA, FULL, MLP = "linear_attention", "full_attention", "mlp"
CONFIG: dict[str, Any] = {
    "architectures": ["NemotronHForCausalLM"], "model_type": "nemotron_h", "vocab_size": VOCAB, "hidden_size": 24,
    "intermediate_size": 40, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 10,
    "max_position_embeddings": 128, "layer_norm_epsilon": 1e-5, "layers_block_type": [MAMBA, MLP, FULL, MLP],
    "mamba_num_heads": 6, "mamba_head_dim": 5, "n_groups": 2, "ssm_state_size": 9, "conv_kernel": 4, "chunk_size": 16,
    # transformers clamps the steps of a prompt's tokens from below, but not those of later tokens.
    "time_step_min": 0.0,
    "tie_word_embeddings": False, "pad_token_id": None,
}  # fmt: skip
EXPERTS: dict[str, Any] = {
    "layers_block_type": ["moe", MAMBA, FULL, "moe"], "n_routed_experts": 6, "num_experts_per_tok": 2,
    "moe_intermediate_size": 20, "moe_shared_expert_intermediate_size": 12, "n_group": 2, "topk_group": 1,
    "routed_scaling_factor": 1.5,
}  # fmt: skip
CHANGES: dict[str, dict[str, Any]] = {
    "plain": {},
    "bias": {"use_bias": True, "mlp_bias": True, "use_conv_bias": False, "layer_norm_epsilon": 0.03, "n_groups": 1,
             "layers_block_type": [MLP, MAMBA, MAMBA, FULL]},
    "letters": {"layers_block_type": ABSENT, "hybrid_override_pattern": "*M-*", "num_hidden_layers": 4,
                "conv_kernel": ABSENT, "mamba_d_conv": 3},
    "experts": EXPERTS,
    "latent": EXPERTS | {"moe_latent_size": 10},
    "latent_wide": EXPERTS | {
        "moe_latent_size": 30, "norm_topk_prob": False, "n_group": 1, "tie_word_embeddings": True},
}  # fmt: skip
VARIANTS = variants(CONFIG, CHANGES, dict.fromkeys(CHANGES, BLOCKS))
