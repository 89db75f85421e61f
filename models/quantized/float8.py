"""Weights as float8 (e4m3) with float scales: for each block of outputs and inputs, for each output, or for all.

`quant_method: fp8` as transformers and DeepSeek write it: w = weight * weight_scale_inv, a factor in spite of its name.
Activations are not rounded to float8.
"""

from dataclasses import dataclass

import torch

from models.checkpoint.fields import Fields
from models.formats.grouped import GroupedRows, GroupedWeight
from models.quantized.parts import FLOATS, Grid, Part, Source, Uniform, names, unsupported


@dataclass(frozen=True)
class Float8:
    """`weight` and the scales of blocks, whose name ends in `scale`."""

    grid: Grid
    scale: str

    def parts(self, outs: int, width: int) -> dict[str, Part]:
        """See `Scheme`. Scales of activations belong to rounding that is not done."""
        unused = Part(((1,), ()), FLOATS, optional=True)
        return {
            "weight": Part(((outs, width),), (torch.float8_e4m3fn,)),
            self.scale: Part(self.grid.shapes(outs, width), FLOATS),
            **dict.fromkeys(("input_scale", "activation_scale"), unused),
        }

    def weight(self, outs: int, width: int, source: Source) -> GroupedWeight:
        """See `Scheme`."""
        codes_OI, scale = source.tensor("weight").view(torch.uint8), source.scale(self.scale)

        def rows(first: int, last: int) -> GroupedRows:
            part_OI = codes_OI[first:last]
            if (part_OI & 127).max() == 127:
                raise source.error("weight has values that are not numbers")
            return GroupedRows(part_OI, self.grid.rows(scale, first, last, outs, width))

        return GroupedWeight("float8", (outs, width), self.grid.group(width), rows)


def parse(fields: Fields) -> Uniform:
    """Read a config of method fp8. Raises CheckpointError for what is not read."""
    fields.choice("activation_scheme", {"dynamic", "static"}, "dynamic")
    if (kind := fields.str("fmt", "e4m3")) != "e4m3":
        raise unsupported(fields, f"fp8 of kind {kind!r} (read: e4m3)")
    if fields.sub("kv_cache_scheme"):
        raise unsupported(fields, "fp8 with kv_cache_scheme")
    names(fields, "modules_to_not_convert")
    whole = fields.config.get("weight_block_size", ()) is None
    return Uniform(Float8(Grid(None, None) if whole else Grid.block(fields, "weight_block_size", (128, 128)),
                          "weight_scale_inv"))  # fmt: skip
