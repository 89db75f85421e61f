"""Tensors that a checkpoint holds in parts: the taps of queries, keys and values of a gated delta net (OLMo Hybrid,
Kimi Linear, Ling 3); with MLX, the halves of Granite 4's MLPs."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from models.checkpoint.tensor_files import LastFile, tensor_of
from models.checkpoint.tensors import TensorInfo

WHOLE, PARTS = "conv1d.weight", [f"{name}_conv1d.weight" for name in "qkv"]


@dataclass(frozen=True)
class InParts(TensorInfo):
    """A tensor whose rows are those of other tensors, one after the other: their names in their files, and headers.

    Where rows are cut means nothing: transformers 5.23 writes three parts of equal size whatever the heads are.
    """

    pieces: tuple[tuple[str, TensorInfo], ...] = ()

    def read(self) -> Tensor:
        """The tensor. Raises CheckpointError for files that changed."""
        last = LastFile()
        return torch.cat([tensor_of(info, name, last) for name, info in self.pieces])


def with_joined(
    tensors: Mapping[str, TensorInfo], whole: str = WHOLE, ends: Sequence[str] = PARTS
) -> dict[str, TensorInfo]:
    """The same tensors, with those in parts as one: the names of parts end in `ends`, that of the one in `whole`."""
    found = dict(tensors)
    for name in tensors:
        begin = name.removesuffix(ends[0])
        names = [begin + end for end in ends]
        if begin == name or begin + whole in tensors or not tensors.keys() >= {*names}:
            continue
        parts = [tensors[part] for part in names]
        if len({(info.dtype, info.shape[1:]) for info in parts}) == 1 and parts[0].shape:
            shape = sum(info.shape[0] for info in parts), *parts[0].shape[1:]
            pieces = tuple((found.pop(part).name or part, info) for part, info in zip(names, parts, strict=True))
            found[begin + whole] = InParts(parts[0].file, shape, parts[0].dtype, name=pieces[0][0], pieces=pieces)
    return found
