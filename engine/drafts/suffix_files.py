"""Files of a suffix store's texts, in the machine's byte order: a header (`HEADER`), the symbols, 32 bits each, oldest
first, then an entry (`OWNER`) for each salt. Chains are not in the file: they are rebuilt when it is read."""

import struct
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from engine.errors import UsageError
from kernels import suffixes
from kernels.suffixes import token_bits
from models.checkpoint.files import locked, map_regular, replacing

MAGIC, VERSION, ORDER = b"COPPICES", 1, 0x0102
# magic, order, version, vocabulary, symbols, salts, tokenizer, unused, checksums of what follows and of the header
HEADER = struct.Struct("=8sHHIQI32sIII")
OWNER = struct.Struct("=II16s")  # the number in marks, the age of the newest symbol, less one, the digest of the salt
MOST_SALTS = 1 << 20
WAIT = 60.0  # seconds to wait for another run that writes the file
PIECE_SYMBOLS = 1 << 18  # symbols written at a time
REMEDY = "remove the file, or name another"


def most_salts(vocab_size: int) -> int:
    """The number of salts that marks can tell apart; the highest mark is that of boundaries."""
    return min(MOST_SALTS, (1 << 32 - token_bits(vocab_size)) - 1)


class SavedTexts(NamedTuple):
    """The texts of a store.

    Attributes:
        vocab_size: tokens are less than this.
        fingerprint: the tokenizer's; "" for none.
        parts: symbols, memoryviews of 32 bits, oldest first.
        owners: number, age of the newest symbol less one, and digest of each salt, the least recently added first.
    """

    vocab_size: int
    fingerprint: str
    parts: Sequence[memoryview]
    owners: Sequence[tuple[int, int, bytes]]


def write_texts(path: str | Path, texts: SavedTexts) -> None:
    """Write texts; a write that fails leaves no file, or the old one. Only its owner can read it. Raises UsageError."""
    path, symbols = Path(path), sum(map(len, texts.parts))
    try:
        with locked(path.resolve().parent, WAIT), replacing(path) as file:
            file.write(bytes(HEADER.size))
            checksum = 0
            for part in texts.parts:
                for at in range(0, len(part), PIECE_SYMBOLS):
                    piece = bytes(part[at : at + PIECE_SYMBOLS])
                    file.write(piece)
                    checksum = zlib.crc32(piece, checksum)
            entries = b"".join(OWNER.pack(*owner) for owner in texts.owners)
            file.write(entries)
            tokenizer = bytes.fromhex(texts.fingerprint) or bytes(32)
            sizes = texts.vocab_size, symbols, len(texts.owners)
            checksum = zlib.crc32(entries, checksum)
            header = HEADER.pack(MAGIC, ORDER, VERSION, *sizes, tokenizer, 0, checksum, 0)[:-4]
            file.seek(0)
            file.write(header + struct.pack("=I", zlib.crc32(header)))
    except BlockingIOError:
        what = f"the suffix store cannot be written: another program has locked its folder for {WAIT} s"
        raise UsageError(what, where=str(path), remedy="let every run save to a file of its own") from None
    except OSError as error:
        raise UsageError(f"the suffix store cannot be written: {error.strerror or error}", where=str(path)) from error


def read_texts(path: str | Path, vocab_size: int, fingerprint: str) -> SavedTexts:
    """Read texts of a tokenizer through a memory map.

    Raises:
        UsageError: the file cannot be read, is of another kind, version or tokenizer, is damaged, or holds symbols that
            no text has.
    """

    def refuse(what: str) -> UsageError:
        return UsageError(what, where=str(path), remedy=REMEDY)

    try:
        data = map_regular(path, HEADER.size)
    except (OSError, ValueError) as error:
        raise refuse(f"the suffix store cannot be read: {error}") from error
    if bytes(data[:8]) != MAGIC:
        raise refuse("this is no suffix store")
    _, order, version, vocab, count, salts, tokenizer, _, body, head = HEADER.unpack(data[: HEADER.size])
    if (order, version) != (ORDER, VERSION):
        raise refuse("the suffix store is of another version or machine")
    view, end = memoryview(data), HEADER.size + 4 * count
    whole = head == zlib.crc32(data[: HEADER.size - 4]) and len(data) == end + OWNER.size * salts
    if not whole or body != zlib.crc32(view[HEADER.size :]):
        raise refuse("the suffix store is damaged: not what was written")
    bits = token_bits(vocab_size)
    if tokenizer != (bytes.fromhex(fingerprint) or bytes(32)) or not 0 < vocab < 1 << 31 or token_bits(vocab) != bits:
        raise refuse("the suffix store has the texts of another model's tokenizer")
    symbols = view[HEADER.size : end].cast("I")
    owners = [OWNER.unpack_from(data, end + i * OWNER.size) for i in range(salts)]
    if fault := _fault(symbols, owners, vocab_size):
        raise refuse(f"the suffix store is not valid: {fault}")
    return SavedTexts(vocab, fingerprint, [symbols], owners)


def _fault(symbols: memoryview, owners: Sequence[tuple[int, int, bytes]], vocab: int) -> str:
    """The fault of texts; "" if there is none."""
    numbers = [number for number, *_ in owners]
    if len(set(numbers)) < len(numbers) or max(numbers, default=0) >= most_salts(vocab):
        return "expected a number of its own for each salt"
    if len({digest for *_, digest in owners}) < len(owners) or any(age >= len(symbols) for _, age, _ in owners):
        return "expected a newest token for each salt"
    place = suffixes.foreign(symbols, vocab, numbers, impl=suffixes.best())
    if place < len(symbols):
        return f"expected token ids from 0 to {vocab - 1}, of the salts that it lists, got {symbols[place]:#x}"
    return ""
