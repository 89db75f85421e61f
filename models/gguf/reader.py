"""GGUF files: metadata and tensor offsets, with every count and length checked against the file before it is used.

A model may be split into files whose names end with `-00001-of-00003.gguf`; the first has the metadata.
"""

import math
import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from models.checkpoint.fields import Fields
from models.checkpoint.files import map_regular
from models.errors import CheckpointError, reason_of, show
from models.folders import PART

FETCH_AGAIN = "Download the file again."
SCALARS = "BbHhIif?", "Qqd"  # struct's codes by the numbers of types 0 to 7 and 10 to 12; 8 and 9 are these:
STRING, ARRAY = 8, 9
LONG = 1 << 12  # the least elements of a list that is slow to read
MAX_TEXT, MAX_TENSORS, MAX_KEYS, MAX_DIMS, MAX_FILES = 1 << 26, 1 << 16, 1 << 16, 4, 1 << 10
TYPES: dict[int, tuple[str, int, int]] = {  # by number: name, elements and bytes of a block
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34),
    9: ("Q8_1", 32, 40),
    10: ("Q2_K", 256, 84),
    11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210),
    15: ("Q8_K", 256, 292),
    16: ("IQ2_XXS", 256, 66),
    17: ("IQ2_XS", 256, 74),
    18: ("IQ3_XXS", 256, 98),
    19: ("IQ1_S", 256, 50),
    20: ("IQ4_NL", 32, 18),
    21: ("IQ3_S", 256, 110),
    22: ("IQ2_S", 256, 82),
    23: ("IQ4_XS", 256, 136),
    24: ("I8", 1, 1),
    25: ("I16", 1, 2),
    26: ("I32", 1, 4),
    27: ("I64", 1, 8),
    28: ("F64", 1, 8),
    29: ("IQ1_M", 256, 56),
    30: ("BF16", 1, 2),
    34: ("TQ1_0", 256, 54),
    35: ("TQ2_0", 256, 66),
    36: ("I2_S", 128, 32),
    39: ("MXFP4", 32, 17),
    40: ("NVFP4", 64, 36),
    41: ("Q1_0", 128, 18),
    42: ("Q2_0", 64, 18),
}
TAILS = {"I2_S": 32}  # bytes that follow the rows of a tensor
WIDE_Q2_0 = ("Q2_0_G128", 128, 34)  # in the first files of Ternary Bonsai, by the same number


class HeaderEntry(NamedTuple):
    """A tensor: the name of its block format, its shape (rows are contiguous), bytes of a row, file and place in it."""

    format: str
    shape: tuple[int, ...]
    row_bytes: int
    file: Path
    start: int


class Skipped(NamedTuple):
    """A long list in the metadata that was not read: the number of its elements."""

    count: int


@dataclass(frozen=True)
class GGUF:
    """A model in GGUF files of version 2 or 3.

    Args:
        path: the first file.
        metadata: values by key.
        tensors: tensors by name.
        lists: maps the offset of each long list in the first file to its end.
    """

    path: Path
    metadata: Mapping[str, Any]
    tensors: dict[str, HeaderEntry]
    lists: Mapping[int, int] = field(default_factory=dict)

    @staticmethod
    def open(path: Path, lists: Mapping[int, int] | None = None) -> "GGUF":
        """Read the headers, but no tensors. `path` may be any file of a split model.

        Args:
            lists: `lists` of an earlier read of the same file: these become `Skipped`.

        Raises:
            CheckpointError: a file is no GGUF file, is damaged, or is missing.
        """
        paths = parts_of(path)
        first = _header(paths[0], lists)
        metadata, tensors = first.metadata, first.tensors
        for number, part in enumerate(paths[1:], 1):
            more = _header(part)
            if more.metadata.get("split.no") != number or more.metadata.get("split.count") != len(paths):
                what = f"expected part {number + 1} of {len(paths)}, as its name says"
                raise more.error(f"{what}, got split.no {more.metadata.get('split.no')!r:.40}", FETCH_AGAIN)
            if twice := tensors.keys() & more.tensors.keys():
                raise more.error(f"tensor {show(min(twice))} lies in two files", FETCH_AGAIN)
            tensors |= more.tensors
        if (count := metadata.get("split.count", 1)) not in (0, len(paths)):
            remedy = "name it as llama-gguf-split does, NAME-00001-of-00003.gguf, beside the others"
            raise first.error(f"the file is one of several ({count!r:.40}), and its name does not say which", remedy)
        if len(paths) > 1 and metadata.get("split.tensors.count") not in (None, len(tensors)):
            raise first.error(f"the parts hold {len(tensors)} tensors, another number than the first says", FETCH_AGAIN)
        return first

    def fields(self, prefix: str = "") -> Fields:
        """Return checked access to the metadata whose keys begin with `prefix`."""
        found = {key.removeprefix(prefix): value for key, value in self.metadata.items() if key.startswith(prefix)}
        return Fields(found, show(self.path), prefix)

    def error(self, what: str, remedy: str = "") -> CheckpointError:
        """Return an error about this file, for the caller to raise."""
        return CheckpointError(what[:500], where=show(self.path), remedy=remedy)

    def entry(self, name: str) -> HeaderEntry:
        """Return a tensor that must exist. Raises CheckpointError."""
        if name not in self.tensors:
            raise self.error(f"tensor {name!r} is missing", FETCH_AGAIN)
        return self.tensors[name]


def header_bytes(start: bytes, path: Path) -> int | None:
    """Return the length of a file's header; None: it continues after these bytes.

    Raises:
        CheckpointError: it is no GGUF file, or the header is damaged.
    """
    header = _Header(path, start)
    try:
        header.content()
    except _CutShortError:
        return None
    return header.at


def parts_of(path: Path) -> list[Path]:
    """Return the files of a model, one of which is `path`. Raises CheckpointError if one is missing."""
    found = PART.fullmatch(path.name)
    if found is None:
        return [path]
    count = int(found[3])
    if not 0 < int(found[2]) <= count <= MAX_FILES:
        raise CheckpointError(f"the name counts parts from 1 to at most {MAX_FILES}", where=show(path))
    paths = [path.with_name(f"{found[1]}-{i:05}-of-{count:05}.gguf") for i in range(1, count + 1)]
    for part in paths:
        if not part.is_file():
            raise CheckpointError(f"part {show(part.name)} is not there", where=show(path), remedy=FETCH_AGAIN)
    return paths


def _header(path: Path, lists: Mapping[int, int] | None = None) -> GGUF:
    """Read the header of one file."""
    try:
        mapped = map_regular(path, 1)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"the file cannot be read: {reason_of(error)}", where=show(path)) from None
    try:
        return _Header(path, mapped, lists).read()
    finally:
        if isinstance(mapped, mmap.mmap):
            mapped.close()


class _CutShortError(CheckpointError):
    """A header that continues after the end of its file."""


class _Header:
    """Reads a header. Every method raises CheckpointError if the file is damaged."""

    def __init__(self, path: Path, data: mmap.mmap | bytes, lists: Mapping[int, int] | None = None):
        self.path, self.data, self.size, self.at = path, data, len(data), 0
        self.skipped, self.lists = lists or {}, dict[int, int]()

    def read(self) -> GGUF:
        metadata, entries = self.content()
        align = metadata.get("general.alignment", 32)
        if type(align) is not int or not 0 < align <= 1 << 16 or align & (align - 1):
            raise self.error(f"general.alignment: expected a power of two, got {align!r:.80}", FETCH_AGAIN)
        data = -(-self.at // align) * align
        return GGUF(self.path, metadata, self.places(self.with_wide(entries, data), data, align), self.lists)

    def content(self) -> tuple[dict[str, Any], list[tuple[str, HeaderEntry]]]:
        """Read the metadata, and the tensors' names and entries."""
        start = self.bytes(4) if self.size >= 4 else b""
        if start != b"GGUF":
            lfs = "a git-LFS pointer: fetch the file itself with git lfs pull" if start == b"vers" else ""
            found = f"begins with {start!r}" if start else f"has {self.size} bytes"
            raise self.error(f"this is no GGUF file, it {found}", lfs or FETCH_AGAIN)
        version, tensors, pairs = self.number("I"), 0, 0
        if version in (2, 3):
            tensors, pairs = self.number("Q"), self.number("Q")
        else:
            what = f"GGUF version {version} is not supported" if version < 1 << 16 else "the file is big-endian"
            raise self.error(f"{what}: versions 2 and 3, little-endian, are", "Convert the model to GGUF again.")
        if tensors > MAX_TENSORS or pairs > MAX_KEYS:
            raise self.error(f"the header counts {tensors} tensors and {pairs} keys", FETCH_AGAIN)
        metadata: dict[str, Any] = {}
        for _ in range(pairs):
            key = self.text()
            if key in metadata:
                raise self.error(f"the key {show(key)} occurs twice", FETCH_AGAIN)
            metadata[key] = self.value(self.number("I"))
        return metadata, [self.entry() for _ in range(tensors)]

    def with_wide(self, entries: list[tuple[str, HeaderEntry]], data: int) -> list[tuple[str, HeaderEntry]]:
        """Return the entries, with `WIDE_Q2_0` for Q2_0 if no such tensor has room for the larger blocks of ggml."""
        starts = sorted(entry.start for _, entry in entries)
        after = dict(zip(starts, [*starts[1:], self.size - data], strict=False))  # none of none
        found, (format, block, size) = list[tuple[str, HeaderEntry]](), WIDE_Q2_0
        for name, entry in entries:
            if entry.format == TYPES[42][0]:
                fits = entry.start + entry.row_bytes * math.prod(entry.shape[:-1]) <= after[entry.start]
                if fits or entry.shape[-1] % block:
                    return entries
                entry = entry._replace(format=format, row_bytes=entry.shape[-1] // block * size)
            found.append((name, entry))
        return found

    def places(self, entries: list[tuple[str, HeaderEntry]], data: int, align: int) -> dict[str, HeaderEntry]:
        """Return the tensors by name, with offsets from the beginning of the file."""
        found: dict[str, HeaderEntry] = {}
        end = 0
        for name, entry in sorted(entries, key=lambda named: named[1].start):
            size = entry.row_bytes * math.prod(entry.shape[:-1]) + TAILS.get(entry.format, 0)
            if name in found:
                raise self.error(f"tensor {show(name)} occurs twice", FETCH_AGAIN)
            if entry.start % align or data + entry.start + size > self.size:
                what = f"tensor {show(name)}: {size} bytes at {entry.start} do not lie in a file of {self.size} bytes"
                raise self.error(f"{what}: it is cut short, or damaged", FETCH_AGAIN)
            if entry.start < end:
                raise self.error(f"tensor {show(name)} overlaps another one", FETCH_AGAIN)
            found[name], end = entry._replace(start=data + entry.start), entry.start + size
        return found

    def entry(self) -> tuple[str, HeaderEntry]:
        """Read name and entry of a tensor; its `start` is still relative to the data."""
        name = self.text()
        count = self.number("I")
        if not 0 < count <= MAX_DIMS or not name.isprintable():
            raise self.error(f"tensor {show(name)} has {count} dimensions", FETCH_AGAIN)
        shape = tuple(self.number("Q") for _ in range(count))[::-1]
        kind, start = self.number("I"), self.number("Q")
        if math.prod(shape) >= 1 << 48 or 0 in shape:
            raise self.error(f"tensor {show(name)}: unusable shape {list(shape)}", FETCH_AGAIN)
        if kind not in TYPES:
            raise self.error(f"tensor {show(name)} has the unknown block format {kind}")
        format, block, size = TYPES[kind]
        if shape[-1] % block:
            raise self.error(f"tensor {show(name)}: rows of {shape[-1]} are no whole blocks of {format}", FETCH_AGAIN)
        return name, HeaderEntry(format, shape, shape[-1] // block * size, self.path, start)

    def value(self, kind: int) -> Any:
        if kind == STRING:
            return self.text()
        if kind != ARRAY:
            return self.number(self.code(kind))
        kind, count, start = self.number("I"), self.number("Q"), self.at
        if self.at < self.skipped.get(start, 0) <= self.size:
            self.at = self.skipped[start]
            return Skipped(count)
        found = self.elements(kind, count)
        if count >= LONG:
            self.lists[start] = self.at
        return found

    def elements(self, kind: int, count: int) -> list[Any]:
        if kind == STRING:
            if 8 * count > self.left():
                raise self.cut(8 * count)
            return self.texts(count)
        code = self.code(kind)
        return list(struct.unpack(f"<{count}{code}", self.bytes(count * struct.calcsize(code))))

    def code(self, kind: int) -> str:
        small, large = SCALARS
        if kind < len(small) or 10 <= kind < 10 + len(large):
            return small[kind] if kind < len(small) else large[kind - 10]
        raise self.error(f"a value of the unknown type {kind}", FETCH_AGAIN)

    def text(self) -> str:
        return self.texts(1)[0]

    def texts(self, count: int) -> list[str]:
        """Read `count` texts; a vocabulary has hundreds of thousands."""
        found: list[str] = []
        data, at, size, length_at = self.data, self.at, self.size, struct.Struct("<Q").unpack_from
        try:
            for _ in range(count):
                [length] = length_at(data, at)
                at += 8 + length
                if length > MAX_TEXT:
                    raise self.error(f"a text of {length} bytes", FETCH_AGAIN)
                if at > size:
                    raise struct.error
                found.append(data[at - length : at].decode())
        except struct.error:
            self.at = min(at, size)
            raise self.cut(at - self.at or 8) from None
        except UnicodeDecodeError:
            raise self.error("a text that is not UTF-8", FETCH_AGAIN) from None
        self.at = at
        return found

    def number(self, code: str) -> Any:
        return struct.unpack(f"<{code}", self.bytes(struct.calcsize(code)))[0]

    def bytes(self, count: int) -> bytes:
        if count > self.left():
            raise self.cut(count)
        self.at += count
        return self.data[self.at - count : self.at]

    def left(self) -> int:
        return self.size - self.at

    def cut(self, count: int) -> CheckpointError:
        what = f"the header ends in the middle: {count} bytes at {self.at} in a file of {self.size} bytes"
        return _CutShortError(f"{what}: it is cut short, or damaged"[:500], where=show(self.path), remedy=FETCH_AGAIN)

    def error(self, what: str, remedy: str = "") -> CheckpointError:
        return CheckpointError(what[:500], where=show(self.path), remedy=remedy)
