"""BitNet's matrices of -1, 0 and 1 with one scale (Ma et al., 2024, "The Era of 1-bit LLMs"), as transformers has them.

`weight` is uint8 [outs / 4, width]: two bits of each byte are those of one quarter of the rows, from the lowest on, and
stand for the number plus one. w = number / weight_scale of linear class `bitlinear`, number * weight_scale of
`autobitlinear`, which may also store the numbers as floats. In the mode `online` the file has the floats of training:
they are divided by the mean of their magnitudes and rounded. Activations are rounded to 8 bits, token by token.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.linear.panels import LEVELS, ZEROS
from models.checkpoint.fields import Fields
from models.formats.grouped import GroupedWeight
from models.quantized.parts import (
    FLOATS,
    LINEAR,
    Form,
    Part,
    Quantization,
    Scheme,
    Source,
    names,
    pattern,
    smallest,
    unsupported,
)

LEAST_MEAN = 1e-5  # of means of magnitudes
HEADS = ["lm_head", "score"]  # which stay floats unless a config lists others


class _OfRows(Scheme):
    def form(self, width: int) -> Form:
        return Form(smallest(2, width, width), width, each=4)


@dataclass(frozen=True)
class Ternary(_OfRows):
    """Numbers and their scale.

    Args:
        inverse: the scale is a divisor.
        floats: numbers may be stored as floats.
    """

    inverse: bool
    floats: bool

    def parts(self, outs: int, width: int) -> dict[str, Part]:
        packed, plain = (-(-outs // 4), width), (outs, width)
        weight = Part((packed, plain), (torch.uint8, *FLOATS)) if self.floats else Part((packed,), (torch.uint8,))
        return {"weight": weight, "weight_scale": Part(((1,), ()), FLOATS)}

    def weight(self, outs: int, width: int, source: Source) -> GroupedWeight:
        stored, scale_1 = source.tensor("weight"), source.scale("weight_scale").view(1, 1)
        if not self.inverse and source.read("bias") is not None:
            raise source.error("a bias beside weights of autobitlinear, which transformers multiplies by their scale")
        if self.inverse and not scale_1.all():
            raise source.error("weight_scale is 0, and divides the weight")
        scale_1 = 1 / scale_1 if self.inverse else scale_1
        quarter, form = -(-outs // 4), self.form(width)
        centre = int(ZEROS[form.kind])  # the code that stands for 0
        if len(stored) != (quarter if stored.dtype == torch.uint8 else outs):
            raise source.error(f"weight: expected a byte for four outputs, or a float for each, got {stored.dtype}")

        def codes(first: int, last: int) -> Tensor:
            if stored.dtype == torch.uint8:
                out_O = torch.arange(first, last)
                place_O = (2 * (out_O // quarter)).to(torch.uint8)
                return (stored[out_O % quarter] >> place_O.unsqueeze(1) & 3) + centre - 1
            numbers_OI = stored[first:last].float()
            if not (numbers_OI.abs() <= 1).all() or numbers_OI.frac().any():
                raise source.error("weight has numbers other than -1, 0 and 1")
            return (numbers_OI + centre).to(torch.uint8)

        return form.weight(outs, width, codes, scale_1.expand(outs, 1), levels=LEVELS, by_row=True)


class Trained(_OfRows):
    """Floats that are rounded to numbers and a scale when they are read."""

    def parts(self, outs: int, width: int) -> dict[str, Part]:
        return {"weight": Part(((outs, width),), FLOATS)}

    def weight(self, outs: int, width: int, source: Source) -> GroupedWeight:
        stored, form = source.tensor("weight"), self.form(width)
        centre = int(ZEROS[form.kind])
        scale = 1 / stored.float().abs().mean().clamp(min=LEAST_MEAN)
        if not scale.isfinite() or not scale:
            raise source.error("weight has values that are not finite")

        def codes(first: int, last: int) -> Tensor:
            return ((stored[first:last].float() * scale).round_().clamp_(-1, 1) + centre).to(torch.uint8)

        return form.weight(outs, width, codes, (1 / scale).expand(outs, 1), levels=LEVELS, by_row=True)


@dataclass(frozen=True)
class TernaryModules(Quantization):
    """A config: the scheme of linear layers, and which modules stay floats.

    Attributes:
        of_floats: matrices that the file stores as floats may be meant.
    """

    common: Ternary | Trained
    kept: tuple[Callable[[str], object], ...]
    of_floats: bool

    def scheme(self, module: str, kind: str) -> Ternary | Trained | None:
        return None if kind != LINEAR or any(kept(module) for kept in self.kept) else self.common


def parse(fields: Fields) -> TernaryModules:
    """Read a config. Raises CheckpointError for what is not read."""
    kind = fields.choice("linear_class", ("bitlinear", "autobitlinear"), default="bitlinear")
    online = fields.choice("quantization_mode", ("offline", "online"), default="offline") == "online"
    if fields.bool("use_rms_norm", default=False):
        raise unsupported(fields, "bitnet with use_rms_norm, a norm before each matrix")
    automatic = kind == "autobitlinear"
    common = Trained() if automatic and online else Ternary(not automatic, automatic)
    listed = HEADS if fields.config.get("modules_to_not_convert") is None else names(fields, "modules_to_not_convert")
    kept = tuple(_meant(name, fields) for name in listed)
    return TernaryModules(common, kept, automatic)


def _meant(name: str, fields: Fields) -> Callable[[str], object]:
    """Whether a name, or an expression, is that of a module, of one that it lies in, or of the end of its name."""
    begins = pattern(rf"(?:{name})(?:(?<=\.)|(?=\.|$))", fields)
    return lambda module: begins.match(module) or module.endswith(name)
