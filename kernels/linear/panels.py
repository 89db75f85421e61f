"""Packed matrices: panels of 16 outputs, one panel after the other.

A panel holds, for each step along the width, a line with a word of each output: one float32 or float16, two bfloat16,
four int8, uint8 or float8, or eight int4 or indices into a table, of which the first four are in the low halves of the
bytes, or sixteen int2: byte j has elements j, j + 4, j + 8 and j + 12 from its lowest bits on; or 32 int1 likewise. The
low four bits of 32 int5 or 16 int6 are stored like int4, and the upper bits in one more line: byte j has those of
elements j, j + 4, j + 8 and so on. Processors read panels directly, with vectors of any size: AMX tiles and the dot
products of all instruction sets take words of this kind.
"""

import ctypes
import math
from collections.abc import Iterable, Sequence
from copy import copy
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from kernels.checks import expect
from kernels.cpp import KINDS, OPERATORS, address, function

PANEL = 16  # outputs
UNIT = 256  # elements of a row that share the units of scales
PIECE = 64  # outputs that are multiplied together; a matrix is padded to whole pieces
STEPS = {torch.float32: 1, torch.float16: 1, torch.bfloat16: 2, torch.int8: 4}  # elements in a word
MAX_INT8_WIDTH = 1 << 16  # sums of more products of int8 would not fit into 32 bits
ROWS_AT_ONCE = 1 << 20  # elements that are copied at a time when a matrix is packed

GroupKind = Literal[
    "int1", "int2", "int4", "int8", "float8", "float4", "iq4", "int5", "int6", "iq2", "iq3", "iq3s", "fp4"
]
GROUP_KINDS: dict[str, int] = {  # as C++ numbers them
    "int4": 4, "int8": 5, "float8": 6, "float4": 7, "iq4": 8, "int5": 9, "int6": 10, "iq2": 11, "iq3": 12, "iq3s": 13,
    "fp4": 14, "int2": 15, "int1": 16,
}  # fmt: skip
ABOVE = {"int5": 1, "int6": 2}  # bits of a code above the low four


def _signed(*magnitudes: int) -> tuple[int, ...]:
    return (*magnitudes, *(-number for number in magnitudes))


TABLES = {  # kinds of four bits that are places in a table of whole numbers
    "float4": _signed(0, 1, 2, 3, 4, 6, 8, 12),
    "iq4": (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113),
    "iq2": _signed(8, 25, 43, 1, 7, 9, 0, 0),
    "iq3": _signed(2, 6, 10, 14, 18, 22, 26, 31),
    "iq3s": _signed(1, 3, 5, 7, 9, 11, 13, 15),
    "fp4": _signed(0, 1, 2, 3, 4, 6, 8, 12),
}
SHARES = {"iq2": 1 / 8, "iq3": 1 / 2}  # of one that a number of a table counts; of float4 and fp4 scales have the half
NIBBLES = ("int4", *TABLES)  # kinds of four bits
# Elements of a step, and its lines.
GROUP_STEPS = dict.fromkeys(NIBBLES, (8, 1)) | {
    "int1": (32, 1), "int2": (16, 1), "int5": (32, 5), "int6": (16, 3), "int8": (4, 1), "float8": (4, 1),
}  # fmt: skip
FIELDS = {"int1": 1, "int2": 2}  # kinds of less than four bits
WHOLE = (*FIELDS, *ABOVE)  # kinds whose rows and groups are whole steps
WITHOUT_ZEROS = ("float8", *TABLES)
WITHOUT_UNITS = ("float8", "float4")
LEAST_ONLY = ("int1", *ABOVE)  # kinds that may have minimums, but no zeros
# Elements of a row of x that are rounded by one largest magnitude: of a group at most, and for int8 without groups.
ROUNDED, ROUNDED_UNGROUPED = 32, 64
ROUNDED_KINDS = ("int8", *FIELDS, *NIBBLES, *ABOVE)  # groups that multiply rounded rows
LEVELS = 127.0  # steps of their largest magnitude
# What stands for zero in groups that have none of their own.
ZEROS = dict.fromkeys(WITHOUT_ZEROS, 0.0) | {
    "int1": 1.0,
    "int2": 2.0,
    "int4": 8.0,
    "int8": 128.0,
    "int5": 16.0,
    "int6": 32.0,
}


def default_zero(kind: GroupKind, least: bool) -> float:
    """The code of zero in groups without one of their own; with minimums, codes below 8 bits count from these."""
    return ZEROS[kind] if kind == "int8" or not least else 0.0


def numbers(kind: GroupKind, codes: Tensor) -> Tensor:
    """The numbers that codes stand for, float32."""
    if kind == "float8":
        return codes.view(torch.float8_e4m3fn).float()
    if kind in TABLES:
        return torch.tensor(TABLES[kind], dtype=torch.float32)[codes.int()] * SHARES.get(kind, 1.0)
    return codes.float() * 2 if kind == "int1" else codes.float()


def power(exponent: Tensor) -> Tensor:
    """2^(exponent - 128), float32: what scales of float4 stand for, which are half those of E2M1."""
    exponent = exponent.int() - 128
    return torch.ldexp(torch.ones_like(exponent, dtype=torch.float32), exponent)


def exponents(scale: Tensor) -> Tensor:
    """The inverse of `power`. Raises ValueError for scales that are not its."""
    found = (scale.frexp().exponent + 127).clamp(0, 255).to(torch.uint8)
    if not power(found).equal(scale):
        raise ValueError("scale: expected powers of two from 2^-128 to 2^127, of which float4 has the exponents")
    return found


class Groups(NamedTuple):
    """The form of elements in groups of a packed matrix: (number - zero) * scale + least.

    Args:
        kind: int1: numbers 0 and 2, of codes 0 and 1; int2: from 0 to 3; int4: to 15; int5: to 31; int6: to 63; int8:
            to 255; float8: e4m3; else those of `TABLES` times `SHARES`.
        size: elements of a row that share a scale, side by side; a multiple of 8 and of a step, or the whole width,
            which is whole steps of the kinds of `WHOLE`.
        scale: [panels, groups, 16], float16 or float32; of float4 uint8, see `power`.
        zero: like scale; None: that of `default_zero`. Kinds of `WITHOUT_ZEROS`, int5 and int6 have none.
        least: like scale; None: 0. Not with zeros, and not of these kinds.
        unit, least_unit: [panels, width / UNIT, 16], float16: what scales and minimums count in, if they are int8;
            groups then divide UNIT, and there are no zeros.
    """

    kind: GroupKind
    size: int
    scale: Tensor
    zero: Tensor | None = None
    least: Tensor | None = None
    unit: Tensor | None = None
    least_unit: Tensor | None = None

    def values(self) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Scales, zeros and minimums in float32."""

        def counted(x: Tensor, unit: Tensor | None) -> Tensor:
            return x.float() if unit is None else x * unit.float().repeat_interleave(UNIT // self.size, 1)

        scale, zero, least = self.scale, self.zero, self.least
        return (
            power(scale) if self.kind == "float4" else counted(scale, self.unit),
            None if zero is None else zero.float(),
            None if least is None else counted(least, self.least_unit),
        )


class Steps(NamedTuple):
    """Static rounding around a product: its rows to the nearest of -128 to 127 times `before`, its results, after the
    bias, to those times `after`; 0: they are not rounded."""

    before: float = 0.0
    after: float = 0.0


EXACT = Steps()


class Packed:
    """A packed matrix [outs, width].

    Args:
        panels: [panels, steps, 16, STEPS[dtype]], contiguous, on a CPU: float32, bfloat16, float16, or uint8 for int8,
            128 more than the numbers that they stand for. [panels, steps, 16, 4], uint8, for groups. Outputs are padded
            to a multiple of 64.
        outs, width: of the matrix.
        scale_O: float32, for int8: number * scale_O[out] * levels is the element.
        groups: of elements with a scale each; not with scale_O.
        order_I: int32: the elements of x, in the order in which a row of the matrix multiplies them.
        levels: rows of x are rounded to steps of 1 / levels of the largest magnitude of each ROUNDED elements, from the
            beginning of each group on (without groups ROUNDED_UNGROUPED); 0: they are not, as for floats and float8.
        by_row: they are rounded by the largest magnitude of the whole row instead, see `reference.rounded_by_row`.
        steps: those of rows and results. With a step before, levels round no further: they only make the products
            those of integers.

    Raises:
        ValueError: panels, scales, groups, steps or an order that do not fit the sizes.
    """

    def __init__(
        self,
        panels: Tensor,
        outs: int,
        width: int,
        scale_O: Tensor | None = None,
        *,
        groups: Groups | None = None,
        order_I: Tensor | None = None,
        levels: float | None = None,
        by_row: bool = False,
        steps: Steps = EXACT,
    ):
        self.dtype = torch.int8 if panels.dtype == torch.uint8 else panels.dtype
        if self.dtype not in STEPS:
            raise ValueError(f"panels: expected one of {list(STEPS)}, got {panels.dtype}")
        if self.dtype == torch.int8 and width > MAX_INT8_WIDTH:
            raise ValueError(f"width: int8 takes at most {MAX_INT8_WIDTH}, got {width}")
        self.panels, self.outs, self.width = panels, outs, width
        self.scale_O, self.groups, self.order_I = scale_O, groups, order_I
        self.levels = (127.0 if scale_O is not None else 0.0) if levels is None else levels
        self.by_row, self.steps = by_row, steps
        self._check()

    def _check(self) -> None:
        cpu, groups = torch.device("cpu"), self.groups
        kind = self.dtype if groups is None else groups.kind
        expect("panels", self.panels, self.panels.dtype, shape(kind, self.outs, self.width), cpu)
        if (self.scale_O is not None) != (self.dtype == torch.int8 and groups is None):
            raise ValueError(f"scale_O: expected one for int8 without groups alone, got {self.scale_O} for {kind}")
        if self.scale_O is not None:
            expect("scale_O", self.scale_O, torch.float32, (self.outs,), cpu)
        if self.order_I is not None:
            expect("order_I", self.order_I, torch.int32, (self.width,), cpu)
            if not self.order_I.sort().values.equal(torch.arange(self.width, dtype=torch.int32)):
                raise ValueError("order_I: expected every element of a row once")
        rounded = self.scale_O is not None or (groups is not None and groups.kind in ROUNDED_KINDS)
        if (
            not 0 <= self.levels < 128
            or (self.levels and not rounded)
            or (self.scale_O is not None and not self.levels)
        ):
            raise ValueError(f"levels: expected 1 to 127.5 for int8, 0 for floats, got {self.levels} for {kind}")
        if self.by_row and not self.levels:
            raise ValueError("by_row: expected levels, got 0")
        if not all(0 <= step < math.inf for step in self.steps):
            raise ValueError(f"steps: expected two that are finite and not negative, got {self.steps}")
        if groups is None:
            return
        unwanted = groups[3:5] if groups.kind in WITHOUT_ZEROS else ()
        unwanted += groups[5:] if groups.kind in WITHOUT_UNITS else ()
        if groups.kind not in GROUP_KINDS or any(x is not None for x in unwanted):
            plain = f"{', '.join(WITHOUT_ZEROS)} without zeros, {', '.join(WITHOUT_UNITS)} without units"
            raise ValueError(f"groups: expected one of {list(GROUP_KINDS)}, {plain}, got {groups.kind}")
        if groups.zero is not None and (groups.least is not None or groups.kind in LEAST_ONLY):
            what = f"zeros or minimums, {', '.join(LEAST_ONLY)} without zeros"
            raise ValueError(f"groups: expected {what}, got {groups.kind}")
        each = max(8, GROUP_STEPS[groups.kind][0])
        if groups.kind in WHOLE and self.width % each:
            raise ValueError(f"width: expected a multiple of {each} for {groups.kind}, got {self.width}")
        if not (0 < groups.size < self.width and groups.size % each == 0) and groups.size != self.width:
            raise ValueError(f"groups: expected a multiple of {each}, or the width {self.width}, got {groups.size}")
        sizes = len(self.panels), -(-self.width // groups.size), PANEL
        counted = groups.unit is not None
        if counted and (UNIT % groups.size or self.width % UNIT or groups.zero is not None):
            raise ValueError(
                f"units: expected groups of which {UNIT} and the width {self.width} are multiples, no zeros"
            )
        dtypes = (torch.int8,) if counted else (torch.float32, torch.float16)
        if groups.scale.dtype not in ((torch.uint8,) if groups.kind == "float4" else dtypes):
            expected = "uint8" if groups.kind == "float4" else "int8 with units" if counted else "float16 or float32"
            raise ValueError(f"scale: expected {expected}, got {groups.scale.dtype}")
        if counted != (groups.least_unit is not None) and groups.least is not None:
            raise ValueError("units: expected those of scales and minimums, or of neither")
        for name, x in (("scale", groups.scale), ("zero", groups.zero), ("least", groups.least)):
            if x is not None:
                expect(name, x, groups.scale.dtype, sizes, cpu)
        for name, x in (("unit", groups.unit), ("least_unit", groups.least_unit)):
            if x is not None:
                expect(name, x, torch.float16, (len(self.panels), self.width // UNIT, PANEL), cpu)

    def rows(self, ids_U: Tensor) -> "Packed":
        """The matrix of these outputs, int64, in their order; a copy."""
        spare = -len(ids_U) % PIECE
        ids_P = torch.cat([ids_U, ids_U[-1:].expand(spare)])

        def picked(x_PSL: Tensor) -> Tensor:
            found_PS = x_PSL[ids_P // PANEL, :, ids_P % PANEL]
            return found_PS.view(-1, PANEL, x_PSL.shape[1]).transpose(1, 2).contiguous()

        word = torch.int32 if self.panels.shape[3] * self.panels.element_size() == 4 else torch.int16
        panels = picked(self.panels.flatten(2).view(word)).view(self.panels.dtype)
        groups = self.groups
        if groups is not None:
            groups = Groups(*groups[:2], *(None if x is None else picked(x) for x in groups[2:]))  # type: ignore[arg-type]
        return Packed(
            panels.view(len(panels), panels.shape[1], PANEL, -1),
            len(ids_U),
            self.width,
            None if self.scale_O is None else self.scale_O[ids_U],
            groups=groups,
            order_I=self.order_I,
            levels=self.levels,
            by_row=self.by_row,
            steps=self.steps,
        )

    def rounding(self) -> "Packed":
        """The matrix for rounded rows, with the same tensors; itself if it rounds already, or its kind cannot."""
        if self.levels or self.groups is None or self.groups.kind not in ROUNDED_KINDS:
            return self
        found = copy(self)
        found.levels = LEVELS
        return found

    def described(self, bias: Tensor | None) -> ctypes.Structure:
        """For C++; the tensors have to live as long as it is used."""
        group, scales, scale, others = 0, 0, self.scale_O, (None,) * 4
        kind = KINDS.get(self.dtype, len(KINDS))
        if self.groups is not None:
            kind, (group, scale, *others) = GROUP_KINDS[self.groups.kind], self.groups[1:]
            scales = KINDS.get(self.groups.scale.dtype, len(KINDS))
        tensors = self.panels, scale, *others, self.order_I, bias
        pointers = map(address, tensors)
        sizes = self.outs, self.width, self.levels, self.by_row, *self.steps
        return OPERATORS.structures["Matrix"](kind, group, scales, *pointers, *sizes)


def shape(kind: torch.dtype | GroupKind, outs: int, width: int) -> tuple[int, int, int, int]:
    """The shape of a matrix's panels, of a dtype or of groups."""
    panels = -(-outs // PIECE) * (PIECE // PANEL)
    if isinstance(kind, str):
        elements, lines = GROUP_STEPS[kind]
        return panels, -(-width // elements) * lines, PANEL, 4
    return panels, -(-width // STEPS[kind]), PANEL, STEPS[kind]


class Filling:
    """Panels that are filled with rows of a matrix as they come; by C++.

    Args:
        panels: of `shape`, whose content does not matter.
        padding: the content of words without elements.
    """

    def __init__(self, panels: Tensor, padding: int = 0):
        self.panels, self.padding, self.panel, self.filled = panels, padding, 0, 0
        step = panels.shape[3]
        width = panels.shape[1] * step
        most = max(1, ROWS_AT_ONCE // (width * PANEL)) * PANEL
        self.block = torch.empty(min(most, len(panels) * PANEL), width, dtype=panels.dtype)
        self.block.fill_(padding)

    def add(self, rows: Tensor) -> None:
        """Rows [any, at most the width of the panels]; what they lack is padding."""
        while len(rows):
            count = min(len(rows), len(self.block) - self.filled)
            self.block[self.filled : self.filled + count, : rows.shape[1]].copy_(rows[:count])
            rows, self.filled = rows[count:], self.filled + count
            if self.filled == len(self.block):
                self._flush()

    def done(self) -> Tensor:
        """The panels; outputs that no row came for are padding."""
        self._flush()
        self.panels[self.panel :] = self.padding
        return self.panels

    def _flush(self) -> None:
        count = -(-self.filled // PANEL)
        self.block[self.filled : count * PANEL] = self.padding
        if count:
            function("pack")(
                *(torch.get_num_threads(), self.panels.shape[3] * self.panels.element_size(), self.block.data_ptr()),
                *(self.panels[self.panel :].data_ptr(), count, self.panels.shape[1]),
            )
        self.panel, self.filled = self.panel + count, 0


def pack(rows: Iterable[Tensor], dtype: torch.dtype, outs: int, width: int) -> Tensor:
    """Panels of a matrix that comes in blocks of rows; by C++.

    Args:
        rows: [any, width] each, `outs` together, cast to `dtype`.
        dtype: of the elements: float32, bfloat16, float16 or int8.
        outs, width: of the matrix.

    Returns:
        The panels, see `Packed`.

    Raises:
        ValueError: a matrix of int8 that is too wide.
    """
    if dtype == torch.int8 and width > MAX_INT8_WIDTH:
        raise ValueError(f"width: int8 takes at most {MAX_INT8_WIDTH}, got {width}")
    if dtype != torch.int8:
        filling = Filling(torch.empty(shape(dtype, outs, width), dtype=dtype))
        for part in rows:
            filling.add(part)
        return filling.done()
    filling = Filling(torch.empty(shape(dtype, outs, width), dtype=torch.uint8), padding=128)
    for part in rows:
        filling.add(part.to(torch.int8).view(torch.uint8) ^ 128)  # of the two's complement: 128 more
    return filling.done()


def pack_groups(
    blocks: Iterable[Sequence[Tensor | None]],
    kind: GroupKind,
    outs: int,
    width: int,
    size: int,
) -> tuple[Tensor, Groups]:
    """Panels of a matrix whose elements lie in groups, and the groups; by C++.

    Scales, zeros and minimums become float16 if they are the same in it, else float32; scales of float4 one byte.

    Args:
        blocks: codes [any, width], uint8; then scales, zeros and minimums (the last two None, or absent, in all blocks)
            [any, groups], float32. `outs` rows together.
        kind, size: see `Groups`.
        outs, width: of the matrix.

    Raises:
        ValueError: scales of float4 that are no powers of two.
    """
    filling = Filling(torch.empty(shape(kind, outs, width), dtype=torch.uint8))
    groups = -(-width // size)
    whole: list[Tensor | None] = [None] * 3
    first = 0
    for codes_OI, *values in blocks:
        assert codes_OI is not None
        filling.add(_words(codes_OI, kind))
        for i, x_OG in enumerate(values):
            if x_OG is not None:
                kept = whole[i] = torch.zeros(len(filling.panels) * PANEL, groups) if first == 0 else whole[i]
                assert kept is not None
                kept[first : first + len(codes_OI)] = x_OG
        first += len(codes_OI)
    dtype = torch.float16
    if kind == "float4":
        assert whole[0] is not None
        whole[0], dtype = torch.cat([exponents(whole[0][:outs]), whole[0][outs:].byte()]), torch.uint8
    elif any(not x.to(dtype).float().equal(x) for x in whole if x is not None):
        dtype = torch.float32
    laid = (None if x is None else x.view(-1, PANEL, groups).transpose(1, 2).to(dtype).contiguous() for x in whole)
    return filling.done(), Groups(kind, size, *laid)  # type: ignore[arg-type]


def _words(codes_OI: Tensor, kind: GroupKind) -> Tensor:
    """The bytes of a row, line by line."""
    if kind not in (*NIBBLES, *WHOLE):
        return codes_OI
    elements, _ = GROUP_STEPS[kind]
    codes_OI = torch.nn.functional.pad(codes_OI, (0, -codes_OI.shape[1] % elements))
    step = codes_OI.view(len(codes_OI), -1, elements // 4, 4)
    if bits := FIELDS.get(kind):
        words = step[:, :, 0].clone()
        for i in range(1, 8 // bits):
            words |= step[:, :, i] << bits * i
        return words.flatten(1)
    words = (step[:, :, 0::2] & 15) | step[:, :, 1::2] << 4
    if bits := ABOVE.get(kind):
        places = torch.arange(0, 8, bits, dtype=torch.uint8).unsqueeze(1)
        above = (step >> 4 << places).sum(2, keepdim=True, dtype=torch.uint8)
        words = torch.cat([words, above], 2)
    return words.flatten(1)
