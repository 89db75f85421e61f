"""Files of arrays of token ids (catalogues, suffix stores, n-gram stores), which fit one tokenizer: a header with
checksums, then the arrays in the machine's byte order. They are mapped into memory.

The header: eight bytes that name the kind, the byte order, the version, the size of the vocabulary, counts, the digest
of the tokenizer (zeros for none), and the checksums of the arrays and of all of the header before it.
"""

import struct
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, NamedTuple

from models.checkpoint.files import map_regular
from models.errors import reason_of

ORDER = 0x0102  # it reads as another number in the other byte order
CHECKSUM = struct.Struct("=I")


class TokenFile(NamedTuple):
    """A file, mapped into memory.

    Attributes:
        vocab_size: tokens are less than this.
        fingerprint: the tokenizer's; "" for none.
        counts: the counts of its header.
        body: the arrays, bytes.
    """

    vocab_size: int
    fingerprint: str
    counts: Sequence[int]
    body: memoryview


class TokenFileKind:
    """A kind of files.

    Args:
        name: its name in errors.
        magic: eight bytes.
        version: the version of its arrays.
        counts: the formats of its counts, as in `struct`.
        padding: unused bytes after the digest.
    """

    def __init__(self, name: str, magic: bytes, version: int, counts: str, padding: int = 0):
        self.name, self.magic, self.version = name, magic, version
        self.header = struct.Struct(f"=8sHHI{counts}32s{padding}xII")

    def read(self, path: str | Path, size: Callable[..., int]) -> TokenFile:
        """Map a file.

        Args:
            size: counts -> bytes of the arrays.

        Raises:
            ValueError: it cannot be read, is of another kind or version, or is damaged.
        """
        try:
            data = map_regular(path, self.header.size)
        except (OSError, ValueError) as error:
            raise ValueError(f"the {self.name} cannot be read: {reason_of(error)}") from error
        if bytes(data[:8]) != self.magic:
            raise ValueError(f"this is no {self.name}")
        head, body = data[: self.header.size], memoryview(data)[self.header.size :]
        _, order, version, vocab_size, *counts, tokenizer, of_body, of_head = self.header.unpack(head)
        if (order, version) != (ORDER, self.version):
            raise ValueError(f"the {self.name} is of another version or machine")
        whole = of_head == zlib.crc32(head[: -CHECKSUM.size]) and len(body) == size(*counts)
        if not whole or of_body != zlib.crc32(body):
            raise ValueError(f"the {self.name} is damaged: not what was written")
        return TokenFile(vocab_size, tokenizer.hex() if any(tokenizer) else "", counts, body)


class TokenFileWriter:
    """Writes a file of a kind: all arrays, in their order, and then the header.

    Args:
        kind: the kind.
        file: the empty file.
    """

    def __init__(self, kind: TokenFileKind, file: IO[bytes]):
        self.kind, self.file, self._checksum = kind, file, 0
        file.write(bytes(kind.header.size))

    def add(self, part: bytes | memoryview) -> None:
        """Append bytes of the arrays."""
        self.file.write(part)
        self._checksum = zlib.crc32(part, self._checksum)

    def finish(self, vocab_size: int, fingerprint: str, *counts: int) -> None:
        """Write the header; for the arguments see `TokenFile`."""
        kind, tokenizer = self.kind, bytes.fromhex(fingerprint) or bytes(32)
        head = kind.header.pack(kind.magic, ORDER, kind.version, vocab_size, *counts, tokenizer, self._checksum, 0)
        head = head[: -CHECKSUM.size]
        self.file.seek(0)
        self.file.write(head + CHECKSUM.pack(zlib.crc32(head)))
