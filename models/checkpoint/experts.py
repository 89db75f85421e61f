"""Presents mixtures of experts as one matrix per expert, however a checkpoint stores them.

Transformers 5 stores all experts of a layer in one tensor [experts, rows, columns], gate above up. Most published
checkpoints have a matrix per expert, with names that differ from family to family. gpt-oss has one tensor with
interleaved gate and up, floats [experts, columns, rows] or MXFP4 blocks, and biases; Llama 4, Aria and Qwen3-VL have
[experts, columns, rows] too, gate beside up, and DBRX the matrices of all experts below each other, the last ones as
columns. Only headers are read here: an expert's matrix is a part of such a tensor (`TensorInfo.part`).
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace

from models.checkpoint.tensors import Cut, TensorInfo

EXPERT = ".experts."  # marks the names of experts' matrices
MOST_EXPERTS = 2**12  # the most experts of a layer
_STACKED = re.compile(
    r"(?P<layer>.*\.layers\.\d+\.|layers\.\d+\.)(?:(?P<mlp>mlp|mixer|feed_forward|block_sparse_moe)\.)?"
    r"(?P<part>experts\.gate_up_proj|experts\.up_proj|experts\.down_proj|input_linear\.weight|output_linear\.weight|"
    r"experts\.fc1\.weight|experts\.fc2\.weight)"
)
_PAIRS = (  # gate and up of all experts, and their last matrices
    ("experts.gate_up_proj", "experts.down_proj"),
    ("input_linear.weight", "output_linear.weight"),
    ("experts.fc1.weight", "experts.fc2.weight"),
)
_WHOLE = {"experts.up_proj": "up_proj"}  # tensors of MLPs without gates
_GPT_OSS = re.compile(r"(.*\blayers\.\d+\.mlp\.experts\.)(gate_up|down)_proj(|_bias|_blocks|_scales)")
_ENDS = {"": "weight", "_bias": "bias", "_blocks": "weight_blocks", "_scales": "weight_scales"}
_MIXTRAL = re.compile(r"(.*\.experts\.\d+\.)(w1|w2|w3)(\..+)")
_PARTS = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
_DBRX = re.compile(r"(.*\.ffn\.)experts\.mlp\.(w1|v1|w2)")
_DBRX_PARTS = {"w1": "gate_proj", "v1": "up_proj", "w2": "down_proj"}
_ERNIE = re.compile(r"(.*\.mlp\.)(?:gate\.)?moe_statics\.e_score_correction_bias")  # [1, experts]


def one_by_one(name: str, info: TensorInfo, tensors: Mapping[str, TensorInfo]) -> Iterator[tuple[str, TensorInfo]]:
    """Yield the experts' matrices in a tensor, by their names; a tensor without experts is yielded unchanged.

    Args:
        tensors: all tensors of the checkpoint.
    """
    turns, stacked, statics = (pattern.fullmatch(name) for pattern in (_GPT_OSS, _STACKED, _ERNIE))
    few = bool(info.shape) and info.shape[0] <= MOST_EXPERTS
    if turns and f"{turns[1]}{turns[2]}_proj_bias" in tensors and len(info.shape) >= 2 and few:
        yield from _in_turns(turns, name, info)
    elif stacked and len(info.shape) == 3 and few and not info.packed:
        yield from _unstacked(stacked, name, info, transposed=_are_columns(stacked, tensors))
    elif (below := _DBRX.fullmatch(name)) and (router := tensors.get(f"{below[1]}router.layer.weight")):
        yield from _from_below(below, name, info, router.shape[0])
    elif statics and len(info.shape) == 2 and info.shape[0] == 1:
        shape, cut = info.shape[1:], Cut(0, 0, info.shape[1])
        yield f"{statics[1]}gate.e_score_correction_bias", replace(info, shape=shape, name=name, part=cut)
    elif own := _MIXTRAL.fullmatch(name):
        yield own[1] + _PARTS[own[2]] + own[3], replace(info, name=info.name or name)
    else:
        yield name, info


def _are_columns(stacked: re.Match[str], tensors: Mapping[str, TensorInfo]) -> bool:
    """Whether experts are stored as columns: gate and up then have as many rows as the last matrix has columns, the
    model's width; stored as rows, they have twice as many."""
    ends = next((ends for ends in _PAIRS if stacked["part"] in ends), ("", ""))
    first, last = (tensors.get(stacked[0].removesuffix(stacked["part"]) + end) for end in ends)
    return bool(first and last and len(first.shape) == len(last.shape) == 3 and first.shape[1] == last.shape[2])


def _in_turns(turns: re.Match[str], name: str, info: TensorInfo) -> Iterator[tuple[str, TensorInfo]]:
    """Yield the matrices of each expert of gpt-oss, or the tensors that represent them."""
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


def _from_below(below: re.Match[str], name: str, info: TensorInfo, count: int) -> Iterator[tuple[str, TensorInfo]]:
    """Yield the matrices of each expert of DBRX."""
    if len(info.shape) != 2 or not 0 < count <= MOST_EXPERTS or info.shape[0] % count:
        yield name, info
        return
    part = _DBRX_PARTS[below[2]]
    shape = info.shape[0] // count, info.shape[1]
    transposed = part == "down_proj"
    shape = shape[::-1] if transposed else shape
    for number in range(count):
        cut = Cut(number, 0, shape[0], 1, transposed, count)
        yield f"{below[1]}experts.{number}.{part}.weight", replace(info, shape=shape, name=name, part=cut)


def _unstacked(
    stacked: re.Match[str], name: str, info: TensorInfo, transposed: bool
) -> Iterator[tuple[str, TensorInfo]]:
    """Yield the matrices of each expert."""
    count, *shape = info.shape
    rows, width = shape[::-1] if transposed else shape
    mlp = {None: "", "block_sparse_moe": "mlp."}.get(stacked["mlp"], f"{stacked['mlp']}.")
    halves = stacked["part"] in (first for first, _ in _PAIRS)
    if halves and rows % 2:
        yield name, info
        return
    parts = (
        {"gate_proj": (0, rows // 2), "up_proj": (rows // 2, rows)}
        if halves
        else {_WHOLE.get(stacked["part"], "down_proj"): (0, rows)}
    )
    for number in range(count):
        for part, (first, last) in parts.items():
            spelled = f"{stacked['layer']}{mlp}experts.{number}.{part}.weight"
            cut = Cut(number, first, last, 1, transposed)
            yield spelled, replace(info, shape=(last - first, width), name=info.name or name, part=cut)
