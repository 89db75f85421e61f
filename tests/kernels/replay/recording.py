"""Calls of C++ kernels with what they have to write and return, as a file that replay.cpp reads on any processor.

All numbers are 64 bits, little-endian: integers, or floats where it says so; a text is its length and its bytes.

    file      the numbers of `OPERATORS.layout` and how many they are, cases and how many they are
    case      name, function, whether it returns a number, the number, buffers, a check of each, arguments
    buffer    its size, its bytes, links; a link is an offset in this buffer and the number of an earlier buffer whose
              address is written there
    check     -1: as before the call; 0 and bytes; or an element kind (KINDS), the error allowed (float), the share of a
              number's size allowed besides (float), numbers (floats)
    argument  0 and an integer, 1 and a float, 2 and the number of a buffer, -1 for a null pointer
"""

import ctypes
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from kernels.cpp import OPERATORS

KINDS = {torch.float32: 1, torch.bfloat16: 2, torch.float16: 3, torch.float64: 4}


@dataclass(frozen=True)
class Expected:
    """An argument that the function writes.

    Attributes:
        before: what it holds before the call, contiguous.
        after: what it holds afterwards: numbers in float64, or bits of the same dtype as before.
        absolute, relative: the error allowed: absolute + relative * |after|; NaN and infinities stand for themselves.
    """

    before: Tensor
    after: Tensor
    absolute: float = 0.0
    relative: float = 0.0


@dataclass(frozen=True)
class Pointer:
    """The address of a structure; some fields are addresses of tensors, perhaps written, of structures or null."""

    structure: ctypes.Structure
    fields: "Mapping[str, Tensor | Expected | Pointer | None]" = field(default_factory=dict)


Argument = int | float | None | Tensor | Expected | Pointer


class Recording:
    """Cases, one after the other."""

    def __init__(self) -> None:
        self.cases: list[bytes] = []

    def add(self, name: str, function: str, *arguments: Argument, returns: int | None = None) -> None:
        """Adds a case: a name for people, a function of operators.h without "coppice_", its arguments and result."""
        buffers = _Buffers()
        taken = [_argument(argument, buffers) for argument in arguments]
        assert len(taken) == len(OPERATORS.functions[function][1]), f"{function} takes other arguments"
        head = _text(name), _text(function), _integers(returns is not None, returns or 0, len(buffers.contents))
        self.cases.append(b"".join([*head, *buffers.contents, *buffers.checks, _integers(len(taken)), *taken]))

    def save(self, path: Path) -> None:
        layout = OPERATORS.layout
        head = _integers(len(layout), *layout, len(self.cases))
        path.write_bytes(b"".join([head, *self.cases]))


def _integers(*numbers: int) -> bytes:
    return struct.pack(f"<{len(numbers)}q", *numbers)


def _text(text: str) -> bytes:
    return _integers(len(text.encode())) + text.encode()


def _bytes(x: Tensor) -> bytes:
    assert x.is_contiguous()
    return ctypes.string_at(x.data_ptr(), x.nbytes) if x.nbytes else b""


class _Buffers:
    """The buffers of a case as the file has them, and a check of each."""

    def __init__(self) -> None:
        self.contents: list[bytes] = []
        self.checks: list[bytes] = []
        self._numbers: dict[int, int] = {}

    def number(self, x: Tensor | Expected | Pointer) -> int:
        """The number of an object's buffer, which is appended, after those that it leads to, if there is none."""
        if id(x) not in self._numbers:
            links: Sequence[tuple[int, int]] = ()
            check = _integers(-1)
            if isinstance(x, Pointer):
                fields = {name: to for name, to in x.fields.items() if to is not None}
                links = [(getattr(type(x.structure), name).offset, self.number(to)) for name, to in fields.items()]
                content = bytes(x.structure)
            elif isinstance(x, Expected):
                content, check = _bytes(x.before), _check(x)
            else:
                content = _bytes(x)
            numbers = [number for link in links for number in link]
            self.contents.append(_integers(len(content)) + content + _integers(len(links), *numbers))
            self.checks.append(check)
            self._numbers[id(x)] = len(self.checks) - 1
        return self._numbers[id(x)]


def _argument(argument: Argument, buffers: _Buffers) -> bytes:
    if argument is None:
        return _integers(2, -1)
    if isinstance(argument, int):
        return _integers(0, argument)
    if isinstance(argument, float):
        return _integers(1) + struct.pack("<d", argument)
    return _integers(2, buffers.number(argument))


def _check(x: Expected) -> bytes:
    assert x.before.shape == x.after.shape
    if x.after.dtype != torch.float64:
        assert x.before.dtype == x.after.dtype
        return _integers(0) + _bytes(x.after)
    sizes = struct.pack("<dd", x.absolute, x.relative)
    return _integers(KINDS[x.before.dtype]) + sizes + _integers(x.after.numel()) + _bytes(x.after)
