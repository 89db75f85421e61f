"""MXFP4 (Open Compute Project, 2023, "Microscaling Formats"), used by gpt-oss for experts and by compressed-tensors for
any matrix: 32 elements share a power of two, two E2M1 elements share a byte."""

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.linear.panels import power
from models.checkpoint.fields import Fields
from models.formats.grouped import GroupedWeight
from models.quantized.parts import FLOATS, Form, Part, Scheme, Source, Uniform, unpack

GROUP = 32


@dataclass(frozen=True)
class Mxfp4(Scheme):
    """The form in which a weight is stored, see `models.quantized.parts.Scheme`.

    Args:
        packed, scale: suffixes of the tensors' names.
        parted: the tensor of bytes has a dimension for the groups.
    """

    packed: str
    scale: str
    parted: bool

    def form(self, width: int) -> Form:
        return Form("float4", GROUP, each=1)

    def parts(self, outs: int, width: int) -> dict[str, Part]:
        """Scales of activations are accepted but not used, because activations are not rounded."""
        groups = -(-width // GROUP)
        octets = (outs, groups, GROUP // 2) if self.parted else (outs, groups * GROUP // 2)
        packed, scale = Part((octets,), (torch.uint8,)), Part(((outs, groups),), (torch.uint8,))
        unused = dict.fromkeys(("input_scale", "input_global_scale"), Part(((1,), ()), FLOATS, optional=True))
        return {self.packed: packed, self.scale: scale, **unused}

    def weight(self, outs: int, width: int, source: Source) -> GroupedWeight:
        if width % GROUP:
            raise source.error(f"blocks of {GROUP} elements, expected a width that is a multiple, got {width}")
        source.powers(self.scale)
        packed = source.tensor(self.packed)

        def codes(first: int, last: int) -> Tensor:
            return unpack(packed[first:last].flatten(1), 4)

        return self.form(width).weight(outs, width, codes, power(source.tensor(self.scale)))


COMPRESSED = Mxfp4("weight_packed", "weight_scale", parted=False)


def parse(fields: Fields) -> Uniform:
    """Read a config, which has no further fields."""
    return Uniform(Mxfp4("weight_blocks", "weight_scales", parted=True))
