"""Weights as codes in groups that share a scale, as in quantised checkpoints.

Shape legend: O outputs, I inputs (the width of a row), G groups of a row.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from kernels.linear import Packed, PackedParts, Steps, pack_groups
from kernels.linear.blocks import Block, BlockPanels
from kernels.linear.codes import Codes, pack_codes, takes
from kernels.linear.panels import (
    EXACT,
    GROUP_STEPS,
    LEVELS,
    ROUNDED,
    ROUNDED_KINDS,
    WHOLE,
    ZEROS,
    GroupKind,
    default_zero,
    numbers,
)
from kernels.linear.reference import round_to, rounded, rounded_by_row
from models.formats.coded import CodedLinear, has_codes, warn_of_floats
from models.formats.floats import FloatLinear, PackedLinear, has_kernels
from models.trim import is_mapped, let_go

CHUNK = 1 << 21  # weights whose codes or floats are in memory at once
STORED_CHUNK = 16 << 20  # bytes of blocks that are packed at once


StoredBlocks = tuple[Tensor, Block]  # rows of blocks as in a file, and their format


class GroupedRows(NamedTuple):
    """Rows of a matrix: w[o, i] = (number of codes[o, i] - zero[o, g]) * scale[o, g] + least[o, g], g = i / group.

    Args:
        codes_OI: uint8. int4: 0 to 15; int8: 0 to 255; float8: the bits of an e4m3 number; float4, fp4: the bits of an
            e2m1 number, representing twice its value; the other kinds of four bits: indices into `TABLES`.
        scale_OG: float32; for float4 powers of two.
        zero_OG: float32, or None for that of `default_zero`.
        least_OG: float32, or None for 0; not together with zeros.
    """

    codes_OI: Tensor
    scale_OG: Tensor
    zero_OG: Tensor | None = None
    least_OG: Tensor | None = None


@dataclass(frozen=True, eq=False)
class GroupedWeight:
    """A quantised weight [outs, width] of a checkpoint. No memory of its size is allocated before rows are requested.

    Args:
        kind: the kind of the codes.
        shape: outs, width.
        group: number of adjacent elements of a row that share a scale; the last group may be shorter.
        rows: returns rows [first, last) of the matrix.
        order_I: int64; codes_OI[:, i] multiplies input order_I[i]. None: input i.
        levels: activations are rounded to steps of 1 / levels of the largest magnitude of each ROUNDED of a group and
            multiplied as int8, except with float8; None: they are multiplied as floats. Steps of inputs are kept.
        least: rows have minimums.
        stored: the weight as blocks of a file, uint8 [outs, bytes of a row], and their format; None: it has no blocks.
        by_row: activations are rounded by the largest magnitude of each row instead, on a GPU too.
        steps: those of its inputs and outputs, on a GPU too.
    """

    kind: GroupKind
    shape: tuple[int, int]
    group: int
    rows: Callable[[int, int], GroupedRows]
    order_I: Tensor | None = None
    levels: float | None = None
    least: bool = False
    stored: StoredBlocks | None = None
    by_row: bool = False
    steps: Steps = EXACT

    @property
    def groups(self) -> int:
        """The number of groups of a row."""
        return -(-self.shape[1] // self.group)

    @property
    def kinship(self) -> tuple[object, ...]:
        """The properties, except the order, that weights must share to form one matrix."""
        own = self.kind, self.shape[1], self.group, self.levels, self.by_row, self.steps
        return *own, self.least, self.stored and self.stored[1]

    def part(self, outs: range | None, ins: range | None) -> "GroupedWeight":
        """Return some outputs and inputs of it; None: all. Raises ValueError if inputs cannot be divided so."""
        first, step, (rows, width), group, some = 0, 1, self.shape, self.group, slice(None)
        if outs is not None:
            first, step, rows = outs.start, outs.step, len(outs)
        if ins is not None:
            if self.order_I is not None:
                raise ValueError("its inputs have an order of their own (desc_act)")
            if self.by_row:
                raise ValueError("each of its rows of activations is rounded as a whole (BitNet)")
            if self.steps.after:
                raise ValueError("its outputs are rounded, which has to follow the sum over processes")
            if group == width:
                each = GROUP_STEPS[self.kind][0] if self.kind in WHOLE else 1
                if len(ins) % each:
                    raise ValueError(f"{len(ins)} inputs are no whole steps of {each} codes ({self.kind})")
                group = len(ins)
            elif ins.start % group or (ins.stop % group and ins.stop != width):
                raise ValueError(f"inputs {ins.start} to {ins.stop} are no whole groups of {group}")
            else:
                some = slice(ins.start // group, -(-ins.stop // group))
            width = len(ins)
        columns = slice(None) if ins is None else slice(ins.start, ins.stop)

        def read(start: int, stop: int) -> GroupedRows:
            codes_OI, *values = self.rows(first + start * step, first + (stop - 1) * step + 1)
            return GroupedRows(
                codes_OI[::step, columns].contiguous(),
                *(None if x_OG is None else x_OG[::step, some] for x_OG in values),  # type: ignore[arg-type]
            )

        stored = self.stored and _cut(self.stored, outs, ins)
        return replace(self, shape=(rows, width), group=group, rows=read, stored=stored) if outs or ins else self

    def floats(self, first: int = 0, last: int | None = None) -> Tensor:
        """Return rows [first, last) as float32, their columns in the order of the inputs."""
        codes_OI, scale_OG, zero_OG, least_OG = self.rows(first, self.shape[0] if last is None else last)
        numbers_OI = numbers(self.kind, codes_OI)
        spread = partial(_spread, group=self.group, width=self.shape[1])
        numbers_OI -= default_zero(self.kind, self.least) if zero_OG is None else spread(zero_OG)
        numbers_OI *= spread(scale_OG)
        if least_OG is not None:
            numbers_OI += spread(least_OG)
        if self.order_I is None:
            return numbers_OI
        floats_OI = torch.empty_like(numbers_OI)
        floats_OI[:, self.order_I] = numbers_OI
        return floats_OI


def _cut(stored: StoredBlocks, outs: range | None, ins: range | None) -> StoredBlocks | None:
    """Return some rows and columns of blocks; None: the columns are not whole blocks."""
    rows_OB, block = stored
    if outs is not None:
        rows_OB = rows_OB[outs.start : outs.stop : outs.step].contiguous()
    if ins is not None:
        if ins.start % block.size or ins.stop % block.size:
            return None
        each = block.bytes
        rows_OB = rows_OB[:, ins.start // block.size * each : ins.stop // block.size * each].contiguous()
    return rows_OB, block


def _spread(x_OG: Tensor, group: int, width: int) -> Tensor:
    """Repeat the values of groups for every element of a row."""
    return x_OG.repeat_interleave(group, 1)[:, :width]


class GroupedLinear(PackedLinear):
    """y = x W^T + b with weights in groups, see `models.formats.linear.Linear`.

    With C++ kernels, and on a GPU, weights of one kind are packed into one matrix, without changing codes. Without
    kernels every product on a CPU makes floats of a few rows at a time, which is slow. Groups of a size that a GPU's
    kernel does not support become floats once, with a warning.

    Args:
        weights: the weights, of equal widths.
    """

    def __init__(
        self,
        weights: Sequence[GroupedWeight],
        biases: Sequence[Tensor] | None = None,
        *,
        dtype: torch.dtype,
        device: torch.device,
    ):
        super().__init__(None, biases, dtype=dtype, device=device)
        self.weights, self.whole = [*weights], None
        self.levels = next((weight.levels for weight in weights if weight.by_row), None)
        if device.type != "cpu":
            self.whole, self.weights = _on_device(weights, biases, dtype, device), []
        elif has_kernels(torch.float32, device):
            parts = [_packed(alike) for alike in _alike(weights)]
            self.packed = parts[0] if len(parts) == 1 else PackedParts(parts)
            self.weights = []
        else:
            for weight in weights:  # read once, so that an error ends the load and not a search
                deque(_blocks([weight]), maxlen=0)

    @property
    def rounds(self) -> bool:
        return super().rounds or any(weight.levels for weight in self.weights)

    def round_rows(self) -> None:
        super().round_rows()
        self.weights = [replace(w, levels=LEVELS) if w.kind in ROUNDED_KINDS else w for w in self.weights]

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] -> [..., sum of outs]."""
        if self.packed:
            return super().forward(x)
        if self.whole:
            return self.whole(x if self.levels is None else rounded_by_row(x, self.levels).to(x.dtype))
        y = torch.cat([_product(round_to(x, w.steps.before).float(), w) for w in self.weights], -1).to(x.dtype)
        y = y if self.bias is None else y + self.bias
        if not any(weight.steps.after for weight in self.weights):
            return y
        parts = y.split([weight.shape[0] for weight in self.weights], -1)
        return torch.cat([round_to(part, w.steps.after) for part, w in zip(parts, self.weights, strict=True)], -1)


def _alike(weights: Sequence[GroupedWeight]) -> list[list[GroupedWeight]]:
    """Group neighbours that can form one matrix."""
    found: list[list[GroupedWeight]] = []
    for weight in weights:
        last = found[-1][-1] if found else None
        if last is not None and last.kinship == weight.kinship and _same(last.order_I, weight.order_I):
            found[-1].append(weight)
        else:
            found.append([weight])
    return found


def _same(one: Tensor | None, other: Tensor | None) -> bool:
    return one is other or (one is not None and other is not None and one.equal(other))


def _on_device(
    weights: Sequence[GroupedWeight], biases: Sequence[Tensor] | None, dtype: torch.dtype, device: torch.device
) -> nn.Module:
    """Make a layer of codes if the GPU has a product for their groups; else a layer of floats."""
    if any(weight.steps != EXACT for weight in weights):
        return SteppedLinear(weights, biases, dtype, device)
    refused = next((w for w in weights if not takes(w.kind, w.group, w.shape[1])), None)
    if refused is None and has_codes(dtype, device):
        return CodedLinear([_codes(w, device) for w in _alike(weights)], biases, dtype=dtype, device=device)
    if refused is not None:
        warn_of_floats(refused.kind, refused.group, dtype)
    return FloatLinear((weight.floats() for weight in weights), biases, dtype=dtype, device=device)


class SteppedLinear(nn.Module):
    """y = x W^T + b on a GPU, whose inputs and outputs have static steps, which weights may not share."""

    def __init__(
        self,
        weights: Sequence[GroupedWeight],
        biases: Sequence[Tensor] | None,
        dtype: torch.dtype,
        device: torch.device,
    ):
        super().__init__()
        self.steps, layers = [weight.steps for weight in weights], list[nn.Module]()
        for i, weight in enumerate(weights):
            own = None if biases is None else [biases[i]]
            layers.append(_on_device([replace(weight, steps=EXACT)], own, dtype, device))
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] -> [..., sum of outs]."""
        parts = zip(self.layers, self.steps, strict=True)
        return torch.cat([round_to(layer(round_to(x, before)), after) for layer, (before, after) in parts], -1)


def _packed(weights: Sequence[GroupedWeight]) -> Packed:
    """Pack alike weights into one matrix."""
    first, outs, width = weights[0], sum(weight.shape[0] for weight in weights), weights[0].shape[1]
    order_I = None if first.order_I is None else first.order_I.to(torch.int32)
    if first.stored:
        panels = BlockPanels(first.stored[1], outs, width)
        for rows_OB, _ in (weight.stored for weight in weights if weight.stored):
            mapped = is_mapped(rows_OB)
            for part in rows_OB.split(max(1, STORED_CHUNK // rows_OB.shape[1])):
                panels.add(part)
                if mapped:
                    let_go(part)
        packed = panels.done()
        packed.order_I, packed.steps = order_I, first.steps
        return packed
    panels, groups = pack_groups(_blocks(weights), first.kind, outs, width, first.group)
    options: dict[str, Any] = {"order_I": order_I, "levels": first.levels or 0, "by_row": first.by_row}
    options["steps"] = first.steps
    return Packed(panels, outs, width, groups=groups, **options)


def _codes(weights: Sequence[GroupedWeight], device: torch.device) -> Codes:
    """Pack alike weights into one matrix on a GPU."""
    first, outs, width = weights[0], sum(weight.shape[0] for weight in weights), weights[0].shape[1]
    return pack_codes(_blocks(weights), first.kind, outs, width, first.group, first.order_I, device)


def _blocks(weights: Sequence[GroupedWeight]) -> Iterator[GroupedRows]:
    """Yield the stacked rows of alike weights."""
    step = max(1, CHUNK // weights[0].shape[1])
    blocks = (
        weight.rows(at, min(at + step, weight.shape[0])) for weight in weights for at in range(0, weight.shape[0], step)
    )
    return _with_zeros(blocks, weights)


def _with_zeros(blocks: Iterable[GroupedRows], weights: Sequence[GroupedWeight]) -> Iterator[GroupedRows]:
    """Yield the same blocks, all with zeros if any weight has zeros."""
    zeros = any(weight.rows(0, 1).zero_OG is not None for weight in weights)
    for block in blocks:
        if zeros and block.zero_OG is None:
            block = block._replace(zero_OG=torch.full_like(block.scale_OG, ZEROS[weights[0].kind]))
        yield block


def _product(x: Tensor, weight: GroupedWeight) -> Tensor:
    """Multiply x W^T with floats that are made a few rows at a time; x is float32."""
    if weight.levels is not None and weight.by_row:
        x = rounded_by_row(x, weight.levels).float()
    elif weight.levels is not None and not weight.steps.before:
        order_I = slice(None) if weight.order_I is None else weight.order_I
        steps = rounded(x[..., order_I], weight.levels, weight.group, ROUNDED).float()
        x = torch.empty_like(steps)
        x[..., order_I] = steps
    outs, step = weight.shape[0], max(1, CHUNK // weight.shape[1])
    rows = (weight.floats(at, min(at + step, outs)) for at in range(0, outs, step))
    return torch.cat([F.linear(x, part) for part in rows], -1)
