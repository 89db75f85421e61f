"""ggml's block formats as packed matrices: codes with scales and minimums of groups, exactly.

`Block.rows` is the definition, in PyTorch; `BlockPanels` packs rows of blocks in their stored form, in C++. No value
is rounded, and codes are unchanged. Formats with scales of scales keep both: int8 multiples of a float16 unit
for UNIT elements each. MXFP4 keeps the exponents of scales.

Shape legend: O outputs, N blocks of a row, B bytes of a block, I inputs (the width of a row), G groups of a row.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from kernels.checks import expect
from kernels.cpp import address, function
from kernels.linear.codebooks import codebook
from kernels.linear.panels import PANEL, UNIT, GroupKind, Groups, Packed, power, shape

THREAD_BYTES = 4 << 20  # of blocks that are worth a thread: threads that wait for others on a busy machine cost seconds
SIGN = 128  # codes of int8 are so much more than their numbers
SCALES = {"half": torch.float16, "exponents": torch.uint8, "units": torch.int8, "floats": torch.float32}


class BlockRows(NamedTuple):
    """Rows of a matrix: codes [O, I], uint8; scales and minimums [O, G], float32."""

    codes_OI: Tensor
    scale_OG: Tensor
    least_OG: Tensor | None = None


@dataclass(frozen=True)
class Block:
    """A format.

    Args:
        number: ggml's, or 1000 more for another form of the same number.
        bytes, size: bytes and elements of a block.
        kind, group: of the codes, see `kernels.linear.panels.Groups`.
        least: groups have minimums.
        scales: how they are kept: in float16, as exponents of float4, as int8 with units, or, of no format in itself,
            multiplied in float32.
        decode: blocks uint8 [O, N, B] to rows.
        codebook: the name of the codebook that has the codes; "": the blocks have them.
    """

    number: int
    bytes: int
    size: int
    kind: GroupKind
    group: int
    least: bool
    scales: Literal["half", "exponents", "units", "floats"]
    decode: Callable[[Tensor], BlockRows]
    codebook: str = ""
    zeros: ClassVar[bool] = False  # as of `Groups`

    def rows(self, stored_OB: Tensor) -> BlockRows:
        """Rows of blocks as they are stored, uint8 [O, bytes of a row]."""
        return self.decode(stored_OB.unflatten(1, (-1, self.bytes)))

    def packed_bytes(self, outs: int, width: int) -> int:
        """The bytes of a packed matrix."""
        panels, steps, *word = shape(self.kind, outs, width)
        scales = -(-width // self.group) * SCALES[self.scales].itemsize + (width // UNIT * 2 * (self.scales == "units"))
        return panels * (steps * word[0] * word[1] + PANEL * scales * (1 + self.least))


class BlockPanels:
    """Panels and groups that rows of blocks are packed into as they come.

    Args:
        block: their format.
        outs, width: of the matrix.
    """

    def __init__(self, block: Block, outs: int, width: int):
        self.block, self.outs, self.width, self.filled = block, outs, width, 0
        self.panels = torch.empty(shape(block.kind, outs, width), dtype=torch.uint8)
        whole = outs // PANEL
        self.panels[whole:] = 0  # outputs that no row comes for

        def made(count: int, dtype: torch.dtype, wanted: bool) -> Tensor | None:
            if not wanted:
                return None
            values = torch.empty(len(self.panels), count, PANEL, dtype=dtype)
            values[whole:] = 0
            return values

        groups, units = -(-width // block.group), block.scales == "units"
        self.scale = made(groups, SCALES[block.scales], True)
        self.least = made(groups, SCALES[block.scales], block.least)
        self.unit = made(width // UNIT, torch.float16, units)
        self.least_unit = made(width // UNIT, torch.float16, units and block.least)

    def add(self, stored_OB: Tensor) -> None:
        """Rows as they are stored, uint8 [any, bytes of a row].

        Raises:
            ValueError: rows of another size, too many, or with scales that are no finite numbers.
        """
        block, count, blocks = self.block, len(stored_OB), self.width // self.block.size
        expect("rows", stored_OB, torch.uint8, (count, blocks * block.bytes), torch.device("cpu"))
        if self.filled + count > self.outs:
            raise ValueError(f"expected {self.outs} rows, got {self.filled + count}")
        entries = codebook(block.codebook) if block.codebook else None
        tensors = self.panels, self.scale, self.least, self.unit, self.least_unit, entries
        threads = min(torch.get_num_threads(), 1 + stored_OB.nbytes // THREAD_BYTES)
        bad = function("repack")(
            *(threads, block.number, stored_OB.data_ptr(), self.filled, count, blocks),
            *map(address, tensors),
        )
        if bad:
            raise ValueError("scales are not finite")
        self.filled += count

    def done(self) -> Packed:
        """The matrix. Raises ValueError if rows are missing."""
        if self.filled != self.outs:
            raise ValueError(f"expected {self.outs} rows, got {self.filled}")
        assert self.scale is not None
        groups = Groups(self.block.kind, self.block.group, self.scale, None, self.least, self.unit, self.least_unit)
        return Packed(self.panels, self.outs, self.width, groups=groups)


def _half(b_ONB: Tensor, at: int) -> Tensor:
    """The float16 at a byte of every block, as float32: [O, N, 1]."""
    return b_ONB[..., at : at + 2].contiguous().view(torch.float16).float()


def _nibbles(octets: Tensor) -> Tensor:
    """The low halves of neighbouring bytes, then their high halves."""
    return torch.cat((octets & 15, octets >> 4), -1)


def _spread(octets: Tensor, bits: int) -> Tensor:
    """Fields of so many bits: those of neighbouring bytes from the lowest, then their next ones; [..., 8 / bits, n]."""
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8).unsqueeze(1)
    return (octets.unsqueeze(-2) >> shifts) & ((1 << bits) - 1)


def _grouped(codes: Tensor, scale: Tensor, least: Tensor | None = None) -> BlockRows:
    return BlockRows(codes.flatten(1), scale.flatten(1), None if least is None else least.flatten(1))


def _q4_0(b: Tensor) -> BlockRows:
    return _grouped(_nibbles(b[..., 2:]), _half(b, 0))


def _q4_1(b: Tensor) -> BlockRows:
    return _grouped(_nibbles(b[..., 4:]), _half(b, 0), _half(b, 2))


def _fifth_bits(octets: Tensor) -> Tensor:
    """Bits of four bytes, as 16 or 0."""
    return ((octets.unsqueeze(-1) >> torch.arange(8, dtype=torch.uint8)) & 1).flatten(-2) << 4


def _fields_of_bytes(octets: Tensor, bits: int) -> Tensor:
    """Fields of so many bits, those of the first byte first, from its lowest bits on."""
    return _spread(octets, bits).transpose(-1, -2).flatten(-2)


def _q1_0(b: Tensor) -> BlockRows:
    return _grouped(_fields_of_bytes(b[..., 2:], 1), _half(b, 0))


def _q2_0(b: Tensor) -> BlockRows:
    # Numbers are fields minus 1, which may be 2; codes of int2 stand around 2, so that the opposites are stored.
    return _grouped(3 - _fields_of_bytes(b[..., 2:], 2), -_half(b, 0))


def _q5_0(b: Tensor) -> BlockRows:
    return _grouped(_nibbles(b[..., 6:]) | _fifth_bits(b[..., 2:6]), _half(b, 0))


def _q5_1(b: Tensor) -> BlockRows:
    return _grouped(_nibbles(b[..., 8:]) | _fifth_bits(b[..., 4:8]), _half(b, 0), _half(b, 2))


def _q8_0(b: Tensor) -> BlockRows:
    return _grouped(b[..., 2:] ^ SIGN, _half(b, 0))


def _q2_k(b: Tensor) -> BlockRows:
    scale, least = _half(b, 80) * (b[..., :16] & 15), _half(b, 82) * (b[..., :16] >> 4)
    return _grouped(_spread(b[..., 16:80].unflatten(-1, (2, 32)), 2).flatten(-3), scale, -least)


def _q3_k(b: Tensor) -> BlockRows:
    # A set bit of the mask means that 4 is not taken away; codes of int4 stand around 8.
    codes = _spread(b[..., 32:96].unflatten(-1, (2, 32)), 2).flatten(-3, -2) + (_spread(b[..., :32], 1) << 2) + 4
    low, high = _nibbles(b[..., 96:104]), _spread(b[..., 104:108], 2).flatten(-2)
    return _grouped(codes.flatten(-2), _half(b, 108) * ((low | high << 4).float() - 32))


def _six_bits(b: Tensor) -> tuple[Tensor, Tensor]:
    """Scales and minimums of Q4_K and Q5_K: [O, N, 8]. Their six bits lie in twelve bytes, see `block_q4_K` in ggml."""
    first, second, rest = b[..., 4:16].split(4, -1)
    scale = torch.cat((first & 63, (rest & 15) | ((first >> 2) & 48)), -1)
    least = torch.cat((second & 63, (rest >> 4) | ((second >> 2) & 48)), -1)
    return _half(b, 0) * scale, -(_half(b, 2) * least)


def _q4_k(b: Tensor) -> BlockRows:
    return _grouped(_nibbles(b[..., 16:].unflatten(-1, (4, 32))).flatten(-2), *_six_bits(b))


def _q5_k(b: Tensor) -> BlockRows:
    codes = _nibbles(b[..., 48:].unflatten(-1, (4, 32))).flatten(-2) | (_spread(b[..., 16:48], 1) << 4).flatten(-2)
    return _grouped(codes, *_six_bits(b))


def _q6_k(b: Tensor) -> BlockRows:
    low = _nibbles(b[..., :128].unflatten(-1, (2, 64))).flatten(-2)
    high = _spread(b[..., 128:192].unflatten(-1, (2, 32)), 2).flatten(-3)
    scale = _half(b, 208) * b[..., 192:208].contiguous().view(torch.int8)
    return _grouped(low | high << 4, scale)


def _iq4_xs(b: Tensor) -> BlockRows:
    low = torch.stack((b[..., 4:8] & 15, b[..., 4:8] >> 4), -1).flatten(-2)
    high = ((b[..., 2:4].unsqueeze(-1) >> torch.arange(0, 8, 2, dtype=torch.uint8)) & 3).flatten(-2)
    codes = _nibbles(b[..., 8:].unflatten(-1, (8, 16))).flatten(-2)
    return _grouped(codes, _half(b, 0) * ((low | high << 4).float() - 32))


def _mxfp4(b: Tensor) -> BlockRows:
    return _grouped(_nibbles(b[..., 1:]), power(b[..., :1]))


def _nvfp4(b: Tensor) -> BlockRows:
    # Halves of e4m3 numbers without a sign; as ggml reads them, 127 is zero.
    exponent, mantissa = b[..., :4] >> 3 & 15, (b[..., :4] & 7) / 8
    scale = torch.ldexp(mantissa + (exponent > 0), exponent.clamp(min=1).int() - 8).masked_fill(b[..., :4] == 127, 0)
    return _grouped(_nibbles(b[..., 4:].unflatten(-1, (4, 8))).flatten(-2), scale)


def _trits(octets: Tensor, digits: int) -> Tensor:
    """Codes of numbers -1, 0 and 1 that lie in bytes, the first digits of all bytes first."""
    powers = torch.tensor([3**n for n in range(digits)], dtype=torch.uint8).unsqueeze(1)
    return (((octets.unsqueeze(-2) * powers).int() * 3 >> 8) + 1).to(torch.uint8).flatten(-2)


def _tq1_0(b: Tensor) -> BlockRows:
    codes = torch.cat([_trits(b[..., :32], 5), _trits(b[..., 32:48], 5), _trits(b[..., 48:52], 4)], -1)
    return _grouped(codes, _half(b, 52))


def _tq2_0(b: Tensor) -> BlockRows:
    return _grouped(3 - _spread(b[..., :64].unflatten(-1, (2, 32)), 2).flatten(-3), -_half(b, 64))


def _words(octets: Tensor, size: int) -> Tensor:
    """Words of so many bytes, int64 from 0 on."""
    return (octets.long().unflatten(-1, (-1, size)) << torch.arange(0, 8 * size, 8)).sum(-1)


def _fields(words: Tensor, bits: int, count: int) -> Tensor:
    """Fields of so many bits of every word, from the lowest, side by side."""
    return ((words.unsqueeze(-1) >> torch.arange(0, bits * count, bits)) & ((1 << bits) - 1)).flatten(-2)


def _even(seven: Tensor) -> Tensor:
    """Seven signs, and the eighth: there is an even number of negative ones."""
    odd = seven ^ seven >> 4
    odd = odd ^ odd >> 2
    return seven | ((odd ^ odd >> 1) & 1) << 7


def _entries(name: str, entry: Tensor, sign: Tensor | None, scale: Tensor, unit: Tensor) -> BlockRows:
    """Entries of a codebook with bits of their signs, and scales that are odd numbers of units."""
    codes = codebook(name)[entry].flatten(-2)
    if sign is not None:
        codes |= _fields(sign, 1, 8).to(torch.uint8) << 3
    return _grouped(codes, unit * (2 * scale + 1))


def _iq2_xxs(b: Tensor) -> BlockRows:
    entry, more = b[..., 2:].unflatten(-1, (8, 2, 4)).unbind(-2)
    more = _words(more.flatten(-2), 4)
    return _entries("iq2_xxs", entry.flatten(-2).long(), _even(_fields(more, 7, 4)), more >> 28, _half(b, 0))


def _iq2_xs(b: Tensor) -> BlockRows:
    more = _words(b[..., 2:66], 2)
    return _entries("iq2_xs", more & 511, _even(more >> 9), _fields(b[..., 66:].long(), 4, 2), _half(b, 0))


def _iq2_s(b: Tensor) -> BlockRows:
    b, unit = b.long(), _half(b, 0)
    entry = b[..., 2:34] | _fields(b[..., 66:74], 2, 4) << 8
    return _entries("iq2_s", entry, b[..., 34:66], _fields(b[..., 74:], 4, 2), unit)


def _iq3_xxs(b: Tensor) -> BlockRows:
    more = _words(b[..., 66:], 4)
    return _entries("iq3_xxs", b[..., 2:66].long(), _even(_fields(more, 7, 4)), more >> 28, _half(b, 0))


def _iq3_s(b: Tensor) -> BlockRows:
    b, unit = b.long(), _half(b, 0)
    entry = b[..., 2:66] | _fields(b[..., 66:74], 1, 8) << 8
    return _entries("iq3_s", entry, b[..., 74:106], _fields(b[..., 106:], 4, 2), unit)


def _iq1_s(b: Tensor) -> BlockRows:
    more = _words(b[..., 34:], 2)
    lowered = (more >> 15 << 11).repeat_interleave(4, -1)
    entry = (b[..., 2:34].long() | _fields(more, 3, 4) << 8) + lowered
    return _entries("iq1", entry, None, more >> 12 & 7, _half(b, 0))


def _iq1_m(b: Tensor) -> BlockRows:
    more, above = _words(b[..., 48:], 2), _fields(b[..., 32:48].long(), 4, 2)
    unit = ((more >> 12) << torch.arange(0, 16, 4)).sum(-1, keepdim=True).to(torch.int32).to(torch.int16)
    entry = b[..., :32].long() | above << 8  # the highest bit: lowered
    return _entries("iq1", entry, None, _fields(more, 3, 4), unit.view(torch.float16).float())


BLOCKS = {  # by ggml's names
    "Q4_0": Block(2, 18, 32, "int4", 32, False, "half", _q4_0),
    "Q4_1": Block(3, 20, 32, "int4", 32, True, "half", _q4_1),
    "Q5_0": Block(6, 22, 32, "int5", 32, False, "half", _q5_0),
    "Q5_1": Block(7, 24, 32, "int5", 32, True, "half", _q5_1),
    "Q8_0": Block(8, 34, 32, "int8", 32, False, "half", _q8_0),
    "Q2_K": Block(10, 84, 256, "int2", 16, True, "units", _q2_k),
    "Q3_K": Block(11, 110, 256, "int4", 16, False, "units", _q3_k),
    "Q4_K": Block(12, 144, 256, "int4", 32, True, "units", _q4_k),
    "Q5_K": Block(13, 176, 256, "int5", 32, True, "units", _q5_k),
    "Q6_K": Block(14, 210, 256, "int6", 16, False, "units", _q6_k),
    "IQ4_NL": Block(20, 18, 32, "iq4", 32, False, "half", _q4_0),
    "IQ4_XS": Block(23, 136, 256, "iq4", 32, False, "units", _iq4_xs),
    "IQ1_S": Block(19, 50, 256, "iq2", 32, False, "units", _iq1_s, "iq1"),
    "IQ1_M": Block(29, 56, 256, "iq2", 16, False, "units", _iq1_m, "iq1"),
    "IQ2_XXS": Block(16, 66, 256, "iq2", 32, False, "units", _iq2_xxs, "iq2_xxs"),
    "IQ2_XS": Block(17, 74, 256, "iq2", 16, False, "units", _iq2_xs, "iq2_xs"),
    "IQ2_S": Block(22, 82, 256, "iq2", 16, False, "units", _iq2_s, "iq2_s"),
    "IQ3_XXS": Block(18, 98, 256, "iq3", 32, False, "units", _iq3_xxs, "iq3_xxs"),
    "IQ3_S": Block(21, 110, 256, "iq3s", 32, False, "units", _iq3_s, "iq3_s"),
    "TQ1_0": Block(34, 54, 256, "int2", 256, False, "half", _tq1_0),
    "TQ2_0": Block(35, 66, 256, "int2", 256, False, "half", _tq2_0),
    "MXFP4": Block(39, 17, 32, "float4", 32, False, "exponents", _mxfp4),
    "NVFP4": Block(40, 36, 64, "fp4", 16, False, "half", _nvfp4),
    "Q1_0": Block(41, 18, 128, "int1", 128, False, "half", _q1_0),
    "Q2_0": Block(42, 18, 64, "int2", 64, False, "half", _q2_0),
    "Q2_0_G128": Block(1042, 34, 128, "int2", 128, False, "half", _q2_0),
}
