"""GPT-NeoX, GPT-J, StarCoder and Falcon: attention and MLP side by side, one matrix of queries, keys and values."""

from typing import Any

from tools.golden.base import ABSENT, VOCAB, variants

CONFIG: dict[str, Any] = {
    "architectures": ["GPTNeoXForCausalLM"], "model_type": "gpt_neox", "vocab_size": VOCAB, "hidden_size": 32,
    "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 4, "hidden_act": "gelu",
    "max_position_embeddings": 128, "layer_norm_eps": 1e-5, "tie_word_embeddings": False, "attention_bias": True,
    "use_parallel_residual": True, "rotary_pct": 0.5, "rotary_emb_base": 10000, "pad_token_id": None,
}  # fmt: skip
NOTHING = dict.fromkeys((*CONFIG,), ABSENT)
GPTJ: dict[str, Any] = NOTHING | {
    "architectures": ["GPTJForCausalLM"], "model_type": "gptj", "vocab_size": VOCAB, "n_embd": 24, "n_layer": 2,
    "n_head": 2, "n_positions": 128, "rotary_dim": 6,
}  # fmt: skip
STARCODER: dict[str, Any] = NOTHING | {
    "architectures": ["GPTBigCodeForCausalLM"], "model_type": "gpt_bigcode", "vocab_size": VOCAB, "n_embd": 24,
    "n_layer": 2, "n_head": 4, "n_inner": 40, "n_positions": 128, "multi_query": True,
}  # fmt: skip
FALCON: dict[str, Any] = NOTHING | {
    "architectures": ["FalconForCausalLM"], "model_type": "falcon", "vocab_size": VOCAB, "hidden_size": 32,
    "num_hidden_layers": 2, "num_attention_heads": 4, "alibi": False, "bias": False, "max_position_embeddings": 128,
}  # fmt: skip

CHANGES: dict[str, dict[str, Any]] = {
    "plain": {},
    "defaults": dict.fromkeys(
        ("hidden_act", "layer_norm_eps", "tie_word_embeddings", "attention_bias", "use_parallel_residual",
         "rotary_pct", "rotary_emb_base"), ABSENT),
    "in_turn": {"use_parallel_residual": False, "attention_bias": False, "hidden_act": "gelu_new", "rotary_pct": ABSENT,
                "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1.0}},
    "classifier": {"architectures": ["GPTNeoXForSequenceClassification"], "num_labels": 1},
    "gptj": GPTJ,
    "gptj_classifier": GPTJ | {"architectures": ["GPTJForSequenceClassification"], "num_labels": 1},
    "starcoder": STARCODER,
    "starcoder_heads": STARCODER | {"multi_query": False, "scale_attn_weights": False, "tie_word_embeddings": False},
    "falcon": FALCON,
    "falcon_groups": FALCON | {"new_decoder_architecture": True, "num_kv_heads": 2, "ffn_hidden_size": 40,
                               "tie_word_embeddings": False},
    "falcon_one_norm": FALCON | {"new_decoder_architecture": True, "num_kv_heads": 2, "num_ln_in_parallel_attn": 1},
    "falcon_in_turn": FALCON | {"multi_query": False, "parallel_attn": False, "bias": True},
    "japanese": {"architectures": ["GPTNeoXJapaneseForCausalLM"], "model_type": "gpt_neox_japanese",
                 "hidden_size": 16, "intermediate_multiple_size": 2} | dict.fromkeys(
        ("intermediate_size", "attention_bias", "use_parallel_residual", "tie_word_embeddings"), ABSENT),
}  # fmt: skip

VARIANTS = variants(CONFIG, CHANGES, {})
