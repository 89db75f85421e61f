"""LFM2: short convolutions and attention in any order, taps, biases, spellings, widths of the MLP, ties."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from tools.golden.base import ABSENT, EMBEDDING, VOCAB, Variant, add_head, draw_all, present, write_checkpoint

WIDTH, MLP = 24, 32
CONFIG = {
    "architectures": ["Lfm2ForCausalLM"], "model_type": "lfm2", "vocab_size": VOCAB, "hidden_size": WIDTH,
    "intermediate_size": 48, "block_auto_adjust_ff_dim": True, "block_ffn_dim_multiplier": 1.0,
    "block_multiple_of": 16, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 128, "norm_eps": 1e-5, "conv_L_cache": 3, "conv_bias": False,
    "tie_word_embeddings": True, "pad_token_id": 0, "layer_types": ["conv", "full_attention", "conv"],
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}  # fmt: skip
V4 = {
    "rope_parameters": ABSENT, "rope_theta": 10000.0, "torch_dtype": "bfloat16", "layer_types": ABSENT,
    "full_attn_idxs": [1], "tie_word_embeddings": ABSENT, "tie_embedding": True, "intermediate_size": ABSENT,
    "block_ff_dim": 48,
}  # fmt: skip

CHANGES: dict[str, dict[str, Any]] = {
    "plain": {},
    "plain_v4": V4,
    "bias": {"conv_bias": True, "conv_L_cache": 5, "layer_types": ["full_attention", "conv", "conv"]},
    "untied": {"tie_word_embeddings": False, "conv_L_cache": 2, "norm_eps": 0.03, "num_key_value_heads": 1,
               "intermediate_size": 32, "block_auto_adjust_ff_dim": False},
    "one_tap": {"conv_L_cache": 1, "block_ffn_dim_multiplier": 0.8, "rope_parameters": {"rope_type": "yarn",
                "factor": 4.0, "original_max_position_embeddings": 32, "rope_theta": 1000000.0}},
}  # fmt: skip
PROMPTS = (17, 1, 2, 40, 5)  # shorter than the taps, too


def write(name: str, folder: Path, seed: int) -> None:
    config = present(CONFIG, CHANGES[name])
    head_dim, taps = WIDTH // config["num_attention_heads"], config["conv_L_cache"]
    kv = config["num_key_value_heads"] * head_dim
    both: dict[str, tuple[int, ...]] = {
        "operator_norm": (WIDTH,), "ffn_norm": (WIDTH,), "feed_forward.w1": (MLP, WIDTH),
        "feed_forward.w3": (MLP, WIDTH), "feed_forward.w2": (WIDTH, MLP),
    }  # fmt: skip
    attention = {
        "self_attn.q_proj": (WIDTH, WIDTH), "self_attn.k_proj": (kv, WIDTH), "self_attn.v_proj": (kv, WIDTH),
        "self_attn.out_proj": (WIDTH, WIDTH), "self_attn.q_layernorm": (head_dim,),
        "self_attn.k_layernorm": (head_dim,),
    }  # fmt: skip
    conv = {"conv.in_proj": (3 * WIDTH, WIDTH), "conv.conv": (WIDTH, 1, taps), "conv.out_proj": (WIDTH, WIDTH)}
    kinds = (CONFIG | CHANGES[name.removesuffix("_v4")])["layer_types"]
    shapes = {EMBEDDING: (VOCAB, WIDTH), "model.embedding_norm.weight": (WIDTH,)}
    for i, kind in enumerate(kinds):
        for part, shape in (both | (conv if kind == "conv" else attention)).items():
            shapes[f"model.layers.{i}.{part}.weight"] = shape
            if part in conv and config["conv_bias"]:
                shapes[f"model.layers.{i}.{part}.bias"] = shape[:1]
    head = add_head(shapes, config, tied=True)
    outputs = ("out_proj.weight", "w2.weight")
    write_checkpoint(folder, config, draw_all(shapes, seed, embeddings=[EMBEDDING], head=head, outputs=outputs))


VARIANTS = {name: Variant(partial(write, name), prompts=PROMPTS) for name in CHANGES}
