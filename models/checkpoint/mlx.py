"""Maps tensors of checkpoints that mlx-lm or mlx-vlm wrote to the names and forms of transformers.

Both rename and reshape tensors when they convert a model (`sanitize` of each file in `mlx_lm/models`): experts of a
layer are stacked, convolutions have their channel last, norms that add one have it added, and newer files of DeepSeek
V3 and GLM-4.7-Flash have separate matrices of keys and of values, head by head. Layers of GPT-NeoX get other names,
and the MLPs of dense Granite 4 those of a Llama. Matrices of Falcon-H1 are multiplied by the factors of their outputs.
Only headers are read here.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch

from models.checkpoint.experts import MOST_EXPERTS
from models.checkpoint.joined import with_joined
from models.checkpoint.tensors import Cut, TensorInfo, View
from models.errors import CheckpointError, show

STACKED = re.compile(
    r"(.+?\.)(?:(?:experts\.)?switch_(?:mlp|glu)|experts(?!\.fc))\.(gate_proj|up_proj|down_proj|fc1|fc2)\.(weight|scales|biases|bias)"
)
PARTS = {"fc1": "up_proj", "fc2": "down_proj"}  # for Nemotron; Aria has other tensors named experts.fc1
HEADS = re.compile(r"(.+\.self_attn\.)(embed_q|unembed_out)\.(weight|scales|biases)")
SPLIT = {"embed_q": "k_b_proj", "unembed_out": "v_b_proj"}
CONV = re.compile(r".+\.(?:conv1d|conv\.conv)\.weight")
LFM2_MLP = re.compile(r"(.+\.feed_forward\.)(gate_proj|down_proj|up_proj)(\..+)")  # MLPs of layers without experts
LFM2_PARTS = {"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"}
CURVE = re.compile(r".+\.act_fn\.alpha_[pn]")  # for Apertus
GRANITE = "GraniteMoeHybrid"
PLUS_ONE = ("Qwen3Next", "Qwen3_5")  # beginnings of architectures
NORM = re.compile(r".+\.(?:input_layernorm|post_attention_layernorm|q_norm|k_norm)\.weight|model\.norm\.weight")
FALCON_H1 = "FalconH1"
MULTIPLIED = {  # factors of Falcon-H1 that are in its matrices; that of keys is not, nor that of values
    **dict.fromkeys((f"{part}_multiplier" for part in ("embedding", "attention_out", "ssm_in", "ssm_out")), 1.0),
    "ssm_multipliers": [1.0] * 5,
    "mlp_multipliers": [1.0] * 2,
}
NEOX = re.compile(r"model\.h\.\d+\.attention\..+")
GRANITE_MLP = re.compile(r".+\.mlp\.(?:gate_proj|up_proj|down_proj)\..+")
HALVES = [".mlp.gate_proj.", ".mlp.up_proj."]


def has_forms(config: Mapping[str, Any], tensors: Mapping[str, TensorInfo]) -> bool:
    """Whether some tensor has a form that only MLX uses; if none does, a checkpoint of floats needs no mapping."""
    patterns = STACKED, HEADS, NEOX, *([GRANITE_MLP] if _architecture(config).startswith(GRANITE) else [])
    return any(
        any(pattern.fullmatch(name) for pattern in patterns) or _turned(name, info) or _is_curve(name, info)
        for name, info in tensors.items()
    )


def from_mlx(
    config: Mapping[str, Any], tensors: Mapping[str, TensorInfo]
) -> tuple[dict[str, Any], dict[str, TensorInfo]]:
    """Return config and tensors of such a checkpoint in the form of transformers; each tensor keeps its name in the
    file, because the config names modules by it.

    Args:
        config: the text model's config.
        tensors: the tensors by the names of the text model.

    Raises:
        CheckpointError: two spellings of one tensor.
    """
    architecture = _architecture(config)
    turned = any(_turned(name, info) for name, info in tensors.items())
    plus_one, lfm2 = turned and architecture.startswith(PLUS_ONE), architecture.startswith("Lfm2")
    found: dict[str, TensorInfo] = {}
    for stored, whole in tensors.items():
        own = _of_neox(stored) if architecture.startswith("GPTNeoX") else stored
        for name, info in _mapped(own, replace(whole, name=whole.name or stored), plus_one, lfm2):
            if name in found:
                what = f"{show(found[name].name)} and {show(info.name)} are both {show(name)}"
                raise CheckpointError(what, where=show(whole.file), remedy="Keep one of them.")
            found[name] = info
    if architecture.startswith(GRANITE):
        for end in ("weight", "scales", "biases"):
            found = with_joined(found, f".shared_mlp.input_linear.{end}", [half + end for half in HALVES])
        found = {name.replace(".mlp.down_proj.", ".shared_mlp.output_linear."): info for name, info in found.items()}
    more: dict[str, Any] = {"kv_b_split": True} if any(HEADS.fullmatch(name) for name in tensors) else {}
    if architecture.startswith(FALCON_H1) and turned:
        more |= _without_factors(config, next(iter(tensors.values())))
    return {**config, **more}, found


def _without_factors(config: Mapping[str, Any], some: TensorInfo) -> dict[str, Any]:
    """Return the fields of a Falcon-H1 whose matrices are multiplied; a tied head is the embedding with its factor."""
    embedding, head, into = (config.get(f"{part}_multiplier", 1.0) for part in ("embedding", "lm_head", "attention_in"))
    if into != 1:
        what = f"attention_in_multiplier: expected 1, as mlx-lm multiplies no values, got {show(into)}"
        raise CheckpointError(what, where=show(some.file), remedy="Load the model from safetensors of transformers.")
    try:
        tied = {"lm_head_multiplier": head / embedding} if config.get("tie_word_embeddings") else {}
    except (TypeError, ZeroDivisionError):
        what = "embedding_multiplier, lm_head_multiplier: expected numbers other than 0"
        raise CheckpointError(what, where=show(some.file), remedy="Correct config.json.") from None
    return {**MULTIPLIED, "lm_head_multiplier": 1.0, **tied, "multiplied": True}


def _mapped(name: str, info: TensorInfo, plus_one: bool, lfm2: bool) -> Iterator[tuple[str, TensorInfo]]:
    """Yield the tensors that one represents; `plus_one`: norms have 1 added; `lfm2`: of LFM2, whose MLP is renamed."""
    count, *shape = info.shape or (0,)
    if (stacked := STACKED.fullmatch(name)) and shape and count <= MOST_EXPERTS:
        part = PARTS.get(stacked[2], stacked[2])
        for number in range(count):
            own = replace(info, shape=tuple(shape), part=Cut(number, 0, shape[0]))
            yield f"{stacked[1]}experts.{number}.{part}.{stacked[3]}", own
    elif (heads := HEADS.fullmatch(name)) and len(shape) == 2:
        yield f"{heads[1]}{SPLIT[heads[2]]}.{heads[3]}", _seen(info, (count * shape[0], shape[1]))
    elif _turned(name, info):
        yield name, _seen(info, (count, 1, shape[0]))
    elif lfm2 and (mlp := LFM2_MLP.fullmatch(name)):
        yield f"{mlp[1]}{LFM2_PARTS[mlp[2]]}{mlp[3]}", info
    elif _is_curve(name, info):
        yield name, _seen(info, (1,))
    elif plus_one and NORM.fullmatch(name):
        yield name, replace(info, dtype=torch.float32, part=View(info.shape, minus_one=True))
    else:
        yield name, info


def _architecture(config: Mapping[str, Any]) -> str:
    names = config.get("architectures")
    return str(names[0]) if isinstance(names, list) and names else ""


def _of_neox(name: str) -> str:
    """Return the usual name of a tensor of GPT-NeoX."""
    return re.sub(r"^model\.(embed_out\.|)(h\.|)", lambda m: m[1] or "gpt_neox." + ("layers." if m[2] else ""), name)


def _turned(name: str, info: TensorInfo) -> bool:
    """Whether this is a convolution with its only channel last; of one tap both forms have the same shape."""
    return bool(CONV.fullmatch(name)) and len(info.shape) == 3 and info.shape[2] == 1 < info.shape[1]


def _is_curve(name: str, info: TensorInfo) -> bool:
    return bool(CURVE.fullmatch(name)) and not info.shape


def _seen(info: TensorInfo, shape: tuple[int, ...]) -> TensorInfo:
    return replace(info, shape=shape, part=View(shape))
