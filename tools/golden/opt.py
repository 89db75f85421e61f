"""OPT: norms before and after, projections, fields that the config can leave out, the longest text."""

from functools import partial
from pathlib import Path
from typing import Any

import torch

from tools.golden.base import VOCAB, Variant, draw_all, write_checkpoint

SMALL: dict[str, Any] = {
    "architectures": ["OPTForCausalLM"], "model_type": "opt", "vocab_size": VOCAB, "hidden_size": 32, "ffn_dim": 48,
    "num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 64, "do_layer_norm_before": True,
    "word_embed_proj_dim": 32, "activation_function": "relu", "pad_token_id": 1,
}  # fmt: skip
CLASSIFIER = {"architectures": ["OPTForSequenceClassification"], "num_labels": 1, "word_embed_proj_dim": 16}


def tensors(config: dict[str, Any], seed: int) -> dict[str, torch.Tensor]:
    """The tensors of a checkpoint of this config, without tied heads."""
    width, mlp, vocab = config["hidden_size"], config["ffn_dim"], config["vocab_size"]
    embedding = config.get("word_embed_proj_dim") or width
    decoder = "model.decoder."
    shapes: dict[str, tuple[int, ...]] = {
        f"{decoder}embed_tokens.weight": (vocab, embedding),
        f"{decoder}embed_positions.weight": (config["max_position_embeddings"] + 2, width),
    }
    if embedding != width:
        shapes |= {
            f"{decoder}project_in.weight": (width, embedding),
            f"{decoder}project_out.weight": (embedding, width),
        }
    matrices = {f"self_attn.{part}_proj": (width, width) for part in ("q", "k", "v", "out")}
    matrices |= {"fc1": (mlp, width), "fc2": (width, mlp)}
    norms = [] if config.get("_remove_final_layer_norm") or not config["do_layer_norm_before"] else ["final_layer_norm"]
    for i in range(config["num_hidden_layers"]):
        norms += [f"layers.{i}.self_attn_layer_norm", f"layers.{i}.final_layer_norm"]
        for name, shape in matrices.items():
            shapes[f"{decoder}layers.{i}.{name}.weight"] = shape
            if config.get("enable_bias", True):
                shapes[f"{decoder}layers.{i}.{name}.bias"] = shape[:1]
    if config.get("layer_norm_elementwise_affine", True):
        shapes |= {f"{decoder}{norm}.{part}": (width,) for norm in norms for part in ("weight", "bias")}
    head = f"{decoder}embed_tokens.weight"
    if config["architectures"] == CLASSIFIER["architectures"]:
        head = "score.weight"
        shapes[head] = (1, embedding)
    elif not config.get("tie_word_embeddings", True):
        head = "lm_head.weight"
        shapes[head] = (vocab, embedding)
    tables = [f"{decoder}embed_tokens.weight", f"{decoder}embed_positions.weight"]
    return draw_all(shapes, seed, embeddings=tables, head=head, outputs=("out_proj.weight", "fc2.weight"))


def write(changes: dict[str, Any], folder: Path, seed: int, *, base: bool = False) -> None:
    """base: named as a save of the bare OPTModel."""
    config = SMALL | changes
    drawn = tensors(config, seed)
    write_checkpoint(folder, config, {name.removeprefix("model.") if base else name: t for name, t in drawn.items()})


def variant(changes: dict[str, Any], **others: Any) -> Variant:
    return Variant(partial(write, changes), **others)


VARIANTS = {
    "plain": variant({}),
    "base_prefix": Variant(partial(write, {"torch_dtype": "bfloat16"}, base=True), twin="plain"),
    "post_norm": variant({"do_layer_norm_before": False, "hidden_size": 64, "torch_dtype": "bfloat16"}, full=True),
    "no_biases": variant({"enable_bias": False}),
    "no_affine": variant({"layer_norm_elementwise_affine": False}),
    "no_final_norm": variant({"_remove_final_layer_norm": True, "activation_function": "gelu"}),
    "untied": variant({"tie_word_embeddings": False, "word_embed_proj_dim": None}),
    # The searches' last token is one past the table: it is never evaluated.
    "max_length": variant({"word_embed_proj_dim": 16}, logits=[(64, 64), (63, 1)], prompts=[41]),
    "classifier": variant(CLASSIFIER, logits=[(1, 1), (2, 1), (17, 1), (40, 1), (64, 1)]),
}
