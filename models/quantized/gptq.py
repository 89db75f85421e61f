"""GPTQ (Frantar et al. 2022) as GPTQModel 7.7 and AutoGPTQ write it.

w[o, i] = (q - zero[g, o]) * scales[g, o], g = g_idx[i]. `qweight` packs fields along the inputs, `qzeros` along the
outputs, lowest first.
"""

import re
from dataclasses import dataclass
from typing import Any

import torch

from models.fields import Fields
from models.grouped import GroupedRows, GroupedWeight
from models.quantized.parts import FLOATS, INTEGERS, Grid, Part, Source, order_of, pattern, unpack, unsupported

ONES = {4: 0x11111111, 8: 0x01010101}  # version 1 stores zeros minus one, a subtraction from whole words
FORMATS = ("gptq", "gptq_v2")


@dataclass(frozen=True)
class GPTQ:
    """A config: the scheme of most layers, and rules for others in the order in which they are tried (None: floats)."""

    common: "GPTQScheme"
    rules: tuple[tuple[re.Pattern[str], "GPTQScheme | None"], ...]

    @staticmethod
    def parse(fields: Fields) -> "GPTQ":
        """Raises CheckpointError for what is not read."""
        layout = fields.str("checkpoint_format", None) or fields.str("format", "gptq")
        if layout not in FORMATS or fields.bool("is_marlin_format", default=False):
            raise unsupported(fields, f"gptq in the format {layout!r} (read: {', '.join(FORMATS)})")
        words = fields.str("pack_dtype", "int32")
        if words != "int32":
            raise unsupported(fields, f"gptq packed into {words}")
        common = GPTQScheme.parse(fields, fields.config, first=layout == "gptq")
        given, rules = fields.sub("dynamic"), []
        for key, changes in (given.config if given else {}).items():
            expression = key.removeprefix("-:").removeprefix("+:")
            if not isinstance(changes, dict):
                raise fields.error("dynamic", "an object of objects")
            scheme = GPTQScheme.parse(fields, {**fields.config, **changes}, first=common.first)
            rules.append((pattern(expression, fields, "dynamic"), None if key.startswith("-:") else scheme))
        return GPTQ(common, tuple(rules))

    def scheme(self, module: str, kind: str) -> "GPTQScheme | None":
        """See `Quantization`."""
        return next((scheme for rule, scheme in self.rules if rule.match(module)), self.common)


@dataclass(frozen=True)
class GPTQScheme:
    """Bits of a field, columns that share a scale, and whether zeros are stored minus one."""

    bits: int
    grid: Grid
    first: bool

    @staticmethod
    def parse(fields: Fields, config: dict[str, Any], first: bool) -> "GPTQScheme":
        """Raises CheckpointError for numbers of bits that are not read."""
        own = Fields(config, fields.file, fields.prefix)
        bits = own.int("bits")
        if bits not in ONES:
            raise unsupported(fields, f"gptq with {bits} bits (read: 4, 8)")
        return GPTQScheme(bits, Grid.of(own, "group_size", -1), first)

    def parts(self, outs: int, width: int) -> dict[str, Part]:
        """See `Scheme`. `bias`: of zeros, which AutoGPTQ gives to layers that have none."""
        groups = self.grid.columns(width)
        words, zeros = -(-width * self.bits // 32), -(-outs * self.bits // 32)
        return {
            "qweight": Part(((words, outs),), (torch.int32,)),
            "qzeros": Part(((groups, zeros),), (torch.int32,)),
            "scales": Part(((groups, outs),), FLOATS),
            "g_idx": Part(((width,),), INTEGERS, optional=True),
            "bias": Part(((outs,),), FLOATS, optional=True),
        }

    def weight(self, outs: int, width: int, source: Source) -> GroupedWeight:
        """See `Scheme`."""
        qweight, scale_GO = source.tensor("qweight"), source.scale("scales")
        qzeros, group = source.tensor("qzeros"), self.grid.group(width)
        zero_GO = unpack(qzeros + ONES[self.bits] if self.first else qzeros, self.bits)[:, :outs]
        order_I = order_of(source.read("g_idx"), group, source)

        def rows(first: int, last: int) -> GroupedRows:
            codes_OI = unpack(qweight[:, first:last].T, self.bits)[:, :width]
            if order_I is not None:
                codes_OI = codes_OI[:, order_I]
            return GroupedRows(codes_OI, scale_GO[:, first:last].T, zero_GO[:, first:last].T.float())

        return GroupedWeight("int4" if self.bits == 4 else "int8", (outs, width), group, rows, order_I)
