"""Fetches only the headers of weight files on the hub, which is enough for a memory plan."""

from collections.abc import Mapping
from pathlib import Path

from models.gguf.reader import header_bytes

FIRST, GROWTH = 1 << 20, 8  # bytes requested first, and the factor by which they grow if the header is longer
MAX_HEADER = 1 << 28  # bytes
SUFFIXES = ".safetensors", ".gguf"


def write_outline(url: str, headers: Mapping[str, str], path: Path) -> int:
    """Write a file as large as one on the hub, with its header and a hole for everything else, which takes no disk.

    Args:
        url: the file's.
        headers: headers of the requests, with the token.
        path: the file to write.

    Returns:
        The size of the file, bytes.

    Raises:
        CheckpointError, ValueError: the header is damaged, or longer than `MAX_HEADER`.
        HfHubHTTPError, OSError: a request of the library failed.
    """
    count = FIRST
    while True:
        start, size = _start(url, headers, count)
        length = header_bytes(start, path) if path.suffix == ".gguf" else 8 + int.from_bytes(start[:8], "little")
        if length is not None and length <= len(start):
            break
        if len(start) >= size:  # the code that opens it reports the fault
            length = size
            break
        if count >= MAX_HEADER or (length or 0) > MAX_HEADER:
            raise ValueError(f"{path.name} has a header of more than {MAX_HEADER >> 20} MiB")
        count = length or count * GROWTH
    with path.open("wb") as file:
        file.write(start[:length])
        file.truncate(size)
    return size


def _start(url: str, headers: Mapping[str, str], count: int) -> tuple[bytes, int]:
    """The first `count` bytes of a file (fewer if it is shorter), and its size."""
    from huggingface_hub import get_session
    from huggingface_hub.utils import hf_raise_for_status

    asked = {**headers, "Range": f"bytes=0-{count - 1}", "Accept-Encoding": "identity"}
    data = bytearray()
    with get_session().stream("GET", url, headers=asked) as response:
        hf_raise_for_status(response)
        size = response.headers.get("Content-Range", "").rpartition("/")[2] or response.headers.get("Content-Length")
        for part in response.iter_bytes():
            data += part
            if len(data) >= count:  # a server that knows no ranges sends it all
                break
    return bytes(data[:count]), int(size or "")
