"""GPTQ (Frantar et al. 2022) as GPTQModel 7.7 and AutoGPTQ write it.

w[o, i] = (q - zero[g, o]) * scales[g, o], g = g_idx[i]. `qweight` packs fields along the inputs, `qzeros` along the
outputs, lowest first.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from models.checkpoint.fields import Fields
from models.formats.grouped import GroupedWeight
from models.quantized.parts import (
    FLOATS,
    INTEGERS,
    Form,
    Grid,
    ModuleRules,
    Part,
    Scheme,
    Source,
    order_of,
    pattern,
    smallest,
    unpack,
    unsupported,
)

# By bits: the first version stores zeros minus one, subtracted from whole words. Zeros of 3 bits cross words: AutoGPTQ
# and GPTQModel 7.7 subtract one from each, versions before subtract `OTHERS` from every three words. The file does not
# tell which, but zeros of symmetric weights are 4.
ONES = {2: 0x55555555, 3: None, 4: 0x11111111, 8: 0x01010101}
OTHERS = (0x24924924, -0x6DB6DB6E, 0x49249249)
MIDDLE = 4
FORMATS = ("gptq", "gptq_v2")


@dataclass(frozen=True)
class GPTQ(Scheme):
    """Bits of a field, columns that share a scale, whether zeros are stored minus one, and whether each column may
    belong to any group (`desc_act`)."""

    bits: int
    grid: Grid
    first: bool
    ordered: bool = False

    def form(self, width: int) -> Form:
        """3 bits take 4 in memory."""
        group = self.grid.group(width)
        return Form(smallest(self.bits, width, group, zeros=True), group, zeros=True)

    def parts(self, outs: int, width: int) -> dict[str, Part]:
        """AutoGPTQ gives a `bias` to layers that have none."""
        groups, bits = self.grid.columns(width), self.bits
        return {
            "qweight": Part(((-(-width * bits // 32), outs),), (torch.int32,)),
            "qzeros": Part(((groups, -(-outs * bits // 32)),), (torch.int32,)),
            "scales": Part(((groups, outs),), FLOATS),
            "g_idx": Part(((width,),), INTEGERS, optional=not self.ordered or groups == 1),
            "bias": Part(((outs,),), FLOATS, optional=True),
        }

    def weight(self, outs: int, width: int, source: Source) -> GroupedWeight:
        qweight, qzeros, scale_GO = source.tensor("qweight"), source.tensor("qzeros"), source.scale("scales")
        if self.first and self.bits == 3:
            zero_GO = self._middle(qzeros, outs, source)
        else:
            zero_GO = unpack(qzeros + (ONES[self.bits] or 0) if self.first else qzeros, self.bits)[:, :outs]
        order_I = order_of(source.read("g_idx"), (form := self.form(width)).group, source)

        def codes(first: int, last: int) -> Tensor:
            codes_OI = unpack(qweight[:, first:last].T, self.bits)[:, :width]
            return codes_OI if order_I is None else codes_OI[:, order_I]

        return form.weight(outs, width, codes, scale_GO.T, zero_GO.T.float(), order_I=order_I)

    def _middle(self, qzeros: Tensor, outs: int, source: Source) -> Tensor:
        """Return zeros of 4, if the stored ones are these in one of the two ways. Raises CheckpointError."""
        others = torch.tensor(OTHERS, dtype=torch.int32).repeat(-(-qzeros.shape[1] // 3))[: qzeros.shape[1]]
        zeros = unpack(qzeros, 3)[:, :outs] + 1, unpack(qzeros + others, 3)[:, :outs]
        if not any(zero_GO.eq(MIDDLE).all() for zero_GO in zeros):
            raise source.error("qzeros of 3 bits are not those of symmetric weights, and writers store others unlike")
        return torch.full_like(zeros[0], MIDDLE)


def parse(fields: Fields) -> ModuleRules:
    """Read a config. Raises CheckpointError if it is not supported."""
    layout = fields.str("checkpoint_format", None) or fields.str("format", "gptq")
    words = fields.str("pack_dtype", "int32")
    if fields.bool("is_marlin_format", default=False):
        layout = "marlin"
    if layout not in FORMATS or words != "int32":
        raise unsupported(
            fields, f"gptq in the format {layout!r}, packed into {words} (read: {', '.join(FORMATS)}; int32)"
        )
    if rotation := fields.str("rotation", None):  # inputs of down projections would have to be transformed likewise
        raise unsupported(fields, f"gptq with rotation {rotation[:80]!r}")
    given, rules = fields.within("dynamic"), []
    for key in given.config:
        changes, expression = given.within(key), pattern(key.removeprefix("-:").removeprefix("+:"), fields)
        own = {**fields.config, **changes.config}
        rules.append((expression.match, None if key.startswith("-:") else scheme(own, fields, layout)))
    return ModuleRules(scheme(fields.config, fields, layout), tuple(rules))


def scheme(config: Mapping[str, Any], fields: Fields, layout: str) -> GPTQ:
    """Return the scheme of a config's fields for a layout of `FORMATS`. Raises CheckpointError."""
    own = Fields(config, fields.file, fields.prefix)
    if (bits := own.int("bits")) not in ONES:
        raise unsupported(fields, f"gptq with {bits} bits (read: {', '.join(map(str, ONES))})")
    if ONES[bits] is None and layout == "gptq" and not own.bool("sym", default=True):
        what = f"gptq with {bits} bits and sym false in the format 'gptq', whose zeros depend on the writer"
        raise unsupported(fields, f"{what} (read: sym true; gptq_v2)")
    ordered = own.bool("desc_act", default=False)
    return GPTQ(bits, Grid.of(own, "group_size", -1), layout == "gptq", ordered)
