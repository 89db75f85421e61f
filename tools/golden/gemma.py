"""Gemma 1, 2 and 3: caps, windows and rotary tables by layer, both spellings, other kinds of layers, scalar heads."""

from functools import partial
from pathlib import Path
from typing import Any

from tools.golden.base import ABSENT, BORDER, EMBEDDING, VOCAB, Variant, add_head, draw_all, present, write_checkpoint

WIDTH, MLP, SIZE = 24, 40, 10
PLAIN = {"rope_type": "default", "rope_theta": 10000.0}
CONFIG = {
    "architectures": ["GemmaForCausalLM"], "model_type": "gemma", "vocab_size": VOCAB, "hidden_size": WIDTH,
    "intermediate_size": MLP, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": SIZE, "hidden_act": "gelu_pytorch_tanh", "max_position_embeddings": 128, "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True, "attention_bias": False, "attention_dropout": 0.0, "pad_token_id": None,
    "rope_parameters": PLAIN,
}  # fmt: skip
TWO = {
    "architectures": ["Gemma2ForCausalLM"], "model_type": "gemma2", "num_hidden_layers": 3, "hidden_act": ABSENT,
    "hidden_activation": "gelu_pytorch_tanh", "query_pre_attn_scalar": 7, "sliding_window": 16,
    "attn_logit_softcapping": 1.5, "final_logit_softcapping": 6.0,
}  # fmt: skip
LOCAL, GLOBAL = "sliding_attention", "full_attention"
TABLES = {
    LOCAL: {"rope_type": "default", "rope_theta": 100.0},
    GLOBAL: {"rope_type": "linear", "factor": 8.0, "rope_theta": 5000.0},
}
THREE = TWO | {
    "architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", "attn_logit_softcapping": None,
    "final_logit_softcapping": None, "rope_parameters": TABLES, "layer_types": [LOCAL, GLOBAL, LOCAL],
}  # fmt: skip
V4 = {"rope_parameters": ABSENT, "rope_theta": 10000.0, "rope_scaling": None, "torch_dtype": "bfloat16"}
CHANGES: dict[str, dict[str, Any]] = {
    "one": {},
    "one_v4": V4 | {"hidden_act": "gelu", "hidden_activation": None, "attention_bias": ABSENT},
    "one_classifier": {"architectures": ["GemmaForSequenceClassification"], "num_labels": 1},
    "two": TWO,
    "two_v4": TWO | V4 | {"hidden_act": "gelu", "tie_word_embeddings": ABSENT, "layer_types": ABSENT},
    "two_full": TWO | {
        "attn_logit_softcapping": None, "final_logit_softcapping": None, "tie_word_embeddings": False,
        "layer_types": [GLOBAL, GLOBAL, LOCAL], "num_key_value_heads": 1, "attention_bias": True},
    "two_classifier": TWO | {"architectures": ["Gemma2ForSequenceClassification"], "num_labels": 1},
    "three": THREE,
    "three_v4": THREE | V4 | {
        "rope_theta": 5000.0, "rope_local_base_freq": 100.0, "layer_types": ABSENT, "sliding_window_pattern": 2,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0}},
    "three_defaults": THREE | {
        "rope_parameters": ABSENT, "layer_types": ABSENT, "num_hidden_layers": 6, "final_logit_softcapping": 6.0,
        "query_pre_attn_scalar": ABSENT, "num_key_value_heads": 4, "hidden_activation": "silu"},
    "three_classifier": THREE | {"architectures": ["Gemma3TextForSequenceClassification"], "num_labels": 1},
}  # fmt: skip
SHORT = [(1, 1.0, False, 1, "own", 24), (4, 0.6, "never", 4, "several", 24), (15, 1.0, False, 15, "own", 16)]
WINDOW = BORDER | {"grid": [*SHORT, (15, 2.0, True, 15, "several", 24)]}
OTHERS: dict[str, dict[str, Any]] = {
    **{name: {"grid": SHORT} for name in CHANGES},
    **{name: WINDOW | {"own_eos": (0, 2)} for name in ("two", "two_v4")},
    **{name: WINDOW for name in ("three", "three_v4")},
}


def write(name: str, folder: Path, seed: int) -> None:
    config = present(CONFIG, CHANGES[name])
    first = config["model_type"] == "gemma"
    layers, q, kv = config["num_hidden_layers"], 4 * SIZE, config["num_key_value_heads"] * SIZE
    layer: dict[str, tuple[int, ...]] = {
        "input_layernorm": (WIDTH,), "self_attn.q_proj": (q, WIDTH), "self_attn.k_proj": (kv, WIDTH),
        "self_attn.v_proj": (kv, WIDTH), "self_attn.o_proj": (WIDTH, q), "post_attention_layernorm": (WIDTH,),
        "mlp.gate_proj": (MLP, WIDTH), "mlp.up_proj": (MLP, WIDTH), "mlp.down_proj": (WIDTH, MLP),
    }  # fmt: skip
    if not first:
        layer |= dict.fromkeys(("pre_feedforward_layernorm", "post_feedforward_layernorm"), (WIDTH,))
    if config["model_type"] == "gemma3_text":
        layer |= dict.fromkeys(("self_attn.q_norm", "self_attn.k_norm"), (SIZE,))
    shapes = {EMBEDDING: (VOCAB, WIDTH), "model.norm.weight": (WIDTH,)}
    shapes |= {f"model.layers.{i}.{part}.weight": layer[part] for i in range(layers) for part in layer}
    if config.get("attention_bias"):
        biased = [part for part in layer if part.startswith("self_attn.") and part.endswith("_proj")]
        shapes |= {f"model.layers.{i}.{part}.bias": layer[part][:1] for i in range(layers) for part in biased}
    head = add_head(shapes, config, tied=True)
    drawn = draw_all(shapes, seed, embeddings=[EMBEDDING], head=head)
    for key, shape in shapes.items():
        if len(shape) == 1 and key.endswith(".weight"):
            drawn[key] -= 1  # norms multiply by 1 + weight
        # What attention and MLP add must count beside an embedding that is multiplied by the root of the width.
        if first and key.endswith(("o_proj.weight", "down_proj.weight")):
            drawn[key] *= 6
        if not first and key.endswith(("post_attention_layernorm.weight", "post_feedforward_layernorm.weight")):
            drawn[key] += 3
    write_checkpoint(folder, config, drawn)


VARIANTS = {name: Variant(partial(write, name), **OTHERS[name]) for name in CHANGES}
