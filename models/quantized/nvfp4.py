"""NVFP4 as compressed-tensors and ModelOpt store it: 16 E2M1 elements share an e4m3 scale, which is relative to one
float32 scale of the whole matrix.

w = value * weight_scale / weight_global_scale (compressed-tensors), or value * weight_scale * weight_scale_2
(ModelOpt). Products use doubled values, which are integers, and half the scale.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from models.formats.grouped import GroupedWeight
from models.quantized.parts import Form, Part, Scheme, Source, unpack

GROUP = 16


@dataclass(frozen=True)
class Nvfp4(Scheme):
    """The names of the packed values and of the whole matrix's scale, and whether that scale divides or multiplies."""

    packed: str
    whole: str
    divides: bool

    def form(self, width: int) -> Form:
        return Form("fp4", min(GROUP, width), each=4)

    def parts(self, outs: int, width: int) -> dict[str, Part]:
        one = ((1,), ())
        return {
            self.packed: Part(((outs, -(-width // 2)),), (torch.uint8,)),
            "weight_scale": Part(((outs, -(-width // GROUP)),), (torch.float8_e4m3fn,)),
            self.whole: Part(one, (torch.float32,)),
            **dict.fromkeys(("input_scale", "input_global_scale"), Part(one, (torch.float32,), optional=True)),
        }

    def weight(self, outs: int, width: int, source: Source) -> GroupedWeight:
        stored, whole = source.tensor(self.packed), source.scale(self.whole).flatten()
        scale_OG = source.scale("weight_scale") / whole if self.divides else source.scale("weight_scale") * whole
        if not scale_OG.isfinite().all():
            raise source.error(f"weight_scale and {self.whole} make scales that are not finite")

        def codes(first: int, last: int) -> Tensor:
            return unpack(stored[first:last], 4)[:, :width]

        return self.form(width).weight(outs, width, codes, scale_OG / 2)


COMPRESSED = Nvfp4("weight_packed", "weight_global_scale", divides=True)
MODELOPT = Nvfp4("weight", "weight_scale_2", divides=False)
