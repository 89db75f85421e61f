"""optimum-quanto 0.2 (`QuantizedModelForCausalLM.save_pretrained`): `quanto_qmap.json` names the type of each module.

8 bits: `M.weight._data` and a scale for each output, w = value * scale. 2 and 4 bits: w = code * scale - shift, in
groups of the largest of 128, 96, 64 and 32 inputs that divides a row of more than 128, otherwise in rows. There
`M.weight._data._data` has the groups in fields, the first in the lowest bits: field j of row r is group j * len + r.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from models.checkpoint.fields import Fields
from models.errors import show
from models.formats.grouped import GroupedWeight
from models.quantized.parts import FLOATS, LINEAR, Form, Part, Quantization, Scheme, Source, smallest, unsupported

NAME, MODULES = "quanto", "modules"
TYPES = {"qint2": 2, "qint4": 4, "qint8": 8, "qfloat8_e4m3fn": 8}
GROUPS = (128, 96, 64, 32)
SCALE, SHIFT = "weight._scale", "weight._shift"


@dataclass(frozen=True)
class QuantoScheme(Scheme):
    """The form in which a weight is stored: one of `TYPES`."""

    type: str

    @property
    def bits(self) -> int:
        """Bits of a weight."""
        return TYPES[self.type]

    @property
    def codes(self) -> str:
        """The suffix of the codes' name."""
        return "weight._data" if self.bits == 8 else "weight._data._data"

    def group(self, width: int) -> int:
        """Return the number of columns that share a scale."""
        if self.bits == 8 or width <= GROUPS[0]:
            return width
        return next((size for size in GROUPS if width % size == 0), width)

    def form(self, width: int) -> Form:
        group = self.group(width)
        kind = "float8" if self.type == "qfloat8_e4m3fn" else smallest(self.bits, width, group)
        return Form(kind, group, least=self.bits < 8)

    def parts(self, outs: int, width: int) -> dict[str, Part]:
        """Scales of activations are 1, because these are not rounded."""
        unused = Part(((),), FLOATS, optional=True)
        found = dict.fromkeys(("input_scale", "output_scale"), unused)
        if self.bits == 8:
            dtype = torch.int8 if self.type == "qint8" else torch.float8_e4m3fn
            return {self.codes: Part(((outs, width),), (dtype,)), SCALE: Part(((outs, 1),), FLOATS)} | found
        rows = outs * width // self.group(width)
        octets = Part(((-(-rows * self.bits // 8), self.group(width)),), (torch.uint8,))
        return {self.codes: octets, SCALE: Part(((rows, 1),), FLOATS), SHIFT: Part(((rows, 1),), FLOATS)} | found

    def weight(self, outs: int, width: int, source: Source) -> GroupedWeight:
        stored, scale_OG = source.tensor(self.codes), source.scale(SCALE).view(outs, -1)
        form, each = self.form(width), width // self.group(width)
        least_OG = -source.scale(SHIFT).view(outs, -1) if form.least else None

        def codes(first: int, last: int) -> Tensor:
            if self.bits < 8:
                row_N = torch.arange(first * each, last * each)
                place_N = (self.bits * (row_N // len(stored))).to(torch.uint8).unsqueeze(1)
                return (stored[row_N % len(stored)] >> place_N & (1 << self.bits) - 1).view(-1, width)
            codes_OI = stored[first:last].view(torch.uint8)
            return codes_OI ^ 128 if self.type == "qint8" else source.numbers(self.codes, codes_OI)

        return form.weight(outs, width, codes, scale_OG, None, least_OG)


@dataclass(frozen=True)
class Quanto(Quantization):
    """A config: the schemes of the quantised modules, by the file's names."""

    schemes: Mapping[str, QuantoScheme]

    def scheme(self, module: str, kind: str) -> QuantoScheme | None:
        return self.schemes.get(module.removesuffix("._data").removesuffix(".weight")) if kind == LINEAR else None


def parse(fields: Fields) -> Quanto:
    """Read a config with the map of modules. Raises CheckpointError if it is not supported."""
    listed, schemes = fields.sub(MODULES), dict[str, QuantoScheme]()
    if listed is None:
        raise unsupported(fields, "quanto without quanto_qmap.json, which tells the type of each module")
    for module in listed.config:
        own = listed.within(module)
        kind, rounded = own.str("weights", "none"), own.str("activations", "none")
        if rounded != "none" or kind not in ("none", *TYPES):
            what = f"quanto: {show(module)} with weights {kind[:80]!r} and activations {rounded[:80]!r}"
            raise unsupported(fields, f"{what} (read: {', '.join(TYPES)}; none)")
        if kind != "none":
            schemes[module] = QuantoScheme(kind)
    return Quanto(schemes)
