"""HQQ (Badri and Shaji 2023) as hqq 0.2.8 and transformers 4 write it to safetensors.

The elements of a weight [out, in] form rows of `group_size` (`axis` 1), which have a scale and a zero each: w = (q -
zero) * scale. `W_q` has several of these rows in each of its own, in fields of `nbits` bits, the first in the highest
one: field j of row r is row j * len(W_q) + r. 5 and 6 bits take a byte, 3 bits ten fields of 32 bits. With
`view_as_float` the bytes are those of floats. Small tensors of each module tell its settings; a config is not needed.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from models.checkpoint.fields import Fields
from models.formats.grouped import GroupedWeight
from models.quantized.parts import FLOATS, INTEGERS, LINEAR, Form, Part, Quantization, Scheme, Source, smallest

NAME, CODES = "hqq", "W_q"
PACKINGS = {"8bit_u8": (8, 1), "4bit_u8": (4, 2), "3bit_32": (3, 10), "2bit_u8": (2, 4), "1bit_u8": (1, 8)}
NUMBERS = ("nbits", "group_size", "axis", "view_as_float", "quant_scale", "quant_zero", "offload_meta",
           "encoded_state_dict", "stores_quant_config", "channel_wise", "optimize", "round_zero")  # fmt: skip
TEXTS = ("packing", "unpack_view_dtype", "compute_dtype")
LONGEST = 32  # of a text


@dataclass(frozen=True)
class HQQScheme(Scheme):
    """The form in which a weight is stored: a name of `PACKINGS`, and the elements of a group."""

    packing: str
    group: int

    def form(self, width: int) -> Form:
        group = min(self.group, width)
        return Form(smallest(PACKINGS[self.packing][0], width, group, zeros=True), group, zeros=True)

    def _rows(self, outs: int, width: int) -> tuple[int, int]:
        """Return the numbers of groups and of rows of `W_q`."""
        groups = -(-outs * width // self.group)
        return groups, -(-groups // PACKINGS[self.packing][1])

    def parts(self, outs: int, width: int) -> dict[str, Part]:
        groups, rows = self._rows(outs, width)
        octets = torch.int32.itemsize if self.packing == "3bit_32" else 1
        viewed = [(rows, self.group * octets // dtype.itemsize) for dtype in (torch.float16, torch.float32)]
        whole = torch.int32 if octets > 1 else torch.uint8
        return {
            CODES: Part(((rows, self.group), *viewed), (whole, *FLOATS)),
            "scale": Part(((groups, 1),), FLOATS),
            "zero": Part(((groups, 1),), FLOATS),
            "shape": Part(((2,),), INTEGERS, optional=True),
            **dict.fromkeys(NUMBERS, Part(((), (1,)), (torch.uint8, *INTEGERS, *FLOATS), optional=True)),
            **dict.fromkeys(TEXTS, Part(tuple((n,) for n in range(1, LONGEST)), (torch.uint8,), optional=True)),
        }

    def weight(self, outs: int, width: int, source: Source) -> GroupedWeight:
        if width % self.group:
            raise source.error(f"groups of {self.group} elements, expected a width that is a multiple, got {width}")
        shape = source.read("shape")
        if shape is not None and shape.tolist() != [outs, width]:
            raise source.error(f"shape is {shape.tolist()}, expected {[outs, width]}")
        (groups, count), (bits, fields) = self._rows(outs, width), PACKINGS[self.packing]
        stored = source.tensor(CODES).view(torch.int32 if self.packing == "3bit_32" else torch.uint8)
        if tuple(stored.shape) != (count, self.group):
            raise source.error(f"{CODES} has {list(stored.shape)} numbers, expected {[count, self.group]}")
        scale_OG, zero_OG = (source.scale(name).view(outs, -1) for name in ("scale", "zero"))
        each = groups // outs

        def codes(first: int, last: int) -> Tensor:
            return fields_of(stored, torch.arange(first * each, last * each), bits, fields).view(-1, width)

        return self.form(width).weight(outs, width, codes, scale_OG, zero_OG)


def fields_of(stored: Tensor, row_N: Tensor, bits: int, fields: int) -> Tensor:
    """Return rows of the unpacked codes, uint8, of a `W_q` with `fields` fields of `bits` bits."""
    place_N = (bits * (fields - 1 - row_N // len(stored))).to(stored.dtype).unsqueeze(1)
    return (stored[row_N % len(stored)] >> place_N & (1 << bits) - 1).to(torch.uint8)


@dataclass(frozen=True)
class HQQ(Quantization):
    """A config: the schemes of the quantised modules, by the file's names; `models.checkpoint.hqq` reads them."""

    schemes: Mapping[str, HQQScheme] = field(default_factory=dict)

    def scheme(self, module: str, kind: str) -> HQQScheme | None:
        return self.schemes.get(module) if kind == LINEAR else None


def parse(fields: Fields) -> HQQ:
    """Read a config; the settings are in the weight files."""
    return HQQ()
