"""gpt-oss: sinks, windows in turns, yarn, experts with biases whose gates reach their bounds; MXFP4 and floats."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tools.golden.base import ABSENT, FEW, VOCAB, Variant, present, write_checkpoint, write_json, write_tensors

YARN = {
    "rope_type": "yarn", "rope_theta": 150000.0, "factor": 4.0, "beta_fast": 32.0, "beta_slow": 1.0,
    "truncate": False, "original_max_position_embeddings": 32,
}  # fmt: skip
CONFIG: dict[str, Any] = {
    "architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "vocab_size": VOCAB, "hidden_size": 32,
    "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 16, "num_local_experts": 6, "num_experts_per_tok": 2, "max_position_embeddings": 128,
    "sliding_window": 16, "rms_norm_eps": 1e-5, "hidden_act": "silu", "attention_bias": True,
    "tie_word_embeddings": False, "pad_token_id": None, "rope_parameters": YARN,
}  # fmt: skip
OLD = {key: value for key, value in YARN.items() if key != "rope_theta"}
NAMED = "sliding_window", "rms_norm_eps", "hidden_act", "attention_bias", "head_dim", "rope_parameters", "layer_types"
CHANGES: dict[str, dict[str, Any]] = {
    "plain": {},
    "plain_v4": {"rope_parameters": ABSENT, "rope_theta": 150000.0, "rope_scaling": OLD},
    "full": {
        "layer_types": ["full_attention"] * 3, "num_experts_per_tok": 3,
        "attention_bias": False, "tie_word_embeddings": True,
    },
    "defaults": dict.fromkeys(NAMED, ABSENT),
    "classifier": {"architectures": ["GptOssForSequenceClassification"], "num_labels": 1},
    "mxfp4": {"quantization_config": {
        "quant_method": "mxfp4",
        "modules_to_not_convert": [
            "model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head",
        ],
    }},
}  # fmt: skip
EXPERTS = "gate_up_proj", "down_proj"


def write(name: str, folder: Path, seed: int) -> None:
    """Write a checkpoint with sinks above and below the scores, and some gates above 7, their bound."""
    from tools.make_golden_weights import draw  # here, because it needs transformers

    write_checkpoint(folder, present(CONFIG, CHANGES[name]), {})
    drawn = draw(folder, seed, ("o_proj.weight",))
    for tensor, x in drawn.items():
        if tensor.endswith("sinks"):
            drawn[tensor] = (x - 1) * 6
        elif tensor.endswith("gate_up_proj"):
            drawn[tensor] = x * 8
    if name != "mxfp4":
        write_tensors(folder / "model.safetensors", drawn, "bfloat16")
        return
    parts = {}
    for tensor, x in drawn.items():
        parts |= packed(tensor, x) if tensor.endswith(EXPERTS) else {tensor: x.bfloat16()}
    save_file({name: x.contiguous() for name, x in parts.items()}, folder / "model.safetensors")


def packed(name: str, stacked: torch.Tensor) -> dict[str, torch.Tensor]:
    """Matrices [X, in, out] rounded to blocks of MXFP4: an exponent for 32 inputs, two elements in a byte."""
    x = stacked.transpose(1, 2).unflatten(-1, (-1, 32))
    exponent = x.abs().amax(-1).log2().floor() - 2
    table = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    size = x.abs() / exponent.exp2().unsqueeze(-1)
    codes = (size.unsqueeze(-1) - table).abs().argmin(-1) + 8 * (x < 0)
    blocks = (codes[..., ::2] | codes[..., 1::2] << 4).to(torch.uint8)
    return {f"{name}_blocks": blocks, f"{name}_scales": (exponent + 127).to(torch.uint8)}


def floats(folder: Path, out: Path) -> None:
    """Write the float32 checkpoint of one in MXFP4, by arithmetic on single elements."""
    config = json.loads((folder / "config.json").read_text())
    del config["quantization_config"]
    out.mkdir(parents=True)
    write_json(out / "config.json", config | {"dtype": "float32"})
    held = load_file(folder / "model.safetensors")
    found = {name: x.float() for name, x in held.items() if x.is_floating_point()}
    for name in (name.removesuffix("_blocks") for name in held if name.endswith("_blocks")):
        found[name] = restored(held[f"{name}_blocks"], held[f"{name}_scales"])
    save_file(found, out / "model.safetensors")


def restored(blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Matrices [X, in, out], to the bit those of `transformers.integrations.mxfp4`."""
    table = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    codes = torch.stack((blocks & 15, blocks >> 4), -1).flatten(-2).long()
    numbers = table[codes % 8] * (1 - 2 * (codes // 8)) * (scales.float() - 127).exp2().unsqueeze(-1)
    return numbers.flatten(-2).transpose(1, 2).contiguous()


BORDER: dict[str, Any] = {"logits": [(15, 4), (16, 4), (17, 4), (70, 8)], "prompts": (15, 16, 17, 5)}
OTHERS: dict[str, dict[str, Any]] = {
    "plain": BORDER, "plain_v4": BORDER, "defaults": {"logits": [(3, 3), (140, 4)]}, "mxfp4": {"floats": floats},
}  # fmt: skip
VARIANTS = {name: Variant(partial(write, name), **{"grid": FEW, **OTHERS.get(name, {})}) for name in CHANGES}
