"""GPT-2: both prefixes, buffers, scales of attention, widths and activations of the MLP."""

from functools import partial
from pathlib import Path
from typing import Any

import torch

from tools.golden.base import VOCAB, Variant, draw_all, write_checkpoint

SMALL: dict[str, Any] = {
    "architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "vocab_size": VOCAB, "n_embd": 32, "n_layer": 2,
    "n_head": 4, "n_positions": 64, "n_inner": 48, "activation_function": "gelu_new", "layer_norm_epsilon": 1e-5,
}  # fmt: skip
CLASSIFIER = {"architectures": ["GPT2ForSequenceClassification"], "num_labels": 1}


def tensors(config: dict[str, Any], seed: int) -> dict[str, torch.Tensor]:
    """The tensors of a checkpoint of this config, without tied heads."""
    width, vocab = config["n_embd"], config["vocab_size"]
    mlp = config.get("n_inner") or 4 * width
    layer = {"ln_1": (width,), "attn.c_attn": (width, 3 * width), "attn.c_proj": (width, width), "ln_2": (width,),
             "mlp.c_fc": (width, mlp), "mlp.c_proj": (mlp, width)}  # fmt: skip
    named = {f"h.{i}.{name}": shape for i in range(config["n_layer"]) for name, shape in layer.items()}
    shapes: dict[str, tuple[int, ...]] = {
        "transformer.wte.weight": (vocab, width),
        "transformer.wpe.weight": (config["n_positions"], width),
    }
    for name, shape in {**named, "ln_f": (width,)}.items():
        shapes |= {f"transformer.{name}.weight": shape, f"transformer.{name}.bias": shape[-1:]}
    head = "transformer.wte.weight"
    if config["architectures"] == CLASSIFIER["architectures"]:
        head = "score.weight"
        shapes[head] = (1, width)
    elif not config.get("tie_word_embeddings", True):
        head = "lm_head.weight"
        shapes[head] = (vocab, width)
    return draw_all(
        shapes,
        seed,
        embeddings=("transformer.wte.weight", "transformer.wpe.weight"),
        head=head,
        outputs=("c_proj.weight",),
        transposed=("c_attn.weight", "c_proj.weight", "c_fc.weight"),
    )


def write(changes: dict[str, Any], folder: Path, seed: int, *, base: bool = False) -> None:
    """base: named as a save of the bare GPT2Model, with the causal masks that old ones hold."""
    config = SMALL | changes
    drawn = tensors(config, seed)
    if base:
        size = config["n_positions"]
        drawn = {name.removeprefix("transformer."): tensor for name, tensor in drawn.items()}
        drawn |= {f"h.{i}.attn.bias": torch.ones(1, 1, size, size).tril() for i in range(config["n_layer"])}
    write_checkpoint(folder, config, drawn)


def variant(changes: dict[str, Any], **others: Any) -> Variant:
    return Variant(partial(write, changes), **others)


VARIANTS = {
    "plain": variant({}),
    "base_prefix": Variant(partial(write, {"torch_dtype": "bfloat16"}, base=True), twin="plain"),
    "gelu": variant({"activation_function": "gelu", "layer_norm_epsilon": 0.03}),
    "wide": variant({"n_inner": None, "n_embd": 24}),
    "by_layer": variant({"scale_attn_by_inverse_layer_idx": True, "n_layer": 3}),
    "unscaled": variant({"scale_attn_weights": False, "activation_function": "quick_gelu"}),
    "upcast": variant({"reorder_and_upcast_attn": True, "scale_attn_by_inverse_layer_idx": True}),
    "untied": variant({"tie_word_embeddings": False, "torch_dtype": "bfloat16"}, full=True),
    # The searches' last token is one past the table: it is never evaluated.
    "max_length": variant({"activation_function": "relu"}, logits=[(64, 64), (63, 1)], prompts=[41]),
    "classifier": variant(CLASSIFIER, logits=[(1, 1), (2, 1), (17, 1), (40, 1), (64, 1)]),
}
