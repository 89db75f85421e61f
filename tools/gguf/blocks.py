"""Block formats of GGUF: blocks of bytes to floats, or to the codes, scales and zeros of `models/quantized/own.py`.

Shape legend: O outputs, I inputs (the width of a row), N blocks of a row, B bytes of a block, G groups of a row.
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from models.quantized.own import Grouping

FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
PIECE = 1 << 22  # bytes that are converted at a time


class Blocks(NamedTuple):
    """A quantised format.

    Args:
        bytes: of a block.
        grouping: of the weights that it becomes.
        parts: codes [O, I], scale and zero [O, G] of blocks uint8 [O, N, B], by the names in `Grouping.parts`.
    """

    bytes: int
    grouping: Grouping
    parts: dict[str, Callable[[Tensor], Tensor]]


def _half(blocks_ONB: Tensor, at: int) -> Tensor:
    """The float16 at a byte of every block: [O, N, 1]."""
    return blocks_ONB[..., at : at + 2].contiguous().view(torch.float16)


def _nibbles(octets: Tensor) -> Tensor:
    """The low halves of neighbouring bytes, then their high halves."""
    return torch.cat((octets & 15, octets >> 4), -1)


def _q4_0(blocks_ONB: Tensor) -> Tensor:
    return _nibbles(blocks_ONB[..., 2:]).flatten(1)


def _q8_0(blocks_ONB: Tensor) -> Tensor:
    return (blocks_ONB[..., 2:] ^ 128).flatten(1)  # int8 plus 128


def _q4_k(blocks_ONB: Tensor) -> Tensor:
    codes_OI = _nibbles(blocks_ONB[..., 16:].unflatten(-1, (4, 32))).flatten(1)
    # Without a scale all elements of a group are alike: `_q4_k_zero` has their value.
    return codes_OI * (_q4_k_scales(blocks_ONB)[0] != 0).repeat_interleave(32, 1)


def _q4_k_scales(blocks_ONB: Tensor) -> tuple[Tensor, Tensor]:
    """Scales and minima of the groups: float32 [O, G]. Their six bits lie in twelve bytes, see `block_q4_K` in ggml."""
    first, second, rest = blocks_ONB[..., 4:16].split(4, -1)
    scale = torch.cat((first & 63, (rest & 15) | ((first >> 2) & 48)), -1)
    least = torch.cat((second & 63, (rest >> 4) | ((second >> 2) & 48)), -1)
    of = (_half(blocks_ONB, 0).float() * scale, _half(blocks_ONB, 2).float() * least)
    return of[0].flatten(1), of[1].flatten(1)


def _q4_k_scale(blocks_ONB: Tensor) -> Tensor:
    scale_OG, least_OG = _q4_k_scales(blocks_ONB)
    return torch.where(scale_OG == 0, least_OG, scale_OG)


def _q4_k_zero(blocks_ONB: Tensor) -> Tensor:
    scale_OG, least_OG = _q4_k_scales(blocks_ONB)
    return torch.where(scale_OG == 0, 1.0, least_OG / scale_OG)


def _q6_k(blocks_ONB: Tensor) -> Tensor:
    low = _nibbles(blocks_ONB[..., :128].unflatten(-1, (2, 64))).flatten(-2)
    high = blocks_ONB[..., 128:192].unflatten(-1, (2, 1, 32)) >> torch.tensor([[0], [2], [4], [6]], dtype=torch.uint8)
    return ((low | (high & 3).flatten(-3) << 4) + 96).flatten(1)  # 0 to 63 around 32 becomes 96 to 159 around 128


def _q6_k_scale(blocks_ONB: Tensor) -> Tensor:
    return (_half(blocks_ONB, 208).float() * blocks_ONB[..., 192:208].contiguous().view(torch.int8)).flatten(1)


BLOCKS = {
    "Q8_0": Blocks(34, Grouping("int8", 32), {"codes": _q8_0, "scale": lambda b: _half(b, 0).flatten(1)}),
    "Q4_0": Blocks(18, Grouping("int4", 32), {"codes": _q4_0, "scale": lambda b: _half(b, 0).flatten(1)}),
    "Q4_K": Blocks(
        144,
        Grouping("int4", 32, torch.float32, zeros=True),
        {"codes": _q4_k, "scale": _q4_k_scale, "zero": _q4_k_zero},
    ),
    "Q6_K": Blocks(210, Grouping("int8", 16, torch.float32), {"codes": _q6_k, "scale": _q6_k_scale}),
}


def convert(format: str, part: str, pieces: Iterator[Tensor], outs: int, width: int) -> Tensor:
    """A part of a matrix [outs, width].

    Args:
        format: a key of `BLOCKS` or `FLOATS`.
        part: a key of its `parts`; "" for the matrix itself where it has floats.
        pieces: the rows as they are stored, some at a time: uint8 [n, bytes of a row].
    """
    blocks = BLOCKS.get(format)
    shape, dtype = blocks.grouping.layout(outs, width)[part] if blocks else ((outs, width), FLOATS[format])
    result, first = torch.empty(shape, dtype=dtype), 0
    for piece in pieces:
        found = blocks.parts[part](piece.unflatten(1, (-1, blocks.bytes))) if blocks else piece.view(dtype)
        if blocks and part == "codes" and blocks.grouping.kind == "int4":
            found = found[:, 0::2] | found[:, 1::2] << 4
        result[first : first + len(piece)] = found
        first += len(piece)
    return result
