"""Adapters of a matrix: pairs of small factors, which C++ reads in panels [outs / 16, ins, 16]: 16 adjacent outputs,
input by input, padded with zeros. The factors of an adapter are contiguous; a row of zeros ends them."""

import ctypes
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from kernels.cpp import KINDS, OPERATORS

PANEL = 16  # outputs


class Factors(NamedTuple):
    """The adapter of some outputs of a matrix: what is added to them is scale * (x A^T) B^T.

    Args:
        first: of the outputs.
        a_RI: A, of rank R and the matrix's width.
        b_OR: B, of the outputs from `first` on; of the dtype of A.
        scale: a factor.
    """

    first: int
    a_RI: Tensor
    b_OR: Tensor
    scale: float


class LowRank:
    """The adapter of a matrix.

    Args:
        parts: of ranges of outputs.
        packed: keep panels for C++, and nothing else.

    Attributes:
        parts: with factors unless they are packed, see `unpacked`.
    """

    def __init__(self, parts: Sequence[Factors], *, packed: bool):
        self.parts = [*parts]
        self.panels: list[Tensor] = []
        self.ranks = [part.a_RI.shape[0] for part in parts]
        self.outs = [len(part.b_OR) for part in parts]
        if not packed:
            return
        panels = [_panels(torch.cat([part.a_RI for part in parts])), *(_panels(part.b_OR) for part in parts)]
        whole = torch.cat([*(x.flatten() for x in panels), panels[0].new_zeros(PANEL)])  # C++ reads a row more
        empty, pieces = whole.new_empty(0), whole[:-PANEL].split([x.numel() for x in panels])
        self.panels = [piece.view(x.shape) for piece, x in zip(pieces, panels, strict=True)]
        self.parts = [part._replace(a_RI=empty, b_OR=empty) for part in parts]

    def unpacked(self) -> list[Factors]:
        """The parts with their factors."""
        if not self.panels:
            return self.parts
        a, *bs = (panels.transpose(1, 2).flatten(0, 1) for panels in self.panels)
        each = zip(self.parts, a[: sum(self.ranks)].split(self.ranks), bs, self.outs, strict=True)
        return [part._replace(a_RI=a_RI, b_OR=b_OR[:outs]) for part, a_RI, b_OR, outs in each]


class Adapters:
    """The adapters of a matrix by their numbers in a pass, of which 0 is none.

    Args:
        outs, width: of the matrix.
        adapters: of numbers from 1 on; None where an adapter has nothing for this matrix.

    Raises:
        ValueError: factors that do not fit the matrix.
    """

    def __init__(self, outs: int, width: int, adapters: Sequence[LowRank | None]):
        self.outs, self.width, self.adapters = outs, width, [None, *adapters]
        self._described: tuple[ctypes.Array[ctypes.Structure], ...] = ()
        for adapter in filter(None, self.adapters):
            for part in adapter.unpacked():
                last, shapes = part.first + len(part.b_OR), (part.a_RI.shape[1], part.b_OR.shape[1])
                if shapes != (width, part.a_RI.shape[0]) or not 0 <= part.first < last <= outs:
                    given = f"{[*part.a_RI.shape]} and {[*part.b_OR.shape]} from output {part.first} on"
                    raise ValueError(f"expected factors of a matrix {[outs, width]}, got {given}")

    def __len__(self) -> int:
        """How many numbers there are, with 0."""
        return len(self.adapters)

    def described(self) -> int:
        """For C++: the address of the adapters, all in panels, as long as this object lives."""
        if not self._described:
            structures, kept = OPERATORS.structures, []
            table = (structures["LowRank"] * len(self.adapters))()
            for place, adapter in zip(table, self.adapters, strict=True):
                place.width, place.outs = self.width, self.outs
                if adapter is None:
                    continue
                if not adapter.panels:
                    raise ValueError("impl 'cpp': expected adapters in panels")
                parts, at = (structures["LowRankPart"] * len(adapter.parts))(), 0
                a, *bs = adapter.panels
                sizes = zip(parts, adapter.parts, adapter.ranks, adapter.outs, bs, strict=True)
                for there, part, rank, outs, panels in sizes:
                    there.at, there.rank, there.first, there.outs = at, rank, part.first, outs
                    there.panels, there.scale = panels.data_ptr(), part.scale
                    at += rank
                place.kind, place.rank, place.count, place.panels = KINDS[a.dtype], at, len(parts), a.data_ptr()
                place.parts = ctypes.addressof(parts)
                kept.append(parts)
            self._described = table, *kept
        return ctypes.addressof(self._described[0])


def _panels(x_OI: Tensor) -> Tensor:
    """A factor [outs, ins] as panels."""
    padded = F.pad(x_OI, (0, 0, 0, -len(x_OI) % PANEL))
    return padded.unflatten(0, (-1, PANEL)).transpose(1, 2).contiguous()
