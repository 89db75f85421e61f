"""MXFP4 (Open Compute Project, 2023, "Microscaling Formats"), used by gpt-oss for experts and by compressed-tensors for
any matrix: 32 elements share a power of two, two E2M1 elements share a byte."""

from dataclasses import dataclass

import torch

from kernels.linear.panels import power
from models.checkpoint.fields import Fields
from models.formats.grouped import GroupedRows, GroupedWeight
from models.quantized.parts import Part, Source, Uniform

GROUP = 32


@dataclass(frozen=True)
class Mxfp4:
    """The form in which a weight is stored, see `models.quantized.Scheme`.

    Args:
        packed, scale: suffixes of the tensors' names.
        parted: the tensor of bytes has a dimension for the groups.
    """

    packed: str
    scale: str
    parted: bool

    def parts(self, outs: int, width: int) -> dict[str, Part]:
        """See `Scheme`."""
        groups = -(-width // GROUP)
        octets = (outs, groups, GROUP // 2) if self.parted else (outs, groups * GROUP // 2)
        unused = Part(((1,), ()), (torch.float32,), optional=True)  # a scale of activations
        packed, scale = Part((octets,), (torch.uint8,)), Part(((outs, groups),), (torch.uint8,))
        return {self.packed: packed, self.scale: scale, "input_global_scale": unused}

    def weight(self, outs: int, width: int, source: Source) -> GroupedWeight:
        """See `Scheme`."""
        if width % GROUP:
            raise source.error(f"blocks of {GROUP} elements, expected a width that is a multiple, got {width}")
        source.powers(self.scale)
        packed, exponent_OG = source.tensor(self.packed), source.tensor(self.scale)

        def rows(first: int, last: int) -> GroupedRows:
            octets = packed[first:last]
            return GroupedRows(torch.stack((octets & 15, octets >> 4), -1).flatten(1), power(exponent_OG[first:last]))

        return GroupedWeight("float4", (outs, width), GROUP, rows)


COMPRESSED = Mxfp4("weight_packed", "weight_scale", parted=False)


def parse(fields: Fields) -> Uniform:
    """Read a config, which has no further fields."""
    return Uniform(Mxfp4("weight_blocks", "weight_scales", parted=True))
