"""Gemma for mobile devices as transformers 5.23 reads it (`quant_method` "gemma"): 2, 4 or 8 bits, activations of 8.

w = q * weight_scale, with a scale per output. Codes of 2 and 4 bits are q + 2 and q + 8 in the fields of a byte, the
first in the lowest bits; 8 bits are int8. Embeddings have the same forms under other names. The inputs and outputs of
a layer are rounded to steps that training has fixed (`input_activation_scale`, `output_activation_scale`; 0: they are
not).
"""

import re
from dataclasses import dataclass
from operator import itemgetter

import torch
from torch import Tensor

from kernels.linear import Steps
from kernels.linear.panels import LEVELS, ZEROS
from models.checkpoint.fields import Fields
from models.formats.grouped import GroupedWeight
from models.quantized.parts import (
    EMBEDDING,
    FLOATS,
    LINEAR,
    Form,
    Part,
    Quantization,
    Scheme,
    Source,
    pattern,
    smallest,
    unpack,
    unsupported,
)

NAME, CODES_OF_ROWS = "gemma", "embedding_quantized"
BITS = (2, 4, 8)
STEPS = ("input_activation_scale", "output_activation_scale")


@dataclass(frozen=True)
class GemmaScheme(Scheme):
    """The form in which a weight is stored: the bits of a code, and whether it is an embedding."""

    bits: int
    rows: bool

    @property
    def names(self) -> tuple[str, str]:
        """The suffixes of the names of codes and scales."""
        return (CODES_OF_ROWS, "embedding_scale") if self.rows else ("weight", "weight_scale")

    def form(self, width: int) -> Form:
        return Form(smallest(self.bits, width, width), width, each=4)

    def parts(self, outs: int, width: int) -> dict[str, Part]:
        codes, scale = self.names
        dtype = torch.int8 if self.bits == 8 else torch.uint8
        found = {codes: Part(((outs, -(-width * self.bits // 8)),), (dtype,)), scale: Part(((outs, 1),), FLOATS)}
        return found if self.rows else found | dict.fromkeys(STEPS, Part(((), (1,)), FLOATS, optional=True))

    def weight(self, outs: int, width: int, source: Source) -> GroupedWeight:
        codes, scale = self.names
        stored, form = source.tensor(codes), self.form(width)
        above = int(ZEROS[form.kind]) - (1 << self.bits - 1)  # what codes in memory have more

        def read(first: int, last: int) -> Tensor:
            if self.bits == 8:
                return stored[first:last].view(torch.uint8) ^ 128
            return unpack(stored[first:last], self.bits)[:, :width] + above

        steps = Steps() if self.rows else Steps(*(self._step(name, source) for name in STEPS))
        levels = LEVELS if steps.before else None  # integers of 8 bits
        return form.weight(outs, width, read, source.scale(scale), steps=steps, levels=levels)

    @staticmethod
    def _step(name: str, source: Source) -> float:
        """Return a step of activations; 0: they are not rounded."""
        found = source.read(name)
        step = 0.0 if found is None else found.float().item()
        if not 0 <= step < float("inf"):
            raise source.error(f"{name} is {step}, expected a positive number, or 0")
        return step


@dataclass(frozen=True)
class MobileGemma(Quantization):
    """A config: the bits of most modules, and of those whose names an expression finds, as the expression that matches
    first in a name says; of several that match there the first, because transformers joins them to one with `|`."""

    bits: int
    others: tuple[tuple[re.Pattern[str], int], ...]
    embeddings: bool

    def scheme(self, module: str, kind: str) -> GemmaScheme | None:
        """The file shows which modules stay floats (`modules_to_not_convert`)."""
        if kind != LINEAR and not (kind == EMBEDDING and self.embeddings):
            return None
        found = [(match.start(), bits) for meant, bits in self.others if (match := meant.search(module))]
        _, bits = min(found, key=itemgetter(0), default=(0, self.bits))
        return GemmaScheme(bits, rows=kind == EMBEDDING)


def parse(fields: Fields) -> MobileGemma:
    """Read a config. Raises CheckpointError if it is not supported."""
    common, listed = _bits(fields, 4), fields.within("module_quant_configs")
    others = list[tuple[re.Pattern[str], int]]()
    for expression in listed.config:
        own = listed.within(expression)
        others.append((pattern(expression, fields), _bits(own, common)))
    return MobileGemma(common, tuple(others), fields.bool("quantize_embeddings", default=False))


def _bits(fields: Fields, default: int) -> int:
    bits = fields.int("num_bits", default)
    if bits not in BITS:
        raise unsupported(fields, f"gemma with {fields.prefix}num_bits {bits} (read: {', '.join(map(str, BITS))})")
    return bits
