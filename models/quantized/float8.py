"""Weights as float8 (e4m3) with float scales: for each block of outputs and inputs, for each output, or for all.

`quant_method: fp8` as transformers and DeepSeek write it: w = weight * weight_scale_inv, a factor in spite of its name.
Activations are not rounded to float8.
"""

from dataclasses import dataclass

import torch

from models.fields import Fields
from models.grouped import GroupedRows, GroupedWeight
from models.quantized.parts import FLOATS, LINEAR, Grid, Part, Source, block_of, names, unsupported


@dataclass(frozen=True)
class Float8Scheme:
    """`weight` and its scales.

    Args:
        grid: which elements share a scale.
        scale: the end of the name of the scales.
    """

    grid: Grid
    scale: str

    def parts(self, outs: int, width: int) -> dict[str, Part]:
        """See `Scheme`. Scales of activations belong to rounding that is not done."""
        factor = Part(((1,), ()), FLOATS, optional=True)
        return {
            "weight": Part(((outs, width),), (torch.float8_e4m3fn,)),
            self.scale: Part(self.grid.shapes(outs, width), FLOATS),
            "input_scale": factor,
            "activation_scale": factor,
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


@dataclass(frozen=True)
class Float8:
    """A config."""

    common: Float8Scheme

    @staticmethod
    def parse(fields: Fields) -> "Float8":
        """Raises CheckpointError for what is not read."""
        fields.choice("activation_scheme", {"dynamic", "static"}, "dynamic")
        kind = fields.str("fmt", "e4m3")
        if kind != "e4m3" or fields.config.get("kv_cache_scheme"):
            what = f"the kind {kind!r}" if kind != "e4m3" else "a quantised cache (kv_cache_scheme)"
            raise unsupported(fields, f"fp8 with {what}")
        names(fields, "modules_to_not_convert")  # the file has them as floats
        whole = "weight_block_size" in fields.config and fields.config["weight_block_size"] is None
        grid = Grid(None, None) if whole else block_of(fields, "weight_block_size", (128, 128))
        return Float8(Float8Scheme(grid, "weight_scale_inv"))

    def scheme(self, module: str, kind: str) -> Float8Scheme | None:
        """See `Quantization`."""
        return self.common if kind == LINEAR else None
