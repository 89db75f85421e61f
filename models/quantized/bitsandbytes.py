"""bitsandbytes: LLM.int8 (Dettmers et al. 2022), one scale per output: w = weight * SCB / 127.

4-bit matrices are already floats when a model asks for them, see `models.checkpoint.four_bits`. Activations are
not rounded to 8 bits.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from models.checkpoint.fields import Fields
from models.formats.grouped import GroupedWeight
from models.quantized.parts import LINEAR, TRANSPOSED, Form, Part, Scheme, Source, Uniform, unsupported

NAME = "bitsandbytes"
STEP = 7.874015718698502e-3  # 1 / 127 as in `int8_vectorwise_dequant`


@dataclass(frozen=True)
class ScaledRows(Scheme):
    """Weights as int8, and the largest magnitude of each output."""

    def form(self, width: int) -> Form:
        return Form("int8", width, each=4)

    def parts(self, outs: int, width: int) -> dict[str, Part]:
        return {
            "weight": Part(((outs, width),), (torch.int8,)),
            "SCB": Part(((outs,),), (torch.float32,)),
            "weight_format": Part(((),), (torch.uint8,), optional=True),
        }

    def weight(self, outs: int, width: int, source: Source) -> GroupedWeight:
        order = source.read("weight_format")
        if order is not None and order.item():
            raise source.error(f"weight_format is {order.item()}, expected 0, rows as they are")
        stored, scale_O1 = source.tensor("weight"), source.scale("SCB").unsqueeze(1) * STEP

        def codes(first: int, last: int) -> Tensor:
            return stored[first:last].view(torch.uint8) ^ 128

        return self.form(width).weight(outs, width, codes, scale_O1)


def described(fields: Fields) -> bool:
    """Whether a config without `quant_method` was written by an early version of bitsandbytes."""
    return any(fields.config.get(name) is True for name in ("load_in_4bit", "load_in_8bit"))


def parse(fields: Fields) -> Uniform | None:
    """Read a config; None for four bits. Raises CheckpointError if it is not supported."""
    four, eight = (fields.bool(name, default=False) for name in ("load_in_4bit", "load_in_8bit"))
    if four == eight:
        raise unsupported(fields, "bitsandbytes with neither or both of load_in_4bit and load_in_8bit")
    return Uniform(ScaledRows(), (LINEAR, TRANSPOSED)) if eight else None
