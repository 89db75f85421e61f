"""GGUF files: metadata and the places of tensors, every count and length checked against the file before it is used.

The `gguf` package has the tables of the format (block formats, names of tensors). Its own reader builds an array per
string of a vocabulary, which takes a minute and half a gigabyte, and reads past the end of a file that is cut short.
"""

import math
import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any, BinaryIO, NamedTuple

import torch
from torch import Tensor

from engine.errors import CheckpointError, UsageError
from models.checkpoint.fields import Fields
from models.checkpoint.files import open_regular

FETCH_AGAIN = "Download the file again."
SCALARS = "BbHhIif?", "Qqd"  # struct's codes by the numbers of types 0 to 7 and 10 to 12; 8 and 9 are these:
STRING, ARRAY = 8, 9
MAX_TEXT, MAX_TENSORS, MAX_DIMS = 1 << 26, 1 << 16, 4


class Entry(NamedTuple):
    """A tensor: the name of its block format, its shape (rows are contiguous), bytes of a row, place in the file."""

    format: str
    shape: tuple[int, ...]
    row_bytes: int
    start: int


def package() -> ModuleType:
    """The `gguf` package. Raises UsageError if it is not installed."""
    try:
        import gguf
    except ImportError as error:
        what = f"GGUF files are read through the package gguf, which is not here ({error})"
        raise UsageError(what, remedy="pip install 'coppice[gguf]'") from None
    return gguf


@dataclass
class GGUF:
    """A GGUF file of version 2 or 3.

    Args:
        path: of the file.
        metadata: by key.
        tensors: by name.
    """

    path: Path
    metadata: Mapping[str, Any]
    tensors: dict[str, Entry]
    _used: set[str] = field(default_factory=set)

    @staticmethod
    def open(path: Path) -> "GGUF":
        """Read the header, no tensor. Raises CheckpointError for a file that is no GGUF file, or a damaged one."""
        try:
            with open_regular(path) as file:
                return _Header(path, file).read()
        except OSError as error:
            raise CheckpointError(f"cannot be read: {error.strerror}", where=str(path)) from None

    def fields(self, prefix: str = "") -> Fields:
        """Checked access to the metadata whose keys begin with `prefix`."""
        found = {key.removeprefix(prefix): value for key, value in self.metadata.items() if key.startswith(prefix)}
        return Fields(found, str(self.path), prefix)

    def error(self, what: str, remedy: str = "") -> CheckpointError:
        """The error for something in this file, to be raised by the caller."""
        return CheckpointError(what, where=str(self.path), remedy=remedy)

    def entry(self, name: str) -> Entry:
        """A tensor that has to be there. Raises CheckpointError."""
        if name not in self.tensors:
            raise self.error(f"tensor {name!r} is missing", FETCH_AGAIN)
        self._used.add(name)
        return self.tensors[name]

    def unused(self) -> list[str]:
        """Names of the tensors that nobody asked for."""
        return sorted(set(self.tensors) - self._used)

    def rows(self, entry: Entry, first: int, last: int) -> Tensor:
        """Rows [first, last) of a tensor of one or two dimensions as they are stored: uint8 [last - first, bytes]."""
        buffer = bytearray((last - first) * entry.row_bytes)
        with open_regular(self.path) as file:
            if os.preadv(file.fileno(), [buffer], entry.start + first * entry.row_bytes) != len(buffer):
                raise self.error("the file became shorter while it was read", FETCH_AGAIN)
        return torch.frombuffer(buffer, dtype=torch.uint8).view(last - first, entry.row_bytes)


class _Header:
    """Reads a header. Every method raises CheckpointError where the file is damaged."""

    def __init__(self, path: Path, file: BinaryIO):
        self.path, self.file, self.size, self.at = path, file, os.fstat(file.fileno()).st_size, 0
        package()

    def read(self) -> GGUF:
        start = self.bytes(4) if self.size >= 4 else b""
        if start != b"GGUF":
            lfs = "a git-LFS pointer: fetch the file itself with git lfs pull" if start == b"vers" else ""
            raise self.error(f"this is no GGUF file, it begins with {start!r}", lfs or FETCH_AGAIN)
        version, tensors, pairs = self.number("I"), 0, 0
        if version in (2, 3):
            tensors, pairs = self.number("Q"), self.number("Q")
        else:
            what = f"GGUF version {version} is not supported" if version < 1 << 16 else "the file is big-endian"
            raise self.error(f"{what}: versions 2 and 3, little-endian, are", "Convert the model to GGUF again.")
        if tensors > MAX_TENSORS:
            raise self.error(f"the header counts {tensors} tensors", FETCH_AGAIN)
        metadata: dict[str, Any] = {}
        for _ in range(pairs):
            key = self.text()
            if key in metadata:
                raise self.error(f"the key {key[:80]!r} occurs twice", FETCH_AGAIN)
            metadata[key] = self.value(self.number("I"))
        entries = [self.entry() for _ in range(tensors)]
        align = metadata.get("general.alignment", 32)
        if type(align) is not int or not 0 < align <= 1 << 16 or align & (align - 1):
            raise self.error(f"general.alignment: expected a power of two, got {align!r:.80}", FETCH_AGAIN)
        return GGUF(self.path, metadata, self.places(entries, -(-self.at // align) * align, align))

    def places(self, entries: list[tuple[str, Entry]], data: int, align: int) -> dict[str, Entry]:
        """The tensors by name, their offsets turned into places in the file."""
        found: dict[str, Entry] = {}
        for name, entry in entries:
            size = entry.row_bytes * math.prod(entry.shape[:-1])
            if name in found:
                raise self.error(f"tensor {name!r} occurs twice", FETCH_AGAIN)
            if entry.start % align or data + entry.start + size > self.size:
                what = f"tensor {name!r}: {size} bytes at {entry.start} do not lie in a file of {self.size} bytes"
                raise self.error(f"{what}: it is cut short, or damaged", FETCH_AGAIN)
            found[name] = entry._replace(start=data + entry.start)
        return found

    def entry(self) -> tuple[str, Entry]:
        """Name and description of a tensor; `start` is still relative to the data."""
        gguf, name = package(), self.text()
        count = self.number("I")
        if not 0 < count <= MAX_DIMS or not name.isprintable():
            raise self.error(f"tensor {name[:80]!r} has {count} dimensions", FETCH_AGAIN)
        shape = tuple(self.number("Q") for _ in range(count))[::-1]
        kind, start = self.number("I"), self.number("Q")
        if math.prod(shape) >= 1 << 48 or 0 in shape:
            raise self.error(f"tensor {name!r}: unusable shape {list(shape)}", FETCH_AGAIN)
        try:
            format = gguf.GGMLQuantizationType(kind)
            block, size = gguf.GGML_QUANT_SIZES[format]
        except (ValueError, KeyError):
            raise self.error(f"tensor {name!r} has the unknown block format {kind}") from None
        if shape[-1] % block:
            raise self.error(f"tensor {name!r}: rows of {shape[-1]} are no whole blocks of {format.name}", FETCH_AGAIN)
        return name, Entry(format.name, shape, shape[-1] // block * size, start)

    def value(self, kind: int) -> Any:
        if kind == STRING:
            return self.text()
        if kind != ARRAY:
            return self.number(self.code(kind))
        kind, count = self.number("I"), self.number("Q")
        if kind == STRING and 8 * count <= self.left():
            return [self.text() for _ in range(count)]
        code = self.code(kind)
        return list(struct.unpack(f"<{count}{code}", self.bytes(count * struct.calcsize(code))))

    def code(self, kind: int) -> str:
        small, large = SCALARS
        if kind < len(small) or 10 <= kind < 10 + len(large):
            return small[kind] if kind < len(small) else large[kind - 10]
        raise self.error(f"a value of the unknown type {kind}", FETCH_AGAIN)

    def text(self) -> str:
        length = self.number("Q")
        if length > MAX_TEXT:
            raise self.error(f"a text of {length} bytes", FETCH_AGAIN)
        try:
            return self.bytes(length).decode()
        except UnicodeDecodeError:
            raise self.error("a text that is not UTF-8", FETCH_AGAIN) from None

    def number(self, code: str) -> Any:
        return struct.unpack(f"<{code}", self.bytes(struct.calcsize(code)))[0]

    def bytes(self, count: int) -> bytes:
        if count > self.left():
            what = f"the header ends in the middle: {count} bytes at {self.at} in a file of {self.size} bytes"
            raise self.error(f"{what}: it is cut short, or damaged", FETCH_AGAIN)
        self.at += count
        return self.file.read(count)

    def left(self) -> int:
        return self.size - self.at

    def error(self, what: str, remedy: str = "") -> CheckpointError:
        return CheckpointError(what[:500], where=str(self.path), remedy=remedy)
