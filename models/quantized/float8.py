"""Weights as float8 (e4m3) with float scales per block of outputs and inputs, per output, or per matrix.

`quant_method: fp8` as transformers and DeepSeek write it: w = weight * weight_scale_inv, a factor in spite of its name.
GPTQModel, which says so in `weight_scale_semantics`, stores the inverse under this name: w = weight / weight_scale_inv.
AutoFP8 has one `weight_scale` per matrix and no field for blocks; FBGEMM has one per output. MXFP8 (Open
Compute Project, 2023) has an 8-bit exponent per 32 elements. Any scale may be such an exponent (`scale_fmt` ue8m0):
its dtype tells. Activations are not rounded to float8.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from models.checkpoint.fields import Fields
from models.formats.grouped import GroupedWeight
from models.quantized.parts import EXPONENTS, FLOATS, Form, Grid, Part, Scheme, Source, Uniform, names, unsupported

MX = (1, 32)  # outputs and inputs that share an exponent


@dataclass(frozen=True)
class Float8(Scheme):
    """`codes` and scales of blocks, whose tensor ends in `scale`. `inverse`: codes are divided by them."""

    grid: Grid
    scale: str
    inverse: bool = False
    codes: str = "weight"

    def form(self, width: int) -> Form:
        return Form("float8", self.grid.group(width), each=4)

    def parts(self, outs: int, width: int) -> dict[str, Part]:
        """Scales of activations are accepted but not used, because activations are not rounded."""
        unused = Part(((1,), ()), FLOATS, optional=True)
        return {
            self.codes: Part(((outs, width),), (torch.float8_e4m3fn,)),
            self.scale: Part(self.grid.shapes(outs, width), (*FLOATS, *EXPONENTS)),
            **dict.fromkeys(("input_scale", "input_scale_ub", "activation_scale"), unused),
        }

    def weight(self, outs: int, width: int, source: Source) -> GroupedWeight:
        codes_OI = source.tensor(self.codes).view(torch.uint8)
        powers = source.tensor(self.scale).dtype in EXPONENTS
        scale = source.powers(self.scale) if powers else source.scale(self.scale)
        if self.inverse:
            scale = scale.reciprocal()
            if not scale.isfinite().all():
                raise source.error(f"{self.scale} has zeros, by which weights are divided")

        def codes(first: int, last: int) -> Tensor:
            return source.numbers(self.codes, codes_OI[first:last])

        return self.form(width).weight(outs, width, codes, self.grid.spread(scale, outs, width))


def parse(fields: Fields) -> Uniform:
    """Read a config of method fp8. Raises CheckpointError if it is not supported."""
    scheme = fields.str("activation_scheme", "dynamic").lower()  # as in transformers
    fields.changed({"activation_scheme": scheme}).choice("activation_scheme", {"dynamic", "static"})
    if (kind := fields.str("fmt", "e4m3")) != "e4m3":
        raise unsupported(fields, f"fp8 of kind {kind!r} (read: e4m3)")
    names(fields, "modules_to_not_convert")
    if fields.config.get("weight_scale_semantics") is not None:
        return _of_gptqmodel(fields)
    if "weight_block_size" not in fields.config:
        return whole()
    if fields.config["weight_block_size"] is None:
        return Uniform(Float8(Grid(None, None), "weight_scale_inv"))
    return Uniform(Float8(Grid.block(fields, "weight_block_size"), "weight_scale_inv"))


def _of_gptqmodel(fields: Fields) -> Uniform:
    """Read a config that GPTQModel wrote. Raises CheckpointError if it is not supported."""
    fields.choice("weight_scale_semantics", {"inverse"})
    if (kind := fields.str("format", "float8_e4m3fn")) != "float8_e4m3fn":
        raise unsupported(fields, f"fp8 of kind {kind!r} (read: float8_e4m3fn)")
    match fields.choice("weight_scale_method", {"row", "tensor", "block"}, "row"):
        case "block":
            grid = Grid.block(fields, "weight_block_size")
        case method:
            grid = Grid(1 if method == "row" else None, None)
    return Uniform(Float8(grid, "weight_scale_inv", inverse=True))


def parse_rows(fields: Fields) -> Uniform:
    """Read a config of method fbgemm_fp8, which has no further fields for weights."""
    return Uniform(Float8(Grid(1, None), "weight_scale"))


def parse_mxfp8(fields: Fields) -> Uniform:
    """Read a config of method mxfp8. Raises CheckpointError if blocks are not those of the format."""
    if (grid := Grid.block(fields, "weight_block_size", MX)) != MX:
        raise unsupported(fields, f"mxfp8 with blocks of {[*grid]} (read: {[*MX]})")
    return Uniform(Float8(Grid(*MX), "weight_scale_inv"))


def whole() -> Uniform:
    """Return a config with one `weight_scale` per matrix."""
    return Uniform(Float8(Grid(None, None), "weight_scale"))
