"""AMD's Quark as version 0.13 exports it (`custom_mode` "quark"): a config for each layer by patterns of names.

w = (q - weight_zero_point) * weight_scale, or value * weight_scale of floats. Integers of groups are stored transposed,
with scales and zeros [groups, outputs]. Eight integers of 4 bits share a word along the last dimension, zeros along the
outputs; with `pack_method` "reorder" its fields hold the elements 0, 2, 4, 6, 1, 3, 5, 7, as in AWQ. fp4 with exponents
as scales is MXFP4. Activations, keys and values are not rounded to floats of fewer bits.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatch

import torch
from torch import Tensor

from models.checkpoint.fields import Fields
from models.formats.grouped import GroupedWeight
from models.quantized.awq import ORDER
from models.quantized.float8 import Float8
from models.quantized.mxfp4 import GROUP, Mxfp4
from models.quantized.parts import FLOATS, LINEAR, Form, Grid, Part, Quantization, Scheme, Source, unpack, unsupported

NAME = "quark"
INTEGERS = {"int4": (4, True), "uint4": (4, False), "int8": (8, True), "uint8": (8, False)}  # bits, signed
FLOAT8, FLOAT4 = "fp8_e4m3", "fp4"
READ = (*INTEGERS, FLOAT8, f"{FLOAT4} with e8m0 scales of {GROUP}")
CACHED = ("k_proj", "v_proj", "qkv_proj")  # whose outputs may be rounded, because they are cached


@dataclass(frozen=True)
class QuarkIntegers(Scheme):
    """Weights as integers.

    Args:
        bits, signed: of an integer.
        grid: which elements share a scale; with groups the weight is stored transposed.
        reorder: the order of fields in words of 4-bit integers is that of AWQ.
    """

    bits: int
    signed: bool
    grid: Grid
    reorder: bool

    @property
    def transposed(self) -> bool:
        """Whether the weight is stored [in, out]."""
        return self.grid.ins is not None

    def form(self, width: int) -> Form:
        return Form("int4" if self.bits == 4 else "int8", self.grid.group(width), zeros=not self.signed, each=4)

    def parts(self, outs: int, width: int) -> dict[str, Part]:
        per, dtype = (8, torch.int32) if self.bits == 4 else (1, torch.int8 if self.signed else torch.uint8)
        rows, columns = (width, outs) if self.transposed else (outs, width)
        if self.transposed:
            groups = self.grid.columns(width)
            scales, zeros = ((groups, outs),), ((groups, -(-outs // per)),)
        elif self.grid.outs is not None:
            scales, zeros = ((outs,), (outs, 1)), ((-(-outs // per),),)
        else:
            scales = zeros = ((), (1,))
        return {
            "weight": Part(((rows, -(-columns // per)),), (dtype,)),
            "weight_scale": Part(scales, FLOATS),
            "weight_zero_point": Part(zeros, (dtype,), optional=self.signed),
        }

    def weight(self, outs: int, width: int, source: Source) -> GroupedWeight:
        stored, scale, found = source.tensor("weight"), source.scale("weight_scale"), source.read("weight_zero_point")
        scale = scale.T if self.transposed else scale.reshape(-1, 1)
        zeros = None if found is None else self._zeros(found, outs).float()
        if zeros is not None and zeros.eq(8 if self.bits == 4 else 128).all():
            zeros = None  # what stands for 0 without zeros
        shape = outs, self.grid.columns(width)  # a whole matrix may share them

        def codes(first: int, last: int) -> Tensor:
            if not self.transposed:
                return self._numbers(stored[first:last])[:, :width]
            per = 8 if self.bits == 4 else 1
            start = first // per
            columns = self._numbers(stored[:, start : -(-last // per)])
            return columns[:, first - start * per : last - start * per].T.contiguous()

        zero_OG = None if zeros is None else zeros.expand(shape)
        return self.form(width).weight(outs, width, codes, scale.expand(shape), zero_OG)

    def _zeros(self, stored: Tensor, outs: int) -> Tensor:
        """Return the codes of zeros [O, G], or [1, 1] of a whole matrix."""
        if self.grid.outs is None:
            one = stored.reshape(1, 1)
            return one & 15 ^ 8 * self.signed if self.bits == 4 else self._numbers(one)
        return self._numbers(stored.reshape(-1, stored.shape[-1]))[:, :outs].T

    def _numbers(self, stored: Tensor) -> Tensor:
        """Return the codes, uint8, of words or bytes [n, m]; signed ones as the number plus 8 or 128."""
        if self.bits == 8:
            return stored.contiguous().view(torch.uint8) ^ 128 * self.signed
        fields = unpack(stored, 4)
        if self.reorder:
            fields = fields.unflatten(1, (-1, 8))[:, :, ORDER].flatten(1)
        return fields ^ 8 * self.signed


@dataclass(frozen=True)
class Quark(Quantization):
    """A config: the schemes of patterns of names, in the order of their trial, and that of the other modules (None:
    floats)."""

    patterns: Mapping[str, Scheme | None]
    common: Scheme | None

    def scheme(self, module: str, kind: str) -> Scheme | None:
        """A name goes before patterns."""
        if kind != LINEAR:
            return None
        matching = (own for pattern, own in self.patterns.items() if fnmatch(module, pattern))
        return self.patterns[module] if module in self.patterns else next(matching, self.common)


def parse(fields: Fields) -> Quark:
    """Read a config. Raises CheckpointError if it is not supported."""
    export = fields.sub("export")
    packing = export.choice("pack_method", {"reorder", "order"}, "reorder") if export else "reorder"
    if fields.sub("softmax_quant_spec"):
        raise unsupported(fields, "quark with softmax_quant_spec")

    def scheme(layer: Fields | None, cached: bool = False) -> Scheme | None:
        return _scheme(layer, fields, packing == "reorder", export is None, cached=cached) if layer else None

    patterns = {}
    for name in ("layer_quant_config", "layer_type_quant_config"):
        given = fields.within(name)
        for pattern in given.config:
            if name == "layer_quant_config":
                patterns[pattern] = scheme(given.sub(pattern), pattern.endswith(CACHED))
            elif pattern == LINEAR:
                patterns["*"] = scheme(given.sub(pattern))
    return Quark(patterns, scheme(fields.sub("global_quant_config")))


def _scheme(layer: Fields, fields: Fields, reorder: bool, old: bool, *, cached: bool) -> Scheme | None:
    """Return the scheme of a layer's config; None: floats. Raises CheckpointError if it is not supported.

    Args:
        old: the config is of a version before 1.0 that does not tell how it was exported.
        cached: outputs may be rounded to float8.
    """
    where = f"quark: {layer.prefix.removeprefix(fields.prefix)}"
    for name in ("weight", "bias", "input_tensors", "output_tensors"):
        if isinstance(layer.config.get(name), list):
            raise unsupported(fields, f"{where}{name} of several stages")
    weight, inputs, outputs = (layer.sub(name) for name in ("weight", "input_tensors", "output_tensors"))
    if layer.sub("bias"):
        raise unsupported(fields, f"{where}bias, a quantized bias")
    if outputs and not (cached and outputs.str("dtype").startswith("fp8")):
        raise unsupported(fields, f"{where}output_tensors other than fp8 of {', '.join(CACHED)}")
    if inputs and inputs.str("dtype") in INTEGERS:
        symmetric = inputs.bool("symmetric", default=True)
        if not inputs.bool("is_dynamic", default=False) or not symmetric:
            raise unsupported(fields, f"{where}input_tensors of integers, static or asymmetric")
    if weight is None:
        return None
    kind, sharing = weight.str("dtype"), weight.str("qscheme", "")
    if weight.bool("is_dynamic", default=False) or weight.str("zero_point_type", "int32") == "float32":
        raise unsupported(fields, f"{where}weight that is dynamic, or with zero points of float32")
    powers = weight.str("scale_format", None)
    if kind == FLOAT4 and (sharing, powers, weight.int("group_size", 0, low=0)) == ("per_group", "e8m0", GROUP):
        return Mxfp4("weight", "weight_scale", parted=False)
    if kind not in (*INTEGERS, FLOAT8) or powers not in (None, "float32"):
        what = f"{where}weight.dtype {kind[:80]!r} with scale_format {powers!r} (read: {', '.join(READ)})"
        raise unsupported(fields, what)
    grid = _grid(weight, kind, sharing, fields, old)
    if kind == FLOAT8:
        return Float8(grid, "weight_scale")
    return QuarkIntegers(*INTEGERS[kind], grid, reorder)


def _grid(weight: Fields, kind: str, sharing: str, fields: Fields, old: bool) -> Grid:
    """Return which elements share a scale. Raises CheckpointError if they are not those of rows, or of blocks."""
    axis = weight.int("ch_axis", None, low=-2)
    if sharing == "per_tensor":
        return Grid(None, None)
    if sharing == "per_channel" and axis in (0, -2):
        return Grid(1, None)
    if sharing == "per_group" and axis in (1, -1) and kind in INTEGERS and not old:
        return Grid(1, weight.int("group_size"))
    if sharing == "per_block" and kind == FLOAT8:
        return Grid.block(weight, "block_size")
    what = f"quark: {weight.prefix.removeprefix(fields.prefix)}qscheme {sharing[:80]!r} of {kind} along ch_axis {axis}"
    raise unsupported(fields, what + (", without export" if old else ""))
