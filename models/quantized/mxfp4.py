"""MXFP4 (Open Compute Project, 2023, "Microscaling Formats"), as gpt-oss has its experts: 32 elements share a power of
two, two elements of E2M1 share a byte."""

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.linear.panels import power
from models.checkpoint.fields import Fields
from models.formats.grouped import GroupedRows, GroupedWeight
from models.quantized.parts import Part, Source, Uniform

GROUP = 32
NAN = 255  # the exponent that stands for no number


@dataclass(frozen=True)
class Mxfp4:
    """The form in which a weight is stored, see `models.quantized.Scheme`."""

    def parts(self, outs: int, width: int) -> dict[str, Part]:
        """See `Scheme`."""
        groups = -(-width // GROUP)
        blocks = Part(((outs, groups, GROUP // 2),), (torch.uint8,))
        return {"weight_blocks": blocks, "weight_scales": Part(((outs, groups),), (torch.uint8,))}

    def weight(self, outs: int, width: int, source: Source) -> GroupedWeight:
        """See `Scheme`."""
        if width % GROUP:
            raise source.error(f"blocks of {GROUP} elements, expected a width that is a multiple, got {width}")
        blocks_OGB, exponent_OG = source.tensor("weight_blocks"), source.tensor("weight_scales")
        if exponent_OG.eq(NAN).any():
            raise source.error("weight_scales has values that are no numbers")
        return GroupedWeight(
            "float4", (outs, width), GROUP, lambda first, last: _rows(blocks_OGB, exponent_OG, first, last)
        )


def _rows(blocks_OGB: Tensor, exponent_OG: Tensor, first: int, last: int) -> GroupedRows:
    octets = blocks_OGB[first:last]
    return GroupedRows(torch.stack((octets & 15, octets >> 4), -1).flatten(1), power(exponent_OG[first:last]))


def parse(fields: Fields) -> Uniform:
    """The config says no more than its name."""
    return Uniform(Mxfp4())
