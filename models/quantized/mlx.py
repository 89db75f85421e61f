"""MLX's quantisation of linear layers and embeddings as mlx-lm 0.32 writes it: `quantization` of config.json.

`weight` has the codes of a row as one stream of bits in words of 32, lowest first; codes of 3, 5 and 6 bits cross
words. `scales` has a value per group, and so has `biases` in mode affine: w = q * scale + bias. In the modes mxfp4,
nvfp4 and mxfp8 codes are e2m1 or e4m3 numbers, and scales are bytes: exponents of 2 plus 127, or e4m3 numbers in nvfp4.
Settings of single modules replace the common ones; modules that the file stores as floats are floats. The method metal
of transformers has codes of mode affine in linear layers only, and `qbiases`.

128 is subtracted from 8-bit codes, so their minimums are bias + 128 * scale, a sum in float32. A code of 1 bit counts
twice, by half the scale.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from kernels.linear.panels import GroupKind, default_zero, power
from models.checkpoint.fields import Fields
from models.formats.grouped import GroupedWeight
from models.quantized.parts import (
    FLOATS,
    TRANSPOSED,
    Form,
    Part,
    Quantization,
    Scheme,
    Source,
    Uniform,
    unpack,
    unsupported,
)

NAME, METAL, FIELD = "mlx", "metal", "quantization"
AFFINE = "affine"
KINDS: dict[int, GroupKind] = {1: "int1", 2: "int2", 3: "int4", 4: "int4", 5: "int5", 6: "int6", 8: "int8"}  # by bits
GROUPS = (32, 64, 128)
METAL_BITS = (2, 4, 8)


class Mode(NamedTuple):
    """Bits, size of groups and kind of codes; a mode without minimums allows no others."""

    bits: int
    group: int
    kind: GroupKind


DEFAULT = Mode(4, 64, "int4")  # for mode affine
MODES = {"mxfp4": Mode(4, 32, "float4"), "nvfp4": Mode(4, 16, "fp4"), "mxfp8": Mode(8, 32, "float8")}


@dataclass(frozen=True)
class MLXScheme(Scheme):
    """The form in which a weight is stored, see `models.quantized.parts.Scheme`."""

    mode: str
    bits: int
    group: int
    biases: str = "biases"

    @property
    def kind(self) -> GroupKind:
        """The kind of the codes in memory."""
        return KINDS[self.bits] if self.mode == AFFINE else MODES[self.mode].kind

    @property
    def least(self) -> bool:
        """Whether groups have minimums."""
        return self.mode == AFFINE

    def form(self, width: int) -> Form:
        """Minimums of 8-bit codes need float32."""
        each = 1 if self.kind == "float4" else 4 if self.bits == 8 else 2
        return Form(self.kind, self.group, least=self.least, each=each)

    def parts(self, outs: int, width: int) -> dict[str, Part]:
        groups = ((outs, -(-width // self.group)),)
        words = Part(((outs, -(-width * self.bits // 32)),), (torch.uint32,))
        if self.least:
            return {"weight": words, "scales": Part(groups, FLOATS), self.biases: Part(groups, FLOATS)}
        return {"weight": words, "scales": Part(groups, (torch.uint8,))}

    def weight(self, outs: int, width: int, source: Source) -> GroupedWeight:
        if width % self.group:
            raise source.error(f"groups of {self.group} elements, expected a width that is a multiple, got {width}")
        words, (scale_OG, least_OG) = source.tensor("weight"), self._values(source)

        def codes(first: int, last: int) -> Tensor:
            codes_OI = unpack(words[first:last], self.bits)
            return source.numbers("weight", codes_OI) if self.kind == "float8" else codes_OI

        return self.form(width).weight(outs, width, codes, scale_OG, None, least_OG)

    def _values(self, source: Source) -> tuple[Tensor, Tensor | None]:
        """Return scales and minimums of groups, see `GroupedRows`."""
        if self.least:
            scale_OG = source.scale("scales")
            least_OG = source.scale(self.biases) + default_zero(self.kind, True) * scale_OG
            return scale_OG / 2 if self.kind == "int1" else scale_OG, least_OG
        scales = source.tensor("scales")
        if self.kind == "fp4":
            return source.numbers("scales", scales).view(torch.float8_e4m3fn).float() / 2, None
        powers = source.powers("scales")
        return power(scales) if self.kind == "float4" else powers, None


@dataclass(frozen=True)
class MLX(Quantization):
    """A config's `quantization`: that of most modules, and those of others by the file's names; None: floats."""

    common: MLXScheme
    others: Mapping[str, MLXScheme | None]

    def scheme(self, module: str, kind: str) -> MLXScheme | None:
        return None if kind == TRANSPOSED else self.others.get(module, self.common)


def parse(fields: Fields) -> MLX:
    """Read a config. Raises CheckpointError if it is not supported."""
    for name in ("group_size", "bits"):
        fields.int(name)  # MLX always writes it here
    common, others = _scheme(fields), dict[str, MLXScheme | None]()
    for module, own in fields.config.items():
        if isinstance(own, bool):
            others[module] = common if own else None
        elif isinstance(own, dict):
            others[module] = _scheme(Fields(own, fields.file, f"{fields.prefix}{module}."))
    return MLX(common, others)


def parse_metal(fields: Fields) -> Uniform:
    """Read a config of method metal. Raises CheckpointError if it is not supported."""
    sizes = fields.int("bits", 4), fields.int("group_size", 64)
    for name, value, read in zip(("bits", "group_size"), sizes, (METAL_BITS, GROUPS), strict=True):
        if value not in read:
            raise unsupported(fields, f"metal: {name} {value} (read: {', '.join(map(str, read))})")
    return Uniform(MLXScheme(AFFINE, *sizes, "qbiases"))


def _scheme(fields: Fields) -> MLXScheme:
    """Read the settings of an object; absent fields have the defaults of its mode. Raises CheckpointError."""
    mode, place = fields.str("mode", AFFINE), fields.prefix.partition(".")[2]
    if mode != AFFINE and mode not in MODES:
        raise unsupported(fields, f"mlx: {place}mode {mode[:80]!r} (read: {', '.join([AFFINE, *MODES])})")
    bits, group, _ = MODES.get(mode, DEFAULT)
    found = MLXScheme(mode, fields.int("bits", bits), fields.int("group_size", group))
    read = (KINDS, GROUPS) if mode == AFFINE else ((bits,), (group,))
    for name, value, known in zip(("bits", "group_size"), (found.bits, found.group), read, strict=True):
        if value not in known:
            what = f"mlx: {place}{name} {value} of the mode {mode} (read: {', '.join(map(str, known))})"
            raise unsupported(fields, what)
    return found
