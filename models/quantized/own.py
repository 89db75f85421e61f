"""Our own layout of quantised weights, which `python -m tools.convert FILE.gguf` writes.

w[o, i] = (code[o, i] - zero[o, g]) * scale[o, g] + least[o, g], g = i / group. For the weight of a module M, `M.codes`
has one code per byte, or two 4-bit codes (the even input in the low half); `M.scale`, and `M.zero` or `M.least`, have
one value per group. Without `M.zero`, 8-bit codes are centred at 128, 6-, 5- and 4-bit codes at 32, 16 and 8, or with
`M.least` at 0. `quantization_config` has `quant_method` "coppice", `version` 1, and in `weights` for each module
{"kind": one of `KINDS`, "group": G, "zeros": true or false, "least": true or false}; only int4 and int8 have zeros.
Codes of float4 and fp4 are those of e2m1 and represent twice its values; scales of float4 are 2^(n - 128), stored as
the byte n. Codes of kinds whose names begin with iq are indices into `kernels.linear.panels.TABLES`. A head that shares
the values of the token embedding is listed next to it.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from kernels.linear.panels import ABOVE, FIELDS, LEAST_ONLY, NIBBLES, TABLES, GroupKind, power
from models.checkpoint.fields import Fields
from models.formats.grouped import GroupedWeight
from models.quantized.parts import Form, ModuleSchemes, Part, Scheme, Shape, Source, unpack, unsupported

METHOD, VERSION = "coppice", 1
KINDS = (*FIELDS, "int4", "int8", *ABOVE, *TABLES)
EXACT = (torch.float16, torch.float32)


def fields_of_byte(kind: GroupKind) -> int:
    """Return how many codes of a kind share a byte of a file, the first in its lowest bits."""
    return 2 if kind in NIBBLES else 8 // FIELDS[kind] if kind in FIELDS else 1


@dataclass(frozen=True)
class Grouping(Scheme):
    """How a weight is stored; `scale` is the dtype of written scales. Files may have either dtype of `EXACT`, but for
    float4 only uint8."""

    kind: GroupKind
    group: int
    scale: torch.dtype = torch.float16
    zeros: bool = False
    least: bool = False

    def form(self, width: int) -> Form:
        each = 1 if self.kind == "float4" else self.scale.itemsize
        return Form(self.kind, self.group, self.zeros, self.least, each)

    def layout(self, outs: int, width: int) -> dict[str, tuple[Shape, torch.dtype]]:
        """Return shapes and dtypes of the tensors."""
        groups = -(-width // self.group)
        codes = -(-width // fields_of_byte(self.kind))
        layout: dict[str, tuple[Shape, torch.dtype]] = {
            "codes": ((outs, codes), torch.uint8),
            "scale": ((outs, groups), self.scale),
        }
        more = {"zero": self.zeros, "least": self.least}
        return layout | {name: ((outs, groups), self.scale) for name, there in more.items() if there}

    def parts(self, outs: int, width: int) -> dict[str, Part]:
        layout = self.layout(outs, width)
        exact = (torch.uint8,) if self.kind == "float4" else EXACT
        return {name: Part((shape,), (dtype,) if name == "codes" else exact) for name, (shape, dtype) in layout.items()}

    def weight(self, outs: int, width: int, source: Source) -> GroupedWeight:
        stored, scale_OG = source.tensor("codes"), source.scale("scale")
        zero_OG = source.scale("zero") if self.zeros else None
        least_OG = source.scale("least") if self.least else None

        def codes(first: int, last: int) -> Tensor:
            codes_OI = stored[first:last]
            fields = fields_of_byte(self.kind)
            return codes_OI if fields == 1 else unpack(codes_OI, 8 // fields)[:, :width]

        scale_OG = power(scale_OG) if self.kind == "float4" else scale_OG
        return self.form(width).weight(outs, width, codes, scale_OG, zero_OG, least_OG)


def config_of(weights: Mapping[str, Grouping]) -> dict[str, object]:
    """Return the `quantization_config` of modules with these weights."""
    listed = {
        name: {"kind": of.kind, "group": of.group, "zeros": of.zeros, "least": of.least} for name, of in weights.items()
    }
    return {"quant_method": METHOD, "version": VERSION, "weights": listed}


def parse(fields: Fields) -> ModuleSchemes:
    """Read a config. Raises CheckpointError if it is not supported."""
    if (version := fields.int("version")) != VERSION:
        raise unsupported(fields, f"version {version} of the layout (read: {VERSION})")
    listed = fields.within("weights")
    weights = {}
    for module in listed.config:
        own = listed.within(module)
        kind = cast(GroupKind, own.choice("kind", KINDS))
        zeros, least = own.bool("zeros", default=False), own.bool("least", default=False)
        if least and (zeros or kind in TABLES):
            raise own.error("least", f"false, where there are zeros, and of {', '.join(TABLES)}")
        if zeros and kind in (*LEAST_ONLY, *TABLES):
            raise own.error("zeros", f"false, of {kind}")
        weights[module] = Grouping(kind, own.int("group"), zeros=zeros, least=least)
    return ModuleSchemes(weights)
