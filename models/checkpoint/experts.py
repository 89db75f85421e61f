"""Mixtures of experts by one spelling of their names, whichever a checkpoint has: a matrix for each expert.

Transformers 5 has all experts of a layer in one tensor [experts, rows, columns], gate and up below each other. Most
published checkpoints have a matrix each, by names that differ from family to family. Only headers are read here: a
matrix of such a tensor is a part of it (`TensorInfo.part`).
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace

from models.checkpoint.tensors import TensorInfo
from models.errors import CheckpointError, show

EXPERT = ".experts."  # in the names of the matrices of experts
MOST_EXPERTS = 2**12  # of a layer
_STACKED = re.compile(
    r"(?P<layer>.*\.layers\.\d+\.|layers\.\d+\.)(?P<mlp>mlp|feed_forward|block_sparse_moe)\."
    r"(?P<part>experts\.gate_up_proj|experts\.down_proj|input_linear\.weight|output_linear\.weight)"
)
_MIXTRAL = re.compile(r"(.*\.experts\.\d+\.)(w1|w2|w3)(\..+)")
_PARTS = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
_ROUTERS = (".block_sparse_moe.router.layer.", ".block_sparse_moe.router.", ".mlp.router.", ".block_sparse_moe.gate.")


def one_by_one(tensors: Mapping[str, TensorInfo]) -> dict[str, TensorInfo]:
    """The same tensors; those of experts one by one, and by the names of `models.config.Names`.

    Raises:
        CheckpointError: two spellings of one matrix.
    """
    found: dict[str, TensorInfo] = {}
    for name, info in tensors.items():
        for spelled, part in _spelled(name, info):
            if spelled in found:
                what = f"{show(found[spelled].name or spelled)} and {show(name)} are both {show(spelled)}"
                raise CheckpointError(what, where=show(info.file), remedy="Keep one of them.")
            found[spelled] = part
    return found


def _spelled(name: str, info: TensorInfo) -> Iterator[tuple[str, TensorInfo]]:
    stacked = _STACKED.fullmatch(name)
    if stacked and len(info.shape) == 3 and info.shape[0] <= MOST_EXPERTS and not info.packed:
        yield from _unstacked(stacked, name, info)
        return
    spelled = name
    if own := _MIXTRAL.fullmatch(name):
        spelled = own[1] + _PARTS[own[2]] + own[3]
    for router in _ROUTERS:
        spelled = spelled.replace(router, ".mlp.gate.")
    spelled = spelled.replace(".block_sparse_moe.", ".mlp.")
    yield spelled, info if spelled == name else replace(info, name=info.name or name)


def _unstacked(stacked: re.Match[str], name: str, info: TensorInfo) -> Iterator[tuple[str, TensorInfo]]:
    """The matrices of each expert."""
    count, rows, width = info.shape
    mlp = "feed_forward" if stacked["mlp"] == "feed_forward" else "mlp"
    halves = stacked["part"] in ("experts.gate_up_proj", "input_linear.weight")
    if halves and rows % 2:
        yield name, info
        return
    parts = {"gate_proj": (0, rows // 2), "up_proj": (rows // 2, rows)} if halves else {"down_proj": (0, rows)}
    for number in range(count):
        for part, (first, last) in parts.items():
            spelled = f"{stacked['layer']}{mlp}.experts.{number}.{part}.weight"
            cut = number, first, last
            yield spelled, replace(info, shape=(last - first, width), name=info.name or name, part=cut)
