"""Quantised matrices as a GPU reads them, row by row: the layout, and its definition in PyTorch.

    int4    a byte has elements i (low half) and i + 32 of a block of 64
    int8    number - 128, two's complement
    float8  e4m3
    int1, int2  as int4
    int5, int6, and kinds whose tables hold integers: as int8

Rows are padded to whole blocks of 64 elements. Scales are stored by group, so that a program reads adjacent scales for
its outputs. Shape legend: O outputs, B bytes of a row, G groups of a row.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional as F

from kernels.linear.panels import ABOVE, FIELDS, SHARES, TABLES, GroupKind, default_zero, numbers

BLOCK = 64
HALF = BLOCK // 2
# What the size of groups is a multiple of, unless a row is one group.
STEPS = dict.fromkeys(("int8", "float8", *TABLES, *ABOVE), 16) | dict.fromkeys((*FIELDS, "int4"), HALF)


@dataclass(frozen=True)
class Codes:
    """A matrix [outs, width]: (number - zero) * scale + least.

    Args:
        kind: see `kernels.linear.panels.Groups`.
        size: elements of a row that share a scale; see `STEPS`.
        codes_OB: uint8, contiguous.
        scale_GO, zero_GO, least_GO: float16 or float32; zero None: that of `default_zero`; least None: 0.
        order_I: int64: the elements of x, in the order in which a row multiplies them; None: as they are.
    """

    kind: GroupKind
    size: int
    outs: int
    width: int
    codes_OB: Tensor
    scale_GO: Tensor
    zero_GO: Tensor | None = None
    order_I: Tensor | None = None
    least_GO: Tensor | None = None

    def to(self, device: torch.device | str) -> "Codes":
        """The same on a device."""
        tensors = {name: x.to(device) for name, x in vars(self).items() if isinstance(x, Tensor)}
        return replace(self, **tensors)


def takes(kind: GroupKind, size: int, width: int) -> bool:
    """Whether products support groups of this size."""
    return size == width or size % STEPS[kind] == 0


def row_bytes(kind: GroupKind, width: int) -> int:
    """Bytes of a row."""
    return -(-width // BLOCK) * (HALF if _stored(kind) == "int4" else BLOCK)


def _stored(kind: GroupKind) -> GroupKind:
    """The kind as which a GPU reads another one."""
    return "int8" if kind in (*TABLES, *ABOVE) else "int4" if kind in FIELDS else kind


def pack_codes(
    blocks: Iterable[Sequence[Tensor | None]],
    kind: GroupKind,
    outs: int,
    width: int,
    size: int,
    order_I: Tensor | None = None,
    device: torch.device | str = "cpu",
) -> Codes:
    """A matrix that comes in blocks of rows; one block at a time is on the host.

    Args:
        blocks: codes [any, width], uint8; then scales, zeros and minimums (the last two None, or absent, in all blocks)
            [any, groups], float32. `outs` rows together.
        kind, size, order_I: see `Codes`; kinds that a GPU does not read become int8, or int4 if they have fewer bits.
        outs, width: of the matrix.

    Raises:
        ValueError: groups of a size that products cannot have.
    """
    if not takes(kind, size, width):
        raise ValueError(f"size: expected a multiple of {STEPS[kind]}, or the width {width}, got {size}")
    given, kind = kind, _stored(kind)
    codes_OB = torch.empty(outs, row_bytes(kind, width), dtype=torch.uint8, device=device)
    found: list[list[Tensor]] = [[], [], []]
    first = 0
    for codes_NI, *values in blocks:
        assert codes_NI is not None
        if given in FIELDS:
            codes_NI = numbers(given, codes_NI).to(torch.uint8)
            if len(values) < 2 or values[1] is None:  # larger numbers, with zeros of their own, would round away more
                least = len(values) > 2 and values[2] is not None
                codes_NI += int(default_zero(kind, least) - default_zero(given, least))
        elif given != kind:
            zero = default_zero(given, len(values) > 2 and values[2] is not None)
            share = SHARES.get(given, 1.0)
            codes_NI = (numbers(given, codes_NI) / share - zero + 128).to(torch.uint8)
            values[0] = None if values[0] is None else values[0] * share
        codes_OB[first : first + len(codes_NI)] = _row(codes_NI, kind).to(device)
        for parts, x_NG in zip(found, values, strict=False):
            parts += [] if x_NG is None else [x_NG]
        first += len(codes_NI)
    kept = [torch.cat(parts) if parts else None for parts in found]
    half = all(x.half().float().equal(x) for x in kept if x is not None)
    dtype = torch.float16 if half else torch.float32
    scale_GO, zero_GO, least_GO = (None if x is None else x.T.to(dtype).contiguous().to(device) for x in kept)
    assert scale_GO is not None
    order_I = None if order_I is None else order_I.to(device, torch.int64)
    return Codes(kind, size, outs, width, codes_OB, scale_GO, zero_GO, order_I, least_GO)


def _row(codes_NI: Tensor, kind: GroupKind) -> Tensor:
    """Rows of numbers as bytes."""
    codes_NI = F.pad(codes_NI, (0, -codes_NI.shape[1] % BLOCK))
    if kind != "int4":
        return codes_NI ^ 128 if kind == "int8" else codes_NI
    low, high = codes_NI.view(len(codes_NI), -1, 2, HALF).unbind(2)
    return (low | high << 4).flatten(1)


def unpacked(matrix: Codes) -> Tensor:
    """The elements, float32 [outs, width], columns as those of x."""
    codes_OB, size, width = matrix.codes_OB, matrix.size, matrix.width
    if matrix.kind == "int4":
        numbers = torch.stack([*(x.view(matrix.outs, -1, HALF) for x in (codes_OB & 15, codes_OB >> 4))], 2).flatten(1)
    else:
        numbers = codes_OB.view(torch.float8_e4m3fn) if matrix.kind == "float8" else codes_OB ^ 128

    def spread(x_GO: Tensor) -> Tensor:
        return x_GO.T.float().repeat_interleave(size, 1)[:, :width]

    numbers_OI = numbers.float()[:, :width]
    zero = default_zero(matrix.kind, matrix.least_GO is not None)
    numbers_OI -= zero if matrix.zero_GO is None else spread(matrix.zero_GO)
    numbers_OI *= spread(matrix.scale_GO)
    if matrix.least_GO is not None:
        numbers_OI += spread(matrix.least_GO)
    if matrix.order_I is None:
        return numbers_OI
    return torch.empty_like(numbers_OI).index_copy_(1, matrix.order_I, numbers_OI)


def linear(x: Tensor, matrix: Codes, bias: Tensor | None = None) -> Tensor:
    """x W^T + b, the definition: rounded to the dtype of x at the end."""
    y = F.linear(x.double(), unpacked(matrix).double())
    return (y if bias is None else y + bias).to(x.dtype)
