"""Mixtures of experts by one spelling of their names, whichever a checkpoint has: a matrix for each expert.

Transformers 5 has all experts of a layer in one tensor [experts, rows, columns], gate and up below each other. Most
published checkpoints have a matrix each, by names that differ from family to family. gpt-oss has one tensor with gate
and up in turns, floats [experts, columns, rows] or blocks of MXFP4, and biases. Only headers are read here: a matrix of
such a tensor is a part of it (`TensorInfo.part`).
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace

from models.checkpoint.tensors import Cut, TensorInfo
from models.errors import CheckpointError, show

EXPERT = ".experts."  # in the names of the matrices of experts
MOST_EXPERTS = 2**12  # of a layer
_STACKED = re.compile(
    r"(?P<layer>.*\.layers\.\d+\.|layers\.\d+\.)(?:(?P<mlp>mlp|feed_forward|block_sparse_moe)\.)?"
    r"(?P<part>experts\.gate_up_proj|experts\.down_proj|input_linear\.weight|output_linear\.weight)"
)
_GPT_OSS = re.compile(r"(.*\blayers\.\d+\.mlp\.experts\.)(gate_up|down)_proj(|_bias|_blocks|_scales)")
_ENDS = {"": "weight", "_bias": "bias", "_blocks": "weight_blocks", "_scales": "weight_scales"}
_MIXTRAL = re.compile(r"(.*\.experts\.\d+\.)(w1|w2|w3)(\..+)")
_PARTS = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
_ROUTERS = (
    *(".block_sparse_moe.router.layer.", ".block_sparse_moe.router.", ".mlp.router.gate.", ".mlp.router."),
    ".block_sparse_moe.gate.",
)
_ERNIE = re.compile(r"(.*\.mlp\.)(?:gate\.)?moe_statics\.e_score_correction_bias")  # [1, experts]
_OTHERS = {  # of GPT-NeoX in transformers 4, and of Falcon where attention and MLP have a norm each
    "embed_out.": "lm_head.",
    ".ln_attn.": ".input_layernorm.",
    ".ln_mlp.": ".post_attention_layernorm.",
}


def one_by_one(tensors: Mapping[str, TensorInfo]) -> dict[str, TensorInfo]:
    """The same tensors; those of experts one by one, and by the names of `models.names.Names`.

    Raises:
        CheckpointError: two spellings of one matrix.
    """
    found: dict[str, TensorInfo] = {}
    for name, info in tensors.items():
        for spelled, part in _spelled(name, info, tensors):
            if spelled in found:
                what = f"{show(found[spelled].name or spelled)} and {show(name)} are both {show(spelled)}"
                raise CheckpointError(what, where=show(info.file), remedy="Keep one of them.")
            found[spelled] = part
    return found


def _spelled(name: str, info: TensorInfo, tensors: Mapping[str, TensorInfo]) -> Iterator[tuple[str, TensorInfo]]:
    turns = _GPT_OSS.fullmatch(name)
    if (
        turns
        and f"{turns[1]}{turns[2]}_proj_bias" in tensors
        and len(info.shape) >= 2
        and info.shape[0] <= MOST_EXPERTS
    ):
        yield from _in_turns(turns, name, info)
        return
    stacked = _STACKED.fullmatch(name)
    if stacked and len(info.shape) == 3 and info.shape[0] <= MOST_EXPERTS and not info.packed:
        yield from _unstacked(stacked, name, info)
        return
    spelled = name
    if (statics := _ERNIE.fullmatch(name)) and len(info.shape) == 2 and info.shape[0] == 1:
        shape, cut = info.shape[1:], Cut(0, 0, info.shape[1])
        yield f"{statics[1]}gate.e_score_correction_bias", replace(info, shape=shape, name=name, part=cut)
        return
    for other, usual in _OTHERS.items():
        spelled = spelled.replace(other, usual)
    if own := _MIXTRAL.fullmatch(name):
        spelled = own[1] + _PARTS[own[2]] + own[3]
    for router in _ROUTERS:
        spelled = spelled.replace(router, ".mlp.gate.")
    spelled = spelled.replace(".block_sparse_moe.", ".mlp.")
    yield spelled, info if spelled == name else replace(info, name=info.name or name)


def _in_turns(turns: re.Match[str], name: str, info: TensorInfo) -> Iterator[tuple[str, TensorInfo]]:
    """The matrices of each expert of gpt-oss, or what stands for them."""
    (count, *shape), transposed = info.shape, turns[3] == ""
    shape = shape[::-1] if transposed else shape
    parts = {"gate_proj": (0, 2), "up_proj": (1, 2)} if turns[2] == "gate_up" else {"down_proj": (0, 1)}
    if shape[0] % len(parts):
        yield name, info
        return
    for number in range(count):
        for part, (first, step) in parts.items():
            cut = Cut(number, first, shape[0], step, transposed)
            own = (shape[0] // step, *shape[1:])
            yield f"{turns[1]}{number}.{part}.{_ENDS[turns[3]]}", replace(info, shape=own, name=name, part=cut)


def _unstacked(stacked: re.Match[str], name: str, info: TensorInfo) -> Iterator[tuple[str, TensorInfo]]:
    """The matrices of each expert."""
    count, rows, width = info.shape
    mlp = {None: "", "feed_forward": "feed_forward."}.get(stacked["mlp"], "mlp.")
    halves = stacked["part"] in ("experts.gate_up_proj", "input_linear.weight")
    if halves and rows % 2:
        yield name, info
        return
    parts = {"gate_proj": (0, rows // 2), "up_proj": (rows // 2, rows)} if halves else {"down_proj": (0, rows)}
    for number in range(count):
        for part, (first, last) in parts.items():
            spelled = f"{stacked['layer']}{mlp}experts.{number}.{part}.weight"
            cut = Cut(number, first, last)
            yield spelled, replace(info, shape=(last - first, width), name=info.name or name, part=cut)
