"""Files of tokens: what is written is read, in the layout that earlier versions wrote; other files are refused."""

import struct
import zlib
from pathlib import Path

import pytest

from models.checkpoint.token_files import ORDER, TokenFileKind, TokenFileWriter

KIND = TokenFileKind("list", b"COPPICET", 3, "QI", padding=4)
DIGEST = "ab" * 32


def size(numbers: int, names: int) -> int:
    return 4 * numbers + names


def written(path: Path, fingerprint: str = DIGEST) -> bytes:
    with path.open("wb") as file:
        writer = TokenFileWriter(KIND, file)
        for part in (struct.pack("=2I", 5, 6), b"", memoryview(b"abc")):
            writer.add(part)
        writer.finish(900, fingerprint, 2, 3)
    return path.read_bytes()


@pytest.mark.parametrize("fingerprint", [DIGEST, ""])
def test_what_is_written_is_read(tmp_path: Path, fingerprint: str):
    written(tmp_path / "a", fingerprint)
    found = KIND.read(tmp_path / "a", size)
    assert (found.vocab_size, found.fingerprint, [*found.counts]) == (900, fingerprint, [2, 3])
    assert bytes(found.body) == struct.pack("=2I", 5, 6) + b"abc"


def test_the_layout(tmp_path: Path):
    body = struct.pack("=2I", 5, 6) + b"abc"
    head = struct.pack("=8sHHIQI32sII", b"COPPICET", ORDER, 3, 900, 2, 3, b"\xab" * 32, 0, zlib.crc32(body))
    assert written(tmp_path / "a") == head + struct.pack("=I", zlib.crc32(head)) + body


def test_other_files_are_refused(tmp_path: Path):
    path = tmp_path / "a"
    raw = written(path)
    cases = {
        b"": "no list",
        b"x" * 200: "no list",
        raw[:-1]: "damaged",
        raw + b"x": "damaged",
        raw[:-1] + b"x": "damaged",
        raw[:30] + b"x" + raw[31:]: "damaged",
        raw[:8] + struct.pack("=H", 0x0201) + raw[10:]: "another version or machine",
        raw[:10] + struct.pack("=H", 4) + raw[12:]: "another version or machine",
    }
    for content, message in cases.items():
        path.write_bytes(content)
        with pytest.raises(ValueError, match=message):
            KIND.read(path, size)
    with pytest.raises(ValueError, match="the list cannot be read: No such file"):
        KIND.read(tmp_path / "absent", size)
