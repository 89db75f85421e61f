"""Tiny random draft heads as checkpoints."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

LAYER = {"mlp": 96, "heads": 4, "kv_heads": 2}


def random_tensors(shapes: dict[str, tuple[int, ...]], seed: int, scale: float = 1.0) -> dict[str, torch.Tensor]:
    """Matrices that keep the scale of rows, and vectors about 1."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(shape, generator=generator) * (scale * 2.0 if "lm_head" in name else 1.0) / shape[-1] ** 0.5
        if len(shape) > 1
        else 1 + 0.2 * torch.randn(shape, generator=generator)
        for name, shape in shapes.items()
    }


def make_eagle(
    folder: Path, *, width: int, vocab: int, known: int, read: Any = None, layer: str = "midlayer.", **config: Any
) -> dict[str, torch.Tensor]:
    """An EAGLE-3 head that knows every `vocab // known`-th token or so; returns its tensors."""
    heads, kv, mlp = LAYER["heads"], LAYER["kv_heads"], LAYER["mlp"]
    dim = width // heads
    shapes = {
        "fc.weight": (width, 3 * width),
        f"{layer}self_attn.q_proj.weight": (heads * dim, 2 * width),
        f"{layer}self_attn.k_proj.weight": (kv * dim, 2 * width),
        f"{layer}self_attn.v_proj.weight": (kv * dim, 2 * width),
        f"{layer}self_attn.o_proj.weight": (width, heads * dim),
        f"{layer}mlp.gate_proj.weight": (mlp, width),
        f"{layer}mlp.up_proj.weight": (mlp, width),
        f"{layer}mlp.down_proj.weight": (width, mlp),
        "lm_head.weight": (known, width),
    }
    norms = [f"{layer}{name}" for name in ("input_layernorm", "hidden_norm", "post_attention_layernorm")]
    shapes |= {f"{name}.weight": (width,) for name in [*norms, "norm"]}
    tensors = random_tensors(shapes, seed=5)
    chosen = torch.arange(known) * vocab // known
    tensors["d2t"] = chosen - torch.arange(known)
    tensors["t2d"] = torch.zeros(vocab, dtype=torch.bool).index_fill_(0, chosen, True)
    fields = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": width,
        "intermediate_size": mlp,
        "num_hidden_layers": 1,
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "max_position_embeddings": 400,
        "vocab_size": vocab,
        "draft_vocab_size": known,
        "rms_norm_eps": 1e-5,
    }
    if read is not None:
        fields["eagle_aux_hidden_state_layer_ids"] = read
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(fields | config))
    save_file(tensors, folder / "model.safetensors")
    return tensors


def add_mtp(folder: Path) -> dict[str, torch.Tensor]:
    """Give a checkpoint of Qwen3-Next or Qwen3.5 a head with a layer like one of its own; returns its tensors."""
    path = folder / "model.safetensors"
    stored = load_file(path)
    norm = next(name for name in stored if name.endswith(("model.norm.weight", "language_model.norm.weight")))
    inside = max(name.partition("self_attn.")[0] for name in stored if name.endswith(".self_attn.q_norm.weight"))
    shapes = {
        f"mtp.layers.0.{name.removeprefix(inside)}": tuple(tensor.shape)
        for name, tensor in stored.items()
        if name.startswith(inside)
    }
    width = stored[norm].shape[0]
    shapes["mtp.fc.weight"] = width, 2 * width
    tensors = random_tensors(shapes, seed=6)
    tensors = {name: tensor - 1 if tensor.dim() == 1 else tensor for name, tensor in tensors.items()}
    for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"):
        tensors[f"mtp.{name}.weight"] = 0.2 * torch.randn(width, generator=torch.Generator().manual_seed(len(name)))
    save_file(stored | tensors, path)
    return tensors
