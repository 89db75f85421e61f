"""AWQ (Lin et al. 2023), version `gemm`, as AutoAWQ 0.2 writes it.

w[o, i] = (q - zero[g, o]) * scales[g, o]. `qweight` and `qzeros` pack eight outputs into a word, whose fields, lowest
first, hold the outputs 0, 2, 4, 6, 1, 3, 5, 7.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from models.checkpoint.fields import Fields
from models.formats.grouped import GroupedWeight
from models.quantized.parts import FLOATS, Form, Grid, Part, Scheme, Source, Uniform, names, unpack, unsupported

ORDER = [0, 4, 1, 5, 2, 6, 3, 7]  # the field of each output


@dataclass(frozen=True)
class AWQ(Scheme):
    """AWQ weights; columns of a group share scales and zeros."""

    grid: Grid

    def form(self, width: int) -> Form:
        return Form("int4", self.grid.group(width), zeros=True)

    def parts(self, outs: int, width: int) -> dict[str, Part]:
        groups, words = self.grid.columns(width), -(-outs // 8)
        return {
            "qweight": Part(((width, words),), (torch.int32,)),
            "qzeros": Part(((groups, words),), (torch.int32,)),
            "scales": Part(((groups, outs),), FLOATS),
        }

    def weight(self, outs: int, width: int, source: Source) -> GroupedWeight:
        qweight, zero_OG = source.tensor("qweight"), _fields(source.tensor("qzeros"))[:outs].float()

        def codes(first: int, last: int) -> Tensor:
            start = first // 8
            return _fields(qweight[:, start : -(-last // 8)])[first - start * 8 : last - start * 8]

        return self.form(width).weight(outs, width, codes, source.scale("scales").T, zero_OG)


def parse(fields: Fields) -> Uniform:
    """Read a config. Raises CheckpointError if it is not supported."""
    named = (fields.str(name, None) for name in ("version", "format", "checkpoint_format"))  # in AutoAWQ and GPTQModel
    version = next(filter(None, named), "gemm")
    if fields.str("backend", "auto") == "llm-awq":
        version = "llm-awq"
    names(fields, "modules_to_not_convert")
    return Uniform(scheme(fields, version))


def scheme(fields: Fields, version: str = "gemm") -> AWQ:
    """Return the scheme of a config's fields. Raises CheckpointError if it is not supported."""
    if version.lower() != "gemm" or fields.int("bits", 4) != 4:
        raise unsupported(fields, f"awq of version {version!r} with {fields.int('bits', 4)} bits (read: gemm, 4 bits)")
    return AWQ(Grid.of(fields, "group_size", 128))


def _fields(words: Tensor) -> Tensor:
    """Unpack int32 [n, O / 8] to uint8 [O, n], in the order of the outputs."""
    octets = unpack(words.T, 8).unflatten(-1, (-1, 4)).transpose(1, 2)
    return torch.stack((octets & 15, octets >> 4), 2).flatten(1, 2)[:, ORDER].flatten(0, 1)
